"""Refuses operators over a stream that Spark's own check of a plan accepts, and whose rows are not those of a batch.

Spark computes some of them for each micro-batch by itself, never emits rows of others, or finds only in the first micro-batch
that it cannot run them.

Of other plans its optimizer makes plans with which rows would be missing: Spark plans each micro-batch of what the optimizer
makes of the stage's plan, and checks only the stage's. The optimizer leaves out what does not change the rows of a table, such as
the other side of an outer join of which nothing is used; and it makes joins and groups of a subquery that refers to the rows
around it. Of a stream, event time then stands still, or rows are never due. Nor does it move for a stage that waits for a source
without a watermark (`pipeline.watermark_reach` knows which sources these are). Analysis only; must not know tasks.

Source: Spark's `UnsupportedOperationChecker`, `RewriteExceptAll`, `ReplaceDistinctWithAggregate`,
`AttachDistributedSequenceExec`, `ResolveFunctions`, which writes a table function's argument that is a table as the left side of
a lateral join, `EliminateOuterJoin`, `PropagateEmptyRelation`, `DecorrelateInnerQuery` and `WatermarkTracker`, which waits for
every watermark of the plan that it was made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Pipeline, watermark_reach
from dagster_checkpoints.spark.errors import EventTimeHeldBackError, PlanRefusedError
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.column_origins import as_sql
from dagster_checkpoints.spark.query.declared_states import declared_states, processor_of
from dagster_checkpoints.spark.query.error_text import advice_on_event_time
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage, refused_plan, watermark_nodes
from dagster_checkpoints.spark.query.join_checks import is_outer
from dagster_checkpoints.spark.query.operators import WITH_STATE, keeping_state
from dagster_checkpoints.spark.query.plan_nodes import (
    PlanNode,
    added,
    analyzed,
    analyzed_nodes,
    children,
    is_event_time,
    is_time_column,
    items,
    nodes,
    once,
    optimized_nodes,
    reads_streams,
    stream_joins,
)
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stateful_nodes import PROCESSOR

_OF_MICRO_BATCHES = {
    "FlatMapGroupsInPandas": "applyInPandas",
    "FlatMapGroupsInArrow": "applyInArrow",
    "FlatMapCoGroupsInPandas": "cogroup(...).applyInPandas",
    "FlatMapCoGroupsInArrow": "cogroup(...).applyInArrow",
}
"""By plan node, the method of a groupBy whose function gets the rows that a group has in one micro-batch."""
_EXCEPT, _EXCEPT_ALL = "Except", "Except All"
_NUMBERED, _LATERAL = "AttachDistributedSequence", "LateralJoin"
_TABLE_ARGUMENT = "__auto_generated_subquery_name_"
"""How the alias begins under which Spark gives a table function an argument that is a table."""
_AGGREGATE, _JOIN = "Aggregate", "Join"
_CLOCK = frozenset({"CurrentDate", "CurrentTimestamp", "LocalTimestamp", "Now"})
"""Expressions that Spark replaces, in each micro-batch of a stream, by one that is not deterministic."""
_OF_SESSIONS = "spark.sessionWindow"
"""The key of a column's metadata by which Spark knows a session window."""
_KEYS: dict[str, Callable[[Any], Iterable[Any]]] = {
    _AGGREGATE: lambda node: items(node.groupingExpressions()),
    "Deduplicate": lambda node: items(node.keys()),
    "DeduplicateWithinWatermark": lambda node: items(node.keys()),
    "Distinct": lambda node: items(node.output()),
    _EXCEPT: lambda node: items(node.output()),
    "FlatMapGroupsInPandasWithState": lambda node: items(node.groupingAttributes()),
    PROCESSOR: lambda node: list(items(node.child().output()))[: node.groupingAttributesLen()],
}
"""By plan node with state, the columns of the key of its state."""
_PROCESSORS = frozenset({"FlatMapGroupsInPandasWithState", PROCESSOR})
"""The plan nodes whose state is kept by code in Python."""
_PANDAS = "pandas"
"""Spark's name of a processor of `transformWithStateInPandas`."""
_ONE_STATE = "Where a micro-batch has a null key, Spark gives the state of null to other keys, too, without an error"
_NOT_NULL_IN_PANDAS = {
    **dict.fromkeys(("byte", "short", "integer", "long"), _ONE_STATE),
    **dict.fromkeys(("timestamp", "timestamp_ntz"), "A null key ends the run with Python's text"),
}
"""By type, what happens to the keys of a processor that reads pandas DataFrames if one is null."""
_READS: dict[str, Callable[[Any], Iterable[Iterable[Any]]]] = {
    _AGGREGATE: lambda node: [items(node.groupingExpressions())],
    _JOIN: lambda node: [items(side.output()) for side in children(node)] if reads_streams(node) else [],
    **dict.fromkeys(
        ("Deduplicate", "DeduplicateWithinWatermark", "FlatMapGroupsInPandasWithState", PROCESSOR),
        lambda node: [items(node.child().output())],
    ),
}
"""By plan node with state, the columns among which Spark looks for the event time; of a join, by side."""
_CHECKED = frozenset({*_OF_MICRO_BATCHES, *_KEYS, _EXCEPT_ALL, _JOIN, _NUMBERED, _LATERAL})


