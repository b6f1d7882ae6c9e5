"""Barriers on the channels of a task, as rows, and random interleavings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination import (
    AbortAlignment,
    AlignedBarrierHandler,
    BarrierAction,
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    CheckpointBarrier,
    EndOfPartitionReceived,
    FailureReason,
    TakeSnapshot,
    TrackingBarrierHandler,
    TriggerReceived,
    UnblockChannels,
    UnknownChannel,
)

REASONS = {
    FailureReason.CHECKPOINT_DECLINED_SUBSUMED: "subsumed",
    FailureReason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER: "cancelled",
}


def event(text: str) -> BarrierEvent:
    """Reads ``a1`` (barrier 1 on a), ``ax1`` (cancellation of 1 on a), ``a$`` (EndOfPartition), ``!1``
    (triggered)."""
    if text[0] == "!":
        return TriggerReceived(CheckpointBarrier(int(text[1:]), 0.0))
    if text[1:] == "$":
        return EndOfPartitionReceived(text[0])
    if text[1] == "x":
        return CancellationReceived(text[0], int(text[2:]))
    return BarrierReceived(text[0], CheckpointBarrier(int(text[1:]), 0.0))


def told(action: BarrierAction) -> str:
    match action:
        case BlockChannel(channel):
            return f"block({channel})"
        case UnblockChannels(channels):
            return f"unblock({''.join(channels)})"
        case TakeSnapshot(barrier):
            return f"snapshot{barrier.checkpoint_id}"
        case AbortAlignment(checkpoint_id, reason):
            return f"{REASONS[reason]}{checkpoint_id}"


def run(handler: BarrierHandler, row: str) -> str:
    return " ".join("+".join(told(action) for action in handler.handle(event(text))) or "-" for text in row.split())


@pytest.mark.parametrize(
    ("channels", "row", "actions"),
    [
        # One channel never waits.
        ("a", "a1 a2", "snapshot1 snapshot2"),
        # Every channel stands still until the last one has its barrier.
        ("ab", "a1 b1", "block(a) snapshot1+unblock(a)"),
        ("abc", "b1 a1 c1", "block(b) block(a) snapshot1+unblock(ab)"),
        ("ab", "a1 b1 b2 a2", "block(a) snapshot1+unblock(a) block(b) snapshot2+unblock(b)"),
        # A channel counts once.
        ("ab", "a1 a1 b1", "block(a) - snapshot1+unblock(a)"),
        # A newer id aborts the older alignment; its late barriers are leftovers.
        ("ab", "a1 b2 a2", "block(a) subsumed1+unblock(a)+block(b) snapshot2+unblock(b)"),
        ("abc", "a1 b2 c1 a2 c2", "block(a) subsumed1+unblock(a)+block(b) - block(a) snapshot2+unblock(ab)"),
        ("ab", "a2 b2 a1 b1", "block(a) snapshot2+unblock(a) - -"),
        # Cancellation aborts and unblocks; later barriers of that id are ignored.
        ("ab", "a1 bx1 b1", "block(a) cancelled1+unblock(a) -"),
        ("ab", "ax1 b1 a2 b2", "cancelled1 - block(a) snapshot2+unblock(a)"),
        ("ab", "ax1 bx1", "cancelled1 -"),
        ("ab", "a1 bx2 b1 b2", "block(a) subsumed1+unblock(a)+cancelled2 - -"),
        ("ab", "a2 bx1 b2", "block(a) - snapshot2+unblock(a)"),
        ("ab", "a1 b1 bx1", "block(a) snapshot1+unblock(a) -"),
        # EndOfPartition is the barrier of the pending one and of every later one.
        ("ab", "a1 b$", "block(a) snapshot1+unblock(a)"),
        ("ab", "b$ a1 a2", "- snapshot1 snapshot2"),
        ("abc", "a1 b$ c1", "block(a) - snapshot1+unblock(a)"),
        ("abc", "a1 b1 c$ a2 b2", "block(a) block(b) snapshot1+unblock(ab) block(a) snapshot2+unblock(a)"),
        ("ab", "b$ b$ a1", "- - snapshot1"),
        # Triggered as a root, with or without the last EndOfPartition read.
        ("", "!1 !2", "snapshot1 snapshot2"),
        ("ab", "a$ b$ !1 !2", "- - snapshot1 snapshot2"),
        ("ab", "a$ !1 b$", "- - snapshot1"),
        ("ab", "!1 a$ b$", "- - snapshot1"),
        ("ab", "!1 a$ !2 b$", "- - subsumed1 snapshot2"),
        ("a", "a$ !2 !1", "- snapshot2 -"),
    ],
)
def test_aligned(channels: str, row: str, actions: str) -> None:
    assert run(AlignedBarrierHandler(channels), row) == actions


@pytest.mark.parametrize(
    ("channels", "row", "actions"),
    [
        ("a", "a1 a2", "snapshot1 snapshot2"),
        ("ab", "a1 b1", "- snapshot1"),
        # A later barrier does not drop an earlier pending one.
        ("ab", "a1 a2 b1 b2", "- - snapshot1 snapshot2"),
        ("ab", "a1 a2 b2 b1", "- - subsumed1+snapshot2 -"),
        ("ab", "a1 a1 b1", "- - snapshot1"),
        ("ab", "a1 bx1 b1 a2 b2", "- cancelled1 - - snapshot2"),
        ("ab", "ax1 b1 bx1", "cancelled1 - -"),
        ("ab", "a1 b$", "- snapshot1"),
        ("ab", "a1 a2 b$", "- - subsumed1+snapshot2"),
        ("ab", "b$ a1", "- snapshot1"),
        ("", "!1", "snapshot1"),
        ("ab", "!1 a$ b$ !2", "- - snapshot1 snapshot2"),
    ],
)
def test_at_least_once_blocks_nothing(channels: str, row: str, actions: str) -> None:
    assert run(TrackingBarrierHandler(channels), row) == actions


def test_channels_that_had_ended_when_restored() -> None:
    assert run(AlignedBarrierHandler("ab", ended="a"), "b1") == "snapshot1"
    assert run(TrackingBarrierHandler("ab", ended="a"), "b1") == "snapshot1"


@pytest.mark.parametrize("handler", [AlignedBarrierHandler("ab"), TrackingBarrierHandler("ab")])
@pytest.mark.parametrize("text", ["c1", "c$"])
def test_an_unknown_channel_is_refused(handler: BarrierHandler, text: str) -> None:
    with pytest.raises(UnknownChannel, match="'c'"):
        handler.handle(event(text))


def test_what_stands_still_can_be_asked_for() -> None:
    handler = AlignedBarrierHandler("abc")
    run(handler, "a7 c7")
    assert (handler.pending_id, handler.blocked) == (7, ("a", "c"))


@given(st.data())
def test_aligned_snapshots_are_consistent_cuts(data: st.DataObject) -> None:
    """Every channel delivers its barriers in order and may end; a gate that reads at random obeys the
    actions.

    At a snapshot of n, every channel has been read exactly up to barrier n, or to its end where that comes
    first.
    """
    names = "abcd"[: data.draw(st.integers(1, 4))]
    ids = list(range(1, data.draw(st.integers(1, 5)) + 1))
    logs = {}
    for name in names:
        last = data.draw(st.integers(0, len(ids)))
        ends = last < len(ids) or data.draw(st.booleans())
        logs[name] = [f"{name}{i}" for i in ids[:last]] + ([f"{name}$"] if ends else [])
    handler = AlignedBarrierHandler(names)
    position = dict.fromkeys(names, 0)
    blocked: set[str] = set()
    snapshots = []
    while ready := [n for n in names if n not in blocked and position[n] < len(logs[n])]:
        name = data.draw(st.sampled_from(ready))
        text = logs[name][position[name]]
        position[name] += 1
        for action in handler.handle(event(text)):
            match action:
                case BlockChannel(channel):
                    blocked.add(channel)
                case UnblockChannels(channels):
                    assert set(channels) <= blocked
                    blocked -= set(channels)
                case TakeSnapshot(barrier):
                    n = barrier.checkpoint_id
                    snapshots.append(n)
                    for other in names:
                        read = logs[other][: position[other]]
                        assert read and read[-1] in (f"{other}{n}", f"{other}$")
                case AbortAlignment():
                    raise AssertionError("barriers come in order: nothing is aborted")
    assert not blocked
    reached = max((int(t[1:]) for log in logs.values() for t in log if t[1:] != "$"), default=0)
    assert snapshots == list(range(1, reached + 1))
