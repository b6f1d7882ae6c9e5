"""The description of a query's stateful operators and streaming sources, on which its state depends: text to compare and to read.

State belongs to a plan. After a restore with another window, key or source, Spark uses the old state and offsets under
the new plan, usually without an error. So a checkpoint holds this text, and a restore compares it (`state.plans` has the rules).
Operators without state (projections, filters, flat maps) are not in the text, unless they compute a key. Analysis only; must not
know tasks or storage.

Source: "Recovery Semantics after Changes in a Streaming Query",
https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#recovery-semantics-after-changes-in-a-streaming-query
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from dagster_checkpoints.spark.query.channel_sources import ENDED, INPUT_OPTION, RECORDS, WATERMARKS
from dagster_checkpoints.spark.query.plan_nodes import nodes
from dagster_checkpoints.spark.query.plan_text import (
    Node,
    as_written,
    column_origins,
    is_streaming,
    parse,
    traced,
    type_text,
)
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.state import ENCODED_AS_AVRO

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SOURCES = frozenset({"StreamingRelation", "StreamingRelationV2"})
# Options that identify a source's data; other options may hold secrets, or concern only how the source reads.
_IDENTIFYING = ("path", "subscribe", "subscribepattern", "assign", "topic", "topics", "stream", "streamname", "table", "dbtable")
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_WATERMARK_OF = "watermark of input "
_PROCESSOR = "TransformWithStateInPySpark"
_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"


@dataclass(frozen=True)
class PlanDescription:
    """The parts of a plan on which a query's state and offsets depend.

    Attributes:
        operators: By stage, the stateful operators that its function adds, from the input to the output.
        sources: The streaming sources, in the order in which Spark numbers them. Empty for a batch result.
    """

    operators: Mapping[str, tuple[str, ...]]
    sources: tuple[str, ...]

    @property
    def keeps_state(self) -> bool:
        """Some stage has a stateful operator."""
        return any(self.operators.values())


def describe(plan: QueryPlan) -> PlanDescription:
    """Describe the plan of a chain, stage by stage."""
    stages = list(plan.outputs)
    if not plan.streaming:
        return PlanDescription(dict.fromkeys(stages, ()), ())
    sources = tuple(_source(node) for node in nodes(_analyzed(plan.frame)) if node.nodeName() in _SOURCES)
    if not _operators(plan.frame):
        return PlanDescription(dict.fromkeys(stages, ()), sources)
    operators: dict[str, tuple[str, ...]] = {}
    before: list[str] = []
    for stage, frame in plan.outputs.items():
        after = _operators(frame)
        operators[stage] = tuple(_added(before, after))
        before = after
    if plan.output_mode != "append":
        operators[stages[-1]] += (f"output mode {plan.output_mode}",)
    return PlanDescription(operators, sources)


def reads_watermarks(sources: Sequence[str]) -> bool:
    """Whether some of the recorded sources are watermark sources."""
    return any(source.startswith(_WATERMARK_OF) for source in sources)


def input_sources(uid: str) -> tuple[str, str]:
    """The descriptions of what a query reads of one of its inputs: its records and its watermark.

    Args:
        uid: The uid of the stage that is read.
    """
    return f"records of input {uid!r}", f"{_WATERMARK_OF}{uid!r}"


def ended_source(stage: str) -> str:
    """The description of what stands in for a fused source that has ended."""
    return f"ended source {stage!r}"


def _analyzed(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _added(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """The operators that a stage adds to those of its input, which stay together at any position of the list."""
    for start in range(len(after) - len(before) + 1):
        if after[start : start + len(before)] == before:
            return [*after[:start], *after[start + len(before) :]]
    return after


# Sources


def _source(node: Any) -> str:
    if node.nodeName() == "StreamingRelation":
        source = node.dataSource()
        return _source_text(str(source.className()), _options(source.options()))
    options, name = node.extraOptions(), str(node.sourceName())
    if name in (RECORDS, WATERMARKS):
        stage = str(options.get(INPUT_OPTION))
        records, watermark = input_sources(stage)
        return watermark if name == WATERMARKS else records
    if name == ENDED:
        return ended_source(str(options.get(INPUT_OPTION)))
    table = node.identifier()
    if table.isDefined():
        return f"table {table.get()}"
    return _source_text(name, {key: str(options.get(key)) for key in _IDENTIFYING if options.containsKey(key)})


def _source_text(name: str, options: Mapping[str, str]) -> str:
    texts = [options[key] if key == "path" else f"{key} {options[key]}" for key in _IDENTIFYING if key in options]
    return " ".join([name, *(_CREDENTIALS.sub("", text) for text in texts)])


def _options(options: Any) -> dict[str, str]:
    """A Scala map as a dictionary, with its keys in lower case."""
    keys, result = options.keysIterator(), {}
    while keys.hasNext():
        key = keys.next()
        result[str(key).lower()] = str(options.apply(key))
    return result


# Stateful operators


def _operators(frame: DataFrame) -> list[str]:
    """The stateful operators of a streaming plan, as text, from the input to the output."""
    wanted = stateful_nodes(frame)
    if not wanted:
        return []
    objects = list(nodes(_analyzed(frame)))  # in the order of the JSON
    encoded = ENCODED_AS_AVRO if str(frame.sparkSession.conf.get(_ENCODING)).lower() == "avro" else ""
    return [
        _operator(node, objects) + (encoded if node.kind == _PROCESSOR else "") + _watermarks(node, objects) for node in wanted
    ]


def stateful_nodes(frame: DataFrame) -> list[Node]:
    """The stateful operators of a streaming plan, from the input to the output."""
    return stateful_nodes_of(parse(_analyzed(frame).toJSON()))


def stateful_nodes_of(plan: Node) -> list[Node]:
    """The stateful operators of a plan of a streaming DataFrame, from the input to the output."""
    return [node for node in plan.bottom_up() if _is_stateful_join(node) or (node.kind in _KINDS and is_streaming(node))]


def _is_stateful_join(node: Node) -> bool:
    return node.kind == "Join" and all(is_streaming(child) for child in node.children)


def _watermarks(node: Node, objects: Sequence[Any]) -> str:
    """The watermarks that reach an operator; they decide when its state is emitted and dropped."""
    watermarks = dict.fromkeys(_watermark(objects[n.number]) for n in node.all() if n.kind == "EventTimeWatermark")
    return f"; watermark {' and '.join(sorted(watermarks))}" if watermarks else ""


def _watermark(node: Any) -> str:
    return f"{node.eventTime().name()} - {node.delay()}"


def _aggregation(node: Node, _: Any) -> str:
    functions: list[str] = []
    for each in node.expressions("aggregateExpressions"):
        functions += [as_written(part) for part in each.all() if part.kind == "AggregateExpression"]
    keys = [traced(key, node.children) for key in node.expressions("groupingExpressions")]
    return f"aggregate by {', '.join(keys) or 'nothing'}: {', '.join(functions) or 'no function'}"


def _deduplication(node: Node, _: Any) -> str:
    keys = sorted(traced(key, node.children) for key in node.expressions("keys"))
    within = " within the watermark" if node.kind == "DeduplicateWithinWatermark" else ""
    return f"drop duplicates{within} by {', '.join(keys)}"


def _distinct(node: Node, _: Any) -> str:
    return f"{node.kind.lower()} rows of {', '.join(column_origins(node.children[0]))}"


def _join(node: Node, of: Any) -> str:
    conditions = [traced(each, node.children, ("left.", "right.")) for each in node.expressions("condition")]
    return f"{str(of.joinType()).lower()} join of streams on {' AND '.join(conditions) or 'nothing'}"


def _limit(node: Node, _: Any) -> str:
    return f"limit {', '.join(traced(each, node.children) for each in node.expressions('limitExpr'))}"


def _groups_with_state(node: Node, of: Any) -> str:
    """The text of applyInPandasWithState."""
    keys = [traced(key, node.children) for key in node.expressions("groupingAttributes")]
    return (
        f"applyInPandasWithState by {', '.join(keys)}: state {type_text(node.fields.get('stateType'))}, output mode "
        f"{str(of.outputMode()).lower()}, {of.timeout()}"
    )


def _transform_with_state(node: Node, of: Any) -> str:
    child = node.children[0]
    keys = column_origins(child)[: int(node.fields.get("groupingAttributesLen") or 0)]
    processor = _processor(of)
    states = ", ".join(_declared_states(processor)) if processor is not None else "unknown"
    # Not its qualified name: a class that is sent by value may lose the name of the function in which it is defined.
    name = type(processor).__name__ if processor is not None else "an unknown processor"
    return (
        f"transformWithState by {', '.join(keys)}: {name} with {states or 'no state'}, output mode "
        f"{str(of.outputMode()).lower()}, time mode {str(of.timeMode()).lower()}"
    )


_KINDS = {
    "Aggregate": _aggregation,
    "Deduplicate": _deduplication,
    "DeduplicateWithinWatermark": _deduplication,
    "Distinct": _distinct,
    "Except": _distinct,
    "Intersect": _distinct,
    "GlobalLimit": _limit,
    "FlatMapGroupsInPandasWithState": _groups_with_state,
    _PROCESSOR: _transform_with_state,
}


def _operator(node: Node, objects: Sequence[Any]) -> str:
    try:
        return _KINDS.get(node.kind, _join)(node, objects[node.number])
    except RecursionError:
        return f"{node.kind}, whose expressions are nested too deeply to be compared"


# transformWithState: the processor itself declares its state


def _processor(of: Any) -> Any:
    """A copy of the user's processor, taken from the function that Spark sends to its workers; None if it is not found."""
    from pyspark import SparkContext
    from pyspark.serializers import CPickleSerializer

    context = SparkContext._active_spark_context
    assert context is not None
    with contextlib.suppress(Exception):  # a release of Spark may wrap the function in another way
        command = of.functionExpr().func().command().toArray(context._jvm.scala.reflect.ClassTag.Byte())  # type: ignore[union-attr]
        function, _ = CPickleSerializer().loads(bytes(command))
        return function.__self__._stateful_processor
    return None


