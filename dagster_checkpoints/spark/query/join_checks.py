"""Finds joins of two streams that Spark cannot run, and those that keep their rows for ever.

Spark looks up the rows of the other side by their key, so the condition needs an equality of columns of both sides. It drops a
row of a stream-stream join from its state when no matching row can arrive any more. It derives that from a watermark on the
join's keys, or from a watermark on both sides and a condition that bounds one time by the other. An outer join emits a row
without a match only when it drops that row. Spark's own check of a plan accepts outer joins that never do: it wants a bound for
only one side of a full outer join, does not ask whether the side itself has event time, and takes any comparison of a column
with a constant for a bound of the event time. A join on the event time of one side and another time of the other side loses
rows, and so does a left semi join of rows that come when event time has passed them.

Source: https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#stream-stream-joins, and Spark's
`StreamingSymmetricHashJoinHelper.getStateWatermarkPredicates`, whose conditions this module evaluates; for its own check,
`UnsupportedOperationChecker.checkForStreamStreamJoinWatermark`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.column_origins import as_sql
from dagster_checkpoints.spark.query.fused_plans import refused_plan
from dagster_checkpoints.spark.query.plan_nodes import (
    added,
    is_event_time,
    is_time_column,
    items,
    nodes,
    once,
    optimized_joins,
)
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stateful_nodes import PROCESSOR

# Watermarks that are far from each other: a bound of the event time moves with the watermark, by as much.
_EARLIER_MS, _LATER_MS = MAX_WATERMARK_MS // 2, MAX_WATERMARK_MS
_PRESERVED = {"LEFT OUTER": ("left",), "RIGHT OUTER": ("right",), "FULL OUTER": ("left", "right")}
"""By the type of an outer join, the sides whose rows without a match are in its result."""
_FOR_EQUAL_BYTES = frozenset({"KnownFloatingPointNormalized", "NormalizeNaNAndZero", "CollationKey"})
"""Expressions of one argument that Spark's optimizer adds to the keys of a join."""
_CONSTANT_PARTS = {"Divide": 1, "IntegralDivide": 1, "Remainder": 1, "Pmod": 1, "TruncTimestamp": 0, "TruncDate": 1}
"""Expressions that Spark takes to be null at times. They are not if this argument, a divisor or a unit, is a constant."""
_WITH_TIMERS = frozenset({"FlatMapGroupsInPandasWithState", PROCESSOR})


@dataclass(frozen=True)
class _KeptSide:
    """A side of a join of two streams whose rows Spark never drops.

    Attributes:
        side: "left" or "right".
        how: The type of the join, as SQL.
        condition: The join's condition, as SQL.
        without_event_time: The sides that have no event time.
        constants: Comparisons of this side's columns with constants, which Spark takes for bounds of the event time.
    """

    side: str
    how: str
    condition: str
    without_event_time: tuple[str, ...]
    constants: tuple[str, ...]

    @property
    def preserved(self) -> bool:
        """Whether the side's rows without a match are in the join's result."""
        return self.side in _PRESERVED.get(self.how, ())


def check_join_keys(call: StageCall, frame: DataFrame) -> None:
    """Check that each join of two streams has a key under which Spark keeps state; it finds that out in the first micro-batch.

    Args:
        frame: The stage's result.

    Raises:
        PlanRefusedError: A join has none, or one whose equal values have different bytes.
    """
    jvm = jvm_of(frame.sparkSession)
    keys = jvm.org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys
    is_exact = jvm.org.apache.spark.sql.catalyst.util.UnsafeRowUtils.isBinaryStable
    for join in optimized_joins(frame):
        found = keys.unapply(join)
        if found.isEmpty():
            condition = join.condition()
            raise PlanRefusedError(
                call.stage.name,
                call.context.instance,
                f"its result ({call.stage.location}) joins two streams on "
                f"{as_sql(condition.get()) if condition.isDefined() else 'no condition'}, without an equality: Spark finds "
                "matching rows by the values that are equal on both sides, and cannot run this join. Add an equality, of a key, "
                "or of windows of the event time (F.window) that contain all times that may match.",
            )
        key = next((key for key in items(found.get()._2()) if not is_exact(key.dataType())), None)
        if key is not None:
            raise PlanRefusedError(
                call.stage.name,
                call.context.instance,
                f"its result ({call.stage.location}) joins two streams on {as_sql(key)} of type {key.dataType().sql()}: Spark "
                "keeps no state under a text with a collation that the condition computes. Compute it as a column of its side in "
                "front of the join, and compare that column; or compare texts that are equal where these are: for UTF8_LCASE "
                "F.collate(F.lower(column), 'UTF8_BINARY').",
            )


