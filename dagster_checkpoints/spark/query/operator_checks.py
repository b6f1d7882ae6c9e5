"""Refuses operators over a stream that Spark's own check of a plan accepts, and whose rows are not those of a batch.

Spark computes some of them for each micro-batch by itself, never emits rows of others, or finds only in the first micro-batch
that it cannot run them. Analysis only.

Source: Spark's `UnsupportedOperationChecker`, `RewriteExceptAll`, `ReplaceDistinctWithAggregate`, `AttachDistributedSequenceExec`
and `ResolveFunctions`, which writes a table function's argument that is a table as the left side of a lateral join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.column_origins import as_sql
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage
from dagster_checkpoints.spark.query.operators import keeping_state
from dagster_checkpoints.spark.query.plan_nodes import (
    PlanNode,
    analyzed_nodes,
    children,
    is_event_time,
    is_time_column,
    items,
    nodes,
    once,
    optimized_nodes,
    reads_streams,
)
from dagster_checkpoints.spark.query.spark_advice import advice_on_event_time
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
