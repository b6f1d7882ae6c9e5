"""What one attempt to run a pipeline is given: its identity, and settings of the job; values only."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from dagster_checkpoints.coordination import CheckpointConfig
from dagster_checkpoints.execution.source_limits import BATCH_SECONDS
from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.pipeline import InputAsset
from dagster_checkpoints.spark.files.work_folder import WorkFolder


@dataclass(frozen=True)
class AttemptSettings:
    """The identity of one attempt, and the settings that its tasks need.

    Attributes:
        folder: The attempt's new work directory.
        number: The attempt's number over all runs; the watermark sources emit again when it changes.
        token: A text that differs between any two attempts of all runs.
        job_id: The job's id.
        max_queued_bytes: Size of the unread segments of a channel, in bytes, from which its producer waits.
        batch_seconds: The time that a micro-batch of fused sources is to take at most.
        take_back_after: The id of the restored checkpoint if the job had completed later ones; None otherwise.
        next_checkpoint_id: An id above those of all checkpoints that were completed, and at most that of the next one.
        ended_sources: The sources (stage, instance) that a request has ended before a restart: they read their available input,
            and end.
        vertices: The chains whose tasks are built, while the tasks of the others go on; None for all.
        allow_changed_plan: Whether restored state may continue under another plan.
        repartition_state: Whether restored state gets as many state partitions as the session's `spark.sql.shuffle.partitions`.
        recorder: Writes the run's trace; None for no trace.
        sample_rows: Number of rows that the report of a commit shows; 0 for none.
        checkpoints: The settings of checkpoints.
        burst: Whether unbounded sources are read up to what is there when their tasks begin.
        assets: The assets outside of the pipeline that stages read, by stage and key.
    """

    folder: WorkFolder
    number: int
    token: str
    job_id: int
    max_queued_bytes: int
    batch_seconds: float = BATCH_SECONDS
    take_back_after: int | None = None
    next_checkpoint_id: int = 1
    ended_sources: frozenset[tuple[str, str]] = frozenset()
    vertices: Set[str] | None = None
    allow_changed_plan: bool = False
    repartition_state: bool = False
    recorder: Recorder | None = None
    sample_rows: int = 0
    burst: bool = False
    assets: Mapping[str, Mapping[str, InputAsset]] = field(default_factory=dict)
    checkpoints: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(interval=None))

    def builds(self, chain: str) -> bool:
        """Whether the tasks of the chain of this name are built."""
        return self.vertices is None or chain in self.vertices
