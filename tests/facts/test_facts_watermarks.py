"""Watermarks that the plugin decides: a planned batch under MAX_WATERMARK, and a source whose rows are dropped again."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.spark.query.query_log import QueryLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NEVER = dt.datetime(1, 1, 2)
LATENESS = 10  # seconds
_STATE = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"RocksDB": f"{_STATE}.RocksDBStateStoreProvider", "HDFS-backed": f"{_STATE}.HDFSBackedStateStoreProvider"}


class SumUntilTimer(StatefulProcessor):
    """The sum of each key, emitted in the year 2100: only a drain gets there."""

    def init(self, handle: Any) -> None:
        self.handle, self.sum = handle, handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        before = self.sum.get()[0] if self.sum.exists() else 0
        self.sum.update((before + sum(row.v for row in rows),))
        self.handle.registerTimer(4102444800000)
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(k=key[0], n=self.sum.get()[0])

    def close(self) -> None:
        pass


def rows_of(batches: list[tuple[int, list[Any]]]) -> list[Any]:
    """The rows of all batches, sorted."""
    return sorted(row for _, rows in batches for row in rows)


def events(scene: Any, name: str = "in") -> DataFrame:
    return scene.stream(name).withWatermark("ts", "5 seconds")


def start_of(frame: DataFrame) -> DataFrame:
    return frame.select(F.unix_seconds("window.start") - 1767225600, *[c for c in frame.columns if c != "window"])


def windows(scene: Any) -> DataFrame:
    return start_of(events(scene).groupBy(F.window("ts", "30 seconds"), "k").agg(F.sum("v").alias("n")))


def chained_windows(scene: Any) -> DataFrame:
    first = events(scene).groupBy("k", F.window("ts", "30 seconds")).agg(F.sum("v").alias("n"))
    return start_of(first.groupBy(F.window(F.window_time("window"), "1 minute")).agg(F.sum("n").alias("n")))


def sessions(scene: Any) -> DataFrame:
    found = events(scene).groupBy(F.session_window("ts", "30 seconds").alias("window"), "k").agg(F.sum("v").alias("n"))
    return start_of(found)


def outer_join(scene: Any) -> DataFrame:
    others = events(scene, "others").select(F.col("k").alias("other"), F.col("ts").alias("at"))
    near = F.expr("k = other AND at >= ts AND at <= ts + INTERVAL 10 SECONDS")
    return events(scene).join(others, near, "leftOuter").select("k", "v", F.coalesce("other", F.lit("none")))


def timers(scene: Any) -> DataFrame:
    return events(scene).groupBy("k").transformWithState(SumUntilTimer(), "k string, n long", "append", "eventtime")


# The plan, the rows that its query emits by itself, and those that only come under MAX_WATERMARK.
PLANS = {
    "windows": (windows, [(0, "a", 1), (0, "b", 1)], [(90, "a", 5), (90, "c", 7)]),
    "chained windows": (chained_windows, [(0, 2)], [(60, 12)]),
    "sessions": (sessions, [(1, "a", 1), (2, "b", 1)], [(100, "a", 5), (110, "c", 7)]),
    "outer join": (outer_join, [("a", 1, "a"), ("b", 1, "none")], [("a", 5, "none"), ("c", 7, "none")]),
    "timers": (timers, [], [("a", 6), ("b", 1), ("c", 7)]),
}
OF_ROCKSDB_ALONE = {"timers"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_planned_batch_under_max_watermark_emits_everything_and_reads_nothing(scene: Any, provider: str) -> None:
    scene.put("in", ("a", 1, 1), ("b", 2, 1))
    scene.put("in", ("a", 100, 5), ("c", 110, 7))
    scene.put("others", ("a", 5, 0), ("z", 110, 0))
    plans = {name: plan for name, plan in PLANS.items() if provider == "RocksDB" or name not in OF_ROCKSDB_ALONE}
    with scene.setting("spark.sql.streaming.stateStore.providerClass", PROVIDERS[provider]):
        for name, (plan, due, _) in plans.items():
            assert rows_of(scene.run(plan(scene), scene.folder / name)) == due, name
        scene.put("in", ("late", 1, 1))  # a batch under MAX_WATERMARK that read it would drop it as late
        scene.put("others", ("late", 1, 1))
        for name, (plan, _, held) in plans.items():
            log = QueryLog(scene.folder / name)
            last = log.last_committed()
            log.plan_batch(last + 1, MAX_WATERMARK_MS)
            assert scene.run(plan(scene), log.path, once=True) == [(last + 1, held)], name
            assert log.planned(last + 1).sources == log.planned(last).sources, f"{name}: nothing was read"
            assert not log.has_planned(last + 2)


def told(scene: Any, condition: Any) -> DataFrame:
    """The watermark source: its rows are dropped behind the watermark node."""
    return scene.stream("told").withWatermark("ts", f"{LATENESS} seconds").where(condition)


def counts(rows: DataFrame, scene: Any) -> DataFrame:
    """What a user writes behind it: a filter and a join, both of which Spark pushes down as far as it may."""
    names = scene.spark.createDataFrame([("a", "Anna"), ("b", "Bob")], "k string, name string")
    known = rows.where("k IN ('a', 'b', 'c')").join(names, "k")
    return start_of(known.groupBy(F.window("ts", "60 seconds"), "name").agg(F.sum("v").alias("n")))


def test_a_dropped_row_moves_the_watermark_only_if_a_nondeterministic_filter_drops_it(scene: Any) -> None:
    scene.put("told", (None, 120 + LATENESS, None))
    scene.put("rows", ("a", 10, 1), ("b", 20, 2), ("unknown", 250_000_000_000, 1), ("a", 130, 4))
    dropped = F.col("ts") < F.lit(NEVER)
    rows = scene.stream("rows")

    kept = told(scene, dropped & (F.spark_partition_id() >= 0)).unionByName(rows)
    assert rows_of(scene.run(counts(kept, scene), scene.folder / "nondeterministic")) == [(0, "Anna", 1), (0, "Bob", 2)]
    pushed = told(scene, dropped).unionByName(rows)
    assert rows_of(scene.run(counts(pushed, scene), scene.folder / "deterministic")) == [], "the watermark never moves"


def test_a_union_has_the_event_time_of_its_first_child_and_rows_of_the_second_never_move_it(scene: Any) -> None:
    scene.put("told", (None, 60 + LATENESS, None))
    scene.put("rows", ("a", 10, 1), ("b", 250_000_000_000, 2))
    watermark = told(scene, (F.col("ts") < F.lit(NEVER)) & (F.spark_partition_id() >= 0))
    rows = scene.stream("rows")

    assert rows_of(scene.run(counts(watermark.unionByName(rows), scene), scene.folder / "first")) == [(0, "Anna", 1)]
    with pytest.raises(AnalysisException, match="watermark"):
        scene.run(counts(rows.unionByName(watermark), scene), scene.folder / "second")


@pytest.mark.parametrize("reused", [True, False])
def test_an_operator_that_reads_reused_exchanges_only_has_no_watermark(scene: Any, reused: bool) -> None:
    """Spark finds out which watermark an operator will have in the next batch from this batch's plan, in which a reused exchange
    has no input. Rows without a match are never emitted, so the plugin switches reuse off."""
    last, ended = 5, threading.Event()
    emitted: list[int] = []

    def stream(*names: str) -> DataFrame:
        rate = scene.spark.readStream.format("rate-micro-batch").option("startTimestamp", 1767225600000)
        rows = rate.option("rowsPerBatch", 4).option("advanceMillisPerBatch", 60_000).load()
        return rows.selectExpr("value % 2 AS k", "timestamp AS ts").withWatermark("ts", "0 seconds").toDF(*names)

    left, right = stream("k", "ts"), stream("rk", "rts")
    pairs = [
        left.join(right, F.expr(f"k = rk AND rts > ts AND rts <= ts + INTERVAL {seconds} SECONDS"), "left").selectExpr(
            f"{number} AS n"
        )
        for number, seconds in enumerate((10, 20))
    ]

    def keep(batch: DataFrame, number: int) -> None:
        emitted.extend(row.n for row in batch.collect() if number <= last)
        if number >= last:
            ended.set()

    with scene.setting("spark.sql.exchange.reuse", str(reused).lower()):
        writer = pairs[0].union(pairs[1]).writeStream.option("checkpointLocation", str(scene.folder / "query"))
        query = writer.foreachBatch(keep).start()
    assert ended.wait(60)
    query.stop()
    assert {0} == set(emitted) if reused else emitted.count(0) == emitted.count(1) > 0
