"""A process's dealings with storage: uploads of snapshots, metadata, deletions; the world's performer of the shipped steps.

Must not know when checkpoints are taken.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

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
from dagster_checkpoints.execution.storage_errors import AlreadyExists
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import CheckpointMetadata
from dagster_checkpoints.storage.errors import CheckpointDiscarded, MissingStateFile
from simulation.channels import Ghost, Snapshot
from simulation.cuts import check_cut
from simulation.machine import Machine, Upload
from simulation.restoring import as_recorded
from simulation.storage import (
    LANDED,
    LOST,
    OK,
    PAUSE,
    PUT,
    UNAVAILABLE,
    Metadata,
    OutcomeUnknown,
    Savepoint,
    Steps,
    StorageError,
    StorageUnavailable,
    performed,
    shared_name,
)
from simulation.task_data import TaskData
from simulation.violations import Violation, check

UPLOADED = "uploaded"
_WITHOUT_UNION_STATES = CheckpointMetadata("simulated", 0, (), ())
"""Of a pipeline in which no stage has any."""


class Writer(Machine):
    """What runs beside the tasks: uploads, and one thread for input and output."""

    @abstractmethod
    def report(self, attempt: int, event: object) -> None:
        """Tell the loop of something that a task, or an upload, of this attempt has done."""

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
        store = self.world.store
        task, contents = upload.task.id, upload.snapshot.contents
        try:
            if upload.barrier.properties.is_savepoint:
                savepoint = store.savepoints.get(self._savepoint_directory(checkpoint_id))
                if savepoint is None or savepoint.deleted:
                    raise CheckpointDiscarded
                savepoint.marked = True
                if outcome == UPLOADED:
                    savepoint.files.update(contents)
                    upload.snapshot.files = contents
            else:
                key = self._key(checkpoint_id)
                whole = len(contents) if outcome == UPLOADED else 1
                upload.snapshot.files = tuple([self.store_file(key, content) for content in contents[:whole]])
            if outcome != UPLOADED:
                raise StorageUnavailable
            self.report(upload.attempt, Acknowledged(task, checkpoint_id, upload.snapshot, upload.statistics))
        except StorageError:
            reason = FailureReason.IO_EXCEPTION
            self.report(upload.attempt, Declined(task, checkpoint_id, reason, "the upload failed"))
        except Exception as error:
            if isinstance(error, Violation):
                raise
            reason = FailureReason.CHECKPOINT_ASYNC_EXCEPTION
            self.report(upload.attempt, Declined(task, checkpoint_id, reason, str(error)))
        self.uploads.remove(upload)
        return True

    def _key(self, checkpoint_id: int) -> str:
        return f"checkpoints/chk-{checkpoint_id}-{self.epoch}"

    def _savepoint_directory(self, checkpoint_id: int) -> str:
        if checkpoint_id not in self._savepoints:
            location = f"savepoints/savepoint-{checkpoint_id}-{self.epoch}"
            self._savepoints[checkpoint_id] = location
            self.world.store.savepoints[location] = Savepoint(location, True, self.epoch)
        return self._savepoints[checkpoint_id]

    def _write(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Steps[None]:
        ownership, metadata = self.ownership, self._metadata(snapshot, ghosts)
        assert ownership is not None

        def perform(request: object) -> Steps[Any]:
            match request:
                case writing.BuildMetadata():
                    return self._built(metadata)
                case writing.ReserveId(checkpoint_id):
                    return (yield from ownership.perform(ownership.steps.reserve(checkpoint_id)))
                case writing.StoreMetadata(checkpoint_id):
                    return (yield from self._store_metadata(self._key(checkpoint_id), metadata))
                case writing.StoreSavepoint(checkpoint_id):
                    return (yield from self._store_savepoint(checkpoint_id, metadata))
                case writing.CompleteCheckpoint(checkpoint_id, location, kind):
                    return (yield from ownership.perform(ownership.steps.complete(checkpoint_id, location, kind)))
            raise TypeError(request)

        result = yield from performed(writing.write_checkpoint(snapshot.checkpoint_id, snapshot.properties), perform)
        if result.keep:
            self._kept.add(snapshot.checkpoint_id)
        outcome = result.outcome
        if isinstance(outcome, MetadataWritten) and snapshot.properties.is_savepoint:
            self.world.store.tell_savepoint(outcome.location)
        if isinstance(outcome, MetadataWriteFailed) and outcome.reason is FailureReason.CHECKPOINT_DECLINED:
            stuck = self.config.checkpoints_after_tasks_finish and self._union_partly_finished(metadata)
            check(not stuck, f"no checkpoint is possible any more: {outcome.message}")
        self.queue.append(outcome)

    def _built(self, metadata: Metadata) -> CheckpointMetadata:
        before = self.restored.metadata.finished if self.restored is not None else frozenset()
        check(before <= metadata.finished, f"{set(before - metadata.finished)} had finished and run again")
        if self.settings.exactly_once:
            check_cut(self.shape, metadata)
        return as_recorded(metadata, self.shape) if self.world.has_union else _WITHOUT_UNION_STATES

    def _union_partly_finished(self, metadata: Metadata) -> bool:
        """Whether some, but not all, instances of a stage with union list state have finished: there is no way on."""
        for chain in self.shape.chains:
            if any(self.shape.stages[int(name[1:])].kind == "union" for name in chain.stages):
                gone = sum(TaskId(chain.name, index) in metadata.finished for index in range(len(chain.instances)))
                if 0 < gone < len(chain.instances):
                    return True
        return False

    def _metadata(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Metadata:
        states: dict[TaskId, Any] = dict(snapshot.states)
        return Metadata(
            checkpoint_id=snapshot.checkpoint_id,
            kind=snapshot.properties.kind.value,
            stops_job=snapshot.properties.stops_job,
            epoch=self.epoch,
            job_id=self.job_id,
            variant=self.asked_start.variant,
            states=states,
            finished=frozenset(snapshot.plan.finished),
            ghosts=ghosts,
            files=frozenset(file for state in states.values() for file in state.files),
            lineage=self.lineage,
        )

    def _store_metadata(self, location: str, metadata: Metadata) -> Steps[str]:
        store = self.world.store

        def perform(request: object) -> Steps[None]:
            if isinstance(request, writing.CreateObject):
                return (yield from self._create(lambda: store.create_metadata(location, metadata)))
            check(store.metadata[location] is metadata, f"two checkpoints are called {location}")

        yield from performed(writing.write_metadata(), perform)
        return location

    def _store_savepoint(self, checkpoint_id: int, metadata: Metadata) -> Steps[str]:
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        location = self._savepoint_directory(checkpoint_id)
        savepoint = store.savepoints.get(location)

        def perform(request: object) -> Steps[Any]:
            match request:
                case writing.CheckStateFiles():
                    if savepoint is None or metadata.files - savepoint.files:
                        raise MissingStateFile
                case writing.CreateObject():
                    assert savepoint is not None
                    yield from self._create(lambda: store.create_savepoint_metadata(savepoint, metadata))
                case writing.CompareObject():
                    check(store.savepoints[location].metadata is metadata, f"two savepoints are called {location}")
                case writing.RenewLease():
                    return (yield from ownership.perform(ownership.steps.renew()))
                case deletion.RemoveMark():
                    yield PAUSE
                    store.delete_mark(location)

        yield from performed(writing.complete_savepoint(location, confirm=True), perform)
        return location

    @staticmethod
    def _create(create: Callable[[], bool]) -> Steps[None]:
        """Create an object; its outcome is the world's."""
        outcome = (yield PUT) or OK
        if outcome == UNAVAILABLE:
            raise StorageUnavailable
        created = outcome != LOST and create()
        if outcome in (LOST, LANDED):
            raise OutcomeUnknown
        if not created:
            raise AlreadyExists

    # Deletion

    def _discard_states(self, checkpoint_id: int) -> Steps[int]:
        return performed(deletion.discard_states(checkpoint_id), self._delete_by)

    def _delete(self, location: str) -> Steps[int]:
        retained = [c.location for c in self.coordinator.completed]
        check(location not in retained, f"{location} is deleted, and is still retained")
        return performed(deletion.delete_checkpoint(location, not location.startswith("checkpoints/")), self._delete_by)

    def _sweep(self) -> Steps[None]:
        """Delete what killed processes have left behind."""
        assert self._start is not None
        return performed(deletion.sweep(self._start.sweep), self._delete_by)

    def _delete_by(self, request: object) -> Steps[Any]:
        """Perform a request of a deletion."""
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        match request:
            case deletion.ForgetCheckpoint(location):
                return (yield from ownership.perform(ownership.steps.forget(location)))
            case deletion.DeleteMetadata(location):
                yield PAUSE
                store.delete_metadata(location)
            case deletion.DeleteSavepoint(location):
                yield from self._delete_savepoint(location)
            case deletion.DiscardFiles(location):
                return (yield from self._delete_orphans(self.registry.discarding(location)))
            case deletion.DiscardPendingFiles(checkpoint_id):
                return (yield from self._delete_orphans(self.registry.discarding(self._key(checkpoint_id))))
            case deletion.DiscardSavepoint(checkpoint_id):
                yield from self._discard_savepoint(checkpoint_id)
            case deletion.DeleteFiles(names):
                yield PAUSE
                store.delete_shared(names)
            case deletion.ListSavepointDirectories():
                return [savepoint.location for savepoint in store.savepoints.values() if savepoint.own]
            case deletion.ReadMark(location):
                savepoint = store.savepoints.get(location)
                return (
                    deletion.IncompleteMark("simulated", savepoint.epoch) if savepoint is not None and savepoint.marked else None
                )
            case deletion.HasMetadata(location):
                return location in store.savepoints and store.savepoints[location].metadata is not None
            case deletion.ListMetadata():
                return [deletion.FoundMetadata(location, metadata.epoch) for location, metadata in store.metadata.items()]
            case deletion.IsRegistered(location):
                return location in self.registry.checkpoints()
            case deletion.SweepSavepoints():
                return (yield from performed(deletion.sweep_savepoints(ownership.steps, "simulated"), self._delete_by))
            case deletion.SweepMetadata():
                return (yield from performed(deletion.sweep_metadata(ownership.steps), self._delete_by))
            case deletion.SweepFiles():
                return (yield from performed(deletion.sweep_files(self.epoch, frozenset()), self._delete_by))
            case deletion.ListFiles():
                return [shared_name(name) for name in store.shared]
            case deletion.DeleteUnnamed(files):
                return (yield from self._delete_orphans(self.registry.sweeping(files)))
            case _:
                raise TypeError(request)

    def _delete_orphans(self, removing: AbstractContextManager[frozenset[str]]) -> Steps[int]:
        assert self.ownership is not None
        with removing as orphans:
            yield from performed(deletion.delete_files(orphans, self.ownership.ensure), self._delete_by)
        return len(orphans)

    def _discard_savepoint(self, checkpoint_id: int) -> Steps[None]:
        location = self._savepoints.get(checkpoint_id)
        if location is None or checkpoint_id in self._kept:
            return
        savepoint = self.world.store.savepoints.get(location)
        if savepoint is not None:
            savepoint.deleted = True
        yield from self._delete_savepoint(location)

    def _delete_savepoint(self, location: str) -> Steps[None]:
        store = self.world.store
        savepoint = store.savepoints.get(location)

        def perform(request: object) -> Steps[None]:
            yield PAUSE
            match request:
                case deletion.MarkIncomplete() if savepoint is not None:
                    savepoint.marked = True
                case deletion.DeleteSavepointMetadata():
                    store.delete_savepoint_metadata(location)
                case deletion.DeleteSavepointFiles() if savepoint is not None:
                    savepoint.files.clear()
                case deletion.RemoveMarkIfEmpty() if savepoint is None or not savepoint.files:
                    store.delete_mark(location)

        yield from performed(deletion.delete_savepoint(savepoint is None or savepoint.own), perform)
