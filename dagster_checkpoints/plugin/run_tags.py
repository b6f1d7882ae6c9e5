"""The tags of a pipeline's run: what the coordinator adds, and what a recovery repeats.

Source: Dagster's documentation, "Run monitoring": a run's tag ``dagster/max_runtime`` counts before ``max_runtime_seconds``.
"""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg

from dagster_checkpoints.errors import PipelineOwned
from dagster_checkpoints.execution.unlisted_checkpoints import PipelineStateMissing
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.interrupts import interrupts_delayed
from dagster_checkpoints.plugin.stage_assets import REFUSED, NoStageSelectedError, NotAPipelineAssetError
from dagster_checkpoints.spark.errors import SelectionError
from dagster_checkpoints.spark.job.job_options import Until
from dagster_checkpoints.storage.origin import PipelineNameTaken

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
