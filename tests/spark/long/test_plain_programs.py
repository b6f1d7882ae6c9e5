"""Plain queries with each other kind of state, provider, output and source that stages take over with their state."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage
from dagster_checkpoints.sinks import DeltaSink
from dagster_checkpoints.sources import read_delta_table
from dagster_checkpoints.spark.stored_state import import_checkpoint
from dagster_checkpoints.state.plain_queries import ImportRefused
from tests.spark.plain_programs import PROGRAMS, ROWS
from tests.spark.takeovers import CUTS, HEAP, FileOutput, Takeover, check_there_and_back, cut

HOW = dict(zip(PROGRAMS, itertools.cycle(CUTS))) | {"unmatched": "not in the output", "steps": "stopped"}


@pytest.mark.parametrize("name, how", HOW.items())
def test_a_plain_query_is_taken_over_and_given_back(lab: Any, name: str, how: str) -> None:
    check_there_and_back(Takeover(lab, PROGRAMS[name]), how)


@pytest.mark.parametrize("name, how", [("windows", "in the output"), ("unmatched", "not in the output"), ("steps", "stopped")])
def test_state_on_the_heap_in_a_query_that_the_pipeline_divides(lab: Any, name: str, how: str) -> None:
    """The plain query keeps its state in Spark's default provider; the sources of the pipeline have queries of their own."""
    there = Takeover(lab, PROGRAMS[name], provider=HEAP)
    checkpoint, output = there.folder / "checkpoint", there.folder / "plain"
    there.put(3)
    there.run_plain(checkpoint, output)
    cut(how, checkpoint, there.outputs[-1])
    taken = there.take(checkpoint, apart=True, output=output)
    assert any(change.startswith("divided: ") for change in taken.changes)
    there.put(2)
    there.drain_from(taken.url, apart=True)
    there.check()


@pytest.mark.parametrize("fails", ["before it writes", "after it has written"])
def test_who_writes_with_foreach_batch_says_what_was_written(lab: Any, fails: str) -> None:
    there = Takeover(lab, PROGRAMS["windows"])
    checkpoint, output = there.folder / "checkpoint", there.folder / "plain"
    there.put(4)

    def write(batch: Any, number: int) -> None:
        if number == 2 and fails == "before it writes":
            raise OSError("the disk is full")
        batch.write.mode("overwrite").parquet(str(output / f"batch={number}"))
        if number == 2:
            raise OSError("the disk is full")

    plain = there.program.plain(there.read).writeStream.option("checkpointLocation", str(checkpoint))
    query = plain.foreachBatch(write).start()
    with pytest.raises(StreamingQueryException):
        query.awaitTermination()
    last = 1 if fails == "before it writes" else 2
    with pytest.raises(ImportRefused, match="last_batch=1 or last_batch=2"):
        there.take(checkpoint)
    taken = there.take(checkpoint, last_batch=last)
    assert (taken.batch_id, taken.planned_again) == (last, 2 if last == 1 else None)
    there.drain_from(taken.url)
    there.outputs = [FileOutput(lab, str(output / f"batch={number}")) for number in range(last + 1)]
    there.check()


@pytest.mark.parametrize("key", [["k"], []], ids=["by key", "of all rows"])
def test_an_update_of_a_table_is_taken_over(lab: Any, key: list[str]) -> None:
    """A query that replaces rows: its stage has a query of its own. Without a key, all of its state is in one partition."""
    there = Takeover(lab, PROGRAMS["windows"])
    checkpoint, table = there.folder / "checkpoint", there.folder / "delta"

    def totals(left: Any) -> Any:
        sums = left.groupBy(*key).agg(F.sum("v").alias("v"), F.count("*").alias("n"))
        return sums if key else sums.withColumn("k", F.lit("all"))

    def replace(batch: Any, number: int) -> None:
        if number == 2:
            raise OSError("the disk is full")
        batch.count()

    there.put(3)
    plain = totals(there.read("left")).writeStream.option("checkpointLocation", str(checkpoint)).outputMode("update")
    with pytest.raises(StreamingQueryException):
        plain.foreachBatch(replace).start().awaitTermination()

    @bounded_source
    def left(context: Any) -> Any:
        return there.read("left")

    @stage(name="totals", sink=DeltaSink(table, key="k"), output_mode="update")
    def last(left: Any) -> Any:
        return totals(left)

    pipeline, target = Pipeline("updates", [left, last]), str(there.folder / "savepoints")
    taken = import_checkpoint(lab.spark, pipeline, checkpoint, stage="totals", target=target, last_batch=1)
    assert taken.planned_again == 2 and any(change.startswith("divided: ") for change in taken.changes)
    there.put(1)
    lab.start(pipeline, interval=0.5, restore_from=taken.url).finished()
    found = sorted((row["k"], row["v"], row["n"]) for row in DeltaTable(table).to_pyarrow_table().to_pylist())
    wanted = totals(lab.table("left", ROWS)).select("k", "v", "n")
    assert found == lab.rows(wanted)


@pytest.mark.parametrize("how", CUTS)
def test_a_delta_table_is_read_on(lab: Any, how: str) -> None:
    """A plain query over a table that `read_delta_table` reads: its offset is a position in the table's files."""
    table, checkpoint, output = lab.folder / "delta", lab.folder / "checkpoint", lab.folder / "plain"
    numbers = itertools.count()

    def append(commits: int) -> None:
        for _ in range(commits):
            write_deltalake(table, pa.table({"n": [next(numbers) for _ in range(10)]}), mode="append")

    def read(spark: Any) -> Any:
        return read_delta_table(spark, table, files_per_trigger=1)

    append(4)
    query = read(lab.spark).writeStream.format("parquet").option("checkpointLocation", str(checkpoint)).start(str(output))
    query.processAllAvailable()
    query.stop()
    cut(how, checkpoint, FileOutput(lab, str(output)))

    @bounded_source(sink=lab.sink())
    def rows(context: Any) -> Any:
        return read(context.spark)

    @bounded_source(sink=lab.sink())
    def files(context: Any) -> Any:
        return lab.stream("files", "n long")

    lab.put("files", "n long", [])
    target = str(lab.folder / "savepoints")
    with pytest.raises(ImportRefused, match="found that of a table"):
        import_checkpoint(lab.spark, Pipeline("p", [files]), checkpoint, stage="files", output=output, dry_run=True)
    taken = import_checkpoint(lab.spark, Pipeline("p", [rows]), checkpoint, stage="rows", output=output, target=target)
    append(3)
    lab.start(Pipeline("p", [rows]), interval=0.5, restore_from=taken.url).finished()
    found = lab.committed() + lab.rows(lab.spark.read.parquet(str(output)))
    assert sorted(found) == [(n,) for n in range(next(numbers))]
