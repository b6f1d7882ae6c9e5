"""One owner per pipeline: lease, fencing epoch and the commit point of checkpoints, all in ``state.json``.

Must not know what a checkpoint holds. The file is replaced only if unchanged since this owner last saw it, so
whatever an old owner does late fails here. Leases are judged by observation alone: who wants to take over
watches the file for a whole lease by its own monotonic clock; no two machines' clocks are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import uuid4

import msgspec

from dagster_checkpoints.storage import state_changes as changes
from dagster_checkpoints.storage.base import ObjectStore, UpdateVersion
from dagster_checkpoints.storage.errors import (
    NotFound,
    OutcomeUnknown,
    OwnershipLost,
    Precondition,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.origin import UNKNOWN_ORIGIN, Origin
from dagster_checkpoints.storage.pipeline_state import (
    CheckpointPointer,
    EndedBy,
    JobStatus,
    PipelineState,
    StopAskedBy,
    decode_state,
    describe_owner,
    encode_state,
)

SAFETY = 0.9
"""The part of its lease an owner uses: it stops before anybody else may begin."""
_RESOLVE_ATTEMPTS = 3
_ROUNDS = 8

Change = Callable[[PipelineState], PipelineState]


def now_utc() -> datetime:
    """Wall-clock time for display."""
    return datetime.now(UTC)


class Ownership:
    """The right to complete checkpoints of a pipeline, until it is released or lost. Thread-safe.

    Made by :func:`dagster_checkpoints.storage.acquisition.acquire`.
    """

    def __init__(
        self,
        store: ObjectStore,
        layout: Layout,
        state: PipelineState,
        etag: str,
        previous: PipelineState,
        deadline: float,
        monotonic: Callable[[], float],
        wall: Callable[[], datetime] = now_utc,
    ) -> None:
        assert state.lease is not None
        self.previous = previous
        """As this owner found it: newest checkpoint, how the last job ended, highest checkpoint id."""
        self._store = store
        self._layout = layout
        self._state = state
        self._etag = etag
        self._lease_seconds = state.lease.seconds
        self._deadline = deadline
        self._monotonic = monotonic
        self._wall = wall
        self._lock = threading.RLock()
        self._forgotten: set[str] = set()
        self._stopped_with = ""
        self._ending: tuple[JobStatus, EndedBy, str, StopAskedBy] | None = None
        self._lost: str | None = None
        self._released = False

    @property
    def epoch(self) -> int:
        """The fencing epoch: larger than that of every earlier owner."""
        return self._state.epoch

    @property
    def job_id(self) -> int:
        """Of the job begun, see :meth:`begin_job`."""
        return self._state.job.job_id

    @property
    def history(self) -> str:
        """Differs between any two ``state.json`` that were begun, of whatever storage."""
        return self._state.history

    @property
    def newest(self) -> CheckpointPointer | None:
        """The newest completed checkpoint of the current job, as far as this owner knows."""
        return self._state.newest

    @property
    def retained(self) -> tuple[CheckpointPointer, ...]:
        """Completed checkpoints that are kept, newest first."""
        return self._without_forgotten(self._state.retained)

    @property
    def highest_checkpoint_id(self) -> int:
        """Of all that were ever completed or reserved: the next one is larger, or follows what it was restored from."""
        return self._state.highest_checkpoint_id

    @property
    def lease_seconds(self) -> float:
        return self._lease_seconds

    @property
    def deadline(self) -> float:
        """When this owner stops by its own monotonic clock unless it renews before."""
        return self._deadline

    @property
    def lost(self) -> bool:
        """True once the pipeline is, or must be taken to be, somebody else's."""
        return self._lost is not None or (not self._released and self._monotonic() >= self._deadline)

    def ensure(self) -> None:
        """Raise OwnershipLost unless this owner may still act."""
        if self._released:
            raise OwnershipLost(f"{self._subject()} was released by this run")
        if self._lost is not None:
            raise OwnershipLost(self._lost)
        if self._monotonic() >= self._deadline:
            self._lost = (
                f"{self._subject()} could not be renewed within its lease of {self._lease_seconds:g} s; "
                "another run may own the pipeline now, so this one stops. Was storage out of reach, or this "
                "process suspended?"
            )
            raise OwnershipLost(self._lost)

    def begin_job(
        self,
        *,
        resume: bool,
        restored: CheckpointPointer | None = None,
        named: bool = False,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> int:
        """Say that a job runs now.

        Args:
            resume: go on with the previous job. Otherwise a new job starts: ``newest`` becomes ``restored`` or None, so that
                a crash before its first checkpoint does not resume the previous one. Call it before sinks are told of the
                new start.
            restored: what the job begins from. It becomes the newest, so that a restart does not fall back to one that was
                passed over, nor to the start. None, resuming: what was the newest.
            named: the run's configuration names where the job begins: the run is recorded as the one that chose it.
            origin: where the pipeline is defined, as far as the run knows.

        Returns:
            The job's id: the previous one's, or a new one.
        """

        with self._lock:
            self.ensure()
            self._replace(
                lambda state: changes.begun(state, resume=resume, restored=restored, at=self._wall(), named=named, origin=origin)
            )
            return self._state.job.job_id

    def reserve(self, checkpoint_id: int) -> None:
        """Take an id for a savepoint that ``state.json`` will not name: no later checkpoint may have it.

        Call it before the savepoint's metadata is written: sinks name what they commit by the id.

        Raises:
            OwnershipLost: another run owns the pipeline: the savepoint must not be completed.
            StorageUnavailable, WriteConflict, OutcomeUnknown: it may be tried again; until then the id is not taken.
        """
        with self._lock:
            self.ensure()
            if self._state.highest_checkpoint_id < checkpoint_id:
                self._replace(lambda state: changes.reserved(state, checkpoint_id))

    def claim(self, pointer: CheckpointPointer) -> None:
        """A savepoint is the pipeline's own from now on: it is retained, and deleted when it is so no longer.

        Raises:
            OwnershipLost, StorageUnavailable, WriteConflict, OutcomeUnknown: as :meth:`complete`.
        """
        with self._lock:
            self.ensure()
            self._replace(lambda state: changes.claimed(state, pointer))

    def renew(self) -> bool:
        """Renew the lease; call it about every third of it.

        Returns:
            True if renewed; False if storage did not answer but the lease still holds.

        Raises:
            OwnershipLost: somebody else owns the pipeline, or this owner's deadline has passed.
        """
        with self._lock:
            self.ensure()
            try:
                self._replace(lambda state: state)
            except (StorageUnavailable, OutcomeUnknown, WriteConflict):
                self.ensure()
                return False
            return True

    def complete(
        self,
        checkpoint_id: int,
        location: str,
        *,
        kind: str = "checkpoint",
        completed_at: datetime | None = None,
    ) -> CheckpointPointer:
        """Make a checkpoint the newest completed one: **the commit point**. Sinks commit after it.

        Args:
            checkpoint_id: its id.
            location: what ``write_metadata`` returned: of the storage, or of a stop's savepoint's directory.
            kind: ``checkpoint``, or ``savepoint`` for that of a stop.
            completed_at: wall clock; now by default.

        Raises:
            OwnershipLost: another run owns the pipeline; the checkpoint is not completed and nothing may be
                committed.
            StorageUnavailable, WriteConflict: it is not completed.
            OutcomeUnknown: nobody knows; delete nothing and commit nothing. :attr:`newest` tells later.
        """
        with self._lock:
            self.ensure()
            pointer = CheckpointPointer(
                checkpoint_id=checkpoint_id,
                location=location,
                kind=kind,
                epoch=self.epoch,
                job_id=self.job_id,
                completed_at=completed_at or self._wall(),
            )
            if kind == "savepoint":
                self._stopped_with = location
            self._replace(lambda state: changes.completed(state, pointer))
            return pointer

    def forget(self, location: str) -> None:
        """A retained checkpoint is about to be deleted: ``state.json`` lists it no more when this returns.

        So nothing that is listed is ever deleted: an owner that was suspended in between, and has lost the pipeline, fails here,
        while a later one may be restoring from that checkpoint.

        Raises:
            OwnershipLost: another run owns the pipeline: delete nothing.
            StorageUnavailable, WriteConflict, OutcomeUnknown: it may still be listed: delete nothing. The next replacement
                that lands does not list it.
        """
        with self._lock:
            self.ensure()
            self._forgotten.add(location)
            if any(pointer.location == location for pointer in self._state.listed):
                self._replace(lambda state: changes.forgotten(state, location))

    def forget_later(self, location: str) -> None:
        """A savepoint is no restart's beginning any more, and stays where it is: not listed from the next replacement on."""
        with self._lock:
            self._forgotten.add(location)

    def end_job(
        self,
        status: JobStatus,
        *,
        keep_checkpoints: bool = True,
        ended_by: EndedBy = "",
        stop_asked_by: StopAskedBy = "",
    ) -> tuple[CheckpointPointer, ...]:
        """Say how the job ended while the lease is still held, so that checkpoints can be deleted after it.

        Deleting them first would leave a moment in which a crash looks like a job that never had any.

        Args:
            status: the job's end state.
            keep_checkpoints: otherwise none is listed any more, but for the savepoint of a suspend: it stays the newest.
            ended_by: what brought a FINISHED job to its end; of a stop, its savepoint is recorded.
            stop_asked_by: what asked for that stop.

        Returns:
            The checkpoints no longer listed that are the system's to delete, for ``CheckpointStorage.delete_checkpoint``.

        Raises:
            OwnershipLost, StorageUnavailable, WriteConflict, OutcomeUnknown: as :meth:`complete`.
        """
        with self._lock:
            self.ensure()
            newest = self.newest.location if self.newest is not None else ""
            kept = newest if ended_by == "suspend" else ""
            dropped = () if keep_checkpoints else tuple(old for old in self.retained if old.location != kept)
            self._forgotten.update(pointer.location for pointer in dropped)
            savepoint = newest if ended_by in ("drain", "suspend") and newest == self._stopped_with else ""
            self._ending = (status, ended_by, savepoint, stop_asked_by)  # should this fail, the release says it
            self._replace(self._ended(status, keep_checkpoints))
            return tuple(pointer for pointer in dropped if pointer.ours)

    def release(self, status: JobStatus | None = None) -> None:
        """Free the lease and say how the job ended; does nothing when already released.

        Args:
            status: the job's end state; None if :meth:`end_job` has said it, or no job was begun.

        Raises:
            OwnershipLost: another run owns the pipeline.
            StorageUnavailable, WriteConflict, OutcomeUnknown: the lease then runs out by itself.
        """
        with self._lock:
            if self._released:
                return
            if self._lost is not None:
                raise OwnershipLost(self._lost)

            def change(state: PipelineState) -> PipelineState:
                if status is not None and state.job.status != status:
                    state = self._ended(status, True)(state)
                return msgspec.structs.replace(state, lease=None)

            self._replace(change)
            self._released = True

    def _ended(self, status: JobStatus, keep: bool) -> Change:
        said, ended_by, savepoint, asked_by = self._ending or (status, "", "", "")
        if said != status:
            ended_by, savepoint, asked_by = "", "", ""
        return lambda state: changes.ended(
            state, status, keep=keep, ended_by=ended_by, savepoint=savepoint, stop_asked_by=asked_by, at=self._wall()
        )

    def _replace(self, change: Change) -> None:
        """Replace ``state.json`` by a changed version of what this owner last wrote, if nobody else has."""
        base, unresolved = None, 0
        for _ in range(_ROUNDS):
            if base is not self._state:  # the first round, or a write of ours that had been in doubt has landed
                base = self._state
                proposed = self._next(base, change)
                data = encode_state(proposed)
            sent_at = self._monotonic()
            try:
                etag = self._store.put(self._layout.state, data, UpdateVersion(self._etag))
            except OutcomeUnknown:
                # The same write under the same condition: it lands now, or the file shows that it had landed.
                unresolved += 1
                if unresolved == _RESOLVE_ATTEMPTS or self._monotonic() >= self._deadline:
                    raise
            except Precondition:
                if self._adopt(proposed.token):
                    self._renewed(sent_at)
                    return
            except (StorageUnavailable, WriteConflict) as error:
                if unresolved:  # an earlier attempt of this very write may have landed
                    raise OutcomeUnknown(str(error)) from error
                raise
            else:
                self._state, self._etag = proposed, etag
                self._renewed(sent_at)
                return
        raise OutcomeUnknown(
            f"{self._store.url}/{self._layout.state} was refused {_ROUNDS} times although it carries this run's epoch"
        )

    def _next(self, state: PipelineState, change: Change) -> PipelineState:
        lease = state.lease and msgspec.structs.replace(state.lease, renewals=state.lease.renewals + 1, renewed_at=self._wall())
        changed = change(msgspec.structs.replace(state, lease=lease, token=uuid4().hex))
        return msgspec.structs.replace(changed, retained=self._without_forgotten(changed.retained))

    def _adopt(self, token: str) -> bool:
        """After a refused write: take what is there as our own if it is. True if it is the write just tried.

        Nobody else writes under our epoch, so a file that carries it holds a write of ours whose answer was
        lost.
        """
        where = f"{self._store.url}/{self._layout.state}"
        try:
            data, etag = self._store.get_with_etag(self._layout.state)
        except NotFound:
            self._lost = f"{self._subject()} is gone: {where} was deleted. Stop every run before deleting it"
            raise OwnershipLost(self._lost) from None
        except StorageUnavailable as error:
            raise OutcomeUnknown(f"{where} has changed and cannot be read back: {error}") from error
        found = decode_state(data, where)
        if found.epoch != self.epoch:
            self._lost = (
                f"{self._subject()} was taken over: expected epoch {self.epoch} in {where}, found epoch "
                f"{found.epoch}, {describe_owner(found)}. This run was silent for a whole lease; it stops "
                "and commits nothing"
            )
            raise OwnershipLost(self._lost)
        self._state, self._etag = found, etag
        return found.token == token

    def _renewed(self, sent_at: float) -> None:
        self._deadline = sent_at + self._lease_seconds * SAFETY

    def _without_forgotten(self, retained: tuple[CheckpointPointer, ...]) -> tuple[CheckpointPointer, ...]:
        return tuple(pointer for pointer in retained if pointer.location not in self._forgotten)

    def _subject(self) -> str:
        return f"the ownership of pipeline {self._layout.pipeline!r} (epoch {self.epoch})"
