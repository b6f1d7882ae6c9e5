"""The ``_metadata`` files of one pipeline's checkpoints: written, read, listed and deleted.

Must not know what their bytes say, who owns the pipeline, nor savepoints.
"""

from __future__ import annotations

from dagster_checkpoints.errors import InvalidKey, MissingCheckpoint, NotFound
from dagster_checkpoints.execution.checkpoint_deletion import FoundMetadata
from dagster_checkpoints.execution.checkpoint_writing import write_metadata
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.storage.created_objects import metadata_performer
from dagster_checkpoints.storage.layout import METADATA, CheckpointKey, Layout


class MetadataFiles:
    """Locations are relative to the pipeline's directory, as in ``state.json``.

    Args:
        store: the object store that holds the pipeline.
        layout: the names of the pipeline's files.
    """

    def __init__(self, store: ObjectStore, layout: Layout) -> None:
        self._store = store
        self._layout = layout

    def write(self, checkpoint_id: int, epoch: int, data: bytes) -> str:
        """Create a checkpoint's ``_metadata`` only if it is absent. Returns its location; raises as the object store."""
        location = self._layout.checkpoint(checkpoint_id, epoch)
        subject = f"checkpoint {checkpoint_id} of epoch {epoch} was written before, and a checkpoint never changes"
        drive(write_metadata(), metadata_performer(self._store, self._layout.at(location, METADATA), data, subject))
        return location

    def read(self, location: str) -> bytes:
        """The bytes of a checkpoint's ``_metadata``.

        Raises:
            MissingCheckpoint: there is none at the location; names the checkpoints in storage.
        """
        try:
            return self._store.get(self._layout.at(location, METADATA))
        except NotFound as error:
            stored = ", ".join(metadata.location for metadata in self.stored())
            instead = (
                f"Checkpoints there: {stored}. Restore from one of these, or start" if stored else "There is no checkpoint: start"
            )
            raise MissingCheckpoint(
                f"expected the metadata of a checkpoint at {self._store.url}/{self._layout.at(location, METADATA)}, found none. "
                f"{instead} without restoring"
            ) from error

    def stored(self) -> list[FoundMetadata]:
        """Every ``_metadata`` in storage, newest first, whether its checkpoint was ever completed or not."""
        stored = []
        for info in self._store.list(self._layout.checkpoints):
            location, _, name = info.key.removeprefix(f"{self._layout.pipeline}/").rpartition("/")
            key = self._layout.parse_checkpoint(location)
            if name == METADATA and key is not None:
                stored.append((key.epoch, key.checkpoint_id, location))
        return [FoundMetadata(location, epoch) for epoch, _, location in sorted(stored, reverse=True)]

    def delete(self, location: str) -> None:
        """Delete a checkpoint's ``_metadata`` if it exists."""
        self._store.delete([info.key for info in self._store.list(self._layout.at(location))])

    def key(self, location: str) -> CheckpointKey:
        """The id and epoch that a location names. Raises InvalidKey."""
        key = self._layout.parse_checkpoint(location)
        if key is None:
            raise InvalidKey(f"expected a location such as {self._layout.checkpoint(42, 1)}, found {location!r}")
        return key
