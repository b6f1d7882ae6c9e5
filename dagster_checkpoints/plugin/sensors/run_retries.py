"""Dagster's own retries of a failed run (``run_retries`` in dagster.yaml), for which the recovery sensor waits."""

from __future__ import annotations

import dagster as dg

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
