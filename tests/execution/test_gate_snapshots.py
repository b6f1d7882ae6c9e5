"""Parts of a gate's snapshots: the due ones, and the barriers that a gate without alignment remembers."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination.barriers.events import ChannelCaptured, SnapshotInputsComplete, StartSnapshot, TakeSnapshot
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.watermarks import ChannelWatermark, ValveState
from dagster_checkpoints.execution.gate_snapshots import BarrierMemory, DueAction, SnapshotDue
from dagster_checkpoints.execution.input_channel import GateChannel, InputChannel

KNOWN = ChannelWatermark(5)


def test_a_snapshot_that_is_taken_and_those_before_it_are_forgotten() -> None:
    memory, channel, valve = BarrierMemory(), InputChannel(GateChannel("a")), ValveState(5, {"a": KNOWN})
    for checkpoint_id in (1, 2, 3):
        memory.remember(channel, checkpoint_id, valve)
    memory.forget(2)
    assert [memory.ended_behind(checkpoint_id) for checkpoint_id in (1, 2, 3)] == [False, False, True]
    assert [memory.at_barrier(checkpoint_id, "a") for checkpoint_id in (1, 2, 3)] == [None, None, (KNOWN, 0)]


@pytest.mark.parametrize(
    ("action", "takes_snapshot"),
    [
        (TakeSnapshot(CheckpointBarrier(7, 0.0)), True),
        (StartSnapshot(CheckpointBarrier(7, 0.0), ("a",)), True),
        (ChannelCaptured(7, "a"), False),
        (SnapshotInputsComplete(7), False),
    ],
)
def test_a_due_snapshot_belongs_to_a_checkpoint(action: DueAction, takes_snapshot: bool) -> None:
    due = SnapshotDue(action, 1.0)
    assert (due.checkpoint_id, due.takes_snapshot) == (7, takes_snapshot)
