"""The stateful operators in a query's executed plan: their watermarks, the rows dropped as late, and timers.

Must not know tasks. Every question is a call into the JVM, and some are asked after every batch: so the positions of the
operators in the plan are cached (Spark numbers a plan's nodes from the top down).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.spark.query.plan_nodes import analyzed_nodes, children, stream_joins

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATE_WRITER = "StateStoreWriter"
_LATE_ROWS = "numRowsDroppedByWatermark"
_REGISTERED_TIMERS = "numRegisteredTimers"
_ROWS_IN_STATE = "numTotalStateRows"
_SESSION_READER = "SessionWindowStateStoreRestore"  # drops the late rows for the operator that writes the sessions
_JOIN = "StreamingSymmetricHashJoin"
_LIMIT = "StreamingGlobalLimit"  # keeps state, and does not know event time: that of its input is that of its output

# Logical operators that keep state if their input is a stream; a join keeps state if both inputs are streams.
WITH_STATE = frozenset(
    {
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "Except",
        "FlatMapGroupsInPandasWithState",
        "FlatMapGroupsWithState",
        "GlobalLimit",
        "TransformWithState",
        "TransformWithStateInPySpark",
    }
)

_OF_USERS = {
    "FlatMapGroupsInPandasWithState": "timeout",
    "FlatMapGroupsWithState": "timeout",
    "TransformWithState": "timeMode",
    "TransformWithStateInPySpark": "timeMode",
}
"""By logical operator whose function is the user's, the method that returns which time its timers have."""

_WRITES_STATE: dict[str, bool] = {}
"""By the class of a physical operator, whether it writes state: itself, or a base class or trait (transformWithState)."""


@dataclass(frozen=True)
class _Operator:
    """A stateful operator in a plan: its number from the top of the plan, and its name."""

    number: int
    name: str
    writes: bool
    has_timers: bool


class StatefulOperators:
    """Reads the stateful operators of one query, batch after batch."""

    def __init__(self) -> None:
        self._operators: tuple[_Operator, ...] | None = None

    def count(self, plan: Any) -> int:
        """The number of stateful operators that an executed plan holds.

        Args:
            plan: The executed plan of a batch, a JVM object; also in the following methods.
        """
        return sum(operator.writes for operator, _ in self._find(plan))

    def act_on_event_time(self, plan: Any) -> bool:
        """Whether an operator needs an extra batch when event time moves, to emit rows or to remove state."""
        nodes = (node for operator, node in self._find(plan) if operator.writes)
        return any(bool(node.shouldRunAnotherBatch(MAX_WATERMARK_MS + 1)) for node in nodes)

    def late_rows(self, plan: Any) -> tuple[int, ...]:
        """The number of rows that each stateful operator dropped as late in this plan's batch, from the top of the plan down.

        An aggregation drops rows after its partial aggregation: there Spark counts one row for each key and window of a task.
        """
        counts: list[int] = []
        for operator, node in self._find(plan):
            dropped = int(node.longMetric(_LATE_ROWS).value())
            if not operator.writes and counts:
                counts[-1] += dropped
            else:
                counts.append(dropped)
        return tuple(counts)

    def registered_timers(self, plan: Any) -> int:
        """The number of timers that the user's code set in the batch of this plan (`transformWithState`)."""
        return sum(int(node.longMetric(_REGISTERED_TIMERS).value()) for operator, node in self._find(plan) if operator.has_timers)

    def held_at_the_end(self, plan: Any) -> tuple[tuple[int, bool], ...]:
        """The number of rows, or groups, that each stateful operator still holds although it emits all of them when they are due.

        In a batch under MAX_WATERMARK all are due but those whose event time is null. From the top of the plan down, as
        :meth:`late_rows`; 0 for operators whose state is no output: inner joins, distinct rows, the user's own state. A left
        outer join counts the rows of its right side too. With each number, whether it is that of an outer join which never drops
        the rows of one side.
        """
        return tuple(
            (int(node.longMetric(_ROWS_IN_STATE).value()), _keeps_a_side(operator, node))
            if _emits_its_state(operator, node)
            else (0, False)
            for operator, node in self._find(plan)
            if operator.writes
        )

    def _find(self, plan: Any) -> list[tuple[_Operator, Any]]:
        if self._operators is not None:
            cached = [(operator, plan.p(operator.number)) for operator in self._operators]
            if all(node is not None and node.nodeName() == operator.name for operator, node in cached):
                return cached
        searched = list(_stateful_nodes(plan))
        self._operators = tuple(operator for operator, _ in searched)
        return searched


