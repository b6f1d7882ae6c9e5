"""A simulated task: one instance of a chain, driven step by step.

Mirrors the order of actions of `spark.task`, `spark.channel_task` and `spark.source_task` over the real barrier handlers,
valve and life cycle. Records live in the channels' queues; the query's state in the operators. The order of a stage's
events is checked where they happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AbortAlignment,
    AlignmentTick,
    BarrierAction,
    BarrierAnnounced,
    BarrierHandler,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    ChannelCaptured,
    ChannelWatermark,
    CheckpointBarrier,
    Declined,
    EndOfDataReached,
    EndOfPartitionReceived,
    FailureReason,
    LifecycleState,
    SnapshotInputsComplete,
    StartSnapshot,
    TakeSnapshot,
    TaskLifecycle,
    TaskState,
    TaskStateChanged,
    TaskStatistics,
    TriggerReceived,
    UnblockChannels,
    ValveState,
    WatermarkValve,
)
from dagster_checkpoints.coordination import lifecycle as life
from simulation.elements import (
    BARRIER,
    CANCEL,
    END_OF_DATA,
    END_OF_PARTITION,
    IDLE,
    RECORD,
    WATERMARK,
    Element,
    mix,
    owner_of,
    source_row,
    source_watermark,
)
from simulation.operators import Union, operator
from simulation.shapes import OutputSpec, TaskSpec
from simulation.sinks import Rows, SinkError, TaskSink, Transaction
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process

RUNNING, WAITING, FINISHED = LifecycleState.RUNNING, LifecycleState.WAITING_FOR_FINAL_CHECKPOINT, LifecycleState.FINISHED
EVERYTHING_READ = -1
"""In place of a channel: what a task does by itself."""


class TaskFailure(Exception):
    """Something in a task raises."""


class Channel:
    """An ordered log from one task to another, as its consumer sees it. `sent` is the producer's end, if it has one."""

    __slots__ = (
        "blocked", "captured", "edge", "ended", "ended_in_scan", "held", "name", "number", "queue", "sent", "static", "watermark",
    )  # fmt: skip

    def __init__(self, number: int, name: str, edge: int, static: bool, buffered: bool) -> None:
        self.number = number
        self.name = name
        self.edge = edge
        self.static = static
        self.queue: deque[Element] = deque()
        self.sent: deque[Element] = deque() if buffered else self.queue
        self.held: deque[Element] = deque()
        """Scanned, but not yet taken in: there is a static input that is not ready."""
        self.blocked = False
        self.ended = "none"
        self.ended_in_scan = False
        self.watermark = MIN_WATERMARK_MS
        self.captured: list[Element] | None = None
        """Read since an unaligned snapshot began, in front of its barrier."""


