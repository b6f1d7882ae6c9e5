"""The lineage of a Dagster run: the runs that it repeats, the steps beside the pipeline, and its code location and instance.

This module must not know the decisions that depend on the lineage.
"""

from __future__ import annotations

from contextlib import suppress

import dagster as dg

from dagster_checkpoints.execution.origin import Origin
from dagster_checkpoints.plugin.run_tags import RECOVERS, RETRY_NUMBER
from dagster_checkpoints.plugin.stage_assets import StageAssets

PARENT_RUN_ID_TAG = "dagster/parent_run_id"
ROOT_RUN_ID_TAG = "dagster/root_run_id"
"""The tags that Dagster gives to run retries and re-executions."""


def earlier_runs(context: dg.AssetExecutionContext) -> frozenset[str]:
    """Ids of the runs that this run repeats, directly or indirectly, as a retry, a re-execution or a recovery; and its own.

    A run repeats itself where Dagster begins its op again: ``op_retry_policy``, after the op's process has died; or another
    worker of the run for one that was lost, ``run_monitoring.max_resume_run_attempts``, which the op cannot tell from the first.
    """
    found = {context.run.run_id}
    new: list[dg.DagsterRun | None] = [context.run]
    while new:
        run = new.pop()
        repeated = _repeats(context.instance, run) - found if run is not None else set[str]()
        found |= repeated
        new += [context.instance.get_run_by_id(run_id) for run_id in repeated]
    return frozenset(found)


def retried_runs(context: dg.AssetExecutionContext) -> frozenset[str]:
    """Those of the earlier runs that this run repeats without a person's doing, and its own: Dagster has retried the failed run,
    or the recovery sensor has started it again. A person who re-executes a run may want a new start.
    """
    found = [context.run.run_id]
    run: dg.DagsterRun | None = context.run
    while run is not None and found.count(run.run_id) == 1:
        parent = run.parent_run_id or run.tags.get(PARENT_RUN_ID_TAG)
        repeated = parent if RETRY_NUMBER in run.tags else None if parent else run.tags.get(RECOVERS)
        found += [repeated] if repeated else []
        run = context.instance.get_run_by_id(repeated) if repeated else None
    return frozenset(found)


def _repeats(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[str]:
    """The runs that a run repeats, and those that have repeated the same one.

    All runs with the same root run count, because several of them may have repeated the same run; and the failed run that a run
    of the recovery sensor recovers.
    """
    root = run.root_run_id or run.tags.get(ROOT_RUN_ID_TAG)
    related = instance.get_runs(dg.RunsFilter(tags={ROOT_RUN_ID_TAG: root})) if root is not None else []
    named = (root, run.parent_run_id or run.tags.get(PARENT_RUN_ID_TAG), run.tags.get(RECOVERS))
    return {*(each.run_id for each in related), *(each for each in named if each)}


def other_steps(context: dg.AssetExecutionContext) -> list[str]:
    """The steps of a run beside the op that runs, as far as the run executes them."""
    chosen = context.run.step_keys_to_execute
    names = {node.name for node in context.job_def.nodes} - {context.op_execution_context.op_handle.path[0]}
    return sorted(names if chosen is None else names & set(chosen))


def origin_of(context: dg.AssetExecutionContext, assets: StageAssets) -> Origin:
    """Where the pipeline of a run is defined. Fields that are unknown outside of a code location are empty."""
    job = context.run.remote_job_origin
    instance = ""
    if not context.instance.is_ephemeral:
        with suppress(Exception):  # not every kind of run storage has an id
            instance = context.instance.run_storage.get_run_storage_id()
    return Origin(
        code_location=job.repository_origin.code_location_origin.location_name if job is not None else "",
        instance=instance,
        assets=tuple(sorted(key.to_user_string() for key in assets.keys.values())),
    )
