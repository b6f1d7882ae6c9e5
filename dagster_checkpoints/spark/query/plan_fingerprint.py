"""The description of a query's stateful operators and streaming sources, on which its state depends: text to compare and to read.

State belongs to a plan. After a restore with another window, key or source, Spark uses the old state and offsets under
the new plan, usually without an error. So a checkpoint holds this text, and a restore compares it (`state.plans` has the rules).
Operators without state (projections, filters, flat maps) are not in the text, unless they compute a key. Analysis only; must not
know tasks or storage.

The text says, too, what Spark's optimizer leaves in the state. It works on a whole query: it drops the columns that later
operators do not read, also from the state of aggregations and joins, and the order of the columns that a later projection selects
decides the order of an aggregation's values. Spark compares only the types of these, so that after a restore with another
projection one sum could continue as another one.

Source: "Recovery Semantics after Changes in a Streaming Query",
https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#recovery-semantics-after-changes-in-a-streaming-query,
Spark's `ColumnPruning`, `CollapseProject` and `StateSchemaCompatibilityChecker`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.files.urls import url_scheme
from dagster_checkpoints.spark.files.hadoop_path import HadoopFileSystem
from dagster_checkpoints.spark.query.channel_sources import ENDED, INPUT_OPTION, RECORDS, WATERMARKS
from dagster_checkpoints.spark.query.column_origins import column_origins, traced
from dagster_checkpoints.spark.query.declared_states import declared_states, processor_of
from dagster_checkpoints.spark.query.file_index import without_host
from dagster_checkpoints.spark.query.plan_nodes import analyzed, analyzed_nodes, children, nodes, once
from dagster_checkpoints.spark.query.plan_text import Node, as_written, parse, plan_json, type_text
from dagster_checkpoints.spark.query.planned_state import WATERMARK_SOURCE, planned_operators, query_execution
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.stateful_nodes import PROCESSOR, stateful_nodes, stateful_nodes_of
from dagster_checkpoints.state.metadata import PlannedOperator
from dagster_checkpoints.state.plans import IN_STATE
from dagster_checkpoints.state.processor_states import ENCODED_AS_AVRO, as_encoded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def _optimized_nodes(plan: Any) -> list[tuple[Node, Any]]:
    """The stateful operators of an optimized plan, from the input to the output, each with Spark's object."""
    wanted = stateful_nodes_of(parse(plan_json(plan)))
    objects = list(nodes(plan)) if wanted else []  # in the order of the JSON
    return [(node, objects[node.number]) for node in wanted]


def aggregate_functions(node: Node) -> Iterator[Node]:
    """The aggregate functions of an aggregation, in order; one that is used twice appears twice."""
    for each in node.expressions("aggregateExpressions"):
        yield from (part for part in each.all() if part.kind == "AggregateExpression")


def kept_in_state(frame: DataFrame, optimized_plan: Any) -> list[str] | None:
    """By stateful operator, from the input to the output, what its state holds; an empty text if its declaration says that.

    Aggregate functions are named by their positions among the declared ones, from 1: the optimizer also replaces the expressions
    inside them. None if it has replaced an operator by others.

    Args:
        frame: the result of a query.
        optimized_plan: its optimized plan, a JVM object.
    """
    declared, optimized = stateful_nodes(frame), _optimized_nodes(optimized_plan)
    if len(declared) != len(optimized):
        return None
    found = [_kept_by_one(node, kept, of) for node, (kept, of) in zip(declared, optimized, strict=True)]
    return None if None in found else [text or "" for text in found]


def _kept_by_one(declared: Node, optimized: Node, of: Any) -> str | None:
    if declared.kind == optimized.kind == "Join":
        left, right = (_columns(child) for child in children(of))
        return f"{', '.join(left) or 'nothing'} of the left side, {', '.join(right) or 'nothing'} of the right side"
    if declared.kind != "Aggregate" or optimized.kind != "Aggregate":
        return ""
    positions = {_id(function): number for number, function in enumerate(aggregate_functions(declared), start=1)}
    kept = list(dict.fromkeys(positions.get(_id(function)) for function in aggregate_functions(optimized)))
    if None in kept:
        return None
    return f"functions {', '.join(map(str, kept))}" if kept else "no function"


def _id(function: Node) -> int:
    return int(function.fields["resultId"]["id"])


