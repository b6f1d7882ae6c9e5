"""One attempt to run a pipeline: from stages and a checkpoint to tasks that are ready to start.

Decides which stages share a query, lets Spark check the plans, connects the channels, and puts restored files in place. The
plans come from `attempt_plans`, the state from `restored_state`. It must not know the coordinator's rules, nor start anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.execution.trace import Recorder, made
from dagster_checkpoints.pipeline import (
    Chain,
    ExecutionGraph,
    Pipeline,
    StageContext,
    StageKind,
    TaskId,
    build_chains,
    execution_graph,
)
from dagster_checkpoints.spark.channels.channel_wiring import Wiring
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.spark.errors import PlanRefusedError, StageError
from dagster_checkpoints.spark.job.attempt_plans import AttemptPlans
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.plan_report import PlanReport
from dagster_checkpoints.spark.query.stage_calls import StageCall, open_stage
from dagster_checkpoints.spark.snapshots.query_snapshots import relocate
from dagster_checkpoints.spark.snapshots.restored_state import Restored, RestoredState, late_rows_of_finished, rows_of_finished
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader
from dagster_checkpoints.spark.tasks.channel_task import ChannelTask
from dagster_checkpoints.spark.tasks.messages import SendReport
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.spark.tasks.source_task import BatchTask, SourceTask
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.spark.tasks.task_parts import StageInstance, TaskParts
from dagster_checkpoints.spark.tasks.task_sink import TaskSink, sink_context
from dagster_checkpoints.state import RestoreError, TaskSnapshot
from dagster_checkpoints.storage import CheckpointStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class AttemptSettings:
    """The identity of one attempt, and the settings that its tasks need.

    Attributes:
        folder: The attempt's new work directory.
        number: The attempt's number over all runs; the watermark sources emit again when it changes.
        token: A text that differs between any two attempts of all runs.
        job_id: The job's id.
        max_queued_bytes: Size of the unread segments of a channel, in bytes, from which its producer waits.
        take_back_after: The id of the restored checkpoint if the job had completed later ones; None otherwise.
        ended_sources: The sources (stage, instance) that a request has ended before a restart: they read their available input,
            and end.
        allow_changed_plan: Whether restored state may continue under another plan.
        recorder: Writes the run's trace; None for no trace.
    """

    folder: Path
    number: int
    token: str
    job_id: int
    max_queued_bytes: int
    take_back_after: int | None = None
    ended_sources: frozenset[tuple[str, str]] = frozenset()
    allow_changed_plan: bool = False
    recorder: Recorder | None = None


@dataclass
class Deployment:
    """The tasks of one attempt, not yet started.

    Attributes:
        graph: The execution graph of the attempt.
        chains: The chains, producers before consumers.
        tasks: The tasks that are not finished.
        finished: The tasks that had finished at the restored checkpoint; they have no task object.
        schemas: The output schema of each chain's last stage.
        rows_of_finished: The number of rows that finished tasks had emitted, by stage; for reports.
        late_rows_of_finished: The number of late rows that finished tasks had dropped, by stage; for reports.
        finished_sinks: The sinks of finished tasks, each with the id of the restored checkpoint: they show the rows committed up
            to that checkpoint, and no others.
    """

    graph: ExecutionGraph
    chains: tuple[Chain, ...]
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    finished: frozenset[TaskId] = frozenset()
    schemas: dict[str, StructType] = field(default_factory=dict)
    rows_of_finished: dict[str, int] = field(default_factory=dict)
    late_rows_of_finished: dict[str, int] = field(default_factory=dict)
    finished_sinks: list[tuple[TaskSink, int]] = field(default_factory=list)

    def settle_finished_sinks(self) -> None:
        """Make the sinks of finished tasks show exactly the rows of the restored checkpoint, which may be older than the newest.

        Raises:
            SinkError: Rows that are needed again have been deleted.
        """
        for sink, restored in self.finished_sinks:
            sink.open((), restored)
            sink.close()


class Deployer:
    """Builds deployments of one pipeline.

    Args:
        pipeline: The pipeline.
        spark: The session in which the tasks run.
        storage: The storage of restored state; None if plans are only checked.
        log: The logger of the stages' `context.log`.
        check_canceled: Raises if the job was cancelled; called between two tasks.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        storage: CheckpointStorage | None,
        log: logging.Logger,
        check_canceled: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_canceled = check_canceled
        self._pipeline = pipeline
        self._spark = spark
        self._storage = storage
        self._log = log
        self._breaks: frozenset[str] = frozenset()
        self._warned: set[str] = set()

    def deploy(
        self, settings: AttemptSettings, restored: Restored | None, uploader: SnapshotUploader, report: SendReport
    ) -> Deployment:
        """Build the tasks.

        Raises:
            StageError: A stage cannot be built; nothing was started.
            StorageError: State cannot be fetched, or is corrupt.
        """
        while True:
            chains = self._chains(restored)
            attempt = _Attempt(self._pipeline, self._spark, self._storage, self._log, self._warned, settings, restored, chains)
            try:
                return attempt.build(uploader, report, self._check_canceled)
            except plans.RefusedAtStage as refused:
                if restored is not None:
                    raise self._refused(refused) from refused
                self._breaks |= {refused.stage}
                attempt.discard()

    def check(self, restored: Restored | None = None) -> PlanReport:
        """Build the plans of a start with the same steps as :meth:`deploy`, and start nothing.

        Every stage's `open`, `transform` and `close` are called; storage and sinks are not touched.

        Args:
            restored: The checkpoint whose state the plans have to fit; None for a new start. No state is fetched.
        """
        settings = AttemptSettings(Path(), number=1, token="", job_id=0, max_queued_bytes=1)
        while True:
            chains = self._chains(restored)
            attempt = _Attempt(self._pipeline, self._spark, self._storage, self._log, self._warned, settings, restored, chains)
            try:
                return attempt.check()
            except plans.RefusedAtStage as refused:
                if restored is not None:
                    raise self._refused(refused) from refused
                self._breaks |= {refused.stage}
            finally:
                attempt.discard()

    def _refused(self, refused: plans.RefusedAtStage) -> PlanRefusedError:
        return PlanRefusedError(
            refused.stage,
            self._pipeline.stage(refused.stage).instances[0],
            f"Spark refuses the plan that the checkpoint was taken with: {refused.reason}",
        )

    def _chains(self, restored: Restored | None) -> tuple[Chain, ...]:
        if restored is None:
            return build_chains(self._pipeline, self._breaks)
        plan = restored.plan
        layout = [*plan.chains, *plan.finished_chains, *((name,) for name in plan.new_stages)]
        chains = [Chain(stages[0], stages, self._pipeline.stage(stages[0]).instances) for stages in layout]
        return tuple(chains)


