"""What happens to a task, and what it then has to do; values only.

Events come from the job (`messages`), from the channels, the query and the driver itself; actions are for the driver. An action
whose result the machine waits for is the last one of its list, and names the event that answers it. Where the coordination floor
has a word for it already, that one is used: `lifecycle`'s actions go to the driver as they are, `AlignmentTick` comes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dagster_checkpoints.coordination import (
    AlignmentTick,
    CheckpointBarrier,
    EndOfDataReached,
    TaskStateChanged,
    TaskStatistics,
)
from dagster_checkpoints.coordination import Declined as Declined
from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.execution.elements import Element, Mark
from dagster_checkpoints.execution.messages import TaskMessage
from dagster_checkpoints.state import ChannelSnapshot

# Events


class TaskOpened(msgspec.Struct, frozen=True):
    """The sink is open and its transactions are recovered: the task begins."""


class QueryBuilt(msgspec.Struct, frozen=True):
    """Answers `BuildQuery`.

    Attributes:
        streaming: False for a plan without streams, which is evaluated once.
        told_watermark: whether the query is told the watermark of its inputs, because it keeps state. If not, the watermark goes
            straight on, behind what the records in front of it have become.
        ordered: whether the query asks for the watermark before it asks for the records that the watermark speaks of. If not, a
            watermark is held back until the records in front of it are consumed.
    """

    streaming: bool = True
    told_watermark: bool = True
    ordered: bool = True


class QueryRunning(msgspec.Struct, frozen=True):
    """Answers `StartQuery`."""


class Evaluated(msgspec.Struct, frozen=True):
    """Answers `EvaluateOnce`: everything is emitted."""


class ElementsArrived(msgspec.Struct, frozen=True):
    """Elements lie on channels.

    Attributes:
        elements: by channel, those from the position on up to which the channel is read (`InputGate.scanned`). How many of them
            were read, `InputGate.scanned` says afterwards; the others are given again.
    """

    elements: Sequence[tuple[str, Sequence[Element]]]


class QueryConsumed(msgspec.Struct, frozen=True):
    """The query has processed, and committed, the elements of these channels up to these positions."""

    positions: Mapping[str, int]


class BetweenBatches(msgspec.Struct, frozen=True):
    """No micro-batch is being processed: what belongs between the output of two of them may be said now."""


class UnreadBarrier(msgspec.Struct, frozen=True):
    """The first barrier of a channel has arrived, behind elements that are not read yet; see `BarrierAnnounced`.

    Attributes:
        unread: the elements in front of it, from `InputGate.scanned` on.
    """

    channel: str
    barrier: CheckpointBarrier
    unread: Sequence[Element]


class SnapshotPinned(msgspec.Struct, frozen=True):
    """Answers `PinSnapshot`: nothing in the snapshot changes any more."""

    checkpoint_id: int


class SnapshotFailed(msgspec.Struct, frozen=True):
    """Answers `PinSnapshot`: the task goes on without this snapshot.

    Attributes:
        message: what went wrong.
    """

    checkpoint_id: int
    message: str = ""


class SourceExhausted(msgspec.Struct, frozen=True):
    """A bounded source has read all of its input."""


GateEvent = (
    TaskOpened
    | QueryBuilt
    | QueryRunning
    | Evaluated
    | ElementsArrived
    | QueryConsumed
    | BetweenBatches
    | UnreadBarrier
    | AlignmentTick
    | SnapshotPinned
    | SnapshotFailed
)
TaskEvent = GateEvent | TaskMessage | SourceExhausted | life.OperatorsFinished

# Actions


class BuildQuery(msgspec.Struct, frozen=True):
    """Build the query: all static inputs are there. Answered by `QueryBuilt`."""


class StartQuery(msgspec.Struct, frozen=True):
    """Start the query. Answered by `QueryRunning`."""


class EvaluateOnce(msgspec.Struct, frozen=True):
    """Evaluate the plan without streams, and emit what it gives. Answered by `Evaluated`."""


class OpenTo(msgspec.Struct, frozen=True):
    """The query may read its channels up to these positions, and is told the watermark; both at one moment.

    Attributes:
        positions: of every channel that is no static input.
        watermark: epoch ms; None to tell nothing new.
    """

    positions: Mapping[str, int]
    watermark: int | None


class AddToTable(msgspec.Struct, frozen=True):
    """Records of a static input: they belong to the table from now on."""

    channel: str
    records: Element


class Forward(msgspec.Struct, frozen=True):
    """Append a mark to every output channel."""

    mark: Mark


class WatermarkReached(msgspec.Struct, frozen=True):
    """The task's output has come to this watermark, epoch ms: an event of `OutputEventTime`, which says it if it is news."""

    ms: int


class PinnedChannel(msgspec.Struct, frozen=True):
    """One input channel in a snapshot.

    Attributes:
        in_flight: elements in front of the barrier that are not processed yet; `snapshot.in_flight` is empty, these are not
            stored yet.
    """

    snapshot: ChannelSnapshot
    in_flight: tuple[Element, ...] = ()


class PinnedInputs(msgspec.Struct, frozen=True):
    """The inputs' part of a snapshot.

    Attributes:
        valve_watermark: the watermark of all channels together, epoch ms; None if there is none yet.
    """

    channels: tuple[PinnedChannel, ...] = ()
    valve_watermark: int | None = None


class PinSnapshot(msgspec.Struct, frozen=True):
    """Take the snapshot: hold the query between two micro-batches, pin its state, the operators' and the sink's.

    Answered by `SnapshotPinned` or `SnapshotFailed` while the query is still held.

    Attributes:
        overtaking: whether the barrier overtakes what waits on the outputs (unaligned).
    """

    barrier: CheckpointBarrier
    inputs: PinnedInputs
    overtaking: bool = False


class Overtake(msgspec.Struct, frozen=True):
    """Put the barrier in front of everything that waits on the outputs; what it overtakes belongs to the snapshot."""

    barrier: CheckpointBarrier


class StoreSnapshot(msgspec.Struct, frozen=True):
    """Store what was pinned, then acknowledge.

    Attributes:
        captured: by channel, what was read behind the snapshot and belongs to it (unaligned).
    """

    barrier: CheckpointBarrier
    statistics: TaskStatistics
    captured: Mapping[str, tuple[Element, ...]]


class DropSnapshot(msgspec.Struct, frozen=True):
    """Forget what was pinned: it will not be stored."""

    checkpoint_id: int


class NotifyOperatorsAborted(msgspec.Struct, frozen=True):
    """Call notify_checkpoint_aborted of every stage."""

    checkpoint_id: int


class StopSource(msgspec.Struct, frozen=True):
    """Stop reading a source, as if its input were exhausted."""


class KillQuery(msgspec.Struct, frozen=True):
    """Stop the query at once. A micro-batch that waits is not processed: it comes again when the job is resumed."""


class Report(msgspec.Struct, frozen=True):
    """Tell the coordinator."""

    event: TaskStateChanged | EndOfDataReached | Declined


TaskAction = (
    BuildQuery
    | StartQuery
    | EvaluateOnce
    | OpenTo
    | AddToTable
    | Forward
    | WatermarkReached
    | PinSnapshot
    | Overtake
    | StoreSnapshot
    | DropSnapshot
    | NotifyOperatorsAborted
    | StopSource
    | KillQuery
    | Report
    | life.FinishOperators
    | life.PauseOperators
    | life.ResumeOperators
    | life.CommitUpTo
    | life.CloseOperators
    | life.TaskFinished
)