def check_joins(call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame]) -> list[str]:
    """Find a stage's joins of two streams in which Spark keeps a side's rows for ever.

    Args:
        frame: The stage's result.
        arguments: The stage's inputs; their joins belong to earlier stages of the chain.
    """
    kept = added(_kept_sides, frame, arguments.values())
    if not kept:
        return []
    sides = " and ".join(dict.fromkeys(each.side for each in kept))
    return [
        f"Stage {call.stage.name!r} ({call.stage.location}): its join of two streams keeps every row of its {sides} side for "
        "ever, since Spark cannot know when a row has no more matching rows: its state and every checkpoint grow without end. "
        "Declare watermark= at the sources of both inputs, and join on the event time as well: equal times, or a range such as "
        "right_ts BETWEEN left_ts AND left_ts + INTERVAL 1 HOUR."
    ]


def check_null_keys(call: StageCall, frame: DataFrame, arguments: Mapping[str, DataFrame]) -> list[str]:
    """Find a stage's joins of two streams whose keys may be null: Spark matches such rows with each other.

    It compares the keys of rows in its state byte by byte. In front of a join that is not a full outer one it drops the rows, of
    one side at least, in which a column is null that has to have a value; but only if the key is that column, and not computed
    in the condition (`coalesce(a, b)`, `a || b`, a text with a collation).

    Args:
        frame: The stage's result.
        arguments: The stage's inputs; their joins belong to earlier stages of the chain.
    """
    found = added(_null_keys, frame, arguments.values())
    if not found:
        return []
    how, keys = found[0]
    missing = " AND ".join(f"{key} IS NOT NULL" for key in keys)
    return [
        f"Stage {call.stage.name!r} ({call.stage.location}): Spark's {how.lower()} join of two streams matches rows whose key is "
        "null with each other, which a join of tables does not. If a key may be null, name that in the join's condition: "
        f"... AND {missing}."
    ]


@once
def _null_keys(frame: DataFrame) -> list[tuple[str, list[str]]]:
    """By join of two streams, its type and the keys of its left side that may be null on both sides."""
    jvm = jvm_of(frame.sparkSession)
    keys_of = jvm.org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys
    found = []
    for join in optimized_joins(frame):
        keys = keys_of.unapply(join)
        if keys.isEmpty():
            continue
        condition = join.condition()
        known = {str(part) for part in _conjuncts(condition.get())} if condition.isDefined() else set()
        for side in (join.left(), join.right()):
            known.update(str(part) for part in items(side.constraints().toSeq()))
        pairs = zip(items(keys.get()._2()), items(keys.get()._3()), strict=True)
        written = [(_as_written(left), _as_written(right)) for left, right in pairs]
        unknown = [as_sql(left) for left, right in written if all(_may_be_null(jvm, key, known) for key in (left, right))]
        if unknown:
            found.append((str(join.joinType().sql()), unknown))
    return found


def _as_written(key: Any) -> Any:
    """A join's key without what the optimizer adds so that equal floating-point numbers and texts have equal bytes."""
    name = key.nodeName()
    if name in _FOR_EQUAL_BYTES:
        return _as_written(key.child())
    if name == "ArrayTransform":
        return _as_written(key.argument())
    if name == "If" and key.predicate().nodeName() == "IsNull" and key.falseValue().nodeName() == "CreateNamedStruct":
        return _as_written(key.predicate().child())
    return key


def _may_be_null(jvm: Any, expression: Any, known: Set[str]) -> bool:
    """Whether an expression may be null where some conditions hold."""

    def not_null(part: Any) -> Any:
        return jvm.org.apache.spark.sql.catalyst.expressions.KnownNotNull(part)

    def with_known(part: Any) -> Any:
        if f"isnotnull({part})" in known:
            return not_null(part)
        parts = [with_known(each) for each in items(part.children())]
        if not parts:
            return part
        constant = parts[_CONSTANT_PARTS[part.nodeName()]] if part.nodeName() in _CONSTANT_PARTS else None
        is_known = constant is not None and constant.nodeName() == "Literal" and str(constant).strip("0.")  # not a divisor 0
        if is_known and not any(each.nullable() for each in parts):
            return not_null(part)
        return part.withNewChildren(jvm.PythonUtils.toSeq(parts))

    return bool(expression.nullable() and with_known(expression).nullable())


