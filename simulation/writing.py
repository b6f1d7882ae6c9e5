"""A process's dealings with storage: uploads of snapshots, metadata, deletions; mirrors `spark.job.checkpointing`.

Must not know when checkpoints are taken.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import (
    Acknowledged,
    CheckpointBarrier,
    CheckpointSnapshot,
    Declined,
    FailureReason,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    TaskStatistics,
)
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import PartlyFinishedUnionState, check_union_states
from dagster_checkpoints.storage.errors import CheckpointDiscarded
from simulation.channels import Ghost, Snapshot
from simulation.cuts import check_cut
from simulation.machine import Machine, Upload
from simulation.restoring import as_recorded
from simulation.storage import (
    PAUSE,
    PUT,
    Metadata,
    OutcomeUnknown,
    OwnershipLost,
    Savepoint,
    Steps,
    StorageError,
    StorageUnavailable,
    stored_by,
)
from simulation.task_data import TaskData
from simulation.violations import Violation, check

if TYPE_CHECKING:
    pass


UPLOADED = "uploaded"


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

    def upload(self, upload: Upload, outcome: str) -> bool:
        """An upload ends. False if it has to wait for a deletion."""
        if not self.may_upload(upload):
            return False
        store, checkpoint_id = self.world.store, upload.barrier.checkpoint_id
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

    def _write(self, checkpoint: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Steps[None]:
        self.queue.append((yield from self._written(checkpoint, ghosts)))

    def _written(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Steps[Any]:
        checkpoint_id, properties = snapshot.checkpoint_id, snapshot.properties
        ownership = self.ownership
        assert ownership is not None
        try:
            metadata = self._metadata(snapshot, ghosts)
            before = self.restored.metadata.finished if self.restored is not None else frozenset()
            check(before <= metadata.finished, f"{set(before - metadata.finished)} had finished and run again")
            if self.world.has_union:
                check_union_states(as_recorded(metadata, self.shape))
            if self.settings.exactly_once:
                check_cut(self.shape, metadata)
            if properties.is_savepoint:
                location = yield from self._write_savepoint(checkpoint_id, metadata)
            else:
                location = self._key(checkpoint_id)
                yield from self._create(location, metadata)
            if properties.commits:
                yield from ownership.perform(ownership.steps.complete(checkpoint_id, location, metadata.kind))
            self._kept.add(checkpoint_id)
        except OutcomeUnknown:
            self._kept.add(checkpoint_id)
            return MetadataOutcomeUnknown(checkpoint_id, "unknown")
        except OwnershipLost as error:
            # Its metadata may be written, and the new owner may be restoring from it: no longer ours to delete.
            self._kept.add(checkpoint_id)
            return MetadataWriteFailed(checkpoint_id, repr(error))
        except PartlyFinishedUnionState as error:
            stuck = self.config.checkpoints_after_tasks_finish and self._union_partly_finished(metadata)
            check(not stuck, f"no checkpoint is possible any more: {error}")
            return MetadataWriteFailed(checkpoint_id, str(error), FailureReason.CHECKPOINT_DECLINED)
        except StorageError as error:
            return MetadataWriteFailed(checkpoint_id, repr(error))
        return MetadataWritten(checkpoint_id, location)

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

    def _create(self, location: str, metadata: Metadata) -> Steps[None]:
        for attempt in range(3):
            outcome = yield PUT
            if outcome == "unavailable":
                raise StorageUnavailable
            if outcome != "lost":
                there = self.world.store.metadata.setdefault(location, metadata)
                check(there is metadata, f"two checkpoints are called {location}")
            if outcome not in ("lost", "landed"):
                return
            if attempt == 2:
                raise OutcomeUnknown

    def _write_savepoint(self, checkpoint_id: int, metadata: Metadata) -> Steps[str]:
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        yield from ownership.perform(ownership.steps.reserve(checkpoint_id))
        location = self._savepoint_directory(checkpoint_id)
        savepoint = store.savepoints.get(location)
        if savepoint is None or metadata.files - savepoint.files:
            raise StorageUnavailable
        outcome = yield PUT
        if outcome == "unavailable":
            raise StorageUnavailable
        if outcome == "lost":
            raise OutcomeUnknown
        if store.savepoints.get(location) is not savepoint:
            # Swept meanwhile: metadata without files. Nobody is told that it is complete; whoever names it hears what is gone.
            store.savepoints[location] = Savepoint(location, True, self.epoch, metadata=metadata, deleted=True)
        else:
            savepoint.metadata = metadata
        if outcome == "landed":
            raise OutcomeUnknown
        yield from ownership.confirm()
        store.take_id(metadata)
        savepoint.marked = False
        return location

    def _discard_states(self, checkpoint_id: int) -> Steps[None]:
        yield from self._discard_savepoint(checkpoint_id)
        yield from self._discard(self._key(checkpoint_id))

    def _discard(self, key: str) -> Steps[None]:
        ownership = self.ownership
        assert ownership is not None
        with self.registry.discarding(key) as orphans:
            if orphans:
                ownership.ensure()
                yield PAUSE
                self.world.store.delete_shared(orphans)

    def _discard_savepoint(self, checkpoint_id: int) -> Steps[None]:
        location = self._savepoints.get(checkpoint_id)
        if location is None or checkpoint_id in self._kept:
            return
        yield PAUSE
        savepoint = self.world.store.savepoints.get(location)
        if savepoint is not None:
            savepoint.deleted = True
            savepoint.metadata = None
        self.world.store.delete_savepoint(location)

    def _delete(self, location: str) -> Steps[None]:
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        retained = [c.location for c in self.coordinator.completed]
        check(location not in retained, f"{location} is deleted, and is still retained")
        yield from ownership.perform(ownership.steps.forget(location))
        yield PAUSE
        if location in store.savepoints:
            store.delete_savepoint(location)
            return
        store.delete_metadata(location)
        yield PAUSE
        yield from self._discard(location)

    def _sweep(self) -> Steps[None]:
        """Delete what killed processes have left behind."""
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        for savepoint in [s for s in store.savepoints.values() if s.own and s.epoch < self.epoch]:
            if savepoint.metadata is None:
                ownership.ensure()
                yield PAUSE
                if savepoint.metadata is None:
                    store.delete_savepoint(savepoint.location)
        kept = {p.location for p in (*ownership.retained, *([ownership.state.newest] if ownership.state.newest else ()))}
        for location, metadata in list(store.metadata.items()):
            in_use = location in self.registry.checkpoints()
            if metadata.epoch < self.epoch and location not in kept and not in_use:
                ownership.ensure()
                yield PAUSE
                store.delete_metadata(location)
        with self.registry.sweeping({name for name in store.shared if stored_by(name) <= self.epoch}) as orphans:
            ownership.ensure()
            yield PAUSE
            store.delete_shared(orphans)
