"""The runs of a pipeline in a Dagster instance, as sensors and schedules find them.

Dagster itself may retry a failed one (``run_retries`` in dagster.yaml): the recovery sensor waits for that. A newer run may wait
behind the one that owned the pipeline: in the run queue, for a slot of a pool or for the lease. It continues the job by itself,
unless a dead owner holds what it waits for. It must not know what a sensor does with a run, nor the pipeline's storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import dagster as dg

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.stage_assets import PIPELINE, REFUSED

_NEWEST = 50


def runs_of(
    instance: dg.DagsterInstance,
    pipeline: Pipeline,
    job_names: Sequence[str],
    location: str,
    statuses: Sequence[dg.DagsterRunStatus] = (),
) -> list[dg.RunRecord]:
    """The newest runs with the pipeline's tag, and those of jobs that run it, newest first.

    A run has the tag when its op begins, or when the recovery sensor has launched it. The names of pipelines and jobs are unique
    in a code location only: runs of another one are those of another pipeline.

    Args:
        instance: The Dagster instance.
        pipeline: The pipeline.
        job_names: The names of jobs that run it.
        location: The name of the code location; "" if it is not known: then the runs of all code locations.
        statuses: The statuses of the runs; empty for all.
    """
    filters = [
        dg.RunsFilter(tags={PIPELINE: pipeline.name}, statuses=list(statuses)),
        *(dg.RunsFilter(job_name=name, statuses=list(statuses)) for name in job_names),
    ]
    records = {record.storage_id: record for wanted in filters for record in instance.get_run_records(wanted, limit=_NEWEST)}
    newest_first = [records[storage_id] for storage_id in sorted(records, reverse=True)]
    return [record for record in newest_first if not elsewhere(record.dagster_run, location)]


def location_of(context: dg.SensorEvaluationContext) -> str:
    """The name of a sensor's code location; "" if it is not known, as in a test."""
    return context.code_location_origin.location_name if context.code_location_origin is not None else ""


def was_refused(run: dg.DagsterRun) -> bool:
    """Whether a run was refused, so that it is not a run of the pipeline.

    A re-execution has a copy of the refused run's tags: before its own end, they say nothing of it.
    """
    return run.is_finished and bool(run.tags.get(REFUSED))


def elsewhere(run: dg.DagsterRun, location: str) -> str:
    """The name of a run's code location, if it is another one than `location`; "" if not, or if one of them is not known."""
    job = run.remote_job_origin
    name = job.repository_origin.code_location_origin.location_name if job is not None else ""
    return name if location and name != location else ""


_WILL_RETRY = "dagster/will_retry"
_RETRIED_BY = "dagster/auto_retry_run_id"
_LAUNCH_SECONDS = 600.0
"""Dagster plans a retry within seconds. It drops one without a word in the tags, for example if the job has another name now."""


def pending_retry(instance: dg.DagsterInstance, failed: dg.RunRecord, now: float) -> str:
    """What Dagster still does about a failed run, as people read it; "" if nothing.

    A retry may fail, and be retried: the last run of that sequence counts.

    Args:
        instance: Dagster's instance; without ``run_retries`` it retries nothing, whatever the run's tags say.
        failed: The failed run.
        now: The sensors' clock, seconds since 1970.
    """
    last = failed
    while instance.run_retries_enabled and _is_to_be_retried(last.dagster_run):
        retry = last.dagster_run.tags.get(_RETRIED_BY)
        if retry is None:
            ended = last.end_time or last.update_timestamp.timestamp()
            awaited = now - ended < _LAUNCH_SECONDS
            return f"Dagster is going to retry run {last.dagster_run.run_id} (run_retries)." if awaited else ""
        found = instance.get_run_record_by_id(retry)
        if found is None:
            return ""
        last = found
    run = last.dagster_run
    return "" if run.is_finished else f"Dagster retries it (run_retries): run {run.run_id} is {run.status.value}."


def _is_to_be_retried(run: dg.DagsterRun) -> bool:
    return run.status is dg.DagsterRunStatus.FAILURE and run.tags.get(_WILL_RETRY) == "true"


_STOPPED = (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_ENDED = (*_STOPPED, dg.DagsterRunStatus.SUCCESS)


class OwnerAction(Enum):
    """What to do about the owner."""

    LEAVE = auto()
    """Nothing, at this tick."""
    WATCH = auto()
    """Dagster takes it for alive: mark it as failed if its silence lasts."""
    FREE_POOLS = auto()
    """It has failed or was cancelled, and its process is dead: give back the slots that it holds in pools."""


def owner_action(owner: dg.DagsterRunStatus, waiting: dg.DagsterRunStatus, *, renews: bool) -> OwnerAction:
    """What to do about a run that owns the pipeline, or owned it last, and is not its newest run.

    Args:
        owner: The owner's status.
        waiting: The status of the pipeline's newest run.
        renews: Whether the owner may still renew its lease.
    """
    if waiting in _ENDED:
        return OwnerAction.LEAVE
    if owner is dg.DagsterRunStatus.STARTED:
        return OwnerAction.WATCH
    return OwnerAction.FREE_POOLS if owner in _STOPPED and not renews else OwnerAction.LEAVE
