"""The names of state files in ``shared/``, and storing such a file; as steps.

An owner stores new files under names that contain its own epoch, and deletes no files of later owners. Stores cannot fence a
deletion: a deletion that an earlier owner requested may be carried out at any later time, but it names no file that was
written after the take-over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from dagster_checkpoints.execution.storage_steps import Steps

_SHARED = re.compile(r"([0-9a-f]{64})(?:-([1-9]\d*))?")


class SharedName(NamedTuple):
    """The name of a file in ``shared/``: the sha256 of its bytes, and the epoch of the owner that stored them.

    The same bytes under two epochs are two files; epoch 0 stands for a name without an epoch, which earlier releases used.
    """

    sha256: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.sha256}-{self.epoch}" if self.epoch else self.sha256

    @classmethod
    def parse(cls, name: str) -> SharedName | None:
        """Parse a name; None if it is no name of a shared file."""
        match = _SHARED.fullmatch(name)
        return cls(match[1], int(match[2] or 0)) if match else None


class FileRegistry(Protocol):
    """The files that each checkpoint names: :class:`dagster_checkpoints.storage.SharedStateRegistry`."""

    def lend(self, borrower: Hashable, name: str) -> bool:
        """Name a file for a checkpoint; False if storage does not have it."""

    def reserve(self, checkpoint: Hashable, name: str) -> bool:
        """Name a file before it is stored; returns whether it must be stored. Waits while it is being deleted."""

    def stored(self, checkpoint: Hashable, name: str) -> None:
        """The file is stored."""


class PutFile(msgspec.Struct, frozen=True):
    """Store the file's bytes under this name in ``shared/``. Answer: None."""

    name: str


class StoredName(msgspec.Struct, frozen=True):
    """The name of a stored file in ``shared/``, and whether it was uploaded by this call."""

    name: SharedName
    uploaded: bool


class SharedNames:
    """The names that an owner gives to state files, and the names of files that it found.

    Args:
        epoch: returns the fencing epoch of the owner; 0 before the pipeline is acquired.
    """

    def __init__(self, epoch: Callable[[], int]) -> None:
        self._epoch = epoch
        self._earlier: dict[str, SharedName] = {}

    def known(self, names: Iterable[SharedName]) -> None:
        """These files of earlier owners are stored and complete: their bytes are not stored under another name."""
        self._earlier.update({name.sha256: name for name in names})

    def earlier(self, sha256: str) -> SharedName | None:
        """The name under which an earlier owner stored the bytes; None if it is not known."""
        return self._earlier.get(sha256)

    def own(self, sha256: str) -> SharedName:
        """The name under which this owner stores the bytes; no other owner uses that name."""
        return SharedName(sha256, self._epoch())


def name_stored(names: SharedNames, registry: FileRegistry, checkpoint: Hashable, sha256: str) -> SharedName | None:
    """Name a file for a checkpoint whose bytes are stored. Returns its name; None if they are not stored, or being stored.

    Args, Raises: as for :func:`store_file`.
    """
    candidates = (names.earlier(sha256), names.own(sha256))
    return next((name for name in candidates if name is not None and registry.lend(checkpoint, str(name))), None)


def store_file(names: SharedNames, registry: FileRegistry, checkpoint: Hashable, sha256: str) -> Steps[StoredName]:
    """Store a file unless its bytes are stored; the checkpoint names the file before that.

    Args:
        names: the names of this owner.
        registry: the registry of the pipeline's files.
        checkpoint: the pending checkpoint that names the file from now on.
        sha256: sha256 of the file's bytes.

    Raises:
        CheckpointDiscarded: the checkpoint was discarded.
        StorageError: as the request; the checkpoint still names the file.
    """
    known = name_stored(names, registry, checkpoint, sha256)
    if known is not None:
        return StoredName(known, uploaded=False)
    own = names.own(sha256)
    name = str(own)
    needed = registry.reserve(checkpoint, name)
    if needed:
        yield PutFile(name)
        registry.stored(checkpoint, name)
    return StoredName(own, needed)
