"""Where things lie below the storage root. Names only: nothing here reads or writes.

::

    <root>/<pipeline>/state.json                          owner, epoch, lease, newest completed checkpoint
    <root>/<pipeline>/checkpoints/chk-42-<epoch>/_metadata
    <root>/<pipeline>/shared/<sha256>                     state files, content-addressed
    <root>/<pipeline>/savepoints/savepoint-43-<id>/
    <root>/<pipeline>/requests/<id>.json

A *location* is a checkpoint's directory relative to the pipeline's, such as ``checkpoints/chk-42-3``: it
stays true when the whole root is moved or copied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from dagster_checkpoints.storage.errors import InvalidKey

METADATA = "_metadata"
_PIPELINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
_CHECKPOINT = re.compile(r"checkpoints/chk-(\d+)-(\d+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointKey(NamedTuple):
    """A checkpoint attempt: ids come again under a later epoch when an earlier owner died in between."""

    checkpoint_id: int
    epoch: int


@dataclass(frozen=True)
class Layout:
    """Keys of one pipeline's objects.

    Args:
        pipeline: its name; becomes a directory.

    Raises:
        InvalidKey: the name cannot be a directory's.
    """

    pipeline: str

    def __post_init__(self) -> None:
        if not _PIPELINE.fullmatch(self.pipeline):
            raise InvalidKey(
                f"expected a pipeline name of letters, digits, '_', '-' and '.', beginning with a letter or "
                f"digit, found {self.pipeline!r}: it names a directory of the checkpoint storage"
            )

    @property
    def state(self) -> str:
        return f"{self.pipeline}/state.json"

    @property
    def checkpoints(self) -> str:
        return f"{self.pipeline}/checkpoints/"

    @property
    def shared(self) -> str:
        return f"{self.pipeline}/shared/"

    def shared_file(self, sha256: str) -> str:
        if not _SHA256.fullmatch(sha256):
            raise InvalidKey(f"expected a sha256 of 64 hexadecimal digits, found {sha256!r}")
        return f"{self.shared}{sha256}"

    def at(self, location: str, name: str = "") -> str:
        """The key of something in the directory ``location``."""
        return f"{self.pipeline}/{location.strip('/')}/{name}"

    @staticmethod
    def checkpoint(checkpoint_id: int, epoch: int) -> str:
        """The location of a checkpoint."""
        return f"checkpoints/chk-{checkpoint_id}-{epoch}"

    @staticmethod
    def parse_checkpoint(location: str) -> CheckpointKey | None:
        """The id and epoch in a location, or None if it is not a checkpoint's."""
        match = _CHECKPOINT.fullmatch(location.strip("/"))
        return CheckpointKey(int(match[1]), int(match[2])) if match else None
