"""Durable storage of one pipeline, and the right to write to it; survives every crash.

Mirrors the storage floor at the granularity of single requests: every procedure is a generator that stops in front of each
write (`PUT`) and between a check and what relies on it (`PAUSE`), so that anything can happen in between. What changes in
`state.json` is computed by the real `storage.state_changes`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.storage import state_changes as changes
from dagster_checkpoints.storage.pipeline_state import CheckpointPointer, EndedBy, JobStatus, Lease, Owner, PipelineState
from simulation.violations import Violation, check

PUT, PAUSE, WAIT = "put", "pause", "wait"
"""What a procedure stops for: a write whose outcome is about to be decided, a moment, somebody else's turn."""
OK, UNAVAILABLE, LOST, LANDED = "ok", "unavailable", "lost", "landed"
"""Outcomes of a write; of the last two nobody hears: it was lost, or it has landed."""

T = TypeVar("T")
Steps = Generator[str, str, T]

SAFETY = 0.9
_RESOLVE_ATTEMPTS = 3
_ROUNDS = 8
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class StorageError(Exception):
    """Base."""


class StorageUnavailable(StorageError):
    """It did not happen."""


class OutcomeUnknown(StorageError):
    """Nobody knows."""


class OwnershipLost(StorageError):
    """Another process owns the pipeline."""


class PipelineOwned(StorageError):
    """Another process lives."""


class CheckpointDiscarded(StorageError):
    """It was given up meanwhile."""


class AlreadyExists(StorageError):
    """Other metadata is there."""


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
    """A savepoint's directory."""

    location: str
    own: bool
    epoch: int
    files: set[str] = field(default_factory=set)
    metadata: Metadata | None = None
    marked: bool = False
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

    def put_state(self, expected: int, proposed: PipelineState) -> bool:
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
        return self.state.listed if self.state is not None else ()

    def delete_metadata(self, location: str) -> None:
        check(all(p.location != location for p in self.pointers()), f"{location} was deleted, and is listed as retained")
        self.metadata.pop(location, None)

    def copy_savepoint(self, location: str, number: int) -> str:
        """Somebody copies a savepoint elsewhere."""
        original = self.savepoints[location]
        copy = f"elsewhere/{number}/{location.rpartition('/')[2]}"
        self.savepoints[copy] = Savepoint(copy, False, 0, set(original.files), original.metadata)
        return copy

    def delete_shared(self, files: Iterable[str]) -> None:
        gone = set(files)
        for pointer in self.pointers():
            metadata = self.metadata.get(pointer.location)
            if metadata is not None:
                check(not metadata.files & gone, f"files of {pointer.location} were deleted: {sorted(metadata.files & gone)}")
        self.shared -= gone

    def delete_savepoint(self, location: str) -> None:
        """Delete a savepoint's directory; a complete one is the user's, unless it was claimed."""
        savepoint = self.savepoints.pop(location, None)
        whole = savepoint is not None and savepoint.metadata is not None and not savepoint.deleted
        users = whole and location not in self.claimed
        check(not users, f"the user's savepoint {location} was deleted by the system")


Change = Callable[[PipelineState], PipelineState]


