"""The events and actions of a task, and what a job sends to it; values only.

Events come from the job, from the channels, the query and the driver itself; actions are for the driver. An action
whose result the machine waits for is the last one of its list, and names the event that answers it. Events and actions of the
coordination floor are used unchanged: the actions of `lifecycle`, and `AlignmentTick`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AlignmentTick, TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, TaskStatistics
from dagster_checkpoints.coordination.events import BacklogChanged, EndOfDataReached, TaskStateChanged
from dagster_checkpoints.coordination.events import Declined as Declined
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.lifecycle import CheckpointNotice, DrainAnnounced
from dagster_checkpoints.execution.elements import Element, Mark
from dagster_checkpoints.execution.split_events import SplitMessage, SplitRequest
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import ChannelSnapshot, FusedSourceSnapshot


class EndInput(msgspec.Struct, frozen=True):
    """A source is to end as if its input were exhausted. Tasks with input channels ignore it: their inputs end by themselves.

    Attributes:
        source: of a task with fused sources, the only one that ends; "" for all of them.
    """

    source: str = ""


TaskMessage = TriggerReceived | CheckpointNotice | DrainAnnounced | EndInput | SplitMessage


# Events


class TaskOpened(msgspec.Struct, frozen=True):
    """The sink is open and its transactions are recovered: the task begins."""


class QueryBuilt(msgspec.Struct, frozen=True):
    """Answers `BuildQuery`.

    Attributes:
        streaming: False for a plan without streams, which is evaluated once.
        takes_watermark: whether the query gets the watermark of its inputs, because it keeps state. If not, the watermark is
            forwarded directly, after the output of the records in front of it.
    """

    streaming: bool = True
    takes_watermark: bool = True


class QueryRunning(msgspec.Struct, frozen=True):
    """Answers `StartQuery`."""


class Evaluated(msgspec.Struct, frozen=True):
    """Answers `EvaluateOnce`: all rows are emitted."""


class ElementsArrived(msgspec.Struct, frozen=True):
    """Channels have unread elements.

    Attributes:
        elements: by channel, its elements from `InputGate.scanned` on. The gate may read only some of them; its new
            `InputGate.scanned` says how many, and the others are sent again.
        rows: by channel, the number of rows of each of these elements, 0 for a mark; read by a gate that limits micro-batches. A
            channel that is absent has one row in each element that is no mark.
    """

    elements: Sequence[tuple[str, Sequence[Element]]]
    rows: Mapping[str, Sequence[int]] = {}


class QueryConsumed(msgspec.Struct, frozen=True):
    """The query has processed, and committed, the elements of these channels up to these positions."""

    positions: Mapping[str, int]


class BetweenBatches(msgspec.Struct, frozen=True):
    """No micro-batch is being processed: marks that belong between the output of two of them may be sent now."""


class UnreadBarrier(msgspec.Struct, frozen=True):
    """The first barrier of a channel has arrived, behind elements that are not read yet; see `BarrierAnnounced`.

    Attributes:
        channel: name of the channel.
        barrier: the barrier.
        unread: the elements in front of it, from `InputGate.scanned` on.
    """

    channel: str
    barrier: CheckpointBarrier
    unread: Sequence[Element]


class QueryHeld(msgspec.Struct, frozen=True):
    """Answers `HoldQuery`: no micro-batch emits before the event is handled.

    Attributes:
        checkpoint_id: the checkpoint of the `HoldQuery`.
        positions: by channel, the position up to which the query has processed, and committed, its elements.
    """

    checkpoint_id: int
    positions: Mapping[str, int]


class SnapshotPinned(msgspec.Struct, frozen=True):
    """Answers `PinSnapshot`: the snapshot does not change any more."""

    checkpoint_id: int


class SnapshotFailed(msgspec.Struct, frozen=True):
    """Answers `PinSnapshot` or `HoldQuery`: the task continues without this snapshot.

    Attributes:
        message: what went wrong.
        reason: ``TASK_FAILURE`` if the task fails as well: that is no checkpoint that has failed, and its report has the error.
    """

    checkpoint_id: int
    message: str = ""
    reason: FailureReason = FailureReason.CHECKPOINT_DECLINED


class SourcesAsked(msgspec.Struct, frozen=True):
    """The query has asked its fused sources for rows; what they had is processed and committed.

    Attributes:
        moved: the sources that had rows.
        unmoved: the sources that had none. A held source is among them only if it was held before the query asked it.
        watermarks: by source, its watermark after these rows, epoch ms.
        ran_under: the watermark under which the query ran when it asked, epoch ms; None if the batch is not known.
        settled: whether the query has run under the newest event time of all its sources, and had nothing more to do: it has
            emitted what was due. A query with timers of processing time always has more to do: see `ran_under`.
    """

    moved: tuple[str, ...] = ()
    unmoved: tuple[str, ...] = ()
    watermarks: Mapping[str, int] = {}
    ran_under: int | None = None
    settled: bool = False


class SplitRead(msgspec.Struct, frozen=True):
    """Answers `ReadSplit`: the split is read to its end, and its rows are emitted."""

    split: str


class BacklogMeasured(msgspec.Struct, frozen=True):
    """A source has measured how much is unread.

    Attributes:
        rows: the number of unread rows; None if it cannot tell now.
    """

    rows: int | None


class QuerySettled(msgspec.Struct, frozen=True):
    """The query has run under everything that it may read, its watermark included, and has no batch left to run: it has emitted
    what is due. Sent while the gate is `settling`."""


class SourceExhausted(msgspec.Struct, frozen=True):
    """A source has read all of its input; in a burst, an unbounded one all that was there when its query began."""


GateEvent = (
    TaskOpened
    | QueryBuilt
    | QueryRunning
    | Evaluated
    | ElementsArrived
    | QueryConsumed
    | BetweenBatches
    | QuerySettled
    | UnreadBarrier
    | AlignmentTick
    | QueryHeld
    | SnapshotPinned
    | SnapshotFailed
)
TaskEvent = GateEvent | TaskMessage | SourceExhausted | BacklogMeasured | SourcesAsked | SplitRead | life.OperatorsFinished

# Actions


class BuildQuery(msgspec.Struct, frozen=True):
    """Build the query: all static inputs are complete. Answered by `QueryBuilt`."""


class StartQuery(msgspec.Struct, frozen=True):
    """Start the query. Answered by `QueryRunning`."""


class EvaluateOnce(msgspec.Struct, frozen=True):
    """Evaluate the plan without streams, and emit its rows. Answered by `Evaluated`."""


class OpenTo(msgspec.Struct, frozen=True):
    """Let the query read its channels up to these positions, and give it the watermark; both take effect together.

    Attributes:
        positions: by channel that is no static input, the position behind the last element that the query may read.
        watermark: watermark for the query, epoch ms; None before the first.
    """

    positions: Mapping[str, int]
    watermark: int | None


class AddToTable(msgspec.Struct, frozen=True):
    """Add records of a static input to its table."""

    channel: str
    records: Element


class Forward(msgspec.Struct, frozen=True):
    """Append a mark to every output channel."""

    mark: Mark


class WatermarkReached(msgspec.Struct, frozen=True):
    """The task's output has this watermark, epoch ms: an event of `OutputEventTime`, which forwards it if it is a later one."""

    ms: int


