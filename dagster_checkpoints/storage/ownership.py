"""One owner per pipeline: lease, fencing epoch and the commit point of checkpoints, all in ``state.json``.

The rules are :mod:`dagster_checkpoints.execution.ownership`; here they are performed on a store, one procedure at a time. Must
not know what a checkpoint holds.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, TypeVar

from dagster_checkpoints.execution.origin import UNKNOWN_ORIGIN, Origin
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, EndedBy, JobState, PipelineState, StopAskedBy
from dagster_checkpoints.execution.storage_steps import CreateState, ReadState, ReplaceState, Steps, StoredState, drive
from dagster_checkpoints.storage.base import ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.storage.errors import NotFound
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.state_encoding import decode_state, encode_state

T = TypeVar("T")


def now_utc() -> datetime:
    """Wall-clock time for display."""
    return datetime.now(UTC)


class PipelineStateFile:
    """Performs the requests for one pipeline's ``state.json``.

    Args:
        store: where it is.
        layout: of the pipeline.
    """

    def __init__(self, store: ObjectStore, layout: Layout) -> None:
        self._store = store
        self._key = layout.state
        self.url = f"{store.url}/{layout.state}"

    def perform(self, request: Any) -> object:
        """Perform one of :class:`ReadState`, :class:`CreateState` and :class:`ReplaceState`."""
        match request:
            case ReadState():
                return self.read()
            case ReplaceState(expected, state):
                return self._put(state, UpdateVersion(str(expected)))
            case CreateState(state):
                return self._put(state, "create")
            case _:
                raise TypeError(f"expected a request for {self.url}, found {request!r}")

    def read(self) -> StoredState | None:
        """Its content; None if there is no such file."""
        try:
            data, etag = self._store.get_with_etag(self._key)
        except NotFound:
            return None
        return StoredState(decode_state(data, self.url), etag)

    def _put(self, state: PipelineState, mode: PutMode) -> str:
        return self._store.put(self._key, encode_state(state), mode)


class Ownership:
    """The right to complete checkpoints of a pipeline, until it is released or lost. Thread-safe.

    Made by :func:`dagster_checkpoints.storage.acquisition.acquire`.

    Args:
        file: the pipeline's ``state.json``.
        steps: what an owner does with it.
    """

    def __init__(self, file: PipelineStateFile, steps: OwnershipSteps) -> None:
        self._file = file
        self.steps = steps
        """For procedures that only look at it; whatever writes is a method here."""
        self._lock = threading.RLock()

    @property
    def previous(self) -> PipelineState:
        """As this owner found it: newest checkpoint, how the last job ended, highest checkpoint id."""
        return self.steps.previous

    @property
    def epoch(self) -> int:
        """The fencing epoch: larger than that of every earlier owner."""
        return self.steps.epoch

    @property
    def job_id(self) -> int:
        """Of the job begun, see :meth:`begin_job`."""
        return self.steps.state.job.job_id

    @property
    def history(self) -> str:
        """Differs between any two ``state.json`` that were begun, of whatever storage."""
        return self.steps.state.history

    @property
    def newest(self) -> CheckpointPointer | None:
        """The newest completed checkpoint of the current job, as far as this owner knows."""
        return self.steps.state.newest

    @property
    def retained(self) -> tuple[CheckpointPointer, ...]:
        """Completed checkpoints that are kept, newest first."""
        return self.steps.retained

    @property
    def highest_checkpoint_id(self) -> int:
        """Of all that were ever completed or reserved: the next one is larger, or follows what it was restored from."""
        return self.steps.state.highest_checkpoint_id

    def has_later(self, checkpoint_id: int) -> bool:
        """Whether later checkpoints were completed: what sinks committed with them has to be taken back."""
        return self.steps.has_later(checkpoint_id)

    @property
    def lease_seconds(self) -> float:
        return self.steps.lease_seconds

    @property
    def deadline(self) -> float:
        """When this owner stops by its own monotonic clock unless it renews before."""
        return self.steps.deadline

    @property
    def lost(self) -> bool:
        """True once the pipeline is, or must be taken to be, another run's."""
        return self.steps.lost

    def ensure(self) -> None:
        """Raise OwnershipLost unless this owner may still act."""
        self.steps.ensure()

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
        return self._drive(self.steps.begin_job(resume=resume, restored=restored, named=named, origin=origin))

    def reserve(self, checkpoint_id: int) -> None:
        """Take an id for a savepoint that ``state.json`` will not name: no later checkpoint may have it.

        Call it before the savepoint's metadata is written: sinks name what they commit by the id.

        Raises:
            OwnershipLost: another run owns the pipeline: the savepoint must not be completed.
            StorageUnavailable, WriteConflict, OutcomeUnknown: it may be tried again; until then the id is not taken.
        """
        self._drive(self.steps.reserve(checkpoint_id))

    def claim(self, pointer: CheckpointPointer) -> None:
        """A savepoint is the pipeline's own from now on: it is retained, and deleted when it is so no longer.

        Raises:
            OwnershipLost, StorageUnavailable, WriteConflict, OutcomeUnknown: as :meth:`complete`.
        """
        self._drive(self.steps.claim(pointer))

    def renew(self) -> bool:
        """Renew the lease; call it about every third of it.

        Returns:
            True if renewed; False if storage did not answer but the lease still holds.

        Raises:
            OwnershipLost: another run owns the pipeline, or this owner's deadline has passed.
        """
        return self._drive(self.steps.renew())

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
            OutcomeUnknown: it may be completed; delete nothing and commit nothing. :attr:`newest` tells later.
        """
        return self._drive(self.steps.complete(checkpoint_id, location, kind, completed_at))

    def forget(self, location: str) -> None:
        """A retained checkpoint is about to be deleted: ``state.json`` lists it no more when this returns.

        Raises:
            OwnershipLost: another run owns the pipeline: delete nothing.
            StorageUnavailable, WriteConflict, OutcomeUnknown: it may still be listed: delete nothing. The next replacement
                that lands does not list it.
        """
        self._drive(self.steps.forget(location))

    def forget_savepoints(self, retained: Collection[str]) -> None:
        """Savepoints of the user that the coordinator does not retain are not listed from the next replacement on.

        Args:
            retained: locations of what the coordinator retains.
        """
        with self._lock:
            self.steps.forget_savepoints(retained)

    def end_job(
        self,
        status: JobState,
        *,
        keep_checkpoints: bool = True,
        ended_by: EndedBy = "",
        stop_asked_by: StopAskedBy = "",
    ) -> tuple[CheckpointPointer, ...]:
        """Say how the job ended while the lease is still held, so that checkpoints can be deleted after it.

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
        return self._drive(
            self.steps.end_job(status, keep_checkpoints=keep_checkpoints, ended_by=ended_by, stop_asked_by=stop_asked_by)
        )

    def release(self, status: JobState | None = None) -> None:
        """Free the lease and say how the job ended; does nothing when already released.

        Args:
            status: the job's end state; None if :meth:`end_job` has said it, or no job was begun.

        Raises:
            OwnershipLost: another run owns the pipeline.
            StorageUnavailable, WriteConflict, OutcomeUnknown: the lease then runs out by itself.
        """
        self._drive(self.steps.release(status))

    def _drive(self, steps: Steps[T]) -> T:
        with self._lock:
            return drive(steps, self._file.perform)
