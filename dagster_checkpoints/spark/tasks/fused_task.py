"""Tasks that begin with several fused sources: one query over all of them, each with an end of its own.

The task's `execution.fused_sources` decides which sources have ended, and the event time of all of them. This module performs
that with Spark's query, and reports what each source has read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import WatermarkStatus
from dagster_checkpoints.execution.fused_sources import FusedSource, FusedSources
from dagster_checkpoints.execution.source_limits import SourceLimits, SourceRead
from dagster_checkpoints.execution.task_events import (
    AdvanceEventTime,
    HoldSources,
    SourcesAsked,
    TaskAction,
    WatermarkReached,
)
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.fused_query import FIRST_LIMIT, FusedQuery
from dagster_checkpoints.spark.tasks.query_runs import POLL_SECONDS
from dagster_checkpoints.spark.tasks.source_task import QueryOfSourcesTask
from dagster_checkpoints.spark.tasks.task import LOOK_SECONDS
from dagster_checkpoints.spark.tasks.task_parts import TaskParts


class FusedTask(QueryOfSourcesTask):
    """A chain that begins with fused sources.

    The query runs until all sources have ended, and the task holds the bounded ones (in a burst all of them) to what is there
    when it begins. If all are bounded and some cannot be held, Spark itself holds them (`availableNow`), and ends the query.

    Args:
        parts: The task's parts.
        sources: The chain's fused sources, those that have ended included.
        batch_seconds: The time that a micro-batch is to take at most.
    """

    def __init__(self, parts: TaskParts, sources: Sequence[FusedSource], batch_seconds: float) -> None:
        machine = parts.make_machine(
            time.monotonic(),
            task=parts.id,
            config=parts.checkpoints,
            valve_watermark=parts.restored.valve_watermark if parts.restored is not None else None,
            traits=parts.traits(),
            fused=tuple(sources),
        )
        super().__init__(parts, machine)
        assert machine.fused is not None
        self._state: FusedSources = machine.fused
        self._names = tuple(source.name for source in sources)
        streams = parts.plan.fused if parts.plan is not None else {}
        self._ends_by_itself = all(source.bounded or source.name in self._state.ended for source in sources) and not all(
            stream.can_be_held for name, stream in streams.items() if name not in self._state.ended
        )
        self._fused = FusedQuery(self.query, streams)
        first = {name: FIRST_LIMIT[limit] for name, limit in self._fused.limited.items()}
        awaited = [source.name for source in sources if not source.bounded and not parts.burst]
        self._limits = SourceLimits(first, awaited, batch_seconds)
        self._began = 0.0
        """When the processing of the newest batch began."""
        self._keeps_state = parts.described is None or parts.described.keeps_state
        self._followed = -1
        """The newest batch that the machine knows."""
        self._watermarks_of: dict[int, dict[str, int]] = {}
        """By batch that it does not know, the sources' watermarks."""
        self._event_time: int | None = None
        """The newest watermark of all sources together that the machine has decided in this attempt."""
        self._reached: int | None = None
        """The newest one of these that the query runs under."""
        self._batch_id = -1

    # Life

    def launch_query(self) -> None:
        self.watermarks.send(WatermarkStatus(False))  # the checkpoint may say that it was idle
        self.query.log.plan_due_watermark(always=True)
        self._followed = self.query.log.newest_planned()
        self._fused.starts()
        self.start_query({"availableNow": True} if self._ends_by_itself else None, self._limit if self._limits.limits else None)

    def _limit(self) -> None:
        self._fused.limit(self._limits.limits, jvm_of(self.parts.spark))

    def step(self) -> None:
        if not self.machine.running:
            return
        with self.query.lock_if_free() as free:
            asked = self._new_batches() if free else []
            if free:
                self.watermarks.forward()
        for event in asked:
            self.handle(event)
        self.measure_backlog()
        if self.machine.running and self._advance_is_due:
            assert self._event_time is not None
            if self.query.active and self._fused.advance_between_batches(self._event_time):
                self._reached = self._event_time

    def seconds_to_next_look(self) -> float:
        if self._advance_is_due:
            return POLL_SECONDS
        usual = super().seconds_to_next_look()
        return min(usual, self.seconds_until_end_is_seen) if self._state.some_held else usual

    def seconds_to_next_check(self) -> float:
        return self.seconds_until_end_is_seen if self._state.all_held else LOOK_SECONDS

    def check_query(self) -> None:
        super().check_query()
        if not self.machine.running:
            return
        if not self._ends_by_itself:
            if self._fused.none_has_rows() and not self._advance_is_due:
                self._report_nothing_new()
        elif not self.query.active:
            self.runs.check_query()  # it may have failed between the two checks
            self._report_nothing_new()
            if self.machine.running and self.query.holds_back(self._followed):
                self.launch_query()  # Spark's first question to a source gets the rows that it holds back, however few

    @property
    def _advance_is_due(self) -> bool:
        """Whether the query has not been told of the newest event time; it has no state before its first batch."""
        has_batch = self._followed >= 0
        return has_batch and self._keeps_state and self._event_time is not None and self._reached != self._event_time

    def source_caught_up(self, stage: str) -> bool:
        return self._fused.caught_up(stage)

    def _report_nothing_new(self) -> None:
        """Spark has found no rows in any source, since all batches so far."""
        with self.query.lock_if_free() as free:
            asked = self._new_batches() if free else []
        if free:
            for event in asked:
                self.handle(event)
            unmoved = self._fused.without_rows(self._open(), self._followed)
            # What these batches had may have moved event time: then a batch under that one is still to be run.
            self.handle(SourcesAsked(unmoved=tuple(unmoved), settled=not self._advance_is_due))

    def _new_batches(self) -> list[SourcesAsked]:
        """What the sources had in the batches that have been committed since the last call; call it under the query lock."""
        found = []
        for batch_id in range(self._followed + 1, self.query.log.last_committed() + 1):
            moved, unmoved = self._fused.asked(batch_id, self._open())
            watermarks, ran_under = self._watermarks_of.pop(batch_id, {}), self.query.log.planned(batch_id).watermark_ms
            found.append(SourcesAsked(tuple(moved), tuple(unmoved), watermarks, ran_under))
            self._followed = batch_id
        return found

    def _open(self) -> tuple[str, ...]:
        return tuple(name for name in self._names if name not in self._state.ended)

    def before_batch(self, batch_id: int) -> None:
        self._batch_id, self._began = batch_id, time.monotonic()
        self.watermarks.forward()
        if self.watermarks.idle:  # before the rows, or consumers would advance event time without them
            self.watermarks.send(WatermarkStatus(False))

    def after_emit(self, rows: int) -> None:
        read = self._fused.read()
        self._watermarks_of[self._batch_id] = {name: source.watermark for name, source in read.items()}
        if self._limits.limits:
            self._adapt_limits({name: source.rows for name, source in read.items()})
        wanted = self._event_time
        if wanted is not None and wanted != self._reached:
            self._fused.advance(wanted)
            self._reached = wanted

    def _adapt_limits(self, rows: Mapping[str, int]) -> None:
        """Limit the next batch by what this one had, and how long it took; Spark waits for the end of its processing."""
        amounts = self._fused.amounts()
        had = {name for name, amount in amounts.items() if amount} | rows.keys()
        read = {name: SourceRead(rows.get(name, 0), amounts.get(name, 0)) for name in had}
        self._limits.processed(time.monotonic() - self._began, read)
        self._limit()

    # The machine's actions

    def perform_on_inputs(self, action: TaskAction) -> None:
        match action:
            case HoldSources(sources):
                if not self._ends_by_itself:
                    for source in sources:
                        self._fused.hold(source)
            case AdvanceEventTime(ms):
                self._event_time = ms
                if not self._keeps_state:
                    self.watermarks.send(WatermarkReached(ms))
            case _:
                super().perform_on_inputs(action)

    def reach_max_watermark(self) -> None:
        # The running query has its state at hand; another one would load all of it again. While a source is open, rows may come.
        if self._state.all_ended and self._keeps_state and self._fused.has_run:
            self.runs.wait_until(lambda: self._fused.advance_between_batches(MAX_WATERMARK_MS))
            self.runs.wait_until(lambda: self._fused.has_run_under(MAX_WATERMARK_MS))
            self.stop_source()
            self.fire_timers()
        else:
            self.stop_source()
            super().reach_max_watermark()

    def committed_watermark(self, batch_id: int) -> int | None:
        if self.plan is None or not self.plan.own_watermark:
            return None
        if self.watermarks.stateful:
            return super().committed_watermark(batch_id)
        watermark = max(self.query.log.next_watermark(batch_id), self._event_time or 0)
        return watermark if watermark > 0 else None
