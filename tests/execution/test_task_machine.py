"""The order within a task, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AlignmentTick, TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.events import BacklogChanged, Declined, EndOfDataReached, TaskStateChanged
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.lifecycle import LifecycleState
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import (
    BarrierMark,
    CancelMark,
    EndOfData,
    EndOfPartition,
    WatermarkAt,
)
from dagster_checkpoints.execution.fused_sources import FusedSource
from dagster_checkpoints.execution.input_channel import GateChannel
from dagster_checkpoints.execution.task_events import (
    BacklogMeasured,
    BetweenBatches,
    BuildQuery,
    DropSnapshot,
    ElementsArrived,
    EndInput,
    Evaluated,
    EvaluateOnce,
    Forward,
    HoldQuery,
    HoldSources,
    KillQuery,
    NotifyOperatorsAborted,
    OpenTo,
    Overtake,
    PinnedInputs,
    PinSnapshot,
    QueryBuilt,
    QueryConsumed,
    QueryHeld,
    QueryRunning,
    QuerySettled,
    Report,
    SnapshotFailed,
    SnapshotPinned,
    SourceEnded,
    SourceExhausted,
    SourcesAsked,
    SourcesRead,
    StartQuery,
    StopSource,
    StoreSnapshot,
    TaskOpened,
    UnreadBarrier,
    WatermarkReached,
)
from dagster_checkpoints.execution.task_machine import TaskMachine, TaskTraits
from dagster_checkpoints.pipeline import TaskId

TASK = TaskId("hourly", 0)
CONFIG = CheckpointConfig(interval=None)
UNALIGNED = CheckpointConfig(interval=None, unaligned=True)
RUNNING = Report(TaskStateChanged(TASK, TaskState.RUNNING))
FINISHED = Report(TaskStateChanged(TASK, TaskState.FINISHED))
AT_END = Report(EndOfDataReached(TASK))
SOURCE_ENDED = Report(SourceEnded(TASK))
MAX = Forward(WatermarkAt(MAX_WATERMARK_MS))
END = [life.CloseOperators(), Forward(EndOfPartition()), life.TaskFinished(), FINISHED]
SUSPEND = CheckpointProperties.for_savepoint(stops_job=True)


def barrier(checkpoint_id: int, properties: CheckpointProperties | None = None) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0.0, properties or CheckpointProperties())


class Driver:
    """A machine, and a clock that advances by one second with each event."""

    def __init__(self, machine: TaskMachine) -> None:
        self.machine = machine
        self.now = 0.0

    def __call__(self, event: Any) -> list[Any]:
        self.now += 1.0
        return self.machine.handle(event, self.now)

    def read(self, channel: str, *elements: Any) -> list[Any]:
        return self(ElementsArrived(((channel, elements),)))

    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties | None = None) -> list[Any]:
        """Let a source take a snapshot; returns the actions after it."""
        triggered = barrier(checkpoint_id, properties)
        assert self(TriggerReceived(triggered)) == [PinSnapshot(triggered, PinnedInputs())]
        return self(SnapshotPinned(checkpoint_id))


def source(config: CheckpointConfig = CONFIG) -> Driver:
    drive = Driver(TaskMachine(TASK, config))
    assert drive(TaskOpened()) == [StartQuery()]
    assert drive(QueryRunning()) == [RUNNING]
    return drive


def behind(*names: str, config: CheckpointConfig = CONFIG, takes_watermark: bool = True) -> Driver:
    drive = Driver(TaskMachine(TASK, config, [GateChannel(name) for name in names]))
    assert drive(TaskOpened()) == [BuildQuery()]
    assert drive(QueryBuilt(takes_watermark=takes_watermark)) == [OpenTo(dict.fromkeys(names, 0), None), StartQuery()]
    assert drive(QueryRunning()) == [RUNNING]
    return drive


# The beginning


def test_a_task_is_opened_once() -> None:
    drive = source()
    with pytest.raises(UnexpectedEvent, match=r"Task hourly\[0\] is opened a second time"):
        drive(TaskOpened())


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(UnexpectedEvent, match="is no event of a task"):
        source()(life.FinishOperators())


@pytest.mark.parametrize(
    "event",
    [ElementsArrived(()), QueryConsumed({}), BetweenBatches(), UnreadBarrier("a", barrier(1), ()), AlignmentTick(1.0)],
)
def test_a_source_has_no_channels(event: object) -> None:
    drive = source()
    assert not drive.machine.reads("a")
    assert drive.machine.next_deadline() is None
    with pytest.raises(UnexpectedEvent, match="is a source and has no input channels"):
        drive(event)


def test_a_task_that_waits_for_a_static_input_runs_before_it_has_a_query() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, [GateChannel("a"), GateChannel("s", static=True)]))
    assert drive(TaskOpened()) == [RUNNING]
    assert drive.read("s", EndOfData(True)) == [BuildQuery()]
    assert drive(QueryBuilt()) == [OpenTo({"a": 0}, None), StartQuery()]
    assert drive(QueryRunning()) == []


def test_a_plan_without_streams_runs_before_it_is_evaluated() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, [GateChannel("a")]))
    assert drive(TaskOpened()) == [BuildQuery()]
    assert drive(QueryBuilt(streaming=False)) == [RUNNING, EvaluateOnce()]
    with pytest.raises(UnexpectedEvent, match=r"cannot take EndOfDataReceived\(drain=False\)"):
        drive(Evaluated())  # a stage that ignores its streams: they have not ended


def test_a_batch_source_is_evaluated_once_and_its_data_ends() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, traits=TaskTraits(streaming=False)))
    assert drive(TaskOpened()) == [RUNNING, EvaluateOnce()]
    assert drive(Evaluated()) == [life.FinishOperators()]


def test_a_restored_valve_is_the_gate_s() -> None:
    machine = TaskMachine(TASK, CONFIG, [GateChannel("a")], 7)
    assert machine.gate is not None and machine.gate.watermark == 7


# The end


def test_a_task_ends_with_its_final_checkpoint_in_this_order() -> None:
    drive = source()
    assert drive.machine.running
    assert drive(SourceExhausted()) == [life.FinishOperators()]
    assert (drive.machine.running, drive.machine.state) == (False, LifecycleState.FINISHING)
    assert not drive.machine.operators_finished
    assert drive(life.OperatorsFinished()) == [MAX, Forward(EndOfData(True)), AT_END, SOURCE_ENDED]
    assert drive.machine.operators_finished
    statistics = TaskStatistics(operators_finished=True, sync_seconds=1.0)
    assert drive.snapshot(1) == [Forward(BarrierMark(barrier(1))), StoreSnapshot(barrier(1), statistics, {})]
    assert drive(life.CheckpointCompletedNotice(1)) == [life.CommitUpTo(1), *END]
    assert drive.machine.suspended is False


def test_without_checkpoints_after_tasks_finish_a_task_commits_at_its_end() -> None:
    config = CheckpointConfig(interval=None, checkpoints_after_tasks_finish=False)
    drive = source(config)
    drive(SourceExhausted())
    assert drive(life.OperatorsFinished()) == [MAX, Forward(EndOfData(True)), AT_END, SOURCE_ENDED, life.CommitUpTo(None), *END]


def test_a_drain_that_is_announced_is_waited_for_all_the_same() -> None:
    config = CheckpointConfig(interval=None, checkpoints_after_tasks_finish=False)
    drive = source(config)
    assert drive(life.DrainAnnounced()) == []
    drive(EndInput())
    assert drive(life.OperatorsFinished()) == [MAX, Forward(EndOfData(True)), AT_END, SOURCE_ENDED]


def test_a_source_that_is_to_end_stops_first_and_once() -> None:
    drive = source()
    assert drive(EndInput()) == [StopSource(), life.FinishOperators()]
    assert drive(EndInput()) == []


def test_a_task_with_inputs_ignores_the_message_to_end() -> None:
    assert behind("a")(EndInput()) == []


def test_a_task_behind_channels_finishes_when_everything_is_consumed() -> None:
    drive = behind("a")
    drive.read("a", "row", EndOfData(True))
    assert drive(QueryConsumed({"a": 1})) == [life.FinishOperators()]
    assert drive.machine.gate is not None and not drive.machine.gate.open
    assert drive.machine.reads("a")


def test_a_task_that_had_finished_before_only_waits_for_its_final_checkpoint() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, [GateChannel("a")], traits=TaskTraits(finished_before=True)))
    assert drive(TaskOpened()) == [RUNNING, Forward(EndOfData(True)), AT_END]
    assert drive.machine.operators_finished
    (pin,) = drive.read("a", EndOfData(True), BarrierMark(barrier(4)))
    assert pin.barrier == barrier(4)
    drive(SnapshotPinned(4))
    assert drive(life.CheckpointCompletedNotice(4)) == [life.CommitUpTo(4), *END]


def test_a_source_that_had_finished_before_starts_no_query() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, traits=TaskTraits(finished_before=True)))
    assert drive(TaskOpened()) == [RUNNING, Forward(EndOfData(True)), AT_END, SOURCE_ENDED]


# Snapshots


def test_a_checkpoint_is_committed_and_a_savepoint_is_not() -> None:
    drive = source()
    drive.snapshot(1)
    assert drive(life.CheckpointCompletedNotice(1)) == [life.CommitUpTo(1)]
    savepoint = drive.snapshot(2, CheckpointProperties.for_savepoint())
    assert [type(action) for action in savepoint] == [Forward, StoreSnapshot]
    assert drive(life.SavepointCompletedNotice(2)) == []


def test_a_savepoint_does_not_let_a_finished_task_go_and_is_waited_for() -> None:
    drive = source()
    drive(SourceExhausted())
    drive(life.OperatorsFinished())
    drive.snapshot(1, CheckpointProperties.for_savepoint())
    drive.snapshot(2)
    assert drive(life.CheckpointCompletedNotice(2)) == [life.CommitUpTo(2)]
    assert drive(life.SavepointCompletedNotice(1)) == END


def test_the_gates_actions_keep_their_order() -> None:
    drive = behind("a")
    opened, pin = drive.read("a", WatermarkAt(3), BarrierMark(barrier(1)))
    assert opened == OpenTo({"a": 0}, 3)
    assert isinstance(pin, PinSnapshot)
    drive(SnapshotPinned(1))
    assert drive.read("a", EndOfData(True)) == [OpenTo({"a": 0}, MAX_WATERMARK_MS), life.FinishOperators()]


def test_a_snapshot_reports_its_duration() -> None:
    drive = behind("a", "b")
    drive.read("a", BarrierMark(barrier(1)))
    drive.now += 10.0
    (pin,) = drive.read("b", BarrierMark(barrier(1)))
    assert isinstance(pin, PinSnapshot) and pin.barrier == barrier(1)
    drive.now += 2.0
    statistics = TaskStatistics(operators_finished=False, alignment_seconds=11.0, sync_seconds=3.0)
    assert drive(SnapshotPinned(1)) == [Forward(BarrierMark(barrier(1))), StoreSnapshot(barrier(1), statistics, {})]


def test_a_snapshot_that_is_triggered_is_aligned_at_once() -> None:
    drive = behind("a")
    drive.read("a", "row", EndOfPartition())
    assert drive(TriggerReceived(barrier(1))) == []
    (pin,) = drive(QueryConsumed({"a": 1}))
    assert isinstance(pin, PinSnapshot)
    statistics = TaskStatistics(alignment_seconds=1.0, sync_seconds=1.0)
    assert drive(SnapshotPinned(1)) == [Forward(BarrierMark(barrier(1))), StoreSnapshot(barrier(1), statistics, {})]


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (SnapshotFailed(1, "disk full"), FailureReason.CHECKPOINT_DECLINED),
        # The task fails, too: a job that tolerates no failed checkpoint restarts with the error of the task, not with this one.
        (SnapshotFailed(1, "disk full", FailureReason.TASK_FAILURE), FailureReason.TASK_FAILURE),
    ],
)
def test_a_snapshot_that_fails_is_declined_and_sends_no_barrier(failed: SnapshotFailed, reason: FailureReason) -> None:
    drive = source()
    drive(TriggerReceived(barrier(1)))
    assert drive(failed) == [Report(Declined(TASK, 1, reason, "disk full"))]
    with pytest.raises(UnexpectedEvent, match=r"Task hourly\[0\] is not pinning a snapshot of checkpoint 1"):
        drive(SnapshotPinned(1))


def test_a_snapshot_of_another_checkpoint_is_refused() -> None:
    drive = source()
    drive(TriggerReceived(barrier(2)))
    with pytest.raises(UnexpectedEvent, match="not pinning a snapshot of checkpoint 1"):
        drive(SnapshotPinned(1))


@pytest.mark.parametrize("answer", [SnapshotPinned(1), SnapshotFailed(1)])
def test_the_answer_to_a_snapshot_that_was_never_asked_for_is_refused(answer: SnapshotPinned | SnapshotFailed) -> None:
    with pytest.raises(UnexpectedEvent, match="not pinning a snapshot of checkpoint 1"):
        source()(answer)


def test_a_gate_continues_after_a_snapshot() -> None:
    drive = behind("a")
    drive.read("a", BarrierMark(barrier(1)))
    assert not drive.machine.reads("a")
    drive(SnapshotPinned(1))
    assert drive.machine.reads("a")
    drive.read("a", BarrierMark(barrier(2)))
    assert drive(SnapshotFailed(2))[0] == Report(Declined(TASK, 2, FailureReason.CHECKPOINT_DECLINED, ""))
    assert drive.machine.reads("a")


def test_a_checkpoint_that_a_barrier_handler_declines_is_reported() -> None:
    drive = behind("a", "b")
    drive.read("a", BarrierMark(barrier(1)))
    declined = Declined(TASK, 1, FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER)
    assert drive.read("b", CancelMark(1)) == [Forward(CancelMark(1)), Report(declined)]


def test_operators_are_notified_of_an_abort_after_the_marks() -> None:
    drive = behind("a", "b")
    drive.read("a", BarrierMark(barrier(1)))
    assert drive(life.CheckpointAbortedNotice(1)) == [Forward(CancelMark(1)), NotifyOperatorsAborted(1)]
    assert source()(life.CheckpointAbortedNotice(1)) == [NotifyOperatorsAborted(1)]


def test_an_abort_of_the_last_checkpoint_that_is_awaited_lets_the_task_go() -> None:
    drive = source()
    drive.snapshot(1)
    drive(SourceExhausted())
    drive(life.OperatorsFinished())
    drive.snapshot(2)
    assert drive(life.CheckpointCompletedNotice(2)) == [life.CommitUpTo(2)]
    assert drive(life.CheckpointAbortedNotice(1)) == [NotifyOperatorsAborted(1), *END]


def test_an_unaligned_snapshot_is_stored_when_its_inputs_are_captured() -> None:
    drive = behind("a", "b", config=UNALIGNED)
    (pin,) = drive.read("a", BarrierMark(barrier(1)))
    assert pin.overtaking
    drive.now += 1.0
    assert drive(SnapshotPinned(1)) == [Overtake(pin.barrier)]
    drive.read("b", "row")
    drive.now += 7.0
    (store,) = drive.read("b", BarrierMark(barrier(1)))
    statistics = TaskStatistics(operators_finished=False, alignment_seconds=0.0, sync_seconds=2.0)
    assert store == StoreSnapshot(pin.barrier, statistics, {"b": ("row",)})


def test_an_unaligned_snapshot_that_is_aborted_is_dropped() -> None:
    drive = behind("a", "b", config=UNALIGNED)
    drive.read("a", BarrierMark(barrier(1)))
    drive(SnapshotPinned(1))
    assert drive(life.CheckpointAbortedNotice(1)) == [DropSnapshot(1), Forward(CancelMark(1)), NotifyOperatorsAborted(1)]
    drive.read("a", BarrierMark(barrier(2)))
    drive(SnapshotPinned(2))
    reason = FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
    cancelled = [DropSnapshot(2), Forward(CancelMark(2)), Report(Declined(TASK, 2, reason))]
    assert drive.read("b", CancelMark(2)) == cancelled


def test_a_barrier_with_an_alignment_timeout_has_a_deadline() -> None:
    config = CheckpointConfig(interval=None, unaligned=True, aligned_checkpoint_timeout=5.0)
    drive = behind("a", "b", config=config)
    assert drive.machine.next_deadline() is None
    drive.read("a", BarrierMark(barrier(1)))
    assert drive.machine.next_deadline() == 5.0
    (pin,) = drive(AlignmentTick(5.0))
    assert pin.overtaking


# A suspend


def test_the_answer_to_a_held_query_pins_the_snapshot() -> None:
    drive = behind("a", config=CheckpointConfig(interval=None, unaligned=True))
    drive.read("a", "r1")
    assert drive.read("a", BarrierMark(barrier(1))) == [HoldQuery(1)]
    (pin,) = drive(QueryHeld(1, {"a": 0}))
    assert isinstance(pin, PinSnapshot) and pin.overtaking
    overtaken, stored = drive(SnapshotPinned(1))
    assert overtaken == Overtake(barrier(1).overtaking())
    assert isinstance(stored, StoreSnapshot)
    assert stored.statistics.sync_seconds == 1.0


def test_a_query_that_cannot_be_held_declines_the_checkpoint() -> None:
    drive = behind("a", config=CheckpointConfig(interval=None, unaligned=True))
    drive.read("a", "r1")
    assert drive.read("a", BarrierMark(barrier(1))) == [HoldQuery(1)]
    declined = Report(Declined(TASK, 1, FailureReason.CHECKPOINT_DECLINED, "the batch failed"))
    assert drive(SnapshotFailed(1, "the batch failed")) == [declined]
    with pytest.raises(UnexpectedEvent, match="not pinning"):
        drive(SnapshotFailed(1))


# A backlog

BACKLOG = CheckpointConfig(interval=1.0, interval_during_backlog=60.0)


@pytest.mark.parametrize(
    ("config", "bounded", "reported"),
    [
        (BACKLOG, True, [RUNNING, Report(BacklogChanged(TASK, True))]),
        (BACKLOG, False, [RUNNING]),
        (CONFIG, True, [RUNNING]),
    ],
)
def test_a_bounded_source_reports_a_backlog(config: CheckpointConfig, bounded: bool, reported: list[Report]) -> None:
    drive = Driver(TaskMachine(TASK, config, traits=TaskTraits(bounded=bounded)))
    drive(TaskOpened())
    assert drive(QueryRunning()) == reported


def test_fused_sources_are_a_backlog_until_the_bounded_ones_have_ended() -> None:
    sources = (FusedSource("history", 0, True, event_time=False), FusedSource("live", 1, False, event_time=False))
    drive = Driver(TaskMachine(TASK, BACKLOG, fused=sources))
    drive(TaskOpened())
    assert drive(QueryRunning()) == [RUNNING, Report(BacklogChanged(TASK, True)), HoldSources(("history",))]
    assert drive(SourcesAsked(moved=("history", "live"))) == []
    assert drive(SourcesAsked(unmoved=("history",), moved=("live",))) == [
        Report(BacklogChanged(TASK, False)),
        Report(SourceEnded(TASK, "history")),
    ]
    assert drive(SourcesAsked(moved=("live",))) == []


def test_a_bounded_source_restored_after_its_end_is_no_backlog() -> None:
    drive = Driver(TaskMachine(TASK, BACKLOG, traits=TaskTraits(bounded=True, finished_before=True)))
    assert Report(BacklogChanged(TASK, True)) not in drive(TaskOpened())


def test_a_suspend_pauses_behind_its_barrier_and_ends_without_finishing() -> None:
    drive = behind("a")
    suspend = barrier(1, SUSPEND)
    assert drive.read("a", BarrierMark(suspend)) == []
    assert isinstance(drive(QuerySettled())[0], PinSnapshot)
    actions = drive(SnapshotPinned(1))
    assert actions[:2] == [Forward(BarrierMark(suspend)), life.PauseOperators()]
    assert isinstance(actions[2], StoreSnapshot) and len(actions) == 3
    assert drive.machine.paused
    assert not drive.machine.reads("a")
    assert drive(life.CheckpointCompletedNotice(1)) == [life.CommitUpTo(1), KillQuery(), Forward(EndOfData(False)), *END]
    assert drive.machine.suspended


@pytest.mark.parametrize("first", ["watermark", "barrier"])
def test_the_snapshot_of_a_stop_waits_until_the_query_has_emitted_what_is_due(first: str) -> None:
    drive = behind("a", "b")
    for name in ("a", "b"):
        drive.read(name, "row", WatermarkAt(100))
    drive(QueryConsumed({"a": 1, "b": 1}))
    assert not drive.machine.gate.settling
    if first == "watermark":
        drive(QuerySettled())  # in front of the barrier: it has run under 100
        drive.read("a", WatermarkAt(200))
        drive.read("b", WatermarkAt(200))
    for name in ("a", "b"):
        drive.read(name, BarrierMark(barrier(1, SUSPEND)))
    assert drive.machine.gate.settling, "it has not run under the newest watermark"
    assert isinstance(drive(QuerySettled())[0], PinSnapshot)
    assert not drive.machine.gate.settling


def test_a_checkpoint_does_not_wait_until_the_query_has_emitted_what_is_due() -> None:
    drive = behind("a")
    drive.read("a", WatermarkAt(100))
    (pin,) = drive.read("a", BarrierMark(barrier(1)))
    assert isinstance(pin, PinSnapshot)


# Bursts


def test_event_time_goes_to_the_consumers_in_front_of_the_barrier_that_came_behind_it() -> None:
    drive = behind("a", takes_watermark=False)
    drive.read("a", "rows", WatermarkAt(100), BarrierMark(barrier(1, SUSPEND)))
    assert drive(QueryConsumed({"a": 1})) == []
    assert isinstance(drive(QuerySettled())[0], PinSnapshot)
    assert drive(SnapshotPinned(1))[:2] == [WatermarkReached(100), Forward(BarrierMark(barrier(1, SUSPEND)))]


def test_an_unbounded_source_reports_once_that_it_has_read_what_was_there() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, traits=TaskTraits(burst=True)))
    drive(TaskOpened())
    drive(QueryRunning())
    assert not drive.machine.has_read_all
    assert drive(SourceExhausted()) == [Report(SourcesRead(TASK))]
    assert drive(SourceExhausted()) == []
    assert drive.machine.has_read_all and drive.machine.running
    assert drive(EndInput()) == [StopSource(), life.FinishOperators()], "it can still be drained"
    assert Report(SourceEnded(TASK)) in drive(life.OperatorsFinished())


def test_a_bounded_source_ends_in_a_burst_as_in_any_run() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, traits=TaskTraits(bounded=True, burst=True)))
    drive(TaskOpened())
    drive(QueryRunning())
    assert drive(SourceExhausted()) == [life.FinishOperators()]
    assert drive(life.OperatorsFinished())[-1] == Report(SourceEnded(TASK))


def test_a_source_whose_data_had_ended_says_so_when_a_burst_restores_it() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, traits=TaskTraits(finished_before=True, burst=True)))
    assert Report(SourceEnded(TASK)) in drive(TaskOpened())


def test_a_stage_behind_channels_reports_nothing_in_a_burst() -> None:
    drive = Driver(TaskMachine(TASK, CONFIG, [GateChannel("a")], traits=TaskTraits(finished_before=True, burst=True)))
    assert not any(isinstance(action, Report) and isinstance(action.event, SourcesRead) for action in drive(TaskOpened()))


def test_a_task_resumes_after_a_failed_suspend() -> None:
    drive = behind("a")
    drive.read("a", "row", EndOfData(True))
    drive(TriggerReceived(barrier(1, SUSPEND)))
    drive.read("a", EndOfPartition())
    assert drive(QueryConsumed({"a": 1})) == []
    (pin,) = drive(QuerySettled())
    assert isinstance(pin, PinSnapshot)
    drive(SnapshotPinned(1))
    aborted = drive(life.CheckpointAbortedNotice(1))
    assert aborted == [NotifyOperatorsAborted(1), life.ResumeOperators(), life.FinishOperators()]
    assert not drive.machine.paused


def test_a_source_that_is_exhausted_while_paused_finishes_when_it_resumes() -> None:
    drive = source()
    drive.snapshot(1, SUSPEND)
    assert drive.machine.paused
    assert drive(EndInput()) == [StopSource()]
    assert drive(life.CheckpointAbortedNotice(1)) == [NotifyOperatorsAborted(1), life.ResumeOperators(), life.FinishOperators()]


MEASURED = CheckpointConfig(interval=1.0, interval_during_backlog=60.0, backlog_rows=100)


@pytest.mark.parametrize(
    ("config", "rows", "reported"),
    [
        (MEASURED, [99, 100, 500, 99, None], [None, True, None, False, None]),
        (MEASURED, [100, None, 100], [True, False, True]),  # a source that cannot tell has no backlog
        (BACKLOG, [1_000], [None]),  # no threshold
        (CONFIG, [1_000], [None]),
    ],
)
def test_an_unbounded_source_reports_the_backlog_that_it_measures(
    config: CheckpointConfig, rows: list[int | None], reported: list[bool | None]
) -> None:
    drive = source(config)
    expected = [[] if backlog is None else [Report(BacklogChanged(TASK, backlog))] for backlog in reported]
    assert [drive(BacklogMeasured(count)) for count in rows] == expected


def test_a_bounded_source_is_a_backlog_whatever_it_measures() -> None:
    drive = Driver(TaskMachine(TASK, MEASURED, traits=TaskTraits(bounded=True)))
    drive(TaskOpened())
    assert drive(QueryRunning()) == [RUNNING, Report(BacklogChanged(TASK, True))]
    assert drive(BacklogMeasured(0)) == []


def test_a_task_behind_channels_measures_no_backlog() -> None:
    with pytest.raises(UnexpectedEvent, match="reads channels"):
        behind("a", config=MEASURED)(BacklogMeasured(5))
