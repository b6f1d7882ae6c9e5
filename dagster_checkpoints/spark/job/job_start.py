"""The start point of a job: chosen, checked and reported before anything starts.

It is chosen among the checkpoints in storage by the rules of :mod:`dagster_checkpoints.execution.start_point`, and by the run:
its origin, the runs that it repeats, the stages that it selects. It must not know Spark, nor the job after it has begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, PipelineState
from dagster_checkpoints.execution.start_point import (
    ListSavepoints,
    NamedPlace,
    NamedSavepoint,
    ReadRestorable,
    RegisterFiles,
    ResolveName,
    RestorableCheckpoint,
    StartOptions,
    is_repeated_start,
)
from dagster_checkpoints.execution.storage_steps import Steps, drive
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import NothingToRestoreError, SelectionError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_version import installed_version
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.task_sink import check_new_start
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.state.rescaled_instances import note_instances, with_known_instances
from dagster_checkpoints.state.restore import validate_restore
from dagster_checkpoints.state.spark_versions import check_spark_version
from dagster_checkpoints.storage.acquisition import check_origin
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.ownership import Ownership

StartPoint = start_point.StartPoint[Restored]


class RestoreOptions(StartOptions, Protocol):
    """The part of the job's options that concerns the start."""

    @property
    def allow_non_restored_state(self) -> bool: ...


def choose_start(
    pipeline: Pipeline, storage: CheckpointStorage, options: RestoreOptions, unusable: Collection[str] = ()
) -> StartPoint:
    """Choose the start point of an owned pipeline; see :func:`start_point.choose_start`.

    Args:
        pipeline: The pipeline that is started.
        storage: The storage of its checkpoints; this run owns the pipeline.
        options: The user's options.
        unusable: Locations of checkpoints whose state files were found corrupt.
    """
    ownership = storage.ownership
    assert ownership is not None

    most_instances = dict(ownership.previous.job.most_instances)

    def perform(request: object) -> object:
        match request:
            case RegisterFiles(location):
                retained = decode(storage.read_metadata(location), storage.url_of(location))
                storage.register(location, retained.files())
                note_instances(retained, most_instances)
                return None
            case ReadRestorable(location):
                allowed = options.allow_non_restored_state
                return _restorable(storage, read_restored(pipeline, storage, location, allowed, most_instances))
            case ResolveName(name):
                if storage.is_savepoint(name):
                    return NamedPlace(storage.open_savepoint(name).location, savepoint=True)
                return NamedPlace(storage.relative(name), savepoint=False)
            case ListSavepoints():
                return [NamedSavepoint(stored.checkpoint_id, stored.location) for stored in storage.list_savepoints()]
            case _:
                raise TypeError(f"expected a request of the choice of the start, found {request!r}")

    steps: Steps[StartPoint] = start_point.choose_start(
        ownership.previous, ownership.retained, options, storage.url, unusable, ownership.steps.unlisted
    )
    return drive(steps, perform)


def _restorable(storage: CheckpointStorage, restored: Restored) -> RestorableCheckpoint[Restored]:
    metadata = restored.metadata
    pointer = CheckpointPointer(
        checkpoint_id=restored.plan.checkpoint_id,
        location=restored.location,
        kind=metadata.kind,
        epoch=metadata.epoch,
        job_id=int(metadata.job_id or 0),
        completed_at=datetime.fromtimestamp(metadata.completed_at, UTC),
    )
    savepoint = restored.savepoint
    own = savepoint is None or savepoint.own
    return RestorableCheckpoint(restored, pointer, storage.url_of(restored.location), savepoint is not None, own)


def read_restored(
    pipeline: Pipeline,
    storage: CheckpointStorage,
    location: str,
    allow_non_restored_state: bool,
    most_instances: Mapping[str, int] = MappingProxyType({}),
) -> Restored:
    """Read a checkpoint or savepoint and check that the pipeline can be restored from it.

    Args:
        pipeline: The pipeline that is started.
        storage: The storage of its checkpoints.
        location: The location of the checkpoint or savepoint.
        allow_non_restored_state: See `validate_restore`.
        most_instances: By the uid of a stage, the largest number of instances that its job or the retained checkpoints know: the
            sinks of those that are gone have to take back what they committed later.

    Raises:
        StateError, StorageError: The checkpoint is corrupt, of an unknown version, deleted, or does not fit the pipeline or the
            installed Spark.
    """
    savepoint = storage.open_savepoint(location) if storage.is_savepoint(location) else None
    if savepoint is not None:
        metadata = decode(savepoint.read_metadata(), f"{savepoint.url}/_metadata")
    else:
        metadata = decode(storage.read_metadata(location), f"{storage.url_of(location)}/_metadata")
        if storage.layout.parse_checkpoint(location) is not None:
            storage.register(location, metadata.files())  # so that the sweep keeps them, also if the checkpoint is not retained
    check_spark_version(metadata, installed_version())
    plan = validate_restore(pipeline, with_known_instances(metadata, most_instances), allow_non_restored_state)
    return Restored(plan, location, savepoint)


