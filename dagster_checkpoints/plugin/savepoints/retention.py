"""Which savepoints of a schedule are kept. Deletes only what the schedule made, and never what a job relies on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_checkpoints.plugin.savepoints.metadata import LOCATION, MADE_BY, TRIGGERED
from dagster_checkpoints.plugin.savepoints.recording import SavepointAsset
from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.storage import CheckpointStorage, MissingCheckpoint, StorageError

STAMP = "%Y%m%dT%H%M%SZ"
_STAMP = re.compile(r"\d{8}T\d{6}Z")


class SavepointRetention(KnownSettings, dg.Config):
    """What becomes of a schedule's earlier savepoints when it has taken a new one.

    Args:
        made_by: The schedule's name; what another one made, or a person, is left alone.
        prefix: What the names of its savepoints begin with.
        count: So many newest are kept; null for any number.
        max_age: Seconds; older ones are deleted; null for any age. The newest is always kept.
    """

    made_by: str = Field(description="name of the schedule; others' savepoints are left alone")
    prefix: str = Field(description="what the names of its savepoints begin with")
    count: int | None = Field(default=None, ge=1, description="so many newest are kept; null for any number")
    max_age: float | None = Field(default=None, gt=0, description="seconds; older ones are deleted, but never the newest")

    def is_mine(self, partition: str) -> bool:
        """Whether the name is one that the schedule gives."""
        return partition.startswith(self.prefix) and bool(_STAMP.fullmatch(partition[len(self.prefix) :]))


@dataclass(frozen=True)
class Recorded:
    """A savepoint of the schedule. `triggered`: seconds since 1970."""

    partition: str
    location: str
    triggered: float


def expired(savepoints: Iterable[Recorded], retention: SavepointRetention) -> list[Recorded]:
    """Those that are not to be kept, oldest last. Ages count from the newest savepoint."""
    newest_first = sorted(savepoints, key=lambda one: (one.triggered, one.partition), reverse=True)
    return [
        one
        for number, one in enumerate(newest_first)
        if number > 0
        and (
            (retention.count is not None and number >= retention.count)
            or (retention.max_age is not None and newest_first[0].triggered - one.triggered > retention.max_age)
        )
    ]


def retain(
    context: dg.AssetExecutionContext,
    storage: CheckpointStorage,
    asset: SavepointAsset,
    retention: SavepointRetention,
    newest: Recorded,
) -> list[str]:
    """Delete the schedule's expired savepoints, and their partitions.

    What cannot be deleted now is left to the next time.

    Args:
        context: Of the run that has just taken the newest one.
        storage: The pipeline's.
        asset: The pipeline's savepoints.
        retention: What to keep.
        newest: Just taken; Dagster does not know it yet.

    Returns:
        The partitions deleted.
    """
    instance = context.instance
    mine = [newest]
    for partition in instance.get_dynamic_partitions(asset.partitions):
        if not retention.is_mine(partition) or partition == newest.partition:
            continue
        recorded = asset.find(instance, partition)
        if recorded is None and partition < newest.partition:  # an earlier tick's that came to nothing
            instance.delete_dynamic_partition(asset.partitions, partition)
        elif recorded is not None and _value(recorded, MADE_BY) == retention.made_by:
            mine.append(Recorded(partition, str(_value(recorded, LOCATION)), float(_value(recorded, TRIGGERED) or 0)))
    deleted = []
    try:
        relied_upon = _relied_upon(storage)
        for one in expired(mine, retention):
            if one.location in relied_upon:
                context.log.info(f"Savepoint {one.location} is kept: the pipeline would restart from it.")
                continue
            try:
                storage.open_savepoint(one.location).delete()
            except MissingCheckpoint:
                context.log.warning(f"Savepoint {one.location} was to be deleted, and is gone already.")
            instance.delete_dynamic_partition(asset.partitions, one.partition)
            deleted.append(one.partition)
    except StorageError as error:
        context.log.warning(f"Old savepoints could not be deleted; the next savepoint tries again: {error}")
    if deleted:
        context.log.info(f"Deleted expired savepoints: {', '.join(deleted)}.")
    return deleted


def _relied_upon(storage: CheckpointStorage) -> set[str]:
    """The savepoints that a restart of the pipeline would need."""
    state = storage.read_state()
    if state is None:
        return set()
    locations = {pointer.location for pointer in state.listed} | {state.job.savepoint}
    return locations | {storage.relative(location) for location in locations if location.startswith(storage.url)}


def _value(recorded: dg.AssetMaterialization, name: str) -> Any:
    value = recorded.metadata.get(name)
    return value.value if value is not None else None
