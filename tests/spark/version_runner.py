"""A pipeline with every stateful operator of Spark, run up to a stop by a process of its own: its Python decides the version.

    python version_runner.py <folder> suspend|drain <rows as JSON>

The folder holds the input, the sinks and the store; the run continues from what it finds there. It stops when its
stages have emitted these numbers of rows. It prints how it has ended.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLICKS = "k string, ts timestamp, v long"
BUYS = "who string, bought timestamp, price long"
NAMES = "k string, name string"
NAME = "versions"


def windows_of(frame: DataFrame, length: str) -> DataFrame:
    found = frame.groupBy(F.window("ts", length), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return found.select(F.window_time("window").alias("ts"), "k", "v", "n")


def values_in_windows(frame: DataFrame) -> DataFrame:
    """With functions whose text in a plan is not the same in each version of Spark."""
    values = F.sort_array(F.collect_list(F.col("v").cast("string")))
    few = F.sort_array(F.collect_set(F.expr("nullif(v, 20)").cast("string")))
    found = frame.groupBy(F.window("ts", "5 minutes"), F.expr("nullif(k, 'c')").alias("k")).agg(
        values.alias("v"), few.alias("few")
    )
    return found.select("window.start", "k", F.concat_ws(" ", "v").alias("v"), F.concat_ws(" ", "few").alias("few"))


def twice_in_windows(frame: DataFrame) -> DataFrame:
    return windows_of(windows_of(frame, "1 minute").select("ts", "k", "v"), "5 minutes")


def sessions_of(frame: DataFrame) -> DataFrame:
    found = frame.groupBy(F.session_window("ts", "90 seconds").alias("session"), "k").agg(F.count("*").alias("n"))
    return found.select(F.col("session.start").alias("start"), "k", "n")


def bought_soon(clicks: DataFrame, buys: DataFrame) -> DataFrame:
    return clicks.join(buys, F.expr("who = k AND bought >= ts AND bought <= ts + INTERVAL 2 MINUTES"), "left_outer")


def with_names(frame: DataFrame, names: DataFrame) -> DataFrame:
    return frame.join(F.broadcast(names), "k", "left").select("name", "ts", "v")


def lists_by_timers(frame: DataFrame) -> DataFrame:
    """Value, list and map state of each key, emitted by an event-time timer that only a drain reaches."""
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Lists(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.sum = handle.getValueState("sum", "v long")
            self.values = handle.getListState("values", "v long")
            self.counts = handle.getMapState("counts", "v long", "n long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for row in rows:
                self.sum.update(((self.sum.get()[0] if self.sum.exists() else 0) + row.v,))
                self.values.appendValue((row.v,))
                seen = self.counts.getValue((row.v,))[0] if self.counts.containsKey((row.v,)) else 0
                self.counts.updateValue((row.v,), (seen + 1,))
            self.handle.registerTimer(4102444800000)  # the year 2100
            return iter([])

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            values = sorted(value[0] for value in self.values.get())
            counts = sorted((v[0], n[0]) for v, n in self.counts.iterator())
            yield Row(k=key[0], total=self.sum.get()[0], found=str(values), counts=str(counts))

        def close(self) -> None:
            pass

    columns = "k string, total long, found string, counts string"
    return frame.groupBy("k").transformWithState(Lists(), columns, "append", "eventtime")


def lists_of(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The result of `lists_by_timers` over these clicks."""
    found = []
    for key in sorted({row[0] for row in rows}):
        values = sorted(row[2] for row in rows if row[0] == key)
        counts = sorted((v, values.count(v)) for v in set(values))
        found.append((key, sum(values), str(values), str(counts)))
    return found


def sums_by_timeouts(frame: DataFrame) -> DataFrame:
    """The sum of each key by the older applyInPandasWithState, emitted by a timeout that only a drain reaches."""
    import pandas as pd

    def update(key: Any, batches: Any, state: Any) -> Any:
        if state.hasTimedOut:
            (total,) = state.get
            state.remove()
            yield pd.DataFrame({"k": [key[0]], "total": [total]})
            return
        total = state.get[0] if state.exists else 0
        state.update((total + sum(int(batch["v"].sum()) for batch in batches),))
        state.setTimeoutTimestamp(4102444800000)

    grouped = frame.groupBy("k")
    return grouped.applyInPandasWithState(update, "k string, total long", "total long", "append", "EventTimeTimeout")


