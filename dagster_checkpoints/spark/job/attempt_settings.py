"""What one attempt to run a pipeline is given: its identity, and the settings of the execution; values only."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.spark.files.work_folder import WorkFolder
from dagster_checkpoints.spark.job.job_options import JobOptions


@dataclass(frozen=True)
class AttemptSettings:
    """The identity of one attempt, and the settings that its tasks need.

    Attributes:
        folder: The attempt's new work directory.
        number: The attempt's number over all runs; the watermark sources emit again when it changes.
        token: A text that differs between any two attempts of all runs.
        job_id: The job's id.
        options: The settings of the execution.
        has_later: Whether sinks may show other rows than those of the restored checkpoint.
        next_checkpoint_id: An id above those of all checkpoints that were completed, and at most that of the next one.
        ended_sources: The sources (stage, instance) that a request has ended before a restart: they read their available input,
            and end.
        vertices: The chains whose tasks are built, while the tasks of the others go on; None for all.
        recorder: Writes the run's trace; None for no trace.
    """

    folder: WorkFolder
    number: int
    token: str
    job_id: int
    options: JobOptions
    has_later: bool = False
    next_checkpoint_id: int = 1
    ended_sources: frozenset[tuple[str, str]] = frozenset()
    vertices: Set[str] | None = None
    recorder: Recorder | None = None

    def token_of_instance(self, index: int) -> str:
        """A text that differs between any two executions of instances of a stage: sinks name their transactions by it.

        Args:
            index: The index of the instance.
        """
        return f"{self.token}-{index}"
