"""The asset of a pipeline's savepoints, and how a savepoint is recorded in it.

It must not know how savepoints are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster_shared.check import CheckError

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints.metadata import LOCATION, Savepoint, describe, read_savepoint, resume_metadata
from dagster_checkpoints.plugin.time_limits import TimeLimit
from dagster_checkpoints.spark.job.events import SavepointDone
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

SAVEPOINTS_OF = "dagster_checkpoints/savepoints_of"
"""Key in the metadata of the asset: name of the pipeline whose savepoints are its partitions."""
DEFAULT_PREFIX = ("savepoints",)
_READING_SECONDS = 20.0
_OF_A_RUN = "asset-"
_DIRECTORY = re.compile(r"savepoint-\d+-.+")


@dataclass(frozen=True)
class SavepointAsset:
    """The asset of a pipeline's savepoints.

    Attributes:
        key: Key of the asset.
        partitions: Name of its dynamic partitions.
    """

    key: dg.AssetKey
    partitions: str

    @classmethod
    def named(cls, pipeline: Pipeline, prefix: Sequence[str] = DEFAULT_PREFIX) -> SavepointAsset:
        """The savepoint asset whose key has this prefix."""
        key = dg.AssetKey([*prefix, pipeline.name])
        # All assets share the names of dynamic partitions: with underscores, "shop" below "eu" would be the pipeline "eu_shop".
        return cls(key, ("_" if tuple(prefix) == DEFAULT_PREFIX else "/").join(key.path))

    @classmethod
    def of(cls, context: dg.AssetExecutionContext, pipeline: Pipeline) -> SavepointAsset:
        """The savepoint asset that the code location of a run defines; the one with the default prefix if it defines none."""
        try:
            definitions = context.repository_def.assets_defs_by_key
        except CheckError:  # assets that were materialized without a code location
            return cls.named(pipeline)
        for key, definition in definitions.items():
            spec = definition.specs_by_key.get(key)
            partitions = definition.partitions_def
            if spec is None or not isinstance(partitions, dg.DynamicPartitionsDefinition):
                continue
            if spec.metadata.get(SAVEPOINTS_OF) == pipeline.name:
                return cls(key, str(partitions.name))
        return cls.named(pipeline)

    def find(self, instance: dg.DagsterInstance, partition: str) -> dg.AssetMaterialization | None:
        """The materialization that recorded a partition's savepoint; None if Dagster has none."""
        records_filter = dg.AssetRecordsFilter(asset_key=self.key, asset_partitions=[partition])
        records = instance.fetch_materializations(records_filter, limit=1).records
        return records[0].asset_materialization if records else None

    def newest(self, instance: dg.DagsterInstance) -> dg.EventLogRecord | None:
        """The record of the savepoint that was recorded last; None if there is none."""
        records = instance.fetch_materializations(self.key, limit=1).records
        return records[0] if records else None


def location_of(recorded: dg.AssetMaterialization) -> str | None:
    """The location of a recorded savepoint; None if its materialization does not have it."""
    value = recorded.metadata.get(LOCATION)
    return str(value.value) if value is not None else None


def partition_of(location: str) -> str:
    """The partition key of a savepoint that was taken without one: the name of its directory."""
    return location.rstrip("/").removesuffix("/_metadata").rpartition("/")[2]


def request_of(run_id: str) -> str:
    """The id of the request for the savepoint that a run of the asset takes, and records by itself."""
    return f"{_OF_A_RUN}{run_id}"


def is_recorded_by_asker(instance: dg.DagsterInstance, event: SavepointDone) -> bool:
    """Whether the run that has requested a savepoint records it: not if it was terminated, or has died, while it waited.

    Args:
        instance: The Dagster instance; a run of another one records what it has requested there.
        event: The event of the completed savepoint.
    """
    if not event.recorded_by_asker:
        return False
    run = instance.get_run_by_id(event.request_id.removeprefix(_OF_A_RUN))
    return run is None or not (run.is_finished or run.status is dg.DagsterRunStatus.CANCELING)


def record_savepoint(
    context: dg.AssetExecutionContext, pipeline: Pipeline, event: SavepointDone, storage: Callable[[], CheckpointStorage]
) -> str:
    """Record a savepoint of the running pipeline that was taken neither by the savepoint asset nor by a schedule.

    Call it in the pipeline's run. Adds the partition and logs its materialization. A savepoint that cannot be read now is
    recorded with the data of the event; the run does not fail because of it.

    Args:
        context: Context of the pipeline's assets.
        pipeline: The pipeline.
        event: The event of the completed savepoint.
        storage: Opens the pipeline's storage.

    Returns:
        The key of the partition.
    """
    asset = SavepointAsset.of(context, pipeline)
    partition = partition_of(event.location)
    metadata: dict[str, Any] = {
        "asked_by": event.asked_by or f"run {context.run.run_id}",
        "trigger": {"": "request", "suspend": "suspend", "drain": "drain"}[event.stops],
    }

    def read() -> Savepoint:
        with storage() as opened:
            return read_savepoint(opened, event.location)

    try:
        # With a time limit, on its own thread: the run's main thread must not hang where Dagster cannot interrupt it.
        savepoint = TimeLimit(_READING_SECONDS, "storage").do(read)
        metadata = {**resume_metadata(context, savepoint, context.assets_def), **describe(savepoint), **metadata}
    except DagsterCheckpointsError as error:
        context.log.warning(f"Savepoint {event.location} is complete, but cannot be described: {error}")
        metadata |= {
            LOCATION: event.location,
            "checkpoint": event.checkpoint.checkpoint_id,
            "total_bytes": event.checkpoint.total_bytes,
        }
    context.instance.add_dynamic_partitions(asset.partitions, [partition])
    context.log_event(dg.AssetMaterialization(asset.key, partition=partition, metadata=metadata))
    return partition