class Snapshot:
    """What a task acknowledges with."""

    __slots__ = (
        "after_finish", "channels", "files", "ghost", "output", "splits", "stages", "tables", "transactions", "valve",
        "watermark", "with_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.after_finish = False
        self.channels: dict[str, tuple[str, ChannelWatermark | None, tuple[Element, ...]]] = {}
        self.output: dict[str, tuple[Element, ...]] = {}
        """By channel: what an unaligned barrier has overtaken on its way out."""
        self.valve: int | None = None
        self.watermark: int | None = None
        self.stages: tuple[Any, ...] = ()
        self.tables: dict[int, int] = {}
        """By edge: the sum of the static table's rows so far."""
        self.splits: tuple[tuple[int, int], ...] = ()
        self.transactions: tuple[Transaction, ...] = ()
        self.with_rows: dict[str, Rows] = {}
        self.files: tuple[str, ...] = ()
        self.ghost: Ghost


class Ghost:
    """What only the simulator knows of a task: how many rows it has read, sent and written, ever."""

    __slots__ = ("counted", "read", "sent", "splits", "written")

    def __init__(
        self,
        read: dict[int, tuple[int, int]],
        sent: dict[int, tuple[int, int]],
        written: tuple[int, int],
        splits: Any,
        counted: dict[int, int],
    ) -> None:
        self.read = read
        self.sent = sent
        self.written = written
        self.splits: tuple[tuple[int, int], ...] = splits
        self.counted = counted
        """By stage with union list state: what its operator counts."""


class Output:
    """Where rows go to one consumer stage."""

    __slots__ = ("channels", "count", "edge", "keyed", "static", "total", "turn")

    def __init__(self, spec: OutputSpec, channels: Sequence[Channel]) -> None:
        self.edge = spec.edge
        self.channels = list(channels)
        self.keyed = spec.keyed
        self.static = spec.static
        self.turn = 0
        self.count = 0
        self.total = 0


class Task:
    """See the module's text."""

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
        self.life = TaskLifecycle(process.config.tasks_wait_for_final_checkpoint)
        self.handler: BarrierHandler = process.new_handler([c.name for c in inputs])
        self.valve = WatermarkValve([c.name for c in self.streams])
        self.mailbox: deque[Any] = deque()
        self.operators = [operator(stage, shape.stages[stage], spec.id.index) for stage in spec.stages]
        for op, after, edge in zip(self.operators, self.operators[1:], spec.edges[1:], strict=False):
            op.forward = _into(after.take, edge)
        self.operators[-1].forward = self.emit
        self.tail = spec.stages[-1]
        head = shape.stages[spec.stages[0]]
        self.source = head.kind if head.is_source else ""
        self.head = spec.stages[0]
        self.records_of = head.records_of
        self.splits: list[list[int]] = []
        """Of a source: [split, position]."""
        self.started = False
        self.done = False
        self.failed = False
        self.due: CheckpointBarrier | None = None
        self.tables: dict[int, int] = {c.edge: 0 for c in inputs if c.static}
        self.ready = not self.tables
        self.watermark: int | None = None
        self.restored: Snapshot | None = None
        self.new_start = True
        self.take_back_after: int | None = None
        self.others: frozenset[str] = frozenset()
        self.event_time = MIN_WATERMARK_MS
        """The watermark of the channels, as far as it was seen to come."""
        self.drain_announced = False
        self.suspended = False
        self.read: dict[int, list[int]] = {}
        self.written = [0, 0]
        self.files: tuple[str, ...] = ()
        self.fail_at = ""
        """What will raise the next time it happens."""
        self.capturing: dict[int, tuple[CheckpointBarrier, Snapshot, TaskStatistics]] = {}
        self.stopped_by: int | None = None
        """The stop's savepoint whose snapshot was taken: no record may be processed any more."""
        self.idle = False
        self.said_max = False
        self.inputs_ended = 0
        self.finished_operators = False
        self.closed = False
        self.completed = 0
        self.ended_with: int | None = None

    # Restoring

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
        event_time = self.source_time() if self.source else self.valve.watermark
        self.event_time = self.valve.watermark
        for op in self.operators:
            op.watermark = event_time
        ghost = snapshot.ghost
        self.read = {edge: list(pair) for edge, pair in ghost.read.items()}
        for output in self.outputs:
            output.count, output.total = ghost.sent.get(output.edge, (0, 0))
        self.written = list(ghost.written)
        self.files = snapshot.files

    # The thread

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

    def start(self) -> None:
        self.started = True
        self.guarded(self._start)

    def _start(self) -> None:
        restored = self.restored
        if self.sink is not None:
            transactions = None if self.new_start else restored.transactions if restored else ()
            self.sink.open(transactions, self.take_back_after, restored.with_rows if restored else {}, self.others)
        self.report(TaskStateChanged(self.id, TaskState.RUNNING))
        if restored is not None and restored.after_finish:
            self.said_max = self.finished_operators = True
            self.perform(self.life.handle(life.RestoredAfterFinish()))
            return
        if self.source and self.process.may_idle and restored is not None:
            self.send((IDLE, False))
        if not self.ready:
            self._look_whether_ready()

    def take_mail(self) -> None:
        self.guarded(self._take, self.mailbox.popleft())

    def _take(self, mail: Any) -> None:
        kind, value = mail
        if kind == "complete":
            check(value > self.completed, f"{self.id} was told of {value} after {self.completed}")
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
            self._look_whether_over()

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

    # Sources

    def source_time(self) -> int:
        """The watermark of what is still to come."""
        times = [self._split_time(split, position) for split, position in self.splits]
        return min(times, default=MAX_WATERMARK_MS)

    def _split_time(self, split: int, position: int) -> int:
        over = self.source == "bounded" and position >= self.records_of(split)
        return MAX_WATERMARK_MS if over else source_watermark(position)

    def can_read(self) -> bool:
        """Whether a source has something to do."""
        if not self.started or self.done or self.life.paused or self.life.state is not RUNNING:
            return False
        return self.source == "bounded" or any(position < self.records_of(split) for split, position in self.splits)

    def read_source(self) -> None:
        """Emit the next record, or find that there is none left."""
        self.guarded(self._read_source)

    def _read_source(self) -> None:
        left = [split for split in self.splits if split[1] < self.records_of(split[0])]
        if not left:
            self.end_of_data(True)
            return
        split = min(left, key=_position)
        check(self.stopped_by is None, f"{self.id} read a record after the stop's savepoint {self.stopped_by}")
        if self.idle:
            self.idle = False
            self.send((IDLE, False))
        uid, ts, key = source_row(self.head, split[0], split[1])
        split[1] += 1
        self.operators[0].forward(uid, ts, key)
        if split[1] % 2 == 0:
            self.forward_source_time()

    def can_fall_idle(self) -> bool:
        return self.process.may_idle and self.started and self.life.state is RUNNING and not self.life.paused

    def fall_idle(self) -> None:
        self.idle = True
        self.send((IDLE, True))

    def forward_source_time(self) -> None:
        if self.splits and self.life.state is RUNNING:
            self.advance(self.source_time())

    # Channels

    def can_step(self, channel: Channel) -> bool:
        if not self.started or self.done or self.life.paused:
            return False
        if self.due is not None:
            return bool(channel.held) and self.ready
        return bool(channel.held and self.ready) or bool(channel.queue and not channel.blocked)

    def step(self, channel: Channel) -> None:
        """Take one element of a channel."""
        self.guarded(self._step, channel)

    def _step(self, channel: Channel) -> None:
        if channel.held and self.ready:
            self._take_in(channel, channel.held.popleft())
        else:
            self._scan(channel, channel.queue.popleft())
        self._look_whether_over()

    def can_take_due_snapshot(self) -> bool:
        if self.due is None or self.done or self.life.paused:
            return False
        running = self.ready and self.life.state is RUNNING
        return not running or not any(c.held for c in self.streams)

    def take_due_snapshot(self) -> None:
        self.guarded(self._take_due_snapshot)

    def _take_due_snapshot(self) -> None:
        barrier, self.due = self.due, None
        assert barrier is not None
        self.snapshot(barrier)
        self._look_whether_over()

    def _scan(self, channel: Channel, element: Element) -> None:
        tag = element[0]
        if tag == BARRIER:
            self.gate(self.handler.handle(BarrierReceived(channel.name, element[1])))
        elif tag == CANCEL:
            self.gate(self.handler.handle(CancellationReceived(channel.name, element[1])))
        else:
            if channel.captured is not None and tag != END_OF_PARTITION:
                channel.captured.append(element)
            if channel.static:
                self._scan_static(channel, element)
            elif self.ready:
                self._take_in(channel, element)
            else:
                channel.held.append(element)
            if tag == END_OF_PARTITION:
                self.gate(self.handler.handle(EndOfPartitionReceived(channel.name)))

    def _scan_static(self, channel: Channel, element: Element) -> None:
        tag = element[0]
        if tag == RECORD and channel.ended == "none":
            self.tables[channel.edge] += element[1]
            self.count_read(channel.edge, element[1])
        elif tag == END_OF_DATA:
            channel.ended_in_scan = channel.ended_in_scan or element[1]
            self._look_whether_ready()

    def _look_whether_ready(self) -> None:
        if self.ready or self.life.state is not RUNNING:
            return
        if all(c.ended_in_scan or c.ended == "drain" for c in self.inputs if c.static):
            self.ready = True
            self.operators[0].table = table_sum(self.tables)

    def _take_in(self, channel: Channel, element: Element) -> None:
        tag = element[0]
        if tag == RECORD:
            if self.life.state is not RUNNING and not self.process.settings.exactly_once:
                return  # it comes again, and has been processed
            check(self.life.state is RUNNING, f"{self.id} got a record after its end of data")
            check(self.stopped_by is None, f"{self.id} processed a record after the stop's savepoint {self.stopped_by}")
            late = element[2] < self.valve.watermark and self.process.knows_event_time
            check(not late, f"{self.id}: a record of {element[2]} came at event time {self.valve.watermark}")
            self.count_read(channel.edge, element[1])
            self.operators[0].take(element[1], element[2], element[3], channel.edge)
        elif self.life.state is not RUNNING:
            return
        elif tag == WATERMARK:
            if channel.ended == "none":
                channel.watermark = max(channel.watermark, element[1])
                self._moved(self.valve.advance(channel.name, element[1]))
        elif tag == IDLE:
            if channel.ended == "none":
                change = self.valve.idle if element[1] else self.valve.active
                self._moved(change(channel.name))
                self._forward_idleness()
        elif tag == END_OF_DATA and channel.ended == "none":
            channel.ended = "drain" if element[1] else "suspend"
            self._moved(self.valve.end(channel.name, element[1]))

    def count_read(self, edge: int, uid: int) -> None:
        pair = self.read.get(edge)
        if pair is None:
            pair = self.read[edge] = [0, 0]
        pair[0] += 1
        pair[1] += uid

    def _moved(self, watermark: int | None) -> None:
        if self.process.knows_event_time:
            least = min((c.watermark for c in self.streams if c.ended != "drain"), default=MAX_WATERMARK_MS)
            found = self.valve.watermark
            check(found == max(least, self.event_time), f"{self.id}: event time is {found}, the channels say {least}")
            self.event_time = found
        if watermark is not None:
            check(watermark == self.valve.watermark, "the valve says one thing and means another")
            self.advance(watermark)

    def _forward_idleness(self) -> None:
        if self.valve.is_idle != self.idle:
            self.idle = self.valve.is_idle
            self.send((IDLE, self.idle))

    def _look_whether_over(self) -> None:
        """The end of the data: everything of every stream was taken in."""
        if self.done or not self.ready or self.due is not None or self.life.state is not RUNNING or self.life.paused:
            return
        if all(c.ended != "none" and not c.held for c in self.streams):
            self.end_of_data(all(c.ended == "drain" for c in self.streams))

    # Barriers

    def gate(self, actions: Sequence[BarrierAction]) -> None:
        for action in actions:
            match action:
                case BlockChannel(name):
                    self._channel(name).blocked = True
                case UnblockChannels(names):
                    for name in names:
                        self._channel(name).blocked = False
                case TakeSnapshot(barrier):
                    check(self.due is None, f"{self.id}: a second snapshot while one is due")
                    self.due = barrier
                    if self.can_take_due_snapshot():
                        self._take_due_snapshot()
                case AbortAlignment(checkpoint_id, reason):
                    self._give_up(checkpoint_id)
                    self.send((CANCEL, checkpoint_id))
                    self.report(Declined(self.id, checkpoint_id, reason))
                case StartSnapshot(barrier, names):
                    self._start_unaligned(barrier, names)
                case ChannelCaptured(checkpoint_id, name):
                    self._captured(checkpoint_id, self._channel(name))
                case SnapshotInputsComplete(checkpoint_id):
                    self._inputs_complete(checkpoint_id)

    def _channel(self, name: str) -> Channel:
        return next(c for c in self.inputs if c.name == name)

    def can_announce(self, channel: Channel) -> CheckpointBarrier | None:
        """The first barrier that waits in the channel, if the gate may look into it."""
        if not self.started or self.done or self.life.paused or channel.blocked:
            return None
        return next((element[1] for element in channel.queue if element[0] == BARRIER), None)

    def announce(self, channel: Channel, barrier: CheckpointBarrier) -> None:
        self.guarded(lambda: self.gate(self.handler.handle(BarrierAnnounced(channel.name, barrier))))

    def alignment_tick(self, now: float) -> None:
        self.guarded(lambda: self.gate(self.handler.handle(AlignmentTick(now))))

    def _start_unaligned(self, barrier: CheckpointBarrier, names: Sequence[str]) -> None:
        for name in names:
            self._channel(name).captured = []
        self.snapshot(barrier, overtaking=True)

    def _captured(self, checkpoint_id: int, channel: Channel) -> None:
        in_flight, channel.captured = channel.captured or [], None
        ahead: list[Element] = []
        for element in channel.queue:
            if element[0] == BARRIER and element[1].checkpoint_id == checkpoint_id:
                in_flight += ahead  # announced: it has not been read yet
                break
            if element[0] not in (BARRIER, CANCEL):
                ahead.append(element)
        if checkpoint_id in self.capturing:
            snapshot = self.capturing[checkpoint_id][1]
            ended, watermark, _ = snapshot.channels[channel.name]
            snapshot.channels[channel.name] = (ended, watermark, tuple(in_flight))

    def _inputs_complete(self, checkpoint_id: int) -> None:
        found = self.capturing.pop(checkpoint_id, None)
        if found is not None:
            self.process.submit_upload(self, *found)

    # Output

    def emit(self, uid: int, ts: int, key: int) -> None:
        """A row leaves the task."""
        check(not self.finished_operators, f"{self.id} emits a row after finish()")
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
        for op in self.operators:
            op.advance(watermark)
        self.emit_watermark(watermark)

    def emit_watermark(self, watermark: int) -> None:
        if self.watermark is None or watermark > self.watermark:
            check(not self.said_max, f"{self.id} says a watermark after MAX_WATERMARK")
            self.watermark = watermark
            if watermark >= MAX_WATERMARK_MS and self.life.state is RUNNING:
                return  # said behind what `finish` returns
            self.send((WATERMARK, watermark))

    # Snapshots

    def snapshot(self, barrier: CheckpointBarrier, *, overtaking: bool = False) -> None:
        checkpoint_id, properties = barrier.checkpoint_id, barrier.properties
        if self.life.state is RUNNING and self.source:
            self.forward_source_time()
        check(not self.closed, f"{self.id} takes a snapshot after close()")
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
        self._pin(taken, overtaking)
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

    def _pin(self, taken: Snapshot, overtaking: bool) -> None:
        taken.after_finish = self.life.operators_finished
        taken.watermark = self.watermark
        taken.splits = tuple((split, position) for split, position in self.splits)
        taken.tables = dict(self.tables)
        active = self.ready or self.life.state is not RUNNING
        if self.streams:
            valve = self.valve.snapshot()
            taken.valve = valve.watermark
        for channel in self.inputs:
            if channel.static:
                ended = "drain" if channel.ended_in_scan or channel.ended != "none" else "none"
                taken.channels[channel.name] = (ended, None, ())
            else:
                in_flight = () if active else tuple(channel.held)
                taken.channels[channel.name] = (channel.ended, valve.channels[channel.name], in_flight)
        if not taken.after_finish:
            self.files = (*self.files[-2:], self.process.new_file())
            taken.files = self.files
        taken.ghost = self.ghost()

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

    # The end

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
        for op in self.operators:
            op.advance(MAX_WATERMARK_MS)
        self.inputs_ended += 1
        check(self.inputs_ended == 1, f"{self.id}: end_input a second time")
        for op in self.operators:
            op.finish()
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


def _position(split: list[int]) -> int:
    return split[1]


def _into(take: Any, edge: int) -> Any:
    return lambda uid, ts, key: take(uid, ts, key, edge)


def table_sum(tables: dict[int, int]) -> int:
    """What a static table is, as one number."""
    return mix(*(tables[edge] for edge in sorted(tables)))
