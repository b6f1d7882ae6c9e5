"""The sinks of a stage's instances, as an attempt makes them; no Spark is started."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sinks import SinkContext, SqlSink
from dagster_checkpoints.spark.files.work_path import WorkFolder
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.runtime import AttemptSettings
from dagster_checkpoints.spark.job.task_sinks import TaskSinks
from dagster_checkpoints.state.fitted_checkpoint import SettledInstance
from dagster_checkpoints.state.metadata import StageInstanceSnapshot
from tests.sinks.sink_instance import staged

UNUSED: Any = None
CONTEXTS: list[SinkContext] = []


class Seen(SqlSink):
    def open(self, context: SinkContext) -> None:
        CONTEXTS.append(context)
        super().open(context)


def test_instances_that_write_to_one_database_at_the_same_time_keep_their_rows_apart(tmp_path: Path) -> None:
    """Each of them names its first transaction of the attempt; one that has ended is an instance as well."""
    url = f"sqlite:///{tmp_path}/rows.db"

    @unbounded_source(instances=["a", "b"], sink=Seen(url, "rows"))
    def feed(context: Any) -> Any: ...

    options = JobOptions(CheckpointConfig(interval=None), NoRestart(), work_directory=tmp_path)
    folder = WorkFolder(tmp_path, tmp_path)
    sinks = TaskSinks(Pipeline("p", [feed]), UNUSED, None, AttemptSettings(folder, 1, "e1a1", job_id=1, options=options))
    ended = SettledInstance("feed", 2, "c", 3, StageInstanceSnapshot())
    CONTEXTS.clear()
    for sink in (*(sinks.of_instance(feed, index, UNUSED, folder) for index in (0, 1)), sinks.settled(ended, UNUSED, folder)):
        assert sink is not None
        sink.open(None)
        sink.close()
    assert [(context.instance, context.index) for context in CONTEXTS] == [("a", 0), ("b", 1), ("c", 2)]
    assert len({context.attempt for context in CONTEXTS}) == 3

    first, second = SqlSink(url, "rows"), SqlSink(url, "rows")
    first.open(CONTEXTS[0])
    second.open(CONTEXTS[1])
    transactions = staged(first, tmp_path, 1, 10, 11), staged(second, tmp_path, 1, 20)
    second.commit(transactions[1])
    with closing(sqlite3.connect(tmp_path / "rows.db")) as database:
        assert database.execute("SELECT n FROM rows").fetchall() == [(20,)]
        first.commit(transactions[0])
        assert database.execute("SELECT n FROM rows ORDER BY n").fetchall() == [(10,), (11,), (20,)]
    first.close()
    second.close()
