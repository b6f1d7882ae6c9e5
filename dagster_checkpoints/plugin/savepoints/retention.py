"""Deletes the expired savepoints of a schedule: only savepoints that the schedule made, and none that a restart needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_checkpoints.errors import MissingCheckpoint, StorageError
from dagster_checkpoints.plugin.savepoints.metadata import LOCATION, MADE_BY, TRIGGERED
from dagster_checkpoints.plugin.savepoints.recording import SavepointAsset
from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

STAMP = "%Y%m%dT%H%M%SZ"
_STAMP = re.compile(r"\d{8}T\d{6}Z")


class SavepointRetention(KnownSettings, dg.Config):
    """Which earlier savepoints of a schedule are kept when it has taken a new one."""

    made_by: str
    """Name of the schedule; other savepoints are not deleted."""
    prefix: str
    """Prefix of the names of its savepoints."""
    count: int | None = Field(default=None, ge=1)
    """Number of newest savepoints that are kept; None for any number."""
    max_age: float | None = Field(default=None, gt=0)
    """Largest age in seconds; older savepoints are deleted, except the newest one. None for any age."""

    def is_scheduled(self, partition: str) -> bool:
        """Whether the schedule gave this name: its prefix and a time stamp."""
        return partition.startswith(self.prefix) and bool(_STAMP.fullmatch(partition[len(self.prefix) :]))


@dataclass(frozen=True)
class RecordedSavepoint:
    """A savepoint of the schedule, as Dagster recorded it. `triggered`: seconds since 1970."""

    partition: str
    location: str
    triggered: float


def expired(
    savepoints: Iterable[RecordedSavepoint], newest: RecordedSavepoint, retention: SavepointRetention
) -> list[RecordedSavepoint]:
    """The earlier savepoints that are not kept, oldest last. Ages are relative to the newest savepoint.

    One of a later time is kept: another run has taken it meanwhile, or the clock was set back since.

    Args:
        savepoints: The other savepoints of the schedule.
        newest: The savepoint just taken, which is always kept, whatever the clock says.
        retention: The savepoints to keep.
    """
    earlier = [each for each in savepoints if (each.triggered, each.partition) < (newest.triggered, newest.partition)]
    newest_first = sorted(earlier, key=lambda savepoint: (savepoint.triggered, savepoint.partition), reverse=True)
    return [
        savepoint
        for number, savepoint in enumerate(newest_first, start=1)
        if (retention.count is not None and number >= retention.count)
        or (retention.max_age is not None and newest.triggered - savepoint.triggered > retention.max_age)
    ]


def delete_expired(
    context: dg.AssetExecutionContext,
    storage: CheckpointStorage,
    asset: SavepointAsset,
    retention: SavepointRetention,
    newest: RecordedSavepoint,
) -> list[str]:
    """Delete the schedule's expired savepoints, and their partitions.

    A savepoint that cannot be deleted now is deleted after the next savepoint.

    Args:
        context: Context of the run that has taken the newest savepoint.
        storage: Storage of the pipeline.
        asset: The pipeline's savepoint asset.
        retention: The savepoints to keep.
        newest: The savepoint just taken, which Dagster has not recorded yet.

    Returns:
        The keys of the deleted partitions.
    """
    instance = context.instance
    scheduled, without_record = list[RecordedSavepoint](), set[str]()
    for partition in instance.get_dynamic_partitions(asset.partitions):
        if not retention.is_scheduled(partition) or partition == newest.partition:
            continue
        recorded = asset.find(instance, partition)
        if recorded is None and partition < newest.partition and not _has_unfinished_run(instance, partition):
            # The run of an earlier tick took no savepoint, or was deleted in Dagster since.
            instance.delete_dynamic_partition(asset.partitions, partition)
            without_record.add(partition)
        elif recorded is not None and _value(recorded, MADE_BY) == retention.made_by:
            scheduled.append(
                RecordedSavepoint(partition, str(_value(recorded, LOCATION)), float(_value(recorded, TRIGGERED) or 0))
            )
    deleted = []
    try:
        for stored in storage.list_savepoints() if without_record else ():
            if stored.name in without_record:
                context.log.warning(
                    f"Savepoint {stored.url} has no record in Dagster any more: the run that took it was cancelled, or deleted. "
                    "The schedule does not delete it; if you do not need it, dagster-checkpoints dispose does."
                )
        needed = _needed_locations(storage)
        for savepoint in expired(scheduled, newest, retention):
            if savepoint.location in needed:
                context.log.info(f"Savepoint {savepoint.location} is kept: the pipeline would restart from it.")
                continue
            try:
                storage.open_savepoint(savepoint.location).delete()
            except MissingCheckpoint:
                context.log.warning(f"Savepoint {savepoint.location} has expired, but does not exist any more.")
            instance.delete_dynamic_partition(asset.partitions, savepoint.partition)
            deleted.append(savepoint.partition)
    except StorageError as error:
        context.log.warning(f"Old savepoints could not be deleted; the next savepoint tries again: {error}")
    if deleted:
        context.log.info(f"Deleted expired savepoints: {', '.join(deleted)}.")
    return deleted


def _has_unfinished_run(instance: dg.DagsterInstance, partition: str) -> bool:
    """Whether a run may still take a partition's savepoint: it waits in the queue, or is slower than that of a later tick."""
    return any(not run.is_finished for run in instance.get_runs(dg.RunsFilter(tags={"dagster/partition": partition})))


def _needed_locations(storage: CheckpointStorage) -> set[str]:
    """The savepoints that a restart of the pipeline would need."""
    state = storage.read_state()
    if state is None:
        return set()
    locations = {pointer.location for pointer in state.restorable_checkpoints} | {state.job.savepoint}
    return locations | {storage.relative(location) for location in locations if location.startswith(storage.url)}


def _value(recorded: dg.AssetMaterialization, name: str) -> Any:
    value = recorded.metadata.get(name)
    return value.value if value is not None else None
