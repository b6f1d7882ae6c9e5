"""The parts of a task, which the deployment assembles and the task uses; values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.execution.attempt_plan import TaskPlan
from dagster_checkpoints.execution.task_machine import TaskMachine, TaskTraits
from dagster_checkpoints.pipeline import Chain, Pipeline, Stage, TaskId
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.spark.files.work_path import WorkFolder
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader
from dagster_checkpoints.spark.tasks.messages import SendReport
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.spark.tasks.task_sink import TaskSink
from dagster_checkpoints.state.metadata import TaskSnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class StageInstance:
    """One stage of the chain in this task: this instance's copy of the user's object, opened, and its state."""

    stage: Stage
    call: StageCall
    state: OperatorStateStore

    def close(self) -> None:
        """Close the stage. An error is logged: it must not hide the one because of which the stage ends."""
        try:
            self.stage.close()
        except Exception as error:
            self.call.context.log.warning("close() of stage %s raised %r", self.stage.name, error)


@dataclass(frozen=True)
class TaskParts:
    """The parts of a task.

    Attributes:
        planned: What the task begins with.
        pipeline: The pipeline.
        instances: The stages of the chain, opened, in the chain's order.
        folder: The task's directories, which hold only what was restored.
        spark: The session in which the task runs.
        output: Writes the task's rows to channels and the sink.
        sink: The sink of the last stage; None if it has none.
        plan: The plan of the task's query; None while it waits for static inputs, and for a task restored after its finish.
        described: The facts that the query's state and offsets depend on; None for a task restored after its finish.
        uploader: Stores the task's snapshots.
        report: Receives the task's reports.
        transaction_files: The fetched files of a savepoint's transactions, by position and name.
        checkpoints: The job's settings of checkpoints.
        make_machine: Creates the task's machine, which a recorded run records; it takes the time, seconds, and the machine's
            arguments by name.
        burst: Whether unbounded sources are read up to what is there when the task begins.
    """

    planned: TaskPlan
    pipeline: Pipeline
    instances: tuple[StageInstance, ...]
    folder: WorkFolder
    spark: SparkSession
    output: TaskOutput
    sink: TaskSink | None
    plan: plans.QueryPlan | None
    described: PlanDescription | None
    uploader: SnapshotUploader
    report: SendReport
    transaction_files: Mapping[int, Mapping[str, Path]]
    checkpoints: CheckpointConfig
    make_machine: Callable[..., TaskMachine]
    burst: bool = False

    @property
    def id(self) -> TaskId:
        """The task's id."""
        return self.planned.id

    @property
    def chain(self) -> Chain:
        """The chain of which the task runs an instance."""
        return self.planned.chain

    @property
    def restored(self) -> TaskSnapshot | None:
        """The task's snapshot; None if the job was not restored."""
        return self.planned.snapshot

    @property
    def finished_before(self) -> bool:
        """Whether the restored stages had finished: the task starts no query, and only waits for its final checkpoint."""
        return self.planned.after_finish

    def traits(self, *, bounded: bool = False, streaming: bool = True, max_rows: int | None = None) -> TaskTraits:
        """How the task differs from others; see :class:`TaskTraits`."""
        return TaskTraits(bounded, streaming, self.finished_before, max_rows, self.burst)
