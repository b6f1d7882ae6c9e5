"""One attempt to run a pipeline: from stages and a checkpoint to tasks that are ready to start.

Decides which stages share a query, asks Spark what it accepts, connects the channels, puts restored files in place. It
must not know the coordinator's rules, nor start anything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from dagster_checkpoints.coordination import AlignedBarrierHandler
from dagster_checkpoints.pipeline import (
    Chain,
    ExecutionGraph,
    FunctionStage,
    Pipeline,
    StageContext,
    StageKind,
    TaskId,
    build_chains,
    execution_graph,
)
from dagster_checkpoints.spark import plans
from dagster_checkpoints.spark.channel_task import ChannelTask, InputChannel, TaskInput
from dagster_checkpoints.spark.channels import Gate, SegmentFiles
from dagster_checkpoints.spark.column_types import not_carried, not_written
from dagster_checkpoints.spark.errors import PlanRefusedError, RestoredSchemaError, StageError
from dagster_checkpoints.spark.inputs import EventTime, StreamInput, static_dataframe, stream_dataframe
from dagster_checkpoints.spark.mail import Report
from dagster_checkpoints.spark.operator_state import OperatorStateStore
from dagster_checkpoints.spark.outputs import TaskOutput
from dagster_checkpoints.spark.plan_fingerprint import PlanDescription, describe, reads_watermarks
from dagster_checkpoints.spark.plan_report import PlanReport
from dagster_checkpoints.spark.restored_plans import check_restored_plan, recorded_sources
from dagster_checkpoints.spark.sinking import TaskSink, sink_context
from dagster_checkpoints.spark.snapshots import relocate
from dagster_checkpoints.spark.source_task import BatchTask, SourceTask
from dagster_checkpoints.spark.stage_calls import StageCall, open_stage
from dagster_checkpoints.spark.task import Task
from dagster_checkpoints.spark.task_parts import StageInstance, TaskParts
from dagster_checkpoints.spark.uploads import SnapshotUploader
from dagster_checkpoints.spark.wiring import Wiring, restored_segment
from dagster_checkpoints.state import (
    CheckpointMetadata,
    OperatorState,
    RestoreError,
    RestorePlan,
    StateFile,
    TaskSnapshot,
    redistribute_operator_states,
)
from dagster_checkpoints.storage import CheckpointStorage, SavepointDirectory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Restored:
    """The checkpoint or savepoint that an attempt starts from.

    Attributes:
        savepoint: The directory that holds the files; None for a checkpoint, whose files are in `shared/`.
    """

    metadata: CheckpointMetadata
    plan: RestorePlan
    location: str
    savepoint: SavepointDirectory | None = None


@dataclass(frozen=True)
class AttemptSettings:
    """What distinguishes one attempt, and the settings that tasks need.

    Attributes:
        folder: Its fresh work directory.
        number: 1, 2, … within the run; the watermark sources speak again when it changes.
        token: Differs between any two attempts, over all runs.
        max_queued_bytes: Of segments per channel before its producer waits.
        take_back_after: The checkpoint restored, if the job had completed later ones.
        ended_sources: Sources (stage, instance) that were asked to end before a restart: they read what is there, and end.
        allow_changed_plan: Restored state may go on under another plan.
    """

    folder: Path
    number: int
    token: str
    job_id: int
    max_queued_bytes: int
    take_back_after: int | None = None
    ended_sources: frozenset[tuple[str, str]] = frozenset()
    allow_changed_plan: bool = False


@dataclass
class Deployment:
    """The tasks of one attempt, not yet started.

    Attributes:
        finished: Tasks that the checkpoint says are finished; there is no task object for them.
        schemas: Output schema of each chain's last stage.
        rows_of_finished: By stage, what its finished tasks had emitted; for reporting.
        late_rows_of_finished: By stage, what its finished tasks had dropped as late; for reporting.
        finished_sinks: Of finished tasks, and the checkpoint gone back to: they show the rows committed up to it, no others.
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
        """A job that goes back may pass the end of a task that does not run: put right what readers see of it.

        Raises:
            SinkError: Rows that are needed again are gone.
        """
        for sink, restored in self.finished_sinks:
            sink.open((), restored)
            sink.close()


