"""Consistent checkpoints for pipelines of bounded and unbounded Spark stages, run by Dagster.

What a user writes is in `pipeline` (stages and pipelines), `sources` and `sinks`; what Dagster sees is in `plugin`.
To understand how it works, read upwards: `coordination` (the protocol as pure state machines), `state` (what a checkpoint
holds), `storage` (where it is stored), `control` (requests to a running pipeline), `spark` (how stages run). Names are imported
when first used, so that importing one of them costs neither Spark nor Dagster.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_checkpoints.control.health import HealthThresholds
    from dagster_checkpoints.errors import DagsterCheckpointsError
    from dagster_checkpoints.pipeline import (
        CommitCheckResult,
        DiscoveryContext,
        InputAsset,
        Pipeline,
        Quarantine,
        SplitSource,
        Stage,
        StageContext,
        StageInput,
        StageKind,
        Watermark,
        bounded_source,
        commit_check,
        split_source,
        stage,
        unbounded_source,
    )
    from dagster_checkpoints.plugin.asset_decorator import pipeline_assets
    from dagster_checkpoints.plugin.component import CheckpointedPipelineComponent
    from dagster_checkpoints.plugin.health_check import health_check
    from dagster_checkpoints.plugin.pipeline_defs import build_pipeline_defs
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource
    from dagster_checkpoints.plugin.run_config import PipelineRunConfig
    from dagster_checkpoints.plugin.savepoints.asset import SavepointConfig, savepoint_asset
    from dagster_checkpoints.plugin.savepoints.check import savepoint_check
    from dagster_checkpoints.plugin.stage_assets import instance_assets
    from dagster_checkpoints.plugin.stage_translator import DagsterStageTranslator
    from dagster_checkpoints.sensors import (
        build_burst_schedule,
        build_drain_sensor,
        build_end_of_input_sensor,
        build_health_sensor,
        build_recovery_sensor,
        build_reroot_sensor,
        build_run_schedule,
        build_savepoint_check_sensor,
        build_savepoint_schedule,
        build_suspend_sensor,
    )
    from dagster_checkpoints.sinks import DeltaSink, FileSink, IcebergSink, KafkaSink, ParquetSink, SqlSink, TwoPhaseCommitSink
    from dagster_checkpoints.sources import (
        FileSplits,
        KafkaSplit,
        KafkaSplits,
        read_delta_table,
        read_iceberg_table,
        read_sql_table,
    )
    from dagster_checkpoints.spark.stored_state import correct_savepoint, export_checkpoint, import_checkpoint, read_state

_WHERE = {
    "CheckpointCoordinatorResource": "plugin.resource",
    "CheckpointedPipelineComponent": "plugin.component",
    "CommitCheckResult": "pipeline",
    "DagsterCheckpointsError": "errors",
    "DagsterStageTranslator": "plugin.stage_translator",
    "DeltaSink": "sinks",
    "DiscoveryContext": "pipeline",
    "FileSink": "sinks",
    "FileSplits": "sources",
    "HealthThresholds": "control.health",
    "IcebergSink": "sinks",
    "InputAsset": "pipeline",
    "KafkaSink": "sinks",
    "KafkaSplit": "sources",
    "KafkaSplits": "sources",
    "ParquetSink": "sinks",
    "Pipeline": "pipeline",
    "PipelineRunConfig": "plugin.run_config",
    "Quarantine": "pipeline",
    "SavepointConfig": "plugin.savepoints.asset",
    "SplitSource": "pipeline",
    "SqlSink": "sinks",
    "Stage": "pipeline",
    "StageContext": "pipeline",
    "StageInput": "pipeline",
    "StageKind": "pipeline",
    "TwoPhaseCommitSink": "sinks",
    "Watermark": "pipeline",
    "bounded_source": "pipeline",
    "build_burst_schedule": "sensors",
    "build_drain_sensor": "sensors",
    "build_end_of_input_sensor": "sensors",
    "build_health_sensor": "sensors",
    "build_pipeline_defs": "plugin.pipeline_defs",
    "build_recovery_sensor": "sensors",
    "build_reroot_sensor": "sensors",
    "build_run_schedule": "sensors",
    "build_savepoint_check_sensor": "sensors",
    "build_savepoint_schedule": "sensors",
    "build_suspend_sensor": "sensors",
    "commit_check": "pipeline",
    "health_check": "plugin.health_check",
    "instance_assets": "plugin.stage_assets",
    "pipeline_assets": "plugin.asset_decorator",
    "read_delta_table": "sources",
    "read_iceberg_table": "sources",
    "read_sql_table": "sources",
    "savepoint_asset": "plugin.savepoints.asset",
    "savepoint_check": "plugin.savepoints.check",
    "correct_savepoint": "spark.stored_state",
    "export_checkpoint": "spark.stored_state",
    "import_checkpoint": "spark.stored_state",
    "read_state": "spark.stored_state",
    "split_source": "pipeline",
    "stage": "pipeline",
    "unbounded_source": "pipeline",
}

__all__ = [
    "CheckpointCoordinatorResource",
    "CheckpointedPipelineComponent",
    "CommitCheckResult",
    "DagsterCheckpointsError",
    "DagsterStageTranslator",
    "DeltaSink",
    "DiscoveryContext",
    "FileSink",
    "FileSplits",
    "HealthThresholds",
    "IcebergSink",
    "InputAsset",
    "KafkaSink",
    "KafkaSplit",
    "KafkaSplits",
    "ParquetSink",
    "Pipeline",
    "PipelineRunConfig",
    "Quarantine",
    "SavepointConfig",
    "SplitSource",
    "SqlSink",
    "Stage",
    "StageContext",
    "StageInput",
    "StageKind",
    "TwoPhaseCommitSink",
    "Watermark",
    "bounded_source",
    "build_burst_schedule",
    "build_drain_sensor",
    "build_end_of_input_sensor",
    "build_health_sensor",
    "build_pipeline_defs",
    "build_recovery_sensor",
    "build_reroot_sensor",
    "build_run_schedule",
    "build_savepoint_check_sensor",
    "build_savepoint_schedule",
    "build_suspend_sensor",
    "commit_check",
    "correct_savepoint",
    "export_checkpoint",
    "health_check",
    "import_checkpoint",
    "instance_assets",
    "pipeline_assets",
    "read_delta_table",
    "read_iceberg_table",
    "read_sql_table",
    "read_state",
    "savepoint_asset",
    "savepoint_check",
    "split_source",
    "stage",
    "unbounded_source",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("dagster-checkpoints")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
