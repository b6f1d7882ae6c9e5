"""IcebergSink: rows become visible exactly once, in a table that other programs may write to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import DecimalType, DoubleType, LongType

from dagster_checkpoints.sinks import (
    IcebergSink,
    InvalidSinkPath,
    SinkColumnsMismatch,
    SinkLibraryMissing,
    SinkTargetChanged,
    SinkUnavailable,
)
from dagster_checkpoints.systems.iceberg_catalogs import catalog_settings
from tests.sinks.iceberg_lake import NAME, Lake
from tests.sinks.sink_instance import BATCH, context


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_the_snapshot_says_who_committed_what(lake: Lake) -> None:
    sink = lake.opened()
    sink.commit(lake.staged(sink, 42, 1))
    snapshot = lake.table.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    summary = {
        name: snapshot.summary[f"dagster-checkpoints.{name}"]
        for name in ("pipeline", "stage", "instance", "job", "checkpoint", "epoch")
    }
    assert list(summary.values()) == ["flights", "delays", "0", "1.h1", "42", "1"]
    assert lake.table.properties["dagster-checkpoints/flights/delays/0/job-1.h1/since-0"] == "42"


def test_another_sink_creates_the_namespace_at_the_same_moment(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a stage and of its refused rows do with their first rows."""
    sink = lake.opened()
    real = SqlCatalog.namespace_exists

    def seen_before(self: SqlCatalog, identifier: Any) -> bool:
        monkeypatch.setattr(SqlCatalog, "namespace_exists", real)
        lake.catalog.create_namespace("shops")
        return False

    monkeypatch.setattr(SqlCatalog, "namespace_exists", seen_before)
    sink.commit(lake.staged(sink, 1, 5))
    assert SqlCatalog.namespace_exists is real
    found = lake.found()
    assert found is not None and found.to_pylist() == [{"n": 5}]


def test_a_commit_whose_outcome_is_unknown_is_looked_up(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened()
    text = lake.staged(sink, 1, 1)
    real = SqlCatalog.commit_table

    def unanswered(self: SqlCatalog, *arguments: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", real)
        real(self, *arguments)
        raise CommitStateUnknownException("gateway timeout")

    monkeypatch.setattr(SqlCatalog, "commit_table", unanswered)
    assert (sink.commit(text).rows, lake.rows()) == (1, [1])


def test_metadata_does_not_grow_with_each_commit(lake: Lake) -> None:
    sink = lake.opened()
    sink.commit(lake.staged(sink, 1, 1))
    with lake.table.transaction() as change:
        change.set_properties({"commit.manifest.min-count-to-merge": "2", "write.metadata.previous-versions-max": "2"})
    for checkpoint_id in range(2, 8):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    table = lake.table
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.io)) == 1
    assert len(list(lake.path.glob("shops/sales/metadata/*.metadata.json"))) == 3
    lake.opened(attempt="a2").recover([], restored=4)
    assert lake.rows() == [1, 2, 3, 4]
    lake.opened(attempt="a3").recover([], restored=6)
    assert lake.rows() == [1, 2, 3, 4, 5, 6]


