"""Reads what a checkpoint or savepoint holds of a stage, and corrects a savepoint, without running the pipeline."""

from dagster_checkpoints.spark.stored_state.corrections import CorrectionError, correct_savepoint
from dagster_checkpoints.spark.stored_state.stage_state import InstanceOffsets, OperatorStateValues, StageState, read_state
from dagster_checkpoints.spark.stored_state.state_stores import KeyedState

__all__ = [
    "CorrectionError",
    "InstanceOffsets",
    "KeyedState",
    "OperatorStateValues",
    "StageState",
    "correct_savepoint",
    "read_state",
]
