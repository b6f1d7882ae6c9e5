"""When a status is written, and which."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control.clocks import Clocks
from dagster_checkpoints.control.status import InstanceStatus, PipelineStatus, StageStatus, read_status
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import Acknowledged, CheckpointRequested, MetadataWriteFailed, TaskStateChanged
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, Pipeline, TaskId, Vertex, VertexEdge, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job import status_reporter
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.status_reporter import StatusReporter
from dagster_checkpoints.storage import CheckpointStorage, open_store

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
    reporter = StatusReporter(pipeline, storage, "a run", OPTIONS, logging.getLogger(), clocks=Clocks(lambda: clock))
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


@pytest.mark.parametrize("jump", [timedelta(hours=-1), timedelta(0), timedelta(hours=1)])
def test_a_clock_that_jumps_changes_no_age(tmp_path: Any, jump: timedelta) -> None:
    pipeline = Pipeline("jumping", [live])
    storage = CheckpointStorage(open_store(str(tmp_path)), pipeline.name)
    storage.acquire(Owner(run_id="a run", host="a host", pid=1))
    passed, jumped = 0.0, timedelta(0)
    clocks = Clocks(lambda: 50.0 + passed, lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=passed) + jumped)
    reporter = StatusReporter(pipeline, storage, "a run", OPTIONS, logging.getLogger(), clocks=clocks)
    passed, jumped = 20.0, jump
    reporter.report("running")
    reporter.close(None)
    status = read_status(storage)
    assert status is not None and status.updated_at == datetime(2026, 1, 1, 0, 0, 20, tzinfo=UTC) + jump
    assert status.updated_at - status.started_at == timedelta(seconds=20)


def test_a_checkpoint_under_way_names_the_tasks_that_it_waits_for() -> None:
    live, sums = ("live", ("EWR", "JFK")), ("sums", ("0",))
    graph = ExecutionGraph(
        (Vertex("live", ("live",), 2), Vertex("sums", ("sums", "table"), 1)), (VertexEdge(0, 1, EdgePattern.ALL_TO_ALL),)
    )
    coordinator = CheckpointCoordinator(graph, CheckpointConfig(interval=60.0))
    tasks = (TaskId("live", 0), TaskId("live", 1), TaskId("sums", 0))
    for task in tasks:
        coordinator.handle(TaskStateChanged(task, TaskState.RUNNING), 0.0)
    coordinator.handle(CheckpointRequested("by hand"), 0.0)
    status = PipelineStatus(
        pipeline="p",
        run_id="r",
        epoch=1,
        phase="running",
        sequence=1,
        updated_at=datetime.now(UTC),
        started_at=datetime.now(UTC),
        chains=(("live",), ("sums", "table")),
        stages=tuple(
            StageStatus(name=name, finished=False, instances=tuple(InstanceStatus(name=each, state="RUNNING") for each in names))
            for name, names in (live, sums, ("table", ("0",)))
        ),
    )
    expected = ["0 of 3 tasks, waits for live[EWR], live[JFK], sums + table", "1 of 3 tasks, waits for live[EWR], sums + table"]
    expected += ["2 of 3 tasks, waits for sums + table", "3 of 3 tasks"]
    found = []
    for task in (None, tasks[1], tasks[0], tasks[2]):
        if task is not None:
            coordinator.handle(Acknowledged(task, 1, None), 1.0)
        found += [each.text for each in status_reporter._of_checkpoints(status, coordinator, 2.0).pending]
    assert found == expected
    reported = status_reporter._of_checkpoints(status, coordinator, 2.0)
    assert reported.checkpoints_since == status.updated_at - timedelta(seconds=2)
    for setting, expected in (({}, 60.0), ({"min_pause": 300.0}, 300.0), ({"interval": None}, None)):
        config = CheckpointConfig(**{"interval": 60.0, **setting})  # type: ignore[arg-type]
        other = CheckpointCoordinator(graph, config)
        assert status_reporter._of_checkpoints(status, other, 2.0).checkpoint_interval == expected
    coordinator.handle(MetadataWriteFailed(1, "the disk is full"), 3.0)
    counts = status_reporter._of_checkpoints(status, coordinator, 3.0).checkpoints
    assert counts is not None and (counts.failed, counts.failed_in_a_row) == (1, 1)