def check_operators(pipeline: Pipeline, call: StageCall, frame: DataFrame, *, divisible: bool) -> None:
    """Check that each operator of a stage's plan computes over the stream what it computes over a table.

    Args:
        pipeline: The pipeline; it knows which event time reaches the stage.
        call: The stage.
        frame: Its result, a stream.
        divisible: Whether the stage may begin a query of its own, at whose inputs event time begins again.

    Raises:
        RefusedAtStage: An operator lacks event time, and the stage may begin a query of its own.
        PlanRefusedError: An operator does not.
    """
    append = call.stage.output_mode == "append"
    for each in analyzed_nodes(frame):
        if each.name not in _CHECKED or not each.of.isStreaming():
            continue
        problem = ""
        if each.name in _OF_MICRO_BATCHES:
            problem = (
                f"calls {_OF_MICRO_BATCHES[each.name]} of a groupBy on a stream. Spark accepts it, but calls the function with "
                "the rows that a group has in one micro-batch: a group would be divided wherever a micro-batch ends. Collect the "
                "rows of each window, groupBy(F.window(...), key).agg(F.collect_list(F.struct(...))), and compute with the "
                "arrays; keep state with transformWithStateInPandas or applyInPandasWithState; or join the streams, in place of "
                "a cogroup."
            )
        elif each.name == _NUMBERED:
            problem = (
                "numbers the rows of a stream (zipWithIndex). Spark accepts it, but begins at 0 again in each micro-batch: rows "
                "have the same number. Derive a number from the row, such as F.xxhash64(<its key>)."
            )
        elif each.name == _LATERAL and (function := _called_with_table(each.of)):
            problem = (
                f"gives a stream to the table function {function!r} as a table. Spark calls the function with the rows of one "
                "micro-batch, each time from the start. Call it for each row, in LATERAL, with columns as arguments; keep state "
                "with transformWithState; or collect the rows of each window, groupBy(F.window(...), key)"
                ".agg(F.collect_list(F.struct(...))), and give it the array."
            )
        elif each.name == _EXCEPT_ALL:
            problem = (
                "has exceptAll (EXCEPT ALL) of a stream and a table. Spark accepts it, but takes the table's rows away again in "
                "each micro-batch. Use a left anti join with the table, which drops all rows that are in it."
            )
        elif each.name == _EXCEPT and append and not any(map(is_event_time, items(each.of.output()))):
            if divisible:
                raise RefusedAtStage(call.stage.name, "the columns of its EXCEPT hold no event time")
            problem = (
                "has EXCEPT (subtract) of a stream and a table, whose distinct rows Spark can only emit when event time has "
                f"passed them: {advice_on_event_time(pipeline, call.stage)} Or use a left anti join with the table."
            )
        elif each.name == _AGGREGATE and append and _leaves_out_event_time(each.of.child()):
            problem = (
                "groups by sets of columns (rollup, cube, GROUPING SETS), some of which leave out the event time. Spark accepts "
                "it, but would never emit the rows of these sets. Keep the window in each set, in SQL "
                "GROUP BY window(ts, '1 hour'), CUBE(a, b); and compute a total over all time when the result is read."
            )
        elif each.name == _AGGREGATE and _is_in_pandas(each.of):
            problem = (
                "aggregates a stream with a function of pandas or Arrow, which Spark cannot run on streams. Aggregate with "
                "Spark's functions; or collect the values, F.collect_list(column), and compute with the array behind the "
                "aggregation."
            )
        elif each.name == _AGGREGATE and _groups_by_sessions_alone(frame):
            problem = (
                "groups a stream by a session window alone, or with constants, which Spark does not run. Group by a key as well; "
                "for sessions of all rows by one that is equal in each row, and no constant for Spark: F.hash('ts') * 0."
            )
        elif clock := _asked_clock(each):
            place = "the condition of a join" if each.name == _JOIN else "an aggregate function"
            problem = (
                f"has {clock} in {place} of a stream, where Spark does not take the time of a micro-batch. Compute it as a "
                f"column in front, withColumn('now', F.expr({clock!r})), and use that column."
            )
        elif collated := _collated_key(frame, each):
            problem = (
                f"groups a stream, or drops its duplicates, by {collated}: Spark keeps no state under a text with a collation, "
                "in which unequal texts are equal. Use a text that is equal where these are: for UTF8_LCASE "
                "F.collate(F.lower(column), 'UTF8_BINARY'), for UTF8_BINARY_RTRIM F.collate(F.rtrim(column), 'UTF8_BINARY')."
            )
        if problem:
            raise PlanRefusedError(call.stage.name, call.context.instance, f"its result ({call.stage.location}) {problem}")


