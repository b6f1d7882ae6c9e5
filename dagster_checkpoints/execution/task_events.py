"""What happens to a task, and what it then has to do; values only.

Events come from the job (`messages`), from the channels, the query and the driver itself; actions are for the driver. An action
whose result the machine waits for is the last one of its list, and names the event that answers it. Where the coordination floor
has a word for it already, that one is used: `lifecycle`'s actions go to the driver as they are, `AlignmentTick` comes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class TaskOpened:
    """The sink is open and its transactions are recovered: the task begins."""


@dataclass(frozen=True, slots=True)
class QueryBuilt:
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


@dataclass(frozen=True, slots=True)
class QueryRunning:
    """Answers `StartQuery`."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Answers `EvaluateOnce`: everything is emitted."""


@dataclass(frozen=True, slots=True)
class ElementsArrived:
    """Elements lie on channels.

    Attributes:
        elements: by channel, those from the position on up to which the channel is read (`InputGate.scanned`). How many of them
            were read, `InputGate.scanned` says afterwards; the others are given again.
    """

    elements: Sequence[tuple[str, Sequence[Element]]]


@dataclass(frozen=True, slots=True)
class QueryConsumed:
    """The query has processed, and committed, the elements of these channels up to these positions."""

    positions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BetweenBatches:
    """No micro-batch is being processed: what belongs between the output of two of them may be said now."""


@dataclass(frozen=True, slots=True)
class UnreadBarrier:
    """The first barrier of a channel has arrived, behind elements that are not read yet; see `BarrierAnnounced`.

    Attributes:
        unread: the elements in front of it, from `InputGate.scanned` on.
    """

    channel: str
    barrier: CheckpointBarrier
    unread: Sequence[Element]


@dataclass(frozen=True, slots=True)
class SnapshotPinned:
    """Answers `PinSnapshot`: nothing in the snapshot changes any more."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """Answers `PinSnapshot`: the task goes on without this snapshot.

    Attributes:
        message: what went wrong.
    """

    checkpoint_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class SourceExhausted:
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


@dataclass(frozen=True, slots=True)
class BuildQuery:
    """Build the query: all static inputs are there. Answered by `QueryBuilt`."""


@dataclass(frozen=True, slots=True)
class StartQuery:
    """Start the query. Answered by `QueryRunning`."""


@dataclass(frozen=True, slots=True)
class EvaluateOnce:
    """Evaluate the plan without streams, and emit what it gives. Answered by `Evaluated`."""


@dataclass(frozen=True, slots=True)
class OpenTo:
    """The query may read its channels up to these positions, and is told the watermark; both at one moment.

    Attributes:
        positions: of every channel that is no static input.
        watermark: epoch ms; None to tell nothing new.
    """

    positions: Mapping[str, int]
    watermark: int | None


@dataclass(frozen=True, slots=True)
class AddToTable:
    """Records of a static input: they belong to the table from now on."""

    channel: str
    records: Element


@dataclass(frozen=True, slots=True)
class Forward:
    """Append a mark to every output channel."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class WatermarkReached:
    """The task's output has come to this watermark, epoch ms: an event of `OutputEventTime`, which says it if it is news."""

    ms: int


@dataclass(frozen=True, slots=True)
class PinnedChannel:
    """One input channel in a snapshot.

    Attributes:
        in_flight: elements in front of the barrier that are not processed yet; `snapshot.in_flight` is empty, these are not
            stored yet.
    """

    snapshot: ChannelSnapshot
    in_flight: tuple[Element, ...] = ()


@dataclass(frozen=True, slots=True)
class PinnedInputs:
    """The inputs' part of a snapshot.

    Attributes:
        valve_watermark: the watermark of all channels together, epoch ms; None if there is none yet.
    """

    channels: tuple[PinnedChannel, ...] = ()
    valve_watermark: int | None = None


@dataclass(frozen=True, slots=True)
class PinSnapshot:
    """Take the snapshot: hold the query between two micro-batches, pin its state, the operators' and the sink's.

    Answered by `SnapshotPinned` or `SnapshotFailed` while the query is still held.

    Attributes:
        overtaking: whether the barrier overtakes what waits on the outputs (unaligned).
    """

    barrier: CheckpointBarrier
    inputs: PinnedInputs
    overtaking: bool = False


@dataclass(frozen=True, slots=True)
class Overtake:
    """Put the barrier in front of everything that waits on the outputs; what it overtakes belongs to the snapshot."""

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Store what was pinned, then acknowledge.

    Attributes:
        captured: by channel, what was read behind the snapshot and belongs to it (unaligned).
    """

    barrier: CheckpointBarrier
    statistics: TaskStatistics
    captured: Mapping[str, tuple[Element, ...]]


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Forget what was pinned: it will not be stored."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class NotifyOperatorsAborted:
    """Call notify_checkpoint_aborted of every stage."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StopSource:
    """Stop reading a source, as if its input were exhausted."""


@dataclass(frozen=True, slots=True)
class KillQuery:
    """Stop the query at once. A micro-batch that waits is not processed: it comes again when the job is resumed."""


@dataclass(frozen=True, slots=True)
class Report:
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
