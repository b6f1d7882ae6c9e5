"""Operators that Spark accepts over a stream, and whose rows would not be those of a batch: refused before a query starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

ROWS = "k string, ts timestamp, v long"
HOUR = "window(ts, '1 hour')"


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.head(1)[["k"]].assign(n=len(rows))


def both(left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    return left


def table(rows: Any) -> Any:
    return rows.sparkSession.createDataFrame([], ROWS)


def sql(query: str) -> Callable[[Any], Any]:
    return lambda rows: rows.sparkSession.sql(query, rows=rows, table=table(rows))


def mean_in_pandas(rows: Any) -> Any:
    def mean(values: pd.Series) -> float:
        return float(values.mean())

    return rows.groupBy(F.window("ts", "1 hour")).agg(F.pandas_udf(mean, "double")("v"))


class Counted:
    """A table function."""

    def eval(self, row: Any) -> Any:
        yield row["k"], 1


class Doubled:
    """A table function of one row."""

    def eval(self, v: int) -> Any:
        yield "", 2 * v


def table_function(query: str, function: type = Counted) -> Callable[[Any], Any]:
    def called(rows: Any) -> Any:
        rows.sparkSession.udtf.register("called", F.udtf(function, returnType="name string, n long"))
        return sql(query)(rows)

    return called


def joined(rows: Any, how: str, also: Any = None) -> Any:
    other = rows.select(*[F.col(name).alias(f"r{name}") for name in rows.columns])
    condition = F.expr("k = rk AND rts BETWEEN ts AND ts + INTERVAL 5 MINUTES")
    return rows.join(other, condition if also is None else condition & also, how)


def joined_by_python(rows: Any) -> Any:
    same = F.udf(lambda one, other: one == other, "boolean")
    return joined(rows, "full", same("v", "rv"))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "applyInPandas": (
        lambda rows: rows.groupBy("k").applyInPandas(counted, "k string, n long"),
        r"calls applyInPandas of a groupBy on a stream.*in one micro-batch.*transformWithStateInPandas",
    ),
    "applyInArrow": (lambda rows: rows.groupBy("k").applyInArrow(lambda found: found, ROWS), "calls applyInArrow of a groupBy"),
    "cogroup": (
        lambda rows: rows.groupBy("k").cogroup(rows.groupBy("k")).applyInPandas(both, ROWS),
        r"calls cogroup\(\.\.\.\)\.applyInPandas of a groupBy on a stream.*join the streams",
    ),
    "cogroup with a table": (
        lambda rows: rows.groupBy("k").cogroup(table(rows).groupBy("k")).applyInPandas(both, ROWS),
        r"calls cogroup\(\.\.\.\)\.applyInPandas",
    ),
    "exceptAll": (lambda rows: rows.exceptAll(table(rows)), "has exceptAll .*in each micro-batch.*left anti join"),
    "EXCEPT without event time": (
        sql("SELECT k FROM {rows} EXCEPT SELECT k FROM {table}"),
        "has EXCEPT .*use its event time 'ts'.*left anti join",
    ),
    "cube": (lambda rows: rows.cube(F.window("ts", "1 hour"), "k").count(), "groups by sets of columns.*never emit"),
    "rollup by event time": (lambda rows: rows.rollup("ts", "k").count(), "groups by sets of columns.*never emit"),
    "a Python function in an outer join": (
        joined_by_python,
        "A Python function cannot be in the condition.*PYTHON_UDF_IN_ON_CLAUSE",
    ),
    "an offset behind an inner join": (lambda rows: joined(rows, "inner").offset(1), r"\A(?!.*It is not known when).*Offset"),
    "two event times behind a join": (
        lambda rows: joined(rows, "inner").dropDuplicates(),
        "behind columns that are both event time, 'ts' and 'rts'.*timestamp_micros",
    ),
    "a copy of the event time": (
        lambda rows: rows.withColumn("copy", F.col("ts")).dropDuplicatesWithinWatermark(["k"]),
        "both event time, 'ts' and 'copy'",
    ),
    "two event times in a group": (
        lambda rows: rows.groupBy("ts", F.window("ts", "1 hour")).count(),
        "both event time, '(ts|window)' and ",
    ),
    "two event times on a side of a join": (
        lambda rows: joined(joined(rows, "inner").selectExpr("k", "ts", "rts AS second"), "inner"),
        "both event time, 'ts' and 'second'",
    ),
    "a group by a text with a collation": (
        sql(f"SELECT {HOUR} AS hour, count(*) FROM {{rows}} GROUP BY {HOUR}, k COLLATE UTF8_LCASE"),
        "by .* of type STRING COLLATE UTF8_LCASE.*lower",
    ),
    "duplicates of a text with a collation": (
        lambda rows: rows.withColumn("s", F.struct(F.expr("k COLLATE UTF8_BINARY_RTRIM"))).dropDuplicates(["s", "ts"]),
        "by .*COLLATE UTF8_BINARY_RTRIM.*rtrim",
    ),
    "sessions alone": (
        lambda rows: rows.groupBy(F.session_window("ts", "5 minutes"), F.lit(1)).count(),
        r"by a session window alone.*F\.hash\('ts'\) \* 0",
    ),
    "the clock in an aggregate": (
        lambda rows: rows.groupBy(F.window("ts", "1 hour")).agg(F.max(F.current_timestamp())),
        r"has current_timestamp\(\) in an aggregate function.*withColumn\('now', F\.expr\('current_timestamp\(\)'\)\)",
    ),
    "the clock in a join": (
        lambda rows: joined(rows, "left", F.col("rts") < F.now()),
        r"has now\(\) in the condition of a join",
    ),
    "the clock in a join with a table": (
        sql("SELECT r.k FROM {rows} r JOIN {table} t ON r.k = t.k AND t.ts < localtimestamp()"),
        r"has localtimestamp\(\) in the condition of a join",
    ),
    "an aggregate in pandas": (mean_in_pandas, "aggregates a stream with a function of pandas.*collect_list"),
    "monotonically_increasing_id": (
        lambda rows: rows.withColumn("n", F.monotonically_increasing_id()),
        "begins at 0 again in each micro-batch.*xxhash64.*not supported with streaming",
    ),
    "a table function of a stream": (
        table_function("SELECT * FROM called(TABLE({rows}))"),
        "gives a stream to the table function 'called' as a table.*one micro-batch.*LATERAL.*collect_list",
    ),
    "a table function of one partition": (
        table_function("SELECT n FROM called(TABLE(SELECT k FROM {rows}) WITH SINGLE PARTITION) WHERE n > 0"),
        "gives a stream to the table function 'called' as a table",
    ),
    "a table function of partitions": (
        table_function("SELECT * FROM called(TABLE({rows}) PARTITION BY k ORDER BY ts)"),
        "gives a stream to the table function 'called' as a table",
    ),
    "asTable": (
        lambda rows: F.udtf(Counted, returnType="name string, n long")(rows.asTable().partitionBy("k")),
        "gives a stream to the table function 'Counted' as a table",
    ),
}
ACCEPTED: dict[str, Callable[[Any], Any]] = {
    "applyInPandas of a table": lambda rows: rows.join(table(rows).groupBy("k").applyInPandas(counted, "k string, n long"), "k"),
    "EXCEPT with event time": sql("SELECT k, ts FROM {rows} EXCEPT SELECT k, ts FROM {table}"),
    "one event time behind a join": lambda rows: joined(rows, "inner").dropDuplicates(["k", "ts"]).select("k", "ts"),
    "a group by one of two event times": lambda rows: joined(rows, "inner").groupBy(F.window("rts", "1 hour")).count(),
    "a group by a text of exact comparison": sql(f"SELECT count(*) FROM {{rows}} GROUP BY {HOUR}, k COLLATE UTF8_BINARY"),
    "a table function of each row": table_function("SELECT k, n FROM {rows}, LATERAL called(v)", Doubled),
    "a table function of each row of a query": table_function("SELECT n FROM (SELECT v FROM {rows}), LATERAL called(v)", Doubled),
    "a table function of a table": table_function("SELECT r.k, n FROM {rows} r JOIN called(TABLE({table})) c ON r.k = c.name"),
    "a generator of Spark of each row": sql("SELECT col0.k, col0.v FROM stack(1, TABLE({rows}))"),
    "sessions of all rows": lambda rows: rows.groupBy(F.session_window("ts", "5 minutes"), F.hash("ts") * 0).count(),
    "the clock in front of an aggregate": (
        lambda rows: rows.withColumn("now", F.expr("current_timestamp()")).groupBy(F.window("ts", "1 hour")).agg(F.max("now"))
    ),
    "the clock beside an aggregate": sql(
        f"SELECT count(*) FILTER (WHERE ts < now()) AS n, current_date() AS day FROM {{rows}} GROUP BY {HOUR}"
    ),
    "random numbers": lambda rows: rows.where(F.rand(1) < 0.5).select("k", F.expr("uuid()").alias("id")),
    "a window in each set": sql(f"SELECT {HOUR} AS hour, k, v, count(*) AS n FROM {{rows}} GROUP BY {HOUR}, CUBE(k, v)"),
}

if hasattr(DataFrame, "zipWithIndex"):  # since Spark 4.2
    numbered = "numbers the rows .*at 0 again in each micro-batch.*xxhash64"
    REFUSED["zipWithIndex"] = (lambda rows: rows.zipWithIndex("n"), numbered)
    ACCEPTED["numbers of a table"] = lambda rows: rows.join(table(rows).zipWithIndex("n"), "k").select("n")


def pipeline(lab: Any, function: Callable[[Any], Any], **options: Any) -> Pipeline:
    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context: Any) -> Any:
        return lab.stream("in", ROWS)

    return Pipeline("p", [flights, stage(name="last", sink=lab.sink(), **options)(lambda flights: function(flights))])


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_would_lose_or_divide_rows_is_refused_by_name(lab: Any, name: str) -> None:
    function, text = REFUSED[name]
    (error,) = check_plans(pipeline(lab, function), lab.spark).failed.values()
    assert type(error) is PlanRefusedError and error.stage == "last"
    assert re.search(text, str(error), re.DOTALL), error


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_over_a_table_or_with_event_time_is_accepted(lab: Any, name: str) -> None:
    assert not check_plans(pipeline(lab, ACCEPTED[name]), lab.spark).failed


KEYS = {
    "v": "",
    "CAST(v AS DOUBLE) AS v": "by v, a floating-point number",
    "CAST(v AS FLOAT) AS v": "by v, a floating-point number",
    "struct(k, array(CAST(v AS DOUBLE))) AS v": "by v, a floating-point number",
    "CAST(CAST(v AS DOUBLE) + 0.0D AS STRING) AS v": "",
}


class Counts(StatefulProcessor):
    """Without rows it is never called."""

    def init(self, handle: Any) -> None:
        handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        yield pd.DataFrame({"n": [1]})

    def close(self) -> None: ...


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_a_processor_by_a_number_of_which_spark_keeps_two_zeros_is_warned_of(lab: Any, key: str, processor: bool) -> None:
    def update(key: Any, batches: Any, state: Any) -> Any:
        yield pd.DataFrame({"n": [1]})

    def function(rows: Any) -> Any:
        grouped = rows.selectExpr(key, "ts").groupBy("v")
        if processor:
            return grouped.transformWithStateInPandas(Counts(), "n long", "Append", "None")
        return grouped.applyInPandasWithState(update, "n long", "n long", "append", "NoTimeout")

    report = check_plans(pipeline(lab, function), lab.spark)
    found = [text for text in report.warnings if "floating-point" in text]
    assert not report.failed and len(found) == bool(KEYS[key]) and all(KEYS[key] in text for text in found), report.warnings


class Numbers(StatefulProcessor):
    """Numbers the rows of each key, as pandas and as rows."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for each in rows:
            number = (self.count.get()[0] if self.count.exists() else 0) + 1
            self.count.update((number,))
            yield pd.DataFrame({"v": each["v"], "n": number}) if isinstance(each, pd.DataFrame) else Row(v=each.v, n=number)

    def close(self) -> None: ...


