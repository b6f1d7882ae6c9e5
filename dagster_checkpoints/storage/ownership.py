"""One owner per pipeline: lease, fencing epoch and the commit point of checkpoints, all in ``state.json``.

The rules are :mod:`dagster_checkpoints.execution.ownership`; this module performs them on a store, one procedure at a time, and
encodes the file as indented JSON, so that people can read it. A thread renews the lease, so that slow storage never blocks the
coordinator's loop. Must not know what a checkpoint holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import msgspec

from dagster_checkpoints.errors import CorruptPipelineState, NotFound, OwnershipLost, UnknownPipelineStateVersion
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import (
    UNKNOWN_ORIGIN,
    VERSION,
    CheckpointPointer,
    EndedBy,
    JobState,
    Origin,
    PipelineState,
    StopAskedBy,
)
from dagster_checkpoints.execution.storage_steps import CreateState, ReadState, ReplaceState, Steps, StoredState, drive
from dagster_checkpoints.files.store import ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.storage.layout import Layout

_READABLE = range(1, VERSION + 1)
"""Version 2 added how a job ended, the savepoint of its stop, and claimed savepoints; version 3 the requester of the stop, the
job's runs, and where the pipeline is defined; version 4 that a burst can be the requester; version 5 the instances that stages
have had. All these fields have defaults."""


class _Version(msgspec.Struct):
    version: int


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_Version)
_STATES = msgspec.json.Decoder(PipelineState)


def encode_state(state: PipelineState) -> bytes:
    """``state`` as the bytes of ``state.json``."""
    return msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"


def decode_state(data: bytes, where: str) -> PipelineState:
    """The state in the bytes of ``state.json``.

    Args:
        data: the file's bytes.
        where: the file's URL, for the text of errors.

    Raises:
        UnknownPipelineStateVersion: a newer release wrote the file.
        CorruptPipelineState: the bytes are not a pipeline's state.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version in _READABLE:
            # The next write has the newest version.
            return msgspec.structs.replace(_STATES.decode(data), version=VERSION)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptPipelineState(
            f"expected the state of a pipeline as JSON in {where}, found {len(data)} bytes that are not: "
            f"{error}. Only this package writes the file, and replaces it as a whole: restore it from a "
            "backup; or stop every run, delete the file and start the pipeline again: the run can then name the "
            "checkpoint to restore from"
        ) from error
    raise UnknownPipelineStateVersion(
        f"expected version {VERSION} or older in {where}, found version {version}: a newer release of "
        "dagster-checkpoints wrote it. Run that release"
    )


T = TypeVar("T")


def now_utc() -> datetime:
    """Wall-clock time for display."""
    return datetime.now(UTC)


