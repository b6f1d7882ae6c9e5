"""Savepoints in Dagster: an asset per pipeline, whose partitions are the savepoints, and its asset check.

Read `asset` (its materialization takes a savepoint), `recording` (records savepoints that were taken in other ways), `metadata`
(what Dagster shows of a savepoint), `retention` (which savepoints of a schedule are kept) and `check`.
"""

from dagster_checkpoints.plugin.savepoints.asset import RESOURCE, SavepointConfig, Stop, savepoint_asset
from dagster_checkpoints.plugin.savepoints.check import SavepointCheckConfig, savepoint_check
from dagster_checkpoints.plugin.savepoints.recording import SavepointAsset, record_savepoint
from dagster_checkpoints.plugin.savepoints.retention import SavepointRetention

__all__ = [
    "RESOURCE",
    "SavepointAsset",
    "SavepointCheckConfig",
    "SavepointConfig",
    "SavepointRetention",
    "Stop",
    "record_savepoint",
    "savepoint_asset",
    "savepoint_check",
]
