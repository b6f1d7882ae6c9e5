"""Whether the state of a query belongs to the key of its routed rows, and whether equal keys of all inputs reach one instance.

Only then can the state be moved with the key: equal values of the column meet in one instance, and all state of a value is there.
Each row is routed by Spark's hash of its key, in the key's own type: a value has one hash as an int and another one as a long,
although a join or a union takes them for equal. Analysis only; must not know tasks or storage.

Source: Spark's `HashExpression`; Flink refuses connected streams with keys of different types, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import types as t
from pyspark.sql.types import DataType

from dagster_checkpoints.spark.errors import KeyTypesError, StatePartitionsError
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.column_origins import column_origins, traced
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage
from dagster_checkpoints.spark.query.plan_nodes import children, items, optimized_joins
from dagster_checkpoints.spark.query.plan_text import Node, conjuncts, expression_json, parse, plan_json, type_text
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stateful_nodes import analyzed_plan, stateful_nodes
from dagster_checkpoints.state.errors import InputsChanged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_KEYS = {
    "Aggregate": "groupingExpressions",
    "Deduplicate": "keys",
    "DeduplicateWithinWatermark": "keys",
    "FlatMapGroupsInPandasWithState": "groupingAttributes",
}
_JOIN = "Join"
_EQUALITIES = frozenset({"EqualTo", "EqualNullSafe"})
_NORMALIZED = frozenset({"KnownFloatingPointNormalized", "NormalizeNaNAndZero"})
"""What Spark puts around a floating-point number in the key of a join: zeros get one form, and NaNs, and keep their hash."""


@dataclass(frozen=True, slots=True)
class RoutedKey:
    """The column by which the rows of a query's inputs are routed to its instances.

    Attributes:
        column: Its name, also in the keys of the state of all operators but joins.
        type: Its type.
        in_joins: Its name in the keys of the state of joins of two streams, which Spark numbers; None without such a join.
    """

    column: str
    type: DataType
    in_joins: str | None = None


def operators_without(plan: QueryPlan, key: str) -> list[str]:
    """The kinds of the query's stateful operators whose key does not hold a column of the inputs, unchanged and under its name.

    Args:
        plan: The plan of the query.
        key: The column by which the rows of all inputs are routed.
    """
    found = stateful_nodes(plan.frame)
    others = [node.kind for node in found if node.kind != _JOIN and key not in _keys(node)]
    joins = [node.kind for node in found if node.kind == _JOIN]
    return others if not joins or name_in_joins(plan, key) is not None else [*others, *joins]


def operators_not_by(plan: QueryPlan, key: str) -> list[tuple[str, str]]:
    """The query's stateful operators whose key is not exactly a column of the inputs, unchanged and under its name.

    Spark divides the state of the others, and of no others, into partitions by the hash of this column alone.

    Args:
        plan: The plan of the query.
        key: The column by which the rows of all inputs are routed.

    Returns:
        Per operator its stage, "" if that is not known, and its kind.
    """
    found = stateful_nodes(plan.frame)
    if len(found) != len(plan.stateful):
        return [("", f"{len(plan.stateful)} operators with state, of which {len(found)} are known")]
    named = list(zip(reversed(plan.stateful), found, strict=True))
    others = [(stage, node.kind) for stage, node in named if node.kind != _JOIN and not _is_key(node, key)]
    joins = [stage for stage, node in named if node.kind == _JOIN]
    if joins and any(of_join != [(key, key)] for of_join in _join_keys(plan)):
        others += [(stage, _JOIN) for stage in joins]
    return others


def operators_apart(plan: QueryPlan, keys: Collection[str]) -> list[tuple[str, str]]:
    """The query's stateful operators whose key holds none of the columns by which rows are routed to its instances, unchanged.

    Rows that belong together in such an operator may be in different instances, each of which has a result of its own.

    Args:
        plan: The plan of the query.
        keys: The columns by which the rows of its inputs are routed, also cast to a type with the same hashes.

    Returns:
        Per operator its stage, "" if that is not known, and its kind.
    """
    found = stateful_nodes(plan.frame)
    stages = list(reversed(plan.stateful)) if len(plan.stateful) == len(found) else [""] * len(found)
    joined = [any(_is_routed(one, keys) and _is_routed(other, keys) for one, other in pairs) for pairs in _join_keys(plan)]
    return [
        (stage, node.kind)
        for stage, node in zip(stages, found, strict=True)
        if not (
            all(joined) or _is_joined_by(node, keys) if node.kind == _JOIN else any(_is_routed(t, keys) for t in _origins(node))
        )
    ]


def routed_columns(plan: QueryPlan, keys: Collection[str]) -> list[str]:
    """The columns of a query's result by which its rows are divided among its instances.

    Args:
        plan: The plan of the query.
        keys: The columns by which the rows of its inputs are routed, also cast as in `operators_apart`.
    """
    origins = column_origins(analyzed_plan(plan.frame))
    return [name for name, origin in zip(plan.frame.columns, origins, strict=False) if _is_routed(origin, keys)]


def _is_joined_by(join: Node, keys: Collection[str]) -> bool:
    """Whether the condition of a join says that columns are equal by which rows are routed, or both null.

    Of the analyzed plan: the optimizer writes some such conditions in parts: those of structs of floating-point numbers, `<=>`.
    """
    equalities = (part for each in join.expressions("condition") for part in conjuncts(each) if part.kind in _EQUALITIES)
    return any(all(_is_routed(traced(side, join.children), keys) for side in part.children) for part in equalities)


def _is_routed(text: str, keys: Collection[str]) -> bool:
    """Whether a traced column is one of the columns by which rows are routed, or the first of several that is not null."""
    for begin, between, end in (("coalesce(", ", ", ")"), ("{", " | ", "}")):
        if text.startswith(begin) and text.endswith(end):
            return set(text[len(begin) : -len(end)].split(between)) <= set(keys)
    return text in keys


def check_key_of_state(call: StageCall, plan: QueryPlan, key: str, kinds: Set[DataType]) -> None:
    """Check that all state of a query is divided into partitions by the column by which its rows are routed, and by nothing else.

    Args:
        call: The first stage of the chain, which declares `state_partitions`.
        plan: The plan of the query.
        key: The column.
        kinds: Its types in the inputs.

    Raises:
        RefusedAtStage: A later stage of the chain keeps other state; it may begin a query of its own.
        StatePartitionsError: The stage itself keeps other state.
    """
    others = operators_not_by(plan, key)
    behind = [(stage, kind) for stage, kind in others if stage not in ("", call.stage.name)]
    if behind and len(behind) == len(others):
        stage, kind = behind[-1]
        raise RefusedAtStage(stage, f"{call.stage.name!r} has state_partitions, and {kind} has another key than {key!r}")
    if others:
        found = f"an operator with another key: {', '.join(kind for _, kind in others)}"
    elif len(kinds) > 1:
        found = f"inputs with the types {', '.join(sorted(kind.simpleString() for kind in kinds))}"
    elif any("collate" in kind.simpleString() for kind in kinds):
        found = f"the type {next(iter(kinds)).simpleString()}, whose equal values have several hashes"
    else:
        return
    raise StatePartitionsError(
        call.stage.name,
        call.context.instance,
        f"has state_partitions={call.stage.state_partitions}, so that its rows are routed by its state partitions. Expected "
        f"that {key!r} alone is the key of each stateful operator, unchanged, under its name and of one type, found {found}. A "
        "window beside the column is a part of the key. Group by the column alone, or leave out state_partitions: state is then "
        "moved to other instances row by row.",
    )


def name_in_joins(plan: QueryPlan, key: str) -> str | None:
    """The name that a column of the inputs has in the keys of the state of all joins of two streams in the query.

    Args:
        plan: The plan of the query.
        key: The column by which the rows of all inputs are routed.

    Returns:
        None if there is no such join, or if the keys of the joins hold the column at no place that is the same for all.

    Source: Spark's `SymmetricHashJoinStateManager` for the names; `ExtractEquiJoinKeys` for the order.
    """
    places: set[int] | None = None
    for of_join in _join_keys(plan):
        own = {place for place, sides in enumerate(of_join) if sides == (key, key)}
        places = own if places is None else places & own
    return f"field{min(places)}" if places else None


def _join_keys(plan: QueryPlan) -> Iterator[list[tuple[str, str]]]:
    """By join of two streams, the columns of the inputs in its key, from the left and from the right side; "" for none.

    Of the optimized plan: Spark takes the keys of the state from that one.
    """
    session = plan.frame.sparkSession
    jvm = jvm_of(session)
    for node in optimized_joins(plan.frame):
        found = jvm.org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys.unapply(node)
        if not found.isDefined():
            yield []
            continue
        left, right = (parse(plan_json(side)) for side in children(node))
        lefts, rights = _expressions(found.get()._2()), _expressions(found.get()._3())
        yield [(_column(one, left), _column(other, right)) for one, other in zip(lefts, rights, strict=True)]


def _expressions(sequence: Any) -> Sequence[Node]:
    return [parse(expression_json(each)) for each in items(sequence)]


def _column(expression: Node, plan: Node) -> str:
    """The column of the inputs that an expression is, unchanged; "" for any other expression."""
    while expression.kind in _NORMALIZED:
        (expression,) = expression.children
    return traced(expression, [plan]) if expression.kind == "AttributeReference" else ""


def _is_key(node: Node, key: str) -> bool:
    """Whether the key of an operator's state is this column of the inputs, and nothing else."""
    return _number_of_keys(node) == 1 and key in _keys(node)