def numbered(rows: Any, key: str, method: str) -> Any:
    return getattr(rows.selectExpr(f"{key} AS key", "v").groupBy("key"), method)(Numbers(), "v long, n long", "Append", "None")


PANDAS = "transformWithStateInPandas"


@pytest.mark.parametrize(
    ("key", "method", "warned"),
    [
        ("v", PANDAS, "the type long, which may be null. Where a micro-batch has a null key"),
        ("CAST(v AS SMALLINT)", PANDAS, "the type short, which may be null"),
        ("ts", PANDAS, "the type timestamp, which may be null. A null key ends the run"),
        ("v", "transformWithState", ""),
        ("k", PANDAS, ""),
        ("CAST(v AS STRING)", PANDAS, ""),
        ("coalesce(v, 0)", PANDAS, ""),
    ],
)
def test_a_key_whose_null_pandas_does_not_have_is_warned_of(lab: Any, key: str, method: str, warned: str) -> None:
    def warnings(condition: str) -> list[str]:
        report = check_plans(pipeline(lab, lambda rows: numbered(rows.where(condition), key, method)), lab.spark)
        assert not report.failed
        return [text for text in report.warnings if "may be null" in text]

    found = warnings("k <> ''")
    assert len(found) == bool(warned) and all(warned in text and "key IS NOT NULL" in text for text in found), found
    assert not warnings("k <> '' AND v IS NOT NULL AND ts IS NOT NULL") or key.startswith("CAST")


