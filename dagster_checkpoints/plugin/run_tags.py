"""The tags of a pipeline's run: what the coordinator adds, and what a recovery repeats.

Source: Dagster's documentation, "Run monitoring": a run's tag ``dagster/max_runtime`` counts before ``max_runtime_seconds``.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.job_options import Until

MAX_RUNTIME = "dagster/max_runtime"
_LIMITS = (MAX_RUNTIME, "dagster/max_runtime_seconds")
_UNLIMITED = "0"
_USERS = frozenset({*_LIMITS, "dagster/priority"})
"""Tags that users set, although their names are Dagster's."""


def time_limit_tags(pipeline: Pipeline, given: Mapping[str, str], until: Until) -> dict[str, str]:
    """The tags to add to a run that does not end by itself: one with an unbounded stage, unless it is a burst.

    Without a limit of its own it has none, or Dagster would terminate it and mark it as failed at the age of
    ``run_monitoring.max_runtime_seconds``.

    Args:
        pipeline: The pipeline.
        given: The run's tags.
        until: What the run reads.
    """
    limited = any(name in given for name in _LIMITS)
    return {} if pipeline.bounded or limited or until == "caught_up" else {MAX_RUNTIME: _UNLIMITED}


def repeated_tags(given: Mapping[str, str]) -> dict[str, str]:
    """The tags of a failed run that the run which recovers it has, too: the user's, not Dagster's own."""
    return {name: value for name, value in given.items() if name in _USERS or not name.startswith(("dagster/", "."))}
