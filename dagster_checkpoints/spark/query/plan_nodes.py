"""Walks over Spark's plans, which are JVM objects, and finds the streams that a plan reads.

Must not know stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql import DataFrame

V1_STREAM = "StreamingRelation"
V2_STREAM = "StreamingRelationV2"
ROWS_OF_NO_STREAM = "LogicalRDD"
"""The plan node of the branch without rows (`opaque_inputs`): a leaf that is streaming, but no stream."""


def children(plan: Any) -> Iterator[Any]:
    """A node's children, from left to right."""
    return items(plan.children())


def items(sequence: Any) -> Iterator[Any]:
    """The items of a sequence of Scala's."""
    for index in range(sequence.size()):
        yield sequence.apply(index)


def nodes(plan: Any) -> Iterator[Any]:
    """A plan's nodes, from the top down."""
    yield plan
    for child in children(plan):
        yield from nodes(child)


def analyzed(frame: DataFrame) -> Any:
    """A DataFrame's analyzed plan."""
    return frame._jdf.queryExecution().analyzed()


def streams(frame: DataFrame) -> list[Any]:
    """The leaves of a DataFrame's analyzed plan that are streams; a stream that is read twice appears twice."""
    if not frame.isStreaming:
        return []
    leaves = [node for node in nodes(analyzed(frame)) if not node.children().size() and node.isStreaming()]
    # A reference to a common table expression is a leaf as well; the expression's plan is another child.
    return [leaf for leaf in leaves if leaf.nodeName() not in ("CTERelationRef", ROWS_OF_NO_STREAM)]


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
                    jvm = frame.sparkSession._jvm
                    assert jvm is not None
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
