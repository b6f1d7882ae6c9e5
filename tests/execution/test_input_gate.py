"""The gate in front of a task's inputs, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AbortAlignment, AlignmentTick, TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent, UnknownChannel
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS, ChannelWatermark
from dagster_checkpoints.execution.elements import (
    BarrierMark,
    CancelMark,
    EndOfData,
    EndOfPartition,
    WatermarkAt,
    WatermarkStatus,
)
from dagster_checkpoints.execution.gate_snapshots import InputsCaptured, PinDue
from dagster_checkpoints.execution.input_channel import GateChannel
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.task_events import (
    AddToTable,
    BetweenBatches,
    BuildQuery,
    DropSnapshot,
    ElementsArrived,
    Evaluated,
    EvaluateOnce,
    Forward,
    HoldQuery,
    OpenTo,
    PinnedChannel,
    PinnedInputs,
    PinSnapshot,
    QueryBuilt,
    QueryConsumed,
    QueryHeld,
    QueryRunning,
    SnapshotFailed,
    SnapshotPinned,
    StartQuery,
    TaskOpened,
    UnreadBarrier,
    WatermarkReached,
)
from dagster_checkpoints.state.metadata import ChannelSnapshot

ALIGNED = CheckpointConfig(interval=None)
AT_LEAST_ONCE = CheckpointConfig(interval=None, mode="at_least_once")
UNALIGNED = CheckpointConfig(interval=None, unaligned=True)
TIMEOUT = CheckpointConfig(interval=None, unaligned=True, aligned_checkpoint_timeout=5.0)
ROW = "row"


def barrier(checkpoint_id: int, timestamp: float = 0.0) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, timestamp)


def mark(checkpoint_id: int) -> BarrierMark:
    return BarrierMark(barrier(checkpoint_id))


class Driver:
    """A gate, and a clock that advances by one second with each event."""

    def __init__(
        self,
        *names: str,
        static: Sequence[str] = (),
        config: CheckpointConfig = ALIGNED,
        restored: dict[str, ChannelWatermark] | None = None,
        valve: int | None = None,
        position: int = 0,
    ) -> None:
        known = restored or {}
        channels = [GateChannel(name, name in static, position, known.get(name)) for name in names]
        self.gate = InputGate(channels, config, valve)
        self.now = 0.0

    def __call__(self, event: object) -> list[Any]:
        self.now += 1.0
        return self.gate.handle(event, self.now)

    def started(self, built: QueryBuilt | None = None) -> Driver:
        """The query runs."""
        assert self(TaskOpened()) == [BuildQuery()]
        assert self(built or QueryBuilt())[-1] == StartQuery()
        self(QueryRunning())
        return self

    def read(self, channel: str, *elements: Any) -> list[Any]:
        return self(ElementsArrived(((channel, elements),)))

    @property
    def due_checkpoints(self) -> tuple[int, ...]:
        """The checkpoints whose snapshots wait until the query has caught up."""
        return tuple(due.checkpoint_id for due in self.gate._due if due.takes_snapshot)

    def consumed(self, **positions: int) -> list[Any]:
        return self(QueryConsumed(positions))


def pins(actions: Sequence[Any]) -> list[int]:
    return [action.pin.barrier.checkpoint_id for action in actions if isinstance(action, PinDue)]


def opened(actions: Sequence[Any]) -> list[tuple[dict[str, int], int | None]]:
    return [(dict(action.positions), action.watermark) for action in actions if isinstance(action, OpenTo)]


# The beginning


def test_nothing_is_read_before_the_query_has_started() -> None:
    drive = Driver("a")
    assert not drive.gate.reads("a")
    assert drive.read("a", ROW) == []
    assert drive(TaskOpened()) == [BuildQuery()]
    assert not drive.gate.reads("a")
    assert drive(QueryBuilt()) == [OpenTo({"a": 0}, None), StartQuery()]
    assert drive.gate.open
    assert not drive.gate.reads("a")
    assert drive.read("a", ROW) == []
    assert drive(QueryRunning()) == []
    assert drive.gate.reads("a")
    assert drive.gate.scanned("a") == 0
    assert drive.read("a", ROW) == [OpenTo({"a": 1}, None)]
    assert drive.gate.scanned("a") == 1


@pytest.mark.parametrize(
    "answer", [QueryBuilt(), QueryRunning(), Evaluated(), SnapshotPinned(1), SnapshotFailed(1), TaskOpened()]
)
def test_an_unexpected_answer_is_refused(answer: object) -> None:
    drive = Driver("a").started()
    text = "answers no action of the gate, which waits for nothing"
    with pytest.raises(UnexpectedEvent, match=rf"{type(answer).__name__}\(.*{text}"):
        drive(answer)


def test_another_answer_than_the_one_waited_for_is_refused() -> None:
    drive = Driver("a")
    with pytest.raises(UnexpectedEvent, match="which waits for TaskOpened"):
        drive(QueryBuilt())


def test_unknown_events_are_refused_and_unknown_channels_are_named() -> None:
    drive = Driver("a", "b").started()
    with pytest.raises(UnexpectedEvent, match="is no event of an input gate"):
        drive(EndOfData(True))
    with pytest.raises(UnknownChannel, match=r"'c' is not an input of this task, which has a, b\."):
        drive.gate.reads("c")
    with pytest.raises(UnknownChannel, match="'c'"):
        drive.consumed(c=1)
    with pytest.raises(UnknownChannel, match="which has no inputs"):
        Driver().gate.scanned("a")


def test_positions_begin_at_the_restored_ones() -> None:
    drive = Driver("a", position=7).started()
    assert drive.gate.scanned("a") == 7
    assert drive.read("a", ROW, WatermarkAt(4)) == [OpenTo({"a": 8}, 4)]


def test_a_restored_watermark_is_reported_when_the_query_is_built() -> None:
    drive = Driver("a", restored={"a": ChannelWatermark(30)}, valve=20)
    assert drive.gate.watermark == 30
    drive(TaskOpened())
    assert drive(QueryBuilt()) == [OpenTo({"a": 0}, 30), StartQuery()]


def test_a_restored_watermark_of_all_channels_holds_though_one_is_new() -> None:
    drive = Driver("a", "b", restored={"a": ChannelWatermark(30)}, valve=20)
    assert drive.gate.watermark == 20


# Reading


def test_marks_alone_do_not_open_the_gate_but_their_watermark_is_reported() -> None:
    drive = Driver("a", "b").started()
    assert drive.read("a", WatermarkAt(5)) == []
    assert drive.read("b", WatermarkAt(3), ROW, WatermarkAt(4)) == [OpenTo({"a": 0, "b": 2}, 4)]
    assert drive.read("b", WatermarkAt(9)) == [OpenTo({"a": 0, "b": 2}, 5)]
    assert drive.read("b", WatermarkAt(10)) == []


def test_the_watermark_does_not_go_back_and_one_after_the_end_is_ignored() -> None:
    drive = Driver("a").started()
    assert opened(drive.read("a", WatermarkAt(5), WatermarkAt(3))) == [({"a": 0}, 5)]
    drive.read("a", ROW, EndOfData(True))
    assert drive.gate.watermark == MAX_WATERMARK_MS


def test_an_idle_channel_does_not_count_until_it_is_active_again() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", WatermarkAt(5))
    assert opened(drive.read("b", WatermarkStatus(True))) == [({"a": 0, "b": 0}, 5)]
    drive.read("b", WatermarkStatus(False), WatermarkAt(6))
    assert opened(drive.read("a", WatermarkAt(9))) == [({"a": 0, "b": 0}, 6)]


def test_idleness_is_forwarded_only_when_everything_is_consumed() -> None:
    drive = Driver("a").started()
    drive.read("a", ROW, WatermarkStatus(True))
    assert drive.gate.has_news
    assert drive(BetweenBatches()) == []
    drive.consumed(a=1)
    assert drive(BetweenBatches()) == [Forward(WatermarkStatus(True))]
    assert not drive.gate.has_news
    assert drive(BetweenBatches()) == []
    drive.read("a", WatermarkStatus(False), ROW)
    assert drive.gate.has_news
    assert drive(BetweenBatches()) == [Forward(WatermarkStatus(False))]


@pytest.mark.parametrize("idle", [True, False])
def test_a_restored_task_says_again_whether_it_is_idle(idle: bool) -> None:
    """Its consumers may know it as idle, although it was active in the checkpoint: they had not been told yet."""
    drive = Driver("a", restored={"a": ChannelWatermark(5, idle=idle)}, valve=5).started()
    assert drive.gate.has_news
    assert drive(BetweenBatches()) == [Forward(WatermarkStatus(idle))]
    assert not drive.gate.has_news


def test_a_status_or_an_end_after_the_end_is_ignored() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", EndOfData(False), EndOfData(True), WatermarkStatus(True), WatermarkAt(7))
    drive.read("b", WatermarkAt(3))
    assert drive.gate.watermark < 0  # after a suspend the channel keeps its last watermark, and it has none
    assert drive.read("b", EndOfData(True))[-1] == life.EndOfDataReceived(False)


# Which watermark is reported, and when


def test_consuming_one_channel_does_not_release_marks_that_wait_for_another() -> None:
    drive = Driver("a", "b").started(QueryBuilt(takes_watermark=False))
    drive.read("a", ROW, WatermarkAt(5))
    drive.read("b", ROW, WatermarkAt(6))
    drive.consumed(a=1)
    assert drive(BetweenBatches()) == []
    drive.consumed(b=1)
    assert drive(BetweenBatches()) == [WatermarkReached(5)]


def test_consumed_positions_do_not_go_back() -> None:
    drive = Driver("a").started()
    drive.read("a", ROW, ROW)
    drive.consumed(a=2)
    drive.consumed(a=1)
    assert drive.gate.caught_up


def test_without_state_the_watermark_is_forwarded_behind_its_records() -> None:
    drive = Driver("a").started(QueryBuilt(takes_watermark=False))
    drive.read("a", ROW, WatermarkAt(5))
    assert drive.gate.has_news
    assert drive(BetweenBatches()) == []
    drive.read("a", WatermarkAt(6))
    drive.consumed(a=1)
    assert drive(BetweenBatches()) == [WatermarkReached(6)]
    assert not drive.gate.has_news
    assert drive(BetweenBatches()) == []


def test_without_state_a_restored_watermark_is_forwarded_at_once_but_never_max_watermark() -> None:
    drive = Driver("a", "b", restored={"a": ChannelWatermark(5), "b": ChannelWatermark(5)}, valve=5)
    drive.started(QueryBuilt(takes_watermark=False))
    assert drive(BetweenBatches()) == [WatermarkReached(5), Forward(WatermarkStatus(False))]
    drive.read("a", ROW, WatermarkAt(MAX_WATERMARK_MS))
    drive.read("b", WatermarkAt(MAX_WATERMARK_MS))
    drive.consumed(a=1)
    assert drive(BetweenBatches()) == []  # sent after the rows that `finish` returns


def test_with_state_no_watermark_is_forwarded() -> None:
    drive = Driver("a").started()
    drive.read("a", WatermarkAt(5))
    assert not drive.gate.has_news
    assert drive(BetweenBatches()) == []


# Barriers


def test_a_channel_is_blocked_from_its_barrier_until_the_snapshot() -> None:
    drive = Driver("a", "b").started()
    assert drive.read("a", ROW, mark(1), ROW) == [OpenTo({"a": 1, "b": 0}, None)]
    assert drive.gate.scanned("a") == 2
    assert not drive.gate.reads("a")
    assert drive.gate.reads("b")
    assert drive.read("a", ROW) == []
    assert drive.read("b", ROW, mark(1), ROW) == [OpenTo({"a": 1, "b": 1}, None)]
    assert drive.gate.scanned("b") == 2
    assert drive.due_checkpoints == (1,)
    assert not drive.gate.reads("a") and not drive.gate.reads("b")
    assert drive.consumed(a=1) == []
    assert pins(drive.consumed(b=1)) == [1]
    assert not drive.gate.reads("a")
    assert drive(SnapshotPinned(1)) == []
    assert drive.gate.reads("a") and drive.gate.reads("b")


def test_the_inputs_part_of_a_snapshot() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", WatermarkAt(5), ROW, mark(1))
    drive.read("b", WatermarkStatus(True), ROW, EndOfData(False), mark(1))
    (due,) = drive.consumed(a=2, b=2)
    inputs = due.pin.inputs
    assert inputs == PinnedInputs(
        (
            PinnedChannel(ChannelSnapshot("a", 3, 5, False, "none")),
            PinnedChannel(ChannelSnapshot("b", 4, None, False, "suspend", behind=True)),
        ),
        5,
    )
    assert not due.pin.overtaking


def test_the_time_of_the_alignment_counts_from_the_first_barrier() -> None:
    drive = Driver("a", "b", "c").started()
    drive.read("a", mark(1))
    began = drive.now
    drive.read("b", mark(1))
    (due,) = drive.read("c", mark(1))
    assert due.since == began
    drive(SnapshotPinned(1))
    drive.read("a", mark(2))
    began = drive.now
    drive.read("b", mark(2))
    (second,) = drive.read("c", mark(2))
    assert second.since == began


def test_without_an_alignment_the_snapshot_is_due_since_its_trigger() -> None:
    drive = Driver("a").started()
    drive.read("a", ROW)
    drive(TriggerReceived(barrier(1)))
    assert drive.due_checkpoints == ()  # its channel may still bring the barrier
    drive.read("a", EndOfData(True), EndOfPartition())
    since = drive.now
    (due,) = [action for action in drive.consumed(a=1) if isinstance(action, PinDue)]
    assert (due.pin.barrier, due.since) == (barrier(1), since)


def test_a_cancel_mark_unblocks_is_forwarded_and_is_reported_to_the_coordinator() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", mark(1))
    reason = FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
    assert drive.read("b", CancelMark(1)) == [Forward(CancelMark(1)), AbortAlignment(1, reason)]
    assert drive.gate.reads("a")


def test_a_cancel_mark_of_an_unknown_checkpoint_is_forwarded() -> None:
    drive = Driver("a", "b").started()
    reason = FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
    assert drive.read("a", CancelMark(5)) == [Forward(CancelMark(5)), AbortAlignment(5, reason)]


def test_a_blocked_channel_does_not_keep_another_one_from_being_read() -> None:
    drive = Driver("a", "b").started()
    assert drive(ElementsArrived((("a", (mark(1), ROW)), ("b", (ROW,))))) == [OpenTo({"a": 0, "b": 1}, None)]
    assert (drive.gate.scanned("a"), drive.gate.scanned("b")) == (1, 1)


def test_an_abort_by_the_coordinator_is_forwarded_and_not_reported_back() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", mark(1))
    assert drive(life.CheckpointAbortedNotice(1)) == [Forward(CancelMark(1))]
    assert drive.gate.reads("a")
    drive.read("b", mark(2))
    drive.read("a", mark(2))
    assert drive.due_checkpoints == ()


def test_a_newer_barrier_restarts_the_alignment_time() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", mark(1))
    drive(life.CheckpointAbortedNotice(1))
    drive.read("a", mark(2))
    began = drive.now
    (due,) = drive.read("b", mark(2))
    assert due.since == began


def test_an_aborted_snapshot_that_is_due_is_not_taken() -> None:
    drive = Driver("a").started()
    drive.read("a", ROW, mark(1))
    assert drive(life.CheckpointAbortedNotice(2)) == []
    assert drive.due_checkpoints == (1,)
    assert drive(life.CheckpointAbortedNotice(1)) == []
    assert drive.due_checkpoints == ()
    assert drive.gate.reads("a")
    assert pins(drive.consumed(a=1)) == []


def test_after_a_failed_snapshot_the_gate_continues() -> None:
    drive = Driver("a").started()
    assert pins(drive.read("a", mark(1))) == [1]
    assert drive(SnapshotFailed(1)) == []
    assert drive.gate.reads("a")
    assert pins(drive.read("a", mark(2))) == [2]


def test_two_snapshots_that_are_due_are_taken_one_after_the_other() -> None:
    drive = Driver("a", config=CheckpointConfig(interval=None, max_concurrent=2)).started()
    drive.read("a", ROW, EndOfPartition())
    drive(TriggerReceived(barrier(1)))
    drive(TriggerReceived(barrier(2)))
    assert drive.due_checkpoints == (1, 2)
    assert pins(drive.consumed(a=1)) == [1]
    assert drive.due_checkpoints == (2,)
    assert pins(drive(SnapshotPinned(1))) == [2]
    assert drive(SnapshotPinned(2)) == []
    assert drive.gate.reads("a")


# The end


def test_the_data_ends_when_everything_is_consumed() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", ROW, EndOfData(True), EndOfPartition())
    drive.read("b", EndOfData(True))
    assert drive.gate.open
    assert drive.consumed(a=1) == [life.EndOfDataReceived(True)]
    assert not drive.gate.open
    assert drive.consumed(a=2) == []


def test_the_data_ends_with_a_suspend_if_one_channel_ends_with_one() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", EndOfData(True))
    assert drive.read("b", EndOfData(False))[-1] == life.EndOfDataReceived(False)


def test_the_data_does_not_end_before_a_due_snapshot_is_taken() -> None:
    drive = Driver("a", "b").started()
    drive.read("a", mark(1))
    drive.read("b", EndOfData(True))
    assert pins(drive.read("b", mark(1))) == [1]
    assert drive.read("a", EndOfData(True)) == []
    assert drive(SnapshotPinned(1)) == []
    assert drive.read("a", EndOfData(True))[-1] == life.EndOfDataReceived(True)


def test_restored_ends_end_the_data_as_soon_as_the_query_has_started() -> None:
    drive = Driver("a", restored={"a": ChannelWatermark(MAX_WATERMARK_MS, ended="drain")})
    drive(TaskOpened())
    drive(QueryBuilt())
    assert drive(QueryRunning()) == [life.EndOfDataReceived(True)]


def test_after_the_end_barriers_are_read_and_records_are_not() -> None:
    drive = Driver("a").started()
    drive.read("a", EndOfData(True))
    drive(life.FinishOperators())
    assert drive.gate.reads("a")
    assert drive.read("a", ROW, WatermarkAt(5), EndOfData(True)) == []
    (due,) = drive.read("a", mark(1))
    assert due.pin.inputs.channels == (PinnedChannel(ChannelSnapshot("a", 1, None, False, "drain")),)
    assert drive.gate.scanned("a") == 5


def test_a_task_restored_after_its_end_only_reads_barriers() -> None:
    drive = Driver("a", "s", static=["s"])
    assert drive(life.RestoredAfterFinish()) == []
    assert not drive.gate.open
    assert drive.gate.reads("a")
    assert drive.read("a", ROW, WatermarkAt(3), EndOfData(True)) == []
    drive.read("s", EndOfData(True), EndOfPartition())
    (due,) = drive.read("a", mark(1))
    assert due.pin.inputs.channels[0].in_flight == ()


# A suspend


def test_nothing_is_read_opened_or_ended_while_the_operators_are_paused() -> None:
    drive = Driver("a").started()
    drive(life.PauseOperators())
    assert not drive.gate.reads("a")
    assert drive.read("a", ROW) == []
    assert drive.gate.scanned("a") == 0
    assert drive(life.ResumeOperators()) == []
    assert drive.gate.reads("a")
    drive.read("a", ROW, EndOfData(True))
    drive(life.PauseOperators())
    assert drive.consumed(a=1) == []
    assert drive(life.ResumeOperators()) == [life.EndOfDataReceived(True)]


# Static inputs


def test_while_a_static_input_is_not_ready_barriers_pass_and_the_rest_is_in_flight() -> None:
    drive = Driver("a", "s", static=["s"])
    assert drive(TaskOpened()) == []
    assert not drive.gate.open
    assert drive.read("s", "t1") == [AddToTable("s", "t1")]
    assert drive.read("a", WatermarkAt(3), "r1", mark(1)) == []
    (due,) = drive.read("s", "t2", mark(1))[1:]
    assert due.pin.inputs == PinnedInputs(
        (
            PinnedChannel(ChannelSnapshot("a", 0), (WatermarkAt(3), "r1")),
            PinnedChannel(ChannelSnapshot("s", 3)),
        )
    )
    drive(SnapshotPinned(1))
    drive.read("a", "r2", WatermarkAt(4))
    assert drive.read("s", EndOfData(False)) == []
    assert drive.read("s", EndOfData(True)) == [BuildQuery()]
    assert drive(QueryBuilt()) == [OpenTo({"a": 4}, 4), StartQuery()]
    assert drive(QueryRunning()) == []
    drive.consumed(a=4)
    drive.read("a", mark(2))
    (due,) = drive.read("s", mark(2))
    assert due.pin.inputs.channels == (
        PinnedChannel(ChannelSnapshot("a", 6, 4)),
        PinnedChannel(ChannelSnapshot("s", 6, ended="drain")),
    )


def test_a_snapshot_that_is_due_when_the_static_inputs_are_ready_waits_for_the_query() -> None:
    drive = Driver("a", "s", static=["s"])
    drive(TaskOpened())
    drive.read("a", ROW, mark(1))
    assert drive.read("s", EndOfData(True), mark(1)) == [BuildQuery()]
    assert drive.due_checkpoints == (1,)
    assert drive(QueryBuilt()) == [OpenTo({"a": 1}, None), StartQuery()]
    assert drive(QueryRunning()) == []
    (due,) = drive.consumed(a=1)
    assert due.pin.inputs.channels[0] == PinnedChannel(ChannelSnapshot("a", 2))


def test_a_static_input_that_ended_before_the_checkpoint_is_ready_and_its_records_are_not_added_again() -> None:
    drive = Driver("a", "s", static=["s"], restored={"s": ChannelWatermark(ended="drain")})
    assert drive(TaskOpened()) == [BuildQuery()]
    drive(QueryBuilt())
    drive(QueryRunning())
    assert drive.read("s", "t1", EndOfData(True)) == []
    assert drive.read("s", mark(1)) == []
    (due,) = drive.read("a", mark(1))
    assert due.pin.inputs.channels[1].snapshot.ended == "drain"


def test_all_static_inputs_are_waited_for() -> None:
    drive = Driver("s", "t", static=["s", "t"])
    drive(TaskOpened())
    assert drive.read("s", EndOfData(True)) == []
    assert drive.read("t", EndOfData(True)) == [BuildQuery()]


def test_a_plan_without_streams_is_evaluated_once_after_the_due_snapshots() -> None:
    drive = Driver("s", static=["s"])
    drive(TaskOpened())
    assert drive.read("s", EndOfData(True), mark(1)) == [BuildQuery()]
    (due,) = drive(QueryBuilt(streaming=False))
    assert due.pin.barrier == barrier(1)
    assert drive(SnapshotPinned(1)) == [EvaluateOnce()]
    assert not drive.gate.reads("s")
    assert drive(Evaluated()) == [life.EndOfDataReceived(True)]
    assert not drive.gate.open
    assert drive(life.FinishOperators()) == []


def test_a_plan_that_is_evaluated_once_sends_no_restored_watermark() -> None:
    drive = Driver("s", static=["s"], valve=5)
    drive(TaskOpened())
    drive.read("s", EndOfData(True))
    drive(QueryBuilt(streaming=False, takes_watermark=False))
    assert not drive.gate.has_news and drive(BetweenBatches()) == []


def test_the_end_of_a_partition_counts_as_every_barrier() -> None:
    drive = Driver("a", "b", "s", static=["s"])
    drive(TaskOpened())
    drive.read("a", EndOfData(True), EndOfPartition())
    drive.read("s", EndOfPartition())
    (due,) = drive.read("b", mark(1))
    assert due.pin.inputs.channels[0].in_flight == (EndOfData(True), EndOfPartition())


@pytest.mark.parametrize("at_its_end", [False, True])
def test_the_end_of_a_partition_is_not_in_flight_once_the_query_runs(at_its_end: bool) -> None:
    drive = Driver("a", "b").started()
    if at_its_end:
        drive.read("a", EndOfData(True))
        drive.read("b", EndOfData(True))
        drive(life.FinishOperators())
    drive.read("a", EndOfPartition())
    (due,) = drive.read("b", mark(1))
    assert [channel.in_flight for channel in due.pin.inputs.channels] == [(), ()]


# At-least-once


def test_at_least_once_no_channel_is_blocked_and_records_after_a_barrier_are_repeated() -> None:
    drive = Driver("a", "b", config=AT_LEAST_ONCE).started()
    drive.read("a", WatermarkAt(5), mark(1), ROW, WatermarkAt(9), EndOfData(True))
    assert drive.gate.reads("a")
    drive.read("b", WatermarkAt(7), ROW)
    assert drive.read("b", mark(1)) == []
    (due,) = drive.consumed(a=3, b=2)
    assert [c.snapshot for c in due.pin.inputs.channels] == [
        ChannelSnapshot("a", 5, 5, False, "none"),
        ChannelSnapshot("b", 3, 7, False, "none"),
    ]
    drive(SnapshotPinned(1))
    assert drive.read("b", mark(2)) == []
    (due,) = drive.read("a", EndOfPartition())
    assert due.pin.inputs.channels[0].snapshot == ChannelSnapshot("a", 6, 9, False, "drain")


def test_at_least_once_records_held_behind_the_barrier_are_repeated() -> None:
    drive = Driver("a", "s", static=["s"], config=AT_LEAST_ONCE)
    drive(TaskOpened())
    drive.read("a", "r1", mark(1), "r2")
    (due,) = drive.read("s", mark(1))
    assert due.pin.inputs.channels[0].in_flight == ("r1",)


def test_at_least_once_a_task_that_ended_behind_the_barrier_declines() -> None:
    drive = Driver("a", "b", config=AT_LEAST_ONCE).started()
    drive.read("a", mark(1), EndOfData(True))
    assert drive.read("b", EndOfData(True))[-1] == life.EndOfDataReceived(True)
    drive(life.FinishOperators())
    reason = FailureReason.CHECKPOINT_DECLINED_INPUT_END_OF_STREAM
    assert drive.read("b", mark(1)) == [Forward(CancelMark(1)), AbortAlignment(1, reason)]
    drive.read("a", mark(2))
    assert pins(drive.read("b", mark(2))) == [2]  # both ended before it


def test_at_least_once_an_abort_forgets_its_own_barriers_only() -> None:
    drive = Driver("a", "b", config=AT_LEAST_ONCE).started()
    drive.read("a", WatermarkAt(5), mark(1), WatermarkAt(6), mark(2), WatermarkAt(7))
    assert drive(life.CheckpointAbortedNotice(2)) == [Forward(CancelMark(2))]
    (due,) = drive.read("b", mark(1))
    assert due.pin.inputs.channels[0].snapshot.watermark == 5


# Unaligned


def test_the_elements_that_an_unaligned_barrier_overtakes_are_captured() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    (due,) = drive.read("a", mark(1))
    assert due.pin.overtaking
    assert due.pin.barrier.properties.unaligned
    assert drive(SnapshotPinned(1)) == []
    assert drive.gate.reads("a") and drive.gate.reads("b")
    drive.read("a", "behind")
    assert opened(drive.read("b", "r1", WatermarkAt(4))) == [({"a": 2, "b": 1}, None)]
    assert drive.read("b", mark(1), "behind") == [InputsCaptured(1, {"b": ("r1", WatermarkAt(4))})]
    assert drive.gate.scanned("b") == 3
    assert drive.gate.reads("b")


def test_an_unaligned_snapshot_is_taken_at_what_the_query_has_consumed() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    drive.read("b", "r1", WatermarkAt(3), WatermarkStatus(True), "r2", WatermarkAt(4), mark(0), "r3", EndOfData(True))
    drive.read("a", WatermarkAt(5))
    assert drive.read("a", mark(1)) == [HoldQuery(1)]
    assert drive.gate.holding == 1
    assert not drive.gate.reads("b")
    assert drive.read("b", "r4") == []
    (due,) = drive(QueryHeld(1, {"a": 1, "b": 1}))
    assert due.pin.overtaking
    assert due.pin.inputs == PinnedInputs(
        (
            PinnedChannel(ChannelSnapshot("a", 2, watermark=5)),
            PinnedChannel(ChannelSnapshot("b", 3, watermark=3, idle=True), ("r2", WatermarkAt(4), "r3", EndOfData(True))),
        ),
        5,
    )
    assert drive(SnapshotPinned(1)) == []
    # The query goes on with what was opened before, and what is read now is captured.
    drive.read("b", "r4")
    assert drive.gate.retains("b") and not drive.gate.retains("a")
    drive.consumed(a=1, b=7)
    assert drive.read("b", EndOfPartition()) == [InputsCaptured(1, {"b": ("r4",)})]
    assert not drive.gate.retains("b")


def test_without_unconsumed_elements_an_unaligned_snapshot_holds_no_query() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    drive.read("b", "r1", WatermarkAt(3))
    drive.consumed(b=1)
    (due,) = drive.read("a", mark(1))
    assert due.pin.inputs.channels[1] == PinnedChannel(ChannelSnapshot("b", 2, watermark=3))


@pytest.mark.parametrize("aborted", [False, True])
def test_a_query_that_cannot_be_held_gives_the_snapshot_up(aborted: bool) -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    drive.read("b", "r1")
    assert drive.read("a", mark(1)) == [HoldQuery(1)]
    if aborted:
        assert drive(life.CheckpointAbortedNotice(1)) == [Forward(CancelMark(1))]
        assert drive(QueryHeld(1, {"b": 0})) == []
    else:
        assert drive(SnapshotFailed(1)) == []
    assert drive.gate.reads("b")
    assert not drive.gate.retains("b")
    drive.read("b", mark(1))
    drive.read("b", "r2")
    assert drive.read("a", mark(2)) == [HoldQuery(2)]
    (due,) = drive(QueryHeld(2, {"b": 1}))
    assert due.pin.inputs.channels[1].in_flight == ("r2",)


def test_a_restored_watermark_is_that_of_an_unaligned_snapshot_before_anything_is_consumed() -> None:
    restored = {"a": ChannelWatermark(7), "b": ChannelWatermark(9, idle=True)}
    drive = Driver("a", "b", config=UNALIGNED, restored=restored, valve=7, position=20).started()
    drive.read("a", "r1", WatermarkAt(8))
    drive.read("b", mark(1))
    (due,) = drive(QueryHeld(1, {"a": 20, "b": 20}))
    assert due.pin.inputs == PinnedInputs(
        (
            PinnedChannel(ChannelSnapshot("a", 20, watermark=7), ("r1", WatermarkAt(8))),
            PinnedChannel(ChannelSnapshot("b", 21, watermark=9, idle=True)),
        ),
        7,
    )


def test_what_was_in_flight_before_a_static_input_was_ready_is_so_until_it_is_consumed() -> None:
    drive = Driver("a", "s", static=["s"], config=UNALIGNED)
    drive(TaskOpened())
    drive.read("a", WatermarkAt(1), "r1", mark(1))
    drive(SnapshotPinned(1))
    drive.read("a", WatermarkAt(2))
    drive.read("s", mark(1))
    drive.read("s", EndOfData(True))
    drive(QueryBuilt())
    drive(QueryRunning())
    drive.read("a", mark(2))
    (due,) = drive(QueryHeld(2, {"a": 0}))
    assert due.pin.inputs.channels[0] == PinnedChannel(ChannelSnapshot("a", 1, watermark=1), ("r1", WatermarkAt(2)))
    drive(SnapshotPinned(2))
    drive.consumed(a=2)
    drive.read("s", mark(2))
    (due,) = drive.read("a", mark(3))
    assert due.pin.inputs.channels[0] == PinnedChannel(ChannelSnapshot("a", 6, watermark=2))


def test_a_timeout_overtakes_what_the_query_has_not_consumed() -> None:
    drive = Driver("a", config=TIMEOUT).started()
    assert opened(drive.read("a", "r1", mark(1))) == [({"a": 1}, None)]
    assert drive.due_checkpoints == (1,)
    assert drive.gate.next_deadline() == 5.0
    assert drive(AlignmentTick(4.9)) == []
    assert drive(AlignmentTick(5.0)) == [HoldQuery(1)]
    assert drive.gate.next_deadline() is None
    (due,) = drive(QueryHeld(1, {"a": 0}))
    assert due.pin.barrier.properties.unaligned
    assert due.pin.inputs.channels[0].in_flight == ("r1",)
    assert drive(SnapshotPinned(1)) == [InputsCaptured(1, {})]


def test_a_snapshot_that_the_query_reaches_before_the_timeout_is_aligned() -> None:
    drive = Driver("a", config=TIMEOUT).started()
    drive.read("a", "r1", mark(1))
    (due,) = drive.consumed(a=1)
    assert not due.pin.overtaking
    drive(SnapshotPinned(1))
    savepoint = CheckpointBarrier(2, 0.0, CheckpointProperties.for_savepoint())
    drive.read("a", "r2", BarrierMark(savepoint))
    assert drive.gate.next_deadline() is None
    assert drive(AlignmentTick(99.0)) == []
    (due,) = drive.consumed(a=3)
    assert due.pin == PinSnapshot(savepoint, due.pin.inputs)


def test_an_announced_barrier_overtakes_unread_elements() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    (due,) = drive(UnreadBarrier("a", barrier(1), ("r1", CancelMark(0), WatermarkAt(3))))
    assert due.pin.overtaking
    assert drive(SnapshotPinned(1)) == []
    assert drive.read("b", EndOfData(True), EndOfPartition()) == [
        InputsCaptured(1, {"a": ("r1", WatermarkAt(3)), "b": (EndOfData(True),)}),
    ]
    # Read nevertheless, and not captured again.
    assert opened(drive.read("a", "r1", CancelMark(0), WatermarkAt(3), mark(1))) == [({"a": 1, "b": 0}, 3)]


def test_elements_read_before_an_announced_barrier_overtakes_are_not_captured() -> None:
    drive = Driver("a", "b", config=TIMEOUT).started()
    assert drive(UnreadBarrier("a", barrier(1), ("r1", "r2"))) == []
    assert drive.gate.next_deadline() == 5.0
    drive.read("a", "r1")
    drive.consumed(a=1)
    assert drive(AlignmentTick(4.9)) == []
    (due,) = drive(AlignmentTick(5.0))
    assert due.pin.overtaking
    drive(SnapshotPinned(1))
    assert drive.read("b", mark(1)) == [InputsCaptured(1, {"a": ("r2",), "b": ()})]
    assert drive.gate.next_deadline() is None


def test_an_abandoned_unaligned_snapshot_is_dropped() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    drive.read("a", mark(1))
    drive(SnapshotPinned(1))
    drive.read("b", "r1")
    assert drive(life.CheckpointAbortedNotice(1)) == [DropSnapshot(1), Forward(CancelMark(1))]
    assert drive.read("b", mark(1)) == []
    assert opened(drive.read("b", "r2")) == [({"a": 0, "b": 3}, None)]
    assert drive.consumed(b=3) == []
    (due,) = drive.read("b", mark(2))
    assert due.pin.barrier.checkpoint_id == 2
    drive(SnapshotPinned(2))
    assert drive.read("a", mark(2)) == [InputsCaptured(2, {"a": ()})]


def test_an_unaligned_snapshot_that_fails_is_not_completed() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    drive.read("a", mark(1))
    assert drive(SnapshotFailed(1)) == []
    assert drive.read("b", mark(1)) == []
    assert drive.gate.reads("a")


def test_a_savepoint_is_aligned_even_if_checkpoints_are_unaligned() -> None:
    drive = Driver("a", "b", config=UNALIGNED).started()
    savepoint = CheckpointBarrier(1, 0.0, CheckpointProperties.for_savepoint())
    assert drive.read("a", BarrierMark(savepoint), ROW) == []
    assert not drive.gate.reads("a")
    (due,) = drive.read("b", BarrierMark(savepoint))
    assert not due.pin.overtaking
    assert due.pin == PinSnapshot(savepoint, due.pin.inputs)
