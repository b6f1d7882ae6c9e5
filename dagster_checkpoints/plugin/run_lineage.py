"""The lineage of a Dagster run: the runs that it repeats, the steps beside the pipeline, and its code location and instance.

This module must not know the decisions that depend on the lineage.
"""

from __future__ import annotations

from contextlib import suppress

import dagster as dg

from dagster_checkpoints.plugin.run_tags import RECOVERS
from dagster_checkpoints.plugin.stage_assets import StageAssets
from dagster_checkpoints.storage import Origin

PARENT_RUN_ID_TAG = "dagster/parent_run_id"
ROOT_RUN_ID_TAG = "dagster/root_run_id"
"""The tags that Dagster gives to run retries and re-executions."""


def earlier_runs(context: dg.AssetExecutionContext) -> frozenset[str]:
    """Ids of the runs that this run repeats, directly or indirectly; empty unless it is a retry, a re-execution or a recovery.

    If Dagster retries the op (``op_retry_policy``, after its process has died), the run repeats itself.
    """
    found = {context.run.run_id} if context.retry_number else set[str]()
    known: set[str] = set()
    new: list[dg.DagsterRun | None] = [context.run]
    while new:
        run = new.pop()
        repeated = _repeats(context.instance, run) - known if run is not None else set[str]()
        known |= repeated
        new += [context.instance.get_run_by_id(run_id) for run_id in repeated]
    return frozenset(found | (known - {context.run.run_id}))


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
