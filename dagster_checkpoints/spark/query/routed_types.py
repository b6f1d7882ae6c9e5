"""Whether equal keys of all inputs of a stage reach one instance: it depends on how Spark hashes the types of the keys.

Each row is routed by Spark's hash of its key, in the key's own type: a value has one hash as an int and another one as a long,
although a join or a union takes them for equal. Analysis only; must not know tasks or storage.

Source: Spark's `HashExpression`; Flink refuses connected streams with keys of different types, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import types as t

from dagster_checkpoints.spark.errors import KeyTypesError
from dagster_checkpoints.spark.query.plan_text import type_text
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.state.errors import InputsChanged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
