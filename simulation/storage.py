"""Durable storage of one pipeline, as objects by path, and the right to write to it; survives every crash.

The procedures are the shipped steps of the execution floor; the world performs their requests, and stops in front of each
write (`PUT`) and between a check and what relies on it (`PAUSE`), so that anything can happen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_checkpoints.execution import acquisition, storage_steps
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner, PipelineState
from dagster_checkpoints.execution.shared_files import SharedName
from dagster_checkpoints.execution.storage_errors import AlreadyExists, Precondition
from dagster_checkpoints.execution.storage_errors import OutcomeUnknown as OutcomeUnknown
from dagster_checkpoints.execution.storage_errors import OwnershipLost as OwnershipLost
from dagster_checkpoints.execution.storage_errors import StorageError as StorageError
from dagster_checkpoints.execution.storage_errors import StorageUnavailable as StorageUnavailable
from dagster_checkpoints.pipeline import TaskId
from simulation.violations import Violation, check

if TYPE_CHECKING:
    from simulation.process import Process

PUT, PAUSE, WAIT = "put", "pause", "wait"
"""What a procedure stops for: a write whose outcome is about to be decided, a moment, somebody else's turn."""
OK, UNAVAILABLE, LOST, LANDED = "ok", "unavailable", "lost", "landed"
"""Outcomes of a write. The writer does not learn the last two: the write was lost, or it has landed."""

T = TypeVar("T")
Steps = Generator[str, str, T]
"""What a thread of a process does: it stops, is sent the outcome, and goes on."""

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class Metadata:
    """What a checkpoint or savepoint holds. `ghosts` is what only the simulator knows of its tasks."""

    checkpoint_id: int
    kind: str
    epoch: int
    job_id: int
    variant: int
    states: Mapping[TaskId, Any]
    finished: frozenset[TaskId]
    ghosts: Mapping[TaskId, Any]
    files: frozenset[str]
    lineage: tuple[tuple[int, int | None], ...] = ()


class Store:
    """Everything that is stored: `state.json`, and objects by path; those of a checkpoint or savepoint below its location.

    What must never happen to an object is checked here, where it would.
    """

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
        check(not missing, f"{location} lacks {missing}")
        return metadata

    def left_over(self) -> list[str]:
        """What no checkpoint that is listed, and no complete savepoint, names."""
        listed = [pointer.location for pointer in self.pointers()]
        checkpoints = [metadata for location in listed if not is_savepoint(location) and (metadata := self.metadata(location))]
        named = {f"shared/{file}" for metadata in checkpoints for file in metadata.files}
        left = [path for path in self.objects if path.startswith("shared/") and path not in named]
        left += [f"checkpoints/{name}" for name in self.names("checkpoints/") if f"checkpoints/{name}" not in listed]
        return left + [f"savepoints/{name}" for name in self.names("savepoints/") if self.metadata(f"savepoints/{name}") is None]

    # Writing

    def perform(self, request: Any) -> Any:
        """Perform a request for `state.json`: the answer, or steps to it."""
        match request:
            case storage_steps.ReadState():
                return None if self.state is None else storage_steps.StoredState(self.state, self.state.token)
            case storage_steps.ReplaceState(expected, state):
                return write(lambda: self._put_state(expected, state), Precondition("it was changed"), state.token)
            case storage_steps.CreateState(state):
                return write(lambda: self._put_state(None, state), AlreadyExists("it was created"), state.token)
        raise TypeError(request)

    def _put_state(self, expected: storage_steps.StateVersion | None, proposed: PipelineState) -> bool:
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
            check(grows or not completed, f"{newest} after {old.newest}")
            metadata = self.check_whole(newest.location)
            self._take_id(metadata)
            self.named.add((metadata.job_id, metadata.checkpoint_id))

    def _take_id(self, metadata: Metadata) -> None:
        """Something of this id is complete."""
        self.taken[metadata.job_id] = max(self.taken.get(metadata.job_id, 0), metadata.checkpoint_id)

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
            self._take_id(self.check_whole(location))

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
                check(place not in listed, f"{place} was deleted, and is listed as retained")
                check(place not in self.promised - self.claimed, f"the user's savepoint {place} was deleted by the system")
            elif path.startswith("shared/"):
                named = [by for by, m in listed.items() if m is not None and not is_savepoint(by) and path[7:] in m.files]
                check(not named, f"{path} was deleted, and {named} name it")
            self.objects.pop(path, None)


def is_savepoint(location: str) -> bool:
    return not location.startswith("checkpoints/")


def write(put: Callable[[], bool], refused: StorageError, answer: T) -> Steps[T]:
    """Write under a condition. Whether that lands, and whether the writer learns it, is the world's to decide."""
    outcome = (yield PUT) or OK
    if outcome == UNAVAILABLE:
        raise StorageUnavailable
    landed = outcome != LOST and put()
    if outcome in (LOST, LANDED):
        raise OutcomeUnknown
    if not landed:
        raise refused
    return answer


def performed(steps: storage_steps.Steps[T], perform: Callable[[Any], Any]) -> Steps[T]:
    """Shipped steps, each of whose requests `perform` performs.

    It returns the answer, or steps to the answer, which may stop; what these raise, the shipped steps see.
    """
    try:
        request = next(steps)
        while True:
            try:
                answer = perform(request)
                if isinstance(answer, GeneratorType):
                    answer = yield from answer
            except StorageError as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def shared_name(name: str) -> SharedName:
    """From the name of a file in shared/, whose bytes the simulator keeps instead of their sha256."""
    content, _, epoch = name.partition("-")
    return SharedName(content, int(epoch or 0))


def acquire(process: Process, lease_seconds: float) -> Steps[OwnershipSteps]:
    """Become the owner. The lease of another one is looked at once, at its end."""
    store = process.world.store

    def wait(seconds: float) -> Steps[None]:
        process.sleep(seconds)
        yield WAIT

    def perform(request: Any) -> Any:
        match request:
            case acquisition.CheckOwnerGone(owner):
                return process.knows_gone(owner.run_id)
            case acquisition.AnnounceWatch():
                return None
            case acquisition.Sleep(seconds):
                return wait(seconds)
        return store.perform(request)

    values = storage_steps.DriverValues(lambda: process.world.now, lambda: LONG_AGO, store.tokens.__next__)
    place, owner = storage_steps.StatePlace("simulated", "store", "state"), Owner(run_id=str(process.number), host="", pid=0)
    steps = acquisition.acquire(place, owner, lease_seconds, values, lease_seconds)
    return (yield from performed(steps, perform))
