"""What a running job tells whoever started it; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

JobStatus = Literal["FINISHED", "CANCELED", "FAILED", "SUSPENDED"]


@dataclass(frozen=True)
class JobStarted:
    """All tasks are being started.

    Attributes:
        attempt: 1, and one more for each restart within the run.
        restored_checkpoint: Id it continues from; None for a new start.
        finished_stages: Stages that are not run again.
        chains: The stages that share a query, per chain.
    """

    attempt: int
    job_id: int
    restored_checkpoint: int | None
    restored_location: str | None
    finished_stages: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class InstanceFinished:
    """One instance of a stage has committed everything and ended. `rows` counts from the job's beginning."""

    stage: str
    instance: str
    rows: int


@dataclass(frozen=True)
class StageFinished:
    """All instances of a stage have finished.

    Attributes:
        rows: Emitted since the job began; 0 for a stage inside a chain, whose rows leave with the chain's last stage.
        restored: It had finished before this run began.
    """

    stage: str
    rows: int
    checkpoint_id: int | None
    restored: bool = False


@dataclass(frozen=True)
class StageProgress:
    """A stage at the moment of a checkpoint. `watermark_ms` is its output watermark, epoch ms; None before the first."""

    rows: int
    finished_instances: int
    instances: int
    state_bytes: int
    watermark_ms: int | None


@dataclass(frozen=True)
class CheckpointDone:
    """A checkpoint has completed.

    Attributes:
        roots: The stages in which it started.
        duration: Seconds from trigger to completion.
        sync_seconds: The longest time that a task stood still for it.
        new_bytes: Uploaded for it; `total_bytes`: everything it refers to.
    """

    checkpoint_id: int
    location: str
    roots: tuple[str, ...]
    finished_stages: tuple[str, ...]
    duration: float
    sync_seconds: float
    async_seconds: float
    alignment_seconds: float
    new_bytes: int
    total_bytes: int
    stages: Mapping[str, StageProgress]


@dataclass(frozen=True)
class SavepointDone:
    """A savepoint has completed.

    Attributes:
        location: Below the pipeline's directory, or a URL elsewhere.
        stops: "" for one taken in flight, "suspend" or "drain" for that of a stop.
        asked_by: Who asked for it, for people.
        recorded_by_asker: Whoever asked reports it to Dagster.
        checkpoint: What else is to be told of it, as of a checkpoint.
    """

    location: str
    stops: Literal["", "suspend", "drain"]
    request_id: str
    asked_by: str
    recorded_by_asker: bool
    checkpoint: CheckpointDone


@dataclass(frozen=True)
class CheckpointNotDone:
    """A checkpoint failed, or could not be triggered. The pipeline goes on unless a `JobFailed`-like result follows."""

    checkpoint_id: int | None
    reason: str
    message: str


@dataclass(frozen=True)
class JobRestarting:
    """A task has failed; the unfinished tasks start again from the latest checkpoint after `delay` seconds."""

    attempt: int
    delay: float
    cause: str


JobEvent = JobStarted | InstanceFinished | StageFinished | CheckpointDone | SavepointDone | CheckpointNotDone | JobRestarting


@dataclass(frozen=True)
class JobResult:
    """How a job execution ended.

    Attributes:
        error: Why, if FAILED.
        rows: Per stage, emitted since the job began.
        ended_by: How a FINISHED job came to its end.
        savepoint: URL of the savepoint that it was stopped with.
    """

    status: JobStatus
    error: BaseException | None
    job_id: int
    last_checkpoint_id: int | None
    last_checkpoint_location: str | None
    finished_stages: tuple[str, ...]
    rows: Mapping[str, int]
    ended_by: Literal["", "end_of_data", "drain", "suspend"] = ""
    savepoint: str | None = None
