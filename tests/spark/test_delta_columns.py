"""Columns of a Delta table that older data files have with other types, or not at all: by the table's log, also in a backlog."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sources import SourceColumnsUnreadable, read_delta_table
from dagster_checkpoints.spark.job.events import JobRestarting

WIDENED: dict[str, tuple[pa.DataType, Any, str, Any]] = {
    "byte": (pa.int8(), -7, "long", -7),
    "short": (pa.int16(), 7, "integer", 7),
    "whole": (pa.int32(), 2**31 - 1, "long", 2**31 - 1),
    "to_double": (pa.int32(), 2**31 - 1, "double", float(2**31 - 1)),
    "to_decimal": (pa.int32(), -5, "decimal(12,2)", Decimal("-5.00")),
    "long": (pa.int64(), 2**62, "decimal(20,0)", Decimal(2**62)),
    "real": (pa.float32(), 1.5, "double", 1.5),
    "price": (pa.decimal128(5, 2), Decimal("123.45"), "decimal(20,5)", Decimal("123.45000")),
    "day": (pa.date32(), dt.date(1969, 12, 30), "timestamp_ntz", dt.datetime(1969, 12, 30)),
    "s": (pa.struct([("i", pa.int32())]), {"i": 4}, "struct", {"i": 4}),
}


def widen(table: Path, **kinds: str) -> None:
    """Change types as an engine with the feature `typeWidening` does."""
    schema = json.loads(DeltaTable(table).schema().to_json())
    for field in schema["fields"]:
        if kinds.get(field["name"]) == "struct":
            field["type"]["fields"][0]["type"] = "long"
        else:
            field["type"] = kinds.get(field["name"], field["type"])
    features = ["timestampNtz", "typeWidening"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    metadata = DeltaTable(table).metadata()
    commit(
        table,
        {"protocol": protocol},
        {
            "metaData": {
                "id": str(metadata.id),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(schema),
                "partitionColumns": metadata.partition_columns,
                "configuration": {"delta.enableTypeWidening": "true"},
                "createdTime": 1,
            }
        },
    )


def commit(table: Path, *actions: dict[str, Any]) -> None:
    version = DeltaTable(table).version() + 1
    (table / f"_delta_log/{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def add(table: Path, name: str, rows: pa.Table) -> None:
    """Append a data file."""
    pq.write_table(rows, table / name)
    fields = {"partitionValues": {}, "size": (table / name).stat().st_size, "modificationTime": 1, "dataChange": True}
    commit(table, {"add": {"path": name, **fields}})


def test_a_backlog_in_older_columns_is_read_as_the_table_is_now(lab: Any) -> None:
    """Read, suspend, append in the old columns, widen and add columns, append, resume; every type that may be widened."""
    table = lab.folder / "delta"
    old = pa.schema([(name, kind) for name, (kind, *_) in WIDENED.items()])
    values = {name: value for name, (_, value, *_) in WIDENED.items()}
    write_deltalake(table, pa.Table.from_pylist([values], old))
    columns: list[str] = []

    @unbounded_source(sink=lab.sink())
    def live(context):
        frame = read_delta_table(context.spark, table)
        columns[:] = frame.columns
        return frame.selectExpr("to_json(struct(*), map('timestampNTZFormat', 'yyyy-MM-dd')) AS row")

    pipeline = Pipeline("widening", [live])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count() == 1)
    job.done("stop", drain=False)
    job.finished()
    write_deltalake(table, pa.Table.from_pylist([values], old), mode="append")
    widen(table, **{name: kind for name, (_, _, kind, _) in WIDENED.items()})
    add(table, "new.parquet", pa.table({"whole": pa.array([2**40]), "s": [{"i": 2**40}]}))
    job = lab.start(pipeline, interval=0.3, restart=FixedDelayRestart(5, 0.1))
    job.wait_until(lambda: lab.count() == 3)
    job.drain()
    job.finished()
    assert job.of(JobRestarting) == [] and columns == list(WIDENED)
    rows = [json.loads(row, parse_float=Decimal) for (row,) in lab.committed()]
    expected = {name: value.date() if isinstance(value, dt.datetime) else value for name, (*_, value) in WIDENED.items()}
    widened = [row for row in rows if row["whole"] == 2**31 - 1 and isinstance(row["to_double"], Decimal)]
    assert len(widened) == 1 and {"whole": 2**40, "s": {"i": 2**40}} in rows
    assert widened[0] == json.loads(json.dumps(expected, default=str), parse_float=Decimal) | {
        name: value for name, value in expected.items() if isinstance(value, Decimal)
    }


def test_a_backlog_that_cannot_be_read_ends_the_run_at_once(lab: Any) -> None:
    table = lab.folder / "delta"
    write_deltalake(table, pa.table({"n": ["a"]}))

    @unbounded_source(sink=lab.sink())
    def live(context):
        return read_delta_table(context.spark, table, changed_rows="skip").selectExpr("CAST(n AS STRING) AS n")

    pipeline = Pipeline("unreadable", [live])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count() == 1)
    job.done("stop", drain=False)
    job.finished()
    write_deltalake(table, pa.table({"n": ["b"]}), mode="append")
    write_deltalake(table, pa.table({"n": [1]}), mode="overwrite", schema_mode="overwrite")
    job = lab.start(pipeline, interval=0.3, restart=FixedDelayRestart(5, 0.1))
    error = job.result().error
    assert repeats_by_nature(error) and job.of(JobRestarting) == []
    assert SourceColumnsUnreadable.__name__ in str(error) and "n (string there, long now)" in str(error)
    assert lab.count() == 1


def test_a_partition_column_of_any_name(spark: Any, tmp_path: Path) -> None:
    for number, name in enumerate(("a.b", "a`b", "``")):
        table = tmp_path / str(number)
        write_deltalake(table, pa.table({"id": [1], name: ["x"]}), partition_by=[name])
        assert read_delta_table(spark, str(table)).columns == ["id", name]
