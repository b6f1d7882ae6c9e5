"""The stateful operators of a query, as its executed plan shows them: watermarks, rows dropped as late, timers.

It must not know tasks. Every question is a call into the JVM, and some are asked after every batch: so the places of the
operators in the plan are remembered (Spark numbers a plan's nodes from the top down).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagster_checkpoints.coordination import MAX_WATERMARK_MS
from dagster_checkpoints.spark.query.plan_nodes import children

_STATE_WRITER = "StateStoreWriter"
_LATE_ROWS = "numRowsDroppedByWatermark"
_REGISTERED_TIMERS = "numRegisteredTimers"
_SESSION_READER = "SessionWindowStateStoreRestore"  # drops the late rows for the operator that writes the sessions

# Logical operators that keep state when their input streams; a join does when both of its inputs stream.
_WITH_STATE = frozenset(
    {
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "FlatMapGroupsInPandasWithState",
        "FlatMapGroupsWithState",
        "GlobalLimit",
        "TransformWithState",
        "TransformWithStateInPySpark",
    }
)


@dataclass(frozen=True)
class _Place:
    """Where an operator is in a plan, and what it is called there."""

    number: int
    name: str
    writes: bool
    has_timers: bool


class StatefulOperators:
    """Reads the stateful operators of one query, batch after batch."""

    def __init__(self) -> None:
        self._places: tuple[_Place, ...] | None = None

    def exist(self, plan: Any) -> bool:
        """Whether an executed plan holds a stateful operator.

        Args:
            plan: The executed plan of a batch, a JVM object; here and below.
        """
        return bool(self._find(plan))

    def act_on_event_time(self, plan: Any) -> bool:
        """Whether an operator asks for a batch of its own when event time moves, to let rows out or to forget them."""
        return any(bool(node.shouldRunAnotherBatch(MAX_WATERMARK_MS + 1)) for place, node in self._find(plan) if place.writes)

    def late_rows(self, plan: Any) -> tuple[int, ...]:
        """How many rows each stateful operator dropped as late in the batch of this plan, from the top of the plan down.

        An aggregation drops rows behind its partial aggregation: there Spark counts one for each key and window of a task.
        """
        counts: list[int] = []
        for place, node in self._find(plan):
            dropped = int(node.longMetric(_LATE_ROWS).value())
            if not place.writes and counts:
                counts[-1] += dropped
            else:
                counts.append(dropped)
        return tuple(counts)

    def registered_timers(self, plan: Any) -> int:
        """How many timers the user's code set in the batch of this plan (`transformWithState`)."""
        return sum(int(node.longMetric(_REGISTERED_TIMERS).value()) for place, node in self._find(plan) if place.has_timers)

    def _find(self, plan: Any) -> list[tuple[_Place, Any]]:
        if self._places is not None:
            found = [(place, plan.p(place.number)) for place in self._places]
            if all(node is not None and node.nodeName() == place.name for place, node in found):
                return found
        found = list(_places(plan))
        self._places = tuple(place for place, _ in found)
        return found


def _places(plan: Any) -> Iterator[tuple[_Place, Any]]:
    for number in itertools.count():
        node = plan.p(number)
        if node is None:
            return
        metrics = node.metrics()
        if metrics.contains(_LATE_ROWS):
            name = node.nodeName()
            yield _Place(number, name, name != _SESSION_READER, metrics.contains(_REGISTERED_TIMERS)), node


def keeping_state(plan: Any) -> int:
    """How many operators of an analyzed streaming plan (a JVM object) keep state, so far as their names tell."""
    if not plan.isStreaming():
        return 0
    below = list(children(plan))
    name = plan.nodeName()
    own = name in _WITH_STATE or (name == "Join" and all(child.isStreaming() for child in below))
    return own + sum(keeping_state(child) for child in below)


def output_watermark(plan: Any, batch_watermark_ms: int) -> int:
    """The watermark of what a batch sent on: that of the last stateful operators, or the batch's own where there is none.

    After an interval join, for instance, it is earlier than the watermark the batch ran under. An operator that does not say
    (`produceOutputWatermark` is None: `applyInPandasWithState`, `transformWithState` with processing time) passes on its
    input's, as Flink's operators do; a stage whose rows are older than that declares it, with `event_time=(column, lateness)`.

    Args:
        plan: The executed plan, a JVM object.
        batch_watermark_ms: The watermark under which the batch ran, epoch ms.
    """
    if _is_stateful(plan):
        input_watermark = plan.eventTimeWatermarkForEviction()
        given = int(input_watermark.get()) if input_watermark.isDefined() else batch_watermark_ms
        produced = plan.produceOutputWatermark(given)
        return int(produced.get()) if produced.isDefined() else given
    return min((output_watermark(child, batch_watermark_ms) for child in children(plan)), default=batch_watermark_ms)


def _is_stateful(node: Any) -> bool:
    # A base class or a base trait may be what extends StateStoreWriter (transformWithState, applyInPandasWithState).
    kinds = [node.getClass()]
    while kinds:
        kind = kinds.pop()
        if kind.getSimpleName() == _STATE_WRITER:
            return True
        kinds += [*kind.getInterfaces(), *filter(None, [kind.getSuperclass()])]
    return False