def _columns(plan: Any) -> list[str]:
    output = plan.output()
    columns = (output.apply(number) for number in range(output.size()))
    return [f"{column.name()} {column.dataType().catalogString()}" for column in columns]


_SOURCES = frozenset({"StreamingRelation", "StreamingRelationV2"})
# Options that identify a source's data; other options may hold secrets, or concern only how the source reads.
_IDENTIFYING = (
    "path",
    "subscribe",
    "subscribepattern",
    "assign",
    "topic",
    "topics",
    "stream",
    "streamname",
    "table",
    "dbtable",
    "split_by",
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_WATERMARK_OF = "watermark of input "
_ENDED_SOURCE = "ended source "
_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"


@dataclass(frozen=True)
class PlanDescription:
    """The parts of a plan on which a query's state and offsets depend.

    Attributes:
        operators: By stage, the stateful operators that its function adds, from the input to the output.
        sources: The streaming sources, in the order in which Spark numbers them. Empty for a batch result.
        planned: By stage, the stateful operators that Spark plans for it, from the input to the output. None if its plan cannot
            be described.
    """

    operators: Mapping[str, tuple[str, ...]]
    sources: tuple[str, ...]
    planned: Mapping[str, tuple[PlannedOperator, ...]] | None

    @property
    def keeps_state(self) -> bool:
        """Some stage has a stateful operator."""
        return any(self.operators.values())


def describe(plan: QueryPlan) -> PlanDescription:
    """Describe the plan of a chain, stage by stage."""
    stages = list(plan.outputs)
    if not plan.streaming:
        return PlanDescription(dict.fromkeys(stages, ()), (), dict.fromkeys(stages, ()))
    sources = tuple(_source(each.of, plan.frame.sparkSession) for each in analyzed_nodes(plan.frame) if each.name in _SOURCES)
    if not _operators(plan.frame):
        return PlanDescription(dict.fromkeys(stages, ()), sources, dict.fromkeys(stages, ()))
    operators: dict[str, tuple[str, ...]] = {}
    before: list[str] = []
    stage_of: list[str] = []
    """By operator in `before`, the stage that has added it."""
    for stage, frame in plan.outputs.items():
        after = _operators(frame)
        start = _position(before, after)
        if start is None:  # all operators count as the stage's own
            start, before, stage_of = 0, [], []
        end = start + len(before)
        operators[stage] = (*after[:start], *after[end:])
        stage_of = [*[stage] * start, *stage_of, *[stage] * (len(after) - end)]
        before = after
    execution = query_execution(plan.frame.sparkSession, analyzed(plan.frame), plan.output_mode)
    operators |= _with_kept(operators, stage_of, _kept(plan, execution))
    planned = _planned(plan, execution)
    if plan.output_mode != "append":
        operators[stages[-1]] += (f"output mode {plan.output_mode}",)
    return PlanDescription(operators, sources, _by_stage(stages, stage_of, planned) if planned is not None else None)


def keeps_state(plan: QueryPlan) -> bool:
    """Whether the query of a plan has a stateful operator, or replaces rows that it has emitted."""
    return plan.streaming and (plan.output_mode != "append" or bool(stateful_nodes(plan.frame)))


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
    return f"{_ENDED_SOURCE}{stage!r}"


def has_ended_source(sources: Sequence[str]) -> bool:
    """Whether something stands in for a fused source that has ended."""
    return any(source.startswith(_ENDED_SOURCE) for source in sources)


def _position(before: Sequence[str], after: Sequence[str]) -> int | None:
    """Where the operators of a stage's input, which stay together, are among those of its output; None if they are not there."""
    starts = range(len(after) - len(before) + 1)
    return next((start for start in starts if after[start : start + len(before)] == before), None)


def _kept(plan: QueryPlan, execution: Any) -> list[str] | None:
    """By operator, what the optimizer leaves in its state; None if that is not known."""
    with contextlib.suppress(Exception):  # of the optimizer, or of a plan that cannot be written as JSON
        return kept_in_state(plan.frame, execution.optimizedPlan())
    return None


def _planned(plan: QueryPlan, execution: Any) -> list[PlannedOperator] | None:
    """The operators that Spark plans; None if that is not known."""
    with contextlib.suppress(Exception):  # of the planner, or of a plan that cannot be written as JSON
        text = functools.partial(stream_text, spark=plan.frame.sparkSession)
        return planned_operators(plan.frame, execution, plan.output_mode, text)
    return None


def _with_kept(
    operators: Mapping[str, Sequence[str]], stage_of: Sequence[str], kept: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """The operators by stage, with what is in their state.

    Args:
        operators: by stage, the operators that it adds.
        stage_of: by operator of the whole query, from the input to the output, the stage that adds it.
        kept: by the same operators, what is in their state; None if that is not known.
    """
    if kept is None or len(kept) != len(stage_of):
        return {}
    texts: dict[str, list[str]] = {stage: [] for stage in stage_of}
    for stage, text in zip(stage_of, kept, strict=True):
        number = len(texts[stage])
        texts[stage].append(operators[stage][number] + (f"{IN_STATE}{text}" if text else ""))
    return {stage: tuple(found) for stage, found in texts.items()}


def _by_stage(
    stages: Sequence[str], stage_of: Sequence[str], planned: Sequence[PlannedOperator]
) -> dict[str, tuple[PlannedOperator, ...]]:
    """The planned operators by stage.

    Each stage but the first has one input: its operators have lower numbers than those of the stages in front of it. Where Spark
    plans more or fewer operators than the stages have, all count as those of the last stage with state.
    """
    owners = sorted(stage_of, key=stages.index)
    if len(planned) != len(owners):
        owners = [owners[-1]] * len(planned)
    return {stage: tuple(each for each, owner in zip(planned, owners, strict=True) if owner == stage) for stage in stages}


# Sources


def stream_text(node: Any, spark: SparkSession) -> str:
    """A stream's name in a description of operators."""
    text = _source(node, spark)
    return WATERMARK_SOURCE if text.startswith(_WATERMARK_OF) else text


def _source(node: Any, spark: SparkSession) -> str:
    if node.nodeName() == "StreamingRelation":
        source = node.dataSource()
        options = _options(source.options())
        if "path" in options:
            options["path"] = _absolute(spark, options["path"])
        return _source_text(str(source.className()), options)
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


def _absolute(spark: SparkSession, path: str) -> str:
    """A path that means the same wherever a run is started: Spark knows the files of a stream by their absolute paths."""
    if path.startswith("/") or url_scheme(path) is not None:
        return path
    return without_host(str(HadoopFileSystem(spark, path).qualified(path)))


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


def with_encoding_of(described: PlanDescription, settings: Mapping[str, str]) -> PlanDescription:
    """The description with the encoding of state in which a query has begun, whatever the session says.

    Args:
        described: The description of the plan in this session.
        settings: The settings of Spark that the query keeps.
    """
    avro = settings.get(_ENCODING, "").lower() == "avro"  # without one an earlier Spark has written the state
    operators = {stage: tuple(as_encoded(text, avro=avro) for text in texts) for stage, texts in described.operators.items()}
    return replace(described, operators=operators)


@once
def _operators(frame: DataFrame) -> list[str]:
    """The stateful operators of a streaming plan, as text, from the input to the output."""
    wanted = stateful_nodes(frame)
    if not wanted:
        return []
    objects = [each.of for each in analyzed_nodes(frame)]  # in the order of the JSON
    encoded = ENCODED_AS_AVRO if str(frame.sparkSession.conf.get(_ENCODING)).lower() == "avro" else ""
    return [
        _operator(node, objects) + (encoded if node.kind == PROCESSOR else "") + _watermarks(node, objects) for node in wanted
    ]


def _watermarks(node: Node, objects: Sequence[Any]) -> str:
    """The watermarks that reach an operator; they decide when its state is emitted and dropped."""
    watermarks = dict.fromkeys(_watermark(objects[n.number]) for n in node.all() if n.kind == "EventTimeWatermark")
    return f"; watermark {' and '.join(sorted(watermarks))}" if watermarks else ""


def _watermark(node: Any) -> str:
    return f"{node.eventTime().name()} - {node.delay()}"


def _aggregation(node: Node, _: Any) -> str:
    functions = [as_written(each) for each in aggregate_functions(node)]
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
    processor = processor_of(of)
    states = ", ".join(declared_states(processor)) if processor is not None else "unknown"
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
    PROCESSOR: _transform_with_state,
}


def _operator(node: Node, objects: Sequence[Any]) -> str:
    try:
        return _KINDS.get(node.kind, _join)(node, objects[node.number])
    except RecursionError:
        return f"{node.kind}, whose expressions are nested too deeply to be compared"
