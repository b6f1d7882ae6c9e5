"""The drain sensor and the suspend sensor: they request a stop of the run when a condition holds, once per run."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg
import msgspec

from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.execution.job_requests import BoundedSources
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.conditions import (
    ConditionContext,
    ConditionResult,
    DrainCondition,
    bounded_stages_finished,
)
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    NotRunning,
    RunningPipeline,
    SensorTick,
    pipeline_sensor,
    read_cursor,
    skip,
)
from dagster_checkpoints.plugin.sensors.repeated_request import Progress, RepeatedRequest, RequestCursor
from dagster_checkpoints.storage.layout import validate_savepoint_name

_REPORTS_APART = 2
"""Least difference between the numbers of the two status reports that confirm a condition: the pipeline has collected and
written the second report after the first tick."""


class _StopCursor(RequestCursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    key: the alternative that held in the last tick, if it needs confirmation.
    sequence: the number of the status report in which it held.
    """

    key: str | None = None
    sequence: int = 0


def build_drain_sensor(
    *,
    pipeline: Pipeline,
    when: DrainCondition,
    bounded: BoundedSources = "finish",
    name: str | None = None,
    deadline: float = 3600.0,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that drains the running pipeline when a condition holds: every window is emitted, all rows are committed, the run
    ends.

    It never waits: it sends a request, and reads the answer in a later tick. A run is drained once. After a drain that fails the
    pipeline continues from its latest checkpoint, and the sensor requests the drain again, at most three times. An event that
    ended an earlier job does not end a later one: conditions use only events since the job began.

    Args:
        pipeline: The pipeline to drain.
        when: The condition; see `all_of`, `any_of`, `assets_materialized`, `bounded_stages_finished`, `live_lag_zero`,
            `marker_object`, `at_time` and `when` beside this function.
        bounded: "finish": the sensor does not drain before all bounded stages have finished; "cut": the drain ends bounded
            sources where they are, and their other rows are in no table.
        name: The sensor's name; default: the pipeline's name and `_drain`.
        deadline: Seconds that the drain may take.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        InvalidDurationError: `deadline` is not a number of seconds above 0.
        InvalidRequest: `name` cannot be a savepoint's name.

    Examples:
        >>> build_drain_sensor(pipeline=flights, when=bounded_stages_finished() & live_lag_zero())
    """
    return _stop_sensor(_DRAIN, pipeline, when, name, deadline, minimum_interval_seconds, default_status, resource_key, bounded)


def build_suspend_sensor(
    *,
    pipeline: Pipeline,
    when: DrainCondition,
    name: str | None = None,
    deadline: float = 600.0,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that suspends the running pipeline when a condition holds: a savepoint is taken, all rows that stages have emitted
    are committed, open windows stay in the state, the run ends, and the next run continues from there.

    With `live_lag_zero()` and :func:`build_run_schedule` a feed is read in bursts. The job goes on in the next run: a condition
    that looks back to the job's beginning (`assets_materialized`, `marker_object`, `at_time`) holds there at once.

    Args:
        pipeline: The pipeline to suspend.
        when: The condition, as for :func:`build_drain_sensor`.
        name: The sensor's name; default: the pipeline's name and `_suspend`.
        deadline: Seconds that the savepoint may take.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        InvalidDurationError: `deadline` is not a number of seconds above 0.
        InvalidRequest: `name` cannot be a savepoint's name.

    Examples:
        >>> build_suspend_sensor(pipeline=flights, when=bounded_stages_finished() & live_lag_zero())
    """
    return _stop_sensor(_SUSPEND, pipeline, when, name, deadline, minimum_interval_seconds, default_status, resource_key)


@dataclass(frozen=True)
class _Words:
    """A kind of stop, in texts."""

    drain: bool
    do: str
    does: str
    done: str


_DRAIN = _Words(True, "drain", "drains", "drained")
_SUSPEND = _Words(False, "suspend", "suspends", "suspended")


def _stop_sensor(
    words: _Words,
    pipeline: Pipeline,
    when: DrainCondition,
    name: str | None,
    deadline: float,
    minimum_interval_seconds: int,
    default_status: dg.DefaultSensorStatus,
    resource_key: str,
    bounded: BoundedSources = "cut",
) -> dg.SensorDefinition:
    check_seconds(f"build_{words.do}_sensor", above=0, deadline=deadline)
    sensor_name = validate_savepoint_name(name or f"{pipeline.name}_{words.do}")  # the savepoint's name, too
    stop: RepeatedRequest[_StopCursor] = RepeatedRequest(
        sensor_name,
        _StopCursor,
        f"{words.do} run {{run}}",
        lambda control, request: control.stop(
            drain=words.drain, bounded=bounded, name=sensor_name, request_id=request, deadline=deadline
        ),
    )

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        running = tick.control.find_run()
        if isinstance(running, NotRunning):
            asked = read_cursor(tick.dagster.cursor, _StopCursor).asked
            answer = tick.control.poll(asked) if asked else None
            if answer is not None and answer.status == "done":
                return skip(f"{_done(words, answer)}. {running.text}", _StopCursor())
            return skip(running.text, _StopCursor())
        progress = stop.poll(tick, stop.read(tick, running))
        if progress.under_way:
            return skip(_under_way(words, progress.cursor.asked, running, progress.answer), progress.cursor)
        given_up = stop.give_up(progress)
        if given_up is not None:
            return given_up
        before, failed = progress.cursor, progress.failed
        if running.status is not None and running.status.stop is not None:
            return skip(f"{failed}The pipeline is being stopped already (request {running.status.stop.request_id}).", before)
        context = ConditionContext(pipeline, running, tick.dagster.instance, tick.now, tick.head)
        result = when.look(context)
        tick.dagster.log.info(
            f"Run {running.run_id}, job {running.job_id}. Condition: {when.describe()}. "
            f"It is {'met' if result.holds else 'not met'}: {result.text}."
        )
        return _decide(tick, progress, context, result)

    def _decide(
        tick: SensorTick, progress: Progress[_StopCursor], context: ConditionContext, result: ConditionResult
    ) -> dg.SensorResult:
        before, failed, running = progress.cursor, progress.failed, context.running
        if not result.holds:
            return skip(f"{failed}Not {words.done}: {result.text}.", msgspec.structs.replace(before, key=None, sequence=0))
        if words.drain and bounded == "finish" and not (finished := bounded_stages_finished().look(context)).holds:
            return skip(f"{failed}Condition met ({result.text}), but bounded stages go on: {finished.text}.", before)
        sequence = running.status.sequence if running.status is not None else 0
        if result.needs_confirmation and not (before.key == result.key and sequence >= before.sequence + _REPORTS_APART):
            if before.key != result.key:
                before = msgspec.structs.replace(before, key=result.key, sequence=sequence)
            return skip(f"{failed}Condition met; confirming at the next tick: {result.text}.", before)
        return stop.send_next(
            tick, progress, lambda request: f"Asked run {running.run_id} to {words.do} (request {request}): {result.text}."
        )

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=sensor_name,
        description=f"{words.does.capitalize()} pipeline {pipeline.name!r} when {when.describe()}.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
    )


def _done(words: _Words, answer: Answer) -> str:
    return f"{words.done.capitalize()} with savepoint {answer.checkpoint_id} ({answer.url})"


def _under_way(words: _Words, asked: str, running: RunningPipeline, answer: Answer | None) -> str:
    if answer is None:
        return f"Run {running.run_id} has not yet seen the request to {words.do} ({asked})."
    if answer.status == "done":
        return f"{_done(words, answer)}; the run is ending."
    stop = running.status.stop if running.status is not None else None
    return f"Run {running.run_id} {words.does} (request {asked}{f', {stop.text}' if stop is not None else ''})."
