"""The progress of a running pipeline, which its owner writes into ``status.json`` every few seconds.

Values and their encoding only; for displays and sensors. Never for correctness: only ``state.json`` says which run owns the
pipeline and which checkpoint is the newest, and the last status of a killed owner stays in the file.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from dagster_checkpoints.errors import CorruptStatus, NotFound
from dagster_checkpoints.execution.moments import Moment, WithMoments
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

VERSION = 1
_NAMED = 5
"""Number of instances that a text names."""

Phase = Literal["starting", "running", "restarting", "stopping", "ended"]


class SilenceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The source of an instance has not answered for some time, or its first batch does not end.

    Args:
        seconds: seconds since its last answer, or since its query began.
        doing: what the query does: "starting", "asking" or "reading".
        words: Spark's own words for it.
        local: whether Spark's driver reads the rows itself, and no executors on other machines.
    """

    seconds: float
    doing: Literal["starting", "asking", "reading", "other"]
    words: str
    local: bool = False


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a stage.

    Args:
        name: name of the instance.
        state: name of its task's ``TaskState``.
        end_of_data: whether the instance emits no more records.
        caught_up: of a source: whether it has read all input that was available when it last checked, which it has done since
            the run or its restart began; None if the source cannot know, or the stage is no source. True as well if the instance
            has ended, also by a drain that left what it had not read.
        watermark_ms: its output watermark, milliseconds since 1970; None before the first.
        rows_behind: of a Kafka source: the number of messages that were not read yet when its last micro-batch was planned;
            None if it is not known.
        silence: of a source that does not answer: what its query does, and for how long.
    """

    name: str
    state: str
    end_of_data: bool = False
    caught_up: bool | None = None
    watermark_ms: int | None = None
    rows_behind: int | None = None
    silence: SilenceStatus | None = None


class SplitsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a split source.

    Args:
        discovered: number of splits discovered so far, the others included.
        assigned: number of splits that instances read.
        finished: number of splits read to their end.
        complete: whether no other split is discovered any more.
    """

    discovered: int
    assigned: int
    finished: int
    complete: bool = False


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: whether all its instances have finished, the number of rows that it emitted, and of those it dropped as late.

    Args:
        rows: number of rows that it emitted since the job began; None if it is not known.
        fused: whether it is a source in the query of the stage that reads it, beside other sources.
        splits: of a split source, its progress in splits.
        uid: its uid, under which checkpoints name it; "" if an earlier release wrote the status.
        inputs: by upstream stage, how it is read: "pointwise", "all to all", or "table" for a static input. None if an earlier
            release wrote the status.
    """

    name: str
    finished: bool
    rows: int | None = 0
    late_rows: int = 0
    instances: tuple[InstanceStatus, ...] = ()
    fused: bool = False
    splits: SplitsStatus | None = None
    uid: str = ""
    inputs: dict[str, str] | None = None


class PendingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or savepoint under way.

    Args:
        checkpoint_id: its id.
        kind: checkpoint or savepoint.
        acknowledged: number of tasks that have acknowledged it.
        expected: number of tasks that must acknowledge it.
        seconds: seconds since it was triggered.
        waits_for: the tasks that have not acknowledged, by the stages of their query and the instance.
    """

    checkpoint_id: int
    kind: str
    acknowledged: int
    expected: int
    seconds: float
    waits_for: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """How many tasks have acknowledged, and which have not, for people."""
        count = f"{self.acknowledged} of {self.expected} tasks"
        return f"{count}, waits for {_named(self.waits_for)}" if self.waits_for else count


class VertexPart(msgspec.Struct, frozen=True, kw_only=True):
    """A vertex's part in a checkpoint: times of the slowest of its instances, bytes of all of them.

    Args:
        stages: names of the stages that the vertex runs: one, or those of a chain.
        acknowledged_after: seconds from the trigger to the latest acknowledgement.
        alignment_seconds: longest time between the first and the last barrier of an instance.
        sync_seconds: longest time for which an instance paused its work.
        async_seconds: longest time of storing in the background.
        new_bytes: bytes uploaded for the checkpoint.
        total_bytes: bytes of all files that the checkpoint names.
    """

    stages: tuple[str, ...]
    acknowledged_after: float
    alignment_seconds: float = 0.0
    sync_seconds: float = 0.0
    async_seconds: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0


class CompletedCheckpointStatus(WithMoments, frozen=True, kw_only=True):
    """The latest completed checkpoint, or savepoint.

    Args:
        checkpoint_id: its id.
        location: its location, as in ``state.json``.
        completed_at: wall clock of the owner, as ``updated_at``: their difference is the checkpoint's age.
        kind: checkpoint or savepoint.
        duration: seconds from trigger to completion.
        new_bytes: bytes uploaded for it.
        total_bytes: bytes of all files that it names.
        parts: the part of each vertex that took part, in topological order.
    """

    checkpoint_id: int
    location: str
    completed_at: Moment
    kind: str = "checkpoint"
    duration: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0
    parts: tuple[VertexPart, ...] = ()


