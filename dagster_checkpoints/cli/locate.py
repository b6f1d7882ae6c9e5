"""From what a user types to a checkpoint or savepoint: a number, `latest`, a location, a URL or a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.storage_options import Where
from dagster_checkpoints.state import CheckpointMetadata, StateFile, decode
from dagster_checkpoints.storage import CheckpointPointer, CheckpointStorage

WHAT = (
    "LOCATION is a checkpoint's or savepoint's number, 'latest' (the latest job's newest checkpoint, or the savepoint that it "
    "was stopped with), its location as 'list' shows it, a URL, or a path."
)
_IN_STORAGE = re.compile(r"(?P<root>.+)/(?P<pipeline>[^/]+)/(checkpoints/chk-\d+-\d+|savepoints/[^/]+)(/_metadata)?/?")
_ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Found:
    """A checkpoint or savepoint that a user has named.

    Attributes:
        location: as the storage floor takes it.
    """

    storage: CheckpointStorage
    kind: Literal["checkpoint", "savepoint"]
    location: str

    @property
    def url(self) -> str:
        """Where it lies, for people."""
        return self.location if "://" in self.location else self.storage.url_of(self.location)

    def read(self) -> CheckpointMetadata:
        """Its metadata. Raises MissingCheckpoint, CorruptMetadata, UnknownMetadataVersion."""
        return decode(self.storage.read_metadata(self.location), self.url)

    def fetch(self, files: Iterable[StateFile], destination: Path) -> None:
        """Fetch some of its files, verified."""
        if self.kind == "savepoint":
            self.storage.open_savepoint(self.location).fetch_state(files, destination)
        else:
            self.storage.fetch_state(files, destination)


@contextmanager
def finding(where: Where, named: str | None) -> Iterator[Found]:
    """What the user has named; the newest if nothing.

    Raises:
        NothingThere: there is nothing by that name; says what there is.
    """
    with opened_for(where, named or "") as storage:
        yield find(storage, named)


@contextmanager
def opened_for(where: Where, named: str) -> Iterator[CheckpointStorage]:
    """The storage that what the user has named lies in: a URL or path says it, whatever the options say."""
    absolute = _absolute(named)
    if absolute is None:
        with where.open() as storage:
            yield storage
        return
    match = _IN_STORAGE.fullmatch(absolute)
    root, pipeline = (match["root"], match["pipeline"]) if match else (absolute.rstrip("/").rpartition("/")[0], _ELSEWHERE)
    with where.storage_of(where.store(root), where.pipeline or pipeline) as storage:
        yield storage


def find(storage: CheckpointStorage, named: str | None) -> Found:
    """See :func:`finding`; in a storage that is open already."""
    named = (named or "latest").strip()
    if named in ("latest", "newest"):
        return _newest(storage)
    number = named.removeprefix("chk-").removeprefix("savepoint-")
    if number.isdigit():
        return _numbered(storage, int(number))
    location = _absolute(named) or named
    if storage.is_savepoint(location):
        return Found(storage, "savepoint", storage.open_savepoint(location).location)
    return Found(storage, "checkpoint", storage.relative(location))


def found(storage: CheckpointStorage, pointer: CheckpointPointer) -> Found:
    """What `state.json` names."""
    return Found(storage, "savepoint" if pointer.kind == "savepoint" else "checkpoint", pointer.location)


def _newest(storage: CheckpointStorage) -> Found:
    """The newest checkpoint of the latest job or, once the job has ended for good, the savepoint that it was stopped with."""
    state = storage.read_state()
    if state is not None and state.newest is not None:
        return found(storage, state.newest)
    if state is not None and state.job.savepoint:
        return Found(storage, "savepoint", storage.open_savepoint(state.job.savepoint).location)
    why = "the pipeline never ran there" if state is None else "its latest job has none"
    there = [savepoint.location for savepoint in storage.list_savepoints()]
    named = f". Savepoints there, newest first: {', '.join(there)}; name one of them" if there else ""
    raise NothingThere(
        f"expected a completed checkpoint of pipeline {storage.pipeline!r} in {storage.url}, found that {why}{named}"
    )


def _numbered(storage: CheckpointStorage, number: int) -> Found:
    checkpoints, savepoints = storage.list_checkpoints(), storage.list_savepoints()
    for pointer in checkpoints:
        if pointer.checkpoint_id == number:
            return found(storage, pointer)
    fitting = [savepoint.location for savepoint in savepoints if savepoint.checkpoint_id == number]
    if len(fitting) > 1:
        raise UsageProblem(f"{number} fits several savepoints: {', '.join(fitting)}. Name one of them by its location")
    if fitting:
        return Found(storage, "savepoint", fitting[0])
    there = sorted({*(one.checkpoint_id for one in checkpoints), *(one.checkpoint_id for one in savepoints)})
    raise NothingThere(
        f"expected a checkpoint or savepoint {number} in {storage.url}, found none. Numbers there: "
        f"{', '.join(map(str, there)) or 'none'}; savepoints elsewhere are named by their URL or path"
    )


def _absolute(named: str) -> str | None:
    """A URL or an absolute path, if the user has named one."""
    if "://" in named:
        return named
    if named.startswith(("/", "~", "./", "../")):
        return os.path.abspath(os.path.expanduser(named))
    return None