def _number_of_keys(node: Node) -> int:
    """The number of columns in the key of an operator's state; 0 if it is not known."""
    if node.kind in _KEYS:
        return len(node.expressions(_KEYS[node.kind]))
    if node.kind == "TransformWithStateInPySpark":
        return int(node.fields.get("groupingAttributesLen") or 0)
    return len(column_origins(node.children[0])) if node.kind == "Distinct" else 0


def _keys(node: Node) -> Iterator[str]:
    """The columns of the inputs in the key of an operator's state, unchanged and under their names."""
    if node.kind in _KEYS:
        for each in node.expressions(_KEYS[node.kind]):
            name = str(each.fields.get("name"))
            if each.kind == "AttributeReference" and traced(each, node.children) == name:
                yield name
    else:
        yield from _origins(node)


def _origins(node: Node) -> Iterator[str]:
    """The columns in the key of an operator's state, traced to the inputs."""
    if node.kind in _KEYS:
        yield from (traced(each, node.children) for each in node.expressions(_KEYS[node.kind]))
    elif node.kind == "TransformWithStateInPySpark":
        yield from column_origins(node.children[0])[: int(node.fields.get("groupingAttributesLen") or 0)]
    elif node.kind == "Distinct":
        yield from column_origins(node.children[0])


_BINARY = "UTF8_BINARY"
_CHAR_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark reads columns of CHAR and VARCHAR as strings, keeps the declared type here, and pads the shorter of two CHAR values."""
_LONG_DIGITS = 18  # Spark hashes the digits of a decimal as a long up to this precision, as bytes above it
_INTS = (t.ByteType, t.ShortType, t.IntegerType)
_UNHASHED = (t.MapType, t.VariantType, t.GeographyType, t.GeometryType)


def check_key_types(call: StageCall, keys: Mapping[str, t.StructField], spark: SparkSession) -> None:
    """Check that equal keys of all inputs of a stage with several instances have one hash.

    Args:
        call: The stage.
        keys: By input, the column by which its rows are routed.
        spark: The session, which knows the type that Spark would compare the keys in.

    Raises:
        KeyTypesError: They have several, or none.
    """
    several = f"has {len(call.stage.instances)} instances"
    for name, field in keys.items():
        if hash_form(field) is None:
            raise KeyTypesError(
                call.stage.name,
                call.context.instance,
                f"{several} ({call.stage.location}), and reads {_key(name, field)}. Expected a key whose equal values have one "
                "hash, by which rows are routed: not a map or a variant, and no text with a collation, in which unequal texts "
                "are equal. "
                f"Route by another column that is equal where this one is: for UTF8_LCASE, let {name!r} add "
                f"F.collate(F.lower({field.name!r}), '{_BINARY}'). Or give the stage one instance.",
            )
    if len({hash_form(field) for field in keys.values()}) > 1:
        found = ", ".join(_key(name, field) for name, field in keys.items())
        raise KeyTypesError(
            call.stage.name,
            call.context.instance,
            f"{several} ({call.stage.location}), and reads {found}. Expected keys of one type: each row is routed by the hash of "
            "its key in the key's own type, so that equal keys of these types would meet in different instances, or not at all. "
            f"{_remedy(keys, spark)} Or give the stage one instance.",
        )


def check_recorded_types(stage: str, recorded: Mapping[str, t.StructField], keys: Mapping[str, t.StructField]) -> None:
    """Check that rows are routed as before a restore: otherwise they would not reach the instance that has their state.

    Args:
        stage: Name of the stage, which had several instances.
        recorded: By input, the column by which its rows were routed in the checkpoint, as far as it is known.
        keys: By input, the column by which they are routed now.

    Raises:
        InputsChanged: The hash of a key has changed.
    """
    for name, field in keys.items():
        before = recorded.get(name)
        if before is not None and hash_form(before) != hash_form(field):
            raise InputsChanged(
                f"Stage {stage!r}: expected {_key(name, before)}, as in the checkpoint, found the type "
                f"{field.dataType.simpleString()}. Rows are routed by the hash of the key in its type, so that the state of a "
                "key would be in another instance than its rows. Restore the type; or end the old pipeline with a drain, and "
                "begin with the new type as a new start (restore_from: none). If the stage keeps no state by key, set "
                "allow_changed_plan."
            )


def widened_keys(keys: Sequence[t.StructField], spark: SparkSession) -> list[str]:
    """Keys of several types, cast to the type in which Spark compares them, with the same hashes, as `column_origins` writes it.

    Args:
        keys: By input, the column by which its rows are routed: checked (`check_key_types`).
        spark: The session.
    """
    common = _common_type(keys, spark) if len({field.dataType for field in keys}) > 1 else None
    return [] if common is None else [f"cast({field.name} as {type_text(common.jsonValue())})" for field in keys]


def hash_form(field: t.StructField) -> str | None:
    """How Spark hashes a column: equal values of two columns of one form have one hash.

    Returns:
        None if equal values of the column itself have several hashes, or Spark hashes none.
    """
    declared = str((field.metadata or {}).get(_CHAR_LENGTH, ""))
    return declared if declared.replace("varchar(", "").count("char(") else _form(field.dataType)


def _form(kind: t.DataType) -> str | None:
    match kind:
        case t.CharType():
            return kind.simpleString()
        case t.VarcharType():
            return "string"
        case t.StringType():
            return "string" if kind.collation == _BINARY else None
        case t.DecimalType():
            return f"decimal of scale {kind.scale} as {'a long' if kind.precision <= _LONG_DIGITS else 'bytes'}"
        case t.DayTimeIntervalType() | t.YearMonthIntervalType():
            return kind.typeName()
        case t.UserDefinedType():
            return _form(kind.sqlType())
        case t.ArrayType():
            return _of_parts("array", [_form(kind.elementType)])
        case t.StructType():
            return _of_parts("struct", [hash_form(field) for field in kind.fields])
    if isinstance(kind, _UNHASHED):
        return None
    return "int" if isinstance(kind, _INTS) else kind.simpleString()


def _of_parts(name: str, parts: Sequence[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    return f"{name}<{', '.join(known)}>" if len(known) == len(parts) else None


def _key(name: str, field: t.StructField) -> str:
    return f"{name!r} by its key {field.name!r} of type {field.dataType.simpleString()}"


def _remedy(keys: Mapping[str, t.StructField], spark: SparkSession) -> str:
    common = _common_type(list(keys.values()), spark)
    if common is None:
        return "Cast them to one type in the stages that send them."
    name, field = next((name, field) for name, field in keys.items() if field.dataType != common)
    cast = f"F.col({field.name!r}).cast({common.simpleString()!r})"
    return f"Cast them to one type in the stages that send them, as in {name!r}: .withColumn({field.name!r}, {cast})."


def _common_type(fields: Sequence[t.StructField], spark: SparkSession) -> t.DataType | None:
    """The type that Spark would give a union of the columns; None if it refuses one."""
    frames = [spark.createDataFrame([], t.StructType([t.StructField("key", field.dataType)])) for field in fields]
    try:
        both = frames[0]
        for frame in frames[1:]:
            both = both.union(frame)
        return both.schema["key"].dataType
    except AnalysisException:
        return None