class Ownership:
    """One process's right to complete checkpoints; mirrors `storage.ownership`."""

    def __init__(
        self,
        store: Store,
        state: PipelineState,
        version: int,
        previous: PipelineState,
        now: Callable[[], float],
        sent_at: float,
    ) -> None:
        assert state.lease is not None
        self.previous = previous
        self.store = store
        self.state = state
        self.epoch = state.epoch
        self.lost = ""
        self.released = False
        self._version = version
        self._now = now
        self._seconds = state.lease.seconds
        self.deadline = sent_at + self._seconds * SAFETY
        self.locked = False
        self._forgotten: set[str] = set()
        self._stopped_with = ""
        self._ending: tuple[JobStatus, EndedBy, str] | None = None

    @property
    def retained(self) -> tuple[CheckpointPointer, ...]:
        return tuple(p for p in self.state.retained if p.location not in self._forgotten)

    @property
    def renewal_due(self) -> bool:
        return not self.locked and self._now() >= self.deadline - self._seconds * (SAFETY - 1 / 3)

    def ensure(self) -> None:
        if self.released:
            raise OwnershipLost("released")
        if not self.lost and self._now() >= self.deadline:
            self.lost = "not renewed within its lease"
        if self.lost:
            raise OwnershipLost(self.lost)

    def begin_job(self, *, resume: bool, restored: CheckpointPointer | None) -> Steps[int]:
        self.ensure()
        yield from self._replace(lambda s: changes.begun(s, resume=resume, restored=restored, at=_LONG_AGO))
        return self.state.job.job_id

    def reserve(self, checkpoint_id: int) -> Steps[None]:
        self.ensure()
        if self.state.highest_checkpoint_id < checkpoint_id:
            yield from self._replace(lambda s: changes.reserved(s, checkpoint_id))

    def claim(self, pointer: CheckpointPointer) -> Steps[None]:
        self.ensure()
        self.store.claimed.add(pointer.location)
        yield from self._replace(lambda s: changes.claimed(s, pointer))

    def complete(self, checkpoint_id: int, location: str, kind: str) -> Steps[None]:
        """The commit point."""
        self.ensure()
        pointer = pointer_to(checkpoint_id, location, kind, self.epoch, self.state.job.job_id)
        if kind == "savepoint":
            self._stopped_with = location

        def change(state: PipelineState) -> PipelineState:
            newest = state.newest
            grows = newest is None or newest.checkpoint_id < checkpoint_id
            check(grows, f"{pointer} after {newest}")
            return changes.completed(state, pointer)

        yield from self._replace(change)

    def renew(self) -> bool:
        """At once: nothing can come between. Raises OwnershipLost."""
        self.ensure()
        if self.locked:
            return False
        for step in self._replace(lambda s: s):
            assert step is PUT or step is PAUSE
        return True

    def confirm(self) -> Steps[None]:
        """Learn that the pipeline is still ours."""
        self.ensure()
        yield from self._replace(lambda s: s)

    def forget(self, location: str) -> Steps[None]:
        """The state lists it no more when this is over."""
        self.ensure()
        self._forgotten.add(location)
        if any(p.location == location for p in self.state.listed):
            yield from self._replace(lambda s: changes.forgotten(s, location))

    def forget_later(self, location: str) -> None:
        self._forgotten.add(location)

    def end_job(self, status: JobStatus, *, keep: bool, ended_by: EndedBy) -> Steps[list[str]]:
        """Returns the locations that are no longer listed, and the system's to delete."""
        self.ensure()
        newest = self.state.newest.location if self.state.newest is not None else ""
        kept = newest if ended_by == "suspend" else ""
        dropped = [] if keep else [p for p in self.retained if p.location != kept]
        self._forgotten.update(p.location for p in dropped)
        savepoint = newest if ended_by in ("drain", "suspend") and newest == self._stopped_with else ""
        self._ending = (status, ended_by, savepoint)
        yield from self._replace(self._ended(status, keep))
        return [p.location for p in dropped if p.ours]

    def release(self, status: JobStatus | None) -> Steps[None]:
        if self.released:
            return
        if self.lost:
            raise OwnershipLost(self.lost)

        def change(state: PipelineState) -> PipelineState:
            if status is not None and state.job.status != status:
                state = self._ended(status, True)(state)
            return msgspec.structs.replace(state, lease=None)

        yield from self._replace(change)
        self.released = True

    def _ended(self, status: JobStatus, keep: bool) -> Change:
        said, ended_by, savepoint = self._ending or (status, "", "")
        if said != status:
            ended_by, savepoint = "", ""
        return lambda s: changes.ended(s, status, keep=keep, ended_by=ended_by, savepoint=savepoint, at=_LONG_AGO)

    def _replace(self, change: Change) -> Steps[None]:
        while self.locked:
            yield WAIT
        self.locked = True
        try:
            yield from self._replace_locked(change)
        finally:
            self.locked = False

    def _replace_locked(self, change: Change) -> Steps[None]:
        base, unresolved = None, 0
        for _ in range(_ROUNDS):
            if base is not self.state:
                base = self.state
                proposed = self._next(base, change)
            sent_at = self._now()
            outcome = (yield PUT) or OK
            if outcome == UNAVAILABLE:
                if unresolved:
                    raise OutcomeUnknown
                raise StorageUnavailable
            landed = outcome != LOST and self.store.put_state(self._version, proposed)
            if outcome in (LOST, LANDED):
                unresolved += 1
                if unresolved == _RESOLVE_ATTEMPTS or self._now() >= self.deadline:
                    raise OutcomeUnknown
            elif landed:
                self.state, self._version = proposed, self.store.version
                return self._renewed(sent_at)
            elif self._adopt(proposed.token):
                return self._renewed(sent_at)
        raise OutcomeUnknown

    def _next(self, state: PipelineState, change: Change) -> PipelineState:
        changed = change(msgspec.structs.replace(state, token=self.store.new_token()))
        return msgspec.structs.replace(changed, retained=tuple(p for p in changed.retained if p.location not in self._forgotten))

    def _adopt(self, token: str) -> bool:
        found = self.store.state
        assert found is not None
        if found.epoch != self.epoch:
            self.lost = f"taken over by epoch {found.epoch}"
            raise OwnershipLost(self.lost)
        self.state, self._version = found, self.store.version
        return found.token == token

    def _renewed(self, sent_at: float) -> None:
        self.deadline = sent_at + self._seconds * SAFETY


def content_of(name: str) -> str:
    """What is in a file of this name in shared/: equal contents have equal ones, whoever stored them."""
    return name.partition("-")[0]


def stored_by(name: str) -> int:
    """The epoch of the owner that has stored a file of this name."""
    return int(name.partition("-")[2] or 0)


def pointer_to(checkpoint_id: int, location: str, kind: str, epoch: int, job_id: int) -> CheckpointPointer:
    return CheckpointPointer(
        checkpoint_id=checkpoint_id, location=location, kind=kind, epoch=epoch, job_id=job_id, completed_at=_LONG_AGO
    )


def acquire(
    store: Store,
    who: str,
    seconds: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    is_gone: Callable[[str], bool],
) -> Steps[Ownership]:
    """Become the owner; mirrors `storage.acquisition`.

    At once if nobody owns it, or if the owner is known to be gone; else after a whole lease of silence.
    """
    for _ in range(5):
        current, version = store.state, store.version
        if current is not None and current.lease is not None and not is_gone(current.lease.owner.run_id):
            sleep(current.lease.seconds)
            yield WAIT
            found = store.state
            assert found is not None
            if found.token != current.token:
                if found.lease is not None:
                    raise PipelineOwned
                current, version = found, store.version
        previous = current or PipelineState(pipeline="simulated", epoch=0, token="")
        lease = Lease(owner=Owner(run_id=who, host="", pid=0), seconds=seconds, acquired_at=_LONG_AGO, renewed_at=_LONG_AGO)
        taken = msgspec.structs.replace(previous, epoch=previous.epoch + 1, token=store.new_token(), lease=lease)
        sent_at = now()
        outcome = (yield PUT) or OK
        if outcome == UNAVAILABLE:
            raise StorageUnavailable
        if outcome != LOST and store.put_state(version, taken):
            return Ownership(store, taken, store.version, previous, now, sent_at)
    raise PipelineOwned
