"""Performs the requests for objects that are created once, and never change."""

from __future__ import annotations

from dagster_checkpoints.errors import AlreadyExists
from dagster_checkpoints.execution import checkpoint_writing
from dagster_checkpoints.execution.checkpoint_writing import CompareObject, CreateObject
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.files.store import ObjectStore


def create_if_absent(store: ObjectStore, key: str, data: bytes) -> bool:
    """Create an object; try again while the outcome is unknown; see :func:`checkpoint_writing.create_if_absent`.

    Returns:
        False if the object exists. It may be this call's own write whose answer was lost: the caller compares the bytes.
    """
    return drive(checkpoint_writing.create_if_absent(), lambda _: store.put(key, data, "create"))


class MetadataObject:
    """Performs the requests for one ``_metadata`` file, which never changes.

    Args:
        store: the object store that holds the file.
        key: the file's key.
        data: the file's bytes.
        subject: the checkpoint of the metadata, and why other bytes are wrong, for the text of errors.
    """

    def __init__(self, store: ObjectStore, key: str, data: bytes, subject: str) -> None:
        self._store = store
        self._key = key
        self._data = data
        self._subject = subject

    def perform(self, request: object) -> None:
        """Perform a :class:`CreateObject` or :class:`CompareObject`."""
        match request:
            case CreateObject():
                self._store.put(self._key, self._data, "create")
            case CompareObject():
                if self._store.get(self._key) != self._data:
                    raise AlreadyExists(
                        f"expected no metadata at {self._store.url}/{self._key}, found metadata of other content: {self._subject}"
                    )
            case _:
                raise TypeError(f"expected a request for {self._store.url}/{self._key}, found {request!r}")
