"""Tasks behind channels: gates, alignment, static inputs, and one query over all inputs of the chain's first stage.

The task *scans* each channel for barriers and the marks of its end, and *takes in* records and watermarks by opening the
gate of the input; only then does the query see them. Usually both happen at once. While a static input is not ready there
is no query: the task scans on, so that barriers pass, and what lies in front of a barrier is in-flight data of the
checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dagster_checkpoints.coordination import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AbortAlignment,
    BarrierAction,
    BarrierHandler,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    ChannelWatermark,
    CheckpointBarrier,
    Declined,
    EndOfPartitionReceived,
    LifecycleState,
    TakeSnapshot,
    TriggerReceived,
    UnblockChannels,
    ValveState,
    WatermarkValve,
)
from dagster_checkpoints.execution.elements import (
    BarrierMark,
    CancelMark,
    EndOfData,
    EndOfPartition,
    WatermarkAt,
    WatermarkStatus,
)
from dagster_checkpoints.spark.channels.channel_log import Channel, Element, Gate, Records, SegmentFiles
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.query_log import channel_positions
from dagster_checkpoints.spark.snapshots.uploads import PinnedChannel, PinnedSnapshot
from dagster_checkpoints.spark.tasks.messages import TaskWaiting
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.spark.tasks.task_parts import TaskParts
from dagster_checkpoints.state import ChannelSnapshot, TaskSnapshot

ORDERED_SOURCES = 4  # so many sources are asked for their offsets in the order of the plan (Scala's small maps keep it)


@dataclass
class InputChannel:
    """One channel as its consumer sees it; positions count the log's elements.

    Attributes:
        scanned: Looked at for barriers and marks.
        taken_in: Given to the query, or applied to the valve.
        open_to: Behind the last records taken in: the gate's position. Marks alone are no reason for a micro-batch.
        ended: By an EndOfData that was taken in.
        ended_in_scan: By one that was seen.
    """

    channel: Channel
    static: bool
    scanned: int
    taken_in: int
    open_to: int
    ended: str = "none"
    ended_in_scan: bool = False
    blocked: bool = False

    @property
    def name(self) -> str:
        return str(self.channel.id)


@dataclass(frozen=True)
class TaskInput:
    """One input of the chain's first stage, with the channels that make it up."""

    name: str
    static: bool
    channels: tuple[InputChannel, ...]
    gate: Gate | None
    carries_watermark: bool


PlanBuilder = Callable[[Mapping[str, Sequence[Path]]], QueryPlan]


