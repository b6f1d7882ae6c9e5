"""`run_pipeline`: what a user sees of his stages in a test, step by step, and what it refuses."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.testing import InvalidTestRowsError, PipelineCheckError, SourceRows, check_pipeline, run_pipeline
from dagster_checkpoints.testing.replaced_pipeline import ReplacedPipeline
from tests.spark.planted_mistakes import PAGE, examples

ORDERS = "shop string, at timestamp, price long"


def at(minute: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=minute)


def unreachable(context: Any) -> Any:
    raise AssertionError("the source of production is not called")


def shop() -> Pipeline:
    history = bounded_source(name="history", watermark=("at", "5 minutes"))(unreachable)
    live = unbounded_source(name="live", watermark=("at", "5 minutes"), instances=["a", "b"])(unreachable)

    @stage(inputs={"live": StageInput(edge="all_to_all")})
    def orders(history: Any, live: Any) -> Any:
        return history.unionByName(live)

    @stage(sink=ParquetSink("/nowhere/that/exists"))
    def sales(orders: Any) -> Any:
        found = orders.groupBy(F.window("at", "10 minutes"), "shop").agg(F.sum("price").alias("sum"))
        return found.select(F.col("window.start").alias("start"), "shop", "sum")

    return Pipeline("shop", [history, live, orders, sales])


def rows(output: Any, name: str, step: int | None = None) -> list[tuple[Any, ...]]:
    return [
        tuple(value.timestamp() if isinstance(value, dt.datetime) else value for value in row) for row in output.rows(name, step)
    ]


def start(minute: int) -> float:
    return at(minute).timestamp()


def test_steps_of_event_time_late_rows_and_the_drain(spark: SparkSession) -> None:
    output = run_pipeline(
        shop(),
        {
            "history": SourceRows(ORDERS, [("x", at(1), 10), ("y", at(2), 20)]),
            "live": SourceRows(
                ORDERS,
                [("x", at(3), 1), ("x", at(18), 2)],  # one for each instance
                [{"shop": "x", "at": at(31), "price": 4}, {"shop": "x", "at": at(32), "price": 8}],
                [("x", at(1), 1000), ("x", at(33), 16)],  # the first row is late
            ),
        },
        spark=spark,
    )
    assert rows(output, "sales", 0) == []  # the instance with the row of minute 3 holds event time back
    assert rows(output, "sales", 1) == [(start(0), "x", 11), (start(0), "y", 20), (start(10), "x", 2)]
    assert rows(output, "sales", 2) == []
    assert rows(output, "sales", -1) == [(start(30), "x", 28)]
    assert len(output.rows("sales")) == 4


def test_the_test_on_its_page(spark: SparkSession) -> None:
    """Those that take longer are in `long/test_planted_mistakes.py`."""
    examples(PAGE)["test_sums_by_hour"]()


def test_the_test_on_its_page_that_fails(spark: SparkSession) -> None:
    with pytest.raises(PipelineCheckError) as raised:
        examples(PAGE)["test_latest_prices"]()
    (text,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert str(raised.value) == text.strip()


def test_a_bounded_pipeline_has_one_step_and_other_stages_can_be_looked_at(spark: SparkSession) -> None:
    history = bounded_source(name="history")(unreachable)

    @stage
    def doubled(history: Any) -> Any:
        return history.selectExpr("id * 2 AS id")

    @stage(sink=ParquetSink("/nowhere"))
    def odd(doubled: Any) -> Any:
        return doubled.selectExpr("id + 1 AS id")

    pipeline = Pipeline("numbers", [history, doubled, odd])
    given = {"history": SourceRows("id long", spark.range(3))}
    output = run_pipeline(pipeline, given, spark=spark, stages=["doubled", "odd"])
    assert [row.id for row in output.rows("doubled")] == [0, 2, 4] and [row.id for row in output.rows("odd")] == [1, 3, 5]
    with pytest.raises(InvalidTestRowsError, match=r"a stage whose rows are kept, found 'doubled'.*odd"):
        run_pipeline(pipeline, given, spark=spark).rows("doubled")


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"history": SourceRows(ORDERS, [])}, r"found none of live\[a\], live\[b\].*SourceRows"),
        ({"histori": SourceRows(ORDERS, [])}, "found 'histori'.*history"),
        ({"sales": SourceRows(ORDERS, [])}, "Expected rows of sources of pipeline 'shop', found 'sales'"),
        (
            {"history": SourceRows(ORDERS, [], []), "live": SourceRows(ORDERS, [])},
            "one step for the bounded source 'history'.*found 2 steps",
        ),
    ],
)
def test_rows_that_do_not_fit_the_pipeline_are_refused_before_spark_runs(inputs: dict[str, SourceRows], text: str) -> None:
    with pytest.raises(InvalidTestRowsError, match=text):
        run_pipeline(shop(), inputs)


def test_rows_that_do_not_fit_their_columns(spark: SparkSession) -> None:
    given = {"history": SourceRows(ORDERS, [("x", "noon", 1)]), "live": SourceRows(ORDERS, [])}
    with pytest.raises(InvalidTestRowsError, match=r"The rows of history\[0\], step 0, do not fit 'shop string"):
        run_pipeline(shop(), given, spark=spark)


def test_stages_that_do_not_share_a_query_do_not_share_one_in_a_test(tmp_path: Path, spark: SparkSession) -> None:
    given = shop()
    for chaining in (True, False):
        pipeline = Pipeline("shop", given.stages, chaining=chaining)
        replaced = ReplacedPipeline(pipeline, {}, ["sales"], tmp_path, spark)
        assert replaced.pipeline().chaining is chaining


class Board(ParquetSink):
    """A sink of a user's own, whose readers see the newest row of each shop."""

    supported_output_modes = frozenset({"append", "update", "complete"})  # type: ignore[assignment]
    key: str | None = "shop"