class JobStart:
    """Chooses the start point of a job.

    Args:
        pipeline: The pipeline to run.
        storage: The storage of its checkpoints.
        options: The settings of the execution.
        on_event: Receives the chosen start, and the begin of each deployment.
        log: Receives warnings about the start.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        storage: CheckpointStorage,
        options: JobOptions,
        on_event: Callable[[JobEvent], None],
        log: logging.Logger,
    ) -> None:
        self._pipeline = pipeline
        self._storage = storage
        self._options = options
        self._on_event = on_event
        self._log = log
        self._unusable: list[str] = []

    def check_origin(self, state: PipelineState) -> None:
        """Refuse another pipeline of the same name on the same storage.

        Args:
            state: The pipeline's state in storage; this run need not own the pipeline.

        Raises:
            PipelineNameTaken: Storage holds another pipeline.
        """
        if not self._options.allow_moved_pipeline:
            check_origin(self._pipeline.name, self._storage.url, state.origin, self._options.origin)

    def choose(self, ownership: Ownership) -> StartPoint:
        """Choose the start point of the owned pipeline, and report it.

        Args:
            ownership: This run's ownership of the pipeline.

        Raises:
            StorageError, StateError, NothingToRestoreError: See :func:`choose_start`; or another pipeline uses the name.
            SelectionError: A stage was not selected, but has not finished.
            SinkError: A sink refuses a new start.
        """
        self.check_origin(ownership.previous)
        self._follow_earlier_runs(ownership.previous)
        start = choose_start(self._pipeline, self._storage, self._options)
        self._check_selection(start.restored)
        if not start.sweep:
            self._log.warning(
                "Not every retained checkpoint in %s can be read, so no run can go back to it, and no unused file is deleted. "
                "dagster-checkpoints list --long says which one, and why. Put its _metadata back from a copy.",
                self._storage.url,
            )
        self._report_start(start.restored)
        if start.restored is None:
            check_new_start(self._pipeline, ownership, named=self._options.restore_from != "latest")
        else:
            self._warn_of_new_job(start, ownership.previous)
        return start

    def _warn_of_new_job(self, start: StartPoint, previous: PipelineState) -> None:
        """Warn of rows that stay in the tables of sinks, and may be written again."""
        if start.resume or previous.job.status == "NONE" or self._options.restore_from == "latest":
            return
        if start.pointer is not None and any(stage.sink is not None for stage in self._pipeline.stages):
            self._log.warning(
                "restore_from: %r begins a new job: it is not a savepoint of job %d in %s/savepoints. No rows are taken back: "
                "what earlier jobs have committed stays in the tables of the sinks, and what they have committed after this "
                "savepoint is written again. Give the sinks separate tables, unless nothing was committed after it.",
                self._options.restore_from,
                previous.job.job_id,
                self._storage.url,
            )

    def choose_older(self, start: StartPoint, error: StorageError) -> StartPoint:
        """Choose an older checkpoint after a state file was found corrupt or missing, if the user allows it.

        Args:
            start: The start point chosen before.
            error: The error of its state file; raised if there is no other start.
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
        """Record in storage that the job runs from this start point.

        Call it only after all of its state is fetched: otherwise a restore that fails would leave a state in storage that
        continues from a checkpoint that cannot be restored.

        Returns:
            The job's id.
        """
        ownership = self._storage.ownership
        assert ownership is not None
        named = self._options.restore_from != "latest"
        instances = {stage.uid: stage.parallelism for stage in self._pipeline.stages}
        return ownership.begin_job(
            resume=start.resume, restored=start.pointer, named=named, origin=self._options.origin, instances=instances
        )

    def report_attempt(self, attempt: int, restored: Restored | None, part: Collection[str] = ()) -> None:
        """Report a deployment that is about to be built.

        Args:
            attempt: The attempt's number within the run, from 1.
            restored: The checkpoint that the attempt starts from; None for a new start.
            part: The stages that restart while others go on; empty for all stages.
        """
        finished = self._finished_in(restored)
        self._on_event(
            events.AttemptBuilding(
                attempt=attempt,
                stages=tuple(s.name for s in self._pipeline.stages if s.name not in finished and (not part or s.name in part)),
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
            )
        )

    def _follow_earlier_runs(self, state: PipelineState) -> None:
        """Let a retry or re-execution continue the job of the run that it repeats; warn of another Dagster instance's runs."""
        if state.origin.instance and self._options.origin.instance not in ("", state.origin.instance):
            self._log.warning(
                "Pipeline %r was last run by another Dagster instance (%s). If that instance still runs it, give each of them "
                "a separate storage.",
                self._pipeline.name,
                state.origin.instance,
            )
        restore_from = self._options.restore_from
        if is_repeated_start(restore_from, self._options.earlier_runs, state):
            self._log.info(
                "The run configuration says restore_from: %r. Run %s, which this run repeats, has begun job %d there; so this "
                "run continues from the latest checkpoint. To begin at %r again, launch a new run instead of a retry or "
                "re-execution.",
                restore_from,
                state.job.begun_by,
                state.job.job_id,
                restore_from,
            )
            self._options = replace(self._options, restore_from="latest")

    def _check_selection(self, restored: Restored | None) -> None:
        selection = self._options.selection
        if selection is None:
            return
        finished = restored.plan.fully_finished if restored else frozenset()
        missing = [s.name for s in self._pipeline.stages if s.name not in selection and s.name not in finished]
        if missing:
            where = f"checkpoint {restored.plan.checkpoint_id}" if restored else "a new start"
            raise SelectionError(
                f"Pipeline {self._pipeline.name!r}: stage(s) {', '.join(map(repr, missing))} were not selected, but have not "
                f"finished in {where}. All stages of a pipeline run at the same time, because checkpoints span them: select "
                "every unfinished stage. A backfill or an automation condition may have launched only some of them: launch the "
                "pipeline's job, after the assets in front of it."
            )

    def _report_start(self, restored: Restored | None) -> None:
        self._on_event(
            events.StartChosen(
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
                restored_location=restored.location if restored else None,
                finished_stages=self._finished_in(restored),
                changes=restored.plan.changes if restored else (),
            )
        )

    def _finished_in(self, restored: Restored | None) -> tuple[str, ...]:
        """The stages that had finished at the restored checkpoint, in topological order."""
        return tuple(s.name for s in self._pipeline.stages if restored and s.name in restored.plan.fully_finished)
