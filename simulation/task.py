"""A simulated task: one instance of a chain, which drives the shipped task machine step by step.

The world hands events to the machine, `perform` performs its actions over the data plane in memory. Injected failures are raised
in this module, and the order of events is checked independently of the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AlignmentTick
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from dagster_checkpoints.execution import task_events as on
from dagster_checkpoints.execution.attempt_plan import TaskPlan
from dagster_checkpoints.execution.elements import BarrierMark, EndOfData, EndOfPartition, Mark, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.task_events import TaskMessage
from simulation.channels import Channel, Snapshot, mix, rows_of
from simulation.sinks import TaskFailure
from simulation.task_data import TaskData
from simulation.violations import Violation, check

if TYPE_CHECKING:
    from simulation.process import Process

RUNNING = life.LifecycleState.RUNNING
_ENDS = frozenset({EndOfData, EndOfPartition})
_EVENT_TIME = frozenset({WatermarkAt, WatermarkStatus})


class Task(TaskData):
    """The control side of a task; its data side is `TaskData`."""

    __slots__ = (
        "aborted", "asynchronous", "awaited", "completed", "ends_with", "gate_moved", "mailbox", "opened", "pinned", "planned",
    )  # fmt: skip

    def __init__(
        self, process: Process, number: int, channels: Sequence[Channel], restored: Snapshot | None, planned: TaskPlan
    ) -> None:
        super().__init__(process, number, channels, restored, planned)
        self.asynchronous = process.world.scenario.asynchronous
        """Whether the query follows the gate in steps of its own, and not at once."""
        self.mailbox: deque[TaskMessage] = deque()
        self.completed = 0
        self.aborted: set[int] = set()
        """Checkpoints of whose abort the task was notified."""
        self.awaited: set[int] = set()
        """Snapshots with which the task cannot end, and of whose outcome it was not notified."""
        self.ends_with: set[int] = set()
        """Snapshots that were taken after finish, of checkpoints that commit."""
        self.pinned: dict[int, Snapshot] = {}
        self.opened = on.OpenTo({}, None)
        self.gate_moved = False
        """Whether the gate has moved since the query read it last."""
        self.planned: on.OpenTo | None = None
        """The positions or the watermark that the query has read of the gate; the batch reads the other one."""

    # Steps: each returns whether it was possible; an error of the task ends it, and is reported to the job machine

    def attempt_step(self, step: Callable[..., bool], arguments: Sequence[Any]) -> bool:
        """Take a step. False if it is impossible now; then nothing has changed."""
        try:
            return step(self, *arguments)
        except TaskFailure as error:
            self.fail(str(error))
            return True

    def fail(self, message: str) -> None:
        self.failed = self.done = True
        self.close()
        self.process.task_failed(self, message)

    def handle(self, event: on.TaskEvent) -> None:
        """Hand an event to the machine and perform its actions."""
        self.perform(self.machine.handle(event, self.process.world.now))

    def open(self, at_once: bool) -> bool:
        """Take one step of opening the sink, or all of them, and then start."""
        if self.sink is not None:
            if self.opening is None:
                self.opening = self.sink.open()
            for _ in self.opening:
                if not at_once:
                    return True
        self.opening = None
        self.started = True
        self.hold_to_burst()
        if self.source and not self.finished_operators:
            self.send_event_time(WatermarkStatus(False))
        self.handle(on.TaskOpened())
        return True

    def hold_to_burst(self) -> None:
        """In a burst: an unbounded source reads only some of its records."""
        if self.process.requested_start.burst and self.source == "unbounded" and self.machine.splits is None:
            process = self.process
            self.bound = mix(process.scenario.seed, process.number, process.attempt, self.number) % (self.left + 1)

    def can_read(self) -> bool:
        """Whether a source can read a record or reach its end."""
        life = self.life
        if not self.started or self.done or life._paused or life._state is not RUNNING:
            return False
        if self.machine.splits is not None:
            return self.reading is not None
        if self.bound is not None:
            return not self.machine.has_read_all
        return self.left > 0 or self.source == "bounded"

    @property
    def reads_split(self) -> bool:
        """Whether a split is read in part: messages wait until it is read, and a snapshot has no part of a split."""
        return self.reading is not None and self.reading[1] > 0

    def emit_records(self, times: int) -> bool:
        """A source emits up to `times` records, or reaches its end."""
        if not self.can_read():
            return False
        for _ in range(times):
            if self.output.idle:
                self.send_event_time(WatermarkStatus(False))
            self.process.count("records")
            if self.bound == 0 or not self.read_record():
                self.end_of_split_or_source()
            elif self.bound is not None:
                self.bound -= 1
            if not self.can_read():
                break
        return True

    def end_of_split_or_source(self) -> None:
        if self.reading is None:
            return self.handle(on.SourceExhausted())
        split, self.reading = self.reading[0], None
        return self.handle(on.SplitRead(str(split)))

    def stop_source(self) -> None:
        """The source is not read any more."""

    def hold(self, sources: Sequence[str]) -> None:
        """Hold fused sources to what is there now."""
        raise AssertionError(f"{self.id} has no fused sources")

    def fall_idle(self) -> bool:
        possible = self.source and self.process.scenario.idle and self.started and not self.output.idle
        if not possible or not self.machine.running or self.machine.paused:
            return False
        self.send_event_time(WatermarkStatus(True))
        return True

    def can_take(self, channel: Channel) -> bool:
        """Whether an element waits on the channel and the gate reads the channel."""
        return self.started and not self.done and bool(channel.queue) and self.gate.reads(channel.name)

    def take(self, number: int, times: int) -> bool:
        """Hand up to `times` elements that have arrived on a channel to the gate."""
        if number >= len(self.inputs) or not self.can_take(self.inputs[number]):
            return False
        channel = self.inputs[number]
        gate, queue, name = self.gate, channel.queue, channel.name
        before, after_end = gate.scanned(name), self.life._state is not RUNNING
        elements = list(islice(queue, times))
        rows = {} if self.process.scenario.max_rows is None else {name: [rows_of(element) for element in elements]}
        arrived = on.ElementsArrived(((name, elements),), rows)
        actions = self.machine.handle(arrived, self.process.world.now)
        for _ in range(gate.scanned(name) - before):
            element = queue.popleft()
            if after_end:
                again = isinstance(element, Mark) or not self.process.scenario.exactly_once
                check(again, "{} got a record after its end of data", self.id)
            elif not channel.static:
                channel.log.append(element)
        self.perform(actions)
        if gate.open and channel.log and type(channel.log[-1]) in _ENDS:
            self.consume(channel, channel.consumed)  # an end of data without records starts no batch
            self.check_watermark()
        return True

    def can_run_query(self) -> bool:
        """Whether a query that follows the gate in steps of its own has something to do."""
        return (self.gate_moved or self.planned is not None) and not self.done and not self.life._paused

    def run_query(self) -> bool:
        """Half of a micro-batch: plan it, or run it."""
        if not self.can_run_query():
            return False
        if self.planned is None:
            self.planned, self.gate_moved = self.opened, False
            return True
        view, self.planned = self.planned, None
        self._run_batch(view.positions, view.watermark)
        return True

    def _process_batch(self, positions: Mapping[str, int], watermark: int | None) -> None:
        check(not self.life._paused, "{} processes a batch while it is paused", self.id)
        self._check_size(positions)
        for channel in self.streams:
            self.consume(channel, positions[channel.name])
        self.check_watermark()
        if watermark is not None and self.stateful:
            self.advance(watermark)

    def _check_size(self, positions: Mapping[str, int]) -> None:
        """A micro-batch has at most as many rows as the limit, or one element."""
        limit = self.process.scenario.max_rows
        if limit is not None:
            read = [islice(c.log, max(positions[c.name] - c.consumed, 0)) for c in self.streams]
            rows = [rows_of(element) for elements in read for element in elements if not isinstance(element, Mark)]
            check(
                len(rows) <= 1 or sum(rows) <= limit, "{} processes {} rows in a batch of at most {}", self.id, sum(rows), limit
            )

    def _run_batch(self, positions: Mapping[str, int], watermark: int | None) -> None:
        self._process_batch(positions, watermark)
        self.handle(on.QueryConsumed(positions))
        gate = self.gate
        if self.done or not gate.open:
            return
        if gate.has_news:
            self.handle(on.BetweenBatches())
        if self.stateful and not self.gate_moved and gate.caught_up and gate.watermark > MIN_WATERMARK_MS:
            reached = self.event_time >= gate.watermark
            check(reached, "{} has not received event time {}, and has consumed every record before it", self.id, gate.watermark)

    def can_announce(self, channel: Channel) -> int | None:
        """Position in the queue of the barrier to announce; None if there is none."""
        if self.can_take(channel):
            newer_than: int | None = self.gate._channels[channel.name].announced or 0
        else:
            newer_than = self.gate.announces(channel.name) if self.started and not self.done and channel.queue else None
        if newer_than is None:
            return None
        barriers = ((n, element) for n, element in enumerate(channel.queue) if isinstance(element, BarrierMark))
        return next((n for n, mark in barriers if mark.barrier.checkpoint_id > newer_than), None)

    def announce(self, number: int) -> bool:
        """Announce a barrier that waits in the channel to the gate."""
        at = self.can_announce(self.inputs[number]) if number < len(self.inputs) else None
        if at is None:
            return False
        channel = self.inputs[number]
        *unread, mark = islice(channel.queue, at + 1)
        self.handle(on.UnreadBarrier(channel.name, mark.barrier, unread))  # type: ignore[union-attr]
        return True

    def can_time_out(self) -> bool:
        """Whether the timeout of an alignment has passed."""
        deadline = self.machine.next_deadline()
        return deadline is not None and deadline <= self.process.world.now and self.started and not self.life._paused

    def time_out(self) -> bool:
        if not self.can_time_out():
            return False
        self.handle(AlignmentTick(self.process.world.now))
        return True

    def receive(self, number: int, elements: int) -> bool:
        channel = self.inputs[number] if number < len(self.inputs) else None
        if channel is None or channel.sent is channel.queue or not channel.sent:
            return False
        for _ in range(min(elements, len(channel.sent))):
            channel.queue.append(channel.sent.popleft())
        return True

    # Messages

    def may_be_lost(self, message: TaskMessage) -> bool:
        """Whether the job must reach its end even if this notice is lost, because a later checkpoint's notice replaces it.

        True for a checkpoint triggered after the end of the data. Not for a stop's savepoint, because no later one follows; nor
        for one triggered before the end of the data, because a task waits for the outcome of each of these.
        """
        if not isinstance(message, life.CheckpointCompletedNotice | life.CheckpointAbortedNotice):
            return False
        return message.checkpoint_id != self.stopped_by and message.checkpoint_id in self.life._after_finish

    def lose_notice(self) -> bool:
        """The next notice of a checkpoint's outcome does not reach the task."""
        message = next((m for m in self.mailbox if self.may_be_lost(m)), None)
        if message is None or not self.process.world.spend("lose"):
            return False
        self.mailbox.remove(message)
        self.process.count("lost notices")
        return True

    def take_mail(self, times: int) -> bool:
        """Hand up to `times` messages to the machine, in their order."""
        if not self.started or not self.mailbox or self.reads_split:
            return False
        for _ in range(times):
            self._take_message(self.mailbox.popleft())
            if not self.mailbox or self.done:
                break
        return True

    def _take_message(self, message: TaskMessage) -> None:
        if type(message) is life.CheckpointCompletedNotice:
            check(message.checkpoint_id > self.completed, "{} is notified of {} after {}", self.id, message, self.completed)
            self.completed = message.checkpoint_id
            self.awaited.discard(message.checkpoint_id)
        elif type(message) is life.SavepointCompletedNotice:
            self.awaited.discard(message.checkpoint_id)
        elif type(message) is life.CheckpointAbortedNotice:
            self.aborted.add(message.checkpoint_id)
            self.awaited.discard(message.checkpoint_id)
            self.ends_with.discard(message.checkpoint_id)
            if self.stopped_by == message.checkpoint_id:
                self.stopped_by = None
        self.handle(message)
        if not (self.done or self.awaited) and any(taken <= self.completed for taken in self.ends_with):
            raise Violation(f"{self.id} waits behind its end of data, and checkpoint {self.completed} has completed")

    def fail_soon(self, where: str) -> bool:
        """The task raises: at once, or the next time that it does what `where` names."""
        if not self.started or self.fail_at or not self.process.world.spend("task" if where == "now" else where):
            return False
        if where == "now":
            self.fail("crash")
        else:
            self.fail_at = where
        return True

    # Actions of the machine

    def perform(self, actions: Sequence[Any]) -> None:
        for action in actions:
            _PERFORM[type(action)](self, action)
        if self.gate_moved and not self.asynchronous and not self.life._paused and self.life._state is RUNNING:
            self.gate_moved = False
            self._run_batch(self.opened.positions, self.opened.watermark)
        elif self.inputs and self.gate.settling and not self.gate_moved and self.planned is None and not self.done:
            self.handle(on.QuerySettled())

    def _open_gate(self, action: on.OpenTo) -> None:
        self.opened, self.gate_moved = action, True

    def _forward(self, action: on.Forward) -> None:
        if type(action.mark) in _EVENT_TIME:
            self.send_event_time(action.mark)
        else:
            self.send(action.mark)

    def _build(self, action: on.BuildQuery) -> None:
        if self.tables:
            self.operators[0].table = mix(*(sum(self.tables[edge]) for edge in sorted(self.tables)))
        self.handle(on.QueryBuilt(bool(self.streams), self.stateful))

    def _hold_query(self, action: on.HoldQuery) -> None:
        checkpoint_id = action.checkpoint_id
        if self.planned is not None and mix(self.process.scenario.seed, checkpoint_id) % 2:
            view, self.planned = self.planned, None  # the batch had begun: it ends first
            self._process_batch(view.positions, view.watermark)
        if self.fail_at == "decline" and not self.done:
            self.fail_at = ""
            self.handle(on.SnapshotFailed(checkpoint_id, "the batch failed"))
            if not self.done:
                self.handle(on.QueryConsumed({channel.name: channel.consumed for channel in self.streams}))
        elif not self.done:
            self.process.count("overtaken queries")
            self.handle(on.QueryHeld(checkpoint_id, {channel.name: channel.consumed for channel in self.streams}))

    def _pin_snapshot(self, action: on.PinSnapshot) -> None:
        checkpoint_id, properties = action.barrier.checkpoint_id, action.barrier.properties
        if self.source:
            self.forward_source_time()
        check(not self.closed, "{} takes a snapshot after close()", self.id)
        check(checkpoint_id not in self.aborted, "{} takes a snapshot for {}, which was aborted", self.id, checkpoint_id)
        if self.fail_at == "snapshot":
            raise TaskFailure("snapshot_state raises")
        taken = self.pin(action)
        if self.fail_at == "decline":
            self.fail_at = ""
            self.handle(on.SnapshotFailed(checkpoint_id, "the snapshot failed"))
            return
        self.pinned[checkpoint_id] = taken
        (self.ends_with if taken.after_finish and not properties.is_savepoint else self.awaited).add(checkpoint_id)
        if properties.stops_job:
            settled = not (self.stateful and self.inputs and self.gate.open) or self.event_time >= self.gate.watermark
            check(settled, "{} is stopped before it has emitted what is due at {}", self.id, self.event_time)
            self.stopped_by = checkpoint_id
        due = self.gate.watermark if self.inputs and self.gate.open and properties.stops_job else MIN_WATERMARK_MS
        self.handle(on.SnapshotPinned(checkpoint_id))
        if MIN_WATERMARK_MS < due < MAX_WATERMARK_MS:
            sent = self.output.watermark
            check(sent is not None and sent >= due, "{} is stopped before it has sent event time {}", self.id, due)

    def _store(self, action: on.StoreSnapshot) -> None:
        taken = self.pinned.pop(action.barrier.checkpoint_id)
        for name, captured in action.captured.items():
            pinned = taken.channels[name]
            taken.channels[name] = type(pinned)(pinned.snapshot, (*pinned.in_flight, *captured))
        self.process.submit_upload(self, action, taken)

    def _finish(self, action: life.FinishOperators) -> None:
        self.finish_operators()
        self.handle(life.OperatorsFinished())

    def _commit(self, action: life.CommitUpTo) -> None:
        check(not self.closed, "{} is notified after close()", self.id)
        if self.sink is not None:
            if action.checkpoint_id is None:
                self.sink.pre_commit(self.sink.behind_all)
            if self.fail_at == "commit":
                self.sink.stop_after = mix(self.process.world.steps) % 6
            self.sink.commit_up_to(action.checkpoint_id)
        if self.fail_at == "commit":
            raise TaskFailure("commit raises")
        self.ended_with = action.checkpoint_id

    def _close(self, action: life.CloseOperators) -> None:
        check(not self.closed, "{} closes a second time", self.id)
        check(self.finished_operators or self.machine.suspended, "{} closes before finish()", self.id)
        uncommitted = self.sink is not None and (self.sink.pending.all or self.sink.rows)
        check(not uncommitted, "{} closes with uncommitted rows", self.id)
        self.close()

    def _finished(self, action: life.TaskFinished) -> None:
        check(self.closed, "{} is FINISHED and not closed", self.id)
        self.done = True
        self.process.task_ended(self)


