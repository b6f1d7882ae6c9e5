"""The tags of a pipeline's run: what the coordinator adds, and what a recovery repeats.

Source: Dagster's documentation, "Run monitoring": a run's tag ``dagster/max_runtime`` counts before ``max_runtime_seconds``.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.stage_assets import PIPELINE

MAX_RUNTIME = "dagster/max_runtime"
_LIMITS = (MAX_RUNTIME, "dagster/max_runtime_seconds")
_UNLIMITED = "0"
_USERS = frozenset({*_LIMITS, "dagster/priority"})
"""Tags that users set, although their names are Dagster's."""


def added_tags(pipeline: Pipeline, given: Mapping[str, str]) -> dict[str, str]:
    """The tags to add when a run begins to run a pipeline.

    The recovery sensor finds a run by the pipeline's tag, whatever its job is. A run with an unbounded stage does not end by
    itself: without a limit of its own it has none, or Dagster would terminate it and mark it as failed at the age of
    ``run_monitoring.max_runtime_seconds``.

    Args:
        pipeline: The pipeline.
        given: The run's tags.
    """
    limited = any(name in given for name in _LIMITS)
    return {PIPELINE: pipeline.name, **({} if pipeline.bounded or limited else {MAX_RUNTIME: _UNLIMITED})}


def repeated_tags(given: Mapping[str, str]) -> dict[str, str]:
    """The tags of a failed run that the run which recovers it has, too: the user's, not Dagster's own."""
    return {name: value for name, value in given.items() if name in _USERS or not name.startswith(("dagster/", "."))}