def pipeline(lab: Any) -> Pipeline:
    """A source with windows in its own query; another behind whose channels are all other operators; a static input."""

    @unbounded_source(watermark=("ts", "1 minute"))
    def direct(context):
        return lab.stream("clicks", CLICKS, files_per_trigger=3)

    @stage(sink=lab.sink("in_one_query"))
    def in_one_query(direct):
        return values_in_windows(direct)

    @unbounded_source(watermark=("ts", "1 minute"))
    def clicks(context):
        return lab.stream("clicks", CLICKS, files_per_trigger=3)

    @unbounded_source(watermark=("bought", "1 minute"))
    def buys(context):
        return lab.stream("buys", BUYS)

    @bounded_source
    def names(context):
        return lab.table("names", NAMES)

    @stage(sink=lab.sink("kept"))
    def kept(clicks):
        return clicks.where("v >= 0")

    @stage(inputs={"names": StageInput(mode="static")}, sink=lab.sink("named"))
    def named(kept, names):
        return with_names(kept, names)

    @stage(sink=lab.sink("twice"))
    def twice(kept):
        return twice_in_windows(kept)

    @stage(sink=lab.sink("sessions"))
    def sessions(kept):
        return sessions_of(kept)

    @stage(sink=lab.sink("distinct"))
    def distinct(kept):
        return kept.dropDuplicatesWithinWatermark(["k", "ts"])

    @stage(sink=lab.sink("outer"))
    def outer(kept, buys):
        return bought_soon(kept, buys)

    @stage(sink=lab.sink("lists"))
    def lists(kept):
        return lists_by_timers(kept)

    @stage(sink=lab.sink("sums"))
    def sums(kept):
        return sums_by_timeouts(kept)

    stages = [direct, in_one_query, clicks, buys, names, kept, named, twice, sessions, distinct, outer, lists, sums]
    return Pipeline(NAME, stages)


def put(lab: Any, begin: int) -> int:
    """Add input of four minutes in several files. Returns the number of clicks."""
    rows = [(k, lab.at(begin + s), s % 60) for s in range(0, 120, 20) for k in "ab"]
    for part in (rows[:5], rows[5:], rows[-3:]):  # some clicks come twice
        lab.put("clicks", CLICKS, part)
        time.sleep(0.01)  # Spark reads files by their modification time
    lab.put("buys", BUYS, [("a", lab.at(begin + 50), begin), ("c", lab.at(begin), begin), ("b", lab.at(begin + 200), begin)])
    return len(rows) + 3


def put_last(lab: Any, second: int) -> int:
    """Add one click, in a file of its own. Returns the number of clicks."""
    lab.put("clicks", CLICKS, [("a", lab.at(second), 1)])
    return 1


def check(lab: Any) -> None:
    """Check that the sinks hold the result of a batch computation over all input."""
    clicks = lab.table("clicks", CLICKS)
    lab.check(values_in_windows(clicks), "in_one_query")
    lab.check(clicks, "kept")
    lab.check(with_names(clicks, lab.table("names", NAMES)), "named")
    lab.check(twice_in_windows(clicks), "twice")
    lab.check(sessions_of(clicks), "sessions")
    lab.check(clicks.dropDuplicates(["k", "ts"]), "distinct")
    lab.check(bought_soon(clicks, lab.table("buys", BUYS)), "outer")
    lab.check(lists_of(lab.rows(clicks)), "lists")
    lab.check(clicks.groupBy("k").agg(F.sum("v").alias("total")), "sums")


def laboratory() -> ModuleType:
    """The environment of the tests in this folder."""
    path = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("laboratory_of_versions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    from dagster_checkpoints.spark.session.spark_session import build_session

    folder, stop, wanted = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    spark = build_session({"spark.master": "local[2]", "spark.driver.memory": "1g", "spark.sql.shuffle.partitions": 2})
    lab = laboratory().Lab(spark, folder)
    job = lab.start(pipeline(lab), interval=2.0, lease_seconds=120.0, restart=FixedDelayRestart(5, 1.0))
    try:
        job.wait_until(lambda: all(job.execution.rows().get(name, 0) >= rows for name, rows in wanted.items()))
        job.done("stop", drain=stop == "drain")
        job.finished()
        print(f"Stopped under Spark {spark.version}")
    except AssertionError as error:
        print(error)
    lab.close()
    spark.stop()


if __name__ == "__main__":
    main()
