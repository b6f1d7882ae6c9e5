"""The gate in front of a task's inputs: how far its channels are read, and how far the query may follow.

The gate *scans* each channel for barriers and the marks of its end, and *takes in* records and watermarks by opening to the
query. Usually both happen at once. While a static input is not ready there is no query: the gate scans on, so that barriers pass,
and the elements in front of a barrier are in-flight data of the checkpoint. The query follows at its own pace; a snapshot is
taken, and the data ends, only when the query has consumed everything that the gate has opened to. Where a barrier overtakes, the
snapshot is taken at the positions that the query has consumed, and the elements up to the barriers are in-flight data, too.

It must not know: the content of records, the life cycle's rules, the coordinator, sinks.

Source: PROTOCOL sections 4 and 5; FLIP-76; FLIP-147; Flink's CheckpointedInputGate and StatusWatermarkValve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.creation import create_barrier_handler
from dagster_checkpoints.coordination.barriers.events import (
    AbortAlignment,
    AlignmentTick,
    BarrierAction,
    BarrierAnnounced,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    EndOfPartitionReceived,
    StartSnapshot,
    TakeSnapshot,
    TriggerReceived,
    UnblockChannels,
)
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.execution.elements import (
    BarrierMark,
    CancelMark,
    Element,
    EndOfData,
    EndOfPartition,
    WatermarkAt,
    WatermarkStatus,
)
from dagster_checkpoints.execution.gate_intake import BatchLimit, GateIntake
from dagster_checkpoints.execution.gate_snapshots import GateSnapshots, InputsCaptured, PinDue
from dagster_checkpoints.execution.input_channel import GateChannel, InputChannel, InputChannelTable
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
    QueryBuilt,
    QueryConsumed,
    QueryHeld,
    QueryRunning,
    QuerySettled,
    SnapshotFailed,
    SnapshotPinned,
    StartQuery,
    TaskOpened,
    UnreadBarrier,
    WatermarkReached,
)

GateAction = (
    BuildQuery
    | StartQuery
    | EvaluateOnce
    | OpenTo
    | AddToTable
    | Forward
    | WatermarkReached
    | HoldQuery
    | PinDue
    | InputsCaptured
    | DropSnapshot
    | AbortAlignment
    | life.EndOfDataReceived
)
"""What a task has to do for its gate."""


class InputGate:
    """The gate of one task.

    Args:
        channels: the task's input channels.
        config: the settings of checkpointing; read are the mode and unaligned barriers.
        valve_watermark: the watermark of all channels together in the restored checkpoint, epoch ms.
        max_rows: the most rows that a micro-batch takes from all channels together; None for no limit. One element with more rows
            is a micro-batch of its own.
    """

    def __init__(
        self,
        channels: Sequence[GateChannel],
        config: CheckpointConfig,
        valve_watermark: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        self._channels = InputChannelTable((start.name, InputChannel(start)) for start in channels)
        self._streams = [c for c in self._channels.values() if not c.static]
        self._statics = [c for c in self._channels.values() if c.static]
        self._exactly_once = config.mode == "exactly_once"
        self._handler = create_barrier_handler(config, self._channels)
        restored = {start.name: start.restored for start in channels if start.restored is not None and not start.static}
        self._intake = GateIntake(self._streams, restored, valve_watermark, overtaking=config.unaligned, max_rows=max_rows)
        self._watermarks, behind = self._intake.watermarks, self._intake.behind
        self._overtaken = 0
        """The newest checkpoint whose snapshot was asked for, or that was aborted."""
        self._snapshots = GateSnapshots(
            self._channels,
            self._watermarks.snapshot if behind is None else behind.snapshot,
            config.aligned_checkpoint_timeout if config.unaligned else None,
        )
        self._due = self._snapshots.due
        self._now = 0.0
        self._actions: list[GateAction] = []
        """The actions of the present event so far."""
        self._awaits: type[object] | None = TaskOpened
        """The type of the event that answers the last action; no element is read before it comes. None if none is awaited."""
        self._paused = False
        self._settled = False
        """Whether the query has emitted everything that is due by what the gate has opened to."""

    # Queries of the driver

    def scanned(self, channel: str) -> int:
        """The position up to which a channel is scanned."""
        return self._channels[channel].scanned

    def reads(self, channel: str) -> bool:
        """Whether the next element of a channel may be read."""
        stopped = self._due or self._paused or self._awaits is not None
        return not (stopped or self._channels[channel].blocked) and self._intake.reads(self._channels[channel])

    def announces(self, channel: str) -> int | None:
        """Whether a barrier of a channel is to be announced (`UnreadBarrier`), because the gate does not read up to it.

        Returns:
            The first barrier of a checkpoint after this one is to be announced; None if none is.
        """
        waits = self._channels[channel]
        if self._due or self._paused or self._awaits is not None or waits.blocked or self._intake.behind is None:
            return None
        # On a channel whose elements are captured, the barrier of the newest snapshot is still to come.
        newest = self._overtaken - 1 if waits.captured is not None else self._overtaken
        return None if self._intake.reads(waits) or (waits.announced or 0) > newest else newest

    @property
    def open(self) -> bool:
        """Whether the query is built, and the data has not ended."""
        return self._intake.open

    @property
    def caught_up(self) -> bool:
        """Whether the query has consumed everything that the gate has opened to."""
        return self._intake.caught_up

    @property
    def watermark(self) -> int:
        """The watermark of all channels together, epoch ms; MIN_WATERMARK_MS before there is one."""
        return self._watermarks.watermark

    @property
    def settling(self) -> bool:
        """Whether the snapshot of a stop waits until the query has emitted what is due; see `QuerySettled`."""
        waits = bool(self._due) and self._due[0].stops_job and not self._settled
        return waits and self.open and self._intake.streaming and self.caught_up

    @property
    def has_news(self) -> bool:
        """Whether marks wait to be sent at the next `BetweenBatches`."""
        return self._watermarks.has_news

    def next_deadline(self) -> float | None:
        """When an AlignmentTick is due, by the clock of the barriers' timestamps; None if never."""
        waiting = self._handler.next_deadline()
        return self._snapshots.next_deadline() if waiting is None else waiting

    @property
    def holding(self) -> int | None:
        """The checkpoint for which the gate waits until the query is held; None if it does not."""
        return self._due[0].checkpoint_id if self._awaits is QueryHeld and self._due else None

    def retains(self, channel: str) -> bool:
        """Whether elements of a channel that the query has consumed belong to a snapshot that is not stored yet."""
        return self._snapshots.retains(self._channels[channel])

    # Events

    def handle(self, event: object, now: float) -> list[GateAction]:
        """Take one event, return what the task has to do, in this order.

        Args:
            event: a `GateEvent`; the life cycle's PauseOperators, ResumeOperators, FinishOperators and RestoredAfterFinish; the
                coordinator's TriggerReceived and CheckpointAbortedNotice.
            now: seconds, by a clock that does not go back.

        Raises:
            UnexpectedEvent: the event cannot come now.
            UnknownChannel: it names a channel that the task does not have.
        """
        take = _TAKES.get(type(event))
        if take is None:
            raise UnexpectedEvent(f"{event!r} is no event of an input gate. Feed it only what `handle` lists.")
        self._now, self._actions = now, []
        take(self, event)
        self._proceed()
        return self._actions

    def _answered(self, event: object) -> None:
        self._expect(type(event), event)

    def _expect(self, answer: type[object], event: object) -> None:
        if self._awaits is not answer:
            waits = "nothing" if self._awaits is None else self._awaits.__name__
            raise UnexpectedEvent(f"{event!r} answers no action of the gate, which waits for {waits}.")
        self._awaits = None

    def _query_built(self, event: QueryBuilt) -> None:
        self._answered(event)
        self._intake.built(event)
        if event.streaming:
            self._let_through()
            self._actions.append(StartQuery())
            self._awaits = QueryRunning

    def _evaluated(self, event: Evaluated) -> None:
        self._answered(event)
        self._data_ended()

    def _arrived(self, event: ElementsArrived) -> None:
        if self._paused or self._awaits is not None:
            return
        limited: dict[InputChannel, deque[tuple[Element, int]]] = {}
        limit = self._intake.limit
        for name, elements in event.elements:
            channel = self._channels[name]
            if limit is not None and not channel.static and not self._intake.closed:
                limited[channel] = deque(zip(elements, event.rows.get(name) or repeat(1), strict=False))
                continue
            for element in elements:
                if channel.blocked or self._due:
                    break
                self._scan(channel, element)
        if limit is not None:
            self._scan_in_turn(limit, limited)

    def _scan_in_turn(self, limit: BatchLimit, queues: dict[InputChannel, deque[tuple[Element, int]]]) -> None:
        turns = limit.in_turn(queues, only_fitting=self._intake.open)
        while not self._due and (turn := next(turns, None)) is not None:
            self._scan(*turn)

    def _scan(self, channel: InputChannel, element: Element) -> None:
        channel.scanned += 1
        if channel.unread:
            channel.unread.popleft()
        _SCANS.get(type(element), InputGate._scan_records)(self, channel, element)
        if self._intake.open:
            channel.taken_in = channel.scanned

    def _consumed(self, event: QueryConsumed | QueryHeld) -> None:
        for name, position in event.positions.items():
            channel = self._channels[name]
            channel.consumed = max(channel.consumed, position)
            self._intake.consumed(channel)

    def _query_settled(self, event: QuerySettled) -> None:
        self._settled = True

    def _between_batches(self, event: BetweenBatches) -> None:
        self._actions += self._watermarks.between_batches(caught_up=self.caught_up)

    def _triggered(self, event: TriggerReceived) -> None:
        self._obey(self._handler.handle(event))

    def _aborted(self, event: life.CheckpointAbortedNotice) -> None:
        checkpoint_id = event.checkpoint_id
        self._snapshots.drop(checkpoint_id)
        for action in self._handler.handle(CancellationReceived(None, checkpoint_id)):
            if isinstance(action, AbortAlignment):
                self._cancel(action.checkpoint_id)  # not reported to the coordinator, which has sent the notice
            else:
                self._obey([action])

    def _announced(self, event: UnreadBarrier) -> None:
        channel = self._channels[event.channel]
        channel.announced = event.barrier.checkpoint_id
        channel.unread = deque(event.unread)
        self._obey(self._handler.handle(BarrierAnnounced(event.channel, event.barrier)))

    def _tick(self, event: AlignmentTick) -> None:
        self._obey(self._handler.handle(event))
        if self._awaits is None:
            self._snapshots.tick(event.now)

    def _query_held(self, event: QueryHeld) -> None:
        self._answered(event)
        self._consumed(event)
        if self._due and self._due[0].checkpoint_id == event.checkpoint_id:
            self._take_next()

    def _snapshot_failed(self, event: SnapshotFailed) -> None:
        if self._awaits is QueryHeld:
            self._awaits = SnapshotPinned
            self._snapshots.drop(event.checkpoint_id)
        self._expect(SnapshotPinned, event)
        self._snapshots.give_up(event.checkpoint_id)

    def _pause(self, event: object) -> None:
        self._paused = True

    def _resume(self, event: object) -> None:
        self._paused = False

    def _close(self, event: object) -> None:
        self._awaits = None
        self._intake.close()
        for channel in self._streams:
            channel.held.clear()

    # Scanning

    def _scan_records(self, channel: InputChannel, records: Element) -> None:
        if channel.captured is not None:
            channel.captured.append(records)
        if channel.static:
            if channel.ended == "none":
                self._actions.append(AddToTable(channel.name, records))
        else:
            self._intake.records(channel, records)

    def _scan_barrier(self, channel: InputChannel, mark: BarrierMark) -> None:
        if channel.announced is not None and channel.announced <= mark.barrier.checkpoint_id:
            channel.announced = None
        if not self._exactly_once:
            self._snapshots.memory.remember(channel, mark.barrier.checkpoint_id, self._watermarks.snapshot())
        self._obey(self._handler.handle(BarrierReceived(channel.name, mark.barrier)))

    def _scan_cancellation(self, channel: InputChannel, mark: CancelMark) -> None:
        self._obey(self._handler.handle(CancellationReceived(channel.name, mark.checkpoint_id)))

    def _scan_end(self, channel: InputChannel, mark: EndOfPartition) -> None:
        if not channel.static:
            self._intake.hold_end(channel, mark)
        self._obey(self._handler.handle(EndOfPartitionReceived(channel.name)))

    def _scan_mark(self, channel: InputChannel, mark: WatermarkAt | WatermarkStatus | EndOfData) -> None:
        if channel.captured is not None:
            channel.captured.append(mark)
        if channel.static:
            channel.ended_in_scan = channel.ended_in_scan or (isinstance(mark, EndOfData) and mark.drain)
        else:
            self._intake.mark(channel, mark)

    # What follows from the state

    def _proceed(self) -> None:
        """Do everything that is possible now; an action whose result the gate waits for is the last one."""
        if self._paused or self._awaits is not None:
            return
        if not (self.open or self._intake.closed) and all(c.ended_in_scan or c.ended == "drain" for c in self._statics):
            self._awaits = QueryBuilt
            self._actions.append(BuildQuery())
            return
        if self.open:
            self._let_through()
        if self._due:
            self._take_due()
        if self.open and not self._due and self._awaits is None:
            self._end()

    def _let_through(self) -> None:
        opened = self._intake.let_through()
        if opened is not None:
            self._settled = False
            self._actions.append(opened)

    def _take_due(self) -> None:
        """Take the snapshots that are due, once the query has caught up; at once where the barrier overtakes.

        That of a stop waits until the query has also run under the newest watermark: its results are due now, not when the job is
        resumed.
        """
        while self._due and self._awaits is None:
            due = self._due[0]
            if due.takes_snapshot and self.open and not self.caught_up:
                if due.overtakes:
                    self._awaits = QueryHeld
                    self._actions.append(HoldQuery(due.checkpoint_id))
                return
            if self.settling:
                return
            self._take_next()

    def _take_next(self) -> None:
        taken = self._snapshots.take_next()
        if taken is not None:
            self._actions.append(taken)
        if isinstance(taken, PinDue):
            self._awaits = SnapshotPinned

    def _end(self) -> None:
        if not self._intake.streaming:
            self._awaits = Evaluated
            self._actions.append(EvaluateOnce())
        elif not [c for c in self._streams if c.ended == "none"] and self.caught_up:
            self._data_ended()

    def _data_ended(self) -> None:
        self._intake.close()
        self._actions.append(life.EndOfDataReceived(all(c.ended == "drain" for c in self._streams)))

    # Barriers and snapshots

    def _obey(self, asked: Iterable[BarrierAction]) -> None:
        for action in asked:
            obey = _OBEYS.get(type(action))
            if obey is None:
                if isinstance(action, StartSnapshot):
                    self._overtaken = action.barrier.checkpoint_id
                self._snapshots.add(action, self._now)  # type: ignore[arg-type]  # the others are in _OBEYS
            else:
                obey(self, action)

    def _block(self, action: BlockChannel) -> None:
        self._snapshots.alignment_begins(self._now)
        self._channels[action.channel].blocked = True

    def _unblock(self, action: UnblockChannels) -> None:
        for name in action.channels:
            self._channels[name].blocked = False

    def _take_snapshot(self, action: TakeSnapshot) -> None:
        checkpoint_id = self._overtaken = action.barrier.checkpoint_id
        if self._intake.closed and self._snapshots.memory.ended_behind(checkpoint_id):
            # At-least-once: the data ended behind the barrier of an upstream task. After a restore that task would emit again,
            # and this one would not take its records in.
            self._abort(AbortAlignment(checkpoint_id, FailureReason.CHECKPOINT_DECLINED_INPUT_END_OF_STREAM))
        else:
            self._snapshots.add(action, self._now)

    def _abort(self, action: AbortAlignment) -> None:
        self._cancel(action.checkpoint_id)
        self._actions.append(action)

    def _cancel(self, checkpoint_id: int) -> None:
        self._overtaken = max(self._overtaken, checkpoint_id)
        self._snapshots.alignment_ends()
        if self._snapshots.give_up(checkpoint_id):
            self._actions.append(DropSnapshot(checkpoint_id))
        self._actions.append(Forward(CancelMark(checkpoint_id)))


