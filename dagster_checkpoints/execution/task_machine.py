"""The order of a task's actions, from the opening of its sink to its last mark.

One machine per task, driven by the task's own thread. It contains the life cycle (how a task ends) and the gate (what it reads):

    job's messages ──┐
    channels, query ─┼──> TaskMachine.handle ──> actions for the driver, answers come back as events
    the driver ──────┘

A snapshot: pin all state while the query is held, forward the barrier, report it to the life cycle (which pauses the task for a
suspend), and store the snapshot. The end: finish the operators, MAX_WATERMARK, EndOfData, the final checkpoint, commit, close,
EndOfPartition, FINISHED.

It must not know: how the driver performs actions, other tasks, the coordinator's rules.

Source: PROTOCOL sections 4 to 6; FLIP-147; FLIP-34.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AbortAlignment, AlignmentTick, TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.events import BacklogChanged, Declined, EndOfDataReached, TaskStateChanged
from dagster_checkpoints.coordination.lifecycle import LifecycleState, TaskLifecycle
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from dagster_checkpoints.execution.elements import BarrierMark, EndOfData, EndOfPartition, WatermarkAt
from dagster_checkpoints.execution.fused_sources import FusedSource, FusedSources
from dagster_checkpoints.execution.gate_snapshots import InputsCaptured, PinDue
from dagster_checkpoints.execution.input_channel import GateChannel
from dagster_checkpoints.execution.input_gate import GateAction, InputGate
from dagster_checkpoints.execution.sources import SourceBacklog
from dagster_checkpoints.execution.split_events import AssignSplit, NoMoreSplits
from dagster_checkpoints.execution.splits import SplitReader
from dagster_checkpoints.execution.task_events import (
    BacklogMeasured,
    BetweenBatches,
    DropSnapshot,
    ElementsArrived,
    EndInput,
    Evaluated,
    EvaluateOnce,
    Forward,
    KillQuery,
    NotifyOperatorsAborted,
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
    SplitRead,
    StartQuery,
    StopSource,
    StoreSnapshot,
    TaskAction,
    TaskEvent,
    TaskOpened,
    UnreadBarrier,
)
from dagster_checkpoints.pipeline import Stage, TaskId

_RUNNING = LifecycleState.RUNNING  # read at every event, and a look-up in an enumeration is slow


def config_of_task(config: CheckpointConfig, first: Stage) -> CheckpointConfig:
    """The settings of checkpointing of a task.

    Where rows arrive that the stage in front refuses, no barrier overtakes them: they belong to the same checkpoint as the rows
    that it has passed. Such a task has one input, and few rows.

    Args:
        config: the settings of the job.
        first: the first stage of the task's chain.

    Source: Flink's `StreamEdge.supportsUnalignedCheckpoints`.
    """
    return config.aligned() if first.takes_refused_rows else config


@dataclass(frozen=True, slots=True)
class TaskTraits:
    """How one task differs from others.

    Attributes:
        bounded: for a source that is not fused: whether it ends by itself; until then it counts as a backlog.
        streaming: for a source: whether it is a streaming query; otherwise it is evaluated once.
        finished_before: whether the task's operators had finished in the restored checkpoint: then it starts no query, and only
            waits for its final checkpoint.
        max_rows: the most rows that a micro-batch takes from the channels; None for no limit.
        burst: whether unbounded sources are read up to what is there when the task begins, see `execution.burst`.
    """

    bounded: bool = False
    streaming: bool = True
    finished_before: bool = False
    max_rows: int | None = None
    burst: bool = False


_ORDINARY = TaskTraits()


class TaskMachine:
    """The machine of one task; see the module's docstring.

    Args:
        task: the task's id.
        config: the settings of checkpointing; read are the mode, unaligned barriers, and checkpoints after tasks have finished.
        channels: the task's input channels; empty for a source.
        valve_watermark: the watermark of all channels, or of all fused sources, together in the restored checkpoint, epoch ms.
        traits: how the task differs from others.
        fused: the fused sources with which the task's chain begins; empty for other tasks.
        splits: for a task of a split source, the splits with which it begins; None for other tasks.
    """

    def __init__(
        self,
        task: TaskId,
        config: CheckpointConfig,
        channels: Sequence[GateChannel] = (),
        valve_watermark: int | None = None,
        traits: TaskTraits = _ORDINARY,
        *,
        fused: Sequence[FusedSource] = (),
        splits: Sequence[str] | None = None,
    ) -> None:
        self.task = task
        self.gate = InputGate(channels, config, valve_watermark, traits.max_rows) if channels else None
        self.fused = FusedSources(fused, valve_watermark, burst=traits.burst) if fused else None
        self.splits = SplitReader(task, splits) if splits is not None else None
        self._life = TaskLifecycle(config.checkpoints_after_tasks_finish)
        self._backlog = SourceBacklog(config, bounded=traits.bounded, finished_before=traits.finished_before)
        self._traits = traits
        self._burst = traits.burst and not channels
        self._sources_read = False
        """Whether it was reported that the sources have read what was there."""
        self._reported_ends: frozenset[str] = frozenset()
        """The fused sources whose end was reported."""
        self._waits_for_inputs = any(channel.static for channel in channels)
        self._now = 0.0
        self._begun = False
        self._running_reported = False
        self._suspended = False
        self._pinning: tuple[PinSnapshot, float, float] | None = None
        """The snapshot that is being pinned, when its alignment began, and when pinning began, seconds."""
        self._capturing: dict[int, tuple[CheckpointBarrier, TaskStatistics]] = {}
        """Unaligned snapshots that were pinned, and whose in-flight data is not complete."""

    # Queries of the driver

    @property
    def state(self) -> LifecycleState:
        """How far the task is on its way to its end."""
        return self._life.state

    @property
    def running(self) -> bool:
        """Whether the task's data has not ended."""
        return self._life.state is _RUNNING

    @property
    def paused(self) -> bool:
        """Whether nothing may be processed, because a suspend's savepoint is pending."""
        return self._life.paused

    @property
    def operators_finished(self) -> bool:
        """Whether a snapshot taken now is taken after finish."""
        return self._life.operators_finished

    @property
    def has_read_all(self) -> bool:
        """In a burst: whether the task's sources have read what was there when it began."""
        return self._sources_read

    @property
    def ended_sources(self) -> frozenset[str]:
        """The fused sources that have ended."""
        return self.fused.ended if self.fused is not None else frozenset()

    @property
    def suspended(self) -> bool:
        """Whether the task has ended with a suspend: it reads on when the job is resumed from the savepoint."""
        return self._suspended

    def reads(self, channel: str) -> bool:
        """Whether the next element of an input channel may be read."""
        return self.gate is not None and self.gate.reads(channel)

    def next_deadline(self) -> float | None:
        """When an AlignmentTick is due, by the clock of the barriers' timestamps; None if never."""
        return None if self.gate is None else self.gate.next_deadline()

    # Events

    def handle(self, event: TaskEvent, now: float) -> list[TaskAction]:
        """Take one event, return what the driver has to do, in this order.

        Args:
            event: what has happened.
            now: seconds, by a clock that does not go back.

        Raises:
            UnexpectedEvent: the event cannot come now.
            UnknownChannel: it names a channel that the task does not have.
        """
        take = _TAKES.get(type(event))
        if take is None:
            raise UnexpectedEvent(f"{event!r} is no event of a task. Feed it only what `TaskEvent` lists.")
        self._now = now
        return take(self, event)

    def _opened(self, event: TaskOpened) -> list[TaskAction]:
        if self._begun:
            raise UnexpectedEvent(f"Task {self.task} is opened a second time.")
        self._begun = True
        if self._traits.finished_before:
            restored = life.RestoredAfterFinish()
            self._to_gate(restored)
            return [*self._report_running(), *self._perform(self._life.handle(restored))]
        if self.gate is not None:
            waiting = self._report_running() if self._waits_for_inputs else []
            return [*waiting, *self._to_gate(event)]
        if self.fused is not None and self.fused.all_ended:
            return [*self._report_running(), *self._data_ended()]
        if self.splits is not None:
            return [*self._report_running(), *self.splits.begin()]
        return [StartQuery()] if self._traits.streaming else [*self._report_running(), EvaluateOnce()]

    def _query_started(self, event: QueryRunning) -> list[TaskAction]:
        holds = self.fused.begin(self._now) if self.fused is not None and self.running else []
        return [*self._report_running(), *self._report_fused_ends(), *holds, *self._to_gate(event)]

    def _sources_asked(self, event: SourcesAsked) -> list[TaskAction]:
        if self.fused is None:
            raise UnexpectedEvent(f"Task {self.task} has no fused sources: {event!r}.")
        if not self.running:
            return []
        actions: list[TaskAction] = [*self.fused.asked(event, self._now), *self._report_backlog()]
        if self.fused.all_ended:
            return [*actions, *self._data_ended()]
        actions += self._report_fused_ends()
        return [*actions, *self._report_read()] if self.fused.caught_up else actions

    def _splits_changed(self, event: AssignSplit | NoMoreSplits | SplitRead) -> list[TaskAction]:
        if self.splits is None:
            raise UnexpectedEvent(f"Task {self.task} reads no splits: {event!r}.")
        if not self.running:
            return []
        actions: list[TaskAction] = []
        match event:
            case AssignSplit(split):
                actions += self.splits.assigned(split)
            case SplitRead(split):
                actions += self.splits.read(split)
            case NoMoreSplits():
                self.splits.end()
        return [*actions, *self._data_ended()] if self.splits.exhausted else actions

    def _query_built(self, event: QueryBuilt) -> list[TaskAction]:
        evaluated_at_once = [] if event.streaming else self._report_running()
        return [*evaluated_at_once, *self._to_gate(event)]

    def _evaluated(self, event: Evaluated) -> list[TaskAction]:
        return self._data_ended() if self.gate is None else self._to_gate(event)

    def _exhausted(self, event: SourceExhausted) -> list[TaskAction]:
        return self._report_read() if self._burst and not self._traits.bounded else self._data_ended()

    def _end_input(self, event: EndInput) -> list[TaskAction]:
        if self.gate is not None or not self.running:
            return []
        if self.fused is not None and event.source:
            return [*self.fused.end(event.source)]
        if self.splits is not None:
            return self._splits_changed(NoMoreSplits())
        return [StopSource(), *self._data_ended()]

    def _data_ended(self) -> list[TaskAction]:
        """The data of a source has ended."""
        return self._perform(self._life.handle(life.EndOfDataReceived()))

    def _operators_finished(self, event: life.OperatorsFinished) -> list[TaskAction]:
        # After the last records: the rows that `finish` has returned must not be late for the consumers.
        return [Forward(WatermarkAt(MAX_WATERMARK_MS)), *self._perform(self._life.handle(event))]

    def _triggered(self, event: TriggerReceived) -> list[TaskAction]:
        if self.gate is not None:
            return self._to_gate(event)
        inputs = PinnedInputs(splits=self.splits.held if self.splits is not None else ())
        if self.fused is not None:
            watermark = self.fused.watermark
            inputs = PinnedInputs((), watermark if watermark > MIN_WATERMARK_MS else None, self.fused.snapshot())
        return self._pin(PinDue(PinSnapshot(event.barrier, inputs), self._now))

    def _notified(self, event: life.LifecycleEvent) -> list[TaskAction]:
        """A notice of the coordinator that concerns only the life cycle."""
        return self._perform(self._life.handle(event))

    def _aborted(self, event: life.CheckpointAbortedNotice) -> list[TaskAction]:
        cancelled = self._to_gate(event)
        return [*cancelled, NotifyOperatorsAborted(event.checkpoint_id), *self._perform(self._life.handle(event))]

    # Snapshots

    def _pin(self, due: PinDue) -> list[TaskAction]:
        self._pinning = (due.pin, due.since, self._now)
        return [due.pin]

    def _pinned(self, event: SnapshotPinned) -> list[TaskAction]:
        pin, since, began = self._pinning_of(event)
        barrier, properties = pin.barrier, pin.barrier.properties
        # Event time that is due goes in front of the barrier, as in Flink: a stop's consumers emit what is due before they end.
        due = self._to_gate(BetweenBatches()) if self.gate is not None and self.gate.open and self.gate.has_news else []
        actions = [*due, Overtake(barrier) if pin.overtaking else Forward(BarrierMark(barrier))]
        taken = life.SnapshotTaken(barrier.checkpoint_id, properties.stops_job, properties.is_savepoint)
        actions += self._perform(self._life.handle(taken))
        statistics = TaskStatistics(
            operators_finished=self._life.operators_finished,
            alignment_seconds=began - since,
            sync_seconds=self._now - began,
            ended_sources=tuple(source.source for source in pin.inputs.fused if source.ended),
        )
        if pin.overtaking:
            self._capturing[barrier.checkpoint_id] = (barrier, statistics)
        else:
            actions.append(StoreSnapshot(barrier, statistics, {}))
        return [*actions, *self._to_gate(event)]

    def _failed(self, event: SnapshotFailed) -> list[TaskAction]:
        if self.gate is None or self.gate.holding != event.checkpoint_id:
            self._pinning_of(event)
        declined = Declined(self.task, event.checkpoint_id, event.reason, event.message)
        return [Report(declined), *self._to_gate(event)]

    def _pinning_of(self, event: SnapshotPinned | SnapshotFailed) -> tuple[PinSnapshot, float, float]:
        pinning, self._pinning = self._pinning, None
        if pinning is None or pinning[0].barrier.checkpoint_id != event.checkpoint_id:
            raise UnexpectedEvent(f"Task {self.task} is not pinning a snapshot of checkpoint {event.checkpoint_id}: {event!r}.")
        return pinning

    # The gate and the life cycle

    def _to_gate(self, event: object) -> list[TaskAction]:
        return [] if self.gate is None else self._gate_actions(self.gate.handle(event, self._now))

    def _channel_event(self, event: object) -> list[TaskAction]:
        """An event that only a task with input channels gets."""
        if self.gate is None:
            raise UnexpectedEvent(f"Task {self.task} is a source and has no input channels: {event!r}.")
        return self._gate_actions(self.gate.handle(event, self._now))

    def _gate_actions(self, asked: Iterable[GateAction]) -> list[TaskAction]:
        actions: list[TaskAction] = []
        for action in asked:
            follow = _FOLLOWS.get(type(action))
            if follow is None:
                actions.append(action)  # type: ignore[arg-type]  # the others are in _FOLLOWS
            else:
                actions += follow(self, action)
        return actions

    def _declined(self, action: AbortAlignment) -> list[TaskAction]:
        return [Report(Declined(self.task, action.checkpoint_id, action.reason))]

    def _captured(self, action: InputsCaptured) -> list[TaskAction]:
        barrier, statistics = self._capturing.pop(action.checkpoint_id)
        return [StoreSnapshot(barrier, statistics, action.captured)]

    def _dropped(self, action: DropSnapshot) -> list[TaskAction]:
        del self._capturing[action.checkpoint_id]
        return [action]

    def _perform(self, decided: Sequence[life.LifecycleAction]) -> list[TaskAction]:
        if not decided:
            return []
        actions: list[TaskAction] = []
        gate_actions: list[TaskAction] = []
        for action in decided:
            means = _MEANS.get(type(action))
            if means is None:
                actions.append(action)  # type: ignore[arg-type]  # the others are in _MEANS
            else:
                actions += means(self, action)
            if type(action) in _CONCERN_GATE:
                gate_actions += self._to_gate(action)
        return actions + gate_actions

    def _end_of_data(self, action: life.EmitEndOfData) -> list[TaskAction]:
        if action.drain:
            return [Forward(EndOfData(True)), Report(EndOfDataReached(self.task)), *self._report_end()]
        self._suspended = True
        return [KillQuery(), Forward(EndOfData(False))]

    def _report_running(self) -> list[TaskAction]:
        if self._running_reported:
            return []
        self._running_reported = True
        return [Report(TaskStateChanged(self.task, TaskState.RUNNING)), *self._report_backlog()]

    def _report_read(self) -> list[TaskAction]:
        """Tell the job, once in a burst, that the sources have read what was there."""
        if not self._burst or self._sources_read:
            return []
        self._sources_read = True
        return [Report(SourcesRead(self.task))]

    def _report_end(self) -> list[TaskAction]:
        """Tell the job that the data of the task has ended, if it is a source."""
        return [Report(SourceEnded(self.task))] if self.gate is None else []

    def _report_fused_ends(self) -> list[TaskAction]:
        """Tell the job which fused sources have ended since the last time."""
        new, self._reported_ends = self.ended_sources - self._reported_ends, self.ended_sources
        return [Report(SourceEnded(self.task, source)) for source in sorted(new)]

    def _report_backlog(self) -> list[TaskAction]:
        """Tell the coordinator whether the task processes a backlog, if that has changed."""
        fused = self.fused is not None and self.fused.backlog
        backlog = self._backlog.changed(running=self.running, fused=fused)
        return [] if backlog is None else [Report(BacklogChanged(self.task, backlog))]

    def _backlog_measured(self, event: BacklogMeasured) -> list[TaskAction]:
        if self.gate is not None:
            raise UnexpectedEvent(f"Task {self.task} reads channels, and measures no backlog: {event!r}.")
        self._backlog.measured(event.rows)
        return self._report_backlog() if self._running_reported else []