class PinnedChannel(msgspec.Struct, frozen=True):
    """One input channel in a snapshot.

    Attributes:
        snapshot: the channel in the checkpoint, with empty `in_flight`.
        in_flight: elements in front of the barrier that are not processed and not stored yet.
    """

    snapshot: ChannelSnapshot
    in_flight: tuple[Element, ...] = ()


class PinnedInputs(msgspec.Struct, frozen=True):
    """The inputs' part of a snapshot.

    Attributes:
        channels: the input channels.
        valve_watermark: the watermark of all channels, or of all fused sources, together, epoch ms; None before the first.
        fused: the fused sources.
        splits: the splits that a split source was assigned and has not read to their end.
    """

    channels: tuple[PinnedChannel, ...] = ()
    valve_watermark: int | None = None
    fused: tuple[FusedSourceSnapshot, ...] = ()
    splits: tuple[str, ...] = ()


class HoldQuery(msgspec.Struct, frozen=True):
    """Hold the query between two micro-batches for an unaligned snapshot: one that emits ends first, no other one.

    Answered by `QueryHeld`, or by `SnapshotFailed`; the query is held until the actions that follow the answer are performed.
    """

    checkpoint_id: int


class PinSnapshot(msgspec.Struct, frozen=True):
    """Take the snapshot: hold the query between two micro-batches, and pin the state of query, operators and sink.

    Answered by `SnapshotPinned` or `SnapshotFailed` while the query is still held.

    Attributes:
        barrier: the barrier of the checkpoint.
        inputs: the inputs' part of the snapshot.
        overtaking: whether the barrier overtakes the elements that wait on the outputs (unaligned).
    """

    barrier: CheckpointBarrier
    inputs: PinnedInputs
    overtaking: bool = False