_TAKES: dict[type[object], Callable[[InputGate, Any], None]] = {
    TaskOpened: InputGate._answered,
    QueryBuilt: InputGate._query_built,
    QueryRunning: InputGate._answered,
    Evaluated: InputGate._evaluated,
    ElementsArrived: InputGate._arrived,
    QueryConsumed: InputGate._consumed,
    BetweenBatches: InputGate._between_batches,
    QuerySettled: InputGate._query_settled,
    TriggerReceived: InputGate._triggered,
    life.CheckpointAbortedNotice: InputGate._aborted,
    UnreadBarrier: InputGate._announced,
    AlignmentTick: InputGate._tick,
    QueryHeld: InputGate._query_held,
    SnapshotPinned: InputGate._answered,
    SnapshotFailed: InputGate._snapshot_failed,
    life.PauseOperators: InputGate._pause,
    life.ResumeOperators: InputGate._resume,
    life.FinishOperators: InputGate._close,
    life.RestoredAfterFinish: InputGate._close,
}
_OBEYS: dict[type[object], Callable[[InputGate, Any], None]] = {
    BlockChannel: InputGate._block,
    UnblockChannels: InputGate._unblock,
    TakeSnapshot: InputGate._take_snapshot,
    AbortAlignment: InputGate._abort,
}
"""The actions of a barrier handler that do not have to wait until the query has caught up."""
_SCANS: dict[type[object], Callable[[InputGate, InputChannel, Any], None]] = {
    BarrierMark: InputGate._scan_barrier,
    CancelMark: InputGate._scan_cancellation,
    EndOfPartition: InputGate._scan_end,
    WatermarkAt: InputGate._scan_mark,
    WatermarkStatus: InputGate._scan_mark,
    EndOfData: InputGate._scan_mark,
}
"""By type of element; every other element is records."""