_PERFORM: dict[type[object], Callable[[Task, Any], object]] = {
    on.OpenTo: Task._open_gate,
    on.Forward: Task._forward,
    on.WatermarkReached: lambda task, action: task.advance(action.ms),
    on.AddToTable: lambda task, action: task.add_to_table(action.channel, action.records),
    on.BuildQuery: Task._build,
    on.StartQuery: lambda task, action: task.handle(on.QueryRunning()),
    on.EvaluateOnce: lambda task, action: task.handle(on.Evaluated()),
    on.HoldQuery: Task._hold_query,
    on.PinSnapshot: Task._pin_snapshot,
    on.Overtake: lambda task, action: task.overtake(task.pinned[action.barrier.checkpoint_id], action.barrier),
    on.StoreSnapshot: Task._store,
    on.DropSnapshot: lambda task, action: task.pinned.pop(action.checkpoint_id, None),
    on.NotifyOperatorsAborted: lambda task, action: None,
    on.StopSource: lambda task, action: task.stop_source(),
    on.ReadSplit: lambda task, action: task.begin_split(int(action.split)),
    on.HoldSources: lambda task, action: task.hold(action.sources),
    on.AdvanceEventTime: lambda task, action: task.advance(action.ms),
    on.KillQuery: lambda task, action: None,
    on.Report: lambda task, action: task.process.report(task.attempt, action.event),
    life.FinishOperators: Task._finish,
    life.PauseOperators: lambda task, action: check(task.machine.paused, "{} is to pause and is not paused", task.id),
    life.ResumeOperators: lambda task, action: check(not task.machine.paused, "{} is to resume and is paused", task.id),
    life.CommitUpTo: Task._commit,
    life.CloseOperators: Task._close,
    life.TaskFinished: Task._finished,
}
