"""The plans that Spark makes of a streaming query, without running it, and the stateful operators in them as values to compare.

What a stage declares does not say what Spark keeps: its optimizer drops and reorders columns, adds equalities to the key of a
join, and moves conditions in front of operators. So the physical plan is described: each operator with its key, its values and
what it is fed with, traced to columns of the sources. The rules of the comparison are in `state.plans`. Analysis
only; must not know tasks or storage.

What the runtime itself puts into a plan, the watermark's branch of an input and the filters that hold off the optimizer, is left
out: only the name of the input remains.

The plans are made as Spark's own `explain` of a streaming DataFrame makes them.

Source: Spark's `QueryExecution.explainString` and `IncrementalExecution`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_checkpoints.spark.files.work_path import WorkPath, url
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.column_origins import fused_parts, is_opaque, traced
from dagster_checkpoints.spark.query.plan_nodes import analyzed_nodes, children, is_event_time, nodes
from dagster_checkpoints.spark.query.plan_text import Node, conjuncts, expression_json, identity_of, parse, plan_json
from dagster_checkpoints.spark.query.stateful_nodes import analyzed_plan, stateful_nodes_of
from dagster_checkpoints.state.metadata import PlannedInput, PlannedOperator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_STREAMING = "org.apache.spark.sql.execution.streaming"
_EXECUTION = f"{_STREAMING}.runtime.IncrementalExecution"


@dataclass(frozen=True)
class ResumedBatch:
    """The first batch of a query that goes on from a checkpoint directory. Spark checks, as it plans the batch, that the stateful
    operators and the columns of their state are those that the directory describes.

    Attributes:
        checkpoint: The directory; Spark may write to it.
        batch_id: The batch, at least 1.
        settings: The settings of Spark that the query keeps.
    """

    checkpoint: WorkPath
    batch_id: int
    settings: Mapping[str, str]


def query_execution(spark: SparkSession, plan: Any, output_mode: str, first: ResumedBatch | None = None) -> Any:
    """What makes the plans of a batch of a streaming query, a JVM object: `optimizedPlan`, and `executedPlan`, the physical one.

    In the physical plan the stateful operators have their numbers.

    Args:
        spark: The session, whose settings decide the plan.
        plan: The analyzed plan, a JVM object.
        output_mode: The query's output mode.
        first: The batch that is planned; None for one of a query without a checkpoint directory.
    """
    jvm = jvm_of(spark)
    session, kept = spark._jsparkSession, jvm.java.util.HashMap()
    metadata = jvm.org.apache.spark.sql.execution.streaming.checkpointing.OffsetSeqMetadata
    if first is not None:
        session = session.cloneSession()
        for name, value in first.settings.items():
            kept.put(name, value)
    find_class = jvm.java.lang.Class.forName
    (constructor,) = find_class(_EXECUTION).getConstructors()
    # The first arguments are the same in each release of Spark; later ones have defaults, and are not named in bytecode.
    identity = jvm.java.util.UUID.randomUUID()
    settings = metadata(0, 0, jvm.PythonUtils.toScalaMap(kept))
    if first is not None:
        metadata.setSessionConf(settings, session.sessionState().conf())
    given = [
        session,
        plan,
        getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output_mode.capitalize())(),
        "<unknown>" if first is None else url(first.checkpoint / "state"),
        identity,
        identity,
        jvm.java.lang.Long.valueOf(0 if first is None else first.batch_id),
        jvm.scala.Option.apply(None),
        settings,
        _module(find_class, f"{_STREAMING}.runtime.WatermarkPropagator").noop(),
        first is not None,
    ]
    count = constructor.getParameterCount()
    defaults = _module(find_class, _EXECUTION)
    given += [getattr(defaults, f"$lessinit$greater$default${number}")() for number in range(len(given) + 1, count + 1)]
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    arguments = gateway.new_array(jvm.java.lang.Object, count)
    for number, argument in enumerate(given):
        arguments[number] = argument
    return constructor.newInstance(arguments)


def _module(find_class: Any, name: str) -> Any:
    """The object of Scala that belongs to a class."""
    return find_class(f"{name}$").getField("MODULE$").get(None)


WATERMARK_SOURCE = ""
"""In place of the name of a source: the watermark of an input, whose branch of the plan is left out."""

_JOIN = "StreamingSymmetricHashJoin"
# By physical operator, how it is called, and the fields that hold its key.
_OPERATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "StateStoreSave": ("aggregate", ("keyExpressions",)),
    "SessionWindowStateStoreSave": ("aggregate sessions", ("keyWithoutSessionExpressions", "sessionExpression")),
    "StreamingDeduplicate": ("drop duplicates", ("keyExpressions",)),
    "StreamingDeduplicateWithinWatermark": ("drop duplicates within the watermark", ("keyExpressions",)),
    "StreamingGlobalLimit": ("limit", ()),
    "FlatMapGroupsInPandasWithState": ("applyInPandasWithState", ("groupingAttributes",)),
    "TransformWithStateInPySpark": ("transformWithState", ("groupingAttributes",)),
    _JOIN: ("join of streams", ()),
}
_AGGREGATES = frozenset({"HashAggregate", "ObjectHashAggregate", "SortAggregate"})
_OVER_PARTITIONS = {"StateStoreRestore": 1, "SessionWindowStateStoreRestore": 0}
"""By operator that reads an aggregation's state, the number of aggregations below it that only merge results."""
_IN_PYTHON = frozenset({"MapInPandas", "MapInArrow", "PythonMapInArrow", "FlatMapGroupsInPandas", "FlatMapGroupsInArrow"})
_WHERE = "where "
_LOOKUP = "lookup in a table, "