class _Attempt:
    """The building of one deployment."""

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        storage: CheckpointStorage | None,
        log: logging.Logger,
        warned: set[str],
        settings: AttemptSettings,
        restored: Restored | None,
        chains: tuple[Chain, ...],
    ) -> None:
        self.pipeline = pipeline
        self.spark = spark
        self.storage = storage
        self.log = log
        self.settings = settings
        self.restored = restored
        graph = execution_graph(pipeline, chains)
        order = {vertex.name: position for position, vertex in enumerate(graph.vertices)}
        self.chains = tuple(sorted(chains, key=lambda chain: order[chain.name]))
        self.state = RestoredState(pipeline, storage, restored)
        finished = frozenset(restored.plan.finished if restored else ())
        snapshots = restored.plan.tasks if restored else {}
        self.wiring = Wiring(pipeline, self.chains, snapshots, finished)
        self.plans = AttemptPlans(
            pipeline,
            spark,
            self._instance,
            log,
            warned,
            self.wiring,
            restored,
            attempt=settings.number,
            allow_changed_plan=settings.allow_changed_plan,
        )
        self.deployment = Deployment(graph, self.chains, finished=finished, schemas=self.plans.schemas)
        self._opened: list[StageInstance] = []
        if restored:
            self.deployment.rows_of_finished = rows_of_finished(restored.metadata)
            self.deployment.late_rows_of_finished = late_rows_of_finished(restored.metadata)

    def build(self, uploader: SnapshotUploader, report: SendReport, check_canceled: Callable[[], None]) -> Deployment:
        try:
            for chain in self.chains:
                for index in range(len(chain.instances)):
                    check_canceled()
                    task = TaskId(chain.name, index)
                    if task not in self.deployment.finished:
                        self.deployment.tasks[task] = self._task(chain, index, uploader, report)
                self.plans.load_recorded_schema(chain)
                self._sinks_of_finished(chain)
        except BaseException:
            self.discard()
            raise
        return self.deployment

    def check(self) -> PlanReport:
        """Build every plan whose inputs' columns are known; creates no tasks."""
        report = PlanReport(self.chains)
        for chain in self.chains:
            head = self.pipeline.stage(chain.stages[0])
            missing = next((name for name in head.inputs if name not in report.passed), None)
            if missing is not None:
                report.skip(chain.stages, missing)
                continue
            try:
                for index in range(len(chain.instances)):
                    if not self._needs_no_plan(TaskId(chain.name, index)):
                        inputs = self.plans.inputs(chain, index)
                        self.plans.checked(chain, index, inputs, self._instances(chain, index, None))
                self.plans.load_recorded_schema(chain)
            except StageError as error:
                report.fail(chain.stages, error)
            except RestoreError as error:
                report.changed.append(error)
                report.passed.update(dict.fromkeys(chain.stages))
            else:
                report.passed.update(dict.fromkeys(chain.stages))
        return report

    def _needs_no_plan(self, task: TaskId) -> bool:
        """Whether the task has finished, or has finished its data and waits for its final checkpoint."""
        return task in self.deployment.finished or (self.restored is not None and task in self.restored.plan.after_finish)

    def discard(self) -> None:
        """Close what was opened for a deployment that is not completed."""
        for instance in self._opened:
            instance.stage.close()
        self._opened.clear()
        self.wiring.close()

    def _task(self, chain: Chain, index: int, uploader: SnapshotUploader, report: SendReport) -> Task:
        task = TaskId(chain.name, index)
        snapshot = self.restored.plan.tasks.get(task) if self.restored else None
        folder = self.settings.folder / "tasks" / f"{chain.name}.{index}"
        after_finish = snapshot is not None and snapshot.end_of_data == "drain"
        if snapshot is not None and snapshot.query is not None and not after_finish:
            self.state.fetch(snapshot.query.files, folder / "checkpoint")
            relocate(folder / "checkpoint")
        tables = self.state.tables(snapshot, folder)
        inputs = self.plans.inputs(chain, index)
        self.wiring.restore_in_flight(task, snapshot, folder, self.state.fetch_segments)
        instances = self._instances(chain, index, snapshot)
        plan, described = (None, None) if after_finish else self.plans.checked(chain, index, inputs, instances)
        self.plans.load_recorded_schema(chain)
        sink = self._sink(chain, index)
        output = TaskOutput(
            folder / "segments",
            self.wiring.outputs(task),
            sink.write if sink else None,
            self.settings.max_queued_bytes,
        )
        parts = TaskParts(
            id=task,
            chain=chain,
            pipeline=self.pipeline,
            instances=instances,
            folder=folder,
            spark=self.spark,
            output=output,
            sink=sink,
            plan=plan,
            described=described,
            restored=snapshot if snapshot is not None else (_EMPTY if self.restored else None),
            uploader=uploader,
            report=report,
            take_back_after=self.settings.take_back_after,
            transaction_files=self.state.transactions(chain, snapshot, folder),
            make_machine=partial(made, TaskMachine, f"{task} {self.settings.token}", self.settings.recorder),
        )
        if not inputs:
            return self._source_task(parts)
        channel_task = ChannelTask(parts, inputs, lambda files: self.plans.build(instances, inputs, files), tables)
        for task_input in inputs:
            for channel in task_input.channels:
                channel.on_append = channel_task.wake_up
        return channel_task

    def _source_task(self, parts: TaskParts) -> Task:
        if parts.plan is not None and not parts.plan.streaming:
            return BatchTask(parts)
        stage = parts.instances[0].stage
        bounded = stage.kind is StageKind.BOUNDED_SOURCE
        ended = (stage.name, stage.instances[parts.id.index]) in self.settings.ended_sources
        return SourceTask(parts, bounded=bounded or ended)

    # Stages

    def _instances(self, chain: Chain, index: int, snapshot: TaskSnapshot | None) -> tuple[StageInstance, ...]:
        instances = []
        for name in chain.stages:
            restored = snapshot.stages.get(name) if snapshot else None
            own = restored.operator_states if restored else ()
            instance = self._instance(name, index, OperatorStateStore(self.state.operator_states(name, index), own))
            open_stage(instance.call)
            self._opened.append(instance)
            instances.append(instance)
        return tuple(instances)

    def _instance(self, name: str, index: int, state: OperatorStateStore) -> StageInstance:
        stage = self.pipeline.stage(name)
        context = StageContext(
            spark=self.spark,
            stage=name,
            instance=stage.instances[index],
            index=index,
            parallelism=stage.parallelism,
            state=state,
            log=self.log,
        )
        own = stage.for_instance()
        return StageInstance(own, StageCall(own, context), state)

    def _sink(self, chain: Chain, index: int) -> TaskSink | None:
        stage = self.pipeline.stage(chain.stages[-1])
        if stage.sink is None:
            return None
        ownership = self.storage.ownership if self.storage else None
        context = sink_context(self.pipeline, stage, index, ownership, self.settings.job_id, self.settings.token)
        schema = self.deployment.schemas.get(stage.name, StructType())  # a finished stage writes nothing, and may have none
        return TaskSink(stage.sink.new_instance(), context, self.spark, schema)

    def _sinks_of_finished(self, chain: Chain) -> None:
        restored = self.settings.take_back_after
        if restored is None:
            return
        for index in range(len(chain.instances)):
            sink = self._sink(chain, index) if TaskId(chain.name, index) in self.deployment.finished else None
            if sink is not None:
                self.deployment.finished_sinks.append((sink, restored))


_EMPTY = TaskSnapshot()
