"""IcebergSink on S3: a table in an object store, with a SQL catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from dagster_checkpoints.sinks import IcebergSink, SinkUnavailable
from resources.embedded_s3 import EmbeddedS3
from tests.sinks.sink_instance import check_commits_and_restores, opened, staged

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


def _sink(properties: dict[str, str], table: str = "shops.sales") -> IcebergSink:
    return IcebergSink(table, warehouse=WAREHOUSE, catalog=properties)


def test_rows_are_committed_taken_back_and_restored(properties: dict[str, str], tmp_path: Path) -> None:
    def rows() -> list[int]:
        catalog = load_catalog("default", **properties)
        return sorted(catalog.load_table("shops.sales").scan().to_arrow()["n"].to_pylist())

    sink = _sink(properties)
    assert sink.location == f"iceberg:default/sqlite{tmp_path}/catalog.db/{WAREHOUSE}/shops/sales"
    assert sink.uri is None

    def append(table: pa.Table) -> None:
        load_catalog("default", **properties).load_table("shops.sales").append(table)

    check_commits_and_restores(sink.new_instance, rows, append, tmp_path)


def test_a_server_that_does_not_answer_is_named_without_credentials(properties: dict[str, str], tmp_path: Path) -> None:
    away = {**properties, "s3.endpoint": "http://127.0.0.1:9", "s3.secret-access-key": "hidden", "s3.connect-timeout": "1"}
    with pytest.raises(SinkUnavailable, match="another attempt may succeed") as failed:
        staged(opened(_sink(away, "shops.unreached"), 1), tmp_path, 1)
    assert "hidden" not in str(failed.value)
    assert not failed.value.repeats
