"""Event time in one task: the watermark that it sends, the late rows that its query dropped, and timers at the end of data.

The facts come from Spark's log and from the executed plan of each batch. It must not know the task's input channels, its life
cycle, nor how a batch is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.event_time import OutputEventTime
from dagster_checkpoints.execution.task_events import WatermarkReached
from dagster_checkpoints.spark.errors import EndlessTimersError, TimerRowsDroppedError
from dagster_checkpoints.spark.query.operators import StatefulOperators, output_watermark
from dagster_checkpoints.spark.query.query import TaskQuery
from dagster_checkpoints.spark.snapshots.query_snapshots import state_operators
from dagster_checkpoints.spark.tasks.counted_rows import LateRows
from dagster_checkpoints.spark.tasks.task_parts import TaskParts

TIMER_ROUNDS = 100  # maximum number of batches under MAX_WATERMARK for timers that are set by timers


class TaskWatermarks:
    """The event time of one task.

    Args:
        parts: The task's parts: its stages, its output, and its snapshot if the job was restored.
        query: The task's query.
        committed: Returns the output watermark after a committed batch, epoch ms; None if it is not known.

    Attributes:
        late_rows: The numbers of late rows dropped since the job began.
        stateful: Whether the query keeps state; None before a batch has run.
        operators: The number of its stateful operators: before a batch has run, of those that were restored.
    """

    def __init__(self, parts: TaskParts, query: TaskQuery, committed: Callable[[int], int | None]) -> None:
        restored = parts.restored.stages if parts.restored else {}
        self.late_rows = LateRows(parts.pipeline, parts.instances, {name: stage.late_rows for name, stage in restored.items()})
        self.stateful: bool | None = None
        self.operators = state_operators(query.checkpoint) if parts.restored else 0
        self._output = parts.output
        self._tail = parts.instances[-1]
        self._output_event_time = OutputEventTime(
            self._tail.stage.event_time_lateness_ms,
            parts.restored.watermark if parts.restored else None,
            None if parts.restored else False,
        )
        self._query = query
        self._committed = committed
        self._operators = StatefulOperators()
        self._watermark_delay: int | None = None
        self._act_on_event_time: bool | None = None
        self._forwarded_batch = -1
        self._warned_of_held_rows = False
        self._registered_timers = 0  # in the newest batch under MAX_WATERMARK

    @property
    def output(self) -> int | None:
        """The watermark that was sent last, epoch ms; None before the first one."""
        return self._output_event_time.watermark

    @property
    def idle(self) -> bool:
        """Whether the consumers were last sent that the task is idle."""
        return self._output_event_time.idle

    def behind_state(self, batch_id: int) -> int | None:
        """The output watermark of stateful operators after batch `batch_id` is committed; None if it is not known."""
        if not self.stateful or self._watermark_delay is None:
            return None
        # Operators that do nothing when event time advances get no batch for it: their held-back rows do not depend on it.
        log = self._query.log
        watermark = log.planned(batch_id).watermark_ms if self._act_on_event_time else log.next_watermark(batch_id)
        return watermark - self._watermark_delay if 0 < watermark < MAX_WATERMARK_MS else None

    def observe(self, batch_id: int, stateful_stages: Sequence[str]) -> None:
        """Read from the executed plan the late rows, and how much the output's watermark is earlier than the batch's.

        Call it under the query lock.

        Args:
            batch_id: The batch that has just been processed.
            stateful_stages: The stage of each stateful operator of the query's plan, from the top down.
        """
        if self.stateful is False:
            return
        executed = self._query.executed_plan()
        if executed is None:
            return
        if self.stateful is None:
            self.operators = self._operators.count(executed)
            self.stateful = self.operators > 0
        if not self.stateful:
            return
        watermark = self._query.log.planned(batch_id).watermark_ms
        if watermark > 0:
            self._count_late_rows(executed, batch_id, stateful_stages)
        if watermark >= MAX_WATERMARK_MS:
            self._registered_timers = self._operators.registered_timers(executed)
            self._warn_of_held_rows(executed, stateful_stages)
        if self._act_on_event_time is None:
            self._act_on_event_time = self._operators.act_on_event_time(executed)
        # It never changes. Operators that do not act on event time have none, and may never get a batch under a watermark.
        if self._watermark_delay is None and (watermark > 0 or not self._act_on_event_time):
            self._watermark_delay = watermark - output_watermark(executed, watermark)

    def _count_late_rows(self, executed: Any, batch_id: int, stateful_stages: Sequence[str]) -> None:
        dropped = self._operators.late_rows(executed)
        if any(dropped):  # Spark compares with the watermark of the previous batch
            self.late_rows.add(stateful_stages, dropped, self._query.log.planned(batch_id - 1).watermark_ms)

    def _warn_of_held_rows(self, executed: Any, stateful_stages: Sequence[str]) -> None:
        held = () if self._warned_of_held_rows else self._operators.held_at_the_end(executed)
        if not any(count for count, _ in held):
            return
        self._warned_of_held_rows = True
        known = len(stateful_stages) == len(held)
        for position, (count, of_one_side) in enumerate(held):
            if count:
                stage = stateful_stages[position] if known else self._tail.stage.name
                kept = (
                    "; or they are rows of the side without a bound in the join's condition, and nothing is missing"
                    if of_one_side
                    else ""
                )
                self._tail.call.context.log.warning(
                    f"Stage {stage!r}: {count:,} rows stay in its state at the end of data, and are not emitted: their event "
                    f"time is null, so they are never due{kept}. It is an outer join of streams or a group by the event time; of "
                    "an outer join, rows that had a match were emitted with it. Give such rows a time (F.coalesce), or take them "
                    "out before this stage (where(F.col(<the event time>).isNotNull())) and write them to a table of their own."
                )

    def forward(self) -> None:
        """Send the watermark of all rows emitted so far, if it has advanced; call it under the query lock."""
        batch_id = self._query.log.last_committed()
        # Before the first batch of an attempt the meaning of the watermark is not known; a restored task has sent its batch's
        # watermark before the barrier.
        if batch_id == self._forwarded_batch or batch_id < 0 or self.stateful is None:
            return
        self._forwarded_batch = batch_id
        if self._query.log.planned(batch_id).watermark_ms >= MAX_WATERMARK_MS:
            return  # timers may be set by timers
        watermark = self._committed(batch_id)
        if watermark is not None:
            self.send(WatermarkReached(watermark))

    def send(self, event: WatermarkReached | WatermarkAt | WatermarkStatus) -> None:
        """Send the marks of an event; see `OutputEventTime`. Call it under the query lock, or when no query runs."""
        for mark in self._output_event_time.handle(event):
            self._output.append(mark)

    def fire_timers(self, run_batch: Callable[[int], None]) -> None:
        """Run batches under MAX_WATERMARK until no timer is set by a timer; the query is stopped, and one such batch has run.

        Spark fires the timers that exist when a batch begins. A timer that is set when another one fires waits for the next
        batch, and Spark plans none after the end of event time.

        Args:
            run_batch: Runs one batch without input under a watermark, epoch ms, and waits for its end.

        Raises:
            EndlessTimersError: Timers still set timers after the last round.
            TimerRowsDroppedError: A later stateful operator in the same query has already dropped its state.
        """
        for _ in range(TIMER_ROUNDS):
            if not self._registered_timers:
                return
            dropped = self.late_rows.total
            run_batch(MAX_WATERMARK_MS)
            if self.late_rows.total > dropped:
                raise TimerRowsDroppedError(
                    self._tail.stage.name,
                    self._tail.call.context.instance,
                    "at the end of data, timers that were set by timers emitted rows for another stateful operator of the same "
                    "query, which had emitted its last rows by then: they would be lost. Put the operator after the timers into "
                    "a separate stage, and give the pipeline chaining=False.",
                )
        if self._registered_timers:
            raise EndlessTimersError(
                self._tail.stage.name,
                self._tail.call.context.instance,
                f"at the end of data, timers still set timers after {TIMER_ROUNDS} rounds. A timer that sets itself again has no "
                "end: do not set it when timerValues.getCurrentWatermarkInMs() is at the end of event time "
                f"({MAX_WATERMARK_MS}, the last second of the year 9999).",
            )
