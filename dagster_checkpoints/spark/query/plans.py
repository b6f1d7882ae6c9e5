"""Builds the plan of one query from its stages: calls the user's functions, checks their results, and lets Spark check the plan.

Must not know tasks, channels' contents or checkpoints. Analysis only: no plan is evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, NullType, StructType, TimestampNTZType, TimestampType

from dagster_checkpoints.pipeline import Chain, Pipeline, Stage, merging_in
from dagster_checkpoints.spark.errors import (
    EventTimeError,
    PlanRefusedError,
    StageResultError,
    StageStreamError,
    StageWatermarkError,
)
from dagster_checkpoints.spark.identifiers import identifier
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.channel_sources import RECORDS
from dagster_checkpoints.spark.query.column_types import advice_on, repeated_names
from dagster_checkpoints.spark.query.error_text import advice_on_refused_plan, text_of_error
from dagster_checkpoints.spark.query.file_name_checks import check_file_names
from dagster_checkpoints.spark.query.file_streams import check_file_paths
from dagster_checkpoints.spark.query.fused_plans import (
    FusedStream,
    RefusedAtStage,
    check_fused,
    check_passes_on,
    fused_source,
    positions,
    watermark_nodes,
)
from dagster_checkpoints.spark.query.join_checks import (
    check_join_keys,
    check_joins,
    check_null_keys,
    check_semi_joins,
    check_time_keys,
    check_unmatched_rows,
)
from dagster_checkpoints.spark.query.operator_checks import (
    check_event_time_columns,
    check_event_time_moves,
    check_operators,
    check_optimized,
    check_processors,
)
from dagster_checkpoints.spark.query.operators import fires_by_the_clock, keeping_state
from dagster_checkpoints.spark.query.plan_nodes import (
    ROWS_OF_NO_STREAM,
    StreamSet,
    analyzed,
    children,
    optimized_joins,
    stream_name,
    streams,
)
from dagster_checkpoints.spark.query.row_counts import counted
from dagster_checkpoints.spark.query.source_checks import (
    SourceWarning,
    at_end,
    check_limits,
    check_source,
    rows_by_columns,
    source_of,
)
from dagster_checkpoints.spark.query.stage_calls import StageCall, no_dataframe, transform_stage
from dagster_checkpoints.spark.query.stage_inputs import nullable, whole


@dataclass(frozen=True)
class QueryPlan:
    """The plan of one task's query.

    Attributes:
        frame: The chain's output.
        schema: The output's schema as channels carry it, every column nullable.
        streaming: False if the chain begins with a source that returned a batch DataFrame.
        own_watermark: Whether the plan has a watermark that does not come from the channels: a source's, or the user's own. At
            the end of data it is advanced through the offset log.
        takes_watermark: Whether the plan reads the watermark sources of its inputs. A plan without state does not need them.
        outputs: The result of each stage of the chain, in order.
        output_mode: The query's output mode.
        warnings: Warnings about code that is allowed but probably wrong; each names its stage.
        stateful: For each stateful operator of the plan, from the top down, the stage that it belongs to.
        fused: The stream of each fused source; empty for a chain without fused sources.
        observations: By stage of a plan without streams, what counts its rows; not of the last stage.
        begins_at_end: Whether a source begins, without restored offsets, at what is its end when the query begins.
    """

    frame: DataFrame
    schema: StructType
    streaming: bool
    own_watermark: bool
    takes_watermark: bool = True
    outputs: Mapping[str, DataFrame] = field(default_factory=dict)
    output_mode: str = "append"
    warnings: tuple[str | SourceWarning, ...] = ()
    stateful: tuple[str, ...] = ()
    fused: Mapping[str, FusedStream] = field(default_factory=dict)
    observations: Mapping[str, Observation] = field(default_factory=dict)
    begins_at_end: bool = False

    @property
    def fires_by_the_clock(self) -> bool:
        """Whether the plan has timers or timeouts of processing time: Spark runs batch after batch."""
        return bool(self.stateful) and fires_by_the_clock(self.frame)


def build_plan(
    pipeline: Pipeline,
    calls: Sequence[StageCall],
    inputs: Mapping[str, DataFrame],
    stand_ins: Mapping[str, DataFrame] | None = None,
    own_watermarks: Collection[str] = (),
) -> QueryPlan:
    """Build the plan of a chain.

    Args:
        pipeline: The whole pipeline: it knows which stages carry event time, and which stages read them.
        calls: The chain's stages in order, without fused sources that have ended.
        inputs: The first stage's inputs by name; empty for a source.
        stand_ins: For each fused source that has ended, the DataFrame in its place; None for a chain without fused sources.
        own_watermarks: Stages of other chains that set a watermark themselves, on an input without one.

    Raises:
        StageError: A stage raised, or returned no DataFrame, a second watermark or no event time; names the stage.
        RefusedAtStage: Spark refuses the plan from that stage on, or the sources of the chain cannot be fused.
    """
    available = {**inputs, **(stand_ins or {})}
    fused = dict(stand_ins or {})
    meeting = merging_in(pipeline, [*fused, *(call.stage.name for call in calls)]) if stand_ins is not None else None
    own_watermark = bool(_watermarks(fused.values()))
    setting = frozenset(own_watermarks)
    warnings: list[str | SourceWarning] = []
    stateful: tuple[str, ...] = ()
    frame: DataFrame | None = None
    outputs: dict[str, DataFrame] = {}
    observations: dict[str, Observation] = {}
    begins_at_end = False
    for position, call in enumerate(calls):
        arguments = {name: available[name] for name in call.stage.inputs}
        carried = _watermarks(arguments.values())
        if call.stage.name == meeting:
            check_passes_on(meeting, outputs)
        frame = transform_stage(call, arguments)
        streaming = frame.isStreaming
        if arguments:
            _check_streams(call, frame, arguments)
        elif streaming:
            warnings += check_source(call, frame)
            begins_at_end = begins_at_end or any(at_end(source_of(frame, leaf)) for leaf in streams(frame))
            warnings += check_file_paths(call, frame)
        if not arguments and not streaming and len(calls) > 1:
            # Its reader expects a stream, and gets one through a channel.
            (reader,) = pipeline.downstream(call.stage.name)
            raise RefusedAtStage(reader, f"the source {call.stage.name!r} returned a batch DataFrame")
        own = streaming and bool(_watermarks([frame]) - carried)
        if own and (pipeline.carries_watermark(call.stage.name) and _input_carries(pipeline, call.stage)):
            raise StageWatermarkError(
                call.stage.name,
                call.context.instance,
                "calls withWatermark on an input that already carries one, declared at its source; Spark forbids a second. "
                f"Remove the call ({call.stage.location}); declare lateness at the source.",
            )
        if own and meeting not in (None, call.stage.name, *outputs):
            # Spark would wait for that watermark also when the source has ended.
            raise RefusedAtStage(str(meeting), f"{call.stage.name!r}, which is in front of it, calls withWatermark")
        if call.stage.watermark is not None and streaming:
            if own:
                raise StageWatermarkError(
                    call.stage.name,
                    call.context.instance,
                    "declares watermark= and also calls withWatermark. Keep the declaration, remove the call.",
                )
            _check_event_time(call, frame, call.stage.watermark.column)
            frame = frame.withWatermark(
                identifier(call.stage.watermark.column), f"{call.stage.watermark.lateness_ms} milliseconds"
            )
            own = True
        own_watermark = own_watermark or own
        setting = setting | {call.stage.name} if own else setting
        if arguments and streaming:
            warnings += check_event_time_moves(pipeline, call, frame, arguments, setting)
        _check_output_event_time(pipeline, call, frame)
        if streaming:
            check_operators(pipeline, call, frame, divisible=bool(position and arguments))
            _check_supported(pipeline, call, frame, position)
            if arguments:
                warnings += check_null_keys(call, frame, arguments)
                warnings += check_processors(call, frame, arguments)
            if arguments and not pipeline.is_bounded(call.stage.name):
                warnings += check_joins(call, frame, arguments)
            check_join_keys(call, frame)
            for check in (check_optimized, check_time_keys, check_unmatched_rows, check_semi_joins):
                check(call, frame, divisible=bool(position and arguments))
            stateful = (call.stage.name,) * (keeping_state(frame) - len(stateful)) + stateful
        if position < len(calls) - 1:
            rows = whole(frame) if not arguments and rows_by_columns(frame) else frame
            frame, observation = counted(call.stage.name, position, rows, state=bool(stateful))
            observations |= {call.stage.name: observation} if observation is not None else {}
        if stand_ins is not None and not arguments:
            frame = fused[call.stage.name] = fused_source(call.stage.name, frame)
        available[call.stage.name] = outputs[call.stage.name] = frame
    assert frame is not None
    _check_columns(calls[-1], frame)
    check_event_time_columns(calls, outputs)
    check_file_names(calls, frame, inputs)
    streams_of = positions(frame, fused, stand_ins) if stand_ins is not None else {}
    if meeting is not None and stand_ins is not None:
        check_fused(meeting, pipeline, fused, stand_ins, streams_of, len(streams(frame)))
    for call in calls:
        if not call.stage.inputs and ((of := streams_of.get(call.stage.name)) is None or of.limit is None):
            warnings += check_limits(call, outputs[call.stage.name])
    return QueryPlan(
        frame,
        nullable(frame.schema),
        frame.isStreaming,
        own_watermark,
        outputs=outputs,
        output_mode=calls[-1].stage.output_mode,
        warnings=tuple(warnings),
        stateful=stateful,
        fused=streams_of,
        observations=observations,
        begins_at_end=begins_at_end,
    )


# Logical operators that keep no state from batch to batch, by the names of Spark's plan nodes.
_WITHOUT_STATE = frozenset(
    {
        "CollectMetrics",
        "EventTimeWatermark",
        "Filter",
        "Generate",
        ROWS_OF_NO_STREAM,
        "MapInArrow",
        "MapInPandas",
        "Project",
        "Repartition",
        "RepartitionByExpression",
        "ResolvedHint",
        "StreamingRelationV2",
        "SubqueryAlias",
        "Union",
    }
)


def keeps_no_state(plan: QueryPlan) -> bool:
    """Whether a streaming plan certainly keeps no state from batch to batch; False if that is not certain."""
    return plan.streaming and not plan.own_watermark and _keeps_no_state(analyzed(plan.frame))


def _keeps_no_state(plan: Any) -> bool:
    if not plan.isStreaming():
        return True
    streaming = [child for child in children(plan) if child.isStreaming()]
    name = plan.nodeName()
    if name == "Join":
        return len(streaming) == 1 and _keeps_no_state(streaming[0])
    return name in _WITHOUT_STATE and all(_keeps_no_state(child) for child in streaming)


def conform(call: StageCall, what: str, frame: DataFrame, schema: StructType, of: str = "transform") -> DataFrame:
    """The rows that a method of a stage returned, with the columns that the stage's consumers expect.

    Args:
        what: The method that returned the rows, for errors.
        frame: The rows.
        schema: The schema of the stage's rows.
        of: What declares the schema, for errors.

    Raises:
        StageResultError: The result is not a DataFrame, or its columns are not those of `transform`.
        StageStreamError: The result is a stream.
    """
    problem = no_dataframe(frame)
    if problem:
        raise StageResultError(
            call.stage.name,
            call.context.instance,
            f"expected {what} ({call.stage.location}) to return a Spark DataFrame or None, found {problem}.",
        )
    if frame.isStreaming:
        raise StageStreamError(
            call.stage.name,
            call.context.instance,
            f"expected {what} ({call.stage.location}) to return rows, found a stream. Read a table instead "
            "(context.spark.read), or make the stream a source of the pipeline.",
        )
    found = nullable(frame.schema)
    if {f.name: f.dataType for f in found} != {f.name: f.dataType for f in schema}:
        raise StageResultError(
            call.stage.name,
            call.context.instance,
            f"expected {what} ({call.stage.location}) to return the columns of {of}, {schema.simpleString()}, found "
            f"{found.simpleString()}. Select and cast them, or add the columns to {of}.",
        )
    return frame if found.names == schema.names else frame.select(*[F.col(identifier(name)) for name in schema.names])


def not_streaming(call: StageCall) -> StageResultError:
    """The error for an unbounded source that returned a batch DataFrame."""
    return StageResultError(
        call.stage.name,
        call.context.instance,
        "is declared @unbounded_source, but returned a batch DataFrame, which ends. Use spark.readStream, or declare the source "
        "@bounded_source.",
    )


def differing_schema(chain: Chain, index: int, known: StructType, found: StructType) -> StageResultError:
    """The error for two instances of a stage that return different columns."""
    return StageResultError(
        chain.stages[-1],
        chain.instances[index],
        f"expected the schema of the other instances, {known.simpleString()}, found {found.simpleString()}. Every instance "
        "must return the same columns.",
    )


def no_such_key(chain: Chain, index: int, consumer: str, key: str, schema: StructType) -> StageResultError:
    """The error for rows that are to be distributed by a column that they do not have."""
    return StageResultError(
        chain.stages[-1],
        chain.instances[index],
        f"its output to {consumer!r} is distributed by key {key!r}; found only the columns {', '.join(schema.names)}. Name one "
        f"of these in StageInput(key=...) of {consumer!r}, or add the column.",
    )


def type_not_written(stage: Stage, instance: str, path: str, kind: DataType) -> StageResultError:
    """The error for an output column whose type Parquet files cannot hold."""
    return StageResultError(
        stage.name,
        instance,
        f"its result ({stage.location}) has column {path!r} of type {kind.simpleString()}; expected types that Parquet files can "
        f"hold, since every output is written as Parquet. {advice_on(path, kind)}",
    )


def _check_streams(call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame]) -> None:
    """Check that a derived stage reads all of its streaming inputs, and no other stream.

    The records of an input that is not read would wait for ever.
    """
    used = StreamSet([frame])
    for name, given in arguments.items():
        if not all(leaf in used for leaf in streams(given)):
            raise StageResultError(
                call.stage.name,
                call.context.instance,
                f"its result ({call.stage.location}) does not read its input {name!r}. Use the input, or remove the parameter.",
            )
    allowed = StreamSet(arguments.values())
    others = {stream_name(leaf): None for leaf in streams(frame) if leaf not in allowed}
    if others:
        named = ", ".join("another stage's output" if name == RECORDS else name for name in others)
        raise StageStreamError(
            call.stage.name,
            call.context.instance,
            f"expected its result ({call.stage.location}) to read no other stream than its inputs "
            f"({', '.join(map(repr, arguments))}), found {named}. No barrier reaches such a stream and its end is not known, so "
            "rows would be lost. Return that stream from a source (@bounded_source or @unbounded_source) and take the "
            "source as a parameter; for lookups, read a table: context.spark.read.",
        )


def _input_carries(pipeline: Pipeline, stage: Stage) -> bool:
    return any(pipeline.carries_watermark(name) for name, how in stage.inputs.items() if how.mode == "stream")


def _check_output_event_time(pipeline: Pipeline, call: StageCall, frame: DataFrame) -> None:
    column = pipeline.event_time(call.stage.name)
    read_as_stream = any(
        edge.input.mode == "stream" and not edge.refused for edge in pipeline.edges if edge.source == call.stage.name
    )
    if column is not None and read_as_stream:
        _check_event_time(call, frame, column)


_OF_WINDOWS = frozenset({"spark.timeWindow", "spark.sessionWindow"})
"""What Spark notes of a window in its column's metadata; `F.window_time` takes no other structure."""