class ChannelTask(Task):
    """A chain that begins behind channels.

    Args:
        inputs: Of the chain's first stage.
        handler: Decides what barriers do (aligned or tracking).
        build: Builds the plan once the static inputs are there, given their files.
        tables: Segments of the static inputs restored or collected so far, by input.
    """

    def __init__(
        self,
        parts: TaskParts,
        inputs: Sequence[TaskInput],
        handler: BarrierHandler,
        build: PlanBuilder,
        tables: Mapping[str, Sequence[SegmentFiles]],
    ) -> None:
        super().__init__(parts)
        self._inputs = tuple(inputs)
        self._channels = {c.name: c for i in inputs for c in i.channels}
        self._streams = tuple(c for c in self._channels.values() if not c.static)
        self._handler = handler
        self._build = build
        self._tables = {i.name: list(tables.get(i.name, ())) for i in inputs if i.static}
        self._valve = WatermarkValve(c.name for c in self._streams)
        self._restore_valve()
        self._ready = False
        self._due: CheckpointBarrier | None = None
        self._due_since = 0.0
        self._alignment_began: float | None = None
        self._consumed_batch = -1
        self._restored_batch = self.query.log.last_committed()
        self._consumed: dict[str, int] = {c.name: c.open_to for c in self._streams}
        self._delayed_watermarks: list[tuple[dict[str, int], int]] = []
        self._in_order = True
        self._direct = False
        self._unsaid: deque[tuple[dict[str, int], int]] = deque()
        self._idle = False

    def _restore_valve(self) -> None:
        restored = self.parts.restored
        if restored is None:
            return
        known = {}
        for channel in restored.channels:
            if channel.channel in self._channels:
                self._channels[channel.channel].ended = channel.ended
                ended = "drain" if channel.ended == "partition" else channel.ended
                watermark = MIN_WATERMARK_MS if channel.watermark is None else channel.watermark
                known[channel.channel] = ChannelWatermark(watermark, channel.idle, ended)
        streams = {name: state for name, state in known.items() if not self._channels[name].static}
        output = MIN_WATERMARK_MS if restored.valve_watermark is None else restored.valve_watermark
        self._valve.restore(ValveState(output, streams))

    # Life

    @property
    def caught_up(self) -> bool | None:
        if self.lifecycle.state is not LifecycleState.RUNNING:
            return True
        arrived = all(not c.channel.elements_from(c.scanned) for c in self._channels.values())
        return self._ready and arrived and self._caught_up()

    def begin(self) -> None:
        if self.plan is not None and not any(i.static for i in self._inputs):
            self._start(self.plan)
        else:
            self.parts.report(TaskWaiting(self.id, tuple(i.name for i in self._inputs if i.static)))

    def _start(self, plan: QueryPlan) -> None:
        self.plan = plan
        self._in_order = self._sources_are_asked_in_order(plan)
        self._direct = plan.streaming and not plan.told_watermark
        if self._direct:
            self.watermarks.stateful = False
            self._say_later()  # what a restored valve knows
        self._ready = True
        if not plan.streaming:
            return  # only static inputs: one evaluation, see `step`
        self._publish_gates()
        if plan.own_watermark:
            self.query.log.plan_due_watermark()
        self.start_query()

    def step(self) -> None:
        if self.lifecycle.state is not LifecycleState.RUNNING:
            self._scan_all()
            self._take_due_snapshot()
            return
        self._scan_all()
        if not self._ready and self._static_inputs_ready():
            self._start(self._build({name: _files(tables) for name, tables in self._tables.items()}))
        if self._ready:
            self._take_in_all()
            self._follow_query()
        self._take_due_snapshot()
        if self._ready and self._due is None and self._everything_taken_in():
            self.end_of_data(drain=all(c.ended == "drain" for c in self._streams))

    def _static_inputs_ready(self) -> bool:
        return all(c.ended_in_scan or c.ended == "drain" for c in self._channels.values() if c.static)

    def _everything_taken_in(self) -> bool:
        if self.plan is not None and not self.plan.streaming:
            self.evaluate_once(self.plan)
            return True
        return all(c.ended != "none" for c in self._streams) and self._caught_up()

    def _caught_up(self) -> bool:
        return all(self._consumed[c.name] >= c.open_to for c in self._streams)

    # Scanning: barriers and ends

    def _scan_all(self) -> None:
        for channel in self._channels.values():
            if self._due is not None:
                return
            self._scan(channel)

    def _scan(self, channel: InputChannel) -> None:
        if channel.blocked:
            return
        for element in channel.channel.elements_from(channel.scanned):
            match element:
                case BarrierMark(barrier):
                    channel.scanned += 1
                    self._handle(self._handler.handle(BarrierReceived(channel.name, barrier)))
                case CancelMark(checkpoint_id):
                    channel.scanned += 1
                    self._handle(self._handler.handle(CancellationReceived(channel.name, checkpoint_id)))
                case EndOfPartition():
                    channel.scanned += 1
                    self._handle(self._handler.handle(EndOfPartitionReceived(channel.name)))
                case EndOfData(drain):
                    channel.scanned += 1
                    channel.ended_in_scan = channel.ended_in_scan or drain
                case Records(segment) if channel.static and channel.ended == "none":
                    channel.scanned += 1
                    segment.hold()
                    self._tables[channel.channel.id.producer].append(segment)
                case _:
                    channel.scanned += 1
            if channel.blocked or self._due is not None:
                return

    def _handle(self, actions: Sequence[BarrierAction]) -> None:
        for action in actions:
            match action:
                case BlockChannel(name):
                    self._alignment_began = self._alignment_began or time.monotonic()
                    self._channels[name].blocked = True
                case UnblockChannels(names):
                    for name in names:
                        self._channels[name].blocked = False
                case TakeSnapshot(barrier):
                    self._due, self._due_since = barrier, time.monotonic()
                case AbortAlignment(checkpoint_id, reason):
                    self._alignment_began = None
                    self.output.append(CancelMark(checkpoint_id))
                    self.parts.report(Declined(self.id, checkpoint_id, reason))

    def triggered(self, barrier: CheckpointBarrier) -> None:
        self._handle(self._handler.handle(TriggerReceived(barrier)))

    def aborted(self, checkpoint_id: int) -> None:
        if self._due is not None and self._due.checkpoint_id == checkpoint_id:
            self._due = None
        # The handler's own decline is not news to the coordinator, which has just told us.
        for action in self._handler.handle(CancellationReceived(None, checkpoint_id)):
            if not isinstance(action, AbortAlignment):
                self._handle([action])
            else:
                self._alignment_began = None
                self.output.append(CancelMark(action.checkpoint_id))

    def _take_due_snapshot(self) -> None:
        """Take the snapshot when the query has taken in exactly what lies in front of the barriers."""
        if self._due is None:
            return
        running = self._ready and self.lifecycle.state is LifecycleState.RUNNING
        if running and self.query.started and not self._caught_up():
            return
        barrier, self._due = self._due, None
        began = self._alignment_began or self._due_since
        self._alignment_began = None
        self.snapshot(barrier, time.monotonic() - began)

    # Taking in: records and watermarks

    def _take_in_all(self) -> None:
        before = {c.name: c.open_to for c in self._streams}
        moved = False
        for channel in self._streams:
            ready = channel.channel.elements_from(channel.taken_in)[: channel.scanned - channel.taken_in]
            for element in ready:
                moved = self._take_in(channel, element) or moved
                channel.taken_in += 1
                if isinstance(element, Records):
                    channel.open_to = channel.taken_in
        if moved and self._direct:
            self._say_later()
        if moved or any(c.open_to != before[c.name] for c in self._streams):
            self._publish_gates()

    def _say_later(self) -> None:
        """Without state the watermark goes straight on, behind what the records in front of it have become."""
        if self._valve.watermark > MIN_WATERMARK_MS:
            self._unsaid.append(({c.name: c.open_to for c in self._streams}, self._valve.watermark))

    def _take_in(self, channel: InputChannel, element: Element) -> bool:
        """Returns whether the task's watermark moved."""
        match element:
            case WatermarkAt(ms):
                return channel.ended == "none" and self._valve.advance(channel.name, ms) is not None
            case WatermarkStatus(idle):
                if channel.ended != "none":
                    return False
                change = self._valve.idle if idle else self._valve.active
                return change(channel.name) is not None
            case EndOfData(drain) if channel.ended == "none":
                channel.ended = "drain" if drain else "suspend"
                return self._valve.end(channel.name, drain) is not None
        return False

    def _publish_gates(self) -> None:
        watermark = self._publishable_watermark()
        for task_input in self._inputs:
            gate = task_input.gate
            if gate is None:
                continue
            gate.positions.update({c.name: c.open_to for c in task_input.channels})
            if watermark is not None and task_input.carries_watermark:
                gate.watermark = watermark
            gate.publish()

    def _publishable_watermark(self) -> int | None:
        """The watermark that may be told to Spark together with the positions.

        It must never be read before the records in front of it. Where the order in which Spark asks does not see to that, a
        watermark is held back until a batch has planned the records in front of it.
        """
        watermark = self._valve.watermark
        if watermark <= MIN_WATERMARK_MS:
            return None
        if self._in_order:
            return watermark
        newest = self._delayed_watermarks[-1][1] if self._delayed_watermarks else None
        if newest is None or watermark > newest:
            self._delayed_watermarks.append(({c.name: c.open_to for c in self._streams}, watermark))
        allowed = None
        while self._delayed_watermarks:
            positions, held = self._delayed_watermarks[0]
            if any(self._consumed[name] < position for name, position in positions.items()):
                break
            allowed = held
            if len(self._delayed_watermarks) == 1:
                break
            self._delayed_watermarks.pop(0)
        return allowed

    def _sources_are_asked_in_order(self, plan: QueryPlan) -> bool:
        """Whether Spark asks each watermark source before every channel source whose records it speaks of.

        It does within an input. Between two inputs it need not, but then Spark's own minimum over both holds back; not so if
        one of them says no watermark.
        """
        streams = [i for i in self._inputs if not i.static]
        together = len(streams) == 1 or all(i.carries_watermark for i in streams)
        return together and plan.sources <= ORDERED_SOURCES

    # Following the query

    def _follow_query(self) -> None:
        batch_id = self.query.log.last_committed()
        if batch_id != self._consumed_batch and batch_id >= 0:
            self._consumed_batch = batch_id
            for name, position in channel_positions(self.query.log.planned(batch_id)).items():
                self._consumed[name] = max(self._consumed[name], position)
                self._channels[name].channel.release_before(position)
            if self._delayed_watermarks:
                self._publish_gates()
        with self.query.lock_if_free() as free:
            if free:
                self.watermarks.forward()
                self._forward_directly()
                self._forward_idleness()

    def _forward_idleness(self) -> None:
        idle = self._valve.is_idle
        if idle != self._idle and (not idle or self._caught_up()):
            self._idle = idle
            self.output.append(WatermarkStatus(idle))

    def _forward_directly(self) -> None:
        while self._unsaid and all(self._consumed[name] >= to for name, to in self._unsaid[0][0].items()):
            self.watermarks.emit(self._unsaid.popleft()[1])

    def before_emit(self, batch_id: int) -> None:
        self.watermarks.forward()

    def committed_watermark(self, batch_id: int) -> int | None:
        if self._direct:
            return None
        if self.watermarks.stateful:
            return super().committed_watermark(batch_id)
        if self.plan is not None and self.plan.own_watermark:
            watermark = self.query.log.next_watermark(batch_id)
            return watermark if watermark > 0 else None
        # Without state nothing is held back: what the batch read is what it sent on.
        said = [
            source["watermark"]
            for source in self.query.log.planned(batch_id).sources
            if isinstance(source, dict) and source.get("watermark") is not None
        ]
        return max(said) if said else None

    def reach_max_watermark(self) -> None:
        assert self.plan is not None
        if not self.plan.streaming:
            return
        if not self.plan.own_watermark and self._max_watermark_matters():
            self.wait_until(self._max_watermark_reached)
        self.query.stop()
        if self.plan.own_watermark and self.query.log.last_committed() >= 0 and self.query.log.holds_state():
            self.run_planned_batch(MAX_WATERMARK_MS)
        self.fire_timers()

    def _max_watermark_matters(self) -> bool:
        # In complete mode every row has been said already, and would only be said again.
        told = not self._direct and any(i.carries_watermark for i in self._inputs)
        return told and self.tail.stage.output_mode != "complete"

    def _max_watermark_reached(self) -> bool:
        self._follow_query()
        batch_id = self.query.log.last_committed()
        if batch_id < 0:
            return False
        if batch_id == self._restored_batch:
            return False  # it may have read MAX_WATERMARK, and its windows be still due; this attempt says it again
        planned = self.query.log.planned(batch_id)
        said = [s["watermark"] for s in planned.sources if isinstance(s, dict) and "attempt" in s]
        if any(watermark != MAX_WATERMARK_MS for watermark in said):
            return False
        if not self.watermarks.stateful or planned.watermark_ms >= MAX_WATERMARK_MS:
            return True
        # Not every stateful operator asks for a batch when event time moves (a join that never cleans up, say).
        return self.query.waits_for_data and self.query.log.last_committed() == batch_id

    # Snapshots

    def pin_inputs(self) -> PinnedSnapshot:
        active = self._ready or self.lifecycle.state is not LifecycleState.RUNNING
        valve = self._valve.snapshot()
        channels = []
        for channel in self._channels.values():
            state = valve.channels.get(channel.name, ChannelWatermark())
            in_flight: tuple[Element, ...] = ()
            position = channel.taken_in
            if channel.static:
                position = channel.scanned
                ended = "drain" if channel.ended_in_scan or channel.ended != "none" else "none"
            else:
                ended = channel.ended
                if not active:
                    in_flight = tuple(channel.channel.elements_from(channel.taken_in)[: channel.scanned - channel.taken_in])
            channels.append(
                PinnedChannel(
                    ChannelSnapshot(
                        channel=channel.name,
                        position=position,
                        watermark=None if state.watermark <= MIN_WATERMARK_MS else state.watermark,
                        idle=state.idle,
                        ended=ended,  # type: ignore[arg-type]  # one of the four words
                    ),
                    in_flight,
                )
            )
        task = TaskSnapshot(valve_watermark=None if valve.watermark <= MIN_WATERMARK_MS else valve.watermark)
        static = {name: tuple(tables) for name, tables in self._tables.items()}
        return PinnedSnapshot(task, channels=tuple(channels), static=static)


def _files(tables: Sequence[SegmentFiles]) -> list[Path]:
    return [file for segment in tables for file in segment.files]
