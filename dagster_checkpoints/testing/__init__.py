"""Tests that an author runs against his own pipeline or sink.

:func:`run_pipeline` runs a pipeline over a few rows, :func:`check_pipeline` searches for a history of the same rows that changes
the result; both need Spark. :class:`SinkConformance` is the suite for sinks; it needs pytest, and no Spark session.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if "pytest" in sys.modules:  # a failed assertion of the suite shows its values
    sys.modules["pytest"].register_assert_rewrite("dagster_checkpoints.testing.conformance")

if TYPE_CHECKING:
    from dagster_checkpoints.testing.check_errors import HistoryMismatchError, PipelineCheckError, StageFindingError
    from dagster_checkpoints.testing.conformance import SinkConformance
    from dagster_checkpoints.testing.pipeline_check import CheckedPipeline, check_pipeline
    from dagster_checkpoints.testing.pipeline_runs import PipelineOutput, run_pipeline
    from dagster_checkpoints.testing.source_rows import InvalidTestRowsError, SourceRows

_WHERE = {
    "CheckedPipeline": "pipeline_check",
    "HistoryMismatchError": "check_errors",
    "InvalidTestRowsError": "source_rows",
    "PipelineCheckError": "check_errors",
    "PipelineOutput": "pipeline_runs",
    "SinkConformance": "conformance",
    "SourceRows": "source_rows",
    "StageFindingError": "check_errors",
    "check_pipeline": "pipeline_check",
    "run_pipeline": "pipeline_runs",
}

__all__ = [
    "CheckedPipeline",
    "HistoryMismatchError",
    "InvalidTestRowsError",
    "PipelineCheckError",
    "PipelineOutput",
    "SinkConformance",
    "SourceRows",
    "StageFindingError",
    "check_pipeline",
    "run_pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
