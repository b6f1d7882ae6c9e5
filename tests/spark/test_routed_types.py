"""Keys of several inputs of a stage with two instances: equal ones meet, or the stage is refused before it runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.errors import KeyTypesError
from dagster_checkpoints.spark.job.job_start import read_restored
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.query.routed_keys import hash_form
from dagster_checkpoints.state.errors import InputsChanged

NUMBERS = ("null", "-1", "0", "1", "7")
VALUES: dict[str, Sequence[str]] = {
    "tinyint": NUMBERS,
    "smallint": NUMBERS,
    "int": NUMBERS,
    "bigint": NUMBERS,
    "decimal(10,2)": NUMBERS,
    "decimal(12,2)": NUMBERS,
    "decimal(12,4)": NUMBERS,
    "decimal(20,2)": NUMBERS,
    "decimal(38,2)": NUMBERS,
    "float": (*NUMBERS, "'-0.0'", "'NaN'"),
    "double": (*NUMBERS, "'-0.0'", "'NaN'"),
    "boolean": ("null", "true", "false"),
    "string": ("null", "'1'", "'a'", "'A'", "'a '"),
    "string collate UTF8_LCASE": ("'a'", "'A'"),
    "string collate UTF8_BINARY_RTRIM": ("'a'", "'a '"),
    "binary": ("X'61'", "X'31'"),
    "date": ("'2024-01-01'", "'1970-01-02'"),
    "timestamp": ("'2024-01-01 00:00:00'", "'1970-01-02 00:00:00'"),
    "timestamp_ntz": ("'2024-01-01 00:00:00'", "'1970-01-02 00:00:00'"),
    "interval day to second": ("'1 00:00:00'",),
    "interval hour": ("'24'",),
    "interval year": ("'1'",),
    "interval month": ("'12'",),
    "struct<a:int,b:double>": ("named_struct('a', 1, 'b', double('-0.0'))", "named_struct('a', 1, 'b', 0.0D)"),
    "struct<c:smallint,d:double>": ("named_struct('c', 1S, 'd', 0.0D)",),
    "struct<a:bigint,b:double>": ("named_struct('a', 1L, 'b', 0.0D)",),
    "array<int>": ("array(1, null)",),
    "array<smallint>": ("array(1S, null)",),
    "array<bigint>": ("array(1L, null)",),
}
ALIKE = {
    frozenset({"tinyint", "smallint"}),
    frozenset({"tinyint", "int"}),
    frozenset({"smallint", "int"}),
    frozenset({"decimal(10,2)", "decimal(12,2)"}),
    frozenset({"decimal(20,2)", "decimal(38,2)"}),
    frozenset({"interval day to second", "interval hour"}),
    frozenset({"interval year", "interval month"}),
    frozenset({"struct<a:int,b:double>", "struct<c:smallint,d:double>"}),
    frozenset({"array<int>", "array<smallint>"}),
}
"""The pairs of different types whose equal values Spark hashes alike."""


UNLIKE = [
    ("int", "bigint"),
    ("decimal(10,2)", "decimal(12,4)"),
    ("decimal(10,2)", "decimal(20,2)"),
    ("float", "double"),
    ("date", "timestamp"),
    ("string collate UTF8_LCASE", "string collate UTF8_LCASE"),
    ("string collate UTF8_BINARY_RTRIM", "string collate UTF8_BINARY_RTRIM"),
]
"""Some of those that it hashes otherwise: these are why such keys are refused."""


def field(kind: str) -> t.StructField:
    return t.StructType.fromDDL(f"k {kind}")["k"]


def misrouted(a: str, b: str) -> str:
    """Whether Spark takes values of two types for equal, and gives them different hashes, as an expression."""
    pairs = [(f"CAST({x} AS {a})", f"CAST({y} AS {b})") for x, y in itertools.product(VALUES[a], VALUES[b])]
    return " OR ".join(f"({x} <=> {y} AND hash({x}) <> hash({y}))" for x, y in pairs)


def test_types_of_one_form_have_one_hash_for_values_that_spark_takes_for_equal(spark: SparkSession) -> None:
    forms = {kind: hash_form(field(kind)) for kind in VALUES}
    pairs = [*itertools.combinations(VALUES, 2), *((kind, kind) for kind in VALUES)]
    same = [(a, b) for a, b in pairs if forms[a] is not None and forms[a] == forms[b]]
    assert {frozenset(pair) for pair in same if pair[0] != pair[1]} == ALIKE
    compared = [pair for pair in same if not all("struct" in kind for kind in pair) or pair[0] == pair[1]]
    pairs = [*compared, *UNLIKE]
    found = spark.sql("SELECT " + ", ".join(f"{misrouted(a, b)} AS `{a}, {b}`" for a, b in pairs)).first()
    assert found is not None
    assert [pair for pair, wrong in zip(pairs, found, strict=True) if wrong] == UNLIKE


def test_a_char_is_padded_to_the_other_ones_length_when_spark_compares_them() -> None:
    def declared(text: str) -> t.StructField:
        return t.StructField("k", t.StringType(), True, {"__CHAR_VARCHAR_TYPE_STRING": text})

    assert hash_form(declared("varchar(3)")) == hash_form(field("string")) == "string"
    assert len({hash_form(declared("char(3)")), hash_form(declared("char(5)")), hash_form(field("string"))}) == 3


def reading(lab: Any, kinds: Sequence[str], instances: str) -> Pipeline:
    """A stage with inputs whose keys have these types."""
    rows = [f"k {kind}, ts timestamp, v long" for kind in kinds]

    @unbounded_source(watermark=("ts", "1 hour"))
    def a(context):
        return lab.stream("a", rows[0])

    @unbounded_source(watermark=("ts", "1 hour"))
    def b(context):
        return lab.stream("b", rows[1])

    @bounded_source
    def names(context):
        return lab.table("names", "k bigint, name string")

    by_key = {"a": StageInput(key="k"), "b": StageInput(key="k"), "names": StageInput(mode="static")}

    @stage(inputs=by_key, instances=list(instances), sink=lab.sink())
    def both(a, b, names):
        return a.select("v").union(b.select("v")).crossJoin(names.select("name"))

    return Pipeline("both", [a, b, names, both])


REFUSED = [
    ("int", "bigint", ".withColumn('k', F.col('k').cast('bigint'))"),
    ("decimal(10,2)", "decimal(12,4)", ".cast('decimal(12,4)')"),
    ("decimal(10,2)", "decimal(20,2)", ".cast('decimal(20,2)')"),
    ("int", "decimal(10,0)", "as in 'a'"),
    ("float", "double", ".cast('double')"),
    ("date", "timestamp", ".cast('timestamp')"),
    ("timestamp", "timestamp_ntz", "Cast them to one type"),
    ("string", "int", "Cast them to one type"),
    ("string", "binary", "Cast them to one type"),
    ("boolean", "int", "Cast them to one type"),
    ("struct<x:int>", "struct<x:bigint>", "Cast them to one type"),
    ("array<int>", "array<bigint>", ".cast('array<bigint>')"),
    ("string collate UTF8_LCASE", "string collate UTF8_LCASE", "F.collate(F.lower('k'), 'UTF8_BINARY')"),
    ("struct<x:string collate UNICODE_CI>", "struct<x:string collate UNICODE_CI>", "no text with a collation"),
    ("map<string,int>", "map<string,int>", "not a map or a variant"),
    ("variant", "variant", "not a map or a variant"),
]


@pytest.mark.parametrize(("first", "second", "remedy"), REFUSED)
def test_keys_whose_equal_values_would_not_meet_are_refused_by_name(lab: Any, first: str, second: str, remedy: str) -> None:
    error = check_plans(reading(lab, (first, second), "xy"), lab.spark).failed["both"]
    assert isinstance(error, KeyTypesError)
    assert f"'a' by its key 'k' of type {field(first).dataType.simpleString()}" in str(error)
    assert "has 2 instances" in str(error)
    assert remedy in str(error)


@pytest.mark.parametrize(
    ("first", "second", "instances"),
    [("int", "bigint", "x"), ("map<string,int>", "string", "x"), ("smallint", "int", "xy"), ("timestamp", "timestamp", "xy")],
)
def test_keys_of_one_instance_and_of_one_hash_are_accepted(lab: Any, first: str, second: str, instances: str) -> None:
    assert check_plans(reading(lab, (first, second), instances), lab.spark).failed == {}


def test_equal_keys_of_two_types_with_one_hash_meet_also_after_a_restore(lab: Any) -> None:
    kinds = {"a": "smallint", "b": "int"}

    def rows(kind: str) -> str:
        return f"k {kind}, ts timestamp, v long"

    def put(begin: int) -> None:
        for name, kind in kinds.items():
            lab.put(name, rows(kind), [(key, lab.at(60 * key), key) for key in range(begin, begin + 20)])

    def counted(a: Any, b: Any) -> Any:
        return a.union(b).groupBy(F.window("ts", "1 day"), "k").agg(F.sum("v").alias("v")).select("k", "v")

    def pipeline(kinds: dict[str, str]) -> Pipeline:
        def read(name: str) -> Any:
            @unbounded_source(watermark=("ts", "1 hour"), name=name)
            def source(context):
                return lab.stream(name, rows(kinds[name]))

            return source

        @stage(inputs={name: StageInput(key="k") for name in "ab"}, instances=["x", "y"], sink=lab.sink())
        def sums(a, b):
            return counted(a, b)

        return Pipeline("sums", [read("a"), read("b"), sums])

    put(0)
    job = lab.start(pipeline(kinds), interval=None)
    job.wait_until(lambda: all(job.execution.rows().get(name) == 20 for name in "ab"))
    job.ask("stop").result(120)
    job.finished()

    changed = pipeline({"a": "bigint", "b": "bigint"})
    with lab.storage("sums") as storage:
        restored = read_restored(changed, storage, storage.list_savepoints()[0].location, True)
        error = check_plans(changed, lab.spark, restored).changed[0]
    assert isinstance(error, InputsChanged)
    assert "'a' by its key 'k' of type smallint" in str(error)
    assert "found the type bigint" in str(error)

    put(10)
    job = lab.start(pipeline(kinds), interval=None)
    job.wait_until(lambda: all(job.execution.rows().get(name) == 40 for name in "ab"))
    job.drain()
    job.finished()
    lab.check(counted(*(lab.table(name, rows(kind)) for name, kind in kinds.items())))
    assert lab.count() == 30  # one sum for each key, from both inputs and both runs
