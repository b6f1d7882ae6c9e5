"""A job that restores an older checkpoint at which a stage had finished: the stage does not run, but its table must show the rows
of that checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dagster_checkpoints.execution.attempt_plan import AttemptPlan
from dagster_checkpoints.pipeline import ExecutionGraph
from dagster_checkpoints.sinks import ParquetSink, SinkContext
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.task_sinks import SettledSink
from dagster_checkpoints.spark.tasks.task_sink import TaskSink

UNUSED: Any = None


def context(attempt: str) -> SinkContext:
    return SinkContext("p", "s", "0", 0, 1, 1, attempt)


def commit(sink: ParquetSink, folder: Path, checkpoint_id: int) -> None:
    """One row, whose value is the checkpoint's id."""
    file = folder / f"{checkpoint_id}.parquet"
    pq.write_table(pa.table({"n": [checkpoint_id]}), file)
    sink.write(SimpleNamespace(columns=["n"]), [str(file)], checkpoint_id)  # type: ignore[arg-type]
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    sink.commit(transaction)


def rows(path: Path) -> list[int]:
    return sorted(ds.dataset(path, format="parquet", partitioning="hive").to_table()["n"].to_pylist())


def go_to(path: Path, checkpoint_id: int, attempt: str, next_checkpoint_id: int) -> None:
    """Restore a checkpoint in which the stage has finished."""
    deployment = Deployment(
        AttemptPlan(ExecutionGraph((), ()), (), take_back_after=checkpoint_id, next_checkpoint_id=next_checkpoint_id)
    )
    sink = TaskSink(ParquetSink(path), context(attempt), UNUSED, UNUSED, path)
    deployment.settled.append(SettledSink(sink))
    deployment.settle_sinks()


def test_the_table_of_a_finished_stage_follows_the_job_back_and_forth(tmp_path: Path) -> None:
    table = tmp_path / "table"
    sink = ParquetSink(table)
    sink.open(context("a1"))
    sink.start_new()
    for checkpoint_id in (1, 2, 3):
        commit(sink, tmp_path, checkpoint_id)
    sink.close()

    back = ParquetSink(table)
    back.open(context("a2"))
    back.recover((), restored=1)  # the stage runs again from checkpoint 1, and finishes with 5
    for checkpoint_id in (4, 5):
        commit(back, tmp_path, checkpoint_id)
    back.close()
    assert rows(table) == [1, 4, 5]

    go_to(table, 3, "a3", 6)  # a savepoint of the first timeline, in which it had finished
    assert rows(table) == [1, 2, 3]
    go_to(table, 5, "a4", 6)
    assert rows(table) == [1, 4, 5]
    go_to(table, 3, "a5", 6)
    # Other stages go on: checkpoints 6 to 8 are completed, and 7 is restored. It continues 3, so 4 and 5 stay hidden.
    go_to(table, 7, "a6", 9)
    assert rows(table) == [1, 2, 3]
    go_to(table, 5, "a7", 9)
    assert rows(table) == [1, 4, 5]
