"""An Iceberg table as a source: rows of an IcebergSink and of another program arrive once, through a restore."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.pipeline import Pipeline, bounded_source, unbounded_source
from dagster_checkpoints.sinks import IcebergSink
from dagster_checkpoints.sources import SourceRowsChanged, read_iceberg_table
from dagster_checkpoints.spark.job.events import StageFinished

ROWS = "n long, word string, at timestamp, prices array<decimal(9,2)>"


def test_rows_of_a_sink_and_of_another_program_arrive_once(lab: Any) -> None:
    warehouse = lab.folder / "warehouse"
    expected: list[tuple[Any, ...]] = []

    def rows(count: int) -> list[tuple[Any, ...]]:
        begin = len(expected)
        found = [(n, f"w{n}", lab.at(n), [n]) for n in range(begin, begin + count)]
        expected.extend(found)
        return found

    for _ in range(6):
        lab.put("in", ROWS, rows(10))

    @bounded_source(sink=IcebergSink("shop.events", warehouse=warehouse))
    def written(context):
        return lab.stream("in", ROWS, files_per_trigger=3)

    lab.start(Pipeline("writing", [written]), interval=0.3).finished()
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{warehouse}/catalog.db", warehouse=f"file://{warehouse}")
    table = catalog.load_table("shop.events")
    first, snapshot = list(expected), table.current_snapshot().snapshot_id

    def append() -> None:
        schema = table.schema().as_arrow()
        table.append(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows(10)], schema))

    @unbounded_source(sink=lab.sink("live"))
    def live(context):
        return read_iceberg_table(context.spark, "shop.events", warehouse=warehouse, files_per_trigger=1)

    @bounded_source(sink=lab.sink("then"))
    def then(context):
        return read_iceberg_table(context.spark, "shop.events", warehouse=warehouse, snapshot=snapshot)

    pipeline = Pipeline("reading", [live, then])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count("live") > 0)
    job.cancel()
    job.result()
    append()
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count("live") == len(expected))
    append()
    job.wait_until(lambda: lab.count("live") == len(expected))
    job.wait_for(StageFinished, lambda event: event.stage == "then")
    assert _texts(lab.committed("live")) == _texts(expected)
    assert _texts(lab.committed("then")) == _texts(first)

    table.delete("n = 3")
    error = job.result().error
    assert repeats_by_nature(error) and SourceRowsChanged.__name__ in str(error)
    assert _texts(lab.committed("live")) == _texts(expected)


def _texts(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted((n, word, at, [float(price) for price in prices]) for n, word, at, prices in found)