def test_what_the_catalog_names_is_on_disk_before(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened()
    text = lake.staged(sink, 1, 1)
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    sink.commit(text)
    snapshot = lake.table.current_snapshot()
    assert snapshot is not None
    manifests = [manifest.manifest_path for manifest in snapshot.manifests(lake.table.io)]
    for name in (lake.table.metadata_location, snapshot.manifest_list, *manifests):
        path = Path(name.removeprefix("file://"))
        assert path.exists() and {path, path.parent} <= {*synced}


def test_a_file_that_was_removed_is_added_again_under_another_name(lake: Lake) -> None:
    """The expiry of a snapshot may delete what the snapshot has removed."""
    sink = lake.opened()
    for checkpoint_id in range(1, 5):
        sink.commit(lake.staged(sink, checkpoint_id, checkpoint_id))
    lake.opened(attempt="a2").recover([], restored=2)
    removed = lake.table.current_snapshot()
    lake.opened(attempt="a3").recover([], restored=4)
    assert removed is not None
    io = lake.table.io
    entries = [entry for manifest in removed.manifests(io) for entry in manifest.fetch_manifest_entry(io, discard_deleted=False)]
    gone = [entry.data_file.file_path for entry in entries if entry.status == ManifestEntryStatus.DELETED]
    assert len(gone) == 2
    for path in gone:
        Path(path.removeprefix("file://")).unlink()
    assert lake.rows() == [1, 2, 3, 4]
    lake.opened(attempt="a4").recover([], restored=3)
    assert lake.rows() == [1, 2, 3]


# Tables and rows that do not fit


def test_tables_that_do_not_take_the_stages_files_are_refused(lake: Lake) -> None:
    lake.append(1)
    with lake.table.update_spec() as spec:
        spec.add_field("n", BucketTransform(4), "bucket")
    for act in (lake.opened, lambda: IcebergSink(NAME, warehouse=lake.path).check_new_start(context())):
        with pytest.raises(SinkColumnsMismatch, match=r"'bucket' with the transform bucket\[4\]"):
            act()
    lake.catalog.drop_table(NAME)
    lake.catalog.create_table(NAME, pa.schema({"n": pa.int64()}), properties={"format-version": "1"})
    with pytest.raises(SinkColumnsMismatch, match="format version 1"):
        lake.opened()
    with lake.table.transaction() as change:
        change.upgrade_table_version(2)
        change.set_properties({"schema.name-mapping.default": '[{"field-id": 1, "names": ["other"]}]'})
    with pytest.raises(SinkColumnsMismatch, match=r"name-mapping\.default without column 'n'"):
        lake.opened()


def test_a_column_that_is_dropped_before_the_commit_is_named(lake: Lake) -> None:
    sink = lake.opened()
    text = lake.staged(sink, 1, n=pa.array([1], pa.int64()), shop=pa.array(["north"]))
    with lake.table.update_schema() as update:
        update.delete_column("shop")
    with pytest.raises(SinkColumnsMismatch, match="'shop': expected a column of the table, found that it was dropped"):
        sink.commit(text)
    assert lake.rows() == []


@pytest.mark.parametrize(
    "change",
    [lambda update: update.delete_column("shop"), lambda update: update.rename_column("shop", "store")],
    ids=["dropped", "renamed"],
)
def test_a_column_that_is_gone_before_rows_come_back_is_named(lake: Lake, change: Callable[[Any], object]) -> None:
    sink = lake.opened()
    for checkpoint_id in (1, 2):
        sink.commit(lake.staged(sink, checkpoint_id, n=pa.array([checkpoint_id], pa.int64()), shop=pa.array(["north"])))
    lake.opened(attempt="a2").recover([], restored=1)
    with lake.table.update_schema() as update:
        change(update)
    with pytest.raises(SinkColumnsMismatch, match="'shop': expected a column of the table, found that it was dropped"):
        lake.opened(attempt="a3").recover([], restored=2)
    assert lake.rows() == [1]


def test_rows_come_back_to_a_column_that_was_made_wider(lake: Lake) -> None:
    sink = lake.opened()
    for checkpoint_id in (1, 2):
        sink.commit(lake.staged(sink, checkpoint_id, n=pa.array([checkpoint_id], pa.int32())))
    lake.opened(attempt="a2").recover([], restored=1)
    with lake.table.update_schema() as update:
        update.update_column("n", LongType())
    lake.opened(attempt="a3").recover([], restored=2)
    assert lake.rows() == [1, 2]


def test_rows_are_not_doubled_after_another_program_has_removed_the_sinks_properties(lake: Lake) -> None:
    sink = lake.opened()
    sink.commit(lake.staged(sink, 1, 1))
    text = lake.staged(sink, 2, 2)
    sink.commit(text)
    numbers = {name: number for name, number in lake.table.properties.items() if name.startswith("dagster-checkpoints/")}
    with lake.table.transaction() as transaction:
        transaction.remove_properties(*numbers)
    with pytest.raises(SinkTargetChanged, match=r"no rows of checkpoint 2 in the table.*properties.*found 1 of their files"):
        lake.opened(attempt="a2").recover([text], restored=2)
    assert lake.rows() == [1, 2]
    with lake.table.transaction() as transaction:
        transaction.set_properties(numbers)
    again = lake.opened(attempt="a3")
    again.recover([text], restored=2)
    again.commit(lake.staged(again, 3, 3))
    assert lake.rows() == [1, 2, 3]


def test_committed_files_are_not_discarded_after_another_program_has_removed_the_sinks_properties(lake: Lake) -> None:
    sink = lake.opened()
    texts = []
    for number in (1, 2, 3):
        texts.append(lake.staged(sink, number, number))
        sink.commit(texts[-1])
    numbers = {name: number for name, number in lake.table.properties.items() if name.startswith("dagster-checkpoints/")}
    with lake.table.transaction() as transaction:
        transaction.remove_properties(*numbers)
    for restored, named in ((3, []), (3, texts[2:]), (2, texts[1:2]), (1, texts[:1])):
        with pytest.raises(SinkTargetChanged, match=r"found 1 of their files there.*Nothing was changed"):
            lake.opened(attempt=f"a{restored}{len(named)}").recover(named, restored=restored)
        assert lake.rows() == [1, 2, 3]


def test_a_column_with_the_name_of_a_structures_field_is_refused(lake: Lake) -> None:
    with pytest.raises(SinkColumnsMismatch, match=r"multiple fields for name a\.b.*rename one"):
        lake.staged(lake.opened(), 1, **{"a": pa.array([{"b": 1}]), "a.b": pa.array([2])})


@pytest.mark.parametrize("settings", [{}, {"key": "k"}, {"partition_by": "k"}], ids=str)
def test_staged_rows_are_committed_to_columns_that_were_made_wider(lake: Lake, settings: dict[str, Any]) -> None:
    """Iceberg makes no column narrower again, so the change could not be undone."""

    def values(*numbers: int, wide: bool = False) -> dict[str, pa.Array]:
        count = len(numbers)
        return {
            "k": pa.array(numbers, pa.int64() if wide else pa.int32()),
            "d": pa.array([1] * count, pa.decimal128(20 if wide else 10, 2)),
            "s": pa.array([{"x": 0.5}] * count, pa.struct({"x": pa.float64() if wide else pa.float32()})),
        }

    sink = lake.opened(settings=settings)
    sink.commit(lake.staged(sink, 1, **values(1, 2)))
    text = lake.staged(sink, 2, **values(2, 3))
    with lake.table.update_schema() as update:
        update.update_column("k", LongType())
        update.update_column("d", DecimalType(20, 2))
        update.update_column(("s", "x"), DoubleType())
    lake.append(**values(2**32 + 3, wide=True))
    again = lake.opened(settings=settings, attempt="a2")
    again.recover([text], restored=2)
    again.commit(lake.staged(again, 3, **values(3, 4, wide=True)))
    found = lake.table.scan().to_arrow()
    expected = [1, 2, 3, 4, 2**32 + 3] if "key" in settings else [1, 2, 2, 3, 3, 4, 2**32 + 3]
    assert sorted(found["k"].to_pylist()) == expected
    assert {row["x"] for row in found["s"].to_pylist()} == {0.5} and {str(each) for each in found["d"].to_pylist()} == {"1.00"}
    assert len(lake.table.scan("k = 3").to_arrow()) == expected.count(3)


def test_settings_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for table, settings in (
        ("sales", {"warehouse": "lake"}),
        ("a..b", {"warehouse": "lake"}),
        (NAME, {}),
        (NAME, {"warehouse": ""}),
        (NAME, {"warehouse": "s3://bucket/lake"}),
        (NAME, {"warehouse": "s3://key:secret@bucket/lake", "catalog": "lake"}),
        (NAME, {"catalog": {"uri": "https://user:secret@host/catalog"}}),
        (NAME, {"warehouse": "50%"}),
        (NAME, {"warehouse": "file://host/lake"}),
    ):
        with pytest.raises(InvalidSinkPath) as refused:
            IcebergSink(table, **settings)  # type: ignore[arg-type]
        assert "secret" not in str(refused.value)
    for setting in ({"at_new_start": "append"}, {"schema_evolution": "merge"}):
        with pytest.raises(ValueError, match="expected IcebergSink"):
            IcebergSink(NAME, warehouse="lake", **setting)  # type: ignore[arg-type]
    monkeypatch.setattr("dagster_checkpoints.sinks.iceberg.sink.find_spec", lambda name: None)
    with pytest.raises(SinkLibraryMissing, match=r"pip install 'dagster-checkpoints\[iceberg\]'"):
        IcebergSink(NAME, warehouse="lake")


def test_a_catalog_is_named_without_its_credentials(tmp_path: Path) -> None:
    rest = {
        "type": "rest",
        "uri": "http://127.0.0.1:9/catalog",
        "oauth2-server-uri": "http://127.0.0.1:9/token",
        "credential": "id:hidden",
        "name": "prod",
    }
    sink = IcebergSink(NAME, warehouse="s3://lake", catalog=rest)
    assert sink.location == "iceberg:prod/http/127.0.0.1:9/catalog/s3://lake/shops/sales"
    assert sink.uri is None
    with pytest.raises(SinkUnavailable, match="Check the catalog") as unreached:
        sink.open(context())
    sql = IcebergSink(
        NAME, catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/none/catalog.db", "s3.secret-access-key": "none"}
    )
    with pytest.raises(InvalidSinkPath, match=r"unable to open database file.*Create its directory") as unopened:
        sql.open(context())
    for text in (repr(sink), str(sink._catalog), str(unreached.value), str(unopened.value)):
        assert "hidden" not in text
    server = catalog_settings(None, {"uri": "postgresql://me:s%40cret@db/lake"})
    assert server.place == "iceberg:default/postgresql/db/lake"
    assert server.without_credentials("s@cret and s%40cret of me") == "*** and *** of me"


def test_another_catalog_by_its_properties(lake: Lake, tmp_path: Path) -> None:
    properties = {"name": "prod", "type": "sql", "uri": f"sqlite:///{tmp_path}/other.db"}
    sink = IcebergSink(NAME, warehouse=tmp_path / "elsewhere", catalog=properties)
    sink.open(context())
    sink.commit(lake.staged(sink, 1, 7))
    sink.close()
    name = properties.pop("name")
    assert load_catalog(name, **properties).load_table(NAME).scan().to_arrow()["n"].to_pylist() == [7]
    assert list(tmp_path.glob("elsewhere/shops/sales/dagster-checkpoints/**/*.parquet"))


def test_arrays_in_sparks_older_format_are_written_again(lake: Lake) -> None:
    """With spark.sql.parquet.writeLegacyFormat the elements of an array have another name in the file."""
    arrays = pa.array([[1, None], None], pa.list_(pa.field("array", pa.int64())))
    sink = lake.opened(settings={"key": "n"})
    for checkpoint_id in (1, 2):
        segment = lake.segment(0)
        rows = pa.table({"n": pa.array([checkpoint_id, 9], pa.int64()), "xs": arrays})
        pq.write_table(rows, segment, use_compliant_nested_type=False)
        sink.write(BATCH, [segment], checkpoint_id)
        sink.commit(sink.pre_commit(checkpoint_id) or "")
    assert lake.sorted_rows("n", "xs") == [(1, [1, None]), (2, [1, None]), (9, None)]


@pytest.mark.parametrize("settings", [{}, {"key": "a"}, {"partition_by": "day"}], ids=str)
def test_field_ids_of_another_table_are_not_those_of_this_one(lake: Lake, settings: dict[str, Any]) -> None:
    """Spark writes the ids that the metadata of its columns names (parquet.field.id): readers would exchange columns."""

    def field(name: str, kind: Any, number: int) -> Any:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    nested = pa.struct([field("x", pa.int64(), 6), field("y", pa.int64(), 5)])
    columns = [field("a", pa.int64(), 2), field("b", pa.int64(), 1), field("s", nested, 3), field("day", pa.string(), 4)]
    sink = lake.opened(settings=settings)
    for checkpoint_id in (1, 2):
        segment = lake.segment(0)
        values = [[checkpoint_id], [10], [{"x": 3, "y": 4}], ["d"]]
        pq.write_table(pa.table(values, schema=pa.schema(columns)), segment)
        sink.write(BATCH, [segment], checkpoint_id)
        sink.commit(sink.pre_commit(checkpoint_id) or "")
    assert lake.sorted_rows("a", "b", "s") == [(n, 10, {"x": 3, "y": 4}) for n in (1, 2)]


def test_a_partitioned_table_gets_a_file_for_each_partition(lake: Lake) -> None:
    sink = lake.opened(settings={"partition_by": ["day", "kind", "amount"]})
    sink.start_new()
    rows = {
        "n": pa.array([1, 2, 3, 4], pa.int64()),
        "day": pa.array([date(2024, 1, 2), date(2024, 1, 1), None, date(2024, 1, 2)]),
        "kind": pa.array(["a b/ü=", "", None, "a b/ü="]),
        "amount": pa.array([Decimal("1.50")] * 4, pa.decimal128(10, 2)),
    }
    sink.commit(lake.staged(sink, 1, **rows))
    assert lake.rows() == [1, 2, 3, 4]
    assert [field.name for field in lake.table.spec().fields] == ["day", "kind", "amount"]
    assert len(list(lake.table.scan().plan_files())) == 3
    assert len(list(lake.table.scan("day = '2024-01-02'").plan_files())) == 1
    found = lake.table.scan("kind = 'a b/ü=' and amount = 1.50").to_arrow().sort_by("n").to_pylist()
    assert found == [{"n": n, "day": date(2024, 1, 2), "kind": "a b/ü=", "amount": Decimal("1.50")} for n in (1, 4)]
    assert lake.table.scan("kind = ''").to_arrow()["n"].to_pylist() == [2]
    back = lake.opened(attempt="a2")
    back.commit(lake.staged(back, 2, **{name: column.slice(0, 1) for name, column in rows.items()}))
    assert lake.rows() == [1, 1, 2, 3, 4]
    lake.opened(attempt="a3").recover([], restored=1)
    assert lake.rows() == [1, 2, 3, 4]


# The page


def test_the_page_declares_a_sink_that_writes_its_rows(lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sinks/iceberg.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sinks/iceberg.md", "exec"), names)
    sink = names["sales"].sink.new_instance()
    sink.open(context())
    sink.start_new()
    sink.write(BATCH, [lake.segment(shop=pa.array(["north"]), amount=pa.array([1.5]))], 0)
    sink.commit(sink.pre_commit(1))
    assert lake.table.scan().to_arrow().to_pylist() == [{"shop": "north", "amount": 1.5}]