class _StateRecorder:
    """Replaces the `StatefulProcessorHandle` and records the states that a processor requests."""

    def __init__(self) -> None:
        self.declared: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> None:
        self.declared.append(f"value {stateName} {_schema(schema)}{_ttl(ttlDurationMs)}")

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> None:
        self.declared.append(f"list {stateName} {_schema(schema)}{_ttl(ttlDurationMs)}")

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any,
        valueSchema: Any,
        ttlDurationMs: int | None = None,
    ) -> None:
        self.declared.append(f"map {stateName} {_schema(userKeySchema)} -> {_schema(valueSchema)}{_ttl(ttlDurationMs)}")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None  # timers and deletions of state declare nothing


def _declared_states(processor: Any) -> list[str]:
    """The states that a processor's `init` declares. Spark calls it in the driver for the same purpose."""
    recorder = _StateRecorder()
    with contextlib.suppress(Exception):  # `init` may need more than a recorder; its earlier declarations are recorded
        processor.init(recorder)
    with contextlib.suppress(Exception):
        processor.close()
    return sorted(recorder.declared)


def _schema(schema: Any) -> str:
    return (StructType.fromDDL(schema) if isinstance(schema, str) else schema).simpleString()


def _ttl(ms: int | None) -> str:
    return f", kept {ms} ms" if ms else ""
