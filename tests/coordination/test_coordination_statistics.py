"""Statistics of checkpoints: counts, the history and its details, the summary; a manual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from dagster_checkpoints.coordination.checkpoint_record import CheckpointStatus, Distribution, InstanceStatistics
from dagster_checkpoints.coordination.checkpoints import CheckpointProperties, CompletedCheckpoint, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointRequested,
    CoordinatorEvent,
    Declined,
    MetadataWritten,
    Shutdown,
    TasksRestarting,
    TaskStateChanged,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.coordination.statistics import CheckpointCounts, CheckpointStatistics
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

Graphs = Callable[[str], ExecutionGraph]
A0, A1, B0 = TaskId("V0", 0), TaskId("V0", 1), TaskId("V1", 0)
TASKS = (A0, A1, B0)
SAVEPOINT = CheckpointProperties.for_savepoint()


class Job:
    def __init__(self, graph_of: Graphs, history: int = 10, finished: tuple[TaskId, ...] = ()) -> None:
        config = CheckpointConfig(interval=None, history=history, tolerable_failed_checkpoints=100, max_concurrent=3)
        self.coordinator = CheckpointCoordinator(graph_of("V0 p2 -ALL-> V1 p1"), config, finished=finished)
        self.running = [task for task in TASKS if task not in finished]
        self.now = 0.0
        for task in self.running:
            self.do(TaskStateChanged(task, TaskState.RUNNING))

    @property
    def statistics(self) -> CheckpointStatistics:
        return self.coordinator.statistics

    def do(self, event: CoordinatorEvent) -> None:
        self.coordinator.handle(event, self.now)

    def trigger(self, request: str = "r", properties: CheckpointProperties | None = None) -> None:
        self.do(CheckpointRequested(request, properties or CheckpointProperties()))

    def complete(self, checkpoint_id: int, seconds: float = 1.0, measured: TaskStatistics | None = None) -> None:
        self.now += seconds
        for task in self.running:
            self.do(Acknowledged(task, checkpoint_id, None, measured or TaskStatistics()))
        self.do(MetadataWritten(checkpoint_id, f"chk-{checkpoint_id}"))


def test_nothing_yet(graph_of: Graphs) -> None:
    statistics = Job(graph_of).statistics
    counts = statistics.counts
    assert counts == CheckpointCounts(0, 0, 0, 0, 0, 0)
    assert (counts.triggered, counts.in_progress, counts.completed, counts.failed) == (0, 0, 0, 0)
    assert (counts.savepoints, counts.restored) == (0, 0)
    assert statistics.history == statistics.in_progress == ()
    assert statistics.latest_completed is statistics.latest_savepoint is statistics.latest_failed is None
    assert statistics.summary.duration == Distribution(0, 0, 0, 0, ())
    assert statistics.summary.duration.percentile(99) == 0
    assert statistics.record(1) is None


def test_a_job_that_begins_from_a_checkpoint_counts_it(graph_of: Graphs) -> None:
    begun_from = CompletedCheckpoint(7, "chk-7")
    coordinator = CheckpointCoordinator(
        graph_of("V0 p1"),
        CheckpointConfig(interval=None),
        next_checkpoint_id=8,
        completed=[begun_from],
        restored=begun_from,
    )
    assert coordinator.statistics.counts == CheckpointCounts(restored=1)
    coordinator.handle(TasksRestarting(), 0.0)
    assert coordinator.statistics.counts.restored == 2


def test_a_checkpoint_in_progress(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.now = 5
    job.trigger("mine", CheckpointProperties.for_savepoint(request_id="mine too"))
    job.now = 7.5
    job.do(Acknowledged(A1, 1, None, TaskStatistics(sync_seconds=0.5, new_bytes=10, total_bytes=30, in_flight_bytes=2)))
    (record,) = job.statistics.in_progress
    assert record is job.statistics.record(1)
    assert (record.checkpoint_id, record.request_id, record.properties.request_id) == (1, "mine", "mine too")
    assert (record.triggered_at, record.ended_at, record.duration) == (5, None, None)
    assert (record.status, record.expected, record.acknowledged) == (CheckpointStatus.IN_PROGRESS, 3, 1)
    assert record.waits_for == (A0, B0)
    assert record.measured == TaskStatistics(sync_seconds=0.5, new_bytes=10, total_bytes=30, in_flight_bytes=2)
    assert job.statistics.counts == CheckpointCounts(triggered=1, in_progress=1)
    job.do(Acknowledged(A1, 1, None, TaskStatistics(new_bytes=99)))
    assert record.measured.new_bytes == 10, "a duplicate changes nothing"


def test_the_duration_is_from_the_trigger_to_the_end(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.now = 5
    job.trigger()
    for task in (A0, A1, B0):
        job.do(Acknowledged(task, 1, None))
    job.now = 9
    job.do(MetadataWritten(1, "chk-1"))
    assert job.statistics.latest_completed is not None and job.statistics.latest_completed.duration == 4


def test_every_instances_part(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.trigger()
    parts = {
        A0: (1.0, TaskStatistics(alignment_seconds=0.25, sync_seconds=0.5, async_seconds=2, new_bytes=1, total_bytes=10)),
        A1: (3.0, TaskStatistics(alignment_seconds=0.75, sync_seconds=1.5, async_seconds=4, new_bytes=2, total_bytes=20)),
        B0: (4.0, TaskStatistics(in_flight_bytes=7)),
    }
    for task, (at, measured) in parts.items():
        job.now = at
        job.do(Acknowledged(task, 1, None, measured))
    job.now = 6
    job.do(MetadataWritten(1, "chk-1"))
    record = job.statistics.record(1)
    assert record is not None and record is job.statistics.latest_completed
    assert (record.status, record.location, record.duration) == (CheckpointStatus.COMPLETED, "chk-1", 6)
    v0, v1 = record.vertices()
    assert v0 == record.stage("v0")
    assert (v0.name, v0.stages, v0.expected, v0.acknowledged, v0.acknowledged_after) == ("V0", ("v0",), 2, 2, 3)
    assert v0.instances == (InstanceStatistics(0, 1, parts[A0][1]), InstanceStatistics(1, 3, parts[A1][1]))
    slowest = TaskStatistics(alignment_seconds=0.75, sync_seconds=1.5, async_seconds=4, new_bytes=3, total_bytes=30)
    assert v0.measured == slowest
    assert v1.measured == parts[B0][1]
    assert record.measured == replace(slowest, in_flight_bytes=7)
    with pytest.raises(KeyError, match="unknown"):
        record.stage("unknown")


def test_finished_instances_have_no_part(graph_of: Graphs) -> None:
    job = Job(graph_of, finished=(A0,))
    job.now = 5
    job.trigger()
    job.now = 7
    job.do(Acknowledged(A1, 1))
    record = job.statistics.record(1)
    assert record is not None and record.expected == 2
    v0, v1 = record.vertices()
    assert v0.instances == (InstanceStatistics(0, finished=True), InstanceStatistics(1, 2, TaskStatistics()))
    assert (v0.expected, v0.acknowledged) == (1, 1)
    assert (v1.expected, v1.acknowledged, v1.acknowledged_after) == (1, 0, None)


def test_a_failed_checkpoint_keeps_its_known_statistics(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.trigger()
    job.do(Acknowledged(A0, 1, None, TaskStatistics(new_bytes=5)))
    job.now = 2
    job.do(Declined(B0, 1, message="the disk is full"))
    record = job.statistics.latest_failed
    assert record is not None and record == job.statistics.record(1)
    assert (record.status, record.reason) == (CheckpointStatus.FAILED, FailureReason.CHECKPOINT_DECLINED)
    assert "the disk is full" in record.message
    assert (record.duration, record.acknowledged, record.measured.new_bytes) == (2, 1, 5)
    assert job.statistics.summary.duration.count == 0


def test_counts(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.trigger("1")
    job.complete(1)
    job.trigger("2", SAVEPOINT)
    job.complete(2)
    job.trigger("3")
    job.do(Declined(A0, 3))
    job.trigger("4")
    job.trigger("5")
    # 4 is subsumed.
    job.complete(5)
    job.trigger("6")
    assert job.statistics.counts == CheckpointCounts(triggered=6, in_progress=1, completed=3, failed=2, savepoints=1)
    assert job.statistics.latest_savepoint is not None and job.statistics.latest_savepoint.checkpoint_id == 2
    assert job.statistics.latest_completed is not None and job.statistics.latest_completed.checkpoint_id == 5
    job.do(Shutdown(JobStatus.CANCELED))
    assert job.statistics.counts.in_progress == 0
    assert job.statistics.counts.failed == 3


def test_failures_in_a_row(graph_of: Graphs) -> None:
    job = Job(graph_of)
    for number in (1, 2):
        job.trigger(str(number))
        job.do(Declined(A0, number))
    assert job.statistics.counts.failed_in_a_row == 2
    job.trigger("3")
    job.do(TasksRestarting())  # that 3 was given up is no sign of anything, and 1 and 2 still are
    assert (job.statistics.counts.failed, job.statistics.counts.failed_in_a_row) == (3, 2)
    for task in TASKS:
        job.do(TaskStateChanged(task, TaskState.RUNNING))
    job.trigger("4", SAVEPOINT)
    job.do(Declined(A0, 4))
    assert (job.statistics.counts.failed, job.statistics.counts.failed_in_a_row) == (4, 2), "a savepoint's failure never counts"
    for number in (5, 6, 7):
        job.trigger(str(number))
    job.complete(7)  # 5 and 6 are subsumed
    assert (job.statistics.counts.failed, job.statistics.counts.failed_in_a_row) == (6, 0)


def test_one_that_fails_before_it_has_an_id_counts(graph_of: Graphs) -> None:
    coordinator = CheckpointCoordinator(graph_of("V0 p1; V1 p1"), CheckpointConfig(interval=5.0))
    for vertex in ("V0", "V1"):
        coordinator.handle(TaskStateChanged(TaskId(vertex, 0), TaskState.RUNNING), 0)
    coordinator.handle(TaskStateChanged(TaskId("V0", 0), TaskState.INITIALIZING), 5)
    assert coordinator.statistics.counts == CheckpointCounts(failed=1)
    assert coordinator.statistics.history == ()


@pytest.mark.parametrize(("history", "kept"), [(0, []), (1, [4]), (3, [4, 3, 2]), (9, [4, 3, 2, 1])])
def test_the_history_is_bounded_and_the_counts_are_not(graph_of: Graphs, history: int, kept: list[int]) -> None:
    job = Job(graph_of, history=history)
    for checkpoint_id in range(1, 5):
        job.trigger(str(checkpoint_id))
        job.complete(checkpoint_id)
    assert [record.checkpoint_id for record in job.statistics.history] == kept
    assert (job.statistics.record(1) is None) == (1 not in kept)
    assert job.statistics.counts.completed == job.statistics.summary.duration.count == 4
    assert job.statistics.latest_completed is not None and job.statistics.latest_completed.checkpoint_id == 4


def test_the_summary_is_over_everything_that_completed(graph_of: Graphs) -> None:
    job = Job(graph_of, history=1)
    for checkpoint_id, seconds in enumerate([4.0, 1.0, 10.0, 5.0], start=1):
        job.trigger(str(checkpoint_id))
        measured = TaskStatistics(new_bytes=checkpoint_id, total_bytes=10 * checkpoint_id, in_flight_bytes=100)
        job.complete(checkpoint_id, seconds, measured)
    summary = job.statistics.summary
    duration = summary.duration
    assert (duration.count, duration.minimum, duration.maximum, duration.mean) == (4, 1, 10, 5)
    # Three tasks each.
    assert (summary.new_bytes.maximum, summary.total_bytes.mean, summary.in_flight_bytes.minimum) == (12, 75, 300)
    assert [duration.percentile(p) for p in (50, 75, 99)] == [4, 5, 10]


def test_percentiles_are_taken_over_the_latest_values_alone(graph_of: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_checkpoints.coordination.statistics._WINDOW", 2)
    job = Job(graph_of)
    for checkpoint_id, seconds in enumerate([9.0, 2.0, 1.0], start=1):
        job.trigger(str(checkpoint_id))
        job.complete(checkpoint_id, seconds)
    assert job.statistics.summary.duration == Distribution(3, 1, 9, 4, (1, 2))


def test_ended_checkpoints_are_taken_once_however_short_the_history_is(graph_of: Graphs) -> None:
    job = Job(graph_of)
    for checkpoint_id in (1, 2, 3):
        job.trigger(str(checkpoint_id))
        job.complete(checkpoint_id, 1.0)
    job.trigger("4")
    assert [record.checkpoint_id for record in job.statistics.take_ended()] == [1, 2, 3]
    assert job.statistics.take_ended() == ()
    job.complete(4, 1.0)
    assert [record.checkpoint_id for record in job.statistics.take_ended()] == [4]


def test_several_tasks_together_have_the_times_of_the_slowest_and_the_bytes_of_all() -> None:
    one = TaskStatistics(
        True, alignment_seconds=1, sync_seconds=2, async_seconds=9, new_bytes=1, total_bytes=2, in_flight_bytes=3
    )
    other = TaskStatistics(
        True, alignment_seconds=7, sync_seconds=1, async_seconds=3, new_bytes=4, total_bytes=5, in_flight_bytes=6
    )
    assert TaskStatistics.of_all([one, other]) == TaskStatistics(True, 7, 2, 9, 5, 7, 9)
    assert TaskStatistics.of_all([one, TaskStatistics()]) == replace(one, operators_finished=False)
    assert TaskStatistics.of_all([]) == TaskStatistics()


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (10, 1), (10.1, 2), (50, 5), (90, 9), (99, 10), (100, 10)])
def test_percentiles_are_values_that_occurred(percent: float, value: float) -> None:
    assert Distribution(sample=tuple(range(1, 11))).percentile(percent) == value


def test_how_often_the_job_was_restored(graph_of: Graphs) -> None:
    job = Job(graph_of)
    job.do(TasksRestarting())
    assert job.statistics.counts.restored == 0, "there was nothing to restore from"
    for task in TASKS:
        job.do(TaskStateChanged(task, TaskState.RUNNING))
    job.trigger()
    job.complete(1)
    job.do(TasksRestarting())
    assert job.statistics.counts.restored == 1
    job.do(TasksRestarting(restored=CompletedCheckpoint(2, "found in the store")))
    assert job.statistics.counts.restored == 2
    job.statistics.restored()
    assert job.statistics.counts.restored == 3
