"""When a status is written, and which."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control import PipelineStatus
from dagster_checkpoints.coordination import CheckpointConfig, NoRestart
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job import status_reporter
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.storage import CheckpointStorage, Owner, open_store

OPTIONS = JobOptions(CheckpointConfig(interval=60.0), NoRestart(), Path("/nowhere"))


@unbounded_source(sink=ParquetSink("rows"))
def live(context):
    raise AssertionError("no query starts here")


def test_a_change_of_the_phase_is_written_behind_a_slow_write(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[PipelineStatus] = []
    begun, may_write = threading.Event(), threading.Event()

    def write(_storage: CheckpointStorage, status: PipelineStatus) -> None:
        begun.set()
        assert may_write.wait(60)
        written.append(status)

    monkeypatch.setattr(status_reporter, "write_status", write)
    pipeline = Pipeline("slow", [live])
    storage = CheckpointStorage(open_store(str(tmp_path)), pipeline.name)
    storage.acquire(Owner(run_id="a run", host="a host", pid=1))
    clock = 0.0
    reporter = StatusReporter(pipeline, storage, "a run", OPTIONS, logging.getLogger(), lambda: clock)
    reporter.report("running")
    assert begun.wait(60)
    clock = 6.0
    reporter.report("running")  # due, but one is being written
    reporter.report("restarting")  # nothing may be reported for minutes
    reporter.report("restarting")
    may_write.set()
    reporter.close(None)
    assert [status.phase for status in written] == ["running", "restarting", "ended"]
    assert [status.sequence for status in written] == [1, 2, 3]