def check_processors(call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame]) -> list[str]:
    """Find a stage's processors whose state Spark keeps in another way than the code means it, without an error.

    Args:
        call: The stage.
        frame: The stage's result.
        arguments: The stage's inputs; their processors belong to earlier stages of the chain.

    Returns:
        Warnings.
    """
    found = added(_odd_states, frame, arguments.values())
    return [f"Stage {call.stage.name!r} ({call.stage.location}): {text}" for text in found]


@once
def _odd_states(frame: DataFrame) -> list[str]:
    """What is odd in the states of a plan's processors."""
    processors = [each for each in analyzed_nodes(frame) if each.name in _PROCESSORS and each.of.isStreaming()]
    return [text for each in processors for text in (*_floating_keys(each), *_null_keys(each), *_states_of_maps(each))]


def _floating_keys(processor: PlanNode) -> Iterable[str]:
    """An aggregation, a join and `dropDuplicates` get one form of zero and of NaN; the key of a processor stays as it is."""
    for key in _KEYS[processor.name](processor.of):
        if _holds_floats(json.loads(key.dataType().json())):
            yield (
                f"it keeps state of a processor by {as_sql(key)}, a floating-point number. Spark has one state for 0.0 and "
                "another one for -0.0, and may call the code once for each row of NaN, which no other group of Spark does. "
                "Expected a key of another type: a decimal, or a text that is equal where the numbers are, "
                f"(F.expr({as_sql(key)!r}) + F.lit(0.0)).cast('string'). If no key is -0.0, NaN or null, nothing is wrong."
            )


