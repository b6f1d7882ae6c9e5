"""The small interface behind which S3 and local directories look the same.

Knows keys and bytes; must not know checkpoints, pipelines or leases.

The shape follows obstore: ``put(mode="create" | "overwrite" | UpdateVersion(etag))`` with errors that say
what a caller may conclude (see :mod:`dagster_checkpoints.storage.errors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol
from uuid import uuid4

from dagster_checkpoints.storage.errors import (
    AlreadyExists,
    ConditionalWritesUnsupported,
    InvalidKey,
    OutcomeUnknown,
    Precondition,
    StorageError,
    StorageUnavailable,
    WriteConflict,
)

RESERVED_PREFIX = ".~"
"""Names that begin so are the local store's own (temporary files, its lock) and never keys."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object without its bytes.

    Args:
        key: relative to the store's root, ``/`` between parts.
        size: bytes.
        modified: time of the last write by the store's clock; for display, never for decisions.
    """

    key: str
    size: int
    modified: datetime


@dataclass(frozen=True)
class UpdateVersion:
    """Replace the object only if its etag is still this one.

    Args:
        etag: as returned by ``put`` or ``get_with_etag``; opaque.
    """

    etag: str


PutMode = Literal["create", "overwrite"] | UpdateVersion


class ObjectStore(Protocol):
    """A root under which objects live. Safe to use from several threads at once."""

    @property
    def url(self) -> str:
        """The root as people write it, e.g. ``s3://bucket/prefix``; never ends with a slash."""

    def check(self) -> None:
        """Find out at start whether the root can be read and written, conditionally too.

        Raises:
            StorageUnavailable: names the URL and the cause.
            ConditionalWritesUnsupported: the store ignores conditions.
        """

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises NotFound, StorageUnavailable."""

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """The object's bytes and the etag for a later :class:`UpdateVersion`."""

    def stream(self, key: str, chunk_size: int = 1024 * 1024) -> Iterator[bytes]:
        """The object's bytes in pieces; NotFound comes with the first one."""

    def get_file(self, key: str, path: Path) -> None:
        """Write the object to ``path``, which appears whole or not at all."""

    def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> str:
        """Write an object, whole or not at all, and return its etag.

        Raises:
            AlreadyExists: mode ``create`` and there is an object that is not this very write.
            Precondition: mode :class:`UpdateVersion` and the object has changed or is gone.
            WriteConflict: the store could not decide between concurrent writes; nothing was written.
            StorageUnavailable: nothing was written.
            OutcomeUnknown: nobody knows.
        """

    def put_file(self, key: str, path: Path) -> None:
        """Write a file's bytes under ``key``, replacing what is there."""

    def copy_from(self, source: ObjectStore, source_key: str, key: str, size: int | None = None) -> bool:
        """Copy an object of another store, without its bytes passing through this process, replacing what is there.

        Args:
            source: where it is.
            source_key: its key there.
            key: its key here.
            size: its bytes, if known: it may spare a request.

        Returns:
            False if this store cannot, or may not, copy from that one; nothing was written.

        Raises:
            NotFound: there is no such object.
        """

    def sibling(self, url: str) -> ObjectStore | None:
        """The store at another URL, reached as this one is; None if that URL is of another kind."""

    def head(self, key: str) -> ObjectInfo | None:
        """What is under the key, or None."""

    def folders(self, prefix: str = "") -> Iterator[str]:
        """Names that follow ``prefix``, which is empty or ends with ``/``, and are followed by ``/`` in some key."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, in the order of their keys."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error."""


def validate_key(key: str) -> str:
    """Refuse keys that could leave the root or mean two things.

    Raises:
        InvalidKey: empty, absolute, with empty, ``.`` or ``..`` parts, NUL or backslash, or a reserved name.
    """
    parts = key.split("/")
    bad = any(part in ("", ".", "..") or part.startswith(RESERVED_PREFIX) for part in parts)
    if bad or "\0" in key or "\\" in key:
        raise InvalidKey(
            f"expected a relative key of plain parts joined by '/', found {key!r}: no empty, '.' or '..' "
            f"parts, no backslash, and no part may begin with {RESERVED_PREFIX!r}"
        )
    return key


_CREATE_ATTEMPTS = 3


def create_if_absent(store: ObjectStore, key: str, data: bytes) -> bool:
    """Create an object, trying again when nobody knows whether it landed.

    Returns:
        False if there is one, which may be this very write whose answer was lost: compare.

    Raises:
        StorageUnavailable, WriteConflict: nothing was written.
        OutcomeUnknown: still nobody knows.
    """
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            store.put(key, data, "create")
            return True
        except AlreadyExists:
            return False
        except OutcomeUnknown:
            # Once more: it lands now, or is found to be there.
            if attempt == _CREATE_ATTEMPTS - 1:
                raise
        except (StorageUnavailable, WriteConflict) as error:
            if attempt:  # an earlier attempt may have landed
                raise OutcomeUnknown(str(error)) from error
            raise
    raise AssertionError("unreachable")


def probe(store: ObjectStore) -> None:
    """Write, compare and delete a small object, to learn at start what would else be learnt at a commit.

    Raises:
        ConditionalWritesUnsupported: a second ``create``, or an update of a wrong version, was accepted.
        StorageUnavailable: from the store.
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
    finally:
        with suppress(StorageError):
            store.delete([key])


def _unsupported(store: ObjectStore, what: str) -> ConditionalWritesUnsupported:
    return ConditionalWritesUnsupported(
        f"expected the storage at {store.url} to honour conditional writes, found that it ignores {what}. "
        "Two runs could then both complete checkpoints. Use Amazon S3, a recent MinIO, Ceph or another "
        "server that implements them, or a local directory"
    )
