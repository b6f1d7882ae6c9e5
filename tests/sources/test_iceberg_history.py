"""The snapshots of an Iceberg table as a source reads them, and which tables are refused by name. Written by `pyiceberg`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, StructType, TimeType

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.sources import (
    InvalidSource,
    SourceColumnsChanged,
    SourceRowsChanged,
    SourceRowsLost,
    SourceUnavailable,
    read_iceberg_table,
)
from dagster_checkpoints.sources.iceberg.history import NOTHING, IcebergHistory
from dagster_checkpoints.systems.iceberg_catalogs import catalog_settings
from resources.embedded_s3 import EmbeddedS3

SCHEMA = Schema(NestedField(1, "n", LongType(), required=False), NestedField(2, "word", StringType(), required=False))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Any]:
    """An empty table, `shop.events`, in the warehouse `<tmp_path>`."""
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    yield catalog.create_table("shop.events", SCHEMA)
    catalog.close()


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64()), "word": [f"w{n}" for n in numbers]})


def opened(warehouse: Path, changed_rows: Any = "refuse") -> IcebergHistory:
    history = IcebergHistory(("shop", "events"), catalog_settings(warehouse, None), changed_rows)
    history.open()
    return history


def numbers(files: Any) -> list[int]:
    return sorted(n for file in files for n in pq.ParquetFile(file.path.removeprefix("file:")).read()["n"].to_pylist())


def newest(table: Any) -> int:
    return int(table.refresh().current_snapshot().snapshot_id)


def test_a_snapshot_has_all_rows_and_a_later_one_those_that_it_adds(table: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dagster_checkpoints.sources.iceberg.history._POLL_SECONDS", 0.0)
    history = opened(tmp_path)
    assert history.newest() == NOTHING and history.files(NOTHING) == [] and history.after(NOTHING) is None
    ids = []
    for number in range(3):
        table.append(rows(number, 10 + number))
        ids.append(newest(table))
    assert [history.after(version) for version in (NOTHING, *ids)] == [*ids, None]
    assert history.newest() == ids[-1]
    assert numbers(history.files(ids[1])) == [0, 1, 10, 11]
    assert numbers(history.added(ids[1])) == [1, 11]
    assert numbers(history.files(ids[2])) == [0, 1, 2, 10, 11, 12]


def test_deleted_and_changed_rows(table: Any, tmp_path: Path) -> None:
    table.append(rows(1, 2))
    table.append(rows(3))
    table.delete("n = 3")  # a whole file
    whole = newest(table)
    table.delete("n = 1")  # a part of a file
    part = newest(table)
    table.append(rows(4))
    history, skipping = opened(tmp_path), opened(tmp_path, "skip")
    for version in (whole, part):
        with pytest.raises(SourceRowsChanged, match=rf"snapshot {version} \((delete|overwrite)\) deletes or changes rows"):
            history.added(version)
        assert skipping.added(version) == []
    assert numbers(history.added(newest(table))) == [4]
    assert numbers(history.files(newest(table))) == [2, 4]


def test_columns(table: Any, tmp_path: Path) -> None:
    table.append(rows(1))
    history = opened(tmp_path)
    with table.update_schema() as update:
        update.add_column("colour", StringType())
    table.append(rows(2).append_column("colour", [["red"]]))
    history.newest()
    history.open()  # by a query, whose plan was made before
    for call in (lambda: history.added(newest(table)), history.check_columns):
        with pytest.raises(SourceColumnsChanged, match=r"found rows with other columns: colour\. The next attempt") as raised:
            call()
        assert not raised.value.repeats
    assert numbers(opened(tmp_path).added(newest(table))) == [2]
    known = opened(tmp_path)
    with table.update_schema() as update:
        update.rename_column("colour", "color")
    table.append(rows(3).append_column("color", [["blue"]]))
    known.newest()
    known.check_columns()  # a renamed column is the same column until the next start
    assert numbers(known.added(newest(table))) == [3]
    with table.update_spec() as update:
        update.add_identity("word")
    table.append(rows(4).append_column("color", [["blue"]]))
    known.newest()
    with pytest.raises(SourceColumnsChanged, match=r"partitioned in another way \(partition spec 1\)"):
        known.added(newest(table))


def test_the_backlog_in_older_columns(table: Any, tmp_path: Path) -> None:
    """Read up to a snapshot; then come rows in the old columns, a change of columns, and rows in the new ones."""
    with table.update_schema() as update:
        update.add_column("size", IntegerType())
        update.add_column("nested", StructType(NestedField(20, "x", LongType(), required=False)))

    def append(**columns: Any) -> int:
        schema = table.refresh().schema().as_arrow()
        values = {field.name: pa.array([columns.get(field.name)], field.type) for field in schema}
        table.append(pa.table(values, schema))
        return newest(table)

    old = append(n=1, size=1, nested={"x": 1})
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.update_column("size", LongType())
        update.add_column(("nested", "y"), StringType())
        update.delete_column("word")
    new = append(n=2, size=1 << 40, nested={"x": 2, "y": "y"})
    history = opened(tmp_path)
    assert numbers(history.added(old)) == [1] and numbers(history.added(new)) == [2]
    one, two = (json.loads(file.columns) for file in history.resolved([*history.added(old), *history.added(new)]))
    assert one == two == history.schema


def test_a_default_for_older_files_is_refused(table: Any, tmp_path: Path) -> None:
    [file] = (tmp_path / "shop/events/metadata").glob("*.metadata.json")
    file.write_text(file.read_text().replace('"name":"word",', '"name":"word","initial-default":"x",'))
    with pytest.raises(InvalidSource, match="found a default for word"):
        opened(tmp_path)


def test_expired_and_rolled_back_snapshots(table: Any, tmp_path: Path) -> None:
    ids = []
    for number in range(4):
        table.append(rows(number))
        ids.append(newest(table))
    history = opened(tmp_path)
    assert [history.after(version) for version in (NOTHING, *ids)] == [*ids, None]
    for expired in ids[:2]:
        table.maintenance.expire_snapshots().by_id(expired).commit()
    history.newest()
    assert history.after(ids[2]) == ids[3]
    gone = [lambda: history.after(NOTHING), lambda: history.after(ids[0]), lambda: history.after(ids[1])]
    for call in (*gone, lambda: history.files(ids[0]), lambda: history.added(ids[1])):
        with pytest.raises(SourceRowsLost, match="make a new start, which reads the whole table"):
            call()
    table.manage_snapshots().rollback_to_snapshot(ids[2]).commit()
    history.newest()
    with pytest.raises(
        SourceRowsLost, match=f"after {ids[3]}, up to which it was read, found that they expired, or that the table"
    ):
        history.after(ids[3])


def test_a_table_on_s3(tmp_path: Path) -> None:
    with EmbeddedS3("lake") as s3:
        properties = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": "s3://lake/warehouse",
            "s3.endpoint": s3.endpoint_url,
            "s3.access-key-id": s3.credentials["aws_access_key_id"],
            "s3.secret-access-key": s3.credentials["aws_secret_access_key"],
            "s3.region": "us-east-1",
        }
        catalog = load_catalog("default", **properties)
        catalog.create_namespace("shop")
        written = catalog.create_table("shop.events", SCHEMA)
        written.append(rows(1))
        history = IcebergHistory(("shop", "events"), catalog_settings(None, properties), "refuse")
        history.open()
        [file] = history.files(history.newest())
        bucket, _, key = file.path.removeprefix("s3a://").partition("/")
        assert (bucket, key) == ("lake", written.inspect.files()["file_path"].to_pylist()[0].removeprefix("s3://lake/"))
        assert s3.client().head_object(Bucket=bucket, Key=key)["ContentLength"] > 0
        away = {**properties, "s3.endpoint": "http://127.0.0.1:9", "s3.secret-access-key": "hidden", "s3.connect-timeout": "1"}
        with pytest.raises(SourceUnavailable, match="expected to read the metadata of the Iceberg table") as raised:
            IcebergHistory(("shop", "events"), catalog_settings(None, away), "refuse").open()
        assert "hidden" not in str(raised.value) and not raised.value.repeats
        catalog.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"table": "events"}, r"expected a table's name with its namespace, 'shop\.events', found 'events'"),
        ({"table": "shop.others"}, r"read_iceberg_table\('shop\.others'\): expected an Iceberg table, found none of this name"),
        ({"table": "shop.clocks"}, r"expected columns whose type Spark has, found at \(time\)"),
        ({"warehouse": "nowhere"}, r"expected a warehouse with a catalog, found none"),
        ({"warehouse": None}, r"^read_iceberg_table: expected a warehouse or a catalog, found no catalog"),
        ({"files_per_trigger": 0}, r"expected files_per_trigger of at least 1, found 0"),
        ({"changed_rows": "ignore"}, r"expected changed_rows 'refuse' or 'skip', found 'ignore'"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(table: Any, tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    table.catalog.create_table("shop.clocks", Schema(NestedField(1, "at", TimeType(), required=False)))
    with pytest.raises(InvalidSource, match=text) as raised:
        read_iceberg_table(None, **{"table": "shop.events", "warehouse": tmp_path, **arguments})  # type: ignore[arg-type]
    assert raised.value.repeats


def test_a_snapshot_that_does_not_exist_is_refused(table: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceRowsLost, match="expected snapshot 7, found that it expired"):
        read_iceberg_table(None, "shop.events", warehouse=tmp_path, snapshot=7)  # type: ignore[arg-type]


def test_the_page_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/sources/iceberg.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sources/iceberg.md", "exec"), names)
    (events,) = Pipeline("shop", [names["events"]]).stages
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSource, match="expected a warehouse with a catalog, found none"):
        events.transform(SimpleNamespace(spark=None))  # type: ignore[arg-type]
    arguments = set(re.findall(r"^\| `(\w+)` \|", page.split("## How it is read")[0], re.MULTILINE))
    assert arguments == set(inspect.signature(read_iceberg_table).parameters)