def _emits_its_state(operator: _Operator, node: Any) -> bool:
    if operator.name == _JOIN:
        return bool(str(node.joinType().sql()).endswith("OUTER"))
    if operator.name in ("StateStoreSave", "SessionWindowStateStoreSave"):
        return str(node.outputMode().get()) == "Append"
    return False


def _keeps_a_side(operator: _Operator, node: Any) -> bool:
    if operator.name != _JOIN:
        return False
    due = node.stateWatermarkPredicates()
    return bool(due.left().isEmpty() or due.right().isEmpty())


def _stateful_nodes(plan: Any) -> Iterator[tuple[_Operator, Any]]:
    for number in itertools.count():
        node = plan.p(number)
        if node is None:
            return
        metrics = node.metrics()
        if metrics.contains(_LATE_ROWS):
            name = node.nodeName()
            yield _Operator(number, name, name != _SESSION_READER, metrics.contains(_REGISTERED_TIMERS)), node


def keeping_state(frame: DataFrame) -> int:
    """The number of operators of a DataFrame's analyzed plan that keep state, judged by their names."""
    named = [each for each in analyzed_nodes(frame) if each.name in WITH_STATE]
    return sum(bool(each.of.isStreaming()) for each in named) + len(stream_joins(frame))


def fires_by_the_clock(frame: DataFrame) -> bool:
    """Whether an operator of a streaming DataFrame has timers or timeouts of processing time: Spark runs batch after batch."""
    found = [each for each in analyzed_nodes(frame) if each.name in _OF_USERS]
    return any(str(getattr(each.of, _OF_USERS[each.name])()).startswith("ProcessingTime") for each in found)


def output_watermark(plan: Any, batch_watermark_ms: int) -> int:
    """The watermark of a batch's output: that of the last stateful operators, or the batch's own watermark if there are none.

    After an interval join, for instance, it is earlier than the watermark the batch ran under. An operator that does not report
    it (`produceOutputWatermark` is None: `applyInPandasWithState`, `transformWithState` with processing time) forwards the
    watermark of its input, as Flink's operators do; a stage with older rows declares that with `event_time=(column, lateness)`.

    Args:
        plan: The executed plan, a JVM object.
        batch_watermark_ms: The watermark under which the batch ran, epoch ms.
    """
    if _is_stateful(plan) and plan.nodeName() != _LIMIT:
        input_watermark = plan.eventTimeWatermarkForEviction()
        given = int(input_watermark.get()) if input_watermark.isDefined() else batch_watermark_ms
        produced = plan.produceOutputWatermark(given)
        return int(produced.get()) if produced.isDefined() else given
    return min((output_watermark(child, batch_watermark_ms) for child in children(plan)), default=batch_watermark_ms)


def _is_stateful(node: Any) -> bool:
    kind = node.getClass()
    name = str(kind.getName())
    if name not in _WRITES_STATE:
        _WRITES_STATE[name] = _is_writer(kind)
    return _WRITES_STATE[name]


def _is_writer(kind: Any) -> bool:
    """Whether a Java class, or one of its base classes or interfaces, is Spark's `StateStoreWriter`."""
    kinds = [kind]
    while kinds:
        kind = kinds.pop()
        if kind.getSimpleName() == _STATE_WRITER:
            return True
        kinds += [*kind.getInterfaces(), *filter(None, [kind.getSuperclass()])]
    return False