_TAKES: dict[type[object], Callable[[TaskMachine, Any], list[TaskAction]]] = {
    TaskOpened: TaskMachine._opened,
    QueryBuilt: TaskMachine._query_built,
    QueryRunning: TaskMachine._query_started,
    Evaluated: TaskMachine._evaluated,
    ElementsArrived: TaskMachine._channel_event,
    QueryConsumed: TaskMachine._channel_event,
    BetweenBatches: TaskMachine._channel_event,
    QuerySettled: TaskMachine._channel_event,
    UnreadBarrier: TaskMachine._channel_event,
    AlignmentTick: TaskMachine._channel_event,
    QueryHeld: TaskMachine._channel_event,
    SourceExhausted: TaskMachine._exhausted,
    BacklogMeasured: TaskMachine._backlog_measured,
    SourcesAsked: TaskMachine._sources_asked,
    AssignSplit: TaskMachine._splits_changed,
    NoMoreSplits: TaskMachine._splits_changed,
    SplitRead: TaskMachine._splits_changed,
    life.OperatorsFinished: TaskMachine._operators_finished,
    SnapshotPinned: TaskMachine._pinned,
    SnapshotFailed: TaskMachine._failed,
    TriggerReceived: TaskMachine._triggered,
    life.CheckpointCompletedNotice: TaskMachine._notified,
    life.SavepointCompletedNotice: TaskMachine._notified,
    life.CheckpointAbortedNotice: TaskMachine._aborted,
    life.DrainAnnounced: TaskMachine._notified,
    EndInput: TaskMachine._end_input,
}
_FOLLOWS: dict[type[object], Callable[[TaskMachine, Any], list[TaskAction]]] = {
    PinDue: TaskMachine._pin,
    life.EndOfDataReceived: TaskMachine._notified,
    AbortAlignment: TaskMachine._declined,
    InputsCaptured: TaskMachine._captured,
    DropSnapshot: TaskMachine._dropped,
}
"""What follows from those actions of the gate that are not the driver's alone."""
_MEANS: dict[type[object], Callable[[TaskMachine, Any], list[TaskAction]]] = {
    life.EmitEndOfData: TaskMachine._end_of_data,
    life.EmitEndOfPartition: lambda machine, action: [Forward(EndOfPartition())],
    life.TaskFinished: lambda machine, action: [action, Report(TaskStateChanged(machine.task, TaskState.FINISHED))],
}
"""What those decisions of the life cycle mean that the driver does not perform as they are."""
_CONCERN_GATE = frozenset({life.FinishOperators, life.PauseOperators, life.ResumeOperators})
"""The decisions of the life cycle that the gate gets, too."""
