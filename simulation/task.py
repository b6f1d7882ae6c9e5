"""A simulated task: one instance of a chain, driven step by step.

Mirrors the order of actions of the runtime's tasks over the real barrier handlers,
valve and life cycle. Records live in the channels' queues; the query's state in the operators. The order of a stage's
events is checked where they happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    MAX_WATERMARK_MS,
    AbortAlignment,
    AlignmentTick,
    BarrierAction,
    BarrierAnnounced,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    ChannelCaptured,
    CheckpointBarrier,
    Declined,
    EndOfPartitionReceived,
    FailureReason,
    SnapshotInputsComplete,
    StartSnapshot,
    TakeSnapshot,
    UnblockChannels,
)
from simulation.channels import Channel
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
    source_row,
    source_watermark,
)
from simulation.task_life import RUNNING, TaskLife
from simulation.violations import Violation, check

if TYPE_CHECKING:
    pass


class Task(TaskLife):
    """See the module's text."""

    def source_time(self) -> int:
        """The watermark of what is still to come."""
        if self.enumerated:
            return source_watermark(0)  # a split that is assigned later begins at its beginning
        times = [self._split_time(split, position) for split, position in self.splits]
        return min(times, default=MAX_WATERMARK_MS)

    def _split_time(self, split: int, position: int) -> int:
        over = self.source == "bounded" and position >= self.records_of(split)
        return MAX_WATERMARK_MS if over else source_watermark(position)

    def can_read(self) -> bool:
        """Whether a source has something to do."""
        life = self.life
        if not self.started or self.done or life._paused or life._state is not RUNNING:
            return False
        return self.source == "bounded" or any(position < self.records_of(split) for split, position in self.splits)

    def read_source(self) -> None:
        """Emit the next record, or find that there is none left."""
        self.guarded(self._read_source)

    def _read_source(self) -> None:
        left = [split for split in self.splits if split[1] < self.records_of(split[0])]
        if not left and self.process.enumerators.get(self.head):
            check(self.stopped_by is None, f"{self.id} takes a split after the stop's savepoint {self.stopped_by}")
            self.splits.append([self.process.enumerators[self.head].popleft(), 0])
            return
        if not left:
            self.end_of_data(True)
            return
        split = min(left, key=_position)
        if self.stopped_by is not None:
            raise Violation(f"{self.id} read a record after the stop's savepoint {self.stopped_by}")
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

    def can_step(self, channel: Channel) -> bool:
        if not self.started or self.done or self.life._paused:
            return False
        if channel.held and self.ready:
            return True
        return self.due is None and not channel.blocked and bool(channel.queue)

    def step(self, channel: Channel) -> None:
        """Take one element of a channel."""
        self.guarded(self._step, channel)

    def _step(self, channel: Channel) -> None:
        if channel.held and self.ready:
            self._take_in(channel, channel.held.popleft())
        else:
            self._scan(channel, channel.queue.popleft())
        self.look_whether_over()

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
        self.look_whether_over()

    def _scan(self, channel: Channel, element: Element) -> None:
        tag = element[0]
        if tag == BARRIER:
            if not self.process.settings.exactly_once and channel.ended == "none" and not channel.ended_in_scan:
                # What comes on this channel from now on comes again after a restore: its end, too.
                checkpoint_id = element[1].checkpoint_id
                self.before_end.add(checkpoint_id)
                if not channel.static:
                    known = self.valve.snapshot().channels[channel.name]
                    self.at_barrier[checkpoint_id, channel.name] = (known, len(channel.held))
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
        if tag == RECORD and channel.ended == "none" and self._is_new(channel.edge, element[1]):
            self.tables[channel.edge] += element[1]
            self.count_read(channel.edge, element[1])
        elif tag == END_OF_DATA:
            channel.ended_in_scan = channel.ended_in_scan or element[1]
            self.look_whether_ready()

    def _is_new(self, edge: int, uid: int) -> bool:
        """At-least-once: a table is a set of rows, in which one that comes again changes nothing."""
        if self.process.settings.exactly_once:
            return True
        held = self.held_in_tables.get(edge, frozenset())
        self.held_in_tables[edge] = held | {uid}
        return uid not in held

    def look_whether_ready(self) -> None:
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
            if self.life.state is not RUNNING:
                raise Violation(f"{self.id} got a record after its end of data")
            if self.stopped_by is not None:
                raise Violation(f"{self.id} processed a record after the stop's savepoint {self.stopped_by}")
            late = element[2] < self.valve.watermark and self.process.knows_event_time
            if late:
                raise Violation(f"{self.id}: a record of {element[2]} came at event time {self.valve.watermark}")
            self.count_read(channel.edge, element[1])
            self.operators[0].take(element[1], element[2], element[3], channel.edge)
        elif self.life.state is not RUNNING:
            return
        elif tag == WATERMARK:
            again = channel.watermark >= MAX_WATERMARK_MS and self.process.settings.exactly_once
            if again:
                raise Violation(f"{self.id}: {channel.name} says {element[1]} after MAX_WATERMARK")
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
            if found != max(least, self.event_time):
                raise Violation(f"{self.id}: event time is {found}, the channels say {least}")
            self.event_time = found
        if watermark is not None:
            check(watermark == self.valve.watermark, "the valve says one thing and means another")
            self.advance(watermark)

    def _forward_idleness(self) -> None:
        if self.valve.is_idle != self.idle:
            self.idle = self.valve.is_idle
            self.send((IDLE, self.idle))

    def look_whether_over(self) -> None:
        """The end of the data: everything of every stream was taken in."""
        if self.done or not self.ready or self.due is not None or self.life.state is not RUNNING or self.life.paused:
            return
        if all(c.ended != "none" and not c.held for c in self.streams):
            self.end_of_data(all(c.ended == "drain" for c in self.streams))

    def gate(self, actions: Sequence[BarrierAction]) -> None:
        for action in actions:
            match action:
                case BlockChannel(name):
                    self._channel(name).blocked = True
                case UnblockChannels(names):
                    for name in names:
                        self._channel(name).blocked = False
                case TakeSnapshot(barrier) if self.life.operators_finished and barrier.checkpoint_id in self.before_end:
                    # At-least-once: its data ended behind the barrier of an upstream task, which would go on after a restore
                    # and find nobody who listens.
                    self.send((CANCEL, barrier.checkpoint_id))
                    reason = FailureReason.CHECKPOINT_DECLINED_INPUT_END_OF_STREAM
                    self.report(Declined(self.id, barrier.checkpoint_id, reason))
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
            # What a static input that is not ready holds up lies in front of what was captured.
            ended, watermark, held = snapshot.channels[channel.name]
            snapshot.channels[channel.name] = (ended, watermark, (*held, *in_flight))

    def _inputs_complete(self, checkpoint_id: int) -> None:
        found = self.capturing.pop(checkpoint_id, None)
        if found is not None:
            self.process.submit_upload(self, *found)


def _position(split: list[int]) -> int:
    return split[1]


def table_sum(tables: dict[int, int]) -> int:
    """What a static table is, as one number."""
    return mix(*(tables[edge] for edge in sorted(tables)))
