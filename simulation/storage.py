"""Durable storage of one pipeline, as objects by path; survives every crash. Checks its invariants at each write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any

from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, PipelineState
from dagster_checkpoints.execution.storage_steps import StateVersion, StoredState
from dagster_checkpoints.execution.unlisted_checkpoints import UnlistedCheckpoint, UnlistedFiles
from dagster_checkpoints.pipeline import TaskId
from simulation.violations import Violation, check

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class Metadata:
    """The content of a checkpoint or savepoint.

    Attributes:
        ghosts: by task, the state that only the simulator keeps.
        enumerators: by split source, its enumerator when the checkpoint was triggered.
        ending: (stage, instance) of the sources that requests have ended, as the job says.
        asked_to_end: the sources that users were told would end, before the checkpoint was written.
        most_instances: by stage, the largest number of instances that it has had, if it has fewer now.
    """

    pointer: CheckpointPointer
    variant: int
    states: Mapping[TaskId, Any]
    finished: frozenset[TaskId]
    ghosts: Mapping[TaskId, Any]
    files: frozenset[str]
    lineage: tuple[tuple[int, int | None], ...] = ()
    enumerators: Mapping[str, Any] = field(default_factory=dict)
    ending: frozenset[tuple[str, str]] = frozenset()
    asked_to_end: frozenset[str] = frozenset()
    most_instances: Mapping[str, int] = field(default_factory=dict)


class Store:
    """`state.json`, and objects by path; those of a checkpoint or savepoint are below its location. A method is one request."""

    def __init__(self) -> None:
        self.state: PipelineState | None = None
        self.objects: dict[str, Any] = {}
        self.tokens = map(str, count(1))
        self.reported: set[str] = set()
        """Savepoints that were reported to users as complete, or that users have copied."""
        self.claimed: set[str] = set()
        """Savepoints that users have let a pipeline claim."""
        self.abandoned: set[str] = set()
        """Savepoints that their owners have abandoned."""
        self.named: set[tuple[int, int]] = set()
        """(job, checkpoint) of all checkpoints and savepoints that the state has ever named as completed."""
        self.highest_ids: dict[int, int] = {}
        """By job, the highest id of a completed checkpoint or savepoint."""

    # Reading

    def metadata(self, location: str) -> Metadata | None:
        """The metadata of a checkpoint or savepoint; None if it is not complete."""
        return self.objects.get(f"{location}/_metadata")

    def below(self, folder: str) -> list[str]:
        """The paths directly below a folder, whose path ends with a slash."""
        size = len(folder)
        return list(dict.fromkeys(folder + path[size:].partition("/")[0] for path in self.objects if path.startswith(folder)))

    def listed(self) -> dict[str, Metadata | None]:
        """By location, the metadata of all checkpoints and savepoints that the state names as restorable."""
        pointers = self.state.restorable_checkpoints if self.state is not None else ()
        return {pointer.location: self.metadata(pointer.location) for pointer in pointers}

    def missing_files(self, location: str, metadata: Metadata) -> list[str]:
        """The files of a checkpoint or savepoint that storage does not have."""
        folder = f"{location}/state/" if is_savepoint(location) else "shared/"
        return sorted(file for file in metadata.files if folder + file not in self.objects)

    def check_complete(self, location: str) -> Metadata:
        """Check that a checkpoint or savepoint has metadata and every file that this names. Returns the metadata."""
        metadata = self.metadata(location)
        if metadata is None:
            raise Violation(f"{location} has no metadata")
        missing = self.missing_files(location, metadata)
        check(not missing, "{} lacks {}", location, missing)
        return metadata

    def left_over(self) -> list[str]:
        """The objects that no listed checkpoint and no complete savepoint names."""
        listed = self.listed()
        named = {f"shared/{file}" for by, m in listed.items() if m is not None and not is_savepoint(by) for file in m.files}
        left = [path for path in self.below("shared/") if path not in named]
        left += [path for path in self.below("checkpoints/") if path not in listed]
        return left + [path for path in self.below("savepoints/") if self.metadata(path) is None]

    # `state.json`

    def unlisted(self) -> UnlistedFiles:
        """What there is of a pipeline for which the state records no job."""
        found = [(at, self.metadata(at)) for folder in ("checkpoints/", "savepoints/") for at in self.below(folder)]
        checkpoints = tuple(UnlistedCheckpoint(m.pointer.epoch, m.pointer.checkpoint_id, at) for at, m in found if m is not None)
        return UnlistedFiles(checkpoints, max((self.objects[path] for path in self.below("shared/")), default=0))

    @property
    def may_lose_state(self) -> bool:
        """Whether a loss can be repaired: the newest checkpoint that storage holds was completed, and can be restored.

        Not if later ones are deleted: the job has finished since, or goes back to it and has not completed another one.
        """
        newest, found = self.state.newest if self.state is not None else None, self.unlisted().newest_first
        if self.state is None or newest is None or newest.checkpoint_id < self.state.highest_checkpoint_id:
            return False
        return bool(found) and found[0].location == newest.location

    @property
    def without_record(self) -> bool:
        """Whether there are checkpoints, and no job is recorded."""
        return (self.state is None or self.state.records_nothing) and bool(self.unlisted().checkpoints)

    def read_state(self) -> StoredState | None:
        return None if self.state is None else StoredState(self.state, self.state.token)

    def put_state(self, expected: StateVersion | None, proposed: PipelineState) -> StateVersion | None:
        """Replace the state if its version is the expected one. Returns the new version, which is its token; None if not."""
        old = self.state
        if (None if old is None else old.token) != expected:
            return None
        if old is not None:
            self._check_change(old, proposed)
        self.state = proposed
        return proposed.token

    def _check_change(self, old: PipelineState, proposed: PipelineState) -> None:
        check(proposed.epoch >= old.epoch, "the epoch went back")
        check(proposed.highest_checkpoint_id >= old.highest_checkpoint_id, "the highest id went back")
        newest = proposed.newest
        if newest is not None and newest != old.newest:
            completed = newest.epoch == proposed.epoch
            grows = old.newest is None or old.newest.checkpoint_id < newest.checkpoint_id
            check(grows or not completed, "{} after {}", newest, old.newest)
            metadata = self.check_complete(newest.location)
            self._record_id(metadata.pointer)
            self.named.add((metadata.pointer.job_id, metadata.pointer.checkpoint_id))

    def _record_id(self, pointer: CheckpointPointer) -> None:
        """Record the id of a completed checkpoint or savepoint."""
        self.highest_ids[pointer.job_id] = max(self.highest_ids.get(pointer.job_id, 0), pointer.checkpoint_id)

    # Writing and deleting

    def create(self, path: str, value: Any) -> Any:
        """Create an object, and return it; None if the path is taken."""
        return None if path in self.objects else self.objects.setdefault(path, value)

    def report_savepoint(self, location: str) -> None:
        """Record that a savepoint was reported to a user as complete."""
        if location not in self.claimed:  # while its owner was paused
            self.reported.add(location)
            self._record_id(self.check_complete(location).pointer)

    def copy_savepoint(self, location: str, number: int) -> str:
        """A user copies a savepoint elsewhere."""
        copy = f"elsewhere/{number}/{location.rpartition('/')[2]}"
        self.objects.update(
            {copy + path.removeprefix(location): value for path, value in self.objects.items() if path.startswith(f"{location}/")}
        )
        self.reported.add(copy)
        return copy

    def delete(self, *paths: str) -> None:
        listed = self.listed()
        for path in paths:
            location = path.removesuffix("/_metadata")
            if location != path:
                check(location not in listed, "{} was deleted, and is listed as retained", location)
                check(location not in self.reported - self.claimed, "the user's savepoint {} was deleted by the system", location)
            elif path.startswith("shared/"):
                named = [by for by, m in listed.items() if m is not None and not is_savepoint(by) and path[7:] in m.files]
                check(not named, "{} was deleted, and {} name it", path, named)
            self.objects.pop(path, None)

    def delete_shared(self, epoch: int, names: Iterable[str]) -> None:
        """Delete files in `shared/`, as the owner of this epoch. Their values are the epochs of the owners that stored them."""
        paths = [f"shared/{name}" for name in names]
        later = [path for path in paths if self.objects.get(path, 0) > epoch]
        check(not later, "owner {} deletes {}, which a later owner has stored", epoch, later)
        own = [at for at in self.below("checkpoints/") if at.endswith(f"-{epoch}")]
        named = [at for at in own if (written := self.metadata(at)) is not None and not written.files.isdisjoint(names)]
        check(not named, "owner {} deletes {}, and {} has metadata that names some of them", epoch, names, named)
        self.delete(*paths)

    def delete_below(self, folder: str) -> None:
        self.delete(*[path for path in self.objects if path.startswith(folder)])

    def delete_mark_if_empty(self, location: str) -> None:
        """Delete an incomplete savepoint's mark, unless it still has state files."""
        if not self.below(f"{location}/state/"):
            self.delete(f"{location}/_incomplete")


def is_savepoint(location: str) -> bool:
    return not location.startswith("checkpoints/")
