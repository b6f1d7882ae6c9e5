"""The object store: one small interface to S3 and to local directories.

Knows keys and bytes; must not know checkpoints, pipelines or leases.

The interface follows obstore: ``put(mode="create" | "overwrite" | UpdateVersion(etag))``, with one error for each conclusion
that a caller may draw (see :mod:`dagster_checkpoints.errors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol
from uuid import uuid4

from dagster_checkpoints.errors import (
    AlreadyExists,
    ConditionalWritesUnsupported,
    InvalidKey,
    Precondition,
    StorageError,
)

RESERVED_PREFIX = ".~"
"""Prefix of names that the local store reserves (temporary files, its lock); they are never keys."""


@dataclass(frozen=True)
class ObjectInfo:
    """The description of an object, without its bytes.

    Args:
        key: the object's key, relative to the store's root, with ``/`` between parts.
        size: the object's size in bytes.
        modified: time of the last write by the store's clock; for display, never for decisions.
        sha256: sha256 of the bytes, hexadecimal, if the store has computed or checked it when they were written, and says so
            when it is asked about this one object; else None.
    """

    key: str
    size: int
    modified: datetime
    sha256: str | None = None


@dataclass(frozen=True)
class UpdateVersion:
    """Replace the object only if its etag is still this one.

    Args:
        etag: the version, as returned by ``put`` or ``get_with_etag``; opaque.
    """

    etag: str


PutMode = Literal["create", "overwrite"] | UpdateVersion


class ObjectStore(Protocol):
    """A store of objects below one root. Safe to use from several threads at once."""

    @property
    def url(self) -> str:
        """The root's URL, e.g. ``s3://bucket/prefix``; never ends with a slash."""

    @property
    def poll_seconds(self) -> float:
        """Default number of seconds between two looks for new objects: short where a look costs nothing."""

    def change_mark(self, prefix: str) -> str | None:
        """A text that changes when an object below a folder is created, replaced or deleted; much cheaper than a listing.

        Args:
            prefix: the folder, with a slash at its end; without folders in it.

        Returns:
            None if the store shows changes in a listing only. File systems count time in ticks: of two changes within some
            milliseconds the second may leave the mark as it is.

        Raises:
            StorageUnavailable: the folder cannot be read.
        """

    def check(self) -> None:
        """Check that the root can be read and written, also with conditional writes, and deleted from. Called when a run starts.

        Raises:
            StorageUnavailable: the root cannot be read, written or deleted from; names the URL and the cause.
            ConditionalWritesUnsupported: the store ignores the conditions of writes.
        """

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises NotFound, StorageUnavailable."""

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """The object's bytes and the etag for a later :class:`UpdateVersion`."""

    def stream(self, key: str, chunk_size: int = 1024 * 1024) -> Iterator[bytes]:
        """The object's bytes in pieces; NotFound is raised when the first piece is read."""

    def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> str:
        """Write an object, completely or not at all, and return its etag.

        Raises:
            AlreadyExists: mode ``create``, and another write has created the object.
            Precondition: mode :class:`UpdateVersion`, and the object has changed or does not exist.
            WriteConflict: the store could not decide between concurrent writes; nothing was written.
            StorageUnavailable: nothing was written.
            OutcomeUnknown: it is unknown whether the object was written.
        """

    def put_file(self, key: str, path: Path) -> None:
        """Write a file's bytes under ``key``; replaces an existing object."""

    def copy_from(
        self, source: ObjectStore, source_key: str, key: str, size: int | None = None, *, etag: str = "", hashed: bool = False
    ) -> bool:
        """Copy an object of another store without its bytes passing through this process; replaces an existing object.

        Args:
            source: the store that holds the object.
            source_key: the object's key in ``source``.
            key: the copy's key in this store.
            size: the object's size in bytes if known: it may save a request.
            etag: the version of the object, as S3 lists it; "" for any.
            hashed: ask the store to compute the copy's sha256, if it can: :meth:`head` then returns it.

        Returns:
            False if this store cannot, or may not, copy from ``source``; then nothing was written.

        Raises:
            NotFound: ``source`` has no such object.
            Precondition: the object has another version than ``etag``; nothing was written.
        """

    def sibling(self, url: str) -> ObjectStore | None:
        """The store at another URL, with this store's client and settings; None if that URL is of another kind."""

    def head(self, key: str) -> ObjectInfo | None:
        """The description of the object under the key; None if there is no object."""

    def folders(self, prefix: str = "") -> Iterator[str]:
        """Names of the directories directly below ``prefix``, which is empty or ends with ``/``."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Descriptions of the objects whose key begins with ``prefix``, in the order of their keys."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a key without an object is not an error."""


def validate_key(key: str) -> str:
    """Refuse keys that could leave the root or mean two things.

    Raises:
        InvalidKey: the key is empty or absolute, has empty, ``.`` or ``..`` parts, NUL or backslash, or uses a reserved name.
    """
    parts = key.split("/")
    bad_part = any(part in ("", ".", "..") or part.startswith(RESERVED_PREFIX) for part in parts)
    if bad_part or "\0" in key or "\\" in key:
        raise InvalidKey(
            f"expected a relative key of plain parts joined by '/', found {key!r}: no empty, '.' or '..' "
            f"parts, no backslash, and no part may begin with {RESERVED_PREFIX!r}"
        )
    return key


def probe(store: ObjectStore) -> None:
    """Write, compare and delete a small object, to find problems when a run starts and not at its first commit.

    Raises:
        ConditionalWritesUnsupported: the store accepted a second ``create``, or an update of a wrong version.
        StorageUnavailable: the object could not be written or deleted.
    """
    key = f".probe-{uuid4().hex}"
    try:
        etag = store.put(key, b"a", "create")
        with suppress(AlreadyExists):
            store.put(key, b"b", "create")
            raise _unsupported(store, "create only if absent (If-None-Match: *)")
        store.put(key, b"c", UpdateVersion(etag))
        with suppress(Precondition):
            store.put(key, b"d", UpdateVersion(etag))
            raise _unsupported(store, "replace only if unchanged (If-Match)")
    except BaseException:
        with suppress(StorageError):
            store.delete([key])
        raise
    store.delete([key])  # without the right to delete, storage would grow with each checkpoint


def _unsupported(store: ObjectStore, condition: str) -> ConditionalWritesUnsupported:
    return ConditionalWritesUnsupported(
        f"expected the storage at {store.url} to honour conditional writes, found that it ignores {condition}. "
        "Two runs could then both complete checkpoints. Use Amazon S3, a recent MinIO, Ceph or another "
        "server that implements them, or a local directory"
    )
