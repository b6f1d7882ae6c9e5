"""Consistent checkpoints for pipelines of bounded and unbounded Spark stages, run by Dagster.

What a user writes is in `pipeline` (stages and pipelines) and `sinks`; what Dagster sees is in `plugin`.
To understand how it works, read upwards: `coordination` (the protocol as pure state machines), `state` (what a checkpoint
holds), `storage` (where it is stored), `control` (requests to a running pipeline), `spark` (how stages run). Names are imported
when first used, so that importing one of them costs neither Spark nor Dagster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from dagster_checkpoints.plugin.asset_decorator import pipeline_assets
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource
    from dagster_checkpoints.plugin.run_config import PipelineRunConfig
    from dagster_checkpoints.plugin.savepoints import SavepointConfig, savepoint_asset, savepoint_check
    from dagster_checkpoints.plugin.stage_assets import instance_assets
    from dagster_checkpoints.sensors import (
        build_drain_sensor,
        build_end_of_input_sensor,
        build_recovery_sensor,
        build_reroot_sensor,
        build_savepoint_check_sensor,
        build_savepoint_schedule,
    )
    from dagster_checkpoints.sinks import ParquetSink, TwoPhaseCommitSink

_WHERE = {
    "CheckpointCoordinatorResource": "plugin.resource",
    "DagsterCheckpointsError": "errors",
    "ParquetSink": "sinks",
    "Pipeline": "pipeline",
    "PipelineRunConfig": "plugin.run_config",
    "SavepointConfig": "plugin.savepoints",
    "Stage": "pipeline",
    "StageContext": "pipeline",
    "StageInput": "pipeline",
    "StageKind": "pipeline",
    "TwoPhaseCommitSink": "sinks",
    "Watermark": "pipeline",
    "bounded_source": "pipeline",
    "build_drain_sensor": "sensors",
    "build_end_of_input_sensor": "sensors",
    "build_recovery_sensor": "sensors",
    "build_reroot_sensor": "sensors",
    "build_savepoint_check_sensor": "sensors",
    "build_savepoint_schedule": "sensors",
    "instance_assets": "plugin.stage_assets",
    "pipeline_assets": "plugin.asset_decorator",
    "savepoint_asset": "plugin.savepoints",
    "savepoint_check": "plugin.savepoints",
    "stage": "pipeline",
    "unbounded_source": "pipeline",
}

__all__ = [
    "CheckpointCoordinatorResource",
    "DagsterCheckpointsError",
    "ParquetSink",
    "Pipeline",
    "PipelineRunConfig",
    "SavepointConfig",
    "Stage",
    "StageContext",
    "StageInput",
    "StageKind",
    "TwoPhaseCommitSink",
    "Watermark",
    "bounded_source",
    "build_drain_sensor",
    "build_end_of_input_sensor",
    "build_recovery_sensor",
    "build_reroot_sensor",
    "build_savepoint_check_sensor",
    "build_savepoint_schedule",
    "instance_assets",
    "pipeline_assets",
    "savepoint_asset",
    "savepoint_check",
    "stage",
    "unbounded_source",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