def check_unmatched_rows(call: StageCall, frame: DataFrame, *, divisible: bool) -> None:
    """Check that each outer join of two streams emits its rows without a match.

    Args:
        frame: The stage's result.
        divisible: Whether the stage may begin a query of its own, at whose inputs event time begins again.

    Raises:
        RefusedAtStage: A join never emits them, and the stage may begin a query of its own.
        PlanRefusedError: A join never emits them.
    """
    kept = next((kept for kept in _kept_sides(frame) if kept.preserved), None)
    if kept is None:
        return
    text = (
        f"its result ({call.stage.location}) has a {kept.how.lower()} join of two streams on {kept.condition}. Spark accepts it, "
        f"but would never emit the rows of its {kept.side} side that have no match, not even at the end: it emits such a row "
        f"when no match can arrive any more, and {_why_never(kept)}"
    )
    raise refused_plan(
        call, text, f"its {kept.how.lower()} join would never emit the {kept.side} rows without a match", divisible=divisible
    )


def check_time_keys(call: StageCall, frame: DataFrame, *, divisible: bool) -> None:
    """Check that no join of two streams compares the event time of one side with another time of the other side.

    Spark takes the first event time in the join's keys for the event time of both sides: it drops rows of both when the watermark
    has passed that key. Rows of the other side, which are on time by their own event time, may still come with such a key.

    Args:
        frame: The stage's result.
        divisible: Whether the stage may begin a query of its own, at whose inputs event time begins again.

    Raises:
        RefusedAtStage: A join would lose rows, and the stage may begin a query of its own.
        PlanRefusedError: A join would lose rows.
    """
    keys_of = jvm_of(frame.sparkSession).org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys
    for join in optimized_joins(frame):
        keys = keys_of.unapply(join)
        if keys.isEmpty():
            continue
        pairs = list(zip(items(keys.get()._2()), items(keys.get()._3()), strict=True))
        pair = next((pair for side in (0, 1) for pair in pairs if is_time_column(pair[side])), None)
        if pair is None or all(map(is_time_column, pair)):
            continue
        left, right = pair
        time, other, side = (left, right, join.right()) if is_time_column(left) else (right, left, join.left())
        if not any(node.nodeName() == "EventTimeWatermark" for node in nodes(side)):
            continue  # an input without a watermark holds event time back
        equality = f"{as_sql(time)} = {as_sql(other)}"
        text = (
            f"its result ({call.stage.location}) joins two streams on {equality}. Spark accepts it, but only "
            "the first is event time: Spark drops rows from the join when event time has passed it, while rows with an equal "
            "second one may still come, and would find no match. Bound the event times of both sides by a range in place of this "
            "equality, beside an equality of another key, such as k = other_k AND right_ts >= left_ts AND right_ts < left_ts + "
            "INTERVAL 1 HOUR; or select F.window(ts, ...) in place of the event time of each side, and join on equal windows."
        )
        raise refused_plan(
            call, text, f"its join compares the event time {as_sql(time)} with {as_sql(other)}", divisible=divisible
        )


def check_semi_joins(call: StageCall, frame: DataFrame, *, divisible: bool) -> None:
    """Check that no left semi join of two streams gets the rows of both sides only when event time has passed them.

    The micro-batch that brings such a row also drops it from the join's state. In inner and outer joins Spark keeps a left row as
    long as right rows of the same micro-batch may match it (SPARK-49829), in a left semi join it does not: the left row is lost.

    Args:
        frame: The stage's result.
        divisible: Whether the stage may begin a query of its own, at whose inputs event time begins again.

    Raises:
        RefusedAtStage: A join would lose rows, and the stage may begin a query of its own.
        PlanRefusedError: A join would lose rows.
    """
    for join in optimized_joins(frame):
        sides = join.left(), join.right()
        if str(join.joinType().sql()) != "LEFT SEMI" or not all(map(_emits_what_has_passed, sides)):
            continue
        text = (
            f"its result ({call.stage.location}) has a left semi join of two streams on {as_sql(join.condition().get())}, both "
            "sides of which come from operators that emit rows when event time has passed them (windows and other groups, outer "
            "joins, timers). Spark accepts it, but loses rows whose match comes in the same micro-batch. Return one of the two "
            "sides from a stage of its own, and join it in the next stage."
        )
        raise refused_plan(
            call, text, "its left semi join would lose rows that come when event time has passed them", divisible=divisible
        )


