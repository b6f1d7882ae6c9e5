"""Durable storage of one pipeline, and the right to write to it; survives every crash.

The procedures are the shipped steps of the execution floor; the world performs their requests, and stops in front of each
write (`PUT`) and between a check and what relies on it (`PAUSE`), so that anything can happen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from dagster_checkpoints.execution import acquisition, storage_steps
from dagster_checkpoints.execution.ownership import SAFETY, OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner, PipelineState
from dagster_checkpoints.execution.shared_files import SharedName
from dagster_checkpoints.execution.storage_errors import AlreadyExists, Precondition
from dagster_checkpoints.execution.storage_errors import OutcomeUnknown as OutcomeUnknown
from dagster_checkpoints.execution.storage_errors import OwnershipLost as OwnershipLost
from dagster_checkpoints.execution.storage_errors import StorageError as StorageError
from dagster_checkpoints.execution.storage_errors import StorageUnavailable as StorageUnavailable
from dagster_checkpoints.pipeline import TaskId
from simulation.violations import Violation, check

PUT, PAUSE, WAIT = "put", "pause", "wait"
"""What a procedure stops for: a write whose outcome is about to be decided, a moment, somebody else's turn."""
OK, UNAVAILABLE, LOST, LANDED = "ok", "unavailable", "lost", "landed"
"""Outcomes of a write; of the last two nobody hears: it was lost, or it has landed."""

T = TypeVar("T")
Steps = Generator[str, str, T]
"""What a thread of a process does: it stops, is sent the outcome, and goes on."""

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class Metadata:
    """What a checkpoint or savepoint holds. `ghosts` is what only the simulator knows, of tasks that had finished."""

    checkpoint_id: int
    kind: str
    stops_job: bool
    epoch: int
    job_id: int
    variant: int
    states: Mapping[TaskId, Any]
    finished: frozenset[TaskId]
    ghosts: Mapping[TaskId, Any]
    files: frozenset[str]
    lineage: tuple[tuple[int, int | None], ...] = ()


@dataclass(eq=False)
class Savepoint:
    """A savepoint's directory. `complete`: its owner may say so; `deleted`: its owner has given it up, or it was swept."""

    location: str
    own: bool
    epoch: int
    files: set[str] = field(default_factory=set)
    metadata: Metadata | None = None
    marked: bool = False
    complete: bool = False
    deleted: bool = False


class Store:
    """Everything that is stored. Its methods are single requests, atomic each."""

    def __init__(self) -> None:
        self.state: PipelineState | None = None
        self.version = 0
        self.metadata: dict[str, Metadata] = {}
        self.shared: set[str] = set()
        self.savepoints: dict[str, Savepoint] = {}
        self.claimed: set[str] = set()
        """Savepoints that users have given away."""
        self.named: set[tuple[int, int]] = set()
        """(job, checkpoint) of everything that the state has ever named as completed."""
        self.taken: dict[int, int] = {}
        """By job: the highest id of anything that was completed."""
        self._token = 0

    def take_id(self, metadata: Metadata) -> None:
        """Something of this id is complete."""
        self.taken[metadata.job_id] = max(self.taken.get(metadata.job_id, 0), metadata.checkpoint_id)

    def new_token(self) -> str:
        self._token += 1
        return str(self._token)

    def put_state(self, expected: storage_steps.StateVersion, proposed: PipelineState) -> bool:
        """Replace the state if it is the version expected."""
        if self.version != expected:
            return False
        self._check_change(proposed)
        self.state = proposed
        self.version += 1
        return True

    def _check_change(self, proposed: PipelineState) -> None:
        old = self.state
        if old is None:
            return
        check(proposed.epoch >= old.epoch, "the epoch went back")
        check(proposed.highest_checkpoint_id >= old.highest_checkpoint_id, "the highest id went back")
        newest = proposed.newest
        if newest is not None and newest != old.newest:
            completed = newest.epoch == proposed.epoch
            grows = old.newest is None or old.newest.checkpoint_id < newest.checkpoint_id
            check(grows or not completed, f"{newest} after {old.newest}")
            metadata = self.check_whole(newest.location)
            self.take_id(metadata)
            self.named.add((metadata.job_id, metadata.checkpoint_id))

    def check_whole(self, location: str) -> Metadata:
        """A checkpoint or savepoint that somebody relies upon has its metadata and every file that this names."""
        if location in self.savepoints:
            savepoint = self.savepoints[location]
            metadata, there = savepoint.metadata, savepoint.files
        else:
            metadata, there = self.metadata.get(location), self.shared
        if metadata is None:
            raise Violation(f"{location} has no metadata")
        missing = metadata.files - there
        check(not missing, f"{location} lacks {sorted(missing)}")
        return metadata

    def pointers(self) -> tuple[CheckpointPointer, ...]:
        """Of everything that a restore may begin from, as the state says."""
        return self.state.restorable_checkpoints if self.state is not None else ()

    def delete_metadata(self, location: str) -> None:
        check(all(p.location != location for p in self.pointers()), f"{location} was deleted, and is listed as retained")
        self.metadata.pop(location, None)

    def copy_savepoint(self, location: str, number: int) -> str:
        """Somebody copies a savepoint elsewhere."""
        original = self.savepoints[location]
        copy = f"elsewhere/{number}/{location.rpartition('/')[2]}"
        self.savepoints[copy] = Savepoint(copy, False, 0, set(original.files), original.metadata, complete=True)
        return copy

    def delete_shared(self, files: Iterable[str]) -> None:
        gone = set(files)
        for pointer in self.pointers():
            metadata = self.metadata.get(pointer.location)
            if metadata is not None:
                check(not metadata.files & gone, f"files of {pointer.location} were deleted: {sorted(metadata.files & gone)}")
        self.shared -= gone

    def create_metadata(self, location: str, metadata: Metadata) -> bool:
        """Create a checkpoint's metadata. False if there is some."""
        if location in self.metadata:
            return False
        self.metadata[location] = metadata
        return True

    def create_savepoint_metadata(self, begun: Savepoint, metadata: Metadata) -> bool:
        """Create a savepoint's metadata. False if there is some."""
        there = self.savepoints.get(begun.location)
        if there is None:
            # Swept meanwhile: metadata without files. No user is told that it is complete; a restore says what is gone.
            there = self.savepoints[begun.location] = Savepoint(begun.location, True, begun.epoch, deleted=True)
        if there.metadata is not None:
            return False
        there.metadata = metadata
        return True

    def tell_savepoint(self, location: str) -> None:
        """A user is told that it is complete."""
        savepoint = self.savepoints.get(location)
        if savepoint is not None and savepoint.metadata is not None:
            savepoint.complete = True
            self.take_id(savepoint.metadata)

    def delete_savepoint_metadata(self, location: str) -> None:
        """From now on it is no savepoint; a complete one is the user's, unless it was claimed."""
        savepoint = self.savepoints.get(location)
        if savepoint is not None:
            check(all(p.location != location for p in self.pointers()), f"{location} was deleted, and is listed as retained")
            users = savepoint.complete and location not in self.claimed
            check(not users, f"the user's savepoint {location} was deleted by the system")
            savepoint.metadata = None

    def delete_mark(self, location: str) -> None:
        """Of a savepoint; nothing is left where there was nothing else."""
        savepoint = self.savepoints.get(location)
        if savepoint is not None:
            savepoint.marked = False
            if savepoint.metadata is None and not savepoint.files:
                del self.savepoints[location]