def _null_keys(processor: PlanNode) -> Iterable[str]:
    """Pandas has whole numbers beside a null as floating-point numbers, of which Spark makes null keys; it has no null time."""
    if processor.name != PROCESSOR or processor.of.userFacingDataType().toString() != _PANDAS:
        return
    rows = processor.of.child()
    known = [each.child() for each in items(rows.constraints().toSeq()) if each.nodeName() == "IsNotNull"]
    for key in _KEYS[processor.name](processor.of):
        kind = str(key.dataType().typeName())
        if kind not in _NOT_NULL_IN_PANDAS or not key.nullable() or any(each.semanticEquals(key) for each in known):
            continue
        yield (
            f"its processor reads pandas DataFrames, and keeps state by {as_sql(key)}, of the type {kind}, which may be null. "
            f"{_NOT_NULL_IN_PANDAS[kind]}. Expected a text as the key, F.col({as_sql(key)!r}).cast('string'); or "
            "transformWithState, whose processor reads rows; or only rows with a key, "
            f".where({f'{as_sql(key)} IS NOT NULL'!r}). If no key is null, nothing is wrong."
        )


def _states_of_maps(processor: PlanNode) -> Iterable[str]:
    """A row has a map as a list of pairs, which a state with a map takes, and keeps as null."""
    if processor.name != PROCESSOR or not any('"map"' in each.dataType().json() for each in items(processor.of.child().output())):
        return
    for state in declared_states(processor_of(processor.of)):
        if "map<" in state:
            yield (
                f"its processor keeps a map in its state ({state}), and reads rows with a map. Spark gives a row's map as a "
                "list of pairs, and a state that is updated with such a list holds null. Expected dict(row.name) in the place of "
                "row.name. If the state gets other maps only, nothing is wrong."
            )


def _holds_floats(kind: Any) -> bool:
    """Whether a type, in Spark's JSON form, is or holds a floating-point number."""
    if not isinstance(kind, dict):
        return kind in ("float", "double")
    if kind["type"] == "array":
        return _holds_floats(kind["elementType"])
    return kind["type"] == "struct" and any(_holds_floats(field["type"]) for field in kind["fields"])


def check_event_time_columns(calls: Sequence[StageCall], outputs: Mapping[str, DataFrame]) -> None:
    """Check that each operator with state reads one event-time column at most: Spark finds others in the first micro-batch.

    Args:
        calls: The stages of the chain, in order.
        outputs: The result of each of them; of the last one, a stream.

    Raises:
        RefusedAtStage: An operator reads several, and its stage may begin a query of its own, to which one event time comes.
        PlanRefusedError: An operator reads several.
    """
    if not _event_times(outputs[calls[-1].stage.name]):  # what the last stage leaves out, Spark drops in front of the operator
        return
    position, times = next((n, found) for n, call in enumerate(calls) if (found := _event_times(outputs[call.stage.name])))
    stage, named = calls[position].stage, " and ".join(map(repr, times))
    if position and stage.inputs:
        raise RefusedAtStage(stage.name, f"its operator with state would read several event times, {named}")
    raise PlanRefusedError(
        stage.name,
        calls[position].context.instance,
        f"its result ({stage.location}) has an operator with state (a group, a join, dropDuplicates, a processor) behind columns "
        f"that are both event time, {named}. Spark accepts it, but allows one, and fails in the first micro-batch. Select one of "
        f"them in front of that operator, or make the other a plain time: F.timestamp_micros(F.unix_micros({times[-1]!r})).",
    )


@once
def _event_times(frame: DataFrame) -> list[str]:
    """The event-time columns that an operator with state reads, if there are several; of the lowest such operator."""
    if not frame.isStreaming or not keeping_state(frame):
        return []
    for each in reversed(optimized_nodes(frame)):
        if each.name not in _READS or not each.of.isStreaming():
            continue
        for columns in _READS[each.name](each.of):
            times = {column.exprId().id(): column.name() for column in columns if is_time_column(column)}
            if len(times) > 1:
                return list(times.values())
    return []


def _called_with_table(join: Any) -> str:
    """The function of Python that a lateral join calls with its left side as a table; empty if it calls none, or row by row."""
    left = join.left()
    if left.nodeName() != "SubqueryAlias" or not str(left.alias()).startswith(_TABLE_ARGUMENT):
        return ""
    generators = (node.generator() for node in nodes(join.right().plan()) if node.nodeName() == "Generate")
    return next((str(each.name()) for each in generators if str(each.getClass().getSimpleName()) == "PythonUDTF"), "")


