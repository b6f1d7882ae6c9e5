"""Barriers on the channels of a task, as rows of events and actions for the gate.

The cases are those of Flink's AlignedCheckpointsTest, UnalignedCheckpointsTest, UnalignedCheckpointsCancellationTest,
AlternatingCheckpointsTest and CheckpointBarrierTrackerTest, with checkpoints after tasks have finished.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from dagster_checkpoints.coordination.barriers.creation import create_barrier_handler
from dagster_checkpoints.coordination.barriers.events import (
    AbortAlignment,
    AlignmentTick,
    BarrierAction,
    BarrierAnnounced,
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    ChannelCaptured,
    EndOfPartitionReceived,
    SnapshotInputsComplete,
    StartSnapshot,
    TakeSnapshot,
    TriggerReceived,
    UnblockChannels,
)
from dagster_checkpoints.coordination.barriers.single import (
    AlignedBarrierHandler,
    AlignedWithTimeoutBarrierHandler,
    UnalignedBarrierHandler,
)
from dagster_checkpoints.coordination.barriers.tracking import TrackingBarrierHandler
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent, UnknownChannel
from dagster_checkpoints.coordination.failures import FailureReason

TIMEOUT = 5.0
REASONS = {
    FailureReason.CHECKPOINT_DECLINED_SUBSUMED: "subsumed",
    FailureReason.CHECKPOINT_DECLINED_INPUT_END_OF_STREAM: "declined",
    FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER: "cancelled",
}
PROPERTIES = {
    "": CheckpointProperties(),
    "u": CheckpointProperties(unaligned=True),
    "s": CheckpointProperties.for_savepoint(),
    "S": CheckpointProperties.for_savepoint(stops_job=True),
}


def barrier(text: str) -> CheckpointBarrier:
    """Reads ``1``, ``1u`` (unaligned), ``1s`` (savepoint), ``1S`` (of a stop); created at ten times its id."""
    number = text.rstrip("usS")
    return CheckpointBarrier(int(number), 10.0 * int(number), PROPERTIES[text.removeprefix(number)])


def event(text: str) -> BarrierEvent:
    """Reads ``a1`` (barrier 1 on a), ``a?1`` (announced), ``ax1`` (cancellation of 1 on a), ``*x1`` (the coordinator's
    notice), ``a$`` (EndOfPartition), ``!1`` (triggered), ``@7`` (it is 7)."""
    if text[0] == "!":
        return TriggerReceived(barrier(text[1:]))
    if text[0] == "@":
        return AlignmentTick(float(text[1:]))
    channel, what, rest = re.fullmatch(r"(.)([?x$]?)(.*)", text).groups()  # type: ignore[union-attr]
    match what:
        case "$":
            return EndOfPartitionReceived(channel)
        case "x":
            return CancellationReceived(None if channel == "*" else channel, int(rest))
        case "?":
            return BarrierAnnounced(channel, barrier(rest))
    return BarrierReceived(channel, barrier(rest))


def as_text(action: BarrierAction) -> str:
    match action:
        case BlockChannel(channel):
            return f"block({channel})"
        case UnblockChannels(channels):
            return f"unblock({''.join(channels)})"
        case TakeSnapshot(barrier):
            return f"snapshot{barrier.checkpoint_id}"
        case StartSnapshot(barrier, in_flight):
            assert barrier.properties.unaligned
            return f"start{barrier.checkpoint_id}({''.join(in_flight)})"
        case ChannelCaptured(checkpoint_id, channel):
            return f"captured{checkpoint_id}({channel})"
        case SnapshotInputsComplete(checkpoint_id):
            return f"inputs{checkpoint_id}"
        case AbortAlignment(checkpoint_id, reason):
            return f"{REASONS[reason]}{checkpoint_id}"


def run(handler: BarrierHandler, row: str) -> str:
    return " ".join("+".join(as_text(action) for action in handler.handle(event(text))) or "-" for text in row.split())


ALIGNED = [
    # One channel never waits.
    ("a", "a1 a2", "snapshot1 snapshot2"),
    ("a", "a1 a3 a4 a6", "snapshot1 snapshot3 snapshot4 snapshot6"),
    # Every channel is blocked until the last one has its barrier.
    ("ab", "a1 b1", "block(a) snapshot1+unblock(a)"),
    ("abc", "b1 a1 c1", "block(b) block(a) snapshot1+unblock(ab)"),
    ("ab", "a1 b1 b2 a2", "block(a) snapshot1+unblock(a) block(b) snapshot2+unblock(b)"),
    # A channel counts once.
    ("ab", "a1 a1 b1", "block(a) - snapshot1+unblock(a)"),
    # A newer id aborts the older alignment; its late barriers are leftovers.
    ("ab", "a1 b2 a2", "block(a) subsumed1+unblock(a)+block(b) snapshot2+unblock(b)"),
    ("abc", "a1 b2 c1 a2 c2", "block(a) subsumed1+unblock(a)+block(b) - block(a) snapshot2+unblock(ab)"),
    ("ab", "a2 b2 a1 b1", "block(a) snapshot2+unblock(a) - -"),
    ("ab", "a1 b2S a2S", "block(a) subsumed1+unblock(a)+block(b) snapshot2+unblock(b)"),
    # Jumping over checkpoints, then the ends.
    (
        "abc",
        "b1 c1 a1 b2 a2 c3 a3 b4 a$ c$ b$",
        "block(b) block(c) snapshot1+unblock(bc) block(b) block(a) subsumed2+unblock(ab)+block(c) block(a) "
        "subsumed3+unblock(ac)+block(b) - snapshot4+unblock(b) -",
    ),
    # Cancellation aborts and unblocks; later barriers of that id are ignored.
    ("ab", "a1 bx1 b1", "block(a) cancelled1+unblock(a) -"),
    ("ab", "ax1 b1 a2 b2", "cancelled1 - block(a) snapshot2+unblock(a)"),
    ("ab", "ax1 bx1 bx1", "cancelled1 - -"),
    ("abc", "a2 bx3 a4 b4 c4", "block(a) subsumed2+unblock(a)+cancelled3 block(a) block(b) snapshot4+unblock(ab)"),
    ("ab", "a2 bx1 b2", "block(a) - snapshot2+unblock(a)"),
    ("ab", "a1 b1 ax1", "block(a) snapshot1+unblock(a) -"),
    ("ab", "ax2 bx1 b2", "cancelled2 - -"),
    # The coordinator's notice affects its own checkpoint only, whether its barrier was read or not.
    ("ab", "a1 *x1 b1 a2 b2", "block(a) cancelled1+unblock(a) - block(a) snapshot2+unblock(a)"),
    ("ab", "a1 *x2 b1 a2 b2", "block(a) - snapshot1+unblock(a) cancelled2 -"),
    ("ab", "*x2 a1 b1 a2 a3 b3", "- block(a) snapshot1+unblock(a) cancelled2 block(a) snapshot3+unblock(a)"),
    ("ab", "*x1 *x1 a2 b1 b2", "- - block(a) - snapshot2+unblock(a)"),
    ("ab", "a1 *x2 b2 a2", "block(a) - subsumed1+unblock(a)+cancelled2 -"),
    ("ab", "a1 b1 *x1", "block(a) snapshot1+unblock(a) -"),
    # A channel's end counts as its barrier, for the pending checkpoint and for all later ones, once.
    ("ab", "a1 b$", "block(a) snapshot1+unblock(a)"),
    ("ab", "b$ a1 a2", "- snapshot1 snapshot2"),
    ("abc", "a1 b$ c1", "block(a) - snapshot1+unblock(a)"),
    ("abc", "a1 b1 c$ a2 b2", "block(a) block(b) snapshot1+unblock(ab) block(a) snapshot2+unblock(a)"),
    ("ab", "b$ b$ a1", "- - snapshot1"),
    ("abcd", "c$ b$ d1 a1 d2 d$ a2", "- - block(d) snapshot1+unblock(d) block(d) - snapshot2"),
    # Triggered as a root, with or without the last EndOfPartition read.
    ("", "!1 !2", "snapshot1 snapshot2"),
    ("ab", "a$ b$ !1 !2", "- - snapshot1 snapshot2"),
    ("ab", "a$ !1 b$", "- - snapshot1"),
    ("ab", "!1 a$ b$", "- - snapshot1"),
    ("ab", "!1 a$ !2 b$", "- - subsumed1 snapshot2"),
    ("a", "a$ !2 !1", "- snapshot2 -"),
    ("a", "!1 !1 a$", "- - snapshot1"),
    # Announcements, time and the barrier's properties have no effect.
    ("ab", "a?1 a1u @99 b?1 b1", "- block(a) - - snapshot1+unblock(a)"),
]

UNALIGNED = [
    # The snapshot starts at the first barrier. A barrier that was read has no records in flight before it.
    ("a", "a1 a2", "start1()+inputs1 start2()+inputs2"),
    ("ab", "a1 b1 b2 a2", "start1(b) captured1(b)+inputs1 start2(a) captured2(a)+inputs2"),
    ("abc", "b1 c1 a1", "start1(ac) captured1(c) captured1(a)+inputs1"),
    # An announced barrier overtakes the records before it; when it is read later it is ignored.
    ("a", "a?1 a1 a?2 a2", "start1(a)+captured1(a)+inputs1 - start2(a)+captured2(a)+inputs2 -"),
    ("ab", "a?1 b1 a1", "start1(ab)+captured1(a) captured1(b)+inputs1 -"),
    ("abc", "b?1 a?1 b1 c?1", "start1(abc)+captured1(b) captured1(a) - captured1(c)+inputs1"),
    # A channel counts once.
    ("ab", "a1 a1 a?1 b1 b1", "start1(b) - - captured1(b)+inputs1 -"),
    # A newer id aborts the older one, whose late barriers are leftovers.
    ("ab", "a1 a2 b2", "start1(b) subsumed1+start2(b) captured2(b)+inputs2"),
    ("ab", "a1 b?2 b1 a2", "start1(b) subsumed1+start2(ab)+captured2(b) - captured2(a)+inputs2"),
    # Cancellations: none, or after the start.
    ("a", "ax10 ax20", "cancelled10 cancelled20"),
    ("a", "ax20 ax10", "cancelled20 -"),
    ("a", "ax10 a10", "cancelled10 -"),
    ("a", "ax10 a20", "cancelled10 start20()+inputs20"),
    ("a", "ax20 a10", "cancelled20 -"),
    ("a", "a10 a10", "start10()+inputs10 -"),
    ("a", "a20 a10", "start20()+inputs20 -"),
    ("a", "a10 ax10", "start10()+inputs10 -"),
    ("ab", "a10 ax10 b10", "start10(b) cancelled10 -"),
    ("a", "a10 ax20", "start10()+inputs10 cancelled20"),
    ("a", "a20 ax10", "start20()+inputs20 -"),
    ("ab", "a1 ax2 ax3 bx3", "start1(b) subsumed1+cancelled2 cancelled3 -"),
    ("ab", "a1 *x2 b1 b2", "start1(b) - captured1(b)+inputs1 cancelled2"),
    ("ab", "a1 *x1 b1", "start1(b) cancelled1 -"),
    # The end of a channel: the records before it are in flight.
    ("ab", "a1 b$", "start1(b) captured1(b)+inputs1"),
    ("ab", "b$ a1", "- start1()+inputs1"),
    ("abc", "b?1 a$ b$ c1", "start1(abc)+captured1(b) captured1(a) - captured1(c)+inputs1"),
    ("ab", "a1 a$ b1", "start1(b) - captured1(b)+inputs1"),
    # Triggered as a root: the unread records on the channels are in flight.
    ("", "!1 !2", "start1()+inputs1 start2()+inputs2"),
    ("ab", "!1 a$ b$ !2", "start1(ab) captured1(a) captured1(b)+inputs1 start2()+inputs2"),
    # Savepoints are aligned; announcing one has no effect.
    ("ab", "a1s b1s a2", "block(a) snapshot1+unblock(a) start2(b)"),
    ("ab", "a?1s a1s b?1s b1s", "- block(a) - snapshot1+unblock(a)"),
    ("ab", "a1 a?2s b1", "start1(b) - captured1(b)+inputs1"),
    ("ab", "a1S b$", "block(a) snapshot1+unblock(a)"),
    ("ab", "!1s a$ b$", "- - snapshot1"),
    ("ab", "a1 a2s b1 b2s", "start1(b) subsumed1+block(a) - snapshot2+unblock(a)"),
    ("ab", "a1s b?2 a2", "block(a) subsumed1+unblock(a)+start2(ab)+captured2(b) captured2(a)+inputs2"),
]

# Barrier 1 was created at 10, 2 at 20: they overtake at 15 and 25.
WITH_TIMEOUT = [
    # In time it is an aligned checkpoint, and no timer is left behind.
    ("ab", "a1 @14 b1 @99", "block(a) - snapshot1+unblock(a) -"),
    ("ab", "a?1 b?1 a1 b1", "- - block(a) snapshot1+unblock(a)"),
    ("ab", "@99 a2 b2", "- block(a) snapshot2+unblock(a)"),
    # The timer alone makes it unaligned, once; blocked channels continue, behind the snapshot.
    ("ab", "a1 @15 @16 b1", "block(a) start1(b)+unblock(a) - captured1(b)+inputs1"),
    ("abc", "b1 a1 @15 c1", "block(b) block(a) start1(c)+unblock(ab) captured1(c)+inputs1"),
    # The announced barriers overtake, read or not.
    ("ab", "a1 b?1 @15 b1", "block(a) - start1(b)+unblock(a)+captured1(b)+inputs1 -"),
    ("ab", "a?1 b?1 @15 a1 b1", "- - start1(ab)+captured1(a)+captured1(b)+inputs1 - -"),
    ("ab", "a?1 @15 b?1 a1 b1", "- start1(ab)+captured1(a) captured1(b)+inputs1 - -"),
    ("ab", "a?1 a1 @15 b?1", "- block(a) start1(b)+unblock(a) captured1(b)+inputs1"),
    # The next one is aligned again.
    ("ab", "a1 @15 b1 a2 b2", "block(a) start1(b)+unblock(a) captured1(b)+inputs1 block(a) snapshot2+unblock(a)"),
    # Made unaligned by an upstream task: at once.
    ("ab", "a1 b1u", "block(a) start1()+unblock(a)+inputs1"),
    ("abc", "a1 b?1u c1", "block(a) start1(bc)+unblock(a)+captured1(b) captured1(c)+inputs1"),
    ("ab", "a?1 b?1u", "- start1(ab)+captured1(a)+captured1(b)+inputs1"),
    ("ab", "a1u b1", "start1(b) captured1(b)+inputs1"),
    ("ab", "a1 a1u b1", "block(a) start1(b)+unblock(a) captured1(b)+inputs1"),
    # A newer id aborts the older one, announced or received, aligned or not.
    ("ab", "a1 b?2 @25 a2", "block(a) subsumed1+unblock(a) start2(ab)+captured2(b) captured2(a)+inputs2"),
    ("ab", "a1 @15 a2 b2", "block(a) start1(b)+unblock(a) subsumed1+block(a) snapshot2+unblock(a)"),
    # An abort stops the timer.
    ("ab", "a1 ax1 bx1 @15", "block(a) cancelled1+unblock(a) - -"),
    ("ab", "a?1 bx1 @15 a1", "- cancelled1 - -"),
    ("ab", "a1 @15 bx1 b1", "block(a) start1(b)+unblock(a) cancelled1 -"),
    # The end of a channel.
    ("abc", "a1 b$ @15 c$", "block(a) - start1(c)+unblock(a) captured1(c)+inputs1"),
    ("abc", "a?1 b$ a1 c1", "- - block(a) snapshot1+unblock(a)"),
    ("ab", "!1 a$ @15 b$", "- - start1(b) captured1(b)+inputs1"),
    # A savepoint stays aligned, however long it takes.
    ("ab", "a1s @99 b?1s b1s", "block(a) - - snapshot1+unblock(a)"),
    ("ab", "a1 @15 b2S a2S", "block(a) start1(b)+unblock(a) subsumed1+block(b) snapshot2+unblock(b)"),
]

AT_LEAST_ONCE = [
    ("a", "a1 a2", "snapshot1 snapshot2"),
    ("ab", "a1 b1", "- snapshot1"),
    # A later barrier does not drop an earlier pending one.
    ("ab", "a1 a2 b1 b2", "- - snapshot1 snapshot2"),
    ("ab", "b1 b2 a1 a2", "- - snapshot1 snapshot2"),
    ("ab", "a2 b1 a1 b2", "- - snapshot1 snapshot2"),
    # A completed one subsumes the older ones; their late barriers are leftovers.
    ("ab", "a1 a2 b2 b1 a3 b3", "- - subsumed1+snapshot2 - - snapshot3"),
    ("ab", "a2 b2 b2 a3 b3", "- snapshot2 - - snapshot3"),
    ("abc", "b1 c1 a1 b2 c2 b3 a3 c3 a2", "- - snapshot1 - - - - subsumed2+snapshot3 -"),
    (
        "abc",
        "b2 a2 c2 b3 c3 c4 b4 a3 a4 b5 a5 c5 b6 a6 b7 c7 c8 b8 b9 a7 c9 c10 a8 a9 a10 b10",
        "- - snapshot2 - - - - snapshot3 snapshot4 - - snapshot5 - - - - - - - subsumed6+snapshot7 - - snapshot8 snapshot9 "
        "- snapshot10",
    ),
    # A channel counts once.
    ("ab", "a1 a1 b1", "- - snapshot1"),
    # A cancellation affects its own checkpoint, once.
    ("a", "a1 a2 ax4 a5 ax6", "snapshot1 snapshot2 cancelled4 snapshot5 cancelled6"),
    ("ab", "a1 bx1 b1 a2 b2", "- cancelled1 - - snapshot2"),
    ("ab", "ax1 b1 bx1", "cancelled1 - -"),
    ("abc", "a2 c2 bx2 b3 c3 a3 bx4 c4 a4 bx6 cx6 a6", "- - cancelled2 - - snapshot3 cancelled4 - - cancelled6 - -"),
    ("abc", "a1 ax2 bx1 bx2 cx1 cx2", "- cancelled2 cancelled1 - - -"),
    ("ab", "b1 b2 ax1 a2", "- - cancelled1 snapshot2"),
    ("ab", "a1 *x2 b1 a2 b2 *x1", "- cancelled2 snapshot1 - - -"),
    ("ab", "a1 ax2 b1 b2", "- cancelled2 snapshot1 -"),
    ("ab", "*x2 a1 b1 a3 b3 a2", "cancelled2 - snapshot1 - snapshot3 -"),
    # A channel's end counts as its barrier, for all pending checkpoints and all later ones, once.
    ("ab", "a1 b$", "- snapshot1"),
    ("ab", "a1 a2 b$", "- - subsumed1+snapshot2"),
    ("ab", "b$ a1", "- snapshot1"),
    ("abc", "a1 a2 b2 a3 a4 b4 b5 c$", "- - - - - - - subsumed1+subsumed2+subsumed3+snapshot4"),
    ("abc", "a2 b2 b$ c2", "- - - snapshot2"),
    ("abc", "c$ a5 a6 b6 b$ a7", "- - - subsumed5+snapshot6 - snapshot7"),
    ("ab", "a1 a$ b1", "- - snapshot1"),
    ("ab", "a1 a$ bx1", "- - cancelled1"),
    ("abc", "ax4 b4 b5 c$", "cancelled4 - - -"),
    # Triggered as a root.
    ("", "!1", "snapshot1"),
    ("ab", "!1 a$ b$ !2", "- - snapshot1 snapshot2"),
    ("ab", "a$ b$ *x1 !1 !2", "- - cancelled1 - snapshot2"),
    # The end of a channel does not count for a checkpoint that the channel has passed: it can never complete.
    ("ab", "b1 a2 a$ b2", "- - declined1 snapshot2"),
    ("ab", "b1 b2 a2 a$ b3", "- - subsumed1+snapshot2 - snapshot3"),
    # Announcements and time have no effect; a savepoint is like any other checkpoint.
    ("ab", "a?1 a1u @99 b?1 b1s", "- - - - snapshot1"),
]


@pytest.mark.parametrize(("channels", "row", "actions"), ALIGNED)
def test_aligned(channels: str, row: str, actions: str) -> None:
    assert run(AlignedBarrierHandler(channels), row) == actions


@pytest.mark.parametrize(("channels", "row", "actions"), UNALIGNED)
def test_unaligned(channels: str, row: str, actions: str) -> None:
    assert run(UnalignedBarrierHandler(channels), row) == actions


@pytest.mark.parametrize(("channels", "row", "actions"), WITH_TIMEOUT)
def test_aligned_with_timeout(channels: str, row: str, actions: str) -> None:
    assert run(AlignedWithTimeoutBarrierHandler(channels, timeout=TIMEOUT), row) == actions


@pytest.mark.parametrize(("channels", "row", "actions"), [row for row in ALIGNED if "u" not in row[1]])
def test_before_its_timeout_an_alignment_is_like_any_other(channels: str, row: str, actions: str) -> None:
    assert run(AlignedWithTimeoutBarrierHandler(channels, timeout=1e9), row) == actions


@pytest.mark.parametrize(("channels", "row", "actions"), UNALIGNED)
def test_a_timeout_of_nothing_is_unaligned(channels: str, row: str, actions: str) -> None:
    assert run(AlignedWithTimeoutBarrierHandler(channels, timeout=0), row) == actions


@pytest.mark.parametrize(("channels", "row", "actions"), AT_LEAST_ONCE)
def test_at_least_once_blocks_nothing(channels: str, row: str, actions: str) -> None:
    assert run(TrackingBarrierHandler(channels), row) == actions


@pytest.mark.parametrize(
    ("row", "deadline"),
    [
        ("", None),
        ("a1", 15.0),
        ("a?2", 25.0),
        ("!1", 15.0),
        ("a1 b2", 25.0),
        ("a1s", None),
        ("a1 @15", None),
        ("a1 b1", None),
        ("a1 bx1", None),
    ],
)
def test_when_a_tick_is_due(row: str, deadline: float | None) -> None:
    handler = AlignedWithTimeoutBarrierHandler("ab", timeout=TIMEOUT)
    run(handler, row)
    assert handler.next_deadline() == deadline


def test_without_a_timeout_no_tick_is_ever_due() -> None:
    handlers: list[BarrierHandler] = [AlignedBarrierHandler("ab"), UnalignedBarrierHandler("ab"), TrackingBarrierHandler("ab")]
    for handler in handlers:
        run(handler, "a1")
        assert handler.next_deadline() is None


def test_an_aligned_gate_that_announces_all_the_same_aborts_nothing() -> None:
    assert run(AlignedBarrierHandler("ab"), "a1 b?2 b1") == "block(a) - snapshot1+unblock(a)"


def test_an_unaligned_barrier_keeps_its_other_properties() -> None:
    [start, _] = UnalignedBarrierHandler("a").handle(
        BarrierReceived("a", CheckpointBarrier(7, 70.0, CheckpointProperties(periodic=True, forced=True)))
    )
    assert start == StartSnapshot(
        CheckpointBarrier(7, 70.0, CheckpointProperties(periodic=True, forced=True, unaligned=True)), ()
    )


def test_channels_that_had_ended_when_restored() -> None:
    assert run(AlignedBarrierHandler("ab", ended="a"), "b1") == "snapshot1"
    assert run(UnalignedBarrierHandler("ab", ended="a"), "b1") == "start1()+inputs1"
    assert run(AlignedWithTimeoutBarrierHandler("abc", timeout=1, ended="a"), "b1 @99") == "block(b) start1(c)+unblock(b)"
    assert run(TrackingBarrierHandler("ab", ended="a"), "b1") == "snapshot1"


HANDLERS = [AlignedBarrierHandler("ab"), UnalignedBarrierHandler("ab"), TrackingBarrierHandler("ab")]


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: type(handler).__name__)
@pytest.mark.parametrize("text", ["c1", "c?1", "cx1", "c$"])
def test_an_unknown_channel_is_refused(handler: BarrierHandler, text: str) -> None:
    with pytest.raises(UnknownChannel, match=r"'c'.*a, b"):
        handler.handle(event(text))


def test_a_task_without_inputs_knows_no_channel() -> None:
    with pytest.raises(UnknownChannel, match=r"has no inputs\."):
        AlignedBarrierHandler("").handle(event("a1"))


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: type(handler).__name__)
def test_an_event_of_something_else_is_refused(handler: BarrierHandler) -> None:
    with pytest.raises(UnexpectedEvent, match="TakeSnapshot"):
        handler.handle(TakeSnapshot(barrier("1")))  # type: ignore[arg-type]


def test_blocked_channels_can_be_read() -> None:
    handler = AlignedWithTimeoutBarrierHandler("abc", timeout=TIMEOUT)
    assert (handler.pending_id, handler.blocked) == (None, ())
    run(handler, "c1 a1")
    assert (handler.pending_id, handler.blocked) == (1, ("a", "c"))
    run(handler, "@15")
    assert (handler.pending_id, handler.blocked) == (1, ())
    run(handler, "b1")
    assert (handler.pending_id, handler.blocked) == (None, ())


def test_pending_checkpoints_at_least_once_are_bounded() -> None:
    handler = TrackingBarrierHandler("ab", tracked=2)
    assert run(handler, "a1 a2 a3 b1 b2 a4") == "- - subsumed1 - snapshot2 -"
    assert run(handler, "a5 a6 a7 a8 b5 b6 b8") == "subsumed3 subsumed4 subsumed5 subsumed6 - - subsumed7+snapshot8"


def test_pending_checkpoints_at_least_once_can_be_read() -> None:
    handler = TrackingBarrierHandler("ab")
    run(handler, "a2 b1")
    assert handler.pending_ids == (1, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "block(a) - snapshot1+unblock(a)"),
        ({"mode": "at_least_once"}, "- - snapshot1"),
        ({"unaligned": True}, "start1(b) - captured1(b)+inputs1"),
        ({"unaligned": True, "aligned_checkpoint_timeout": 0.0}, "start1(b) - captured1(b)+inputs1"),
        ({"unaligned": True, "aligned_checkpoint_timeout": 3.0}, "block(a) start1(b)+unblock(a) captured1(b)+inputs1"),
        ({"unaligned": True, "aligned_checkpoint_timeout": 4.0}, "block(a) - snapshot1+unblock(a)"),
    ],
)
def test_the_settings_choose_the_handler(settings: dict[str, Any], expected: str) -> None:
    """Barrier 1 is created at 10; the time is 13."""
    handler = create_barrier_handler(CheckpointConfig(interval=1, **settings), "abc", ended="c")
    assert run(handler, "a1 @13 b1") == expected
