"""The storage side of a process: ownership, uploads of snapshots, metadata, deletions.

Must not know when checkpoints are taken.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dagster_checkpoints.coordination import events as coordination
from dagster_checkpoints.coordination.checkpoints import CheckpointSnapshot
from dagster_checkpoints.coordination.events import Acknowledged, Declined
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import CheckpointDiscarded, StorageError, StorageUnavailable
from dagster_checkpoints.execution import acquisition, checkpoint_deletion, checkpoint_writing
from dagster_checkpoints.execution.job_events import TaskReport
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner
from dagster_checkpoints.execution.shared_files import store_file
from dagster_checkpoints.execution.storage_steps import DriverValues, StatePlace, drive
from dagster_checkpoints.execution.task_events import StoreSnapshot
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.recording import recorded_stages
from dagster_checkpoints.state.rescaled_instances import note_instances
from dagster_checkpoints.state.stage_names import with_uids
from simulation.channels import Ghost, Snapshot
from simulation.consistency import check_cut, check_ends
from simulation.divisions import keeps_layout
from simulation.machine import LEASE, Machine, Upload
from simulation.requests import OK, Steps
from simulation.restoring import RestorableCheckpoint, as_recorded, read_restored
from simulation.storage import LONG_AGO, Metadata, is_savepoint
from simulation.task_data import TaskData
from simulation.violations import check

_REPEATABLE = frozenset({Acknowledged, Declined})
"""The reports that may be delivered a second time."""
_WITHOUT_UNION_STATES = CheckpointMetadata("simulated", 0, (), ())
"""The metadata of a pipeline without union list state."""


class Writer(Machine):
    """The uploads and the input/output thread of a process."""

    __slots__ = ()

    def report(self, attempt: int, event: object) -> None:
        """Queue an event of a task or an upload of this attempt."""
        item = TaskReport(attempt, event)  # type: ignore[arg-type]
        if type(event) in _REPEATABLE:
            self.sent_reports.append(item)
        self.queue.append(item)

    # Uploads

    def submit_upload(self, task: TaskData, action: StoreSnapshot, snapshot: Snapshot) -> None:
        self.uploads.append(Upload(task, action.barrier, snapshot, action.statistics))

    def may_upload(self, upload: Upload) -> bool:
        """Whether an upload can run; False if it has to wait for a deletion."""
        if not self.registry._deleting or upload.barrier.properties.is_savepoint:
            return True
        return not any(map(self.being_deleted, upload.snapshot.contents))

    def upload(self, task_number: int, checkpoint_id: int, attempt: int, outcome: str) -> bool:
        """End an upload. False if there is none, or it has to wait for a deletion."""
        wanted = (task_number, checkpoint_id, attempt)
        upload = next((u for u in self.uploads if (u.task.number, u.barrier.checkpoint_id, u.task.attempt) == wanted), None)
        if upload is None or not self.may_upload(upload):
            return False
        task, snapshot = upload.task.id, upload.snapshot
        event: Acknowledged | Declined = Acknowledged(task, checkpoint_id, snapshot, upload.statistics)
        try:
            snapshot.files = self._store_files(upload, outcome == OK)
        except StorageError:
            event = Declined(task, checkpoint_id, FailureReason.IO_EXCEPTION, "the upload failed")
        self.report(attempt, event)
        self.uploads.remove(upload)
        return True

    def _store_files(self, upload: Upload, uploaded: bool) -> tuple[str, ...]:
        """Store the files of a snapshot, or only some of them. Returns their names in storage."""
        checkpoint_id, names = upload.barrier.checkpoint_id, upload.snapshot.contents
        location, store = self.location_of(checkpoint_id), self.store
        if upload.barrier.properties.is_savepoint:
            if location in store.abandoned:
                raise CheckpointDiscarded
            self.mark_incomplete(location)
            if uploaded:
                store.objects.update(dict.fromkeys([f"{location}/state/{name}" for name in names]))
        else:
            steps = [store_file(self.names, self.registry, location, content) for content in (names if uploaded else names[:1])]
            names = tuple([str(drive(each, self.perform).name) for each in steps])
        if not uploaded:
            raise StorageUnavailable
        return names

    def location_of(self, checkpoint_id: int) -> str:
        """The location of a checkpoint or savepoint of this process."""
        return self._savepoints.get(checkpoint_id, f"checkpoints/chk-{checkpoint_id}-{self.epoch}")

    # Metadata

    def _write(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost], asked_to_end: frozenset[str]) -> Steps[None]:
        checkpoint_id, properties = snapshot.checkpoint_id, snapshot.properties
        self.metadata = metadata = self._metadata(snapshot, ghosts, asked_to_end)
        self.location = metadata.pointer.location
        result = yield from self.run(checkpoint_writing.write_checkpoint(checkpoint_id, properties))
        if result.keep:
            self._kept.add(checkpoint_id)
        outcome = result.outcome
        if isinstance(outcome, coordination.MetadataWritten) and properties.is_savepoint:
            self.store.report_savepoint(metadata.pointer.location)
        if isinstance(outcome, coordination.MetadataWritten) and properties.commits and not self.superseded:
            self._check_staged(metadata)
        closing = FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING
        if isinstance(outcome, coordination.MetadataWriteFailed) and outcome.reason is closing:
            stuck = self.config.checkpoints_after_tasks_finish and self._union_partly_finished(metadata)
            check(not stuck, f"no checkpoint is possible any more: {outcome.message}")
        self.queue.append(outcome)

    def _check_staged(self, metadata: Metadata) -> None:
        """The transactions of a completed checkpoint are staged or committed."""
        lost = self.world.lost_transactions(metadata)
        check(not lost, "{} is complete, and the transactions {} are lost", metadata.pointer.location, lost)

    def recorded_metadata(self) -> CheckpointMetadata:
        metadata = self.metadata
        before = self.restored.metadata.finished if self.restored is not None else frozenset()
        check(before <= metadata.finished, "{} had finished and run again", before - metadata.finished)
        if self.scenario.exactly_once:
            check_cut(self.shape, metadata)
            check_ends(self.shape, metadata)
        return as_recorded(metadata, self.shape) if self.world.has_union else _WITHOUT_UNION_STATES

    def _union_partly_finished(self, metadata: Metadata) -> bool:
        """Whether some, but not all, instances of a stage with union list state have finished: no checkpoint can complete."""
        recorded = zip(recorded_stages(self.shape.pipeline, self.shape.chains, metadata.finished), self.shape.stages, strict=True)
        return any(stage.finished and not stage.fully_finished for stage, spec in recorded if spec.kind == "union")

    def _metadata(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost], asked_to_end: frozenset[str]) -> Metadata:
        states: dict[TaskId, Any] = dict(snapshot.states)
        pointer = CheckpointPointer(
            checkpoint_id=snapshot.checkpoint_id,
            location=self.location_of(snapshot.checkpoint_id),
            kind=snapshot.properties.kind.value,
            epoch=self.epoch,
            job_id=self.job_id,
            completed_at=LONG_AGO,
        )
        return Metadata(
            pointer=pointer,
            variant=self.requested_start.variant,
            states=states,
            finished=frozenset(snapshot.plan.finished),
            ghosts={**ghosts, **{task: state.ghost for task, state in states.items()}},
            files=frozenset(file for state in states.values() for file in state.files),
            lineage=self.lineage,
            enumerators=snapshot.enumerators,
            ending=snapshot.ending,
            asked_to_end=asked_to_end,
            most_instances=self.plan.most_instances,
        )

    # The start

    def acquire(self) -> Steps[OwnershipSteps]:
        """Become the owner. The lease of another owner is read again once, at its end."""
        values = DriverValues(lambda: self.world.now, lambda: LONG_AGO, self.store.tokens.__next__)
        owner = Owner(run_id=str(self.number), host="", pid=0)
        named = self.requested_start.restore_from != "latest"
        return self.run(acquisition.acquire(StatePlace("simulated", "", ""), owner, LEASE, values, poll=LEASE, start_named=named))

    def restorable(self, location: str) -> RestorableCheckpoint:
        """A checkpoint or savepoint from which the pipeline can start; its shared files are kept from now on.

        Raises:
            RestoreError: it does not fit, or cannot be restored with other numbers of instances.
        """
        shapes, variant = self.world.shapes, self.requested_start.variant
        restored = read_restored(self.store, location, shapes, variant, self.most_instances)
        metadata = restored.metadata
        self.world.counts["divisions"] += bool(restored.plan.divided)
        before = self.store.check_complete(location)
        recorded = shapes[before.variant]
        if recorded.instances != shapes[metadata.variant].instances:
            self.world.counts["rescalings"] += 1
            waiting = any(pinned.in_flight for state in metadata.states.values() for pinned in state.channels.values())
            self.world.counts["rescalings in flight"] += waiting
            readers = {spec.id for spec in recorded.tasks if spec.inputs}
            ended = {task for task in readers if task not in before.states or before.states[task].after_finish}
            run_again = ended & restored.plan.tasks.keys() - restored.plan.after_finish
            self.world.counts["rescalings of ended instances"] += bool(run_again)
        if metadata.variant != variant and keeps_layout(shapes[metadata.variant], shapes[variant]):
            # The user has taken the change back: the chains stay divided.
            variant = metadata.variant
            self.requested_start = msgspec.structs.replace(self.requested_start, variant=variant)
            self.shape = shapes[variant]
        if not is_savepoint(location):
            self.register(location)
        pointer = msgspec.structs.replace(metadata.pointer, location=location)
        return RestorableCheckpoint(restored, pointer, location, is_savepoint(location), not location.startswith("elsewhere/"))

    def register(self, location: str) -> None:
        """Keep the shared files of a checkpoint from deletion, and note how many instances its stages have had."""
        metadata = self.store.check_complete(location)
        self.registry.register(location, metadata.files)
        shape = self.world.shapes[metadata.variant]
        note_instances(with_uids(as_recorded(metadata, shape), shape.pipeline), self.most_instances)

    # Deletion

    def delete(self, location: str) -> Steps[int]:
        retained = [c.location for c in self.coordinator.completed]
        check(location not in retained, "{} is deleted, and is still retained", location)
        return (yield from self.run(checkpoint_deletion.delete_checkpoint(location, is_savepoint(location))))

    def mark_incomplete(self, location: str) -> None:
        self.store.objects[f"{location}/_incomplete"] = checkpoint_deletion.IncompleteMark("simulated", self.epoch)

    def discard_savepoint(self, checkpoint_id: int) -> Steps[None]:
        location = self._savepoints.get(checkpoint_id)
        if location is not None and checkpoint_id not in self._kept:
            self.store.abandoned.add(location)
            yield from self.delete_savepoint(location)

    def delete_savepoint(self, location: str) -> Steps[None]:
        self.location = location
        return self.run(checkpoint_deletion.delete_savepoint(location.startswith("savepoints/")))