class Deployer:
    """Builds deployments of one pipeline.

    Args:
        storage: Where restored state is; None if plans are only checked.
        log: Where stages' `context.log` goes.
        check_canceled: Raises if the job was cancelled; asked between two tasks.
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
        self, settings: AttemptSettings, restored: Restored | None, uploader: SnapshotUploader, report: Report
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

    def check(self, folder: Path, restored: Restored | None = None) -> PlanReport:
        """Build the plans of a start with the same steps as :meth:`deploy`, and start nothing.

        Every stage's `open`, `transform` and `close` are called; storage and sinks are not touched.

        Args:
            folder: An empty directory, for the logs of channels.
            restored: The checkpoint whose state the plans have to fit; None for a new start. No state is fetched.
        """
        settings = AttemptSettings(folder, number=1, token="", job_id=0, max_queued_bytes=1)
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
        self.warned = warned  # said once in a run, whatever is built again
        self.settings = settings
        self.restored = restored
        graph = execution_graph(pipeline, chains)
        order = {vertex.name: position for position, vertex in enumerate(graph.vertices)}
        self.chains = tuple(sorted(chains, key=lambda chain: order[chain.name]))
        finished = restored.plan.finished if restored else frozenset()
        self.deployment = Deployment(graph, self.chains, finished=frozenset(finished))
        snapshots = restored.plan.tasks if restored else {}
        self.wiring = Wiring(pipeline, self.chains, settings.folder, snapshots, self.deployment.finished)
        self._opened: list[StageInstance] = []
        self._redistributed: dict[str, tuple[tuple[OperatorState, ...], ...]] = {}
        if restored:
            self.deployment.rows_of_finished = _rows_of_finished(restored.metadata)
            self.deployment.late_rows_of_finished = _late_rows_of_finished(restored.metadata)

    def build(self, uploader: SnapshotUploader, report: Report, check_canceled: Callable[[], None]) -> Deployment:
        try:
            for chain in self.chains:
                for index in range(len(chain.instances)):
                    check_canceled()
                    task = TaskId(chain.name, index)
                    if task not in self.deployment.finished:
                        self.deployment.tasks[task] = self._task(chain, index, uploader, report)
                self._recorded_schema(chain)
                self._sinks_of_finished(chain)
        except BaseException:
            self.discard()
            raise
        return self.deployment

    def check(self) -> PlanReport:
        """Build every plan whose inputs' columns are known; nothing is made that could start."""
        found = PlanReport(self.chains)
        for chain in self.chains:
            head = self.pipeline.stage(chain.stages[0])
            missing = next((name for name in head.inputs if name not in found.passed), None)
            if missing is not None:
                found.skip(chain.stages, missing)
                continue
            try:
                for index in range(len(chain.instances)):
                    if not self._needs_no_plan(TaskId(chain.name, index)):
                        inputs = self._inputs(chain, index, self.settings.folder / "tasks" / f"{chain.name}.{index}")
                        self._checked_plan(chain, index, inputs, self._instances(chain, index, None))
                self._recorded_schema(chain)
            except StageError as error:
                found.fail(chain.stages, error)
            except RestoreError as error:
                found.changed.append(error)
                found.passed.update(dict.fromkeys(chain.stages))
            else:
                found.passed.update(dict.fromkeys(chain.stages))
        return found

    def _needs_no_plan(self, task: TaskId) -> bool:
        """It has finished, or waits behind its end of data for the final checkpoint."""
        return task in self.deployment.finished or (self.restored is not None and task in self.restored.plan.after_finish)

    def discard(self) -> None:
        """Give a half-built deployment up."""
        for instance in self._opened:
            instance.stage.close()
        self._opened.clear()
        self.wiring.close()

    def _task(self, chain: Chain, index: int, uploader: SnapshotUploader, report: Report) -> Task:
        task = TaskId(chain.name, index)
        snapshot = self.restored.plan.tasks.get(task) if self.restored else None
        folder = self.settings.folder / "tasks" / f"{chain.name}.{index}"
        after_finish = snapshot is not None and snapshot.end_of_data == "drain"
        if snapshot is not None and snapshot.query is not None and not after_finish:
            self._fetch(snapshot.query.files, folder / "checkpoint")
            relocate(folder / "checkpoint")
        tables = self._restored_tables(snapshot, folder)
        inputs = self._inputs(chain, index, folder)
        self.wiring.restore_in_flight(task, snapshot, folder, self._fetch_segments)
        instances = self._instances(chain, index, snapshot)
        plan, described = (None, None) if after_finish else self._checked_plan(chain, index, inputs, instances)
        self._recorded_schema(chain)
        tail = chain.stages[-1]
        sink = self._sink(chain, index)
        output = TaskOutput(
            folder / "segments",
            self.wiring.outputs(tail, index),
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
            restored=snapshot if snapshot is not None else (_NOTHING if self.restored else None),
            uploader=uploader,
            report=report,
            take_back_after=self.settings.take_back_after,
            transaction_files=self._restored_transactions(chain, snapshot, folder),
        )
        if not inputs:
            return self._source_task(parts)
        built = ChannelTask(
            parts,
            inputs,
            AlignedBarrierHandler([c.name for i in inputs for c in i.channels]),
            lambda files: self._plan(instances, inputs, files),
            tables,
        )
        for i in inputs:
            for c in i.channels:
                c.channel.on_append = built.look_again
        return built

    def _source_task(self, parts: TaskParts) -> Task:
        if parts.plan is not None and not parts.plan.streaming:
            return BatchTask(parts)
        stage = parts.instances[0].stage
        ends = stage.kind is StageKind.BOUNDED_SOURCE
        asked = (stage.name, stage.instances[parts.id.index]) in self.settings.ended_sources
        return SourceTask(parts, bounded=ends or asked)

    # Stages

    def _instances(self, chain: Chain, index: int, snapshot: TaskSnapshot | None) -> tuple[StageInstance, ...]:
        made = []
        for name in chain.stages:
            kept = snapshot.stages.get(name) if snapshot else None
            own = kept.operator_states if kept else ()
            instance = self._instance(name, index, OperatorStateStore(self._operator_states(name, index), own))
            open_stage(instance.call)
            self._opened.append(instance)
            made.append(instance)
        return tuple(made)

    def _operator_states(self, name: str, index: int) -> tuple[OperatorState, ...]:
        """What an instance starts with of the states that its stage's instances had."""
        if self.restored is None or name in self.restored.plan.new_stages:
            return ()
        if name not in self._redistributed:
            parallelism = self.pipeline.stage(name).parallelism
            self._redistributed[name] = redistribute_operator_states(self.restored.metadata, name, parallelism)
        return self._redistributed[name][index]

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
        schema = self.deployment.schemas.get(stage.name, StructType())  # a finished stage, which writes no more, may have none
        return TaskSink(stage.sink.new_instance(), context, self.spark, schema)

    def _sinks_of_finished(self, chain: Chain) -> None:
        restored = self.settings.take_back_after
        if restored is None:
            return
        for index in range(len(chain.instances)):
            sink = self._sink(chain, index) if TaskId(chain.name, index) in self.deployment.finished else None
            if sink is not None:
                self.deployment.finished_sinks.append((sink, restored))

    # Plans

    def _checked_plan(
        self, chain: Chain, index: int, inputs: Sequence[TaskInput], instances: Sequence[StageInstance]
    ) -> tuple[plans.QueryPlan, PlanDescription]:
        """What an instance of a chain computes, which nothing speaks against; its consumers know its columns from then on.

        Raises:
            StageError, RefusedAtStage: It cannot run.
            StatefulPlanChanged, SourcesChanged: The state that is restored belongs to another plan.
        """
        has_static = any(i.static for i in inputs)
        plan = self._analyse(chain, index, inputs) if has_static else self._plan(instances, inputs, {})
        self._know_schema(chain, index, plan.schema)
        described = describe(plan)
        if self.restored is not None:
            allowed = self.settings.allow_changed_plan
            check_restored_plan(
                self.pipeline, self.restored.metadata, chain, index, described, allow_changed_plan=allowed, log=self.log
            )
        if not inputs:
            _check_batch_source(instances, plan)
        return plan, described

    def _plan(
        self, instances: Sequence[StageInstance], inputs: Sequence[TaskInput], tables: Mapping[str, Sequence[Path]]
    ) -> plans.QueryPlan:
        head = instances[0].call
        task = TaskId(head.stage.name, head.context.index)
        known = recorded_sources(self.restored.plan.tasks.get(task)) if self.restored else None
        calls = [instance.call for instance in instances]
        carried = {i.name: self._event_time(i) for i in inputs}
        frames = {i.name: self._frame(i, tables, carried[i.name]) for i in inputs}
        plan = plans.build_plan(self.pipeline, calls, frames)
        for text in plan.warnings:
            if text not in self.warned:
                self.warned.add(text)
                self.log.warning("%s", text)
        functions = all(isinstance(i.stage, FunctionStage) for i in instances)  # these may be asked twice
        if known is None:
            without_watermarks = plans.keeps_no_state(plan)
        else:  # a query that is restored keeps its sources
            without_watermarks = not reads_watermarks(known) and not describe(plan).keeps_state
        if functions and any(carried.values()) and without_watermarks:
            frames = {i.name: self._frame(i, tables, None) for i in inputs}
            return replace(plans.build_plan(self.pipeline, calls, frames), told_watermark=False)
        return plan

    def _event_time(self, task_input: TaskInput) -> EventTime | None:
        """Of a streaming input that carries a watermark."""
        column = self.pipeline.event_time(task_input.name)
        lateness = self.pipeline.event_time_lateness_ms(task_input.name)
        if task_input.static or not task_input.carries_watermark or column is None or lateness is None:
            return None
        return EventTime(column, lateness)

    def _analyse(self, chain: Chain, index: int, inputs: Sequence[TaskInput]) -> plans.QueryPlan:
        """The plan with empty static inputs: for its errors and its schema, before anything runs."""
        trial = [self._instance(name, index, OperatorStateStore()) for name in chain.stages]
        for instance in trial:
            open_stage(instance.call)
        try:
            return self._plan(trial, inputs, {})
        finally:
            for instance in trial:
                instance.stage.close()

    def _frame(self, task_input: TaskInput, tables: Mapping[str, Sequence[Path]], event_time: EventTime | None) -> DataFrame:
        schema = self.deployment.schemas[task_input.name]
        if task_input.static:
            return static_dataframe(self.spark, schema, tables.get(task_input.name, ()))
        assert task_input.gate is not None
        return stream_dataframe(
            self.spark,
            StreamInput(
                name=task_input.name,
                schema=schema,
                gate=task_input.gate.path,
                logs={c.name: c.channel.path for c in task_input.channels},
                base={c.name: c.channel.base for c in task_input.channels},
                event_time=event_time,
                attempt=self.settings.number,
            ),
        )

    def _inputs(self, chain: Chain, index: int, folder: Path) -> tuple[TaskInput, ...]:
        head = self.pipeline.stage(chain.stages[0])
        inputs = []
        for name, how in head.inputs.items():
            channels = tuple(
                InputChannel(c, how.mode == "static", c.base, c.base, c.base) for c in self.wiring.into(head.name, index, name)
            )
            gate = None
            if how.mode == "stream":
                gate = Gate(folder / "gates" / f"{name}.json", {c.name: c.channel.base for c in channels})
            carries = self.pipeline.carries_watermark(name)
            inputs.append(TaskInput(name, how.mode == "static", channels, gate, carries))
        return tuple(inputs)

    # Schemas

    def _know_schema(self, chain: Chain, index: int, schema: StructType) -> None:
        known = self.deployment.schemas.setdefault(chain.stages[-1], schema)
        if known != schema:
            raise plans.differing_schema(chain, index, known, schema)
        tail = self.pipeline.stage(chain.stages[-1])
        for path, kind in not_written(schema):
            raise plans.type_not_written(tail, chain.instances[index], path, kind)
        for edge in self.pipeline.edges:
            if edge.source != tail.name:
                continue
            if edge.input.key is not None and edge.input.key not in schema.names:
                raise plans.no_such_key(chain, index, edge.target, edge.input.key, schema)
            for path, kind in not_carried(schema) if edge.input.mode == "stream" else ():
                raise plans.type_not_carried(tail, chain.instances[index], edge.target, path, kind)

    def _recorded_schema(self, chain: Chain) -> None:
        tail = chain.stages[-1]
        if tail in self.deployment.schemas or self.restored is None:
            return
        recorded = next((s.output_schema for s in self.restored.metadata.stages if s.name == tail), "")
        if recorded:
            self.deployment.schemas[tail] = StructType.fromJson(json.loads(recorded))
        elif self.pipeline.downstream(tail):
            raise RestoredSchemaError(
                f"Stage {tail!r} is not run again, and checkpoint {self.restored.location} does not hold the schema of its "
                "output, which its consumers need. Restore from another checkpoint, or start anew (restore_from: none)."
            )

    # Restored files

    @property
    def _where(self) -> str:
        return self.restored.location if self.restored else ""

    def _fetch(self, files: Sequence[StateFile], target: Path) -> None:
        savepoint = self.restored.savepoint if self.restored else None
        if savepoint is not None:
            savepoint.fetch_state(files, target)
        elif files:
            assert self.storage is not None
            self.storage.fetch_state(files, target, checkpoint=self._where)

    def _fetch_segments(self, files: Sequence[StateFile], folder: Path) -> Path:
        target = folder / "restored"
        self._fetch(files, target)
        return target

    def _restored_transactions(self, chain: Chain, snapshot: TaskSnapshot | None, folder: Path) -> dict[int, dict[str, Path]]:
        """The files of a savepoint's transactions, which may have been aborted since."""
        kept = snapshot.stages.get(chain.stages[-1]) if snapshot else None
        root = folder / "transactions"
        restored = {}
        for position, files in kept.transaction_files.items() if kept else ():
            self._fetch(files, root)
            restored[position] = {Path(file.path).name: root / file.path for file in files}
        return restored

    def _restored_tables(self, snapshot: TaskSnapshot | None, folder: Path) -> dict[str, list[SegmentFiles]]:
        tables: dict[str, list[SegmentFiles]] = {}
        for table in snapshot.static if snapshot else ():
            root = self._fetch_segments([f for segment in table.segments for f in segment.files], folder)
            tables[table.input] = [restored_segment(segment, root) for segment in table.segments]
        return tables


_NOTHING = TaskSnapshot()


def _check_batch_source(instances: Sequence[StageInstance], plan: plans.QueryPlan) -> None:
    if plan.streaming:
        return
    call = instances[0].call
    if len(instances) > 1:
        # A batch result would have to be a stream for the stages behind it.
        raise plans.RefusedAtStage(instances[1].stage.name, "the source returned a batch DataFrame")
    if call.stage.kind is StageKind.UNBOUNDED_SOURCE:
        raise plans.not_streaming(call)


def _rows_of_finished(metadata: CheckpointMetadata) -> dict[str, int]:
    rows = {stage.name: stage.rows for stage in metadata.stages if stage.finished}
    for chain in metadata.chains:
        tail = chain.stages[-1]
        if tail in rows:
            rows[tail] -= sum(task.stages[tail].rows_out for task in chain.tasks.values())
    return rows


def _late_rows_of_finished(metadata: CheckpointMetadata) -> dict[str, int]:
    rows = {stage.name: stage.late_rows for stage in metadata.stages}
    for chain in metadata.chains:
        for task in chain.tasks.values():
            for name, stage in task.stages.items():
                rows[name] -= stage.late_rows
    return rows
