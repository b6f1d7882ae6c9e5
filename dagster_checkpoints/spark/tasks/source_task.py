"""Tasks that begin with a source: a streaming query of the user, or a batch DataFrame that is evaluated once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import WatermarkStatus
from dagster_checkpoints.execution.source_answers import SourceLook
from dagster_checkpoints.execution.task_events import BacklogMeasured, EndInput, SourceExhausted
from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.spark.query.query_sessions import polling_of
from dagster_checkpoints.spark.tasks.messages import Mail
from dagster_checkpoints.spark.tasks.query_runs import POLL_SECONDS
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.spark.tasks.task_parts import TaskParts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MEASURE_SECONDS = 1.0
"""Time between two measurements of a backlog."""


class QueryOfSourcesTask(Task):
    """What tasks have in common whose query reads sources, not channels."""

    _next_measure = 0.0

    def query_settings(self, frame: DataFrame) -> dict[str, str]:
        return super().query_settings(frame) | polling_of(frame, self.parts.pipeline.unbounded_streams)

    def caught_up(self, stage: str) -> bool | None:
        if not self.machine.running or self.machine.has_read_all:
            return True
        if not self.query.started:
            return None
        try:
            return self.source_caught_up(stage)
        except Exception:  # the query is being stopped at this moment
            return None

    def source_caught_up(self, stage: str) -> bool:
        """Whether a source, or all sources of a stage behind them, have caught up; their query has started. Any thread."""
        return self.query.caught_up()

    def look_at_sources(self) -> SourceLook | None:
        if not self.machine.running or self.query.paused or self.output.is_held_back:
            return None
        try:
            look = self.query.look()
        except Exception:  # the query is being stopped at this moment
            return None
        # Later batches show by their rows that they are read.
        return replace(look, doing="other") if look is not None and look.doing == "reading" and self.has_first_batch else look

    @property
    def rows_behind(self) -> int | None:
        try:
            return self.query.rows_behind if self.machine.running else None
        except Exception:  # the query is being stopped at this moment
            return None

    def measure_backlog(self) -> None:
        """Tell the machine how much is unread, every second, if a setting of the job depends on it."""
        if self.parts.checkpoints.backlog_rows is None or time.monotonic() < self._next_measure:
            return
        self._next_measure = time.monotonic() + MEASURE_SECONDS
        self.handle(BacklogMeasured(self.rows_behind))

    def stop_source(self) -> None:
        self.query.stop()
        self.query.log.forget_planned_after(self.query.log.last_committed())

    def reach_max_watermark(self) -> None:
        if self.query.log.last_committed() >= 0 and self.query.log.holds_state():
            self.run_planned_batch(MAX_WATERMARK_MS)
            self.fire_timers()


class SourceTask(QueryOfSourcesTask):
    """A chain that begins with a streaming source.

    A bounded source runs with `availableNow` and ends when Spark has read all its input; an unbounded one runs until a request
    ends it. In a burst it runs with `availableNow`, too, and the task waits for the job's suspend when Spark's query has ended.

    Args:
        parts: The task's parts.
        bounded: Whether the source is bounded.
    """

    def __init__(self, parts: TaskParts, bounded: bool) -> None:
        super().__init__(parts, _machine(parts, bounded=bounded))
        self._ends_by_itself = bounded or parts.burst
        watermark = parts.instances[0].stage.watermark
        self._idle_after = watermark.idle_after if watermark else None
        self._by_the_clock = parts.plan is not None and parts.plan.fires_by_the_clock
        self._last_busy_at = time.monotonic()
        self._idle = False
        self._end_due: EndInput | None = None
        """The message that ends the source: it waits for the end of the batch that runs, and checkpoints do not."""

    def seconds_to_next_look(self) -> float:
        if self._end_due is not None:
            return POLL_SECONDS
        usual = super().seconds_to_next_look()
        return min(usual, self.seconds_until_end_is_seen) if self._ends_by_itself else usual

    def seconds_to_next_check(self) -> float:
        return self.seconds_until_end_is_seen if self._ends_by_itself else super().seconds_to_next_check()

    def take(self, mail: Mail) -> None:
        if isinstance(mail, EndInput) and self.machine.running:
            self._end_due = mail
            self.query.admit_no_batch()
        else:
            super().take(mail)

    def launch_query(self) -> None:
        self.watermarks.send(WatermarkStatus(False))  # the checkpoint may say that it was idle
        self.query.log.plan_due_watermark(always=self._by_the_clock)
        self.start_query({"availableNow": True} if self._ends_by_itself else None)

    def step(self) -> None:
        if not self.machine.running:
            return
        with self.query.lock_if_free() as free:
            if free:
                self.watermarks.forward()
                self._watch_idleness()
        if free and self._end_due is not None:
            self.handle(self._end_due)
            return
        self.measure_backlog()

    def check_query(self) -> None:
        super().check_query()
        if not self._ends_by_itself or not self.machine.running or self.machine.has_read_all:
            return
        if self._by_the_clock and self.query.waits_for_the_clock:
            self.stop_source()
        if not self.query.active:
            self.runs.check_query()  # it may have failed between the two checks
            if self._end_due is None and self.query.holds_back(self.query.log.newest_planned()):
                self.launch_query()  # Spark's first question to a source gets the rows that it holds back, however few
            else:
                self.handle(SourceExhausted())

    def committed_watermark(self, batch_id: int) -> int | None:
        if self.plan is None or not self.plan.own_watermark:
            return None
        if self.watermarks.stateful:
            return super().committed_watermark(batch_id)
        watermark = self.query.log.next_watermark(batch_id)
        return watermark if watermark > 0 else None

    def before_batch(self, batch_id: int) -> None:
        self.watermarks.forward()
        self._set_idle(False)  # before the rows, or consumers would advance event time without them

    def after_emit(self, rows: int) -> None:
        self._last_busy_at = time.monotonic()

    def _watch_idleness(self) -> None:
        """Mark a source as idle if it has looked for rows and found none during its idle time.

        A source that has not looked for rows yet, or whose rows wait for a slow consumer, is not idle.
        """
        if self._idle_after is None or self._idle:
            return
        if not self.query.caught_up():
            self._last_busy_at = time.monotonic()
        elif time.monotonic() - self._last_busy_at > self._idle_after:
            self._set_idle(True)

    def _set_idle(self, idle: bool) -> None:
        self._idle = idle
        self.watermarks.send(WatermarkStatus(idle))


class BatchTask(Task):
    """A source that returned a batch DataFrame: evaluated once, as one micro-batch; then its data has ended.

    Barriers come after the batch; a restore from an earlier checkpoint evaluates the DataFrame again, a restore from a later
    checkpoint never does.

    Args:
        parts: The task's parts.
    """

    def __init__(self, parts: TaskParts) -> None:
        super().__init__(parts, _machine(parts, bounded=True, streaming=False))

    def step(self) -> None:
        """Nothing is left to do: the task evaluated the DataFrame when it began."""

    def reach_max_watermark(self) -> None:
        """Nothing waits for the end of event time."""


def _machine(parts: TaskParts, *, bounded: bool, streaming: bool = True) -> TaskMachine:
    return parts.make_machine(
        time.monotonic(),
        task=parts.id,
        config=parts.checkpoints,
        traits=parts.traits(bounded=bounded, streaming=streaming),
    )
