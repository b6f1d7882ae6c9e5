"""Consistent checkpoints for pipelines of bounded and unbounded Spark stages, run by Dagster.

What a user writes is in `pipeline` (stages and pipelines) and `sinks`; Dagster's face is `asset_decorator` and `resource`.
To understand how it works, read upwards: `coordination` (the protocol as pure state machines), `state` (what a checkpoint
holds), `storage` (where it lives), `spark` (how stages run). Names are imported when first used, so that importing one of
them costs neither Spark nor Dagster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_checkpoints.asset_decorator import pipeline_assets
    from dagster_checkpoints.errors import DagsterCheckpointsError
    from dagster_checkpoints.pipeline import (
        Pipeline,
        Stage,
        StageContext,
        StageInput,
        StageKind,
        Watermark,
        bounded_source,
        stage,
        unbounded_source,
    )
    from dagster_checkpoints.resource import CheckpointCoordinatorResource
    from dagster_checkpoints.run_config import PipelineRunConfig
    from dagster_checkpoints.sinks import ParquetSink, TwoPhaseCommitSink
    from dagster_checkpoints.stage_assets import instance_assets

_WHERE = {
    "CheckpointCoordinatorResource": "resource",
    "DagsterCheckpointsError": "errors",
    "ParquetSink": "sinks",
    "Pipeline": "pipeline",
    "PipelineRunConfig": "run_config",
    "Stage": "pipeline",
    "StageContext": "pipeline",
    "StageInput": "pipeline",
    "StageKind": "pipeline",
    "TwoPhaseCommitSink": "sinks",
    "Watermark": "pipeline",
    "bounded_source": "pipeline",
    "instance_assets": "stage_assets",
    "pipeline_assets": "asset_decorator",
    "stage": "pipeline",
    "unbounded_source": "pipeline",
}

__all__ = [
    "CheckpointCoordinatorResource",
    "DagsterCheckpointsError",
    "ParquetSink",
    "Pipeline",
    "PipelineRunConfig",
    "Stage",
    "StageContext",
    "StageInput",
    "StageKind",
    "TwoPhaseCommitSink",
    "Watermark",
    "bounded_source",
    "instance_assets",
    "pipeline_assets",
    "stage",
    "unbounded_source",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
