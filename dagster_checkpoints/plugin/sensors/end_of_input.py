"""The end-of-input sensor: ends one source when an asset outside the pipeline has been materialized."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg
import msgspec

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.conditions import ConditionContext, assets_materialized, has_ended
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    NotRunning,
    RunningPipeline,
    SensorTick,
    pipeline_sensor,
    skip,
)
from dagster_checkpoints.plugin.sensors.repeated_request import RepeatedRequest, RequestCursor


class NotASourceError(DagsterCheckpointsError):
    """The stage whose end is configured is not a source, or does not have the instance."""


class _EndOfInputCursor(RequestCursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    done: whether the source has ended.
    """

    done: bool = False


def build_end_of_input_sensor(
    *,
    pipeline: Pipeline,
    source: str,
    after: dg.AssetKey | str | Sequence[dg.AssetKey],
    instance: str | None = None,
    name: str | None = None,
    deadline: float = 600.0,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that ends a source of the running pipeline, as if its input were exhausted, when an asset was materialized.

    The rest of the pipeline continues; a pipeline finishes when all its sources have ended. The asset counts if it was
    materialized after the pipeline's job began. A run that continues the job after a crash gets the request again, unless the
    source had ended.

    Args:
        pipeline: The pipeline.
        source: The name of the source that ends.
        after: The key of the asset, or the keys of several: the source ends when all were materialized.
        instance: The instance of the source that ends; default: all instances.
        name: The sensor's name; default: composed of the pipeline's and the source's names.
        deadline: Seconds within which the pipeline must answer.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        UnknownStageError: The pipeline has no such stage.
        NotASourceError: The stage is not a source, or has no such instance.
        InvalidDurationError: `deadline` is not a number of seconds above 0.

    Examples:
        >>> build_end_of_input_sensor(pipeline=flights, source="flights_live", after="december_is_complete")
    """
    check_seconds("build_end_of_input_sensor", above=0, deadline=deadline)
    stage = pipeline.stage(source)
    if not stage.kind.is_source or (instance is not None and instance not in stage.instances):
        sources = ", ".join(f"{each.name} ({', '.join(each.instances)})" for each in pipeline.stages if each.kind.is_source)
        raise NotASourceError(
            f"expected a source of pipeline {pipeline.name!r}, and one of its instances or none, found stage {source!r}, "
            f"instance {instance!r}. Its sources, with their instances: {sources}"
        )
    condition = assets_materialized(*([after] if isinstance(after, str | dg.AssetKey) else after))
    what = source if instance is None else f"{source}[{instance}]"
    sensor_name = name or "_".join([pipeline.name, "end", source, *([_plain(instance)] if instance is not None else [])])

    end: RepeatedRequest[_EndOfInputCursor] = RepeatedRequest(
        sensor_name,
        _EndOfInputCursor,
        f"end {what} of run {{run}}",
        lambda control, request: control.end_source(source, instance, request_id=request, deadline=deadline),
    )

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        running = tick.control.find_run()
        if isinstance(running, NotRunning):
            return skip(running.text, _EndOfInputCursor())
        before = end.read(tick, running)
        if before.done or _ended(running, source, instance):
            return skip(f"{what} has ended.", msgspec.structs.replace(before, done=True))
        progress = end.poll(tick, before)
        if progress.under_way:
            if progress.answer is None or progress.answer.status != "done":
                return skip(f"Run {running.run_id} was asked to end {what} ({before.asked}), and has not answered yet.", before)
            return skip(f"{what} was ended (request {before.asked}).", msgspec.structs.replace(before, done=True))
        given_up = end.give_up(progress)
        if given_up is not None:
            return given_up
        result = condition.look(ConditionContext(pipeline, running, tick.dagster.instance, tick.now, tick.head))
        if not result.holds:
            return skip(f"{progress.failed}{what} continues: {result.text}.", progress.cursor)
        return end.send_next(
            tick, progress, lambda request: f"Asked run {running.run_id} to end {what} (request {request}): {result.text}."
        )

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=sensor_name,
        description=f"Ends {what} of pipeline {pipeline.name!r} when its input has become complete.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
    )


def _ended(running: RunningPipeline, source: str, instance: str | None) -> bool:
    stages = running.status.stages if running.status is not None else ()
    return any(has_ended(stage, instance) for stage in stages if stage.name == source)


def _plain(instance: str) -> str:
    """An instance's name with only the characters that a sensor's name may have."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in instance)
