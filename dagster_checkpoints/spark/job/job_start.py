"""The start of a job: what it starts from, decided and checked before anything starts, and announced.

What storage holds is weighed by `restoring`; here it meets the run: its origin, the runs that it repeats, the stages that it
selects. It must not know Spark, nor what becomes of the job once it has begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from dagster_checkpoints.execution.start_point import is_repeated_start
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import NothingToRestoreError, SelectionError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.restoring import StartPoint, choose_start
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.task_sink import check_new_start
from dagster_checkpoints.storage import CheckpointStorage, Ownership, PipelineState, StorageError, check_origin


class JobStart:
    """Decides what a job starts from.

    Args:
        pipeline: What is to run.
        storage: Where its checkpoints are stored.
        options: The settings of the execution.
        selection: The stages to run; None for all. A stage left out must have finished.
        on_event: Receives the start that was chosen, and each deployment that begins to be built.
        log: Told what a user may not expect of the start.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        storage: CheckpointStorage,
        options: JobOptions,
        selection: frozenset[str] | None,
        on_event: Callable[[JobEvent], None],
        log: logging.Logger,
    ) -> None:
        self._pipeline = pipeline
        self._storage = storage
        self._options = options
        self._selection = selection
        self._on_event = on_event
        self._log = log
        self._unusable: list[str] = []

    def check_origin(self, found: PipelineState) -> None:
        """Refuse another pipeline of the same name on the same storage.

        Args:
            found: What storage says of the pipeline; it need not be owned.

        Raises:
            PipelineNameTaken: Storage holds another pipeline.
        """
        if not self._options.allow_moved_pipeline:
            check_origin(self._pipeline.name, self._storage.url, found.origin, self._options.origin)

    def choose(self, ownership: Ownership) -> StartPoint:
        """Decide where the owned pipeline starts, and announce it.

        Args:
            ownership: Of the pipeline.

        Raises:
            StorageError, StateError, NothingToRestoreError: See :func:`choose_start`; or another pipeline has the name.
            SelectionError: A stage was not selected, but has not finished.
            SinkError: A sink refuses a new start.
        """
        self.check_origin(ownership.previous)
        self._follow_earlier_runs(ownership.previous)
        start = choose_start(self._pipeline, self._storage, self._options)
        self._check_selection(start.restored)
        self._tell_start(start.restored)
        if start.restored is None:
            check_new_start(self._pipeline, ownership)
        return start

    def choose_older(self, start: StartPoint, error: StorageError) -> StartPoint:
        """A state file of the chosen checkpoint is corrupt or gone: go on from an older one, if the user allows it.

        Args:
            start: What was chosen before.
            error: What is wrong with it; raised if there is no other start.
        """
        if not self._options.allow_older_checkpoint or start.restored is None:
            raise error
        self._log.warning("Passing over checkpoint %s: %s", start.restored.location, error)
        self._unusable.append(start.restored.location)
        try:
            return choose_start(self._pipeline, self._storage, self._options, self._unusable)
        except NothingToRestoreError:
            raise error from None

    def begin(self, start: StartPoint) -> int:
        """Say that the job runs from there: only once all of its state is here, or a restore that fails would leave behind
        that the pipeline goes on from what cannot be restored.

        Returns:
            The job's id.
        """
        ownership = self._storage.ownership
        assert ownership is not None
        named = self._options.restore_from != "latest"
        return ownership.begin_job(resume=start.resume, restored=start.pointer, named=named, origin=self._options.origin)

    def claim(self, start: StartPoint) -> None:
        """Make a savepoint the pipeline's own, if the job that has begun there claims it."""
        ownership = self._storage.ownership
        assert ownership is not None
        if start.claimed and start.pointer is not None:
            ownership.claim(start.pointer)

    def tell_building(self, attempt: int, restored: Restored | None) -> None:
        """Announce a deployment that is about to be built.

        Args:
            attempt: Its number within the run, from 1.
            restored: What it starts from; None for a new start.
        """
        finished = self._finished_in(restored)
        self._on_event(
            events.AttemptBuilding(
                attempt=attempt,
                stages=tuple(s.name for s in self._pipeline.stages if s.name not in finished),
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
            )
        )

    def _follow_earlier_runs(self, found: PipelineState) -> None:
        """A retry or re-execution goes on with what the run that it repeats has done; another Dagster's runs are only named."""
        if found.origin.instance and self._options.origin.instance not in ("", found.origin.instance):
            self._log.warning(
                "Pipeline %r was last run by another Dagster instance (%s). If that instance still runs it, give each of them "
                "a storage of its own.",
                self._pipeline.name,
                found.origin.instance,
            )
        asked = self._options.restore_from
        if is_repeated_start(asked, self._options.earlier_runs, found):
            self._log.info(
                "The run configuration says restore_from: %r. Run %s, which this run repeats, has begun job %d there; so this "
                "run continues from the latest checkpoint. To begin at %r again, launch a new run instead of a retry or "
                "re-execution.",
                asked,
                found.job.begun_by,
                found.job.job_id,
                asked,
            )
            self._options = replace(self._options, restore_from="latest")

    def _check_selection(self, restored: Restored | None) -> None:
        if self._selection is None:
            return
        finished = restored.plan.fully_finished if restored else frozenset()
        missing = [s.name for s in self._pipeline.stages if s.name not in self._selection and s.name not in finished]
        if missing:
            where = f"checkpoint {restored.plan.checkpoint_id}" if restored else "a new start"
            raise SelectionError(
                f"Pipeline {self._pipeline.name!r}: stage(s) {', '.join(map(repr, missing))} were not selected, but have not "
                f"finished in {where}. All stages of a pipeline run at the same time, because checkpoints span them: select "
                "every unfinished stage."
            )

    def _tell_start(self, restored: Restored | None) -> None:
        self._on_event(
            events.StartChosen(
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
                restored_location=restored.location if restored else None,
                finished_stages=self._finished_in(restored),
            )
        )

    def _finished_in(self, restored: Restored | None) -> tuple[str, ...]:
        """The stages that had finished in what is restored, in topological order."""
        return tuple(s.name for s in self._pipeline.stages if restored and s.name in restored.plan.fully_finished)