class PipelineStateFile:
    """Performs the requests for one pipeline's ``state.json``.

    Args:
        store: the object store that holds the file.
        layout: the names of the pipeline's files.
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
        """The content and the version of the file; None if there is no such file."""
        try:
            data, etag = self._store.get_with_etag(self._key)
        except NotFound:
            return None
        return StoredState(decode_state(data, self.url), etag)

    def _put(self, state: PipelineState, mode: PutMode) -> str:
        return self._store.put(self._key, encode_state(state), mode)


class Ownership:
    """The right to complete checkpoints of a pipeline, until it is released or lost. Thread-safe.

    Created by :func:`dagster_checkpoints.storage.acquisition.acquire`.

    Args:
        file: the pipeline's ``state.json``.
        steps: the procedures of an owner.
    """

    def __init__(self, file: PipelineStateFile, steps: OwnershipSteps) -> None:
        self._file = file
        self.steps = steps
        """For procedures that only read it; each procedure that writes is a method of this class."""
        self._lock = threading.RLock()

    @property
    def previous(self) -> PipelineState:
        """The state that this owner found: newest checkpoint, end of the last job, highest checkpoint id."""
        return self.steps.previous

    @property
    def epoch(self) -> int:
        """The fencing epoch: larger than the epochs of all earlier owners."""
        return self.steps.epoch

    @property
    def job_id(self) -> int:
        """The id of the current job, see :meth:`begin_job`."""
        return self.steps.state.job.job_id

    @property
    def history(self) -> str:
        """Random id of this ``state.json``, created with it."""
        return self.steps.state.history

    @property
    def newest(self) -> CheckpointPointer | None:
        """The newest checkpoint of the current job that this owner knows to be complete."""
        return self.steps.state.newest

    @property
    def retained(self) -> tuple[CheckpointPointer, ...]:
        """The retained checkpoints, newest first."""
        return self.steps.retained

    @property
    def highest_checkpoint_id(self) -> int:
        """The highest id that was ever completed or reserved: the next id is larger, or follows the restored checkpoint's."""
        return self.steps.state.highest_checkpoint_id

    def has_later(self, checkpoint_id: int) -> bool:
        """See :meth:`OwnershipSteps.has_later`."""
        return self.steps.has_later(checkpoint_id)

    @property
    def lease_seconds(self) -> float:
        return self.steps.lease_seconds

    @property
    def deadline(self) -> float:
        """The time, by this process's monotonic clock, at which this owner stops unless it has renewed the lease before."""
        return self.steps.deadline

    @property
    def lost(self) -> bool:
        """True if another run owns the pipeline, or may own it."""
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
        instances: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Record that a job runs now.

        Args:
            resume: continue the previous job. Otherwise a new job starts: ``newest`` becomes ``restored`` or None, so that
                a crash before its first checkpoint does not resume the previous one. Call it before the sinks begin the
                new start.
            restored: the checkpoint that the job begins from. It becomes the newest, so that a restart does not begin from one
                that was passed over, nor from the start. None when resuming: the newest stays.
            named: whether the run's configuration names the checkpoint: then the run is recorded as the one that chose it.
            origin: the place where the pipeline is defined, as far as the run knows it.
            instances: by the uid of a stage, its number of instances.

        Returns:
            The job's id: the previous job's, or a new one.
        """
        steps = self.steps.begin_job(resume=resume, restored=restored, named=named, origin=origin, instances=instances)
        return self._drive(steps)

    def reserve(self, checkpoint_id: int) -> None:
        """Reserve an id for a savepoint that ``state.json`` will not name, so that no later checkpoint gets it.

        Call it before the savepoint's metadata is written: sinks name the rows that they commit by the id.

        Raises:
            OwnershipLost: another run owns the pipeline: the savepoint must not be completed.
            StorageUnavailable, WriteConflict, OutcomeUnknown: the id is not reserved; the call may be repeated.
        """
        self._drive(self.steps.reserve(checkpoint_id))

    def renew(self) -> bool:
        """Renew the lease; call it about three times per lease.

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
            checkpoint_id: the checkpoint's id.
            location: the location that ``write_metadata`` returned, of the storage or of the directory of a stop's savepoint.
            kind: ``checkpoint``, or ``savepoint`` for a stop's savepoint.
            completed_at: wall-clock time of the completion; default: now.

        Raises:
            OwnershipLost: another run owns the pipeline; the checkpoint is not completed and nothing may be
                committed.
            StorageUnavailable, WriteConflict: the checkpoint is not completed.
            OutcomeUnknown: it may be completed; delete nothing and commit nothing. :attr:`newest` shows it later.
        """
        return self._drive(self.steps.complete(checkpoint_id, location, kind, completed_at))

    def forget(self, location: str) -> None:
        """Remove a checkpoint that is about to be deleted from ``state.json``.

        Raises:
            OwnershipLost: another run owns the pipeline: delete nothing.
            StorageUnavailable, WriteConflict, OutcomeUnknown: it may still be listed: delete nothing. The next replacement
                that succeeds does not list it.
        """
        self._drive(self.steps.forget(location))

    def forget_savepoints(self, retained: Collection[str]) -> None:
        """Stop listing the user's savepoints that the coordinator does not retain, from the next ``state.json`` on.

        Args:
            retained: the locations of the checkpoints and savepoints that the coordinator retains.
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
        """Record how the job ended while the lease is still held, so that checkpoints can be deleted after it.

        Args:
            status: the job's end state.
            keep_checkpoints: whether checkpoints stay listed; if not, only the savepoint of a suspend does, as the newest.
            ended_by: the cause of a FINISHED job's end; for a stop, its savepoint is recorded.
            stop_asked_by: the requester of that stop.

        Returns:
            The checkpoints that are no longer listed and that the system deletes, for ``CheckpointStorage.delete_checkpoint``.

        Raises:
            OwnershipLost, StorageUnavailable, WriteConflict, OutcomeUnknown: as :meth:`complete`.
        """
        return self._drive(
            self.steps.end_job(status, keep_checkpoints=keep_checkpoints, ended_by=ended_by, stop_asked_by=stop_asked_by)
        )

    def release(self, status: JobState | None = None) -> None:
        """Free the lease and record how the job ended; does nothing if the lease is released already.

        Args:
            status: the job's end state; None if :meth:`end_job` has recorded it, or no job was begun.

        Raises:
            OwnershipLost: another run owns the pipeline.
            StorageUnavailable, WriteConflict, OutcomeUnknown: the lease then expires by itself.
        """
        self._drive(self.steps.release(status))

    def _drive(self, steps: Steps[T]) -> T:
        with self._lock:
            return drive(steps, self._file.perform)


class LeaseRenewer:
    """Renews the lease after each third of it, after each tenth while storage fails; also a context manager.

    Args:
        ownership: the ownership whose lease is renewed.
        on_lost: called once, on a thread of the renewer, with the error that ended the renewals (OwnershipLost, an
            unreadable state, or any other error); also while a renewal is under way that storage neither carries out nor refuses.
    """

    def __init__(self, ownership: Ownership, on_lost: Callable[[Exception], None]) -> None:
        self._ownership = ownership
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._reporting = threading.Lock()
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
        self._watch = threading.Thread(target=self._watch_deadline, name="lease-deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    def stop(self, timeout: float | None = None) -> None:
        """Stop renewing; wait up to ``timeout`` seconds for a renewal under way (None: without limit). Idempotent."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> LeaseRenewer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        pause = self._ownership.lease_seconds / 3
        while not self._stopping.wait(pause):
            try:
                renewed = self._ownership.renew()
                pause = self._ownership.lease_seconds / (3 if renewed else 10)
            except Exception as error:  # a thread that ended without a word would let the lease run out
                self._report(error)
                return

    def _watch_deadline(self) -> None:
        """Report the end of the lease where a renewal hangs, as on a file system whose server is away."""
        while not self._stopping.wait(self._ownership.lease_seconds / 20):
            if self._ownership.lost:
                try:
                    self._ownership.ensure()
                except OwnershipLost as error:
                    self._report(error)
                return

    def _report(self, error: Exception) -> None:
        with self._reporting:
            again, self._reported = self._reported, True
        if not again and not self._stopping.is_set():
            self._on_lost(error)
