"""The runs of a pipeline in a Dagster instance, as its sensors and schedules find them.

It must not know what a sensor does with a run.
"""

from __future__ import annotations

from collections.abc import Sequence

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