def _emits_what_has_passed(plan: Any) -> bool:
    """Whether rows of a plan come when the watermark has passed them."""
    return any(
        node.isStreaming()
        and (node.nodeName() == "Aggregate" or node.nodeName() in _WITH_TIMERS or (node.nodeName() == "Join" and is_outer(node)))
        for node in nodes(plan)
    )


def is_outer(join: Any) -> bool:
    """Whether rows without a match are in a join's result."""
    return str(join.joinType().sql()) in _PRESERVED


def _why_never(kept: _KeptSide) -> str:
    if kept.without_event_time:
        sides = " and ".join(kept.without_event_time)
        return (
            f"the {sides} side has no event time here. A time that is computed from others (coalesce, a sum, a cast) is not "
            "event time for Spark, nor is one whose source declares no watermark=. Join on the unchanged column; or return that "
            "side from a stage of its own, whose event-time column (event_time= if its name is another) may be computed, and "
            "join it in the next stage."
        )
    if kept.constants:
        return (
            f"Spark takes {' and '.join(kept.constants)} for a bound of that side's event time, which never moves. Compute the "
            'comparison as a column of that side first, withColumn("chosen", <comparison>), and write only that column in the '
            "join's condition."
        )
    return (
        "the condition has no bound of that side's event time: a later row of the other side may match at any time. Bound the "
        "times in both directions, such as right_ts BETWEEN left_ts - INTERVAL 5 MINUTES AND left_ts + INTERVAL 1 HOUR; or join "
        "on equal times or equal windows."
    )


@once
def _kept_sides(frame: DataFrame) -> list[_KeptSide]:
    """The sides of the plan's stream-stream joins whose rows are never dropped."""
    jvm = jvm_of(frame.sparkSession)
    helper = jvm.org.apache.spark.sql.catalyst.analysis.StreamingJoinHelper
    kept = []
    for join in optimized_joins(frame):
        if helper.isWatermarkInJoinKeys(join):
            continue
        left, right = join.left(), join.right()
        without = tuple(side for side, plan in (("left", left), ("right", right)) if not _has_watermark(plan))
        parts = list(_conjuncts(join.condition().get())) if join.condition().isDefined() else []
        text = as_sql(join.condition().get()) if parts else "no condition"
        for side, own, other in (("left", left, right), ("right", right, left)):
            bounds = {as_sql(part): _bound(jvm, own, other, part) for part in parts}
            constants = tuple(part for part, bound in bounds.items() if bound == "constant")
            if without or constants or "moves" not in bounds.values():
                kept.append(_KeptSide(side, str(join.joinType().sql()), text, without, constants))
    return kept


def _bound(jvm: Any, own: Any, other: Any, part: Any) -> str | None:
    """Whether the bound that Spark derives from a part of a condition "moves" with event time, or is "constant"; None if none."""
    helper, option = jvm.org.apache.spark.sql.catalyst.analysis.StreamingJoinHelper, jvm.scala.Option
    earlier, later = (
        helper.getStateValueWatermark(own.outputSet(), other.outputSet(), option.apply(part), option.apply(watermark))
        for watermark in (_EARLIER_MS, _LATER_MS)
    )
    if not later.isDefined():
        return None
    if later.get() - earlier.get() > (_LATER_MS - _EARLIER_MS) // 2:
        return "moves"
    return "constant" if later.get() < _LATER_MS else None


def _conjuncts(condition: Any) -> Iterator[Any]:
    if condition.nodeName() == "And":
        yield from _conjuncts(condition.left())
        yield from _conjuncts(condition.right())
    else:
        yield condition


def _has_watermark(plan: Any) -> bool:
    return any(map(is_event_time, items(plan.output())))
