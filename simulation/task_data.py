"""The data plane of a simulated task, in memory: operators, inputs and outputs, a source's position, tables, the sink.

Checks the order of a stage's events. Must not know when they are due: `execution.task_machine` decides that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from dagster_checkpoints.execution.attempt_plan import TaskPlan
from dagster_checkpoints.execution.elements import BarrierMark, CancelMark, EndOfData, Mark, WatermarkAt
from dagster_checkpoints.execution.event_time import OutputEventTime
from dagster_checkpoints.execution.input_channel import gate_channel
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.task_events import PinSnapshot, WatermarkReached
from dagster_checkpoints.execution.task_machine import TaskMachine, TaskTraits, config_of_task
from dagster_checkpoints.pipeline import TaskId
from simulation.channels import ONE, Channel, Ghost, Output, Row, Snapshot, is_refused, owner_of, source_row, source_watermark
from simulation.operators import Forward, Operator, Union, operator
from simulation.shapes import name_of
from simulation.sinks import TaskFailure, TaskSink
from simulation.violations import Violation, check

if TYPE_CHECKING:
    from simulation.process import Process


class TaskData:
    """The data side of a task."""

    # Slots, because a dictionary of more than 30 attributes is slow.
    __slots__ = (
        "attempt", "begins", "bound", "closed", "contents", "done", "ended_with", "event_time", "fail_at", "failed",
        "finished_operators", "gate", "head", "id", "inputs", "left", "life", "machine", "max_watermark_sent", "number",
        "opening", "operators", "output", "outputs", "process", "read", "reading", "records_of", "refuses", "retired", "sink",
        "source", "splits", "started", "stateful", "stopped_by", "streams", "tables", "valve_seen", "written",
    )  # fmt: skip

    def __init__(
        self, process: Process, number: int, channels: Sequence[Channel], restored: Snapshot | None, planned: TaskPlan
    ) -> None:
        shape, spec = process.shape, process.shape.tasks[number]
        self.process = process
        self.attempt: int = process.attempt
        self.number = number
        self.id: TaskId = spec.id
        self.inputs = tuple([channels[n] for n in spec.inputs])
        self.streams = tuple([c for c in self.inputs if not c.static])
        self.outputs = tuple([Output([channels[n] for n in output]) for output in spec.outputs])
        self.refuses = any(output.refused for output in self.outputs)
        self.sink: TaskSink | None = None
        self.operators = [operator(stage, shape.stages[stage], spec.id.index) for stage in spec.stages]
        for op, (position, edge) in zip(self.operators, spec.forwards, strict=False):
            op.forward = _into(self.operators[position], edge)
        self.operators[-1].forward = self.emit
        self.stateful = any(op.spec.kind == "window" for op in self.operators)
        """Whether the query depends on event time, and so receives the watermark."""
        head = shape.stages[spec.stages[0]]
        self.begins = planned
        self.source = head.kind if head.is_source else ""
        self.head = spec.stages[0]
        self.records_of = head.records_of
        self.splits: list[list[int]] = []
        """[split, position] of each split that the source reads."""
        self.retired: tuple[tuple[int, int], ...] = ()
        """The splits of instances that had finished and are gone."""
        self.left = 0
        """Number of records of its splits that it has not read."""
        self.bound: int | None = None
        """In a burst: the number of records that an unbounded source has yet to read; None for others."""
        self.reading: list[int] | None = None
        """[split, position] of the split that a split source reads now."""
        self.started = False
        self.opening: Generator[None] | None = None
        """The remaining steps of opening the sink; None when it is not being opened."""
        self.done = False
        self.failed = False
        self.tables: dict[int, set[int]] = {c.edge: set() for c in self.inputs if c.static}
        """By edge, the uids of the rows of a static table."""
        self.output = OutputEventTime()
        self.event_time = MIN_WATERMARK_MS
        """The latest watermark that the query has run under, or that was forwarded: no later record is earlier."""
        self.valve_seen = MIN_WATERMARK_MS
        self.read: defaultdict[int, int] = defaultdict(int)
        """By edge, the tally of the rows that were read."""
        self.written = 0
        self.contents: tuple[str, ...] = ()
        self.fail_at = ""
        """The operation that fails the next time: "snapshot", "decline", "commit" or "finish"; "" for none."""
        self.stopped_by: int | None = None
        """The stop's savepoint whose snapshot was taken: no record may be processed after it."""
        self.max_watermark_sent = False
        self.finished_operators = False
        self.closed = False
        self.ended_with: int | None = None
        self.machine: TaskMachine = self._make_machine(restored or Snapshot())
        self.life = self.machine._life
        """For reading only."""
        self.gate: InputGate = self.machine.gate  # type: ignore[assignment]  # a source has none, and uses none

    def _make_machine(self, restored: Snapshot) -> TaskMachine:
        """The machine of this attempt, with the restored channels."""
        saved = [(c, restored.channels.get(c.name)) for c in self.inputs]
        channels = [gate_channel(c.name, c.static, 0, pinned.snapshot if pinned else None) for c, pinned in saved]
        for channel, known in zip(self.inputs, channels, strict=True):
            if known.restored is not None:
                channel.watermark, channel.ended = known.restored.watermark, known.restored.ended
        splits = restored.splits if self.operators[0].spec.enumerated else None
        return TaskMachine(
            self.id,
            config_of_task(self.process.config, self.process.shape.pipeline.stage(name_of(self.head))),
            channels,
            restored.valve,
            TaskTraits(
                bounded=self.begins.bounded,
                finished_before=self.begins.after_finish,
                max_rows=self.process.scenario.max_rows,
                burst=self.process.requested_start.burst,
            ),
            splits=splits,
        )

    def restore(self, snapshot: Snapshot, stages: Sequence[Sequence[Any]]) -> None:
        """Restore a snapshot; `stages`: for each stage of the chain, the states of all its instances."""
        self.output = OutputEventTime(0, snapshot.watermark, None)
        for op, states in zip(self.operators, stages, strict=True):
            op.restore(states)
        for split, position in snapshot.ghost.splits:
            self.assign(split, position)
        self.tables.update({edge: set(rows) for edge, rows in snapshot.tables.items()})
        if self.inputs:
            self.valve_seen = self.gate.watermark
            # Forward only for an instance that reads fewer producers than before, since there are other instances.
            check(snapshot.valve is None or self.valve_seen >= snapshot.valve, "{}: a restore moves event time back", self.id)
        self.event_time = self.restored_event_time(snapshot)
        for op in self.operators:
            op.watermark = max(op.watermark, self.event_time)
        self.retired = snapshot.ghost.retired
        self.read.update(snapshot.ghost.read)
        for output in self.outputs:
            output.sent = snapshot.ghost.sent.get(output.edge, 0)
        self.written = snapshot.ghost.written
        self.contents = snapshot.contents
        self.max_watermark_sent = self.finished_operators = snapshot.after_finish

    def restored_event_time(self, snapshot: Snapshot) -> int:
        """The event time that the restored operators know."""
        return self.source_time() if self.source else snapshot.event_time

    # A source

    def source_time(self) -> int:
        """The watermark of the records that are not read yet."""
        if self.operators[0].spec.enumerated:
            return source_watermark(0)  # a split that is assigned later is read from position 0
        unread = [position for split, position in self.splits if self.source != "bounded" or position < self.records_of(split)]
        return source_watermark(min(unread)) if unread else MAX_WATERMARK_MS

    def assign(self, split: int, position: int) -> None:
        """Add a split to the source, from this position on."""
        self.splits.append([split, position])
        self.left += max(self.records_of(split) - position, 0)

    def begin_split(self, split: int) -> None:
        """Read a split; from where a restored checkpoint says that it was read to."""
        if all(number != split for number, _ in self.splits):
            self.assign(split, 0)
        self.reading = next(each for each in self.splits if each[0] == split)

    def read_record(self) -> bool:
        """Emit the next record. False if there is none left."""
        if self.stopped_by is not None:
            raise Violation(f"{self.id} reads a split after the stop's savepoint {self.stopped_by}")
        split = self.reading
        if split is None:
            unread = [split for split in self.splits if split[1] < self.records_of(split[0])]
            split = min(unread, key=itemgetter(1), default=None)
        if split is None or split[1] >= self.records_of(split[0]):
            return False
        self.left -= 1
        uid, ts, key = source_row(self.head, split[0], split[1])
        split[1] += 1
        self.operators[0].forward(uid, ts, key)
        if split[1] % 2 == 0:
            self.forward_source_time()
        return True

    def unread_in_burst(self) -> int:
        """The number of records, or splits, that a source has yet to read in a burst; at least 1 for a bounded one."""
        if self.machine.splits is not None:
            return len(self.machine.splits.held)
        return max(self.left, 1) if self.source == "bounded" else self.bound or 0

    def forward_source_time(self) -> None:
        if self.splits and self.machine.running:
            self.advance(self.source_time())

    # The query

    def consume(self, channel: Channel, position: int) -> None:
        """Process the records of a channel up to a position, and pass the marks behind them."""
        log = channel.log
        while log and (channel.consumed < position or type(log[0]) is not tuple):
            element = log.popleft()
            channel.consumed += 1
            if type(element) is tuple:
                self._process_record(channel, element)
            else:
                self._pass_mark(channel, element)  # type: ignore[arg-type]  # an element that is no tuple is a mark

    def _process_record(self, channel: Channel, row: Row) -> None:
        if self.finished_operators:
            raise Violation(f"{self.id} processes a record after finish()")
        if self.stopped_by is not None:
            raise Violation(f"{self.id} processed a record after the stop's savepoint {self.stopped_by}")
        uid, ts, key = row
        if ts < self.event_time and self.process.knows_event_time:
            raise Violation(f"{self.id}: a record of {ts} came at event time {self.event_time}")
        self.read[channel.edge] += ONE + uid
        self.operators[0].take(uid, ts, key, channel.edge)

    def _pass_mark(self, channel: Channel, mark: Mark) -> None:
        if channel.ended != "none":
            return
        if type(mark) is WatermarkAt:
            if channel.watermark >= MAX_WATERMARK_MS and self.process.scenario.exactly_once:
                raise Violation(f"{self.id}: {channel.name} sends watermark {mark.ms} after MAX_WATERMARK")
            channel.watermark = max(channel.watermark, mark.ms)
        elif type(mark) is EndOfData:
            channel.ended = "drain" if mark.drain else "suspend"

    def check_watermark(self) -> None:
        """Event time is the minimum over the channels, up to the positions that the query has consumed."""
        if not self.process.knows_event_time or any(c.log for c in self.streams):
            return
        least = min((c.watermark for c in self.streams if c.ended != "drain"), default=MAX_WATERMARK_MS)
        found, self.valve_seen = self.gate.watermark, max(least, self.valve_seen)
        if found != self.valve_seen:
            raise Violation(f"{self.id}: event time is {found}, the minimum of the channels is {least}")

    def add_to_table(self, name: str, row: Row) -> None:
        uid, edge = row[0], next(channel.edge for channel in self.inputs if channel.name == name)
        table = self.tables[edge]
        if uid in table:
            # At-least-once: a table is a set of rows, so a repeated row changes nothing.
            check(not self.process.scenario.exactly_once, f"{self.id} gets the row {uid} of a table a second time")
            return
        table.add(uid)
        self.read[edge] += ONE + uid

    def advance(self, watermark: int) -> None:
        """Advance event time in every operator, then send it; MAX_WATERMARK is sent only after finish()."""
        for op in self.operators:
            if watermark > op.watermark:
                op.advance(watermark)
        self.event_time = max(self.event_time, watermark)
        self.send_event_time(WatermarkReached(watermark))

    def finish_operators(self) -> None:
        check(not self.finished_operators, "{} finishes a second time", self.id)
        check(self.stopped_by is None, "{} finishes after the stop's savepoint {}", self.id, self.stopped_by)
        left = [c.name for c in self.streams if any(not isinstance(element, Mark) for element in c.log)]
        check(not left, "{} finishes before it has processed the records of {}", self.id, left)
        if self.fail_at == "finish":
            raise TaskFailure("finish raises")
        self.advance(MAX_WATERMARK_MS)
        for op in self.operators:
            op.finish()
            op.finished = True
        self.finished_operators = True

    # Output

    def emit(self, uid: int, ts: int, key: int) -> None:
        """A row leaves the task."""
        if self.finished_operators:
            raise Violation(f"{self.id} emits a row after finish()")
        refused = self.refuses and is_refused(uid)
        if self.sink is not None and not refused:
            self.sink.rows.append(uid)
            self.written += ONE + uid
        row = (uid, ts, key)
        for output in self.outputs:
            if output.refused is not refused:
                continue
            output.sent += ONE + uid
            channels = output.channels
            if output.static or len(channels) == 1:
                for channel in channels:
                    channel.sent.append(row)
            elif output.keyed:
                channels[owner_of(key, len(channels), output.groups)].sent.append(row)
            else:
                output.turn = (output.turn + 1) % len(channels)
                channels[output.turn].sent.append(row)

    def send(self, mark: Mark) -> None:
        for output in self.outputs:
            for channel in output.channels:
                channel.sent.append(mark)

    def send_event_time(self, event: Any) -> None:
        """Send the marks that follow from an event of event time, if any."""
        for mark in self.output.handle(event):
            if type(mark) is WatermarkAt:
                check(not self.max_watermark_sent, "{} sends a watermark after MAX_WATERMARK", self.id)
                self.max_watermark_sent = mark.ms >= MAX_WATERMARK_MS
                check(not self.max_watermark_sent or self.finished_operators, "{} sends MAX_WATERMARK before finish()", self.id)
            self.send(mark)

    def overtake(self, taken: Snapshot, barrier: CheckpointBarrier) -> None:
        """Put the barrier before all elements that wait on the outputs, and keep these in the snapshot.

        Not before refused rows: on Spark an output buffers nothing, and their reader decides.
        """
        for output in self.outputs:
            for channel in output.channels:
                if output.refused:
                    channel.sent.append(BarrierMark(barrier))
                    continue
                taken.output[channel.name] = tuple([e for e in channel.sent if not isinstance(e, BarrierMark | CancelMark)])
                channel.sent.appendleft(BarrierMark(barrier))

    # Snapshots

    def pin(self, action: PinSnapshot) -> Snapshot:
        """Take the snapshot that the task acknowledges with."""
        sink, barrier = self.sink, action.barrier
        transactions = () if sink is None else sink.pre_commit(barrier.checkpoint_id, barrier.properties.is_savepoint)
        after_finish = self.machine.operators_finished
        if not after_finish:
            content = self._content()
            if content not in self.contents:
                self.contents = (*self.contents[-2:], content)
        return Snapshot(
            after_finish=after_finish,
            channels={pinned.snapshot.channel: pinned for pinned in action.inputs.channels},
            valve=action.inputs.valve_watermark,
            event_time=self.event_time,
            watermark=self.output.watermark,
            stages=tuple([op.snapshot() for op in self.operators]),
            tables={edge: frozenset(rows) for edge, rows in self.tables.items()},
            transactions=transactions,
            committed=None if sink is None else sink.committed,
            contents=() if after_finish else self.contents,
            fused=action.inputs.fused,
            splits=action.inputs.splits,
            ghost=self.ghost(),
        )

    def _content(self) -> str:
        """The content of the file that a snapshot adds: the same for the same records, in any process and attempt."""
        done = sum(self.read.values()) // ONE + sum(position for _, position in self.splits)
        return f"{self.process.requested_start.variant}.{self.number}@{done}"

    def ghost(self) -> Ghost:
        return Ghost(
            self.read.copy(),
            {output.edge: output.sent for output in self.outputs},
            self.written,
            tuple([(split, position) for split, position in self.splits]),
            {op.number: op.held for op in self.operators if isinstance(op, Union)},
            retired=self.retired,
        )

    def close(self) -> None:
        self.closed = True
        if self.sink is not None:
            self.sink.rows = []


def _into(after: Operator, edge: int) -> Forward:
    def forward(uid: int, ts: int, key: int) -> None:
        if after.finished:
            raise Violation(f"stage {after.number} gets a row after finish()")
        after.take(uid, ts, key, edge)

    return forward
