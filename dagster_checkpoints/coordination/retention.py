"""Which completed checkpoints are kept, and which are let go.

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

    The `retained` newest are kept, and the newest *checkpoint* always. A savepoint is never given up by the
    system, subsumes nothing and is in the list only if it stopped the job.
    """

    def __init__(self, retained: int, completed: Iterable[CompletedCheckpoint] = ()) -> None:
        self._retained = retained
        self._checkpoints = sorted(completed, key=lambda c: c.checkpoint_id)

    @property
    def all(self) -> tuple[CompletedCheckpoint, ...]:
        return tuple(self._checkpoints)

    @property
    def latest(self) -> CompletedCheckpoint | None:
        """What a restart begins from."""
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def latest_id(self) -> int:
        """The id of the newest one, 0 without any."""
        return self._checkpoints[-1].checkpoint_id if self._checkpoints else 0

    def add(self, checkpoint: CompletedCheckpoint) -> list[CompletedCheckpoint]:
        """Add a completed checkpoint and return those that are given up for it, oldest first."""
        if checkpoint.is_savepoint and not checkpoint.properties.stops_job:
            return []
        self._checkpoints.append(checkpoint)
        self._checkpoints.sort(key=lambda c: c.checkpoint_id)
        return self._subsume()

    def shut_down(self, status: JobStatus, keep: bool = False) -> list[CompletedCheckpoint]:
        """The job has ended: return what is no longer needed. Only FINISHED gives checkpoints up."""
        if status is not JobStatus.FINISHED or keep:
            return []
        given_up = [c for c in self._checkpoints if not c.is_savepoint]
        self._checkpoints = [c for c in self._checkpoints if c.is_savepoint]
        return given_up

    def _subsume(self) -> list[CompletedCheckpoint]:
        # The newest of all is what a restart begins from, also where a savepoint stopped the job.
        checkpoints = [c.checkpoint_id for c in self._checkpoints if not c.is_savepoint]
        newest = {self.latest_id, *checkpoints[-1:]}
        surplus = len(self._checkpoints) - self._retained
        kept: list[CompletedCheckpoint] = []
        given_up: list[CompletedCheckpoint] = []
        for checkpoint in self._checkpoints:
            if surplus > 0 and checkpoint.checkpoint_id not in newest:
                surplus -= 1
                # A savepoint leaves the list, and stays where it is: it is the user's.
                if not checkpoint.is_savepoint:
                    given_up.append(checkpoint)
            else:
                kept.append(checkpoint)
        self._checkpoints = kept
        return given_up
