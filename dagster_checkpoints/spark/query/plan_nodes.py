"""Walks over Spark's plans, which are JVM objects, and finds the streams that a plan reads.

Must not know stages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.jvm import jvm_of

_T = TypeVar("_T")

V1_STREAM = "StreamingRelation"
V2_STREAM = "StreamingRelationV2"
ROWS_OF_NO_STREAM = "LogicalRDD"
"""The plan node of the branch without rows (`stage_inputs`): a leaf that is streaming, but no stream."""
_NO_STREAMS = frozenset({"CTERelationRef", ROWS_OF_NO_STREAM})


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node of a plan.

    Attributes:
        of: The node, a JVM object.
        name: Its name.
        leaf: Whether it has no children.
    """

    of: Any
    name: str
    leaf: bool


def once(function: Callable[[DataFrame], _T]) -> Callable[[DataFrame], _T]:
    """Keep what a function finds in a DataFrame, whose plan does not change: each step in a plan is a message to the JVM."""
    known: WeakKeyDictionary[DataFrame, _T] = WeakKeyDictionary()

    @functools.wraps(function)
    def call(frame: DataFrame) -> _T:
        if frame not in known:
            known[frame] = function(frame)
        return known[frame]

    return call


def added(find: Callable[[DataFrame], list[_T]], frame: DataFrame, inputs: Iterable[DataFrame]) -> list[_T]:
    """What a plan has more than its streaming inputs, which are parts of it: what they have belongs to earlier stages.

    Args:
        find: Finds something in a plan, each time that it is there.
        frame: A stage's result.
        inputs: The stage's inputs.
    """
    left = list(find(frame))
    earlier = [each for given in inputs if given.isStreaming for each in find(given)]
    number = len(left) - len(earlier)
    for each in earlier:
        if each in left:  # the optimizer may have changed it
            left.remove(each)
    return left[: max(number, 0)]


def children(plan: Any) -> Iterator[Any]:
    """A node's children, from left to right."""
    return items(plan.children())


def items(sequence: Any) -> Iterator[Any]:
    """The items of a sequence of Scala's."""
    for index in range(sequence.size()):
        yield sequence.apply(index)


def is_event_time(column: Any) -> bool:
    """Whether a column of a plan carries a watermark."""
    return bool(column.metadata().contains("spark.watermarkDelayMs"))


def is_time_column(key: Any) -> bool:
    """Whether an expression of a plan is a column that carries a watermark."""
    return key.nodeName() == "AttributeReference" and is_event_time(key)


def nodes(plan: Any) -> Iterator[Any]:
    """A plan's nodes, from the top down."""
    yield plan
    for child in children(plan):
        yield from nodes(child)


@once
def analyzed(frame: DataFrame) -> Any:
    """A DataFrame's analyzed plan."""
    return frame._jdf.queryExecution().analyzed()


@once
def analyzed_nodes(frame: DataFrame) -> tuple[PlanNode, ...]:
    """The nodes of a DataFrame's analyzed plan, from the top down."""
    return tuple(_walk(analyzed(frame)))


def _walk(plan: Any) -> Iterator[PlanNode]:
    below = tuple(children(plan))
    yield PlanNode(plan, str(plan.nodeName()), not below)
    for child in below:
        yield from _walk(child)


@once
def streams(frame: DataFrame) -> tuple[Any, ...]:
    """The leaves of a DataFrame's analyzed plan that are streams; a stream that is read twice appears twice."""
    if not frame.isStreaming:
        return ()
    # A reference to a common table expression is a leaf as well; the expression's plan is another child.
    leaves = [each.of for each in analyzed_nodes(frame) if each.leaf and each.name not in _NO_STREAMS]
    return tuple(leaf for leaf in leaves if leaf.isStreaming())


def executed_nodes(plan: Any) -> Iterator[Any]:
    """An executed plan's nodes, from the top down; also inside a plan that Spark adapts while it runs, and in its stages."""
    yield plan
    for child in executed_children(plan):
        yield from executed_nodes(child)


def executed_children(plan: Any) -> Iterator[Any]:
    """A node's children in an executed plan, from left to right; behind a plan that Spark adapts, what it has become."""
    name = str(plan.nodeName())
    if name == "AdaptiveSparkPlan":
        yield plan.executedPlan()
    elif name.endswith("QueryStage"):
        yield plan.plan()
    else:
        yield from children(plan)


