"""Schedules of a pipeline's runs: a tick starts none while one is alive."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from dagster_checkpoints.control.last_sign import last_sign
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.pipeline_runs import runs_of
from dagster_checkpoints.plugin.sensors.pipeline_sensor import TRANSIENT, RunningPipeline, find_run_for_schedule, not_reached
from dagster_checkpoints.plugin.stage_assets import NotAPipelineAssetError, stage_keys, takes_run_config

_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_ALIVE = [status for status in dg.DagsterRunStatus if status not in _ENDED]


def build_run_schedule(
    *,
    pipeline: Pipeline,
    job: Any,
    cron_schedule: str,
    name: str | None = None,
    execution_timezone: str | None = None,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.ScheduleDefinition:
    """A schedule that runs the pipeline, and skips a tick while a run is alive: a second run would be refused, and fail.

    A run whose process was killed counts as alive until Dagster has marked it as failed. So does the recovery sensor's run that
    waits in the queue.

    Args:
        pipeline: The pipeline.
        job: The job that runs it.
        cron_schedule: The times of the runs, as a cron expression.
        name: The schedule's name; default: the pipeline's name and `_runs`.
        execution_timezone: The time zone of the cron expression; default: UTC.
        default_status: Whether the schedule runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Examples:
        >>> build_run_schedule(pipeline=flights, job=flights_job, cron_schedule="0 3 * * *")
    """
    schedule_name = name or f"{pipeline.name}_runs"
    what = f"Runs of pipeline {pipeline.name!r}, one at a time."
    return _schedule(pipeline, job, schedule_name, what, {}, cron_schedule, execution_timezone, default_status, resource_key)


def build_burst_schedule(
    *,
    pipeline: Pipeline,
    assets: dg.AssetsDefinition,
    job: Any,
    cron_schedule: str,
    name: str | None = None,
    execution_timezone: str | None = None,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.ScheduleDefinition:
    """A schedule that runs the pipeline in bursts: a run reads what is there when it begins, commits it, and suspends; the run of
    the next tick goes on from there. A tick is skipped while a run is alive, as by :func:`build_run_schedule`.

    Windows that event time has passed are emitted, open ones wait in the state for the next burst. Bounded stages are read to
    their end by the first burst. A burst's own savepoint is deleted by the next one, and is not recorded as a savepoint. Its runs
    have ``until: caught_up`` in their configuration (:class:`PipelineRunConfig`).

    Args:
        pipeline: The pipeline.
        assets: The assets that `@pipeline_assets` created for it.
        job: The job that runs it.
        cron_schedule: The times of the bursts, as a cron expression.
        name: The schedule's name; default: the pipeline's name and `_bursts`.
        execution_timezone: The time zone of the cron expression; default: UTC.
        default_status: Whether the schedule runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        NotAPipelineAssetError: The assets are not this pipeline's, or their configuration has no `until`.

    Examples:
        >>> build_burst_schedule(pipeline=flights, assets=flights_assets, job=flights_job, cron_schedule="*/15 * * * *")
    """
    stage_keys(assets, pipeline)
    op_name = assets.node_def.name
    if not takes_run_config(assets, "until"):
        raise NotAPipelineAssetError(
            f"build_burst_schedule of pipeline {pipeline.name!r}: expected that the configuration of {op_name!r} has the setting "
            "'until', found another one. Leave out the function's parameter `config`, or give it the type PipelineRunConfig or a "
            "class of your own that extends it, and hand it to run(config=...)"
        )
    config = {"ops": {op_name: {"config": {"until": "caught_up"}}}}
    schedule_name = name or f"{pipeline.name}_bursts"
    what = f"Bursts of pipeline {pipeline.name!r}: each run reads what is there, and suspends."
    return _schedule(pipeline, job, schedule_name, what, config, cron_schedule, execution_timezone, default_status, resource_key)


def _schedule(
    pipeline: Pipeline,
    job: Any,
    name: str,
    description: str,
    run_config: Mapping[str, Any],
    cron_schedule: str,
    execution_timezone: str | None,
    default_status: dg.DefaultScheduleStatus,
    resource_key: str,
) -> dg.ScheduleDefinition:
    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        required_resource_keys={resource_key},
        description=description,
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        try:
            running = find_run_for_schedule(context, pipeline, name, resource_key)
        except TRANSIENT as error:
            return dg.SkipReason(not_reached(error, "This tick starts no run."))
        location = running.state.origin.code_location if running.state is not None else ""
        alive = runs_of(context.instance, pipeline, [job.name], location, _ALIVE)
        if alive:
            run = alive[0].dagster_run
            return dg.SkipReason(f"Run {run.run_id} of {run.job_name} is {run.status.value}.")
        if isinstance(running, RunningPipeline) and _may_live(running, context.instance):
            return dg.SkipReason(f"Run {running.run_id} runs the pipeline.")
        return dg.RunRequest(run_config=dict(run_config))

    return tick


def _may_live(running: RunningPipeline, instance: dg.DagsterInstance) -> bool:
    """Whether the run that owns the pipeline may be alive: after a process was killed, its lease is still there."""
    run = instance.get_run_by_id(running.run_id)
    if run is not None:
        return not run.is_finished
    sign = last_sign(running.state, running.status, datetime.now(UTC))  # it was deleted, or is of another Dagster instance
    return sign is not None and not sign.dead