def test_spark_gives_the_state_of_null_to_numbers_of_pandas(lab: Any) -> None:
    """The reason of the warning: without this its text would be wrong."""
    lab.put("in", ROWS, [("a", lab.at(0), v) for v in (None, 1, 2, 3, 4)])
    found = {}
    for key, method in (("v", PANDAS), ("v", "transformWithState"), ("CAST(v AS STRING)", PANDAS), ("ts", PANDAS)):
        rows, name = lab.stream("in", ROWS), f"numbered_{len(found)}"
        query = numbered(rows, key, method).writeStream.format("memory").queryName(name).trigger(availableNow=True)
        query.option("checkpointLocation", str(lab.folder / name)).start().awaitTermination()
        found[key, method] = sorted(row.n for row in lab.spark.table(name).collect())
    assert max(found.pop(("v", PANDAS))) > 1
    assert set(map(tuple, found.values())) == {(1,) * 5}
    nulls = numbered(lab.stream("in", ROWS), "IF(v IS NULL, NULL, ts)", PANDAS).writeStream.format("memory").queryName("nulls")
    with pytest.raises(StreamingQueryException, match="NaT"):
        nulls.option("checkpointLocation", str(lab.folder / "nulls")).trigger(availableNow=True).start().awaitTermination()


class Keeps(StatefulProcessor):
    """Keeps a row's map, as the map that it is or as the list of pairs as which Spark gives it."""

    def __init__(self, columns: str, *, made: bool = True) -> None:
        self.columns, self.made = columns, made

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("kept", self.columns)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            self.state.update((dict(row.m) if self.made else row.m,))
            yield Row(found=str(self.state.get()[0]))

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("columns", "row", "warned"),
    [
        ("m map<string,long>", "map(k, v)", True),
        ("m array<map<string,long>>", "array(map(k, v))", True),
        ("m map<string,long>", "v", False),
        ("m long", "map(k, v)", False),
    ],
)
def test_a_map_of_a_row_that_a_state_would_keep_as_null_is_warned_of(lab: Any, columns: str, row: str, warned: bool) -> None:
    def function(rows: Any) -> Any:
        grouped = rows.selectExpr("k", "ts", f"{row} AS m").groupBy("k")
        return grouped.transformWithState(Keeps(columns), "found string", "Append", "None")

    report = check_plans(pipeline(lab, function), lab.spark)
    found = [text for text in report.warnings if "holds null" in text]
    assert not report.failed and len(found) == warned, report.warnings
    assert all(f"(value kept struct<{columns.replace(' ', ':', 1).replace('long', 'bigint')}>)" in text for text in found), found


def test_spark_keeps_null_for_a_map_that_a_row_gave(lab: Any) -> None:
    """The reason of the warning: without this its text would be wrong."""
    lab.put("in", "k string, ts timestamp, v long", [("a", lab.at(0), 7)])
    found = {}
    for made in (False, True):
        rows = lab.stream("in", "k string, ts timestamp, v long").selectExpr("k", "map(k, v) AS m").groupBy("k")
        kept = rows.transformWithState(Keeps("m map<string,long>", made=made), "found string", "Append", "None")
        query = kept.writeStream.format("memory").queryName(f"kept_{made}").trigger(availableNow=True)
        query.option("checkpointLocation", str(lab.folder / f"kept-{made}")).start().awaitTermination()
        found[made] = [row.found for row in lab.spark.table(f"kept_{made}").collect()]
    assert found == {False: ["None"], True: ["{'a': 7}"]}
