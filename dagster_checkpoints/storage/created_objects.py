"""Performs the requests for objects that are created once, and never change."""

from __future__ import annotations

from collections.abc import Callable

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


def metadata_performer(store: ObjectStore, key: str, data: bytes, subject: str) -> Callable[[object], None]:
    """Performs the requests for one ``_metadata`` file, which never changes: :class:`CreateObject` and :class:`CompareObject`.

    Args:
        store: the object store that holds the file.
        key: the file's key.
        data: the file's bytes.
        subject: the checkpoint of the metadata, and why other bytes are wrong, for the text of errors.
    """

    def perform(request: object) -> None:
        match request:
            case CreateObject():
                store.put(key, data, "create")
            case CompareObject():
                if store.get(key) != data:
                    raise AlreadyExists(f"expected no metadata at {store.url}/{key}, found metadata of other content: {subject}")
            case _:
                raise TypeError(f"expected a request for {store.url}/{key}, found {request!r}")

    return perform