@dataclass(frozen=True)
class _Found:
    """An operator of a physical plan, with its number, and the conditions in front of it."""

    number: int
    operator: PlannedOperator

    @property
    def conditions(self) -> frozenset[str]:
        sides = ("",) if len(self.operator.sides) == 1 else ("left side: ", "right side: ")
        found = (
            f"{name}{text.removeprefix(_WHERE)}"
            for name, side in zip(sides, self.operator.sides, strict=True)
            for text in side.steps
            if text.startswith((_WHERE, _LOOKUP))
        )
        return frozenset(found)


def planned_operators(frame: DataFrame, execution: Any, output_mode: str, source: Callable[[Any], str]) -> list[PlannedOperator]:
    """The stateful operators that Spark plans for a streaming query, from the input to the output.

    Args:
        frame: The result of the query.
        execution: What makes its plans (:func:`query_execution`).
        output_mode: The query's output mode.
        source: Describes a node that reads a stream; `WATERMARK_SOURCE` for the watermark of an input.
    """
    query = _Query(frame, output_mode, source)
    found = query.operators(execution)
    if any(each.conditions for each in found):
        found = query.with_pushed(found)
    return [each.operator for each in sorted(found, key=lambda each: -each.number)]


def numbered_operators(execution: Any) -> dict[int, tuple[str, bool]]:
    """By number, Spark's own name of each stateful operator that it plans, as in the description of its state, and whether all of
    its state is in one partition, whatever the number of partitions.

    Args:
        execution: What makes the plans of the query (:func:`query_execution`).
    """
    kinds = {f"{kind}Exec" for kind in _OPERATORS}
    found = (node for node in nodes(execution.executedPlan()) if str(node.getClass().getSimpleName()) in kinds)
    return {
        _number(node): (str(node.shortName()), "AllTuples" in str(node.requiredChildDistribution().apply(0))) for node in found
    }


