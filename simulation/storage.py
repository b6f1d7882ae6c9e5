"""Durable storage of one pipeline, as objects by path; survives every crash. What must never happen to it is checked here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any

from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, PipelineState
from dagster_checkpoints.execution.storage_steps import StateVersion, StoredState
from dagster_checkpoints.pipeline import TaskId
from simulation.violations import Violation, check

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class Metadata:
    """What a checkpoint or savepoint holds. `ghosts` is what only the simulator knows of its tasks."""

    pointer: CheckpointPointer
    variant: int
    states: Mapping[TaskId, Any]
    finished: frozenset[TaskId]
    ghosts: Mapping[TaskId, Any]
    files: frozenset[str]
    lineage: tuple[tuple[int, int | None], ...] = ()


class Store:
    """`state.json`, and objects by path; those of a checkpoint or savepoint below its location. Each method is one request."""

    def __init__(self) -> None:
        self.state: PipelineState | None = None
        self.objects: dict[str, Any] = {}
        self.tokens = map(str, count(1))
        self.promised: set[str] = set()
        """Savepoints that users were told of, or have copied."""
        self.claimed: set[str] = set()
        """Savepoints that users have given away."""
        self.given_up: set[str] = set()
        """Savepoints that their owners have given up."""
        self.named: set[tuple[int, int]] = set()
        """(job, checkpoint) of everything that the state has ever named as completed."""
        self.taken: dict[int, int] = {}
        """By job: the highest id of anything that was completed."""

    # Reading

    def metadata(self, location: str) -> Metadata | None:
        """Of a checkpoint or savepoint; None if it is not complete."""
        return self.objects.get(f"{location}/_metadata")

    def checkpoints(self) -> list[tuple[str, int]]:
        """Location of each checkpoint that has metadata, and epoch of its owner."""
        return [(f"checkpoints/{name}", int(name.rpartition("-")[2])) for name in self.names("checkpoints/")]

    def names(self, folder: str) -> list[str]:
        """What is directly below a folder, whose path ends with a slash."""
        size = len(folder)
        return list(dict.fromkeys(path[size:].partition("/")[0] for path in self.objects if path.startswith(folder)))

    def pointers(self) -> tuple[CheckpointPointer, ...]:
        """Of everything that a restore may begin from, as the state says."""
        return self.state.restorable_checkpoints if self.state is not None else ()

    def lacks(self, location: str, metadata: Metadata) -> list[str]:
        """The files of a checkpoint or savepoint that are not there."""
        folder = f"{location}/state/" if is_savepoint(location) else "shared/"
        return sorted(file for file in metadata.files if folder + file not in self.objects)

    def check_whole(self, location: str) -> Metadata:
        """A checkpoint or savepoint that is relied upon has its metadata and every file that this names."""
        metadata = self.metadata(location)
        if metadata is None:
            raise Violation(f"{location} has no metadata")
        missing = self.lacks(location, metadata)
        check(not missing, "{} lacks {}", location, missing)
        return metadata

    def left_over(self) -> list[str]:
        """What no checkpoint that is listed, and no complete savepoint, names."""
        listed = [pointer.location for pointer in self.pointers()]
        checkpoints = [metadata for location in listed if not is_savepoint(location) and (metadata := self.metadata(location))]
        named = {f"shared/{file}" for metadata in checkpoints for file in metadata.files}
        left = [path for path in self.objects if path.startswith("shared/") and path not in named]
        left += [f"checkpoints/{name}" for name in self.names("checkpoints/") if f"checkpoints/{name}" not in listed]
        return left + [f"savepoints/{name}" for name in self.names("savepoints/") if self.metadata(f"savepoints/{name}") is None]

    # `state.json`

    def read_state(self) -> StoredState | None:
        return None if self.state is None else StoredState(self.state, self.state.token)

    def put_state(self, expected: StateVersion | None, proposed: PipelineState) -> bool:
        """Replace the state if it is the version expected. Its token is its version."""
        old = self.state
        if (None if old is None else old.token) != expected:
            return False
        if old is not None:
            self._check_change(old, proposed)
        self.state = proposed
        return True

    def _check_change(self, old: PipelineState, proposed: PipelineState) -> None:
        check(proposed.epoch >= old.epoch, "the epoch went back")
        check(proposed.highest_checkpoint_id >= old.highest_checkpoint_id, "the highest id went back")
        newest = proposed.newest
        if newest is not None and newest != old.newest:
            completed = newest.epoch == proposed.epoch
            grows = old.newest is None or old.newest.checkpoint_id < newest.checkpoint_id
            check(grows or not completed, "{} after {}", newest, old.newest)
            metadata = self.check_whole(newest.location)
            self._take_id(metadata.pointer)
            self.named.add((metadata.pointer.job_id, metadata.pointer.checkpoint_id))

    def _take_id(self, pointer: CheckpointPointer) -> None:
        """Something of this id is complete."""
        self.taken[pointer.job_id] = max(self.taken.get(pointer.job_id, 0), pointer.checkpoint_id)

    # Writing and deleting

    def create(self, path: str, value: Any) -> bool:
        """Create an object. False if there is one."""
        if path in self.objects:
            return False
        self.objects[path] = value
        return True

    def promise(self, location: str) -> None:
        """A user is told that this savepoint is complete."""
        if location not in self.claimed:  # while its owner was paused
            self.promised.add(location)
            self._take_id(self.check_whole(location).pointer)

    def copy_savepoint(self, location: str, number: int) -> str:
        """A user copies a savepoint elsewhere."""
        copy = f"elsewhere/{number}/{location.rpartition('/')[2]}"
        self.objects.update(
            {copy + path.removeprefix(location): value for path, value in self.objects.items() if path.startswith(f"{location}/")}
        )
        self.promised.add(copy)
        return copy

    def delete(self, *paths: str) -> None:
        """Delete objects, if they are there."""
        listed = {pointer.location: self.metadata(pointer.location) for pointer in self.pointers()}
        for path in paths:
            place = path.removesuffix("/_metadata")
            if place != path:
                check(place not in listed, "{} was deleted, and is listed as retained", place)
                check(place not in self.promised - self.claimed, "the user's savepoint {} was deleted by the system", place)
            elif path.startswith("shared/"):
                named = [by for by, m in listed.items() if m is not None and not is_savepoint(by) and path[7:] in m.files]
                check(not named, "{} was deleted, and {} name it", path, named)
            self.objects.pop(path, None)

    def delete_shared(self, epoch: int, names: Iterable[str]) -> None:
        """Delete files in `shared/`, whose values are the epochs of the owners that stored them; for the owner of this epoch."""
        paths = [f"shared/{name}" for name in names]
        later = [path for path in paths if self.objects.get(path, 0) > epoch]
        check(not later, "owner {} deletes {}, which a later owner has stored", epoch, later)
        self.delete(*paths)

    def delete_below(self, folder: str) -> None:
        self.delete(*[path for path in self.objects if path.startswith(folder)])

    def delete_mark_if_empty(self, location: str) -> None:
        """An incomplete savepoint's mark stays as long as there are state files."""
        if not self.names(f"{location}/state/"):
            self.delete(f"{location}/_incomplete")


def is_savepoint(location: str) -> bool:
    return not location.startswith("checkpoints/")
