"""One owner per pipeline: lease, fencing epoch and the commit point of checkpoints, all in ``state.json``; as steps.

The file is replaced only if it is unchanged since this owner last saw it, so late writes of an earlier owner fail. Leases are
judged only by observation (:mod:`acquisition`); the clocks of two machines are never compared. Must not know the content of
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from types import MappingProxyType

import msgspec

from dagster_checkpoints.errors import (
    OutcomeUnknown,
    OwnershipLost,
    Precondition,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.execution import state_changes as changes
from dagster_checkpoints.execution.pipeline_state import (
    UNKNOWN_ORIGIN,
    CheckpointPointer,
    EndedBy,
    JobState,
    Origin,
    PipelineState,
    StopAskedBy,
    describe_owner,
)
from dagster_checkpoints.execution.storage_steps import (
    DriverValues,
    ReadState,
    ReplaceState,
    StatePlace,
    StateVersion,
    Steps,
    StoredState,
)
from dagster_checkpoints.execution.unlisted_checkpoints import UnlistedFiles

SAFETY = 0.9
"""The fraction of its lease that an owner uses: it stops before another run may take over."""
_RESOLVE_ATTEMPTS = 3
_ROUNDS = 8

Change = Callable[[PipelineState], PipelineState]


class OwnershipSteps:
    """The procedures of a pipeline's owner on ``state.json``. The driver runs one at a time.

    Made by :func:`dagster_checkpoints.execution.acquisition.acquire`.

    Args:
        stored: the state that this owner wrote when it acquired the pipeline.
        previous: the state that it found before.
        deadline: when the lease ends for this owner, by its own clock, seconds.
        values: the driver's times and tokens.
        place: the location of ``state.json``.
        unlisted: what storage holds, if it records no job.
    """

    def __init__(
        self,
        stored: StoredState,
        previous: PipelineState,
        deadline: float,
        values: DriverValues,
        place: StatePlace,
        unlisted: UnlistedFiles = UnlistedFiles(),  # noqa: B008 - immutable
    ) -> None:
        assert stored.state.lease is not None
        self.previous = previous
        """The state before this owner: newest checkpoint, end of the last job, highest checkpoint id."""
        self.state = stored.state
        """The state as this owner last wrote or read it."""
        self.deadline = deadline
        """When this owner stops unless it renews its lease before, by its own clock, seconds."""
        self.lease_seconds = stored.state.lease.seconds
        self.released = False
        self.unlisted = unlisted
        """What storage held before this owner, if it recorded no job."""
        self._version: StateVersion = stored.version
        self._values = values
        self._place = place
        self._forgotten: set[str] = set()
        """Locations that the next replacement takes out of the retained checkpoints; after it no state of this owner has them."""
        self._stopped_with = ""
        self._ending: tuple[JobState, EndedBy, str, StopAskedBy] | None = None
        self._lost: str | None = None
        self._not_renewed = ""
        """Why the last renewal failed; "" if it has not."""

    @property
    def epoch(self) -> int:
        """The fencing epoch: larger than that of every earlier owner."""
        return self.state.epoch

    @property
    def retained(self) -> tuple[CheckpointPointer, ...]:
        """Completed checkpoints that are kept, newest first."""
        return self._without_forgotten(self.state.retained)

    @property
    def in_use(self) -> frozenset[str]:
        """The locations of the retained checkpoints and of the newest one."""
        newest = () if self.state.newest is None else (self.state.newest,)
        return frozenset(pointer.location for pointer in (*self.retained, *newest))

    @property
    def lost(self) -> bool:
        """Whether another run owns the pipeline, or may own it by now."""
        return self._lost is not None or (not self.released and self._values.elapsed() >= self.deadline)

    def vouches_for(self, location: str, epoch: int) -> bool:
        """Whether the files of a retained checkpoint are certain to stay: its owner wrote it, or found it in ``state.json``.

        An earlier owner that was suspended may still delete the files of any other checkpoint, which it may have discarded.

        Args:
            location: location of the checkpoint.
            epoch: fencing epoch of the owner that wrote it.
        """
        return epoch == self.epoch or any(pointer.location == location for pointer in self.previous.restorable_checkpoints)

    def has_later(self, checkpoint_id: int) -> bool:
        """Whether later checkpoints were completed, or a run has begun from an earlier one since: sinks may show other rows than
        those of this checkpoint, and have to take back or to show again what they committed."""
        return self.state.highest_checkpoint_id > checkpoint_id

    def first_id_after(self, checkpoint_id: int) -> int:
        """An id above those of all checkpoints that earlier owners have completed, and at most that of the next checkpoint.

        Args:
            checkpoint_id: id of the checkpoint from which tasks start.
        """
        return max(checkpoint_id, self.previous.highest_checkpoint_id) + 1

    def ensure(self) -> None:
        """Check that this owner may still act.

        Raises:
            OwnershipLost: it may not.
        """
        if self.released:
            raise OwnershipLost(f"{self._subject()} was released by this run")
        if self._lost is None and self._values.elapsed() >= self.deadline:
            unknown = "Was storage not reachable, or was this process suspended?"
            why = f"The last renewal failed: {self._not_renewed}" if self._not_renewed else unknown
            self._lost = (
                f"{self._subject()} could not be renewed within its lease of {self.lease_seconds:g} s; "
                f"another run may own the pipeline now, so this one stops. {why}"
            )
        if self._lost is not None:
            raise OwnershipLost(self._lost)

    def begin_job(
        self,
        *,
        resume: bool,
        restored: CheckpointPointer | None = None,
        named: bool = False,
        origin: Origin = UNKNOWN_ORIGIN,
        instances: Mapping[str, int] = MappingProxyType({}),
    ) -> Steps[int]:
        """Record that a job runs now; see :func:`state_changes.begun` for the arguments. Returns the job's id."""
        self.ensure()
        yield from self._replace(
            lambda state: changes.begun(
                state,
                resume=resume,
                restored=restored,
                at=self._values.wall(),
                named=named,
                origin=origin,
                instances=instances,
            )
        )
        return self.state.job.job_id

    def reserve(self, checkpoint_id: int) -> Steps[None]:
        """Reserve an id for a savepoint that ``state.json`` does not name: no later checkpoint may have it.

        Raises:
            OwnershipLost: another run owns the pipeline: the savepoint must not be completed.
            StorageUnavailable, WriteConflict, OutcomeUnknown: the id is not reserved; the caller may try again.
        """
        self.ensure()
        if self.state.highest_checkpoint_id < checkpoint_id:
            yield from self._replace(lambda state: changes.reserved(state, checkpoint_id))

    def renew(self) -> Steps[bool]:
        """Renew the lease.

        Returns:
            True if renewed; False if storage did not answer but the lease still holds.

        Raises:
            OwnershipLost: another run owns the pipeline, or this owner's deadline has passed.
        """
        self.ensure()
        try:
            yield from self._replace(lambda state: state)
        except (StorageUnavailable, OutcomeUnknown, WriteConflict) as error:
            self._not_renewed = str(error)
            self.ensure()
            return False
        return True

    def complete(
        self, checkpoint_id: int, location: str, kind: str, completed_at: datetime | None = None
    ) -> Steps[CheckpointPointer]:
        """Make a checkpoint the newest completed one: **the commit point**. Sinks commit after it.

        Args:
            checkpoint_id: id of the checkpoint.
            location: location of its metadata.
            kind: ``checkpoint``, or ``savepoint`` for the savepoint of a stop.
            completed_at: wall-clock time; now by default.

        Raises:
            OwnershipLost: another run owns the pipeline; the checkpoint is not completed and nothing may be committed.
            StorageUnavailable, WriteConflict: it is not completed.
            OutcomeUnknown: it may be completed; delete nothing and commit nothing. After the next renewal `state` shows
                the outcome.
        """
        self.ensure()
        pointer = CheckpointPointer(
            checkpoint_id=checkpoint_id,
            location=location,
            kind=kind,
            epoch=self.epoch,
            job_id=self.state.job.job_id,
            completed_at=completed_at or self._values.wall(),
        )
        if kind == "savepoint":
            self._stopped_with = location
        yield from self._replace(lambda state: changes.completed(state, pointer))
        return pointer

    def forget(self, location: str) -> Steps[None]:
        """Take a checkpoint out of ``state.json`` before it is deleted.

        So no checkpoint that ``state.json`` names is ever deleted: an owner that was suspended and has lost the pipeline fails
        here, while a later owner may be restoring from that checkpoint.

        Raises:
            OwnershipLost: another run owns the pipeline: delete nothing.
            StorageUnavailable, WriteConflict, OutcomeUnknown: ``state.json`` may still name it: delete nothing. The next
                replacement takes it out.
        """
        self.ensure()
        self._forgotten.add(location)
        if any(pointer.location == location for pointer in self.state.restorable_checkpoints):
            yield from self._replace(lambda state: changes.forgotten(state, location))

    def forget_savepoints(self, retained: Collection[str]) -> None:
        """Take the user's savepoints that the coordinator does not retain out of ``state.json`` with the next replacement.

        No restart begins from them any more; their files stay.

        Args:
            retained: locations of the checkpoints that the coordinator retains.
        """
        for pointer in self.retained:
            if not pointer.ours and pointer.location not in retained:
                self._forgotten.add(pointer.location)

    def end_job(
        self, status: JobState, *, keep_checkpoints: bool, ended_by: EndedBy, stop_asked_by: StopAskedBy
    ) -> Steps[tuple[CheckpointPointer, ...]]:
        """Record how the job ended while the lease is still held, so that its checkpoints can be deleted after that.

        If they were deleted first, a crash in between would look like a job without checkpoints.

        Args:
            status: final state of the job.
            keep_checkpoints: whether ``state.json`` still names the job's checkpoints; otherwise only the savepoint of a suspend,
                which stays the newest.
            ended_by: what brought a FINISHED job to its end; the savepoint of a stop is recorded.
            stop_asked_by: what asked for that stop.

        Returns:
            The checkpoints that ``state.json`` does not name any more and that the system has to delete.

        Raises:
            OwnershipLost, StorageUnavailable, WriteConflict, OutcomeUnknown: as :meth:`complete`.
        """
        self.ensure()
        newest = self.state.newest.location if self.state.newest is not None else ""
        kept = newest if ended_by == "suspend" else ""
        dropped = () if keep_checkpoints else tuple(old for old in self.retained if old.location != kept)
        self._forgotten.update(pointer.location for pointer in dropped)
        savepoint = newest if ended_by in ("drain", "suspend") and newest == self._stopped_with else ""
        self._ending = (status, ended_by, savepoint, stop_asked_by)  # if the replacement fails, `release` records it
        yield from self._replace(self._ended(status, keep_checkpoints))
        return tuple(pointer for pointer in dropped if pointer.ours)

    def release(self, status: JobState | None) -> Steps[None]:
        """Free the lease and record how the job ended; does nothing if it was released before.

        Args:
            status: final state of the job; None if :meth:`end_job` has recorded it, or no job was begun.

        Raises:
            OwnershipLost: another run owns the pipeline.
            StorageUnavailable, WriteConflict, OutcomeUnknown: the lease then runs out by itself.
        """
        if self.released:
            return
        if self._lost is not None:
            raise OwnershipLost(self._lost)

        def change(state: PipelineState) -> PipelineState:
            if status is not None and state.job.status != status:
                state = self._ended(status, True)(state)
            return msgspec.structs.replace(state, lease=None)

        yield from self._replace(change)
        self.released = True

    def _ended(self, status: JobState, keep: bool) -> Change:
        recorded, ended_by, savepoint, asked_by = self._ending or (status, "", "", "")
        if recorded != status:
            ended_by, savepoint, asked_by = "", "", ""
        return lambda state: changes.ended(
            state, status, keep=keep, ended_by=ended_by, savepoint=savepoint, stop_asked_by=asked_by, at=self._values.wall()
        )

    def _replace(self, change: Change) -> Steps[None]:
        """Replace ``state.json`` by a changed version of what this owner last wrote, if no other run has replaced it."""
        elapsed = self._values.elapsed
        base, unresolved = None, 0
        for _ in range(_ROUNDS):
            if base is not self.state:  # the first round, or an earlier write of this owner with an unknown outcome has landed
                base = self.state
                proposed = self._next(base, change)
            sent_at = elapsed()
            try:
                version = yield ReplaceState(self._version, proposed)
            except OutcomeUnknown:
                # The same write is repeated under the same condition: it lands now, or the file shows that it had landed.
                unresolved += 1
                if unresolved == _RESOLVE_ATTEMPTS or elapsed() >= self.deadline:
                    raise
            except Precondition:
                if (yield from self._adopt(proposed.token)):
                    self._replaced(sent_at)
                    return
            except (StorageUnavailable, WriteConflict) as error:
                if unresolved:  # an earlier attempt of this write may have landed
                    raise OutcomeUnknown(str(error)) from error
                raise
            else:
                self.state, self._version = proposed, version
                self._replaced(sent_at)
                return
        raise OutcomeUnknown(
            f"{self._place.url} could not be replaced in {_ROUNDS} attempts although it carries this run's epoch"
        )

    def _next(self, state: PipelineState, change: Change) -> PipelineState:
        values = self._values
        lease = state.lease and msgspec.structs.replace(state.lease, renewals=state.lease.renewals + 1, renewed_at=values.wall())
        changed = change(msgspec.structs.replace(state, lease=lease, token=values.new_token()))
        if self._forgotten:
            changed = msgspec.structs.replace(changed, retained=self._without_forgotten(changed.retained))
        return changes.with_dropped_savepoints(state, changed)

    def _adopt(self, token: str) -> Steps[bool]:
        """After a refused write: adopt the stored state if this owner wrote it. Returns whether it is the write just tried.

        No other run writes under this epoch of this history, so a file that carries both is a write of this owner whose answer
        was lost. After a user has deleted the file, another run may have created one that counts epochs from the start again.
        """
        try:
            found: StoredState | None = yield ReadState()
        except StorageUnavailable as error:
            raise OutcomeUnknown(f"{self._place.url} has changed and cannot be read back: {error}") from error
        if found is None:
            self._lost = f"{self._subject()} is lost: {self._place.url} was deleted. Stop every run before deleting it"
            raise OwnershipLost(self._lost)
        if (found.state.epoch, found.state.history) != (self.epoch, self.state.history):
            self._lost = (
                f"{self._subject()} was taken over: expected epoch {self.epoch} in {self._place.url}, found epoch "
                f"{found.state.epoch}, {describe_owner(found.state)}. This run did not renew its lease in time; it stops "
                "and commits nothing"
            )
            raise OwnershipLost(self._lost)
        self.state, self._version = found.state, found.version
        return found.state.token == token

    def _replaced(self, sent_at: float) -> None:
        """The state that this owner proposed is stored."""
        self._forgotten.clear()
        self._not_renewed = ""
        self.deadline = sent_at + self.lease_seconds * SAFETY

    def _without_forgotten(self, retained: tuple[CheckpointPointer, ...]) -> tuple[CheckpointPointer, ...]:
        return tuple([pointer for pointer in retained if pointer.location not in self._forgotten])

    def _subject(self) -> str:
        return f"the ownership of pipeline {self._place.pipeline!r} (epoch {self.epoch})"
