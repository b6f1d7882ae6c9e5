"""Where a Dagster run comes from: the runs that it repeats, and the code location and instance of its pipeline.

It must not know what is decided from it.
"""

from __future__ import annotations

from contextlib import suppress

import dagster as dg

from dagster_checkpoints.plugin.stage_assets import StageAssets
from dagster_checkpoints.storage import Origin

PARENT_RUN_ID_TAG = "dagster/parent_run_id"
ROOT_RUN_ID_TAG = "dagster/root_run_id"
"""Tags of Dagster's that its run retries and re-executions have."""


def earlier_runs(context: dg.AssetExecutionContext) -> frozenset[str]:
    """The runs that this one repeats, directly or not: run retries and re-executions have them, every other run has none.

    All runs that go back to the same first run count, since several of them may have repeated the same one.
    """
    run = context.run
    root = run.root_run_id or run.tags.get(ROOT_RUN_ID_TAG)
    parent = run.parent_run_id or run.tags.get(PARENT_RUN_ID_TAG)
    if root is None and parent is None:
        return frozenset()
    family = context.instance.get_runs(dg.RunsFilter(tags={ROOT_RUN_ID_TAG: root})) if root is not None else []
    return frozenset({*(each.run_id for each in family), *(each for each in (root, parent) if each)} - {run.run_id})


def origin_of(context: dg.AssetExecutionContext, assets: StageAssets) -> Origin:
    """Where the pipeline that a run executes is defined. What a run outside of a code location cannot know is empty."""
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