class FailureStatus(WithMoments, frozen=True, kw_only=True):
    """The latest checkpoint or savepoint that failed after it was triggered.

    Args:
        checkpoint_id: its id.
        reason: name of a ``FailureReason``.
        message: explanation for people.
        failed_at: wall clock of the owner when it failed.
    """

    checkpoint_id: int
    reason: str
    message: str
    failed_at: Moment


class CheckpointCountsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the run's checkpoints and savepoints; durations in seconds, over the latest 10,000 completed ones.

    Args:
        triggered: number that were given an id.
        completed: number that completed, savepoints included.
        failed: number that failed, including those refused before they were given an id.
        savepoints: number of completed savepoints.
        restored: number of starts of the job from a checkpoint or savepoint: the run's first start and restarts.
        failed_in_a_row: number of checkpoints that have failed since one, or a savepoint, has completed, without those that were
            given up because of something else, such as a restart.
    """

    triggered: int = 0
    completed: int = 0
    failed: int = 0
    savepoints: int = 0
    restored: int = 0
    failed_in_a_row: int = 0
    duration_p50: float = 0.0
    duration_p99: float = 0.0
    duration_max: float = 0.0


class StopStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stop under way.

    Args:
        request_id: id of its request.
        drain: whether it drains.
        state: the state of its state machine; "WAITING_FOR_BOUNDED_SOURCES" of a drain that was not begun yet.
        waits_for: of a drain, the instances of stages that it waits for: of bounded sources that are still read, then of all
            stages whose data has not ended.
    """

    request_id: str
    drain: bool
    state: str
    waits_for: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """How far it is, and what it waits for, for people."""
        state = self.state.lower().replace("_", " ")
        return f"{state}: {_named(self.waits_for)}" if self.waits_for else state


class PipelineStatus(WithMoments, frozen=True, kw_only=True):
    """The content of ``status.json``.

    Args:
        pipeline: name of the pipeline.
        run_id: id of the run that writes the file.
        epoch: epoch of that owner; if it is older than the epoch in ``state.json``, the status is that of a dead run.
        job_id: id of the job.
        attempt: number of the job's attempt within the run, from 1; each restart adds one.
        phase: what the run does.
        sequence: grows with every status that this owner writes.
        updated_at: wall clock of the owner when it wrote the status.
        started_at: when the run started: its difference to ``updated_at`` is the age of the run, also after the clock was set.
        interval: seconds until the next status; if that is far overdue, the owner is busy or dead.
        roots: tasks from which a checkpoint would start now.
        chains: the stages of each chain.
        stages: all stages, in topological order.
        pending: checkpoints under way.
        last_checkpoint: the latest completed checkpoint or savepoint.
        last_failure: the latest failed checkpoint or savepoint of this run.
        checkpoints: numbers and durations of this run's checkpoints.
        stop: the stop under way.
        checkpoint_interval: seconds between periodic checkpoints at present, at least the least pause; None if there are none, or
            if an earlier release wrote the status.
        checkpoints_since: when that interval began to count, by the owner's wall clock: a periodic checkpoint is due at most an
            interval later. None before the job's first event.
        version: version of this format.
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
    last_checkpoint: CompletedCheckpointStatus | None = None
    last_failure: FailureStatus | None = None
    checkpoints: CheckpointCountsStatus | None = None
    stop: StopStatus | None = None
    checkpoint_interval: float | None = None
    checkpoints_since: Moment | None = None
    version: int = VERSION


class _StatusVersion(msgspec.Struct):
    version: int


def _named(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


# Made at import: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_StatusVersion)
_STATUSES = msgspec.json.Decoder(PipelineStatus)


def watermark_moment(watermark_ms: int) -> datetime | None:
    """The time of a watermark, in UTC; None if no date can be so late or so early: after a drain it is the end of event time.

    Args:
        watermark_ms: the watermark, milliseconds since 1970.
    """
    try:
        return datetime.fromtimestamp(watermark_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def encode_status(status: PipelineStatus) -> bytes:
    """``status`` as the bytes of ``status.json``."""
    return msgspec.json.encode(status)


def decode_status(data: bytes, url: str) -> PipelineStatus:
    """The status in the bytes of ``status.json``.

    Args:
        data: content of the file.
        url: URL of the file, for errors.

    Raises:
        CorruptStatus: the file is no status, or a newer release wrote it.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            return _STATUSES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptStatus(
            f"expected the status of a pipeline as JSON in {url}, found {len(data)} bytes that are not: {error}. It is for "
            "display only: delete the file, and a running pipeline writes it again"
        ) from error
    raise CorruptStatus(
        f"expected version {VERSION} in {url}, found version {version}: a newer release of dagster-checkpoints wrote it. "
        "Run that release"
    )


def write_status(storage: CheckpointStorage, status: PipelineStatus) -> None:
    """Overwrite ``status.json``.

    Raises:
        StorageUnavailable, OutcomeUnknown: the status may not be stored; no decision depends on it.
    """
    storage.store.put(storage.layout.status, encode_status(status))


def read_status(storage: CheckpointStorage) -> PipelineStatus | None:
    """The last status that the newest run wrote; None if no run has written one.

    Raises:
        CorruptStatus: the file cannot be read.
    """
    try:
        return decode_status(storage.store.get(storage.layout.status), storage.url_of("status.json"))
    except NotFound:
        return None
