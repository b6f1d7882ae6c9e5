"""Fencing: an older owner of the pipeline must not change the rows that a newer owner writes to the same place.

::

    .fences/delays-0.json            the newest owner that has opened instance 0 of stage "delays" (name: the sink's choice)
    .staging/delays-0/e7-…/          rows that the owner of epoch 7 writes

An owner may be suspended for longer than its lease, in the middle of a restart, and resume after a newer owner has taken over:
it must neither hide what the newer owner committed nor abort what the newer owner pre-committed. File systems have no fenced
rename, so the owner checks right before each such change. The name of a staged directory contains its owner's epoch; an older
owner never aborts it.

Must not know the staged or committed rows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec

from dagster_checkpoints.files.durable import sync
from dagster_checkpoints.sinks.transactions import stages_for_newer_owner
from dagster_checkpoints.systems.errors import SinkFenced, SinkPathInUse

_STAGED = re.compile(r"e(\d+)(?:\.(\w+))?-.*")


class _Owner(msgspec.Struct, frozen=True):
    """Content of an instance's file. Epochs of two histories cannot be compared."""

    epoch: int
    history: str = ""
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_OWNER = msgspec.json.Decoder(_Owner)


class OwnerFile(Protocol):
    """The file that names the newest owner of an instance."""

    @property
    def place(self) -> str:
        """The file's path or URL, for errors."""

    def read(self) -> bytes | None:
        """The file's bytes; None if there is no file."""

    def replace(self, data: bytes) -> None:
        """Create or replace the file, durably and in one step; refused if it has changed since `read`, where this is possible."""


class LocalOwnerFile:
    """An :class:`OwnerFile` on a local or mounted file system.

    Args:
        file: its path.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def place(self) -> str:
        return str(self._file)

    def read(self) -> bytes | None:
        try:
            return self._file.read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, data: bytes) -> None:
        self._file.parent.mkdir(exist_ok=True)
        temporary = self._file.with_name(f"{self._file.name}-{uuid4().hex}")
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, self._file)
        sync(self._file.parent)


class Fence:
    """The right of one owner to change one instance's rows.

    Args:
        file: the file that names the instance's newest owner.
        epoch: the owner's fencing epoch; 0 if the pipeline has no owners: then nothing is fenced.
        history: random id of the storage that counts the epochs.
    """

    def __init__(self, file: OwnerFile, epoch: int, history: str) -> None:
        self._file = file
        self._owner = _Owner(epoch, history)

    @property
    def prefix(self) -> str:
        """The prefix of the names of this owner's staged directories."""
        return f"e{self._owner.epoch}.{self._owner.history}-" if self._owner.history else f"e{self._owner.epoch}-"

    def is_newer(self, staged: str) -> bool:
        """Whether a staged directory of this name belongs to a newer owner."""
        match = _STAGED.fullmatch(staged)
        ours = match is not None and (match[2] or "") == self._owner.history
        return ours and match is not None and stages_for_newer_owner(self._owner.epoch, int(match[1]))

    def take(self) -> None:
        """Record this owner as the newest one: older owners are refused from now on.

        Raises:
            SinkFenced: a newer owner has written to the sink.
            SinkPathInUse: the file that names the newest owner cannot be read.
        """
        found = self._read()
        if found == self._owner or not self._owner.epoch:
            return
        if found is not None and found.history == self._owner.history and found.epoch > self._owner.epoch:
            raise SinkFenced(
                f"expected no newer run than this one (epoch {self._owner.epoch}) to write to this sink, found in "
                f"{self._file.place} that a run of epoch {found.epoch} does: that run has taken the pipeline over while this run "
                "was suspended or cut off. This run stops and changes nothing"
            )
        self._file.replace(msgspec.json.encode(self._owner) + b"\n")

    def _read(self) -> _Owner | None:
        data = self._file.read()
        try:
            return None if data is None else _OWNER.decode(data)
        except msgspec.DecodeError as error:
            raise SinkPathInUse(
                f"expected {self._file.place} to name the run that wrote to the sink last, found a file that cannot be read: "
                f"{error}. If no run of the pipeline is alive, delete it"
            ) from error
