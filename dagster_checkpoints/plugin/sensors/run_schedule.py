"""The schedule of a pipeline's runs: a tick starts none while one is alive."""

from __future__ import annotations

from typing import Any

import dagster as dg

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints import RESOURCE
from dagster_checkpoints.plugin.sensors.pipeline_sensor import TRANSIENT, NotRunning, find_run_for_schedule

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

    A run whose process was killed counts as alive until Dagster has marked it as failed.

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

    @dg.schedule(
        name=schedule_name,
        job=job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        required_resource_keys={resource_key},
        description=f"Runs of pipeline {pipeline.name!r}, one at a time.",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        instance = context.instance
        of_job = instance.get_runs(dg.RunsFilter(job_name=job.name, statuses=_ALIVE), limit=1)
        if of_job:
            return dg.SkipReason(f"Run {of_job[0].run_id} of {job.name} is {of_job[0].status.value}.")

        try:
            running = find_run_for_schedule(context, pipeline, schedule_name, resource_key)
        except TRANSIENT as error:
            return dg.SkipReason(f"{error} This tick starts no run.")
        if isinstance(running, NotRunning):
            return dg.RunRequest()
        owner = instance.get_run_by_id(running.run_id)
        if owner is not None and owner.is_finished:  # its process was killed, and the lease is still there
            return dg.RunRequest()
        return dg.SkipReason(f"Run {running.run_id} runs the pipeline.")

    return tick
