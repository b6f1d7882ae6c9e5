"""What a task is made of: put together by the deployment, used by the task; it does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.pipeline import Chain, Pipeline, Stage, TaskId
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader
from dagster_checkpoints.spark.tasks.messages import SendReport
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.spark.tasks.task_sink import TaskSink
from dagster_checkpoints.state import TaskSnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class StageInstance:
    """One stage of the chain in this task: the user's object (a copy of its own), opened, and its state."""

    stage: Stage
    call: StageCall
    state: OperatorStateStore


@dataclass(frozen=True)
class TaskParts:
    """What a task is made of; put together by the deployment.

    Attributes:
        folder: Its own, empty directory below the work directory.
        plan: Of its query; None while it waits for static inputs, and for a task restored after its finish.
        described: What the state and the offsets of its query depend on; None for a task restored after its finish.
        restored: Its snapshot, if the job was restored.
        take_back_after: See `TaskSink.open`.
        transaction_files: Of a savepoint's transactions, by position and name, fetched.
        make_machine: Makes the task's machine, recorded if the run is: takes the time, seconds, and by name the machine's
            arguments.
    """

    id: TaskId
    chain: Chain
    pipeline: Pipeline
    instances: tuple[StageInstance, ...]
    folder: Path
    spark: SparkSession
    output: TaskOutput
    sink: TaskSink | None
    plan: plans.QueryPlan | None
    described: PlanDescription | None
    restored: TaskSnapshot | None
    uploader: SnapshotUploader
    report: SendReport
    take_back_after: int | None
    transaction_files: Mapping[int, Mapping[str, Path]]
    make_machine: Callable[..., TaskMachine]

    @property
    def finished_before(self) -> bool:
        """Whether the checkpoint holds its finished operators: it starts no query, and only waits for its final checkpoint."""
        return self.restored is not None and self.restored.end_of_data == "drain"
