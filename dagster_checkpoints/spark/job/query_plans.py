"""The plans of one attempt: built from the user's functions and the inputs of their tasks, and checked before anything runs.

It must not know how tasks run, nor fetch state: it reads only the part of a checkpoint that the plans have to fit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql.types import DataType, StructField, StructType

from dagster_checkpoints.pipeline import (
    Chain,
    EdgePattern,
    FunctionStage,
    Pipeline,
    SplitSource,
    Stage,
    StageKind,
    TaskId,
    fused_in,
)
from dagster_checkpoints.spark.channels.channel_wiring import Wiring
from dagster_checkpoints.spark.errors import RestoredSchemaError
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.job.runtime import AttemptSettings, OnceLog
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.channel_sources import ChannelSources
from dagster_checkpoints.spark.query.column_types import not_written
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage, stand_in
from dagster_checkpoints.spark.query.initial_state import check_no_initial_state
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, describe, keeps_state, reads_watermarks
from dagster_checkpoints.spark.query.quarantined_rows import check_quarantine, refused_schema
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.restored_plans import (
    check_restored_plan,
    recorded_sources,
    with_ended_sources,
    with_recorded_encodings,
)
from dagster_checkpoints.spark.query.routed_keys import (
    RoutedKey,
    check_key_of_state,
    check_key_types,
    check_recorded_types,
    name_in_joins,
    operators_apart,
    operators_without,
    routed_columns,
    widened_keys,
)
from dagster_checkpoints.spark.query.source_checks import reads_the_same
from dagster_checkpoints.spark.query.stage_calls import open_stage
from dagster_checkpoints.spark.query.stage_inputs import (
    EventTime,
    StreamInput,
    stream_dataframe,
    table_dataframe,
    without_event_time,
)
from dagster_checkpoints.spark.session.spark_session import check_session
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.channel_task import TaskInput
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.spark.tasks.task_parts import StageInstance
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.inputs import check_waiting_columns
from dagster_checkpoints.state.metadata import CheckpointMetadata, TaskSnapshot
from dagster_checkpoints.state.stages_between import with_stages_now

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class QueryPlans:
    """Builds and checks the plans of one attempt's chains, producers before consumers.

    Args:
        pipeline: The pipeline that runs.
        spark: The session in which the plans are built.
        instance: Creates an instance of a stage, not yet opened, given the stage's name, the instance's index and its state.
        once: Receives warnings, each of which is logged once in a run, also if plans are built again.
        wiring: The channels of the attempt.
        restored: The checkpoint whose state the plans have to fit; None for a new start.
        settings: The attempt's number over all runs, at a change of which the watermark sources emit again, and its options.

    Attributes:
        schemas: The output schema of the last stage of each chain whose plan is known.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        instance: Callable[[str, int, OperatorStateStore], StageInstance],
        once: OnceLog,
        wiring: Wiring,
        restored: Restored | None,
        settings: AttemptSettings,
    ) -> None:
        self.schemas: dict[str, StructType] = {}
        self._routed: dict[str, list[str]] = {}
        """By last stage of a chain of several instances whose plan is known, the columns by which its rows are routed to them."""
        self._own_watermarks: set[str] = set()
        """The stages at whose end there is a watermark that their query sets itself."""
        self._of_instances: dict[str, dict[int, DataFrame]] = {}
        """By source with several instances, what each of them reads."""
        self._pipeline = pipeline
        self._spark = spark
        self._instance = instance
        self._once = once
        self._wiring = wiring
        self._restored = restored
        self._attempt = settings.number
        self._allow_changed_plan = settings.options.allow_changed_plan

    def checked(
        self, chain: Chain, index: int, inputs: Sequence[TaskInput], instances: Sequence[StageInstance]
    ) -> tuple[plans.QueryPlan, PlanDescription]:
        """The plan of an instance of a chain, checked; after this call its consumers know its columns.

        Args:
            chain: The chain.
            index: The instance's index.
            inputs: The inputs of the chain's first stage.
            instances: The instances of the chain's stages, opened.

        Raises:
            StageError, RefusedAtStage: The plan cannot run.
            StatefulPlanChanged, SourcesChanged: The restored state belongs to another plan.
            SparkSettingError: The plan is of a session with a setting with which checkpoints do not work.
        """
        self._check_keys(chain, instances)
        self._check_columns(chain, index, inputs)
        has_static = any(i.static for i in inputs)
        fused = fused_in(self._pipeline, chain.stages)
        stand_ins = self._stand_ins(fused) if fused else None
        plan = self._analyse(chain, index, inputs) if has_static else self.build(instances, inputs, {}, stand_ins)
        if plan.frame.sparkSession is not self._spark:  # a stage's function has made another one, in which the query would run
            check_session(plan.frame.sparkSession)
        tail = instances[-1]
        if tail.stage.quarantine is not None:
            check_quarantine(tail.call, tail.stage.quarantine, plan.frame)
        self._check_state_partitions(chain, instances, plan)
        if index == 0 and len(chain.instances) > 1 and inputs and plan.streaming:
            self._warn_of_state_apart(chain, plan)
        self._record_schema(chain, index, plan.schema)
        self.schemas.update({name: without_event_time(frame.schema) for name, frame in plan.outputs.items() if name in fused})
        snapshot = self._snapshot(chain, index)
        if len(chain.instances) > 1 and (snapshot is None or snapshot.query is None or snapshot.query.batch_id < 0):
            check_no_initial_state(plan, [instance.call for instance in instances])
        described = with_recorded_encodings(with_ended_sources(describe(plan), snapshot), snapshot)
        if self._restored is not None:
            check_restored_plan(
                self._pipeline,
                self._restored.metadata,
                chain,
                index,
                described,
                self._whole(chain, index) if described.keeps_state else None,
                allow_changed_plan=self._allow_changed_plan,
                log=self._once.log,
            )
        if not inputs:
            _check_batch_source(instances, plan)
            self._warn_of_the_same_rows(chain, index, instances[0].stage, plan)
        return plan, described

    def build(
        self,
        instances: Sequence[StageInstance],
        inputs: Sequence[TaskInput],
        tables: Mapping[str, Sequence[WorkPath]],
        stand_ins: Mapping[str, DataFrame] | None = None,
    ) -> plans.QueryPlan:
        """The plan of an instance of a chain, from its stages' functions.

        Args:
            instances: The instances of the chain's stages, opened.
            inputs: The inputs of the chain's first stage.
            tables: The files of the static inputs, by input; a static input without an entry is empty.
            stand_ins: For each fused source that has ended, the DataFrame in its place; None for a chain without fused sources.

        Raises:
            StageError, RefusedAtStage: Spark does not accept the plan.
        """
        head = instances[0].call
        task = TaskId(head.stage.name, head.context.index)
        known = recorded_sources(self._restored.plan.tasks.get(task)) if self._restored else None
        calls = [instance.call for instance in instances]
        carried = {i.name: self._event_time(i) for i in inputs}
        frames = {i.name: self._frame(i, tables, carried[i.name]) for i in inputs}
        plan = plans.build_plan(self._pipeline, calls, frames, stand_ins, self._own_watermarks)
        if plan.own_watermark:
            self._own_watermarks.add(calls[-1].stage.name)
        for text in plan.warnings:
            self._once(logging.WARNING, text)
        functions = all(isinstance(i.stage, FunctionStage) for i in instances)  # functions may be called twice
        # A query that is restored keeps its sources. One without them may be a part of a query that was divided.
        without_watermarks = not reads_watermarks(known) and not keeps_state(plan) if known else plans.keeps_no_state(plan)
        if functions and any(carried.values()) and without_watermarks:
            frames = {i.name: self._frame(i, tables, None) for i in inputs}
            return replace(plans.build_plan(self._pipeline, calls, frames, None, self._own_watermarks), takes_watermark=False)
        return plan

    def _warn_of_state_apart(self, chain: Chain, plan: plans.QueryPlan) -> None:
        """Warn of state of a chain with several instances that does not belong to the columns by which rows are routed."""
        keys = self._routed_by(chain.stages[0])
        alike = [*keys, *widened_keys([*self._keys(self._pipeline.stage(chain.stages[0])).values()], self._spark)]
        self._routed[chain.stages[-1]] = routed_columns(plan, alike)
        columns = ", ".join(map(repr, keys))
        routed = f"its rows are routed by {columns}, which is not in" if keys else "no column routes its rows, also none of"
        for stage, kind in operators_apart(plan, alike):
            declared = self._pipeline.stage(stage or chain.stages[0])
            text = (
                f"Stage {declared.name!r} ({declared.location}) has {len(chain.instances)} instances, and {routed} the key of "
                f"its {kind}: rows that belong together may be in different instances, each of which has a result of its own. "
                "Route by a column of that key, with StageInput(key=...) at the stage or at a stage in front of it, or give the "
                "stage one instance."
            )
            self._once(logging.WARNING, text)

    def _warn_of_the_same_rows(self, chain: Chain, index: int, source: Stage, plan: plans.QueryPlan) -> None:
        """Warn of a source whose instances read the same, each all of it; those of a split source share its splits."""
        if isinstance(source, SplitSource) or type(source).process_batch is not Stage.process_batch or len(chain.instances) == 1:
            return
        frame, known = plan.outputs[source.name], self._of_instances.setdefault(source.name, {})
        same = next((other for other in known if other != index and reads_the_same(known[other], frame)), None)
        if same is not None:
            names = f"{chain.instances[same]!r} and {chain.instances[index]!r}"
            text = (
                f"Stage {source.name!r} ({source.location}): its instances {names} read the same rows, so that each row is there "
                "once for each of them. Choose a part of the input by context.instance; or make it a split source, whose "
                "instances share its splits; or leave out instances=."
            )
            self._once(logging.WARNING, text)
        known[index] = frame

    def _routed_by(self, name: str) -> list[str]:
        """The columns by which the rows of a stage's streams are routed to its instances, also on the way to it."""
        stage = self._pipeline.stage(name)
        found: dict[str, None] = {}
        for edge in self._pipeline.edges:
            if edge.target != name or edge.input.mode == "static":
                continue
            if edge.input.key is not None:
                found[edge.input.key] = None
            elif edge.pattern is EdgePattern.POINTWISE and self._pipeline.stage(edge.source).parallelism == stage.parallelism:
                known = self._routed.get(edge.source)  # without a plan: as if it passed them on
                found.update(dict.fromkeys(self._routed_by(edge.source) if known is None else known))
        return list(found)

    def _whole(self, chain: Chain, index: int) -> PlanDescription | None:
        """The plan of the recorded chain of which a chain is a part, as the one query that it was; None if it is no part."""
        assert self._restored is not None
        stages = self._restored.plan.divided.get(chain.name)
        if stages is None:
            return None
        known = {stage.name for stage in self._pipeline.stages}
        present = [name for name in with_stages_now(stages, self._restored.metadata) if name in known]
        alike = all(self._pipeline.stage(name).instances == chain.instances for name in present)
        return self.as_one_query(Chain(present[0], tuple(present), chain.instances), index if alike else 0)[1]

    def as_one_query(self, chain: Chain, index: int) -> tuple[plans.QueryPlan, PlanDescription]:
        """The plan of stages as one query, whether they run as one or not.

        Args:
            chain: The stages.
            index: The index of the instance.

        Raises:
            StageError, RefusedAtStage: Spark does not accept the plan.
        """
        plan = self._analyse(chain, index, self.inputs(chain, index))
        return plan, describe(plan)

    def _snapshot(self, chain: Chain, index: int) -> TaskSnapshot | None:
        """The snapshot that a task is restored from; None without one."""
        return self._restored.plan.tasks.get(TaskId(chain.name, index)) if self._restored else None

    def _stand_ins(self, fused: Sequence[str]) -> dict[str, DataFrame]:
        """What stands in for the fused sources that have ended; their recorded schemas are known after this call."""
        finished = self._restored.plan.fully_finished if self._restored else ()
        ended = [name for name in fused if name in finished]
        self.schemas.update({name: self._recorded_schema(name) for name in ended})
        return {name: stand_in(self._sources, self._pipeline.stage(name), self.schemas[name]) for name in ended}

    def _event_time(self, task_input: TaskInput) -> EventTime | None:
        """The event time of a streaming input that carries a watermark; None for other inputs."""
        column = self._pipeline.event_time(task_input.name)
        lateness = self._pipeline.event_time_lateness_ms(task_input.name)
        if task_input.static or not task_input.carries_watermark or column is None or lateness is None:
            return None
        return EventTime(column, lateness)

    def _analyse(self, chain: Chain, index: int, inputs: Sequence[TaskInput]) -> plans.QueryPlan:
        """The plan with empty static inputs, which shows errors and the schema before anything runs."""
        fused = fused_in(self._pipeline, chain.stages)
        stand_ins = self._stand_ins(fused) if fused else None
        names = [name for name in chain.stages if stand_ins is None or name not in stand_ins]
        trial = [self._instance(name, index, OperatorStateStore()) for name in names]
        for instance in trial:
            open_stage(instance.call)
        try:
            return self.build(trial, inputs, {}, stand_ins)
        finally:
            for instance in trial:
                instance.stage.close()

    def _frame(self, task_input: TaskInput, tables: Mapping[str, Sequence[WorkPath]], event_time: EventTime | None) -> DataFrame:
        schema = self.schemas[task_input.name]
        if task_input.refused:
            schema = refused_schema(schema)
        if task_input.static:
            return table_dataframe(self._spark, schema, tables.get(task_input.name, ()))
        return stream_dataframe(
            self._sources,
            StreamInput(
                uid=self._pipeline.stage(task_input.name).uid,
                schema=schema,
                gate=task_input.gate,
                channels={str(c.id): c for c in task_input.channels},
                event_time=event_time,
                attempt=self._attempt,
            ),
        )

    @cached_property
    def _sources(self) -> ChannelSources:
        return ChannelSources(self._spark)

    def inputs(self, chain: Chain, index: int) -> tuple[TaskInput, ...]:
        """The inputs of an instance of a chain, with their channels.

        Args:
            chain: The chain.
            index: The instance's index.
        """
        head = self._pipeline.stage(chain.stages[0])
        channels = {name: self._wiring.into(TaskId(chain.name, index), name) for name in head.inputs}
        streams = [channel for name, how in head.inputs.items() if how.mode == "stream" for channel in channels[name]]
        gate = QueryGate({str(channel.id): channel.base for channel in streams})
        return tuple(
            TaskInput(
                name,
                static=how.mode == "static",
                channels=channels[name],
                gate=gate,
                carries_watermark=self._pipeline.carries_watermark(name) and not head.takes_refused_rows,
                refused=head.takes_refused_rows,
            )
            for name, how in head.inputs.items()
        )

    def _check_state_partitions(self, chain: Chain, instances: Sequence[StageInstance], plan: plans.QueryPlan) -> None:
        head = self._pipeline.stage(chain.stages[0])
        if head.state_partitions is not None:
            key = next(how.key for how in head.inputs.values() if how.key is not None)
            check_key_of_state(instances[0].call, plan, key, self._key_types(head, key))

    def _check_keys(self, chain: Chain, instances: Sequence[StageInstance]) -> None:
        """Check that equal keys of all inputs meet in one instance of the stage, which is that of their restored state."""
        head = self._pipeline.stage(chain.stages[0])
        if head.parallelism == 1:
            return
        keys = self._keys(head)
        check_key_types(instances[0].call, keys, self._spark)
        if self._restored is not None and not self._allow_changed_plan:
            check_recorded_types(head.name, self._recorded_keys(self._restored.metadata, head), keys)

    def _keys(self, head: Stage) -> dict[str, StructField]:
        """By input of a stage, the column by which its rows are routed."""
        return {name: self.schemas[name][how.key] for name, how in head.inputs.items() if how.key is not None}

    def _check_columns(self, chain: Chain, index: int, inputs: Sequence[TaskInput]) -> None:
        """Check that the restored records that a task has not read have the columns under which it reads them."""
        snapshot = self._snapshot(chain, index)
        if snapshot is None or self._restored is None:
            return
        metadata = self._restored.metadata
        check_waiting_columns(
            snapshot,
            {str(channel.id): i.name for i in inputs for channel in i.channels},
            {i.name: self._output_schema(i.name) for i in inputs},
            {i.name: self.schemas[i.name].json() for i in inputs},
            chain.stages[0],
            f"checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r}",
        )

    @staticmethod
    def _recorded_keys(metadata: CheckpointMetadata, head: Stage) -> dict[str, StructField]:
        """By input, the column that routed its rows in the checkpoint; none of a stage that had one instance, or has finished."""
        stages = {stage.name: stage for stage in metadata.stages}
        known = stages.get(head.name)
        if known is None or known.parallelism == 1 or known.fully_finished:
            return {}
        schemas = {
            each.stage: (StructType.fromJson(json.loads(stages[each.stage].output_schema)), each.key)
            for each in known.inputs or ()
            if each.key and each.stage in stages and stages[each.stage].output_schema
        }
        return {name: schema[key] for name, (schema, key) in schemas.items() if key in schema.names}

    def _key_types(self, head: Stage, key: str) -> set[DataType]:
        """The types of the column by which the streams of a stage are routed."""
        return {self.schemas[name][key].dataType for name, how in head.inputs.items() if how.mode == "stream"}

    def routed_key(self, chain: Chain, index: int, plan: plans.QueryPlan, key: str) -> RoutedKey:
        """The column by which the rows of a chain's inputs are routed to its instances.

        Args:
            chain: The chain.
            index: The index of its instance.
            plan: The instance's plan.
            key: The column.

        Raises:
            InstancesChanged: The query keeps state that does not belong to the column, and so cannot be moved with it.
        """
        head = self._pipeline.stage(chain.stages[0])
        kinds = self._key_types(head, key)
        others = operators_without(plan, key)
        if others or len(kinds) > 1:
            types = f"the types {', '.join(sorted(kind.simpleString() for kind in kinds))}"
            found = types if len(kinds) > 1 else f"an operator with another key: {', '.join(others)}"
            raise InstancesChanged(
                f"The instances of stage {head.name!r} ({head.location}) have changed, and its state is moved by the column "
                f"{key!r} of its inputs. Expected that every stateful operator has this column in its key, unchanged and under "
                f"its name, and of one type, found {found}. Give the stage the same instances; or end the old pipeline with a "
                "drain, and begin with other instances as a new start (restore_from: none)."
            )
        return RoutedKey(key, kinds.pop(), name_in_joins(plan, key))

    def _record_schema(self, chain: Chain, index: int, schema: StructType) -> None:
        known = self.schemas.setdefault(chain.stages[-1], schema)
        if known != schema:
            raise plans.differing_schema(chain, index, known, schema)
        tail = self._pipeline.stage(chain.stages[-1])
        for path, kind in not_written(schema):
            raise plans.type_not_written(tail, chain.instances[index], path, kind)
        for edge in self._pipeline.edges:
            if edge.source != tail.name:
                continue
            if edge.input.key is not None and edge.input.key not in schema.names:
                raise plans.no_such_key(chain, index, edge.target, edge.input.key, schema)

    def load_recorded_schema(self, chain: Chain) -> None:
        """Read the output schema of a chain that builds no plan from the checkpoint.

        Raises:
            RestoredSchemaError: The checkpoint does not hold the schema, and consumers need it.
        """
        tail = chain.stages[-1]
        if tail in self.schemas or self._restored is None:
            return
        if self._pipeline.downstream(tail) or self._output_schema(tail):
            self.schemas[tail] = self._recorded_schema(tail)

    def _output_schema(self, stage: str) -> str:
        assert self._restored is not None
        return next((s.output_schema for s in self._restored.metadata.stages if s.name == stage), "")

    def _recorded_schema(self, stage: str) -> StructType:
        assert self._restored is not None
        recorded = self._output_schema(stage)
        if not recorded:
            raise RestoredSchemaError(
                f"Stage {stage!r} is not run again, and checkpoint {self._restored.location} does not hold the schema of its "
                "output, which its consumers need. Restore from another checkpoint, or start without restoring "
                "(restore_from: none)."
            )
        return StructType.fromJson(json.loads(recorded))


def _check_batch_source(instances: Sequence[StageInstance], plan: plans.QueryPlan) -> None:
    if plan.streaming:
        return
    call = instances[0].call
    if len(instances) > 1:
        # The stages behind it would need a stream.
        raise RefusedAtStage(instances[1].stage.name, "the source returned a batch DataFrame")
    if call.stage.kind is StageKind.UNBOUNDED_SOURCE and call.stage.split_interval is None:
        raise plans.not_streaming(call)
