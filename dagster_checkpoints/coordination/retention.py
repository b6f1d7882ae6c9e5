"""Which completed checkpoints are kept, and which are discarded.

Must not know: how a checkpoint is deleted. Source: Flink's CompletedCheckpointStore and
CheckpointSubsumeHelper.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint


class JobStatus(StrEnum):
    """How a job ended."""

    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    SUSPENDED = "SUSPENDED"


class CompletedCheckpoints:
    """The retained checkpoints, oldest first.

    The `retained` newest are kept, and always the newest *checkpoint*. The system never discards a savepoint; a savepoint
    subsumes nothing and is in the list only if it stopped the job.
    """

    def __init__(self, retained: int, completed: Iterable[CompletedCheckpoint] = ()) -> None:
        self._retained = retained
        self._checkpoints = sorted(completed, key=lambda c: c.checkpoint_id)

    @property
    def all(self) -> tuple[CompletedCheckpoint, ...]:
        return tuple(self._checkpoints)

    @property
    def latest(self) -> CompletedCheckpoint | None:
        """The checkpoint that a restart begins from; None without any."""
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def latest_id(self) -> int:
        """The id of the newest one, 0 without any."""
        return self._checkpoints[-1].checkpoint_id if self._checkpoints else 0

    def add(self, checkpoint: CompletedCheckpoint) -> list[CompletedCheckpoint]:
        """Add a completed checkpoint and return those that are no longer retained because of it, oldest first."""
        if checkpoint.is_savepoint and not checkpoint.properties.stops_job:
            return []
        self._checkpoints.append(checkpoint)
        self._checkpoints.sort(key=lambda c: c.checkpoint_id)
        return self._subsume()

    def shut_down(self, status: JobStatus, keep: bool = False) -> list[CompletedCheckpoint]:
        """The job has ended: return the checkpoints that are no longer needed; none unless it is FINISHED."""
        if status is not JobStatus.FINISHED or keep:
            return []
        discarded = [c for c in self._checkpoints if not c.is_savepoint]
        self._checkpoints = [c for c in self._checkpoints if c.is_savepoint]
        return discarded

    def _subsume(self) -> list[CompletedCheckpoint]:
        # A restart begins from the newest of all, also if a savepoint stopped the job.
        checkpoints = [c.checkpoint_id for c in self._checkpoints if not c.is_savepoint]
        newest = {self.latest_id, *checkpoints[-1:]}
        excess = len(self._checkpoints) - self._retained
        kept: list[CompletedCheckpoint] = []
        discarded: list[CompletedCheckpoint] = []
        for checkpoint in self._checkpoints:
            if excess > 0 and checkpoint.checkpoint_id not in newest:
                excess -= 1
                # A savepoint leaves the list and stays in storage: it is the user's.
                if not checkpoint.is_savepoint:
                    discarded.append(checkpoint)
            else:
                kept.append(checkpoint)
        self._checkpoints = kept
        return discarded
