"""Pipelines with a mistake each, for `check_pipeline`, and the same kinds of stages without one."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.testing import HistoryMismatchError, PipelineCheckError, SourceRows, check_pipeline

PAGE = Path(__file__).parents[2] / "docs/testing.md"
NOWHERE = "/nowhere/that/exists"
ROWS = "shop string, at timestamp, price long"


def at(minute: float) -> dt.datetime:
    return dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC) + dt.timedelta(minutes=minute)


def some_rows() -> SourceRows:
    """Forty rows in six hours: two shops, and several rows of a shop within the lateness of ten minutes."""
    return SourceRows(ROWS, [("xy"[number % 2], at(number * 9 + number % 4), number * number % 17) for number in range(40)])


def unreachable(context: Any) -> Any:
    raise AssertionError("the source of production is not called")


def orders() -> Stage:
    return unbounded_source(name="orders", watermark=("at", "30 minutes"))(unreachable)


def pipeline(*stages: Any) -> Pipeline:
    return Pipeline("shop", [orders(), *stages])


@stage(sink=ParquetSink(NOWHERE))
def hourly(orders: Any) -> Any:
    return orders.groupBy(F.window("at", "1 hour"), "shop").agg(F.sum("price").alias("sum"), F.avg("price").alias("mean"))


# The mistakes


@stage(sink=ParquetSink(NOWHERE))
def numbered(orders: Any) -> Any:
    def number(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        count = 0
        for batch in batches:
            batch["number"] = range(count, count + len(batch))
            count += len(batch)
            yield batch

    return orders.mapInPandas(number, f"{ROWS}, number long")


class Batches(Stage):
    """Emits one row for each micro-batch."""

    sink = ParquetSink(NOWHERE)

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        return batch.agg(F.max("price").alias("price"))

    def transform(self, context: Any, orders: Any) -> Any:
        return orders.select("price")


@stage(sink=ParquetSink(NOWHERE))
def newest(orders: Any) -> Any:
    return orders.groupBy(F.window("at", "1 hour"), "shop").agg(F.last("price").alias("newest"))


@stage(sink=ParquetSink(NOWHERE))
def recent(orders: Any) -> Any:
    return orders.where(F.col("at") > F.current_timestamp() - F.expr("INTERVAL 7 DAYS") - F.expr("INTERVAL 90 YEARS"))


@stage(sink=ParquetSink(NOWHERE))
def since_start(orders: Any) -> Any:
    return orders.withColumn("age", F.lit(dt.datetime.now(dt.UTC)) - F.col("at"))


@stage(sink=ParquetSink(NOWHERE))
def salted(orders: Any) -> Any:
    salt = F.floor(F.rand() * 4)
    return orders.groupBy(F.window("at", "1 hour"), "shop", salt.alias("salt")).agg(F.sum("price").alias("sum"))


@stage(sink=ParquetSink(NOWHERE))
def salted_in_python(orders: Any) -> Any:
    @F.udf("int")
    def salt(price: int) -> int:
        import random

        return random.randrange(1_000_000)

    return orders.withColumn("salt", salt("price"))


class Seen(Stage):
    """Keeps the prices that it has seen in an attribute, which a restore does not bring back."""

    sink = ParquetSink(NOWHERE)

    def open(self, context: Any) -> None:
        self.context = context
        self.prices: set[int] = set()

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        known = self.known()
        prices = sorted({row.price for row in batch.select("price").collect()} - known)
        self.keep(prices)
        return batch.sparkSession.createDataFrame([(price,) for price in prices], "price long")

    def known(self) -> set[int]:
        return self.prices

    def keep(self, prices: list[int]) -> None:
        self.prices.update(prices)

    def transform(self, context: Any, orders: Any) -> Any:
        return orders.select("price")


class SeenInState(Seen):
    """The same in a state that each checkpoint has."""

    name = "seen"

    def known(self) -> set[int]:
        return set(self.context.state.list("prices"))

    def keep(self, prices: list[int]) -> None:
        for price in prices:
            self.context.state.list("prices").add(price)


@stage(sink=ParquetSink(NOWHERE))
def first_ten(orders: Any) -> Any:
    return orders.limit(10)


@stage(sink=ParquetSink(NOWHERE))
def first_of_hour(orders: Any) -> Any:
    return orders.groupBy(F.window("at", "1 hour")).agg(F.first("shop").alias("shop"))


class NewestOnly(Stage):
    """Drops what is older than the newest row of the micro-batches before."""

    sink = ParquetSink(NOWHERE)

    def open(self, context: Any) -> None:
        self.newest = context.state.broadcast("newest")

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        before = self.newest.get("us", 0)
        moment = F.unix_micros("at")
        (row,) = batch.agg(F.max(moment).alias("us")).collect()
        self.newest.put("us", max(before, row.us or 0))
        return batch.where(moment >= before)

    def transform(self, context: Any, orders: Any) -> Any:
        return orders


@stage(sink=ParquetSink(NOWHERE))
def by_local_day(orders: Any) -> Any:
    return orders.select(F.to_date("at").alias("day"), "price")


@stage(sink=ParquetSink(NOWHERE))
def by_local_hour_in_python(orders: Any) -> Any:
    @F.udf("int")
    def hour(seconds: float) -> int:
        return dt.datetime.fromtimestamp(seconds).hour

    return orders.select(hour(F.col("at").cast("double")).alias("hour"), "price")


@stage(sink=ParquetSink(NOWHERE), inputs={"payments": StageInput()})
def paid(orders: Any, payments: Any) -> Any:
    return orders.join(payments.select("order", "amount"), orders.price == payments.order)


def with_payments() -> Pipeline:
    payments = unbounded_source(name="payments", watermark=("at", "10 minutes"))(unreachable)
    return Pipeline("shop", [orders(), payments, paid])


def payments_too() -> dict[str, SourceRows]:
    rows = [(number, at(number), number) for number in range(10)]
    return {"orders": some_rows(), "payments": SourceRows("order long, at timestamp, amount long", rows)}


def with_rates(path: Path, *, at_start: bool = False) -> Pipeline:
    @stage(sink=ParquetSink(NOWHERE))
    def in_euro(orders: Any) -> Any:
        spark = orders.sparkSession
        rates = spark.read.schema("of string, rate double").parquet(str(path))
        if at_start:
            (rate,) = (row.rate for row in rates.where("of = 'x'").collect())
            return orders.withColumn("euro", F.col("price") * rate)
        return orders.join(F.broadcast(rates), orders.shop == rates["of"]).drop("of")

    return pipeline(in_euro)


def write_rates(spark: SparkSession, path: Path) -> None:
    spark.createDataFrame([("x", 0.5), ("y", 2.0)], "of string, rate double").coalesce(1).write.parquet(str(path))


# The same kinds of stages without a mistake


def shop_of_two_feeds() -> Pipeline:
    history = bounded_source(name="history", watermark=("at", "5 minutes"))(unreachable)
    live = unbounded_source(name="live", watermark=("at", "30 minutes"), instances=["a", "b"])(unreachable)

    @stage(inputs={"live": StageInput(edge="all_to_all")})
    def orders(history: Any, live: Any) -> Any:
        return history.unionByName(live)

    return Pipeline("shop", [history, live, orders, hourly])


def rows_of_two_feeds() -> dict[str, SourceRows]:
    old = [("x", at(number * 7 - 120), number) for number in range(15)]
    return {"history": SourceRows(ROWS, old), "live": some_rows()}


def once_each() -> Pipeline:
    @stage(sink=ParquetSink(NOWHERE), inputs={"orders": StageInput(key="price")}, instances=["a", "b"])
    def once(orders: Any) -> Any:
        return orders.select("price", "at").dropDuplicatesWithinWatermark(["price", "at"])

    return pipeline(once)


def joined_in_time() -> Pipeline:
    payments = unbounded_source(name="payments", watermark=("at", "10 minutes"))(unreachable)

    @stage(sink=ParquetSink(NOWHERE))
    def paid(orders: Any, payments: Any) -> Any:
        paid = payments.select("order", "amount", F.col("at").alias("paid_at"))
        bound = "order = price AND paid_at BETWEEN at - INTERVAL 1 HOUR AND at + INTERVAL 1 HOUR"
        return orders.join(paid, F.expr(bound), "leftOuter")

    return Pipeline("shop", [orders(), payments, paid])


def bounded_only() -> Pipeline:
    history = bounded_source(name="orders", watermark=("at", "5 minutes"))(unreachable)

    @stage(sink=ParquetSink(NOWHERE))
    def visits(orders: Any) -> Any:
        return orders.groupBy(F.session_window("at", "15 minutes"), "shop").agg(
            F.sort_array(F.collect_list("price")).alias("all")
        )

    return Pipeline("shop", [history, visits])


@dataclass(frozen=True)
class Sound:
    """A pipeline without a mistake, its rows, and what its histories are compared with."""

    make: Callable[[], Pipeline]
    rows: Callable[[], dict[str, SourceRows]] = lambda: {"orders": some_rows()}
    reference: str = "batch"


SOUND = {
    "windows of two feeds": Sound(shop_of_two_feeds, rows_of_two_feeds),
    "one row of each key": Sound(once_each, reference="one micro-batch"),
    "a join with a bound": Sound(joined_in_time, payments_too),
    "state in checkpoints": Sound(lambda: pipeline(SeenInState())),
    "sessions of a bounded source": Sound(bounded_only),
}


@dataclass(frozen=True)
class Mistake:
    """A mistake: the pipeline, and what the check has to say.

    Attributes:
        make: Makes the pipeline; gets a directory.
        needs: Some of these is what the history needs; () if a look at the plans is enough.
        text: Part of the text.
        rows: The rows of the sources.
        quick: Whether `make test` tries it.
    """

    make: Callable[[Path], Pipeline]
    needs: tuple[str, ...]
    text: str
    rows: Callable[[], dict[str, SourceRows]] = lambda: {"orders": some_rows()}
    quick: bool = True


MISTAKES = {
    "rows are numbered in each partition": Mistake(
        lambda _: pipeline(numbered), ("batches", "order"), "another order", quick=False
    ),
    "a row for each micro-batch": Mistake(lambda _: pipeline(Batches()), ("batches",), "several micro-batches", quick=False),
    "what came last": Mistake(lambda _: pipeline(newest), ("order",), "another order", quick=False),
    "the clock": Mistake(lambda _: pipeline(recent), (), "asks the clock"),
    "the clock at the start": Mistake(lambda _: pipeline(since_start), (), "another plan each time"),
    "a random key": Mistake(lambda _: pipeline(salted), (), "uses chance"),
    "a random value in Python": Mistake(lambda _: pipeline(salted_in_python), (), "something is random"),
    "state outside of Spark": Mistake(
        lambda _: pipeline(Seen()), ("restore", "crash"), "a restore from a savepoint", quick=False
    ),
    "limit": Mistake(lambda _: pipeline(first_ten), ("order",), "another order"),
    "the first row": Mistake(lambda _: pipeline(first_of_hour), ("order",), "another order"),
    "late rows are lost": Mistake(lambda _: pipeline(NewestOnly()), ("order", "batches"), "another order", quick=False),
    "a table is read once": Mistake(with_rates, (), "reads a table beside its inputs"),
    "a table is read at the start": Mistake(lambda path: with_rates(path, at_start=True), (), "evaluates a DataFrame"),
    "a join without a bound": Mistake(lambda _: with_payments(), (), "keeps every row", payments_too),
    "a day in local time": Mistake(lambda _: pipeline(by_local_day), ("time_zone",), "another time zone"),
    "an hour in local time, in Python": Mistake(
        lambda _: pipeline(by_local_hour_in_python), ("time_zone",), "another time zone", quick=False
    ),
}
"""By what is wrong."""


def found_mistake(name: str, spark: SparkSession, folder: Path) -> PipelineCheckError:
    """What a check says of a mistake: the text, and a history of few rows that needs what it should."""
    mistake = MISTAKES[name]
    write_rates(spark, folder / "rates")
    with pytest.raises(PipelineCheckError, match=mistake.text) as raised:
        check_pipeline(mistake.make(folder / "rates"), mistake.rows(), spark=spark)
    error = raised.value
    assert isinstance(error, HistoryMismatchError) or not mistake.needs
    if isinstance(error, HistoryMismatchError):
        assert set(error.needs) & set(mistake.needs) or not mistake.needs
        assert sum(map(len, error.rows.values())) < 20
        assert error.failure.missing or error.failure.unexpected
    return error


def examples(page: Path) -> dict[str, Any]:
    """What the examples of a page define, in one namespace."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), found)
    return found