class ExecutedNodes(Generic[_T]):
    """Finds nodes in the executed plans of a query's batches. Most batches have a plan of the same shape: so the places of the
    nodes in the newest plan are kept, since each step in a plan is a message to the JVM.

    Args:
        name: The name of these nodes.
        wanted: What is to be found.
        find: Which of the wanted a node with this name is; None if it is none of them.
    """

    def __init__(self, name: str, wanted: Collection[_T], find: Callable[[Any], _T | None]) -> None:
        self._name = name
        self._wanted = frozenset(wanted)
        self._find = find
        self._numbers: tuple[int, ...] = ()

    def of(self, plan: Any) -> list[tuple[_T, Any]]:
        """What a plan holds of the wanted, each with its node. What stands twice in the plan is found once or twice."""
        if not self._wanted:
            return []
        found = list(self._among(plan.p(number) for number in self._numbers))
        if {wanted for wanted, _ in found} == self._wanted:
            return found
        # Spark numbers a plan's nodes from the top down, but not those of a plan that it adapts while it runs.
        numbered = list(itertools.takewhile(lambda node: node is not None, map(plan.p, itertools.count())))
        places = [(number, next(self._among([node]), None)) for number, node in enumerate(numbered)]
        self._numbers = tuple(number for number, match in places if match is not None)
        return [match for _, match in places if match is not None] or list(self._among(executed_nodes(plan)))

    def _among(self, nodes: Iterable[Any]) -> Iterator[tuple[_T, Any]]:
        for node in nodes:
            match = self._find(node) if node is not None and node.nodeName() == self._name else None
            if match in self._wanted:
                yield match, node


def streams_of_batch(plan: Any) -> list[Any]:
    """What stands for the streams of a query in the logical plan of one of its batches, in the order of :func:`streams`."""
    return [leaf for leaf in items(plan.collectLeaves()) if leaf.isStreaming() and leaf.nodeName() not in _NO_STREAMS]


@once
def stream_joins(frame: DataFrame) -> tuple[Any, ...]:
    """The joins of two streams in a DataFrame's analyzed plan."""
    return tuple(each.of for each in analyzed_nodes(frame) if each.name == "Join" and reads_streams(each.of))


@once
def optimized_nodes(frame: DataFrame) -> tuple[PlanNode, ...]:
    """The nodes of what Spark's optimizer makes of a DataFrame's analyzed plan, from the top down."""
    return tuple(_walk(frame.sparkSession._jsparkSession.sessionState().optimizer().execute(analyzed(frame))))


@once
def optimized_joins(frame: DataFrame) -> tuple[Any, ...]:
    """The joins of two streams in what Spark's optimizer makes of a DataFrame's plan, if that has some: others are refused, see
    `operator_checks`."""
    if not stream_joins(frame):
        return ()
    return tuple(each.of for each in optimized_nodes(frame) if each.name == "Join" and reads_streams(each.of))


def reads_streams(join: Any) -> bool:
    """Whether a join's inputs are streams."""
    return all(child.isStreaming() for child in children(join))


class StreamSet:
    """The streams that some DataFrames read.

    A stream is identified by the object that `load()` of a `readStream` has created, and not by its columns or its path: if a
    plan reads a stream twice (a self-join), Spark gives its columns new ids but keeps that object; and two streams over one
    folder are two streams.
    """

    def __init__(self, frames: Iterable[DataFrame]) -> None:
        self._origins: Any = None
        for frame in frames:
            for leaf in streams(frame):
                if self._origins is None:
                    jvm = jvm_of(frame.sparkSession)
                    self._origins = jvm.java.util.IdentityHashMap()
                self._origins.put(_origin(leaf), True)

    def __contains__(self, leaf: Any) -> bool:
        return self._origins is not None and bool(self._origins.containsKey(_origin(leaf)))


def _origin(leaf: Any) -> Any:
    match leaf.nodeName():
        case "StreamingRelation":
            return leaf.dataSource()
        case "StreamingRelationV2":
            return leaf.table()
    return leaf


def source_options(leaf: Any) -> dict[str, str]:
    """The options of a stream of Spark's older interface (`V1_STREAM`), by name in lower case."""
    options = leaf.dataSource().options()
    keys = options.keysIterator()
    result = {}
    while keys.hasNext():
        key = keys.next()
        result[str(key).lower()] = str(options.apply(key))
    return result


def stream_name(leaf: Any) -> str:
    """A stream's name for errors, such as `FileSource[/data/in]` or `rate`."""
    name = leaf.nodeName()
    return str(leaf.sourceName()) if name in (V1_STREAM, V2_STREAM) else str(name)