class _Query:
    """Describes a streaming query and its parts."""

    def __init__(self, frame: DataFrame, output_mode: str, source: Callable[[Any], str]) -> None:
        self._spark = frame.sparkSession
        self._output_mode = output_mode
        self._plan = analyzed_plan(frame)
        self._objects = [each.of for each in analyzed_nodes(frame)]  # in the order of the JSON
        self._sources = {node.output[0]: source(self._objects[node.number]) for node in _streams(self._plan) if node.output}
        for name, below in fused_parts(self._plan):  # also what stands in for a source that has ended
            self._sources |= {node.output[0]: f"source {name!r}" for node in _streams(below) if node.output}
        self._not_null = {
            traced(part, node.children)
            for node in self._plan.all()
            for condition in node.expressions("condition")
            for part in condition.all()
            if part.kind == "IsNotNull"
        }

    def operators(self, execution: Any) -> list[_Found]:
        """The stateful operators that Spark plans for the query, or a part of it, children in front of their parents."""
        items, objects = _items(execution.executedPlan())
        wanted = [node for node in parse(items).bottom_up() if node.kind in _OPERATORS]
        return [_Found(_number(objects[n.number]), self._operator(n, objects[n.number])) for n in wanted]

    def with_pushed(self, found: Sequence[_Found]) -> list[_Found]:
        """The operators, with the conditions that Spark has moved in front of them: they are not there if the query ends with
        the operator."""
        declared = stateful_nodes_of(self._plan)
        if len(declared) != len(found):
            return list(found)
        result = []
        for each, node in zip(found, declared, strict=True):
            pushed: frozenset[str] = frozenset()
            if each.conditions and node.number:  # something stands behind it
                alone = self.operators(query_execution(self._spark, self._objects[node.number], self._output_mode))
                pushed = each.conditions - alone[-1].conditions if alone else pushed
            result.append(_Found(each.number, msgspec.structs.replace(each.operator, pushed=tuple(sorted(pushed)))))
        return result

    def _operator(self, node: Node, of: Any) -> PlannedOperator:
        kind, fields = _OPERATORS[node.kind]
        steps = [tuple(sorted(set(self._steps(child)))) for child in node.children]
        if node.kind == _JOIN:
            kept = [tuple(_columns(child)) for child in children(of)]
            sides = [
                PlannedInput(c, tuple(_origin_of(identity, child) for identity in child.output), s)
                for c, child, s in zip(kept, node.children, steps, strict=True)
            ]
            kind = f"{str(of.joinType()).lower()} {kind}"
            return PlannedOperator(kind, _join_keys(node), _bounds(node, of), sides=tuple(sides))
        keys = tuple(traced(each, node.children) for name in fields for each in node.expressions(name))
        functions = _functions(node)
        names, origins = [name for name, _ in functions], [text for _, text in functions]
        return PlannedOperator(kind, keys, sides=(PlannedInput(tuple(names), tuple(origins), steps[0]),))

    def _steps(self, plan: Node) -> Iterator[str]:
        """What stands between the sources and an operator, from the top down."""
        pending = [plan]
        while pending:
            node = pending.pop()
            if is_opaque(node):
                yield from (f"rows of {text}" for text in self._read(node) if text != WATERMARK_SOURCE)
                continue
            if node.kind == "Filter":
                for condition in node.expressions("condition"):
                    yield from (_WHERE + text for text in self._conditions(condition, node.children))
            elif node.kind == "Generate":
                yield f"rows of {traced(node.expressions('generator')[0], node.children)}"
            elif node.kind in _IN_PYTHON:
                yield f"rows of {', '.join(traced(e, node.children) for e in node.expressions('func')) or node.kind}"
            elif node.kind == _JOIN:
                yield f"join of streams by {', '.join(_join_keys(node))}"
            elif node.kind.endswith("Join"):
                # Not how Spark finds the rows, which depends on the size of the table.
                keys = [traced(e, node.children) for of in ("leftKeys", "rightKeys", "condition") for e in node.expressions(of)]
                how = str(node.fields["joinType"]["object"]).rpartition(".")[2].rstrip("$").lower()
                yield f"{_LOOKUP}{how} by {', '.join(keys)}"
            elif node.kind in _OPERATORS:
                kind, fields = _OPERATORS[node.kind]
                keys = [traced(each, node.children) for name in fields for each in node.expressions(name)]
                yield f"{kind} by {', '.join(keys)}"
            elif not node.children:
                yield from (f"rows of {text}" for text in self._read(node))
            pending += [child for child in node.children if self._read(child) != [WATERMARK_SOURCE]]

    def _read(self, plan: Node) -> list[str]:
        """The sources that a part of the plan reads."""
        leaves = (node.output[0] for node in plan.all() if not node.children and node.output)
        return list(dict.fromkeys(self._sources[leaf] for leaf in leaves if leaf in self._sources))

    def _conditions(self, condition: Node, below: Sequence[Node]) -> Iterator[str]:
        """The parts of a filter's condition, without those that Spark or the runtime has added."""
        for part in conjuncts(condition):
            if any(each.kind == "SparkPartitionID" for each in part.all()):
                continue
            text = traced(part, below)
            if part.kind != "IsNotNull" or text in self._not_null:
                yield text


