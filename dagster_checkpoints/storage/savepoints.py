"""A savepoint's directory: self-contained, so that it may be moved, copied and restored anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dagster_checkpoints.storage.state_files import StateFileLike, StoredFile


@dataclass(frozen=True)
class StoredSavepoint:
    """A savepoint found in the pipeline's own ``savepoints/``."""

    checkpoint_id: int
    name: str
    location: str
    url: str
    modified: datetime


@dataclass(frozen=True)
class StateFileProblem:
    """A state file that is not what the metadata says."""

    sha256: str
    expected: str
    found: str
    where: str


class SavepointDirectory:
    """One savepoint's files."""

    url: str
    location: str
    own: bool

    def upload_files(self, paths: Mapping[str, Path]) -> dict[str, StoredFile]:
        raise NotImplementedError

    def write_metadata(self, data: bytes, files: Mapping[str, int]) -> str:
        raise NotImplementedError

    def read_metadata(self) -> bytes:
        raise NotImplementedError

    def fetch_state(self, files: Iterable[StateFileLike], destination: Path, *, checkpoint: str = "") -> None:
        raise NotImplementedError

    def verify(self, files: Mapping[str, int]) -> list[StateFileProblem]:
        raise NotImplementedError

    def delete(self) -> None:
        raise NotImplementedError
