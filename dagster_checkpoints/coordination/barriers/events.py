"""What a task's gate tells a barrier handler, and what the handler asks it to do. Values only.

No run on Spark reaches what belongs to barriers that overtake yet: `BarrierAnnounced`, `AlignmentTick`, `StartSnapshot`,
`ChannelCaptured`, `SnapshotInputsComplete`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.failures import FailureReason

# Events


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """A barrier is next on a channel: everything in front of it has been read."""

    channel: str
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class BarrierAnnounced:
    """A barrier has arrived on a channel, behind records that have not been read yet.

    Where barriers may overtake records, the gate announces the first barrier of each channel that is not done with:
    neither received, nor reported as captured, nor of a checkpoint that was aborted. A channel that stands still is
    not looked into. An announced barrier is received all the same when it is next. In the other modes an
    announcement means nothing.
    """

    channel: str
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class CancellationReceived:
    """A cancellation marker is next on a channel, or the coordinator's notice of an abort has come (no channel).

    A marker keeps the order of the barriers: what is older and has not come on this channel never will. A notice does
    not: it concerns its own checkpoint only, and one that has not been seen yet is forgotten when its barrier comes.
    """

    channel: str | None
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfPartitionReceived:
    """Nothing follows on this channel: it counts as the barrier of every pending and every later checkpoint."""

    channel: str


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """The coordinator triggers this task as a root: all its upstream tasks have finished, or it has none.

    Channels whose EndOfPartition has not been read yet are waited for: no barrier can come on them any more.
    """

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class AlignmentTick:
    """Time has passed: due at the handler's `next_deadline()`, harmless at any other time.

    Attributes:
        now: seconds, by the clock of the barriers' timestamps.
    """

    now: float


BarrierEvent = (
    BarrierReceived | BarrierAnnounced | CancellationReceived | EndOfPartitionReceived | TriggerReceived | AlignmentTick
)

# Actions


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """Read nothing more from the channel until it is unblocked."""

    channel: str


@dataclass(frozen=True, slots=True)
class UnblockChannels:
    """Go on reading these channels."""

    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the snapshot and forward the barrier to every output."""

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class StartSnapshot:
    """The barrier overtakes: take the snapshot now, and forward the barrier in front of everything that waits on the
    outputs; what it overtakes there is in-flight data too.

    On each of `in_flight`, what has not been read yet and lies in front of the channel's own barrier (or of its end)
    belongs to the checkpoint; it is read and processed as ever, and kept until ChannelCaptured says that it is all.

    Attributes:
        barrier: from here on marked as unaligned.
        in_flight: channels, in order; the barrier is next on all others, or they have ended.
    """

    barrier: CheckpointBarrier
    in_flight: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChannelCaptured:
    """The barrier of a channel in flight, or its end, is there: what lies in front of it is all that belongs to the
    checkpoint."""

    checkpoint_id: int
    channel: str


@dataclass(frozen=True, slots=True)
class SnapshotInputsComplete:
    """No channel is in flight any more: the snapshot can be acknowledged."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class AbortAlignment:
    """This checkpoint will not happen in this task: tell the coordinator, forward a cancellation marker, throw away
    what was captured."""

    checkpoint_id: int
    reason: FailureReason


BarrierAction = (
    BlockChannel | UnblockChannels | TakeSnapshot | StartSnapshot | ChannelCaptured | SnapshotInputsComplete | AbortAlignment
)


class BarrierHandler(Protocol):
    """What the modes have in common."""

    def handle(self, event: BarrierEvent) -> list[BarrierAction]: ...

    def next_deadline(self) -> float | None:
        """When an AlignmentTick is due, by the clock of the barriers' timestamps; None if never."""
        ...
