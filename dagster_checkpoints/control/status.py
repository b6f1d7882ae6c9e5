"""How a running pipeline goes, as its owner writes it into ``status.json`` every few seconds.

Values and their encoding only; for displays and sensors. Never for correctness: who owns the pipeline and which checkpoint is
the newest is said by ``state.json`` alone, and a killed owner leaves its last status behind.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dagster_checkpoints.control.requests import Moment
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.errors import CorruptStatus, NotFound

VERSION = 1

Phase = Literal["starting", "running", "restarting", "stopping", "ended"]


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a stage.

    Args:
        name: of the instance.
        state: name of its task's ``TaskState``.
        end_of_data: no more records come out of it.
        caught_up: of a source: it has read all that was there when it last looked; None if it cannot say, or is no source.
        watermark_ms: its output watermark, milliseconds since 1970; None before the first.
    """

    name: str
    state: str
    end_of_data: bool = False
    caught_up: bool | None = None
    watermark_ms: int | None = None


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: whether all its instances have finished, and the rows that it has emitted, and dropped as late."""

    name: str
    finished: bool
    rows: int = 0
    late_rows: int = 0
    instances: tuple[InstanceStatus, ...] = ()


class PendingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or savepoint under way.

    Args:
        checkpoint_id: its id.
        kind: checkpoint or savepoint.
        acknowledged: tasks that have.
        expected: tasks that must.
        seconds: since it was triggered.
    """

    checkpoint_id: int
    kind: str
    acknowledged: int
    expected: int
    seconds: float


class VertexPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage, or a chain of them, had to do for a checkpoint: the slowest of its instances, and bytes of all.

    Args:
        stages: that its tasks run.
        acknowledged_after: seconds from the trigger to the latest acknowledgement.
        alignment_seconds: longest time between the first and the last barrier of an instance.
        sync_seconds: longest time that an instance stood still.
        async_seconds: longest time of storing in the background.
        new_bytes: uploaded.
        total_bytes: named.
    """

    stages: tuple[str, ...]
    acknowledged_after: float
    alignment_seconds: float = 0.0
    sync_seconds: float = 0.0
    async_seconds: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The latest completed checkpoint, or savepoint.

    Args:
        checkpoint_id: its id.
        location: as in ``state.json``.
        completed_at: wall clock of the owner, as ``updated_at``: their difference is its age.
        kind: checkpoint or savepoint.
        duration: seconds from trigger to completion.
        new_bytes: uploaded for it.
        total_bytes: that it names.
        parts: of each stage or chain that took part, in topological order.
    """

    checkpoint_id: int
    location: str
    completed_at: Moment
    kind: str = "checkpoint"
    duration: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0
    parts: tuple[VertexPart, ...] = ()


class FailureStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The latest checkpoint or savepoint that failed after it was triggered.

    Args:
        checkpoint_id: its id.
        reason: name of a ``FailureReason``.
        message: what happened.
        failed_at: wall clock of the owner.
    """

    checkpoint_id: int
    reason: str
    message: str
    failed_at: Moment


class CheckpointCountsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The run's checkpoints and savepoints in numbers; durations in seconds, over the latest 10,000 completed ones.

    Args:
        triggered: that have got an id.
        completed: of them; savepoints too.
        failed: also those that were refused before they had an id.
        savepoints: completed ones.
        restored: how often the job was started from one, at first and in restarts.
    """

    triggered: int = 0
    completed: int = 0
    failed: int = 0
    savepoints: int = 0
    restored: int = 0
    duration_p50: float = 0.0
    duration_p99: float = 0.0
    duration_max: float = 0.0


class StopStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stop under way: who asked, how, and the state of its state machine."""

    request_id: str
    drain: bool
    state: str


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``status.json``.

    Args:
        pipeline: its name.
        run_id: of the run that writes it.
        epoch: of that owner; an older one than in ``state.json`` is what a dead run left behind.
        job_id: of the job.
        attempt: counts the restarts within the run, from 1.
        phase: what the run does.
        sequence: grows with every version that this owner writes.
        updated_at: wall clock.
        started_at: wall clock, of the run.
        interval: seconds until the next version; far more without one and the owner is busy, or dead.
        roots: stages from which a checkpoint would start now.
        chains: the stages of each chain.
        stages: in topological order.
        pending: checkpoints under way.
        last_checkpoint: the latest completed one.
        last_failure: the latest failed one of this run.
        checkpoints: how many there were in this run, and how long they took.
        stop: under way.
        version: of this format.
    """

    pipeline: str
    run_id: str
    epoch: int
    phase: Phase
    sequence: int
    updated_at: Moment
    started_at: Moment
    job_id: int = 0
    attempt: int = 1
    interval: float = 5.0
    roots: tuple[str, ...] = ()
    chains: tuple[tuple[str, ...], ...] = ()
    stages: tuple[StageStatus, ...] = ()
    pending: tuple[PendingStatus, ...] = ()
    last_checkpoint: CheckpointStatus | None = None
    last_failure: FailureStatus | None = None
    checkpoints: CheckpointCountsStatus | None = None
    stop: StopStatus | None = None
    version: int = VERSION


class _Version(msgspec.Struct):
    version: int


# Made here: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_Version)
_STATUSES = msgspec.json.Decoder(PipelineStatus)


def encode_status(status: PipelineStatus) -> bytes:
    """``status`` as the bytes of ``status.json``."""
    return msgspec.json.encode(status)


def decode_status(data: bytes, where: str) -> PipelineStatus:
    """The status in the bytes of ``status.json``.

    Args:
        data: the file's bytes.
        where: its URL, for the text of errors.

    Raises:
        CorruptStatus: it is no such file, or a newer release wrote it.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            return _STATUSES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptStatus(
            f"expected the status of a pipeline as JSON in {where}, found {len(data)} bytes that are not: {error}. It is for "
            "display only: delete the file, and a running pipeline writes it anew"
        ) from error
    raise CorruptStatus(
        f"expected version {VERSION} in {where}, found version {version}: a newer release of dagster-checkpoints wrote it. "
        "Run that release"
    )


def write_status(storage: CheckpointStorage, status: PipelineStatus) -> None:
    """Overwrite ``status.json``, for displays and sensors.

    Raises:
        StorageUnavailable, OutcomeUnknown: the status may not be written; nothing depends on it.
    """
    storage.store.put(storage.layout.status, encode_status(status))


def read_status(storage: CheckpointStorage) -> PipelineStatus | None:
    """The status that the newest run has written last; None if no run has written one.

    Raises:
        CorruptStatus: the file cannot be read.
    """
    try:
        return decode_status(storage.store.get(storage.layout.status), storage.url_of("status.json"))
    except NotFound:
        return None
