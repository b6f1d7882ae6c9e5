"""What a running job tells whoever started it; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dagster_checkpoints.coordination import JobStatus

# The start, in this order


@dataclass(frozen=True)
class LeaseWatched:
    """Another run's lease on the pipeline has not been released: it is watched before this run takes the pipeline over.

    Attributes:
        owner: The owner, for people: run, host, process, since when.
        seconds: This run owns the pipeline after this time at the latest, unless the owner renews its lease; 0 if its process is
            known to have ended, with all that it had started.
    """

    owner: str
    seconds: float


@dataclass(frozen=True)
class PipelineAcquired:
    """Storage can be used, and this run owns the pipeline there.

    Attributes:
        storage: URL of the pipeline's directory.
        epoch: Fencing epoch of this run.
        seconds: From the beginning of the run.
    """

    storage: str
    epoch: int
    seconds: float


@dataclass(frozen=True)
class StartChosen:
    """What the run starts from; nothing has been restored yet.

    Attributes:
        restored_checkpoint: Id of the checkpoint or savepoint; None for a new start.
        restored_location: Its location.
        finished_stages: Stages that it says have finished, which are not run again.
    """

    restored_checkpoint: int | None
    restored_location: str | None
    finished_stages: tuple[str, ...]


@dataclass(frozen=True)
class SparkStarting:
    """The Spark session is being created, or joined if this process has one."""


@dataclass(frozen=True)
class SparkStarted:
    """The Spark session is there.

    Attributes:
        web_ui: URL of Spark's own user interface; None if it is switched off.
        seconds: That it took.
    """

    version: str
    master: str
    application: str
    web_ui: str | None
    seconds: float


@dataclass(frozen=True)
class AttemptBuilding:
    """The plans of all stages that have not finished are being built, and their state fetched.

    Attributes:
        attempt: 1, and one more for each restart within the run.
    """

    attempt: int
    stages: tuple[str, ...]
    restored_checkpoint: int | None


@dataclass(frozen=True)
class JobStarted:
    """All tasks are being started.

    Attributes:
        attempt: 1, and one more for each restart within the run.
        restored_checkpoint: Id it continues from; None for a new start.
        finished_stages: Stages that are not run again.
        chains: The stages that share a query, per chain.
        seconds: That building the attempt took.
    """

    attempt: int
    job_id: int
    restored_checkpoint: int | None
    restored_location: str | None
    finished_stages: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class QueryWaiting:
    """A query cannot start before its static inputs have been read to their end.

    Attributes:
        stages: Those that share the query.
        inputs: The static inputs that it waits for.
    """

    stages: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class QueryStarted:
    """All instances of a query that have not finished have started, and look for input.

    Attributes:
        stages: Those that share the query.
        instances: How many have started.
        number: How many queries of the attempt have started, this one included, out of `total`.
        seconds: Since the attempt's tasks were started.
    """

    stages: tuple[str, ...]
    instances: int
    number: int
    total: int
    seconds: float


@dataclass(frozen=True)
class FirstBatch:
    """The first micro-batch of a query in this attempt has been processed, by the instance that was the first.

    If it emitted no rows, the event comes once more for the first micro-batch that did.

    Attributes:
        stages: Those that share the query.
        rows: Emitted by the last of them with this batch.
        seconds: That the batch took.
    """

    stages: tuple[str, ...]
    instance: str
    rows: int
    seconds: float


# While it runs, and its end


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
        late_rows: Dropped as late since the job began, by the stage itself, wherever it is in its chain.
    """

    stage: str
    rows: int
    checkpoint_id: int | None
    restored: bool = False
    late_rows: int = 0


@dataclass(frozen=True)
class StageProgress:
    """A stage at the moment of a checkpoint, or between two.

    Attributes:
        rows: Emitted since the job began; 0 for a stage inside a chain.
        state_bytes: In the latest checkpoint of this run, by the whole chain; 0 before the first.
        watermark_ms: Its output watermark, epoch ms; None before the first.
        late_rows: Dropped as late since the job began, by the stage itself, wherever it is in its chain.
    """

    rows: int
    finished_instances: int
    instances: int
    state_bytes: int
    watermark_ms: int | None
    late_rows: int = 0


@dataclass(frozen=True)
class CheckpointDone:
    """A checkpoint has completed.

    Attributes:
        roots: The stages in which it started.
        duration: Seconds from trigger to completion.
        sync_seconds: The longest time that a task stood still for it.
        new_bytes: Uploaded for it; `total_bytes`: everything it refers to.
        completed: Checkpoints and savepoints of this run that have completed, this one included; `failed`: that have failed.
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
    completed: int = 0
    failed: int = 0


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


StartEvent = LeaseWatched | PipelineAcquired | StartChosen | SparkStarting | SparkStarted | AttemptBuilding
QueryEvent = QueryWaiting | QueryStarted | FirstBatch
EndEvent = InstanceFinished | StageFinished
JobEvent = StartEvent | JobStarted | QueryEvent | EndEvent | CheckpointDone | SavepointDone | CheckpointNotDone | JobRestarting


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
