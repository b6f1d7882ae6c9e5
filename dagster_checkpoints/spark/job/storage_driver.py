"""What a job asks of storage: its start and its end, what a restart begins from, what is written and deleted.

It must not know when that is done: `execution.job_machine` decides it.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dagster_checkpoints.coordination import (
    CompletedCheckpoint,
    DiscardCheckpoint,
    DiscardStates,
    WriteMetadata,
)
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import JobBeginning, JobMachineEvent, RestorePoint
from dagster_checkpoints.execution.start_point import completed_checkpoint
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.job.job_messages import Item
from dagster_checkpoints.spark.job.job_start import JobStart
from dagster_checkpoints.spark.job.restoring import StartPoint, read_restored
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.storage import CheckpointStorage, JobState, Ownership, StorageError, StorageUnavailable


class StorageDriver:
    """Performs what concerns the storage of a job.

    Args:
        pipeline: What runs.
        storage: Owned by the run.
        starting: Decides what the job starts from.
        savepoints: Where those being taken go.
        items: The queue of the job's loop, which receives the outcomes of what is written.
        allow_non_restored_state: Leave state behind that no stage claims.
        run_id: Dagster's, or whatever a person would look for.
        log: Told what waits for storage, and what could not be deleted.

    Attributes:
        writer: Writes the job's checkpoints; None before the job has begun.
        job_id: Of the job; 0 before its start is chosen.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        storage: CheckpointStorage,
        starting: JobStart,
        savepoints: SavepointsInProgress,
        items: queue.SimpleQueue[Item],
        *,
        allow_non_restored_state: bool,
        run_id: str,
        log: logging.Logger,
    ) -> None:
        self.writer: CheckpointWriter | None = None
        self.job_id = 0
        self._pipeline = pipeline
        self._storage = storage
        self._starting = starting
        self._savepoints = savepoints
        self._items = items
        self._allow_non_restored_state = allow_non_restored_state
        self._run_id = run_id
        self._log = log
        self._start: StartPoint | None = None
        self._io = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-io")

    @property
    def ownership(self) -> Ownership:
        """The right of this run to the pipeline."""
        assert self._storage.ownership is not None
        return self._storage.ownership

    # The start

    def choose(self) -> JobMachineEvent:
        """Choose what the job starts from.

        Raises:
            DagsterCheckpointsError: It cannot start.
        """
        return self._chosen(self._starting.choose(self.ownership))

    def choose_older(self, action: do.ChooseOlderStart) -> JobMachineEvent:
        """Choose an older checkpoint than the one that cannot be read.

        Raises:
            StorageError: There is none, or the user does not allow it.
        """
        assert self._start is not None and isinstance(action.failure.error, StorageError)
        return self._chosen(self._starting.choose_older(self._start, action.failure.error))

    def _chosen(self, start: StartPoint) -> on.BeginningChosen:
        self._start = start
        self.job_id = self.ownership.job_id + (not start.resume)
        restored = restore_point(start.restored) if start.restored is not None else None
        claims = start.claimed and start.pointer is not None
        return on.BeginningChosen(JobBeginning(restored, start.next_checkpoint_id, start.retained, start.passed_over, claims))

    def begin(self, spark_version: str) -> JobMachineEvent:
        """Make storage say that the job runs.

        Raises:
            StorageError: It does not.
        """
        assert self._start is not None
        self.job_id = self._starting.begin(self._start)
        self.writer = CheckpointWriter(self._pipeline, self._storage, self._savepoints, self.job_id, self._run_id, spark_version)
        return on.JobBegun()

    def claim(self) -> JobMachineEvent:
        """Make the savepoint that the job starts from its own.

        Raises:
            StorageError: Storage does not say so.
        """
        assert self._start is not None
        self._starting.claim(self._start)
        return on.SavepointClaimed()

    # What a restart begins from

    def confirm_ownership(self) -> JobMachineEvent:
        """Ask storage whether this run owns the pipeline, and which checkpoint is the newest.

        Raises:
            StorageError: Another run owns it.
        """
        if not self.ownership.renew():  # after an unknown outcome this learns which write has landed
            self._log.warning("The job waits for storage to confirm that this run owns the pipeline.")
            return on.StorageSilent()
        newest = self.ownership.newest
        if newest is None:
            return on.OwnershipConfirmed()
        return on.OwnershipConfirmed(completed_checkpoint(newest), newest.epoch)

    def read_newest(self, checkpoint: CompletedCheckpoint) -> JobMachineEvent:
        """Read what a restart begins from.

        Raises:
            StateError, StorageError: It is gone, or corrupt.
        """
        try:
            restored = read_restored(self._pipeline, self._storage, checkpoint.location, self._allow_non_restored_state)
        except StorageUnavailable as error:
            self._log.warning("The restart waits for storage: %s", error)
            return on.StorageSilent()
        return on.NewestRead(restore_point(restored))

    # Writing and deleting, on a thread of its own

    def write(self, action: do.Sweep | do.ForgetSavepoints | WriteMetadata | DiscardStates | DiscardCheckpoint) -> None:
        """Write or delete; the outcome of metadata comes into the queue."""
        writer = self.writer
        match action:
            case do.Sweep():
                return self.later(self._sweep)
            case do.ForgetSavepoints(retained):
                return self.ownership.forget_savepoints(retained)
        assert writer is not None
        match action:
            case WriteMetadata(checkpoint):
                finished = frozenset(checkpoint.plan.finished)
                self._io.submit(lambda: self._items.put(writer.write(checkpoint, finished)))
            case DiscardStates(discarded):
                self.later(lambda: writer.discard_states(discarded))
            case DiscardCheckpoint(completed):
                self.later(lambda: writer.delete(completed))

    def discard_savepoint(self, checkpoint_id: int) -> None:
        """Delete what was written of a savepoint that has failed; does nothing for a checkpoint."""
        self.later(lambda: self._savepoints.discard(checkpoint_id))

    def later(self, act: Callable[[], object]) -> None:
        """Clean up behind what is being written."""
        self._io.submit(self.quietly, act)

    def quietly(self, act: Callable[[], object]) -> None:
        """Clean up: what fails here is swept up by a later run."""
        try:
            act()
        except StorageError as error:
            self._log.warning("%s: %s", type(error).__name__, error)

    def _sweep(self) -> None:
        """Delete what killed runs have left behind."""
        assert self._start is not None
        self._storage.sweep(files=self._start.sweep)

    # The end

    def end_job(self, action: do.EndJob) -> JobMachineEvent:
        """Make storage say that the job has finished."""
        try:
            dropped = self.ownership.end_job(
                "FINISHED",
                keep_checkpoints=action.keep_checkpoints,
                ended_by=action.ended_by,
                stop_asked_by=action.stop_asked_by,
            )
        except StorageError as error:
            self._log.warning("The checkpoints of the finished job are kept: %s", error)
            return on.JobEndNotRecorded()
        return on.JobEndRecorded(tuple(CompletedCheckpoint(p.checkpoint_id, p.location) for p in dropped))

    def finish(self) -> None:
        """Wait for everything that is being written or deleted."""
        self._io.shutdown(wait=True)

    def release(self, status: JobState | None) -> None:
        """Give the pipeline up.

        Args:
            status: How the job has ended; None if it had not begun.
        """
        self.quietly(lambda: self.ownership.release(status))


def restore_point(restored: Restored) -> RestorePoint:
    """What the job machine is to know of a checkpoint that fits."""
    return RestorePoint(restored.plan.checkpoint_id, restored.location, frozenset(restored.plan.finished), restored)


def restored_state(point: RestorePoint | None) -> Restored | None:
    """What the tasks are restored from; None for a new start."""
    if point is None:
        return None
    assert isinstance(point.state, Restored)
    return point.state
