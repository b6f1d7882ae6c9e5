"""One attempt to run a pipeline: from stages and a checkpoint to tasks that are ready to start.

Decides which stages share a query, lets Spark check the plans, connects the channels, and puts restored files in place. The
plans come from `attempt_plans`, the state from `restored_state`. It must not know the coordinator's rules, nor start anything.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql.types import StructType

from dagster_checkpoints.coordination import CheckpointConfig, NoRestart
from dagster_checkpoints.execution.fused_sources import FusedSource
from dagster_checkpoints.execution.task_machine import TaskMachine, config_of_task
from dagster_checkpoints.execution.trace import made
from dagster_checkpoints.pipeline import (
    Chain,
    Pipeline,
    StageKind,
    TaskId,
    build_chains,
    channel_reasons,
    execution_graph,
    fused_in,
    merging_in,
)
from dagster_checkpoints.spark.channels.channel_wiring import Wiring
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.spark.errors import PlanRefusedError, StageError
from dagster_checkpoints.spark.files.work_folder import WorkFolder
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.job.attempt_plans import AttemptPlans
from dagster_checkpoints.spark.job.attempt_settings import AttemptSettings
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.job_options import JobOptions
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
from dagster_checkpoints.state import RestoreError, TaskSnapshot, default_max_parallelism, rows_of_finished
from dagster_checkpoints.storage import CheckpointStorage

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
        self._log = log
        self._apart = dict(channel_reasons(pipeline))
        """By stage that could have shared the query of its inputs, why it begins one of its own."""
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
        chains = self._chains(restored)
        return _Attempt(self._pipeline, self._spark, self._storage, self._log, self._warned, settings, restored, chains)

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

    def _separate(self, restored: Restored | None) -> Iterator[str]:
        """In words, which stages share a query in a new start, as far as is known, and have separate ones in the checkpoint."""
        if restored is None:
            return
        new = {name: chain.name for chain in self._new_chains(restored) for name in chain.stages}
        for head, *_ in restored.plan.chains:
            for upstream in self._pipeline.upstream(head):
                if new[upstream] == new[head]:
                    yield (
                        f"{upstream!r} and {head!r} keep separate queries, as in the checkpoint. In a new start, for example "
                        "after a drain, they share one, which is faster."
                    )

    def _new_chains(self, restored: Restored) -> tuple[Chain, ...]:
        """The chains of a new start, if the stages that keep state in the checkpoint still do."""
        tasks = [task for chain in restored.metadata.chains for task in chain.tasks.values()]
        stateful = {name for task in tasks for name, snapshot in task.stages.items() if snapshot.operators}
        breaks = self._breaks
        while True:
            chains = build_chains(self._pipeline, breaks)
            refused = {
                meeting
                for chain in chains
                if (meeting := merging_in(self._pipeline, chain.stages))
                and stateful.intersection(itertools.takewhile(lambda name: name != meeting, chain.stages))
            }
            if not refused:
                return chains
            breaks |= refused

    def _note_queries(self, restored: Restored | None) -> None:
        """Log once in a run which stages do not share a query, and why."""
        self._warn_of_fuse()
        reasons = self._apart.items() if restored is None else ()
        for text in [*(f"Stage {name!r} begins a query of its own: {why}." for name, why in reasons), *self._separate(restored)]:
            self._say_once(logging.INFO, text)

    def _say_once(self, level: int, text: str) -> None:
        """Log a text once in a run."""
        if text not in self._warned:
            self._warned.add(text)
            self._log.log(level, "%s", text)

    def _warn_of_fuse(self) -> None:
        """Warn of inputs with fuse=True that are read through channels."""
        for name, why in self._apart.items():
            asked = [upstream for upstream, how in self._pipeline.stage(name).inputs.items() if how.fuse]
            text = f"Stage {name!r} reads {', '.join(map(repr, asked))} through channels, in spite of fuse=True: {why}."
            if asked:
                self._say_once(logging.WARNING, text)

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
        self.sinks = TaskSinks(pipeline, spark, storage.ownership if storage else None, settings)
        graph = execution_graph(pipeline, chains)
        order = {vertex.name: position for position, vertex in enumerate(graph.vertices)}
        self.chains = tuple(sorted(chains, key=lambda chain: order[chain.name]))
        partitions = int(spark.conf.get(STATE_PARTITIONS) or 1) if settings.options.repartition_state else None
        self.state = RestoredState(pipeline, storage, restored, partitions)
        self.instances = StageInstances(pipeline, spark, self.state, log, settings.options.assets)
        finished = frozenset(restored.plan.finished if restored else ())
        snapshots = restored.plan.tasks if restored else {}
        known = restored.plan.max_parallelism if restored else {}
        key_groups = {
            s.name: known.get(s.name) or s.state_partitions or default_max_parallelism(s.parallelism) for s in pipeline.stages
        }
        self.wiring = Wiring(pipeline, self.chains, snapshots, finished, key_groups)
        self.plans = AttemptPlans(
            pipeline,
            spark,
            self.instances.of,
            log,
            warned,
            self.wiring,
            restored,
            settings,
        )
        self.deployment = Deployment(graph, self.chains, finished=finished, schemas=self.plans.schemas)
        routed = {edge.target for edge in pipeline.edges if edge.input.key is not None}
        self.deployment.key_groups = {name: key_groups[name] for name in routed}
        stages = restored.metadata.stages if restored else ()
        self.deployment.most_instances = {stage.name: stage.most_instances for stage in stages if stage.most_instances}
        self._rescaled_state = RescaledState(spark, self.state, settings.folder, log)
        if restored:
            self.deployment.rows_of_finished = rows_of_finished(restored.metadata)
            self.deployment.late_rows_of_finished = late_rows_of_finished(restored.metadata)

    def build(self, uploader: SnapshotUploader, report: SendReport, check_canceled: Callable[[], None]) -> Deployment:
        try:
            for chain in filter(lambda chain: self.settings.builds(chain.name), self.chains):
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
        report = PlanReport(self.chains, schemas=self.plans.schemas)
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
                        plan, _ = self.plans.checked(chain, index, inputs, self.instances.of_chain(chain, index, None))
                        share = self.state.share(TaskId(chain.name, index))
                        if share is not None:
                            self.plans.routed_key(chain, index, plan, share.key)
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
        for chain in self.chains:
            for index in range(len(chain.instances)):
                self._folder(chain, index).remove()

    def _needs_no_plan(self, task: TaskId) -> bool:
        """Whether the task has finished, or has finished its data and waits for its final checkpoint."""
        return task in self.deployment.finished or (self.restored is not None and task in self.restored.plan.after_finish)

    def discard(self) -> None:
        """Close what was opened for a deployment that is not completed."""
        self.instances.close()
        self.wiring.close()

    def _rows(self, stage: str, files: Sequence[WorkPath]) -> DataFrame:
        """The rows of a stage in files of its segments."""
        return table_dataframe(self.spark, self.plans.schemas[stage], files)

    def _task(self, chain: Chain, index: int, uploader: SnapshotUploader, report: SendReport) -> Task:
        task, head = TaskId(chain.name, index), chain.stages[0]
        snapshot = self.restored.plan.tasks.get(task) if self.restored else None
        folder = self._folder(chain, index)
        after_finish = snapshot is not None and snapshot.end_of_data == "drain"
        share = self.state.share(task)
        tables = self.state.tables(snapshot, folder)
        inputs = self.plans.inputs(chain, index)
        self.wiring.restore_in_flight(task, snapshot, folder, self.state.fetch_segments, self._rows)
        instances = self.instances.of_chain(chain, index, snapshot)
        plan, described = (None, None) if after_finish else self.plans.checked(chain, index, inputs, instances)
        if snapshot is not None and snapshot.query is not None and described is not None and share is None:
            assert self.restored is not None
            forgotten, streams = forgotten_sources(self.pipeline, self.restored.metadata, head, snapshot), len(described.sources)
            self._rescaled_state.place_own(chain, task, snapshot.query, folder, forgotten, streams)
        self.plans.load_recorded_schema(chain)
        if share is not None:
            assert plan is not None
            assert described is not None
            assert snapshot is not None
            key, streams = self.plans.routed_key(chain, index, plan, share.key), len(described.sources)
            snapshot = msgspec.structs.replace(snapshot, query=self._rescaled_state.place(chain, task, key, folder, streams))
        sink = self._sink(chain, index)
        output = TaskOutput(
            folder.work / "segments",
            self.wiring.outputs(task),
            sink.write if sink else None,
            self.settings.options.max_queued_bytes,
            instances[-1].stage.quarantine,
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
            checkpoints=config_of_task(self.settings.options.checkpoints, self.pipeline.stage(head)),
            make_machine=partial(made, TaskMachine, f"{task} {self.settings.token}", self.settings.recorder),
            burst=self.settings.options.burst,
        )
        if fused_in(self.pipeline, chain.stages):
            return FusedTask(parts, self._fused_sources(parts), self.settings.options.batch_seconds)
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
        bounded = stage.kind is StageKind.BOUNDED_SOURCE
        ended = (stage.name, stage.instances[parts.id.index]) in self.settings.ended_sources
        return SourceTask(parts, bounded=bounded or ended)

    def _fused_sources(self, parts: TaskParts) -> list[FusedSource]:
        known = {source.source: source for source in parts.restored.fused} if parts.restored is not None else {}
        sources = []
        for name in fused_in(self.pipeline, parts.chain.stages):
            stage, restored = self.pipeline.stage(name), known.get(name)
            ended = (name, stage.instances[parts.id.index]) in self.settings.ended_sources
            sources.append(
                FusedSource(
                    name=name,
                    position=parts.plan.fused[name].position if parts.plan is not None else restored.position if restored else 0,
                    bounded=stage.kind is StageKind.BOUNDED_SOURCE or ended,
                    event_time=stage.watermark is not None,
                    idle_after=stage.watermark.idle_after if stage.watermark is not None else None,
                    restored=restored,
                )
            )
        return sources

    def _folder(self, chain: Chain, index: int) -> WorkFolder:
        return self.settings.folder / "tasks" / f"{chain.name}.{index}"

    def _sink(self, chain: Chain, index: int) -> TaskSink | None:
        stage = self.pipeline.stage(chain.stages[-1])
        schema = self.deployment.schemas.get(stage.name, StructType())  # a finished stage writes nothing, and may have none
        return self.sinks.of_instance(stage, index, schema, self._folder(chain, index))

    def _sinks_of_finished(self, chain: Chain) -> None:
        restored, next_id = self.settings.take_back_after, self.settings.next_checkpoint_id
        gone = self.restored.plan.removed if self.restored is not None else ()
        removed = {each.index for each in gone if each.stage == chain.stages[-1]}
        for index in range(len(chain.instances)) if restored is not None else ():
            finished = TaskId(chain.name, index) in self.deployment.finished and index not in removed
            sink = self._sink(chain, index) if finished else None
            if sink is not None:
                self.deployment.finished_sinks.append(SettledSink(sink, restored, next_id))
        if self.restored is not None:
            schema = self.deployment.schemas.get(chain.stages[-1], StructType())
            self.deployment.finished_sinks += self.sinks.of_removed(
                chain, self.restored.plan, schema, self.state.transaction_files
            )


_EMPTY = TaskSnapshot()
_TRIAL = AttemptSettings(
    WorkFolder(Path(), Path()),
    number=1,
    token="",
    job_id=0,
    options=JobOptions(CheckpointConfig(interval=None), NoRestart(), work_directory=Path()),
)
"""Of an attempt that is checked and never started."""
