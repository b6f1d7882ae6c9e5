"""A Dagster run of a pipeline: its tags (what the coordinator adds, and what a recovery repeats) and its lineage.

The lineage are the runs that it repeats, the steps beside the pipeline, and its code location. This module must not know the
decisions that depend on it.

Source: Dagster's documentation, "Run monitoring": a run's tag ``dagster/max_runtime`` counts before ``max_runtime_seconds``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import dagster as dg

from dagster_checkpoints.errors import PipelineOwned
from dagster_checkpoints.execution.pipeline_state import Origin
from dagster_checkpoints.execution.unlisted_checkpoints import PipelineStateMissing
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.interrupts import interrupts_delayed
from dagster_checkpoints.plugin.stage_assets import REFUSED, NoStageSelectedError, NotAPipelineAssetError, StageAssets
from dagster_checkpoints.spark.errors import SelectionError
from dagster_checkpoints.spark.job.job_options import Until
from dagster_checkpoints.storage.acquisition import PipelineNameTaken

MAX_RUNTIME = "dagster/max_runtime"
_LIMITS = (MAX_RUNTIME, "dagster/max_runtime_seconds")
_UNLIMITED = "0"
RECOVERS = "dagster_checkpoints/recovers"
"""Tag of a run: the failed run that it recovers."""
RETRY_NUMBER = "dagster/retry_number"
"""Tag that Dagster gives to its retries of failed runs, and not to a run that a person has launched again."""
ATTEMPT = "dagster_checkpoints/recovery_attempt"
"""Tag of a run: attempt number, from 1, among consecutive attempts."""
_RETRY_FAILED_OPS = "dagster/retry_on_asset_or_op_failure"
"""Tag with which a user says whether Dagster retries a run whose op has failed."""
_REFUSALS = (PipelineOwned, PipelineNameTaken, PipelineStateMissing, SelectionError, NoStageSelectedError, NotAPipelineAssetError)
_USERS = frozenset({*_LIMITS, "dagster/priority"})
"""Tags that users set, although their names are Dagster's."""


def time_limit_tags(pipeline: Pipeline, given: Mapping[str, str], until: Until) -> dict[str, str]:
    """The tags to add to a run that does not end by itself.

    Without a limit of its own it has none, or Dagster would terminate it and mark it as failed at the age of
    ``run_monitoring.max_runtime_seconds``.

    Args:
        pipeline: The pipeline.
        given: The run's tags.
        until: What the run reads.
    """
    limited = any(name in given for name in _LIMITS)
    return {MAX_RUNTIME: _UNLIMITED} if has_no_end(pipeline, until) and not limited else {}


def has_no_end(pipeline: Pipeline, until: Until) -> bool:
    """Whether a run of the pipeline does not end by itself: one with an unbounded stage, unless it is a burst."""
    return not pipeline.bounded and until != "caught_up"


def tag_refusal(context: dg.AssetExecutionContext, error: BaseException) -> None:
    """Tag a run that an error has refused, so that Dagster does not retry it; nothing for any other error.

    A retry of a run that was launched beside the owner would start the pipeline as soon as the owner is terminated, suspended or
    drained. A retry that was refused itself is retried: the owner may be the failed run, whose process has not ended yet.
    """
    if isinstance(error, _REFUSALS):
        tags = {REFUSED: type(error).__name__}
        if context.instance.run_retries_enabled and RETRY_NUMBER not in context.run.tags:
            tags[_RETRY_FAILED_OPS] = "false"
        with interrupts_delayed():
            context.instance.add_run_tags(context.run.run_id, tags)


def cleared_tags(context: dg.AssetExecutionContext) -> dict[str, str]:
    """The tags of a refusal, without effect, if a run has them when it begins: a re-execution has a copy of the run's tags."""
    if not context.run.tags.get(REFUSED):
        return {}
    retry = str(context.instance.run_retries_retry_on_asset_or_op_failure).lower()
    again = {_RETRY_FAILED_OPS: context.job_def.run_tags.get(_RETRY_FAILED_OPS, retry)}
    return {REFUSED: "", **(again if _RETRY_FAILED_OPS in context.run.tags else {})}


def repeated_tags(given: Mapping[str, str]) -> dict[str, str]:
    """The tags of a failed run that the run which recovers it has, too: the user's, not Dagster's own, nor that of a refusal."""
    own = ("dagster/", ".", REFUSED)
    return {name: value for name, value in given.items() if name in _USERS or not name.startswith(own)}


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