def _items(plan: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """A physical plan as JSON, and as objects, from the top down; with what is reused at each of its places."""
    items, objects = [], []
    for item, node in zip(plan_json(plan), nodes(plan), strict=True):
        items.append(item)
        objects.append(node)
        if item["class"].endswith(".ReusedExchangeExec"):
            items[-1] = {**item, "class": "Union", "num-children": 1}  # its columns are those of its only child, in order
            reused = _items(node.child())
            items += reused[0]
            objects += reused[1]
    return items, objects


def _number(operator: Any) -> int:
    return int(operator.stateInfo().get().operatorId())


def _streams(plan: Node) -> Iterator[Node]:
    return (node for node in plan.all() if not node.children and node.kind.startswith("StreamingRelation"))


def _join_keys(node: Node) -> tuple[str, ...]:
    left, right = node.children
    pairs = zip(node.expressions("leftKeys"), node.expressions("rightKeys"), strict=True)
    return tuple(f"left.{traced(one, [left])} = right.{traced(other, [right])}" for one, other in pairs)


def _bounds(node: Node, of: Any) -> tuple[str, ...]:
    """The conditions of a join, besides equal keys, on which its state depends.

    Of an inner join these are the conditions on event times, by which Spark drops rows; the others only select what it emits. An
    outer join also keeps whether a row has met the conditions.
    """
    condition = of.condition().full()
    if not condition.isDefined():
        return ()
    parts = list(conjuncts(parse(expression_json(condition.get()))))
    if str(of.joinType()) == "Inner":
        times = {identity for child in children(of) for identity in _event_times(child)}
        parts = [part for part in parts if any(identity_of(each) in times for each in part.all())]
    return tuple(sorted(traced(part, node.children, ("left.", "right.")) for part in parts))


def _functions(node: Node) -> list[tuple[str, str]]:
    """The functions of an aggregation in the order of their values: the name of each, and the function of the sources' columns.

    The aggregation in front of the exchange has the arguments; those behind it merge what that one has computed.
    """
    merging: int | None = None
    while node.children:
        node = node.children[0]
        if node.kind in _OVER_PARTITIONS:
            merging = _OVER_PARTITIONS[node.kind]
        elif node.kind in _AGGREGATES and merging is not None:
            if not merging:
                found = node.expressions("aggregateExpressions")
                return [(each.children[0].kind, traced(each, node.children)) for each in found]
            merging -= 1
    return []


def _origin_of(identity: int, plan: Node) -> str:
    reference = Node("AttributeReference", {"name": "?", "exprId": {"id": identity}}, (), 0)
    return traced(reference, [plan])


def _columns(plan: Any) -> Iterator[str]:
    return (f"{column.name()}: {column.dataType().catalogString()}" for column in _output(plan))


def _event_times(plan: Any) -> Iterator[int]:
    """The ids of the columns of a plan that carry a watermark."""
    return (int(column.exprId().id()) for column in _output(plan) if is_event_time(column))


def _output(plan: Any) -> Iterator[Any]:
    output = plan.output()
    return (output.apply(number) for number in range(output.size()))