def performed(steps: storage_steps.Steps[T], perform: Callable[[Any], Steps[Any]]) -> Steps[T]:
    """Shipped steps, each of whose requests `perform` performs: it may stop, and raises what the steps are to see."""
    try:
        request = next(steps)
        while True:
            try:
                answer = yield from perform(request)
            except StorageError as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


class StateFile:
    """Performs the requests for `state.json`; reads are answered at once."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def perform(self, request: Any) -> Steps[Any]:
        store = self.store
        match request:
            case storage_steps.ReadState():
                return None if store.state is None else storage_steps.StoredState(store.state, store.version)
            case storage_steps.ReplaceState(expected, state):
                failed: StorageError = Precondition("it was changed")
            case storage_steps.CreateState(state):
                expected, failed = 0, AlreadyExists("it was created")
            case _:
                raise TypeError(request)
        outcome = (yield PUT) or OK
        if outcome == UNAVAILABLE:
            raise StorageUnavailable
        landed = outcome != LOST and store.put_state(expected, state)
        if outcome in (LOST, LANDED):
            raise OutcomeUnknown
        if not landed:
            raise failed
        return store.version


class Ownership:
    """One process's right to complete checkpoints: the shipped steps, one procedure at a time."""

    def __init__(self, file: StateFile, steps: OwnershipSteps, now: Callable[[], float]) -> None:
        self.steps = steps
        self.epoch = steps.epoch
        self.previous = steps.previous
        self.ensure = steps.ensure
        self.locked = False
        self._file = file
        self._now = now

    @property
    def renewal_due(self) -> bool:
        steps = self.steps
        return not self.locked and self._now() >= steps.deadline - steps.lease_seconds * (SAFETY - 1 / 3)

    def perform(self, steps: storage_steps.Steps[T]) -> Steps[T]:
        """Wait for the procedure that is under way, then perform this one."""
        while self.locked:
            yield WAIT
        self.locked = True
        try:
            return (yield from performed(steps, self._file.perform))
        finally:
            self.locked = False

    def renew(self) -> None:
        """At once: nothing can come between. Raises OwnershipLost."""
        if not self.locked:
            for step in self.perform(self.steps.renew()):
                assert step is PUT

    def claim(self, pointer: CheckpointPointer) -> Steps[None]:
        self._file.store.claimed.add(pointer.location)
        return self.perform(self.steps.claim(pointer))

    def confirm(self) -> Steps[None]:
        """Learn that the pipeline is still ours."""
        if not (yield from self.perform(self.steps.renew())):
            raise StorageUnavailable


def shared_name(name: str) -> SharedName:
    """From the name of a file in shared/, whose bytes the simulator keeps instead of their sha256."""
    content, _, epoch = name.partition("-")
    return SharedName(content, int(epoch or 0))


def acquire(
    store: Store,
    who: str,
    seconds: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    is_gone: Callable[[str], bool],
) -> Steps[Ownership]:
    """Become the owner. The lease of another one is looked at once, at its end."""
    file = StateFile(store)

    def perform(request: Any) -> Steps[Any]:
        match request:
            case acquisition.CheckOwnerGone(owner):
                return is_gone(owner.run_id)
            case acquisition.AnnounceWatch():
                return None
            case acquisition.Sleep(duration):
                sleep(duration)
                yield WAIT
                return None
        return (yield from file.perform(request))

    values = storage_steps.DriverValues(now, lambda: LONG_AGO, store.new_token)
    steps = acquisition.acquire(
        storage_steps.StatePlace("simulated", "store", "state"), Owner(run_id=who, host="", pid=0), seconds, values, seconds
    )
    return Ownership(file, (yield from performed(steps, perform)), now)
