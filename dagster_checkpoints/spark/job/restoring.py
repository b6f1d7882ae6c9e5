"""Chooses the start point of a run from storage, by the rules of :mod:`dagster_checkpoints.execution.start_point`.

It must not start Spark. Everything is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer
from dagster_checkpoints.execution.start_point import (
    ListSavepoints,
    NamedPlace,
    NamedSavepoint,
    ReadRestorable,
    RegisterFiles,
    ResolveName,
    RestorableCheckpoint,
    StartOptions,
)
from dagster_checkpoints.execution.storage_steps import Steps, drive
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.session.spark_version import installed_version
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.state.rescaled_instances import note_instances, with_known_instances
from dagster_checkpoints.state.restore import validate_restore
from dagster_checkpoints.state.spark_versions import check_spark_version
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

StartPoint = start_point.StartPoint[Restored]


class RestoreOptions(StartOptions, Protocol):
    """The part of the job's options that concerns the start."""

    @property
    def allow_non_restored_state(self) -> bool: ...


def choose_start(
    pipeline: Pipeline, storage: CheckpointStorage, options: RestoreOptions, unusable: Collection[str] = ()
) -> StartPoint:
    """Choose the start point of an owned pipeline; see :func:`start_point.choose_start`.

    Args:
        pipeline: The pipeline that is started.
        storage: The storage of its checkpoints; this run owns the pipeline.
        options: The user's options.
        unusable: Locations of checkpoints whose state files were found corrupt.
    """
    ownership = storage.ownership
    assert ownership is not None

    most_instances = dict(ownership.previous.job.most_instances)

    def perform(request: object) -> object:
        match request:
            case RegisterFiles(location):
                retained = decode(storage.read_metadata(location), storage.url_of(location))
                storage.register(location, retained.files())
                note_instances(retained, most_instances)
                return None
            case ReadRestorable(location):
                allowed = options.allow_non_restored_state
                return _restorable(storage, read_restored(pipeline, storage, location, allowed, most_instances))
            case ResolveName(name):
                if storage.is_savepoint(name):
                    return NamedPlace(storage.open_savepoint(name).location, savepoint=True)
                return NamedPlace(storage.relative(name), savepoint=False)
            case ListSavepoints():
                return [NamedSavepoint(stored.checkpoint_id, stored.location) for stored in storage.list_savepoints()]
            case _:
                raise TypeError(f"expected a request of the choice of the start, found {request!r}")

    steps: Steps[StartPoint] = start_point.choose_start(
        ownership.previous, ownership.retained, options, storage.url, unusable, ownership.steps.unlisted
    )
    return drive(steps, perform)


def _restorable(storage: CheckpointStorage, restored: Restored) -> RestorableCheckpoint[Restored]:
    metadata = restored.metadata
    pointer = CheckpointPointer(
        checkpoint_id=restored.plan.checkpoint_id,
        location=restored.location,
        kind=metadata.kind,
        epoch=metadata.epoch,
        job_id=int(metadata.job_id or 0),
        completed_at=datetime.fromtimestamp(metadata.completed_at, UTC),
    )
    savepoint = restored.savepoint
    own = savepoint is None or savepoint.own
    return RestorableCheckpoint(restored, pointer, storage.url_of(restored.location), savepoint is not None, own)


def read_restored(
    pipeline: Pipeline,
    storage: CheckpointStorage,
    location: str,
    allow_non_restored_state: bool,
    most_instances: Mapping[str, int] = MappingProxyType({}),
) -> Restored:
    """Read a checkpoint or savepoint and check that the pipeline can be restored from it.

    Args:
        pipeline: The pipeline that is started.
        storage: The storage of its checkpoints.
        location: The location of the checkpoint or savepoint.
        allow_non_restored_state: See `validate_restore`.
        most_instances: By the uid of a stage, the largest number of instances that its job or the retained checkpoints know: the
            sinks of those that are gone have to take back what they committed later.

    Raises:
        StateError, StorageError: The checkpoint is corrupt, of an unknown version, deleted, or does not fit the pipeline or the
            installed Spark.
    """
    savepoint = storage.open_savepoint(location) if storage.is_savepoint(location) else None
    if savepoint is not None:
        metadata = decode(savepoint.read_metadata(), f"{savepoint.url}/_metadata")
    else:
        metadata = decode(storage.read_metadata(location), f"{storage.url_of(location)}/_metadata")
        if storage.layout.parse_checkpoint(location) is not None:
            storage.register(location, metadata.files())  # so that the sweep keeps them, also if the checkpoint is not retained
    check_spark_version(metadata, installed_version())
    plan = validate_restore(pipeline, with_known_instances(metadata, most_instances), allow_non_restored_state)
    return Restored(plan, location, savepoint)