def _check_event_time(call: StageCall, frame: DataFrame, column: str) -> None:
    kinds = {field.name: field.dataType for field in frame.schema.fields}
    windows = [field.name for field in frame.schema.fields if field.metadata.keys() & _OF_WINDOWS]
    kind = kinds.get(column)
    if isinstance(kind, TimestampType):
        return
    if kind is None:
        found = f"no column {column!r} among {', '.join(kinds)}"
        advice = (
            f"select F.window_time({windows[0]!r}).alias({column!r})"
            if windows
            else "keep the column, or name another with event_time="
        )
    else:
        found = f"{column!r} of type {kind.simpleString()}"
        of_struct = f"F.window_time({column!r})" if column in windows else "the field that holds it"
        advice = (
            f"cast it: F.col({column!r}).cast('timestamp')"
            if not isinstance(kind, StructType)
            else f"select {of_struct} as a separate column and name that column with event_time="
        )
        if isinstance(kind, TimestampNTZType):
            advice += " (TIMESTAMP_NTZ has no time zone, so it is not a point in time)"
    raise EventTimeError(
        call.stage.name,
        call.context.instance,
        f"expected its output's event time to be a top-level TIMESTAMP column, found {found}. To correct it, {advice}.",
    )


def _check_columns(call: StageCall, frame: DataFrame) -> None:
    """Check that Parquet files can hold the chain's output: columns, each with a type, and no name twice."""
    repeated = list(repeated_names(frame.schema))
    untyped = [field.name for field in frame.schema.fields if isinstance(field.dataType, NullType)]
    if not frame.columns:
        problem, remedy = "has no column", "Select at least one: F.lit(True).alias(...) if only the number of rows matters."
    elif repeated:
        problem = f"has more than one column {', '.join(map(repr, repeated))} (upper and lower case are not distinguished)"
        remedy = "Rename or drop one of each; a join with on=<name> keeps one column."
    elif untyped:
        problem = f"has no type for column {', '.join(map(repr, untyped))}"
        remedy = "Cast the column: F.lit(None).cast(...)."
    else:
        return
    raise StageResultError(call.stage.name, call.context.instance, f"its result ({call.stage.location}) {problem}. {remedy}")


def _check_supported(pipeline: Pipeline, call: StageCall, frame: DataFrame, position: int) -> None:
    """Run Spark's check of streaming plans before the job starts, and its optimizer, which refuses some conditions of joins.

    Spark itself runs them only when the query starts.
    """
    from pyspark.errors import AnalysisException

    jvm = jvm_of(frame.sparkSession)
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[call.stage.output_mode]()
    try:
        checker.checkForStreaming(analyzed(frame), mode)
        optimized_joins(frame)
    except AnalysisException as error:
        if position and call.stage.inputs:
            raise RefusedAtStage(call.stage.name, text_of_error(error)) from error
        raise PlanRefusedError(
            call.stage.name,
            call.context.instance,
            f"{advice_on_refused_plan(error, pipeline, call.stage, analyzed(frame)).rstrip()}\n{text_of_error(error)}",
        ) from error


def _watermarks(frames: Any) -> set[str]:
    """The ids of the watermark nodes; a set, since a stage may use an input twice (a self-join)."""
    return {identity for frame in frames for identity in watermark_nodes(frame)}
