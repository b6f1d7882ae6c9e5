"""The settings of one execution of a pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import InvalidCheckpointConfig
from dagster_checkpoints.coordination.restarts import FailoverStrategy, RestartStrategy
from dagster_checkpoints.execution.pipeline_state import UNKNOWN_ORIGIN, Origin
from dagster_checkpoints.execution.source_limits import BATCH_SECONDS
from dagster_checkpoints.pipeline import InputAsset
from dagster_checkpoints.spark.session.work_directory import RemoteDirectory
from dagster_checkpoints.state.claim import ClaimMode

Until = Literal["end", "caught_up"]


@dataclass(frozen=True)
class JobOptions:
    """The settings of one execution.

    Attributes:
        checkpoints: The settings of checkpoints: interval, timeout and others.
        restart: The restart strategy after a task's failure.
        failover: What restarts after a task's failure: its region, that is the tasks connected with it, or all tasks.
        work_directory: The directory of segments and Spark's own checkpoints; executors must see it under the same path or URL.
        work_directory_named: Whether the user has named it; otherwise it is this machine's directory for temporary files.
        scratch_directory: A directory of this machine for copies of files, if the work directory is on a file system that only
            Spark reaches.
        restore_from: "latest" (after the job's own end or a drain, a new start), "none" for a new start, the id or location of
            a checkpoint, or a savepoint's id, location, URL or path.
        selection: The stages to run; None for all. A stage that is not selected must have finished.
        until: "end": unbounded sources are read until a request ends the job. "caught_up": up to what is there when the run
            begins; then the job is suspended, see `execution.burst`.
        allow_non_restored_state: Whether state that belongs to no stage may be ignored.
        allow_older_checkpoint: Whether older retained checkpoints are tried if the chosen one is corrupt or incomplete.
        allow_changed_plan: Whether restored state may continue under a plan with other stateful operators or sources.
        repartition_state: Whether restored state gets as many state partitions as `spark.sql.shuffle.partitions` says now.
        lease_seconds: The lease's length: seconds without a renewal after which another process may take the pipeline over.
        max_queued_bytes: Size of the unread segments of a channel, in bytes, from which its producer waits.
        batch_seconds: The time that a micro-batch of fused sources is to take at most, see `execution.source_limits`.
        upload_threads: The number of snapshots stored at the same time.
        claim_mode: The owner of a savepoint that the run starts from.
        request_poll_seconds: Seconds between two reads of control requests in storage; None for the storage's own
            (`ObjectStore.poll_seconds`).
        status_seconds: Seconds between two versions of the pipeline's status in storage.
        metrics: Whether the numbers of the status are sent as OpenTelemetry metrics, see `control.metrics`.
        trace: Directory below which the run's trace is written, see `trace_file`; None for no trace.
        origin: The place where the pipeline is defined, to recognise another pipeline of the same name on the same storage.
        allow_moved_pipeline: Whether it is the same pipeline even if storage names another place of its definition.
        earlier_runs: The runs that this run repeats, as a retry or re-execution.
        retried_runs: Those of them that this run repeats without a person's doing, and itself.
        sample_rows: Number of rows that the report of a commit shows; 0 for none.
        assets: The assets outside of the pipeline that stages read, by stage and key; see `StageContext.assets`.

    Raises:
        InvalidCheckpointConfig: `checkpoints` lets tasks end without a checkpoint, which only the protocol's core supports.
    """

    checkpoints: CheckpointConfig
    restart: RestartStrategy
    work_directory: Path | RemoteDirectory
    work_directory_named: bool = True
    scratch_directory: Path = Path(tempfile.gettempdir(), "dagster-checkpoints")
    restore_from: str = "latest"
    selection: frozenset[str] | None = None
    until: Until = "end"
    allow_non_restored_state: bool = False
    allow_older_checkpoint: bool = False
    allow_changed_plan: bool = False
    repartition_state: bool = False
    lease_seconds: float = 15.0
    max_queued_bytes: int = 256 * 1024 * 1024
    batch_seconds: float = BATCH_SECONDS
    upload_threads: int = 4
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM
    request_poll_seconds: float | None = None
    status_seconds: float = 5.0
    metrics: bool = False
    trace: Path | None = None
    origin: Origin = UNKNOWN_ORIGIN
    allow_moved_pipeline: bool = False
    earlier_runs: frozenset[str] = frozenset()
    retried_runs: frozenset[str] = frozenset()
    sample_rows: int = 0
    assets: Mapping[str, Mapping[str, InputAsset]] = field(default_factory=dict)
    failover: FailoverStrategy = "region"

    @property
    def burst(self) -> bool:
        """Whether the run is a burst."""
        return self.until == "caught_up"

    def __post_init__(self) -> None:
        if not self.checkpoints.checkpoints_after_tasks_finish:
            raise InvalidCheckpointConfig(
                "Checkpoint setting checkpoints_after_tasks_finish is False; expected True: a stage that ends without a "
                "checkpoint commits rows that are committed again if the job restarts."
            )
