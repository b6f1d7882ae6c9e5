"""Reads what a checkpoint or savepoint holds of a stage, and corrects a savepoint, without running the pipeline; takes over a
plain query with its state, and gives one back."""

from dagster_checkpoints.spark.stored_state.corrections import CorrectionError, correct_savepoint
from dagster_checkpoints.spark.stored_state.exports import CheckpointExport, export_checkpoint
from dagster_checkpoints.spark.stored_state.imports import CheckpointImport, import_checkpoint
from dagster_checkpoints.spark.stored_state.stage_state import InstanceOffsets, OperatorStateValues, StageState, read_state
from dagster_checkpoints.spark.stored_state.state_stores import KeyedState

__all__ = [
    "CheckpointExport",
    "CheckpointImport",
    "CorrectionError",
    "InstanceOffsets",
    "KeyedState",
    "OperatorStateValues",
    "StageState",
    "correct_savepoint",
    "export_checkpoint",
    "import_checkpoint",
    "read_state",
]
