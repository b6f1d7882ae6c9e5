"""Deletes checkpoints, claimed savepoints and what killed owners have left behind, of one pipeline.

Performs the steps of :mod:`dagster_checkpoints.execution.checkpoint_deletion`. Must not know which checkpoints are retained.
"""

from __future__ import annotations

from dagster_checkpoints.execution.checkpoint_deletion import (
    DeleteMetadata,
    DeleteSavepoint,
    DiscardFiles,
    ForgetCheckpoint,
    IsRegistered,
    ListMetadata,
    SweepFiles,
    SweepMetadata,
    SweepSavepoints,
    delete_checkpoint,
    sweep,
    sweep_metadata,
)
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.storage.checkpoint_metadata import MetadataFiles
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.savepoint_places import SavepointPlaces
from dagster_checkpoints.storage.savepoints import SavepointDirectory
from dagster_checkpoints.storage.shared_files import SharedFiles


class CheckpointDeletion:
    """What :class:`~dagster_checkpoints.storage.checkpoints.CheckpointStorage` deletes with; its methods say when.

    Args:
        metadata: the metadata of the pipeline's checkpoints.
        shared: the pipeline's state files in ``shared/``.
        savepoints: the pipeline's savepoints.
    """

    def __init__(self, metadata: MetadataFiles, shared: SharedFiles, savepoints: SavepointPlaces) -> None:
        self._metadata = metadata
        self._shared = shared
        self._savepoints = savepoints

    def delete(self, location: str, savepoint: SavepointDirectory | None, ownership: Ownership | None) -> int:
        """Delete a checkpoint, or a claimed savepoint. Returns the number of files deleted from ``shared/``.

        Args:
            location: the checkpoint's or savepoint's, relative to the pipeline's directory.
            savepoint: the savepoint's directory; None for a checkpoint.
            ownership: this process's; None if it does not own the pipeline, then ``state.json`` stays as it is.
        """

        def perform(request: object) -> object:
            match request:
                case ForgetCheckpoint():
                    if ownership is not None:
                        ownership.forget(location)
                case DeleteSavepoint() if savepoint is not None:
                    savepoint.delete()
                case DeleteMetadata():
                    self._metadata.delete(location)
                case DiscardFiles():
                    return self._shared.discard(self._metadata.key(location))
                case _:
                    raise TypeError(f"expected a request of the deletion of {location}, found {request!r}")
            return None

        return drive(delete_checkpoint(location, savepoint is not None), perform)

    def sweep(self, ownership: Ownership, *, files: bool) -> None:
        """Delete incomplete savepoints and metadata of earlier owners; with ``files``, also the files that no metadata names."""

        def perform(request: SweepSavepoints | SweepMetadata | SweepFiles) -> int:
            match request:
                case SweepSavepoints():
                    return self._savepoints.sweep(ownership)
                case SweepMetadata():
                    return self._sweep_metadata(ownership)
                case SweepFiles():
                    return self._shared.sweep()

        drive(sweep(files), perform)

    def _sweep_metadata(self, ownership: Ownership) -> int:
        """Delete the metadata that earlier owners wrote of checkpoints they never completed. Returns its number."""

        def perform(request: object) -> object:
            match request:
                case ListMetadata():
                    return self._metadata.stored()
                case IsRegistered(location):
                    return self._metadata.key(location) in self._shared.registry.checkpoints()
                case DeleteMetadata(location):
                    self._metadata.delete(location)
                case _:
                    raise TypeError(f"expected a request of the sweep of metadata, found {request!r}")
            return None

        return drive(sweep_metadata(ownership.steps), perform)
