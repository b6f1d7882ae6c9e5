"""The events that a running job reports to its caller, and its result; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution.source_answers import Silence
from dagster_checkpoints.execution.splits import SplitCounts
from dagster_checkpoints.pipeline import CheckEvaluation
from dagster_checkpoints.sinks import SinkCommit

# The start, in this order


@dataclass(frozen=True)
class LeaseWatched:
    """Another run has not released its lease on the pipeline: this run watches the lease before it takes the pipeline over.

    Attributes:
        owner: Description of the owner: run, host, process, begin of the lease.
        seconds: The longest time until this run owns the pipeline, unless the owner renews its lease; 0 if its process and all
            the processes that it started are known to have ended.
    """

    owner: str
    seconds: float


@dataclass(frozen=True)
class PipelineAcquired:
    """Storage can be used, and this run owns the pipeline there.

    Attributes:
        storage: URL of the pipeline's directory.
        epoch: Fencing epoch of this run.
        seconds: The time since the run began.
    """

    storage: str
    epoch: int
    seconds: float


@dataclass(frozen=True)
class JobEndedBefore:
    """A run that this one repeats has brought the job to its end: no stage runs, and the end of each follows. Or that run has
    suspended the job, and no event of a stage follows.

    Attributes:
        job_id: The job's id.
        run_id: Id of that run.
        suspended: URL of the savepoint with which the job was suspended; None if it has come to its end.
    """

    job_id: int
    run_id: str
    suspended: str | None = None


@dataclass(frozen=True)
class StartChosen:
    """The start point of the run is chosen; nothing has been restored yet.

    Attributes:
        restored_checkpoint: Id of the checkpoint or savepoint; None for a new start.
        restored_location: Location of the checkpoint or savepoint; None for a new start.
        finished_stages: The stages that had finished at that checkpoint, which do not run again.
        changes: What becomes of the state where the pipeline has changed since, a line for each kind of change.
    """

    restored_checkpoint: int | None
    restored_location: str | None
    finished_stages: tuple[str, ...]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SparkStarting:
    """The Spark session is being created, or joined if this process has one."""


@dataclass(frozen=True)
class SparkStarted:
    """The Spark session is ready.

    Attributes:
        version: Spark's version.
        master: URL of Spark's master.
        application: Spark's id of the application.
        web_ui: URL of Spark's own user interface; None if it is switched off.
        seconds: The duration of the start.
    """

    version: str
    master: str
    application: str
    web_ui: str | None
    seconds: float


@dataclass(frozen=True)
class AttemptBuilding:
    """The plans of the stages that start, or start again, and have not finished are being built, and their state fetched.

    Attributes:
        attempt: The attempt's number within the run, from 1.
        stages: These stages.
        restored_checkpoint: Id of the checkpoint that the attempt starts from; None for a new start.
    """

    attempt: int
    stages: tuple[str, ...]
    restored_checkpoint: int | None


@dataclass(frozen=True)
class JobStarted:
    """All tasks are being started, or those that start again.

    Attributes:
        attempt: The attempt's number within the run, from 1.
        job_id: The job's id.
        restored_checkpoint: Id of the checkpoint that the attempt starts from; None for a new start.
        restored_location: Location of that checkpoint; None for a new start.
        finished_stages: The stages that do not run again.
        chains: The stages of each chain, which share a query.
        seconds: The time that building the attempt took.
        columns: The columns of the rows that the last stage of each chain emits, by that stage: name, and type as Spark writes it
            (`bigint`, `struct<a:int>`).
        restarted: The stages that start again while others go on; empty if all stages start.
    """

    attempt: int
    job_id: int
    restored_checkpoint: int | None
    restored_location: str | None
    finished_stages: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    seconds: float = 0.0
    columns: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    restarted: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueryWaiting:
    """A query cannot start before its static inputs have been read to their end.

    Attributes:
        stages: The stages that share the query.
        inputs: The static inputs that the query waits for.
    """

    stages: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class QueryStarted:
    """All unfinished instances of a query have started, and look for input.

    Attributes:
        stages: The stages that share the query.
        instances: The number of these instances.
        number: The number of queries of the attempt that have started, this one included.
        total: The number of queries that the attempt starts.
        seconds: The time since the attempt's tasks were started.
    """

    stages: tuple[str, ...]
    instances: int
    number: int
    total: int
    seconds: float


@dataclass(frozen=True)
class FirstBatch:
    """The first instance of a query has processed its first micro-batch in this attempt.

    If the batch emitted no rows, the event is reported again for the first batch that emitted rows.

    Attributes:
        stages: The stages that share the query.
        instance: The instance that processed the batch.
        rows: The number of rows that the last of these stages emitted with this batch.
        seconds: The duration of the batch.
        rows_read: The number of rows that the sources among these stages gave; None if that is not known.
    """

    stages: tuple[str, ...]
    instance: str
    rows: int
    seconds: float
    rows_read: int | None = None


# While the job runs, and at its end


@dataclass(frozen=True)
class SourceSilent:
    """A source has not answered for some time, or its first batch does not end; again while that lasts.

    Attributes:
        sources: The sources that the query reads.
        instance: The instance.
        silence: What the query does, and for how long.
    """

    sources: tuple[str, ...]
    instance: str
    silence: Silence


@dataclass(frozen=True)
class SourceAnswered:
    """A source that was reported as silent has answered, or is not asked any more."""

    sources: tuple[str, ...]
    instance: str


@dataclass(frozen=True)
class InstanceFinished:
    """One instance of a stage has committed everything and ended. `rows` counts since the job began; None if it is not known."""

    stage: str
    instance: str
    rows: int | None


@dataclass(frozen=True)
class StageFinished:
    """All instances of a stage have finished.

    Attributes:
        rows: The number of rows emitted since the job began; None if it is not known.
        checkpoint_id: Id of the newest completed checkpoint; None if there is none.
        restored: Whether the stage had finished before this run began.
        late_rows: The number of late rows that the stage itself has dropped since the job began.
    """

    stage: str
    rows: int | None
    checkpoint_id: int | None
    restored: bool = False
    late_rows: int = 0


@dataclass(frozen=True, slots=True)
class SinkCommitted:
    """All running instances of a stage have committed their sink up to a checkpoint, and rows have become visible.

    What a restore commits is not part of `commit`: the attempt, or the run, that has taken the checkpoint may have reported it
    before. `rows` counts it. So after a restore the first commit of a stage is reported also if it is empty.

    Attributes:
        stage: The stage that has the sink.
        checkpoint_id: The checkpoint.
        commit: What has become visible, in all instances together; None if nothing has since the restore.
        rows: The number of rows that the stage has committed since the job began, over all runs.
        watermark_ms: The output watermark at the checkpoint, epoch ms; None before the first.
        last: Whether no instance runs any more: the event of the stage's end follows, or the job has been suspended.
        checks: The results of the stage's checks, of each instance that has committed rows.
        sample: Some of the rows of one instance, by their columns; empty unless asked for.
    """

    stage: str
    checkpoint_id: int
    commit: SinkCommit | None
    rows: int
    watermark_ms: int | None = None
    last: bool = False
    checks: tuple[CheckEvaluation, ...] = ()
    sample: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class CommitRefused:
    """Rows of a stage did not pass a blocking check, so a checkpoint is declined.

    Attributes:
        stage: The stage that has the sink.
        checks: The results of all checks of the instance.
    """

    stage: str
    checks: tuple[CheckEvaluation, ...]


@dataclass(frozen=True)
class StageProgress:
    """The progress of a stage at a checkpoint, or between two checkpoints.

    Attributes:
        rows: The number of rows emitted since the job began; None if it is not known.
        finished_instances: The number of instances that have finished.
        instances: The number of instances.
        state_bytes: The size of the chain's state in the latest checkpoint of this run, in bytes; 0 before the first.
        watermark_ms: The output watermark, epoch ms; None before the first.
        late_rows: The number of late rows that the stage itself has dropped since the job began.
        splits: The progress of a split source; None for other stages.
    """

    rows: int | None
    finished_instances: int
    instances: int
    state_bytes: int
    watermark_ms: int | None
    late_rows: int = 0
    splits: SplitCounts | None = None


@dataclass(frozen=True)
class CheckpointDone:
    """A checkpoint has completed.

    Attributes:
        checkpoint_id: The checkpoint's id.
        location: The checkpoint's location.
        roots: The stages in which it started.
        finished_stages: The stages that had finished at it.
        duration: Seconds from trigger to completion.
        sync_seconds: The longest synchronous part of a task's snapshot, in which the task processes nothing.
        async_seconds: The longest asynchronous part of a task's snapshot.
        alignment_seconds: The longest alignment of a task's barriers.
        new_bytes: The size of the files uploaded for the checkpoint.
        total_bytes: The size of all files that it names.
        stages: The progress of each stage.
        completed: The number of checkpoints and savepoints of this run that have completed, this one included.
        failed: The number of checkpoints and savepoints of this run that have failed.
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
        location: The location relative to the pipeline's directory, or a URL if it is not below that.
        stops: "suspend" or "drain" for the savepoint of a stop; "" for a savepoint that does not stop the job.
        request_id: Id of the request for the savepoint.
        asked_by: Description of the requester.
        recorded_by_asker: Whether the requester reports the savepoint to Dagster.
        checkpoint: The facts that a savepoint shares with a checkpoint.
        of_burst: Whether the run itself has taken it because its sources have read what was there. The next run deletes it.
    """

    location: str
    stops: Literal["", "suspend", "drain"]
    request_id: str
    asked_by: str
    recorded_by_asker: bool
    checkpoint: CheckpointDone
    of_burst: bool = False


@dataclass(frozen=True)
class CheckpointNotDone:
    """A checkpoint failed, or could not be triggered. The job continues, unless it fails for that reason."""

    checkpoint_id: int | None
    reason: str
    message: str


@dataclass(frozen=True)
class JobRestarting:
    """A task has failed; unfinished tasks restart from the latest checkpoint.

    Attributes:
        attempt: The next attempt's number within the run.
        delay: Minimum number of seconds until then.
        cause: The failure.
        stages: The stages that restart, while the others go on; empty if all stages restart.
    """

    attempt: int
    delay: float
    cause: str
    stages: tuple[str, ...] = ()


StartEvent = LeaseWatched | PipelineAcquired | JobEndedBefore | StartChosen | SparkStarting | SparkStarted | AttemptBuilding
QueryEvent = QueryWaiting | QueryStarted | FirstBatch
EndEvent = InstanceFinished | StageFinished
CheckpointEvent = CheckpointDone | SavepointDone | CheckpointNotDone
SourceEvent = SourceSilent | SourceAnswered
JobEvent = (
    StartEvent
    | JobStarted
    | QueryEvent
    | SourceEvent
    | EndEvent
    | CheckpointEvent
    | SinkCommitted
    | CommitRefused
    | JobRestarting
)


@dataclass(frozen=True)
class JobResult:
    """The result of a job execution.

    Attributes:
        status: The job's final status.
        error: The error of a FAILED job.
        job_id: The job's id.
        last_checkpoint_id: Id of the newest completed checkpoint; None if there is none.
        last_checkpoint_location: Location of that checkpoint.
        finished_stages: The stages that have finished.
        rows: The number of rows that each stage has emitted since the job began.
        ended_by: The cause of a FINISHED job's end.
        savepoint: URL of the savepoint that the job was stopped with; None without one.
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
