"""A process's dealings with storage: uploads of snapshots, metadata, deletions; the world's performer of the shipped steps.

Must not know when checkpoints are taken.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from dagster_checkpoints.coordination import (
    Acknowledged,
    CheckpointBarrier,
    CheckpointSnapshot,
    Declined,
    FailureReason,
    MetadataWriteFailed,
    MetadataWritten,
    TaskStatistics,
)
from dagster_checkpoints.execution import checkpoint_deletion as deletion
from dagster_checkpoints.execution import checkpoint_writing as writing
from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.storage_errors import AlreadyExists
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import CheckpointMetadata
from dagster_checkpoints.storage.errors import CheckpointDiscarded, MissingStateFile
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from simulation.channels import Ghost, Snapshot
from simulation.cuts import check_cut
from simulation.machine import Machine, Upload
from simulation.restoring import StartPoint, as_recorded, options, restorable
from simulation.storage import (
    PAUSE,
    Metadata,
    Steps,
    StorageError,
    StorageUnavailable,
    Store,
    is_savepoint,
    performed,
    shared_name,
    write,
)
from simulation.task_data import TaskData
from simulation.violations import check

T = TypeVar("T")
UPLOADED = "uploaded"
_WITHOUT_UNION_STATES = CheckpointMetadata("simulated", 0, (), ())
"""Of a pipeline in which no stage has any."""


class Writer(Machine):
    """What runs beside the tasks: uploads, and one thread for input and output."""

    __slots__ = ()

    @abstractmethod
    def report(self, attempt: int, event: object) -> None:
        """Tell the loop of something that a task, or an upload, of this attempt has done."""

    # Uploads

    def submit_upload(self, task: TaskData, barrier: CheckpointBarrier, snapshot: Snapshot, statistics: TaskStatistics) -> None:
        self.uploads.append(Upload(task, barrier, snapshot, statistics))

    def may_upload(self, upload: Upload) -> bool:
        """False if it has to wait for a deletion."""
        if not self.registry._deleting or upload.barrier.properties.is_savepoint:
            return True
        return not any(map(self.being_deleted, upload.snapshot.contents))

    def upload(self, task_number: int, checkpoint_id: int, attempt: int, outcome: str) -> bool:
        """An upload ends. False if there is none, or it has to wait for a deletion."""
        wanted = (task_number, checkpoint_id, attempt)
        upload = next((u for u in self.uploads if (u.task.number, u.barrier.checkpoint_id, u.attempt) == wanted), None)
        if upload is None or not self.may_upload(upload):
            return False
        task, snapshot = upload.task.id, upload.snapshot
        event: Acknowledged | Declined = Acknowledged(task, checkpoint_id, snapshot, upload.statistics)
        try:
            snapshot.files = self._store_files(upload, outcome == UPLOADED)
        except StorageError:
            event = Declined(task, checkpoint_id, FailureReason.IO_EXCEPTION, "the upload failed")
        self.report(attempt, event)
        self.uploads.remove(upload)
        return True

    def _store_files(self, upload: Upload, uploaded: bool) -> tuple[str, ...]:
        """Store the files of a snapshot, or only some of them. Returns their names in storage."""
        checkpoint_id, names = upload.barrier.checkpoint_id, upload.snapshot.contents
        location, store = self._location(checkpoint_id), self.world.store
        if upload.barrier.properties.is_savepoint:
            if location in store.given_up:
                raise CheckpointDiscarded
            store.objects[f"{location}/_incomplete"] = deletion.IncompleteMark("simulated", self.epoch)
            if uploaded:
                store.objects.update(dict.fromkeys([f"{location}/state/{name}" for name in names]))
        else:
            names = tuple([self.store_file(location, content) for content in (names if uploaded else names[:1])])
        if not uploaded:
            raise StorageUnavailable
        return names

    def _location(self, checkpoint_id: int) -> str:
        """Of a checkpoint or savepoint of this process."""
        return self._savepoints.get(checkpoint_id, f"checkpoints/chk-{checkpoint_id}-{self.epoch}")

    # Metadata

    def _write(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Steps[None]:
        checkpoint_id, properties = snapshot.checkpoint_id, snapshot.properties
        metadata, location = self._metadata(snapshot, ghosts), self._location(checkpoint_id)
        result = yield from Performer(self, location, metadata).run(writing.write_checkpoint(checkpoint_id, properties))
        if result.keep:
            self._kept.add(checkpoint_id)
        outcome = result.outcome
        if isinstance(outcome, MetadataWritten) and properties.is_savepoint:
            self.world.store.promise(location)
        if isinstance(outcome, MetadataWriteFailed) and outcome.reason is FailureReason.CHECKPOINT_DECLINED:
            stuck = self.config.checkpoints_after_tasks_finish and self._union_partly_finished(metadata)
            check(not stuck, f"no checkpoint is possible any more: {outcome.message}")
        self.queue.append(outcome)

    def built(self, metadata: Metadata) -> CheckpointMetadata:
        before = self.restored.metadata.finished if self.restored is not None else frozenset()
        check(before <= metadata.finished, f"{set(before - metadata.finished)} had finished and run again")
        if self.settings.exactly_once:
            check_cut(self.shape, metadata)
        return as_recorded(metadata, self.shape) if self.world.has_union else _WITHOUT_UNION_STATES

    def _union_partly_finished(self, metadata: Metadata) -> bool:
        """Whether some, but not all, instances of a stage with union list state have finished: there is no way on."""
        stages = self.shape.stages
        tasks = [task.id for task in self.shape.tasks if any(stages[n].kind == "union" for n in task.stages)]
        gone, left = ({task.vertex for task in tasks if (task in metadata.finished) is over} for over in (True, False))
        return bool(gone & left)

    def _metadata(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Metadata:
        states: dict[TaskId, Any] = dict(snapshot.states)
        return Metadata(
            checkpoint_id=snapshot.checkpoint_id,
            kind=snapshot.properties.kind.value,
            epoch=self.epoch,
            job_id=self.job_id,
            variant=self.asked_start.variant,
            states=states,
            finished=frozenset(snapshot.plan.finished),
            ghosts={**ghosts, **{task: state.ghost for task, state in states.items()}},
            files=frozenset(file for state in states.values() for file in state.files),
            lineage=self.lineage,
        )

    # The start

    def choose_start(self) -> StartPoint:
        """Decide what an owned pipeline starts from.

        Raises:
            NothingToRestoreError: there is no such thing, or it cannot be restored with other numbers of instances.
            RestoreError: it does not fit.
        """
        asks = options(self.world.store, self.owner, self.asked_start, copies=self.number)
        steps: Steps[StartPoint] = start_point.choose_start(self.owner.previous, self.owner.retained, asks, "the store")
        return drive(steps, Performer(self).perform)

    # Deletion

    def _discard_states(self, checkpoint_id: int) -> Steps[int]:
        return Performer(self).run(deletion.discard_states(checkpoint_id))

    def discard_files(self, checkpoint_id: int) -> Steps[int]:
        """Delete the files that only this pending checkpoint names."""
        return self.delete_orphans(self.registry.discarding(f"checkpoints/chk-{checkpoint_id}-{self.epoch}"))

    def _delete(self, location: str) -> Steps[int]:
        retained = [c.location for c in self.coordinator.completed]
        check(location not in retained, f"{location} is deleted, and is still retained")
        return Performer(self).run(deletion.delete_checkpoint(location, is_savepoint(location)))

    def _sweep(self) -> Steps[None]:
        """Delete what killed processes have left behind."""
        assert self._start is not None
        return Performer(self).run(deletion.sweep(self._start.sweep))

    def delete_orphans(self, removing: AbstractContextManager[frozenset[str]]) -> Steps[int]:
        with removing as orphans:
            yield from Performer(self).run(deletion.delete_files(orphans, self.owner.ensure))
        return len(orphans)

    def discard_savepoint(self, checkpoint_id: int) -> Steps[None]:
        """Delete a savepoint that has failed."""
        location = self._savepoints.get(checkpoint_id)
        if location is not None and checkpoint_id not in self._kept:
            self.world.store.given_up.add(location)
            yield from self.delete_savepoint(location)

    def delete_savepoint(self, location: str) -> Steps[None]:
        return Performer(self, location).run(deletion.delete_savepoint(location.startswith("savepoints/")))


class Performer:
    """Performs the requests of shipped steps for a process.

    Args:
        process: whose thread it is.
        location: of the checkpoint or savepoint that the steps write or delete.
        metadata: what they write.
    """

    def __init__(self, process: Writer, location: str = "", metadata: Metadata | None = None) -> None:
        self.process = process
        self.store: Store = process.world.store
        self.owner: OwnershipSteps = process.owner
        self.owned: Callable[[Steps[Any]], Steps[Any]] = process.owned
        self.registry: SharedStateRegistry = process.registry
        self.location: str = location
        self.folder: str = f"{location}/state/"
        self.metadata: Any = metadata

    def run(self, steps: Steps[T]) -> Steps[T]:
        return performed(steps, self.perform)

    def perform(self, request: object) -> Any:
        """The answer to a request, or steps to it."""
        return _PERFORM[type(request)](self, request)

    def run_for_location(self, steps: Steps[None]) -> Steps[str]:
        yield from self.run(steps)
        return self.location

    def create(self) -> Steps[None]:
        return write(lambda: self.store.create(f"{self.location}/_metadata", self.metadata), AlreadyExists(), None)

    def check_files(self) -> None:
        if self.store.lacks(self.location, self.metadata):
            raise MissingStateFile

    def mark(self) -> Steps[None]:
        yield PAUSE
        self.store.objects[f"{self.location}/_incomplete"] = deletion.IncompleteMark("simulated", self.process.epoch)

    def delete(self, *paths: str) -> Steps[None]:
        yield PAUSE
        self.store.delete(*paths)

    def delete_files(self) -> Steps[None]:
        yield PAUSE
        self.store.delete(*[self.folder + name for name in self.store.names(self.folder)])

    def delete_mark_if_empty(self) -> Steps[None]:
        yield PAUSE
        if not self.store.names(self.folder):
            self.store.delete(f"{self.location}/_incomplete")

    def restorable(self, location: str) -> Any:
        found = restorable(self.store, location, self.process.world.shapes, self.process.asked_start.variant)
        if not found.savepoint:
            self.registry.register(location, found.restored.metadata.files)
        return found


_PERFORM: dict[type[object], Callable[[Performer, Any], Any]] = {
    start_point.RegisterFiles: lambda on, asked: on.registry.register(asked.location, on.store.check_whole(asked.location).files),
    start_point.ReadRestorable: lambda on, asked: on.restorable(asked.location),
    start_point.ResolveName: lambda on, asked: start_point.NamedPlace(asked.name, is_savepoint(asked.name)),
    writing.BuildMetadata: lambda on, asked: on.process.built(on.metadata),
    writing.ReserveId: lambda on, asked: on.owned(on.owner.reserve(asked.checkpoint_id)),
    writing.StoreMetadata: lambda on, asked: on.run_for_location(writing.write_metadata()),
    writing.StoreSavepoint: lambda on, asked: on.run_for_location(writing.complete_savepoint(on.location, confirm=True)),
    writing.CompleteCheckpoint: lambda on, asked: on.owned(on.owner.complete(asked.checkpoint_id, asked.location, asked.kind)),
    writing.CheckStateFiles: lambda on, asked: on.check_files(),
    writing.CreateObject: lambda on, asked: on.create(),
    writing.CompareObject: lambda on, asked: check(on.store.metadata(on.location) is on.metadata, f"two {on.location}"),
    writing.RenewLease: lambda on, asked: on.owned(on.owner.renew()),
    deletion.RemoveMark: lambda on, asked: on.delete(f"{on.location}/_incomplete"),
    deletion.ForgetCheckpoint: lambda on, asked: on.owned(on.owner.forget(asked.location)),
    deletion.DeleteMetadata: lambda on, asked: on.delete(f"{asked.location}/_metadata"),
    deletion.DeleteSavepoint: lambda on, asked: on.process.delete_savepoint(asked.location),
    deletion.DiscardFiles: lambda on, asked: on.process.delete_orphans(on.registry.discarding(asked.location)),
    deletion.DiscardSavepoint: lambda on, asked: on.process.discard_savepoint(asked.checkpoint_id),
    deletion.DiscardPendingFiles: lambda on, asked: on.process.discard_files(asked.checkpoint_id),
    deletion.DeleteFiles: lambda on, asked: on.delete(*[f"shared/{name}" for name in asked.names]),
    deletion.MarkIncomplete: lambda on, asked: on.mark(),
    deletion.DeleteSavepointMetadata: lambda on, asked: on.delete(f"{on.location}/_metadata"),
    deletion.DeleteSavepointFiles: lambda on, asked: on.delete_files(),
    deletion.RemoveMarkIfEmpty: lambda on, asked: on.delete_mark_if_empty(),
    deletion.ListMetadata: lambda on, asked: [deletion.FoundMetadata(at, epoch) for at, epoch in on.store.checkpoints()],
    deletion.IsRegistered: lambda on, asked: asked.location in on.registry.checkpoints(),
    deletion.ListSavepointDirectories: lambda on, asked: [f"savepoints/{name}" for name in on.store.names("savepoints/")],
    deletion.ReadMark: lambda on, asked: on.store.objects.get(f"{asked.location}/_incomplete"),
    deletion.HasMetadata: lambda on, asked: on.store.metadata(asked.location) is not None,
    deletion.SweepSavepoints: lambda on, asked: on.run(deletion.sweep_savepoints(on.owner, "simulated")),
    deletion.SweepMetadata: lambda on, asked: on.run(deletion.sweep_metadata(on.owner)),
    deletion.SweepFiles: lambda on, asked: on.run(deletion.sweep_files(on.owner.epoch, frozenset())),
    deletion.ListFiles: lambda on, asked: [shared_name(name) for name in on.store.names("shared/")],
    deletion.DeleteUnnamed: lambda on, asked: on.process.delete_orphans(on.registry.sweeping(asked.names)),
}