class Overtake(msgspec.Struct, frozen=True):
    """Put the barrier in front of all elements that wait on the outputs; these belong to the snapshot."""

    barrier: CheckpointBarrier


class StoreSnapshot(msgspec.Struct, frozen=True):
    """Store the pinned snapshot, then acknowledge.

    Attributes:
        barrier: the barrier of the checkpoint.
        statistics: the task's statistics, as far as they are known.
        captured: by channel, the elements that were read after the snapshot and belong to it (unaligned).
    """

    barrier: CheckpointBarrier
    statistics: TaskStatistics
    captured: Mapping[str, tuple[Element, ...]]


class DropSnapshot(msgspec.Struct, frozen=True):
    """Discard the pinned snapshot: it is not stored."""

    checkpoint_id: int


class NotifyOperatorsAborted(msgspec.Struct, frozen=True):
    """Call notify_checkpoint_aborted of every stage."""

    checkpoint_id: int


class StopSource(msgspec.Struct, frozen=True):
    """Stop reading a source, as if its input were exhausted."""


class ReadSplit(msgspec.Struct, frozen=True):
    """Read a split of the source. Answered by `SplitRead`; other events may come before."""

    split: str


class HoldSources(msgspec.Struct, frozen=True):
    """Hold fused sources to what is there now: they read that, and no more."""

    sources: tuple[str, ...]


class AdvanceEventTime(msgspec.Struct, frozen=True):
    """Run the query under this watermark of all its fused sources, epoch ms, from one of its next batches on."""

    ms: int


class KillQuery(msgspec.Struct, frozen=True):
    """Stop the query at once. A waiting micro-batch is not processed: it is read again when the job is resumed."""


class SourcesRead(msgspec.Struct, frozen=True):
    """To the job, in a burst: the task's sources have read what was there, and a later run may find more."""

    task: TaskId


class SourceEnded(msgspec.Struct, frozen=True):
    """To the job: the data of a source has ended. Sent again by each attempt.

    Attributes:
        task: the task.
        source: the fused source that has ended; None for all sources of the task.
    """

    task: TaskId
    source: str | None = None


class Report(msgspec.Struct, frozen=True):
    """Send this event to the job."""

    event: TaskStateChanged | EndOfDataReached | Declined | BacklogChanged | SplitRequest | SourcesRead | SourceEnded


TaskAction = (
    BuildQuery
    | StartQuery
    | EvaluateOnce
    | OpenTo
    | AddToTable
    | Forward
    | WatermarkReached
    | HoldQuery
    | PinSnapshot
    | Overtake
    | StoreSnapshot
    | DropSnapshot
    | NotifyOperatorsAborted
    | StopSource
    | ReadSplit
    | HoldSources
    | AdvanceEventTime
    | KillQuery
    | Report
    | life.FinishOperators
    | life.PauseOperators
    | life.ResumeOperators
    | life.CommitUpTo
    | life.CloseOperators
    | life.TaskFinished
)
