"""IcebergSink on S3: a table in an object store, with a SQL catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

from dagster_checkpoints.sinks import IcebergSink, SinkContext, SinkFenced, SinkUnavailable
from resources.embedded_s3 import EmbeddedS3

BATCH: Any = SimpleNamespace()
WAREHOUSE = "s3://lake/warehouse"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedS3]:
    with EmbeddedS3("lake") as s3:
        yield s3


@pytest.fixture
def properties(server: EmbeddedS3, tmp_path: Path) -> dict[str, str]:
    """The properties of a catalog of its own, with the server's credentials."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "s3.endpoint": server.endpoint_url,
        "s3.access-key-id": server.environment["AWS_ACCESS_KEY_ID"],
        "s3.secret-access-key": server.environment["AWS_SECRET_ACCESS_KEY"],
        "s3.region": "us-east-1",
    }


def _opened(properties: dict[str, str], epoch: int, table: str = "shops.sales") -> IcebergSink:
    sink = IcebergSink(table, warehouse=WAREHOUSE, catalog=properties)
    sink.open(SinkContext("flights", "delays", "0", 0, 1, 1, f"a{epoch}", history="h1", epoch=epoch))
    return sink


def _staged(sink: IcebergSink, folder: Path, checkpoint_id: int) -> str:
    file = folder / f"{checkpoint_id}.parquet"
    pq.write_table(pa.table({"n": pa.array([checkpoint_id], pa.int64())}), file)
    sink.write(BATCH, [str(file)], checkpoint_id)
    file.unlink()
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    return transaction


def test_rows_are_committed_taken_back_and_restored(properties: dict[str, str], tmp_path: Path) -> None:
    def rows() -> list[int]:
        catalog = load_catalog("default", **properties)
        return sorted(catalog.load_table("shops.sales").scan().to_arrow()["n"].to_pylist())

    sink = _opened(properties, 1)
    assert sink.location == f"iceberg:default/sqlite{tmp_path}/catalog.db/{WAREHOUSE}/shops/sales"
    assert sink.uri is None
    sink.start_new()
    for checkpoint_id in (1, 2):
        sink.commit(_staged(sink, tmp_path, checkpoint_id))
    load_catalog("default", **properties).load_table("shops.sales").append(pa.table({"n": [100]}))
    waiting = _staged(sink, tmp_path, 3)
    savepoint = {name: file.read_bytes() for name, file in sink.transaction_files(waiting).items()}
    assert rows() == [1, 2, 100]
    back = _opened(properties, 2)
    back.recover([], restored=1)
    assert rows() == [1, 100]
    with pytest.raises(SinkFenced, match=r"epoch 1.*epoch 2"):
        sink.commit(waiting)
    forth = _opened(properties, 3)
    for name, data in savepoint.items():
        (tmp_path / name).write_bytes(data)
    forth.restore_transaction(waiting, {name: tmp_path / name for name in savepoint})
    forth.recover([waiting], restored=3)
    assert rows() == [1, 2, 3, 100]
    assert forth.commit(waiting).version is None
    for each in (sink, back, forth):
        each.close()


def test_a_server_that_does_not_answer_is_named_without_credentials(properties: dict[str, str], tmp_path: Path) -> None:
    away = {**properties, "s3.endpoint": "http://127.0.0.1:9", "s3.secret-access-key": "hidden", "s3.connect-timeout": "1"}
    with pytest.raises(SinkUnavailable, match="another attempt may succeed") as failed:
        _staged(_opened(away, 1, "shops.unreached"), tmp_path, 1)
    assert "hidden" not in str(failed.value)
    assert not failed.value.repeats
