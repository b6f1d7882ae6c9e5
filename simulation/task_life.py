"""The life of a simulated task: mail, snapshots, output, and its end, in the order of `spark.tasks.task`.

The order of a stage's events is checked where they happen. Must not know how input is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AbortAlignment,
    BarrierAction,
    BarrierHandler,
    CancellationReceived,
    ChannelWatermark,
    CheckpointBarrier,
    Declined,
    EndOfDataReached,
    FailureReason,
    LifecycleState,
    TaskLifecycle,
    TaskState,
    TaskStateChanged,
    TaskStatistics,
    TriggerReceived,
    ValveState,
    WatermarkValve,
)
from dagster_checkpoints.coordination import lifecycle as life
from simulation.channels import Channel, Ghost, Output, Snapshot
from simulation.elements import (
    BARRIER,
    CANCEL,
    END_OF_DATA,
    END_OF_PARTITION,
    IDLE,
    RECORD,
    WATERMARK,
    Element,
    owner_of,
)
from simulation.operators import Forward, Operator, Union, operator
from simulation.shapes import TaskSpec
from simulation.sinks import SinkError, TaskSink, Transaction
from simulation.violations import Violation, check

if TYPE_CHECKING:
    from simulation.process import Process


RUNNING, WAITING, FINISHED = LifecycleState.RUNNING, LifecycleState.WAITING_FOR_FINAL_CHECKPOINT, LifecycleState.FINISHED


class TaskFailure(Exception):
    """Something in a task raises."""


class TaskLife(ABC):
    """What all tasks have in common."""

    def __init__(
        self,
        process: Process,
        number: int,
        spec: TaskSpec,
        inputs: Sequence[Channel],
        outputs: Sequence[Output],
        sink: TaskSink | None,
    ) -> None:
        shape = process.shape
        self.process = process
        self.attempt = process.attempt
        self.number = number
        self.id = spec.id
        self.inputs = tuple(inputs)
        self.streams = tuple(c for c in inputs if not c.static)
        self.outputs = tuple(outputs)
        self.sink = sink
        self.life = TaskLifecycle(process.config.checkpoints_after_tasks_finish)
        self.handler: BarrierHandler = process.new_handler([c.name for c in inputs])
        self.valve = WatermarkValve([c.name for c in self.streams])
        self.mailbox: deque[Any] = deque()
        self.operators = [operator(stage, shape.stages[stage], spec.id.index) for stage in spec.stages]
        for op, after, edge in zip(self.operators, self.operators[1:], spec.edges[1:], strict=False):
            op.forward = _into(after, edge)
        self.operators[-1].forward = self.emit
        self.tail = spec.stages[-1]
        head = shape.stages[spec.stages[0]]
        self.source = head.kind if head.is_source else ""
        self.head = spec.stages[0]
        self.records_of = head.records_of
        self.enumerated = head.enumerated
        self.splits: list[list[int]] = []
        """Of a source: [split, position]."""
        self.started = False
        self.opening: Generator[None] | None = None
        """What is left of opening the sink."""
        self.done = False
        self.failed = False
        self.due: CheckpointBarrier | None = None
        self.tables: dict[int, int] = {c.edge: 0 for c in inputs if c.static}
        self.held_in_tables: dict[int, frozenset[int]] = {}
        """At-least-once: by edge, the rows of a static table."""
        self.ready = not self.tables
        self.watermark: int | None = None
        self.restored: Snapshot | None = None
        self.new_start = True
        self.take_back_after: int | None = None
        self.others: tuple[Transaction, ...] = ()
        self.event_time = MIN_WATERMARK_MS
        """The watermark of the channels, as far as it was seen to come."""
        self.drain_announced = False
        self.suspended = False
        self.read: dict[int, list[int]] = {}
        self.written = [0, 0]
        self.contents: tuple[str, ...] = ()
        self.fail_at = ""
        """What will raise the next time it happens."""
        self.before_end: set[int] = set()
        """At-least-once: checkpoints of which a barrier has come in front of its channel's end of data."""
        self.at_barrier: dict[tuple[int, str], tuple[ChannelWatermark, int]] = {}
        """At-least-once: by checkpoint and channel, what was known of event time and how much was held up at the barrier."""
        self.capturing: dict[int, tuple[CheckpointBarrier, Snapshot, TaskStatistics]] = {}
        self.stopped_by: int | None = None
        """The stop's savepoint whose snapshot was taken: no record may be processed any more."""
        self.idle = False
        self.said_max = False
        self.inputs_ended: set[tuple[int, int]] = set()
        """(stage, input) whose end was told."""
        self.finished_operators = False
        self.closed = False
        self.completed = 0
        self.ended_with: int | None = None

    def restore(self, snapshot: Snapshot, splits: Sequence[tuple[int, int]], stages: Sequence[Sequence[Any]]) -> None:
        """Take over a snapshot; `splits` and `stages` are this instance's share of what all instances held."""
        self.restored = snapshot
        self.watermark = snapshot.watermark
        for op, states in zip(self.operators, stages, strict=True):
            op.restore(states)
        self.splits = [list(split) for split in splits]
        known = {}
        for channel in self.inputs:
            saved = snapshot.channels.get(channel.name)
            if saved is not None:
                channel.ended, watermark, _ = saved
                if watermark is not None and not channel.static:
                    known[channel.name] = watermark
                    channel.watermark = watermark.watermark
        if snapshot.valve is not None:
            self.valve.restore(ValveState(snapshot.valve, known))
            check(self.valve.watermark >= snapshot.valve, f"{self.id}: event time went back from {snapshot.valve}")
        for edge, total in snapshot.tables.items():
            self.tables[edge] = total
        self.held_in_tables = dict(snapshot.held_in_tables)
        event_time = self.source_time() if self.source else self.valve.watermark
        self.event_time = self.valve.watermark
        for op in self.operators:
            op.watermark = event_time
        ghost = snapshot.ghost
        self.read = {edge: list(pair) for edge, pair in ghost.read.items()}
        for output in self.outputs:
            output.count, output.total = ghost.sent.get(output.edge, (0, 0))
        self.written = list(ghost.written)
        self.contents = snapshot.contents

    def report(self, event: object) -> None:
        self.process.report(self.attempt, event)

    def guarded(self, act: Any, *arguments: Any) -> None:
        """What a task raises ends it, and is told to the loop."""
        try:
            act(*arguments)
        except (TaskFailure, SinkError) as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        self.failed = self.done = True
        self.close()
        self.process.task_failed(self, message)

    def start(self, *, at_once: bool) -> None:
        """Open the sink, one step of it or all of them, and then begin."""
        self.guarded(self._open, at_once)

    def _open(self, at_once: bool) -> None:
        restored = self.restored
        if self.sink is not None:
            if self.opening is None:
                transactions = None if self.new_start else restored.transactions if restored else ()
                held = restored.with_rows if restored else {}
                self.opening = self.sink.open(transactions, self.take_back_after, held, self.others)
            for _ in self.opening:
                if not at_once:
                    return
        self.opening = None
        self.started = True
        self._start(restored)

    def _start(self, restored: Snapshot | None) -> None:
        self.report(TaskStateChanged(self.id, TaskState.RUNNING))
        if restored is not None and restored.after_finish:
            self.said_max = self.finished_operators = True
            self.perform(self.life.handle(life.RestoredAfterFinish()))
            return
        if self.source and self.process.may_idle and restored is not None:
            self.send((IDLE, False))
        if not self.ready:
            self.look_whether_ready()

    def may_miss(self, mail: Any) -> bool:
        """Whether the job must come to its end although this notice never arrives: a later checkpoint's says as much.

        That of one triggered after the end of the data. None is later than a stop's savepoint; and a task waits for the outcome
        of each one that had begun before its end, whatever later ones say.
        """
        kind, checkpoint_id = mail
        return kind in ("complete", "aborted") and checkpoint_id != self.stopped_by and checkpoint_id in self.life._after_finish

    def take_mail(self) -> None:
        self.guarded(self._take, self.mailbox.popleft())

    def _take(self, mail: Any) -> None:
        kind, value = mail
        if kind == "complete":
            if value <= self.completed:
                raise Violation(f"{self.id} was told of {value} after {self.completed}")
            self.completed = value
            self.perform(self.life.handle(life.CheckpointCompleted(value)))
        elif kind == "trigger":
            if self.source:
                self.snapshot(value)
            else:
                self.gate(self.handler.handle(TriggerReceived(value)))
        elif kind == "aborted":
            self._aborted(value)
        elif kind == "savepoint":
            self.perform(self.life.handle(life.SavepointCompleted(value)))
        elif kind == "end_input":
            self.end_of_data(True)
        if not self.source:
            self.look_whether_over()

    def _aborted(self, checkpoint_id: int) -> None:
        if self.due is not None and self.due.checkpoint_id == checkpoint_id:
            self.due = None
        if self.stopped_by == checkpoint_id:
            self.stopped_by = None
        if not self.source:
            for action in self.handler.handle(CancellationReceived(None, checkpoint_id)):
                if isinstance(action, AbortAlignment):
                    # The handler's own decline is not news to the coordinator, which has just told us.
                    self._give_up(action.checkpoint_id)
                    self.send((CANCEL, action.checkpoint_id))
                else:
                    self.gate([action])
        self._give_up(checkpoint_id)
        self.perform(self.life.handle(life.CheckpointAborted(checkpoint_id)))

    def _give_up(self, checkpoint_id: int) -> None:
        """Forget an unaligned snapshot whose inputs were not complete."""
        if self.capturing.pop(checkpoint_id, None) is not None:
            for channel in self.inputs:
                channel.captured = None

    def emit(self, uid: int, ts: int, key: int) -> None:
        """A row leaves the task."""
        if self.finished_operators:
            raise Violation(f"{self.id} emits a row after finish()")
        if self.sink is not None:
            self.sink.rows.append(uid)
            self.written[0] += 1
            self.written[1] += uid
        row = (RECORD, uid, ts, key)
        for output in self.outputs:
            output.count += 1
            output.total += uid
            channels = output.channels
            if output.static:
                for channel in channels:
                    channel.sent.append(row)
            elif len(channels) == 1:
                channels[0].sent.append(row)
            elif output.keyed:
                channels[owner_of(key, len(channels))].sent.append(row)
            else:
                output.turn = (output.turn + 1) % len(channels)
                channels[output.turn].sent.append(row)

    def send(self, element: Element) -> None:
        """A mark to every channel."""
        for output in self.outputs:
            for channel in output.channels:
                channel.sent.append(element)

    def advance(self, watermark: int) -> None:
        """Event time moves in every operator, then it is sent on."""
        self._advance_operators(watermark)
        self.emit_watermark(watermark)

    def _advance_operators(self, watermark: int) -> None:
        """Each of them hears of it once: of MAX_WATERMARK, too."""
        for op in self.operators:
            if watermark > op.watermark:
                if op.finished:
                    raise Violation(f"{self.id}: stage {op.number} hears of event time {watermark} after finish()")
                op.advance(watermark)

    def emit_watermark(self, watermark: int) -> None:
        if self.watermark is None or watermark > self.watermark:
            if self.said_max:
                raise Violation(f"{self.id} says a watermark after MAX_WATERMARK")
            self.watermark = watermark
            if watermark >= MAX_WATERMARK_MS and self.life.state is RUNNING:
                return  # said behind what `finish` returns
            self.send((WATERMARK, watermark))

    def snapshot(self, barrier: CheckpointBarrier, *, overtaking: bool = False) -> None:
        checkpoint_id, properties = barrier.checkpoint_id, barrier.properties
        if self.life.state is RUNNING and self.source:
            self.forward_source_time()
        if self.closed:
            raise Violation(f"{self.id} takes a snapshot after close()")
        if self.fail_at == "snapshot":
            self.fail_at = ""
            raise TaskFailure("snapshot_state raises")
        taken = Snapshot()
        taken.stages = tuple(op.snapshot() for op in self.operators)
        if self.sink is not None:
            taken.transactions = self.sink.pre_commit(checkpoint_id)
            if properties.is_savepoint:
                taken.with_rows = self.sink.pin()
        if self.fail_at == "decline":
            self.fail_at = ""
            self.report(Declined(self.id, checkpoint_id, FailureReason.CHECKPOINT_DECLINED, "the snapshot failed"))
            return
        self._pin(taken, checkpoint_id)
        if overtaking:
            self._overtake(taken, barrier)
        else:
            self.send((BARRIER, barrier))
        if properties.stops_job:
            self.stopped_by = checkpoint_id
        self.perform(self.life.handle(life.SnapshotTaken(checkpoint_id, properties.stops_job, properties.is_savepoint)))
        statistics = TaskStatistics(operators_finished=self.life.operators_finished)
        if overtaking:
            self.capturing[checkpoint_id] = (barrier, taken, statistics)
        else:
            self.process.submit_upload(self, barrier, taken, statistics)

    def _pin(self, taken: Snapshot, checkpoint_id: int) -> None:
        taken.after_finish = self.life.operators_finished
        taken.watermark = self.watermark
        taken.splits = tuple((split, position) for split, position in self.splits)
        taken.tables = dict(self.tables)
        taken.held_in_tables = dict(self.held_in_tables)
        if self.streams:
            valve = self.valve.snapshot()
            taken.valve = valve.watermark
        for channel in self.inputs:
            if channel.static:
                ended = "drain" if channel.ended_in_scan or channel.ended != "none" else "none"
                taken.channels[channel.name] = (ended, None, ())
            else:
                # An unaligned snapshot does not wait until what a static input held up is taken in.
                in_flight = tuple(channel.held) if self.life.state is RUNNING else ()
                now = (channel.ended, valve.channels[channel.name], in_flight)
                then = self.at_barrier.get((checkpoint_id, channel.name))
                # What was held up behind the barrier comes again.
                taken.channels[channel.name] = now if then is None else ("none", then[0], in_flight[: then[1]])
        if not taken.after_finish:
            content = self._content()
            if content not in self.contents:
                self.contents = (*self.contents[-2:], content)
            taken.contents = self.contents
        taken.ghost = self.ghost()

    def _content(self) -> str:
        """Of the file that a snapshot adds: what was processed decides, whoever does it, and however often."""
        done = sum(pair[0] for pair in self.read.values()) + sum(position for _, position in self.splits)
        return f"{self.process.asked_start.variant}.{self.number}@{done}"

    def ghost(self) -> Ghost:
        return Ghost(
            {edge: (pair[0], pair[1]) for edge, pair in self.read.items()},
            {output.edge: (output.count, output.total) for output in self.outputs},
            (self.written[0], self.written[1]),
            tuple((split, position) for split, position in self.splits),
            {op.number: op.counted for op in self.operators if isinstance(op, Union)},
        )

    def _overtake(self, taken: Snapshot, barrier: CheckpointBarrier) -> None:
        for output in self.outputs:
            for channel in output.channels:
                overtaken = (
                    tuple(e for e in channel.sent if e[0] not in (BARRIER, CANCEL)) if channel.sent is not channel.queue else ()
                )
                taken.output[channel.name] = overtaken
                if channel.sent is channel.queue:
                    channel.sent.append((BARRIER, barrier))
                else:
                    channel.sent.appendleft((BARRIER, barrier))

    def end_of_data(self, drain: bool) -> None:
        if self.life.state is RUNNING:
            if self.drain_announced:
                self.perform(self.life.handle(life.DrainAnnounced()))
            self.perform(self.life.handle(life.EndOfDataReceived(drain)))

    def perform(self, actions: Sequence[life.LifecycleAction]) -> None:
        for action in actions:
            match action:
                case life.FinishOperators():
                    self._finish_operators()
                    self.perform(self.life.handle(life.OperatorsFinished()))
                case life.PauseOperators():
                    check(self.life.paused, f"{self.id} is to pause and is not paused")
                case life.ResumeOperators():
                    check(not self.life.paused, f"{self.id} is to go on and is paused")
                case life.EmitEndOfData(drain):
                    if not drain:
                        self.suspended = True
                    self.send((END_OF_DATA, drain))
                    if drain:
                        self.report(EndOfDataReached(self.id))
                case life.CommitUpTo(checkpoint_id):
                    self._commit(checkpoint_id)
                case life.CloseOperators():
                    check(not self.closed, f"{self.id} closes a second time")
                    check(self.finished_operators or self.suspended, f"{self.id} closes before finish()")
                    uncommitted = self.sink is not None and (self.sink.pending or self.sink.rows)
                    check(not uncommitted, f"{self.id} closes with uncommitted rows")
                    self.close()
                case life.EmitEndOfPartition():
                    self.send((END_OF_PARTITION,))
                case life.TaskFinished():
                    self.done = True
                    self.process.task_ended(self)
                    self.report(TaskStateChanged(self.id, TaskState.FINISHED))

    def _finish_operators(self) -> None:
        check(not self.finished_operators, f"{self.id} finishes a second time")
        check(self.stopped_by is None, f"{self.id} finishes after the stop's savepoint {self.stopped_by}")
        if self.fail_at == "finish":
            self.fail_at = ""
            raise TaskFailure("finish raises")
        self._advance_operators(MAX_WATERMARK_MS)
        for op in self.operators:
            for i in op.spec.inputs:
                ended = (op.number, i.source)
                check(ended not in self.inputs_ended, f"{self.id}: end_input of {ended} a second time")
                self.inputs_ended.add(ended)
            check(op.watermark >= MAX_WATERMARK_MS, f"{self.id}: stage {op.number} finishes at event time {op.watermark}")
            op.finish()
            op.finished = True
        self.watermark = MAX_WATERMARK_MS
        self.send((WATERMARK, MAX_WATERMARK_MS))
        self.said_max = self.finished_operators = True

    def _commit(self, checkpoint_id: int | None) -> None:
        check(not self.closed, f"{self.id} is notified after close()")
        if self.fail_at == "commit":
            self.fail_at = ""
            raise TaskFailure("commit raises")
        if self.sink is not None:
            if checkpoint_id is None:
                self.sink.pre_commit(0)
            self.sink.commit_up_to(checkpoint_id)
        self.ended_with = checkpoint_id

    def close(self) -> None:
        self.closed = True
        if self.sink is not None:
            self.sink.close()

    @abstractmethod
    def gate(self, actions: Sequence[BarrierAction]) -> None:
        """Do what the barrier handler asks for."""

    @abstractmethod
    def source_time(self) -> int:
        """Of a source, the watermark of what is still to come."""

    @abstractmethod
    def forward_source_time(self) -> None:
        """Send it on."""

    @abstractmethod
    def look_whether_ready(self) -> None:
        """Whether the static inputs are there."""

    @abstractmethod
    def look_whether_over(self) -> None:
        """Whether all of the data was taken in."""


def _into(after: Operator, edge: int) -> Forward:
    def forward(uid: int, ts: int, key: int) -> None:
        if after.finished:
            raise Violation(f"stage {after.number} gets a row after finish()")
        after.take(uid, ts, key, edge)

    return forward
