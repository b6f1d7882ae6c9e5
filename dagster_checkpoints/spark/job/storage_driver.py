"""Performs a job's actions on storage: its start and end, the choice of checkpoints, writing and deleting.

It must not know when to do so: `execution.job_machine` decides that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.events import DiscardCheckpoint, DiscardStates, WriteMetadata
from dagster_checkpoints.errors import StorageError, StorageUnavailable
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_events import JobMachineEvent, RestorePoint
from dagster_checkpoints.execution.job_storage import beginning_chosen, ownership_answer, restore_point
from dagster_checkpoints.execution.pipeline_state import JobState
from dagster_checkpoints.spark.job.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.job.job_start import JobStart, StartPoint, read_restored
from dagster_checkpoints.spark.job.runtime import Runtime
from dagster_checkpoints.spark.snapshots.restored_state import Restored

LOOK_SECONDS = 600.0
"""Seconds between two looks for state files that another program has deleted."""


class StorageDriver:
    """Performs the actions that concern the storage of a job.

    Args:
        runtime: The values of the run.
        starting: Chooses the job's start point.

    Attributes:
        writer: Writes the job's checkpoints; None before the job has begun.
        job_id: The job's id; 0 before its start point is chosen.
    """

    def __init__(self, runtime: Runtime, starting: JobStart) -> None:
        self.writer: CheckpointWriter | None = None
        self.job_id = 0
        self._runtime = runtime
        self._starting = starting
        self._start: StartPoint | None = None
        self._looked_at = time.monotonic()
        self._io = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-io")

    # The start

    def choose(self) -> JobMachineEvent:
        """Choose the job's start point.

        Raises:
            DagsterCheckpointsError: The job cannot start.
        """
        return self._chosen(self._starting.choose(self._runtime.ownership))

    def choose_older(self, action: do.ChooseOlderStart) -> JobMachineEvent:
        """Choose an older checkpoint than the one that cannot be read.

        Raises:
            StorageError: There is no older one, or the user does not allow it.
        """
        assert self._start is not None and isinstance(action.failure.error, StorageError)
        return self._chosen(self._starting.choose_older(self._start, action.failure.error))

    def _chosen(self, start: StartPoint) -> on.BeginningChosen:
        self._start = start
        self.job_id = self._runtime.ownership.job_id + (not start.resume)
        return beginning_chosen(start)

    def begin(self, spark_version: str) -> JobMachineEvent:
        """Record in storage that the job runs.

        Raises:
            StorageError: It could not be recorded.
        """
        assert self._start is not None
        self.job_id = self._starting.begin(self._start)
        self.writer = CheckpointWriter(self._runtime, self.job_id, spark_version)
        return on.JobBegun()

    # The start point of a restart

    def confirm_ownership(self) -> JobMachineEvent:
        """Check in storage that this run owns the pipeline, and which checkpoint is the newest.

        Raises:
            StorageError: Another run owns the pipeline.
        """
        renewed = self._runtime.ownership.renew()  # after an unknown outcome this shows which write has landed
        if not renewed:
            self._runtime.log.warning("The job waits for storage to confirm that this run owns the pipeline.")
        return ownership_answer(renewed, self._runtime.ownership.newest)

    def read_newest(self, checkpoint: CompletedCheckpoint) -> JobMachineEvent:
        """Read the checkpoint that a restart begins from.

        Raises:
            StateError, StorageError: The checkpoint is deleted, or corrupt.
        """
        try:
            allowed = self._runtime.options.allow_non_restored_state
            restored = read_restored(self._runtime.pipeline, self._runtime.storage, checkpoint.location, allowed)
        except StorageUnavailable as error:
            self._runtime.log.warning("The restart waits for storage: %s", error)
            return on.StorageSilent()
        return on.NewestRead(restore_point(restored))

    # Writing and deleting, on a separate thread

    def write(self, action: do.Sweep | do.ForgetSavepoints | WriteMetadata | DiscardStates | DiscardCheckpoint) -> None:
        """Write or delete; the queue receives the outcome of a metadata write."""
        writer = self.writer
        match action:
            case do.Sweep():
                return self._submit_cleanup(self._sweep)
            case do.ForgetSavepoints(retained):
                return self._runtime.ownership.forget_savepoints(retained)
        assert writer is not None
        match action:
            case WriteMetadata(checkpoint):
                finished = frozenset(checkpoint.plan.finished)
                self._io.submit(lambda: self._runtime.items.put(writer.write(checkpoint, finished)))
                self._submit_cleanup(self._look_for_lost_files)
            case DiscardStates(discarded):
                self._submit_cleanup(lambda: writer.discard_states(discarded))
            case DiscardCheckpoint(completed):
                self._submit_cleanup(lambda: writer.delete(completed))

    def discard_savepoint(self, checkpoint_id: int) -> None:
        """Delete the files of a savepoint that has failed; does nothing for a checkpoint."""
        self._submit_cleanup(lambda: self._runtime.savepoints.discard(checkpoint_id))

    def _submit_cleanup(self, cleanup: Callable[[], object]) -> None:
        """Clean up after the current writes have ended."""
        self._io.submit(self._clean_up, cleanup)

    def _clean_up(self, cleanup: Callable[[], object]) -> None:
        """Clean up. If that fails, a later run does it."""
        try:
            cleanup()
        except StorageError as error:
            self._runtime.log.warning("%s: %s", type(error).__name__, error)

    def _sweep(self) -> None:
        """Delete the files that killed runs have left behind."""
        assert self._start is not None
        self._runtime.storage.sweep(files=self._start.sweep)

    def _look_for_lost_files(self) -> None:
        """Warn of deleted state files: checkpoints that name them cannot be restored."""
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        if lost := sorted(self._runtime.storage.find_lost_files()):
            self._runtime.log.warning(
                "Another program has deleted %d state files from %s/shared, such as %s. The checkpoints until now that need them "
                "cannot be restored; the next checkpoint stores them again. Exclude that directory from lifecycle rules and from "
                "cleaning.",
                len(lost),
                self._runtime.storage.url,
                lost[0],
            )

    # The end

    def end_job(self, action: do.EndJob) -> JobMachineEvent:
        """Record in storage that the job has finished."""
        try:
            dropped = self._runtime.ownership.end_job(
                "FINISHED",
                keep_checkpoints=action.keep_checkpoints,
                ended_by=action.ended_by,
                stop_asked_by=action.stop_asked_by,
            )
        except StorageError as error:
            self._runtime.log.warning("The checkpoints of the finished job are kept: %s", error)
            return on.JobEndNotRecorded()
        return on.JobEndRecorded(tuple(CompletedCheckpoint(p.checkpoint_id, p.location) for p in dropped))

    def finish(self) -> None:
        """Wait until all writes and deletions have ended."""
        self._io.shutdown(wait=True)

    def release(self, status: JobState | None) -> None:
        """Release the pipeline.

        Args:
            status: The job's end state; None if the job had not begun.
        """
        self._clean_up(lambda: self._runtime.ownership.release(status))


def restored_state(point: RestorePoint | None) -> Restored | None:
    """The checkpoint that the tasks are restored from; None for a new start."""
    if point is None:
        return None
    assert isinstance(point.state, Restored)
    return point.state