def _collated_key(frame: DataFrame, each: PlanNode) -> str:
    """A column in the key of a node's state whose equal values may have different bytes, in words; empty if there is none."""
    is_exact = jvm_of(frame.sparkSession).org.apache.spark.sql.catalyst.util.UnsafeRowUtils.isBinaryStable
    keys = _KEYS[each.name](each.of) if each.name in _KEYS else ()
    return next((f"{as_sql(key)} of type {key.dataType().sql()}" for key in keys if not is_exact(key.dataType())), "")


def _leaves_out_event_time(below: Any) -> bool:
    """Whether what is below an aggregation makes rows for grouping sets, in some of which the event time is null."""
    if below.nodeName() != "Expand":
        return False
    times = [number for number, column in enumerate(items(below.output())) if is_event_time(column)]
    return any(row.apply(number).foldable() for row in items(below.projections()) for number in times)


def _groups_by_sessions_alone(frame: DataFrame) -> bool:
    """Whether Spark's optimizer leaves nothing but a session window in the key of a group."""
    groups = [each.of for each in optimized_nodes(frame) if each.name == _AGGREGATE and each.of.isStreaming()]
    keys = [list(items(group.groupingExpressions())) for group in groups]
    return any(len(key) == 1 and _is_session(key[0]) for key in keys)


def _is_session(key: Any) -> bool:
    return key.nodeName() == "AttributeReference" and bool(key.metadata().contains(_OF_SESSIONS))


def _asked_clock(each: PlanNode) -> str:
    """The clock that the arguments of an aggregate function, or a join's condition, ask, as SQL; empty if they ask none."""
    if each.name == _JOIN:
        asking = [each.of.condition().get()] if each.of.condition().isDefined() else []
    elif each.name == _AGGREGATE:
        parts = (part for expression in items(each.of.aggregateExpressions()) for part in nodes(expression))
        asking = [part.aggregateFunction() for part in parts if part.nodeName() == "AggregateExpression"]
    else:
        asking = []
    return next((str(part.sql()) for expression in asking for part in nodes(expression) if part.nodeName() in _CLOCK), "")


def _is_in_pandas(aggregate: Any) -> bool:
    """Whether an aggregation calls a user-defined aggregate function."""
    parts = (part for each in items(aggregate.aggregateExpressions()) for part in nodes(each))
    return any(str(part.getClass().getSimpleName()) == "PythonUDAF" for part in parts)


_WATERMARK = "EventTimeWatermark"


def check_optimized(call: StageCall, frame: DataFrame, *, divisible: bool) -> None:
    """Check that the optimizer leaves a stage's plan its event time, and adds no operators with state to it.

    Args:
        frame: The stage's result, a stream.
        divisible: Whether the stage may begin a query of its own, whose inputs the optimizer does not look through.

    Raises:
        RefusedAtStage: Rows would be missing, and the stage may begin a query of its own.
        PlanRefusedError: Rows would be missing.
    """
    if keeping_state(frame) and _loses_a_watermark(frame):
        text = (
            f"its result ({call.stage.location}) reads a stream that has no effect on the rows: the other side of an outer join "
            "of which no column is used, or rows that a condition never lets through. Spark's optimizer leaves it out, and its "
            "event time with it, for which the rest of the query would wait for ever. Remove the join or the branch; or return "
            "it from a stage of its own, with all its columns"
        )
        raise refused_plan(call, text, "Spark would leave out a stream on whose event time the rest waits", divisible=divisible)
    if _has_subquery(frame) and (made := _made_by_optimizer(frame)):
        text = (
            f"its result ({call.stage.location}) has a subquery, or a lateral join, that refers to the rows of a stream by more "
            f"than equal columns: Spark makes {made} of it, which would lose rows without a match. Refer to them by equalities "
            "of columns alone; or join the table with the condition, and choose among the matches of a row in process_batch"
        )
        raise refused_plan(call, text, f"Spark makes {made} of its subquery", divisible=divisible)


