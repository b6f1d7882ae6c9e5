"""Tests that an author runs against his own pipeline or sink.

:func:`run_pipeline` runs a pipeline over a few rows; it needs Spark. :class:`SinkConformance` is the suite for sinks; it needs
pytest, and no Spark session.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if "pytest" in sys.modules:  # a failed assertion of the suite shows its values
    sys.modules["pytest"].register_assert_rewrite("dagster_checkpoints.testing.conformance")

if TYPE_CHECKING:
    from dagster_checkpoints.testing.conformance import SinkConformance
    from dagster_checkpoints.testing.pipeline_runs import InvalidTestRowsError, PipelineOutput, SourceRows, run_pipeline

_WHERE = {
    "InvalidTestRowsError": "pipeline_runs",
    "PipelineOutput": "pipeline_runs",
    "SinkConformance": "conformance",
    "SourceRows": "pipeline_runs",
    "run_pipeline": "pipeline_runs",
}

__all__ = ["InvalidTestRowsError", "PipelineOutput", "SinkConformance", "SourceRows", "run_pipeline"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
