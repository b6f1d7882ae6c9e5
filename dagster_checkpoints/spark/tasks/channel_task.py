"""Tasks behind channels: static inputs, and one query over all inputs of the chain's first stage, each behind a gate.

The task's `execution.input_gate` decides which positions the task and its query may read. This module performs that with logs,
the query's gate and Spark's offset log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import BarrierMark
from dagster_checkpoints.execution.input_channel import gate_channel
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.task_events import (
    AddToTable,
    BetweenBatches,
    BuildQuery,
    ElementsArrived,
    OpenTo,
    QueryBuilt,
    QueryConsumed,
    QuerySettled,
    TaskAction,
    UnreadBarrier,
)
from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.spark.channels.channel_log import Channel, LoggedElement, Records, SegmentFiles
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.query_log import channel_positions
from dagster_checkpoints.spark.tasks.messages import TaskWaiting
from dagster_checkpoints.spark.tasks.query_runs import POLL_SECONDS
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.spark.tasks.task_parts import TaskParts


@dataclass(frozen=True)
class TaskInput:
    """One input of the chain's first stage, with its channels and the gate of the task's query, which all inputs share.

    `refused`: whether the channels carry the rows that the quarantine of the stage that is read refuses.
    """

    name: str
    static: bool
    channels: tuple[Channel, ...]
    gate: QueryGate
    carries_watermark: bool
    refused: bool = False


PlanBuilder = Callable[[Mapping[str, Sequence[WorkPath]]], QueryPlan]


class ChannelTask(Task):
    """A chain that begins behind channels.

    Args:
        parts: The task's parts.
        inputs: The inputs of the chain's first stage.
        build: Builds the plan from the files of the static inputs, after these inputs are complete.
        tables: The segments of the static inputs that were restored, by input.
    """

    def __init__(
        self,
        parts: TaskParts,
        inputs: Sequence[TaskInput],
        build: PlanBuilder,
        tables: Mapping[str, Sequence[SegmentFiles]],
    ) -> None:
        machine = _machine(parts, inputs)
        self._query_gate = inputs[0].gate
        super().__init__(parts, machine, self._query_gate)
        assert machine.gate is not None
        self._gate: InputGate = machine.gate
        self._inputs = tuple(inputs)
        self._channels = {str(c.id): c for i in inputs for c in i.channels}
        self._build = build
        self._tables = {i.name: list(tables.get(i.name, ())) for i in inputs if i.static}
        self._read_batch = -1
        self._read: Mapping[str, int] = {}  # by channel, the position up to which that batch has read
        self._consumed: Mapping[str, int] = dict(self._query_gate.positions)
        self._retained: set[str] = set()
        """The channels whose consumed segments belong to a snapshot that is not stored yet."""
        self._limited = parts.instances[0].stage.max_rows_per_trigger is not None
        self._restored_batch = self.query.log.last_committed()
        self._watermark_bypasses_query = False

    # Life

    def caught_up(self, stage: str) -> bool | None:
        if not self.machine.running:
            return True
        arrived = all(not c.elements_from(self._gate.scanned(name)) for name, c in self._channels.items())
        return self._gate.open and arrived and self._gate.caught_up

    def step(self) -> None:
        arrived: dict[str, Sequence[LoggedElement]] = {}
        for name, channel in self._channels.items():
            if self._gate.reads(name):
                elements = channel.elements_from(self._gate.scanned(name))
                if elements:
                    arrived[name] = elements
        if arrived:
            rows = {name: [_rows(e) for e in elements] for name, elements in arrived.items()} if self._limited else {}
            self.handle(ElementsArrived(tuple(arrived.items()), rows))
        if self._limited:
            self._announce_barriers()
        if self._gate.open and self.plan is not None and self.plan.streaming:
            self._follow_query()

    def _announce_barriers(self) -> None:
        """Announce barriers that wait behind records that a limited micro-batch does not take yet, if they may overtake these."""
        for name, channel in self._channels.items():
            newer_than = self._gate.announces(name)
            if newer_than is None:
                continue
            unread: list[LoggedElement] = []
            for element in channel.elements_from(self._gate.scanned(name)):
                if isinstance(element, BarrierMark) and element.barrier.checkpoint_id > newer_than:
                    self.handle(UnreadBarrier(name, element.barrier, tuple(unread)))
                    break
                unread.append(element)

    def seconds_to_next_look(self) -> float:
        may_settle = self._gate.settling or bool(self._retained)
        return POLL_SECONDS if may_settle else super().seconds_to_next_look()

    def report_waiting(self) -> None:
        static = tuple(i.name for i in self._inputs if i.static)
        if static:
            self.parts.report(TaskWaiting(self.id, static))

    def perform_on_inputs(self, action: TaskAction) -> None:
        match action:
            case OpenTo(positions, watermark):
                self._query_gate.open_to(positions, watermark)
            case AddToTable(channel, records):
                records.segment.hold()
                self._tables[self._channels[channel].id.producer].append(records.segment)
            case BuildQuery():
                self._build_query()
            case _:
                super().perform_on_inputs(action)

    def _build_query(self) -> None:
        if self.plan is None or self._tables:
            self.plan = self._build({name: _files(tables) for name, tables in self._tables.items()})
        plan = self.plan
        self._watermark_bypasses_query = plan.streaming and not plan.takes_watermark
        if self._watermark_bypasses_query:
            self.watermarks.stateful = False
        self.handle(QueryBuilt(plan.streaming, bool(plan.takes_watermark)))

    def launch_query(self) -> None:
        assert self.plan is not None
        by_the_clock = self.plan.fires_by_the_clock
        if self.plan.own_watermark or by_the_clock:
            self.query.log.plan_due_watermark(always=by_the_clock)
        self.start_query()

    def static_tables(self) -> Mapping[str, tuple[SegmentFiles, ...]]:
        return {name: tuple(tables) for name, tables in self._tables.items()}

    # Following the query

    def _follow_query(self) -> None:
        self._forward_watermark()
        self._follow_positions()
        if self._gate.open and self._gate.has_news:
            with self.query.lock_if_free() as free:
                if free:
                    self.handle(BetweenBatches())
        if self._gate.settling and self._has_settled():
            self.handle(QuerySettled())

    def _has_settled(self) -> bool:
        """Whether the query has run under the newest watermark, or wants no batch for it."""
        if self.watermarks.stateful is False or self._query_gate.idle:
            return True
        # A query with timers of processing time is never idle: it runs batch after batch.
        batch_id = self.query.log.last_committed()
        if batch_id < 0:
            return False
        planned = self.query.log.planned(batch_id)
        read = {s["watermark"] for s in planned.sources if isinstance(s, dict) and "attempt" in s}
        newest = self._query_gate.watermark
        # A batch that was planned before the first watermark has no offset of the watermark's source.
        has_read = newest is None or read == {newest}
        return has_read and planned.watermark_ms >= self.query.log.next_watermark(batch_id)

    def _follow_positions(self) -> None:
        """Tell the gate what the query has consumed: the records that it has read, and the marks up to the next records."""
        consumed = self.consumed_positions()
        if consumed != self._consumed or self._retained:
            # A producer may wait until segments are released: so look again although nothing more is consumed.
            self._retained = {name for name in consumed if self._gate.retains(name)}
            for name in consumed.keys() - self._retained:
                self._channels[name].release_before(consumed[name])
        if consumed != self._consumed:
            self._consumed = consumed
            self.handle(QueryConsumed(consumed))

    def consumed_positions(self) -> Mapping[str, int]:
        batch_id = self.query.log.last_committed()
        if batch_id != self._read_batch:
            self._read_batch, self._read = batch_id, channel_positions(self.query.log.planned(batch_id))
        opened = self._query_gate.positions
        return {name: self._channels[name].behind_marks(self._read.get(name, 0), limit) for name, limit in opened.items()}

    def _forward_watermark(self) -> None:
        with self.query.lock_if_free() as free:
            if free:
                self.watermarks.forward()

    def before_batch(self, batch_id: int) -> None:
        self._query_gate.batch_ran()
        self.watermarks.forward()

    def committed_watermark(self, batch_id: int) -> int | None:
        if self._watermark_bypasses_query:
            return None
        if self.watermarks.stateful:
            return super().committed_watermark(batch_id)
        if self.plan is not None and self.plan.own_watermark:
            watermark = self.query.log.next_watermark(batch_id)
            return watermark if watermark > 0 else None
        # Without state no rows are held back: the batch sends the watermark that it has read.
        read_watermarks = [
            source["watermark"]
            for source in self.query.log.planned(batch_id).sources
            if isinstance(source, dict) and source.get("watermark") is not None
        ]
        return max(read_watermarks) if read_watermarks else None

    def reach_max_watermark(self) -> None:
        assert self.plan is not None
        if not self.plan.streaming:
            return
        if not self.plan.own_watermark and self._max_watermark_matters():
            self.runs.wait_until(self._max_watermark_reached)
        self.query.stop()
        if self.plan.own_watermark and self.query.log.last_committed() >= 0 and self.query.log.holds_state():
            self.run_planned_batch(MAX_WATERMARK_MS)
        self.fire_timers()

    def _max_watermark_matters(self) -> bool:
        # In complete mode every row was emitted already, and would only be emitted again.
        takes_watermark = not self._watermark_bypasses_query and any(i.carries_watermark for i in self._inputs)
        return takes_watermark and self.tail.stage.output_mode != "complete"

    def _max_watermark_reached(self) -> bool:
        self._follow_query()
        batch_id = self.query.log.last_committed()
        if batch_id < 0:
            return False
        if batch_id == self._restored_batch:
            return False  # it may have read MAX_WATERMARK while its windows are still due; this attempt sends it again
        planned = self.query.log.planned(batch_id)
        read_watermarks = [s["watermark"] for s in planned.sources if isinstance(s, dict) and "attempt" in s]
        if any(watermark != MAX_WATERMARK_MS for watermark in read_watermarks):
            return False
        if not self.watermarks.stateful or planned.watermark_ms >= MAX_WATERMARK_MS:
            return True
        # Not every stateful operator requests a batch when event time advances, for example a join that never removes state.
        return self._query_gate.idle and self.query.log.last_committed() == batch_id


def _machine(parts: TaskParts, inputs: Sequence[TaskInput]) -> TaskMachine:
    restored = {c.channel: c for c in parts.restored.channels} if parts.restored is not None else {}
    channels = []
    for task_input in inputs:
        for channel in task_input.channels:
            name = str(channel.id)
            channels.append(gate_channel(name, task_input.static, channel.base, restored.get(name)))
    valve = parts.restored.valve_watermark if parts.restored is not None else None
    return parts.make_machine(
        time.monotonic(),
        task=parts.id,
        config=parts.checkpoints,
        channels=tuple(channels),
        valve_watermark=valve,
        traits=parts.traits(max_rows=parts.instances[0].stage.max_rows_per_trigger),
    )


def _rows(element: LoggedElement) -> int:
    return element.segment.rows if isinstance(element, Records) else 0


def _files(tables: Sequence[SegmentFiles]) -> list[WorkPath]:
    return [file for segment in tables for file in segment.files]
