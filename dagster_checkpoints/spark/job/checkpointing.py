"""Writes a fully acknowledged checkpoint or savepoint, and deletes checkpoints.

Performs the steps of :mod:`dagster_checkpoints.execution.checkpoint_writing`. It must not know when checkpoints are taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointSnapshot, CompletedCheckpoint, TaskStatistics
from dagster_checkpoints.coordination.events import MetadataOutcomeUnknown, MetadataWriteFailed, MetadataWritten
from dagster_checkpoints.execution.checkpoint_deletion import (
    DiscardMetadata,
    DiscardPendingFiles,
    DiscardSavepoint,
    discard_states,
)
from dagster_checkpoints.execution.checkpoint_writing import (
    BuildMetadata,
    CompleteCheckpoint,
    ReserveId,
    StoreMetadata,
    StoreSavepoint,
    write_checkpoint,
)
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.pipeline import TaskId, total_rows
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.runtime import Runtime
from dagster_checkpoints.state.metadata import CheckpointMetadata, TaskSnapshot, task_files
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.state.recording import ended_sources, recorded_chains, recorded_enumerators, recorded_stages
from dagster_checkpoints.state.row_counts import rows_in_snapshot
from dagster_checkpoints.state.stage_names import with_uids

Outcome = MetadataWritten | MetadataWriteFailed | MetadataOutcomeUnknown


class CheckpointWriter:
    """Writes the checkpoints of one job.

    Args:
        runtime: The values of the run.
        job_id: The job's id.
        spark_version: Spark's version, for display.
    """

    def __init__(self, runtime: Runtime, job_id: int, spark_version: str) -> None:
        self._runtime = runtime
        self.job_id = job_id
        self._spark_version = spark_version
        self._deployment: Deployment | None = None

    def deployed(self, deployment: Deployment) -> None:
        """Take over the deployment whose chains the next checkpoints hold."""
        self._deployment = deployment

    def write(self, snapshot: CheckpointSnapshot, finished: frozenset[TaskId]) -> Outcome:
        """Write the metadata, then make `state.json` name it. Never raises: errors are in the outcome.

        A savepoint that does not stop the job is complete with its metadata: no restart begins from it.
        """
        ownership = self._runtime.ownership
        built: list[CheckpointMetadata] = []

        def perform(request: object) -> object:
            match request:
                case BuildMetadata():
                    built.append(self.metadata(snapshot, finished))
                    return built[0]
                case ReserveId(checkpoint_id):
                    ownership.reserve(checkpoint_id)
                case StoreMetadata(checkpoint_id):
                    return self._runtime.storage.write_metadata(checkpoint_id, ownership.epoch, self._encoded(built[0]))
                case StoreSavepoint():
                    return self._store_savepoint(snapshot, built[0])
                case CompleteCheckpoint(checkpoint_id, location, kind):
                    return ownership.complete(checkpoint_id, location, kind=kind)
                case _:
                    raise TypeError(f"expected a request of the writing of a checkpoint, found {request!r}")
            return None

        result = drive(write_checkpoint(snapshot.checkpoint_id, snapshot.properties), perform)
        if result.keep:
            self._runtime.savepoints.keep(snapshot.checkpoint_id)
        return result.outcome

    def _store_savepoint(self, snapshot: CheckpointSnapshot, metadata: CheckpointMetadata) -> str:
        directory = self._runtime.savepoints.directory(snapshot.checkpoint_id, snapshot.properties)
        files = {
            file.sha256: file.size for chain in metadata.chains for task in chain.tasks.values() for file in task_files(task)
        }
        return directory.write_metadata(self._encoded(metadata), files)

    def _encoded(self, metadata: CheckpointMetadata) -> bytes:
        return encode(with_uids(metadata, self._runtime.pipeline))

    def metadata(self, snapshot: CheckpointSnapshot, finished: frozenset[TaskId]) -> CheckpointMetadata:
        """The checkpoint's metadata, from the acknowledgements of the tasks."""
        deployment = self._deployment
        assert deployment is not None
        states: dict[TaskId, Any] = dict(snapshot.states)
        schemas = {name: json.dumps(schema.jsonValue()) for name, schema in deployment.schemas.items()}
        enumerators = recorded_enumerators(snapshot.enumerators, states)
        stages = tuple(
            msgspec.structs.replace(
                stage,
                output_schema=schemas.get(stage.name, ""),
                rows=self._rows(deployment, stage.name, states),
                late_rows=self._late_rows(deployment, stage.name, states),
                most_instances=deployment.plan.most_instances.get(stage.name, 0),
            )
            for stage in recorded_stages(
                self._runtime.pipeline,
                deployment.chains,
                finished,
                ended_sources(states.values()),
                deployment.plan.recorded_key_groups,
                enumerators,
                snapshot.ending,
            )
        )
        measured = TaskStatistics.of_all(snapshot.statistics.values())
        now = time.time()
        return CheckpointMetadata(
            pipeline=self._runtime.pipeline.name,
            checkpoint_id=snapshot.checkpoint_id,
            stages=stages,
            chains=recorded_chains(deployment.chains, states),
            kind=snapshot.properties.kind.value,
            job_id=str(self.job_id),
            run_id=self._runtime.run_id,
            epoch=self._runtime.ownership.epoch,
            triggered_at=now - (time.monotonic() - snapshot.triggered_at),
            completed_at=now,
            spark_version=self._spark_version,
            statistics={
                "new_bytes": float(measured.new_bytes),
                "total_bytes": float(measured.total_bytes),
                "in_flight_bytes": float(measured.in_flight_bytes),
                "sync_seconds": measured.sync_seconds,
            },
        )

    @staticmethod
    def _rows(deployment: Deployment, stage: str, states: Mapping[TaskId, TaskSnapshot]) -> int | None:
        """The number of rows that a stage had emitted at the checkpoint: by snapshots, and by tasks that had finished."""
        counts = [deployment.rows_of_finished.get(stage, 0)]
        chain = next(c for c in deployment.chains if stage in c.stages)
        for task in (TaskId(chain.name, index) for index in range(len(chain.instances))):
            if task in states and stage in states[task].stages:  # it is not there if it is a fused source that has ended
                counts.append(rows_in_snapshot(states[task], stage))
            elif task in deployment.tasks:
                counts.append(deployment.tasks[task].rows_of(stage))
        return total_rows(counts)

    @staticmethod
    def _late_rows(deployment: Deployment, stage: str, states: Mapping[TaskId, TaskSnapshot]) -> int:
        """The number of late rows that a stage had dropped at the checkpoint: by snapshots, and by tasks that had finished."""
        rows = deployment.late_rows_of_finished.get(stage, 0)
        chain = next(c for c in deployment.chains if stage in c.stages)
        for task in (TaskId(chain.name, index) for index in range(len(chain.instances))):
            if task in states:
                held = states[task].stages.get(stage)  # none for a fused source that has ended
                rows += held.late_rows if held is not None else 0
            elif task in deployment.tasks:
                rows += deployment.tasks[task].late_rows.of(stage)
        return rows

    def delete(self, checkpoint: CompletedCheckpoint) -> None:
        """Delete a checkpoint that is no longer retained, and the files that only this checkpoint names."""
        self._runtime.storage.delete_checkpoint(checkpoint.location)

    def discard_states(self, checkpoint_id: int) -> None:
        """Delete the files that only an aborted checkpoint or savepoint names."""

        def perform(request: DiscardSavepoint | DiscardMetadata | DiscardPendingFiles) -> int:
            match request:
                case DiscardSavepoint():
                    self._runtime.savepoints.discard(checkpoint_id)
                case DiscardMetadata():
                    self._runtime.storage.discard_metadata(checkpoint_id)
                case DiscardPendingFiles():
                    return self._runtime.storage.discard_states(checkpoint_id)
            return 0

        drive(discard_states(checkpoint_id, self._runtime.ownership.ensure), perform)