def board(mode: Any, key: str | None = "shop") -> Pipeline:
    live = unbounded_source(name="live", instances=["a", "b"])(unreachable)
    sink = Board("/nowhere")
    sink.key = key

    @stage(sink=sink, output_mode=mode, inputs={"live": StageInput(edge="all_to_all")})
    def totals(live: Any) -> Any:
        return live.groupBy("shop").agg(F.sum("price").alias("sum"), F.count("*").alias("n"))

    return Pipeline("board", [live, totals])


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_rows_that_replace_others_are_seen_as_readers_see_them(mode: str, spark: SparkSession) -> None:
    """Each step has several micro-batches: one for each instance."""
    steps = [[("x", at(0), 1), ("x", at(0), 2), ("y", at(0), 4)], [("x", at(0), 8), ("x", at(0), 16)]]
    output = run_pipeline(board(mode), {"live": SourceRows(ORDERS, *steps)}, spark=spark)
    assert rows(output, "totals", 0) == [("x", 3, 2), ("y", 4, 1)]
    assert rows(output, "totals", 1) == [("x", 27, 4)] + [("y", 4, 1)] * (mode == "complete")
    assert set(rows(output, "totals", -1)) <= {("x", 27, 4), ("y", 4, 1)}
    assert rows(output, "totals") == [("x", 27, 4), ("y", 4, 1)]


def test_rows_that_replace_others_are_compared_as_readers_see_them(spark: SparkSession) -> None:
    given = [("xyz"[number % 3], at(number), number) for number in range(12)]
    found = check_pipeline(board("update"), {"live": SourceRows(ORDERS, given)}, histories=4, spark=spark)
    assert (found.reference, found.rows) == ("batch", {"totals": 3})


def test_a_sink_that_does_not_say_which_rows_replace_which_is_refused(spark: SparkSession) -> None:
    given = {"live": SourceRows(ORDERS, [("x", at(0), 1)])}
    with pytest.raises(InvalidTestRowsError, match=r"'totals' has output_mode=\"update\": .*`key`.*none in Board.*SqlSink"):
        run_pipeline(board("update", None), given, spark=spark)
    with pytest.raises(InvalidTestRowsError, match=r"'totals': .*key \['shopp'\].*Did you mean 'shop'"):
        run_pipeline(board("update", "shopp"), given, spark=spark)


def test_a_stage_that_raises_is_reported_as_in_production(spark: SparkSession) -> None:
    source = unbounded_source(name="source")(unreachable)

    @stage(sink=ParquetSink("/nowhere"))
    def broken(source: Any) -> Any:
        raise ValueError("not today")

    with pytest.raises(Exception, match="not today"):
        run_pipeline(Pipeline("p", [source, broken]), {"source": SourceRows("id long", [(1,)])}, spark=spark)