def _loses_a_watermark(frame: DataFrame) -> bool:
    before = set(watermark_nodes(frame))
    if len(before) < 2:  # a plan without any stream has no state
        return False
    after = {str(node.of.nodeId().toString()) for node in optimized_nodes(frame) if node.name == _WATERMARK}
    return not before <= after


def _has_subquery(frame: DataFrame) -> bool:
    patterns = jvm_of(frame.sparkSession).org.apache.spark.sql.catalyst.trees.TreePattern
    return bool(analyzed(frame).containsPattern(patterns.PLAN_EXPRESSION()))


def _made_by_optimizer(frame: DataFrame) -> str:
    """What the optimizer makes of a plan that keeps state and was not there before; empty if nothing."""
    before, after = _state_in(analyzed_nodes(frame)), _state_in(optimized_nodes(frame))
    made = [what for what in before if after[what] > before[what]]
    return " and ".join(made)


def _state_in(nodes: Iterable[PlanNode]) -> dict[str, int]:
    streaming: list[PlanNode] = [node for node in nodes if node.of.isStreaming()]
    joins = sum(node.name == "Join" and reads_streams(node.of) for node in streaming)
    return {"a join of two streams": joins, "groups of a stream": sum(node.name in WITH_STATE for node in streaming)}


_AGGREGATES = frozenset({"Aggregate", "Distinct", "Except"})
"""Plan nodes that Spark runs as an aggregation: SELECT DISTINCT, a UNION or EXCEPT in SQL."""


def check_event_time_moves(
    pipeline: Pipeline, call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame], own: Collection[str]
) -> list[str]:
    """Check that event time moves at a stage which keeps state.

    Args:
        pipeline: The pipeline.
        call: The stage.
        frame: The stage's result, a stream.
        arguments: The stage's inputs; their operators belong to earlier stages of the chain.
        own: Stages that set a watermark themselves.

    Returns:
        Warnings: results come only after a bounded source has ended, or state is never dropped.

    Raises:
        EventTimeHeldBackError: The stage emits its rows when event time advances, and an unbounded source holds it back.
    """
    reach = watermark_reach(pipeline, call.stage.name, own)
    if not reach.is_held_back or call.stage.output_mode == "complete":
        return []
    streams = [given for given in arguments.values() if given.isStreaming]
    if keeping_state(frame) <= sum(map(keeping_state, streams)):
        return []
    waits = call.stage.output_mode == "append" and _waiting(frame) > sum(map(_waiting, streams))
    endless = [name for name in reach.without if not pipeline.is_bounded(name)]
    where = {name: f"{name!r} ({pipeline.stage(name).location})" for name in (*reach.declaring, *reach.without)}
    having, lacking = (", ".join(where[name] for name in names) for names in (reach.declaring, endless or reach.without))
    text = (
        f"it keeps state by event time, and reads {having}, which declares a watermark, together with {lacking}, which declares "
        "none. The watermark of a stage is the minimum over its inputs, and an input without one holds it back"
    )
    remedy = (
        f"Declare watermark=(column, lateness) at {', '.join(map(repr, endless or reach.without))} as well, also if all its rows "
        "are on time; or read a table instead of a stream."
    )
    if waits and endless:
        raise EventTimeHeldBackError(
            call.stage.name, call.context.instance, f"{text}: no row would be emitted before the pipeline is drained. {remedy}"
        )
    what = "no row is emitted" if waits else "its state is not dropped, and no timer of event time fires,"
    until = "before the pipeline is drained" if endless else "before that source has ended"
    return [f"Stage {call.stage.name!r} ({call.stage.location}): {text}: {what} {until}. {remedy}"]


def _waiting(frame: DataFrame) -> int:
    """The number of operators of a DataFrame's analyzed plan that emit rows only when event time advances."""
    aggregates = sum(each.name in _AGGREGATES and bool(each.of.isStreaming()) for each in analyzed_nodes(frame))
    return aggregates + sum(map(is_outer, stream_joins(frame)))
