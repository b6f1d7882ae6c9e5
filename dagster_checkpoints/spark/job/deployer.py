"""One attempt to run a pipeline: from stages and a checkpoint to tasks that are ready to start.

Performs the plan of an attempt (`execution.attempt_plan`): lets Spark check the plans of its queries, connects the channels, and
puts restored files in place. The plans of queries come from `query_plans`, the state from `restored_state`. It must not know
the coordinator's rules, nor start anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from pyspark.sql.types import StructType

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.execution.attempt_plan import AttemptPlan, TaskPlan, plan_attempt, separate_queries
from dagster_checkpoints.execution.task_machine import TaskMachine, config_of_task
from dagster_checkpoints.execution.trace import made
from dagster_checkpoints.pipeline import Chain, Pipeline, TaskId, channel_reasons
from dagster_checkpoints.spark.channels.channel_wiring import Wiring
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.spark.errors import PlanRefusedError, StageError
from dagster_checkpoints.spark.files.work_path import WorkFolder, WorkPath
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.query_plans import QueryPlans
from dagster_checkpoints.spark.job.runtime import AttemptSettings, OnceLog
from dagster_checkpoints.spark.job.stage_instances import StageInstances
from dagster_checkpoints.spark.job.task_sinks import SettledSink, TaskSinks
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.spark.query.plan_report import PlanReport
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS
from dagster_checkpoints.spark.query.restored_plans import forgotten_sources
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.snapshots.rescaled_state import RescaledState
from dagster_checkpoints.spark.snapshots.restored_state import Restored, RestoredState, late_rows_of_finished
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader
from dagster_checkpoints.spark.tasks.channel_task import ChannelTask
from dagster_checkpoints.spark.tasks.fused_task import FusedTask
from dagster_checkpoints.spark.tasks.messages import SendReport
from dagster_checkpoints.spark.tasks.source_task import BatchTask, SourceTask
from dagster_checkpoints.spark.tasks.split_task import SplitTask
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.spark.tasks.task_parts import TaskParts
from dagster_checkpoints.spark.tasks.task_sink import TaskSink
from dagster_checkpoints.state.errors import RestoreError
from dagster_checkpoints.state.metadata import LastCommit
from dagster_checkpoints.state.row_counts import rows_of_finished
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
        self._once = OnceLog(log)
        self._apart = dict(channel_reasons(pipeline))
        """By stage that could have shared the query of its inputs, why it begins one of its own."""
        self._breaks: frozenset[str] = frozenset()

    def deploy(
        self, settings: AttemptSettings, restored: Restored | None, uploader: SnapshotUploader, report: SendReport
    ) -> Deployment:
        """Build the tasks.

        Raises:
            StageError: A stage cannot be built; nothing was started.
            StorageError: State cannot be fetched, or is corrupt.
        """
        while True:
            attempt = self._attempt(settings, restored)
            try:
                deployment = attempt.build(uploader, report, self._check_canceled)
            except RefusedAtStage as refused:
                self._refuse(refused, restored)
                attempt.remove_folders()
            else:
                self._note_queries(restored)
                return deployment

    def check(self, restored: Restored | None = None) -> PlanReport:
        """Build the plans of a start with the same steps as :meth:`deploy`, and start nothing.

        Every stage's `open`, `transform` and `close` are called; storage and sinks are not touched.

        Args:
            restored: The checkpoint whose state the plans have to fit; None for a new start. No state is fetched.
        """
        while True:
            attempt = self._attempt(_TRIAL, restored)
            try:
                checked = attempt.check()
            except RefusedAtStage as refused:
                self._refuse(refused, restored)
            else:
                checked.changes = tuple(self._separate(restored))
                checked.apart = self._apart if restored is None else {}
                self._warn_of_fuse()
                return checked
            finally:
                attempt.discard()

    def as_one_query(self, chain: Chain) -> tuple[QueryPlan, PlanDescription]:
        """The plan of stages as one query, whether they run as one or not; starts nothing.

        Args:
            chain: The stages.

        Raises:
            StageError, RefusedAtStage: Spark does not accept the plan.
        """
        attempt = self._attempt(_TRIAL, None)
        try:
            return attempt.plans.as_one_query(chain, 0)
        finally:
            attempt.discard()

    def _attempt(self, settings: AttemptSettings, restored: Restored | None) -> _Attempt:
        plan = plan_attempt(
            self._pipeline,
            restored.plan if restored is not None else None,
            breaks=self._breaks,
            vertices=settings.vertices,
            ended_sources=settings.ended_sources,
            has_later=settings.has_later,
            next_checkpoint_id=settings.next_checkpoint_id,
        )
        return _Attempt(self._pipeline, self._spark, self._storage, self._once, settings, restored, plan)

    def _refuse(self, refused: RefusedAtStage, restored: Restored | None) -> None:
        """Let stages have separate queries that Spark cannot run as one; raise if the checkpoint needs one query for them."""
        if restored is not None:
            raise PlanRefusedError(
                refused.stage,
                self._pipeline.stage(refused.stage).instances[0],
                f"Spark refuses the plan that the checkpoint was taken with: {refused.reason}",
            ) from refused
        self._apart[refused.stage] = refused.reason
        self._breaks |= {refused.stage}

    def _separate(self, restored: Restored | None) -> list[str]:
        """In words, which stages share a query in a new start, as far as is known, and have separate ones in the checkpoint."""
        if restored is None:
            return []
        return [
            f"{upstream!r} and {head!r} keep separate queries, as in the checkpoint. In a new start, for example after a drain, "
            "they share one, which is faster."
            for upstream, head in separate_queries(self._pipeline, restored.plan, self._breaks)
        ]

    def _note_queries(self, restored: Restored | None) -> None:
        """Log once in a run which stages do not share a query, and why."""
        self._warn_of_fuse()
        reasons = self._apart.items() if restored is None else ()
        for text in [*(f"Stage {name!r} begins a query of its own: {why}." for name, why in reasons), *self._separate(restored)]:
            self._once(logging.INFO, text)

    def _warn_of_fuse(self) -> None:
        """Warn of inputs with fuse=True that are read through channels."""
        for name, why in self._apart.items():
            asked = [upstream for upstream, how in self._pipeline.stage(name).inputs.items() if how.fuse]
            text = f"Stage {name!r} reads {', '.join(map(repr, asked))} through channels, in spite of fuse=True: {why}."
            if asked:
                self._once(logging.WARNING, text)


class _Attempt:
    """The building of one deployment."""

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        storage: CheckpointStorage | None,
        once: OnceLog,
        settings: AttemptSettings,
        restored: Restored | None,
        plan: AttemptPlan,
    ) -> None:
        self.pipeline = pipeline
        self.spark = spark
        self.storage = storage
        self.settings = settings
        self.restored = restored
        self.sinks = TaskSinks(pipeline, spark, storage.ownership if storage else None, settings)
        self.plan = plan
        partitions = int(spark.conf.get(STATE_PARTITIONS) or 1) if settings.options.repartition_state else None
        self.state = RestoredState(pipeline, storage, restored, partitions)
        self.instances = StageInstances(pipeline, spark, self.state, once.log, settings.options.assets)
        snapshots = restored.plan.tasks if restored else {}
        self.wiring = Wiring(pipeline, plan.chains, snapshots, plan.finished, plan.key_groups)
        self.plans = QueryPlans(pipeline, spark, self.instances.of, once, self.wiring, restored, settings)
        self.deployment = Deployment(plan, finished=plan.finished, schemas=self.plans.schemas)
        self._rescaled_state = RescaledState(spark, self.state, settings.folder, once.log)
        if restored:
            self.deployment.rows_of_finished = rows_of_finished(restored.metadata)
            self.deployment.late_rows_of_finished = late_rows_of_finished(restored.metadata)

    def build(self, uploader: SnapshotUploader, report: SendReport, check_canceled: Callable[[], None]) -> Deployment:
        try:
            for chain in self.plan.built:
                for task in self._tasks_of(chain):
                    check_canceled()
                    self.deployment.tasks[task.id] = self._task(task, uploader, report)
                self.plans.load_recorded_schema(chain)
                self._settle(chain)
        except BaseException:
            self.discard()
            raise
        return self.deployment

    def check(self) -> PlanReport:
        """Build every plan whose inputs' columns are known; creates no tasks."""
        report = PlanReport(self.plan.chains, schemas=self.plans.schemas)
        for chain in self.plan.chains:
            head = self.pipeline.stage(chain.stages[0])
            missing = next((name for name in head.inputs if name not in report.passed), None)
            if missing is not None:
                report.skip(chain.stages, missing)
                continue
            try:
                for task in self._tasks_of(chain):
                    index = task.id.index
                    if not task.after_finish:
                        inputs = self.plans.inputs(chain, index)
                        plan, _ = self.plans.checked(chain, index, inputs, self.instances.of_chain(chain, index, None))
                        if task.share is not None:
                            self.plans.routed_key(chain, index, plan, task.share.key)
                self._rescaled_state.check(chain)
                self.plans.load_recorded_schema(chain)
            except StageError as error:
                report.fail(chain.stages, error)
            except RestoreError as error:
                report.changed.append(error)
                report.passed.update(dict.fromkeys(chain.stages))
            else:
                report.passed.update(dict.fromkeys(chain.stages))
        return report

    def remove_folders(self) -> None:
        """Remove what was restored for an attempt that is not built with these chains; it is discarded already."""
        for task in self.plan.tasks:
            self._folder(task).remove()

    def _tasks_of(self, chain: Chain) -> list[TaskPlan]:
        return [task for task in self.plan.tasks.values() if task.chain is chain]

    def discard(self) -> None:
        """Close what was opened for a deployment that is not completed."""
        self.instances.close()
        self.wiring.close()

    def _rows(self, stage: str, files: Sequence[WorkPath]) -> DataFrame:
        """The rows of a stage in files of its segments."""
        return table_dataframe(self.spark, self.plans.schemas[stage], files)

    def _task(self, planned: TaskPlan, uploader: SnapshotUploader, report: SendReport) -> Task:
        task, chain, index, snapshot = planned.id, planned.chain, planned.id.index, planned.snapshot
        head, folder = chain.stages[0], self._folder(task)
        tables = self.state.tables(snapshot, folder)
        inputs = self.plans.inputs(chain, index)
        self.wiring.restore_in_flight(task, snapshot, folder, self.state.fetch_segments, self._rows)
        instances = self.instances.of_chain(chain, index, snapshot)
        plan, described = (None, None) if planned.after_finish else self.plans.checked(chain, index, inputs, instances)
        forgotten: Collection[int] = ()
        if snapshot is not None and snapshot.query is not None and described is not None and planned.share is None:
            assert self.restored is not None
            forgotten, streams = forgotten_sources(self.pipeline, self.restored.metadata, head, snapshot), len(described.sources)
            self._rescaled_state.place_own(chain, task, snapshot.query, folder, forgotten, streams)
        if plan is not None and plan.begins_at_end and (snapshot is None or snapshot.query is None or forgotten):
            self.deployment.begin_at_end.add(task)
        self.plans.load_recorded_schema(chain)
        if planned.share is not None:
            assert plan is not None
            assert described is not None
            assert snapshot is not None
            key, streams = self.plans.routed_key(chain, index, plan, planned.share.key), len(described.sources)
            query = self._rescaled_state.place(chain, task, key, folder, streams)
            planned = replace(planned, snapshot=replace(snapshot, query=query))
        sink = self._sink(chain, index, planned.committed)
        output = TaskOutput(
            folder.work / "segments",
            self.wiring.outputs(task),
            sink.write if sink else None,
            self.settings.options.max_queued_bytes,
            instances[-1].stage.quarantine,
        )
        parts = TaskParts(
            planned=planned,
            pipeline=self.pipeline,
            instances=instances,
            folder=folder,
            spark=self.spark,
            output=output,
            sink=sink,
            plan=plan,
            described=described,
            uploader=uploader,
            report=report,
            transaction_files=self.state.transactions(chain, snapshot, folder),
            checkpoints=config_of_task(self.settings.options.checkpoints, self.pipeline.stage(head)),
            make_machine=partial(made, TaskMachine, f"{task} {self.settings.token}", self.settings.recorder),
            burst=self.settings.options.burst,
        )
        if planned.fused:
            positions = {name: stream.position for name, stream in plan.fused.items()} if plan is not None else {}
            fused = [replace(source, position=positions.get(source.name, source.position)) for source in planned.fused]
            return FusedTask(parts, fused, self.settings.options.batch_seconds)
        if not inputs:
            return self._source_task(parts)
        channel_task = ChannelTask(parts, inputs, lambda files: self.plans.build(instances, inputs, files), tables)
        for task_input in inputs:
            for channel in task_input.channels:
                channel.on_append = channel_task.wake_up
        return channel_task

    def _source_task(self, parts: TaskParts) -> Task:
        stage = parts.instances[0].stage
        if stage.split_interval is not None:
            return SplitTask(parts)
        if parts.plan is not None and not parts.plan.streaming:
            return BatchTask(parts)
        return SourceTask(parts, bounded=parts.planned.bounded)

    def _folder(self, task: TaskId) -> WorkFolder:
        return self.settings.folder / "tasks" / f"{task.vertex}.{task.index}"

    def _sink(self, chain: Chain, index: int, committed: LastCommit | None) -> TaskSink | None:
        stage, folder = self.pipeline.stage(chain.stages[-1]), self._folder(TaskId(chain.name, index))
        return self.sinks.of_instance(stage, index, self._schema(stage.name), folder, committed)

    def _settle(self, chain: Chain) -> None:
        for instance in self.plan.settled.get(chain.name, ()):
            folder = self.settings.folder / "tasks" / f"{chain.name}.settled-{instance.index}"
            sink = self.sinks.settled(instance, self._schema(instance.stage), folder)
            files = self.state.transaction_files(instance.snapshot, folder)
            self.deployment.settled.append(SettledSink(sink, instance.snapshot.transactions, files))

    def _schema(self, stage: str) -> StructType:
        return self.deployment.schemas.get(stage, StructType())  # a finished stage writes nothing, and may have none


_TRIAL = AttemptSettings(
    WorkFolder(Path(), Path()),
    number=1,
    token="",
    job_id=0,
    options=JobOptions(CheckpointConfig(interval=None), NoRestart(), work_directory=Path()),
)
"""Of an attempt that is checked and never started."""
