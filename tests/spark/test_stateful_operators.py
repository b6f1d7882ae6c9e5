"""Every stateful operator of Spark behind channels: its rows are those of a batch, and its state is empty at the end."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage

CLICKS = "k string, ts timestamp, v long"
BUYS = "who string, bought timestamp, price long"


def five_minutes(frame: Any, time: str) -> Any:
    found = frame.groupBy(F.window(time, "5 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return found.select(F.window_time("window").alias("ts"), "k", "v", "n")


def sessions_of(frame: Any) -> Any:
    found = frame.groupBy(F.session_window("ts", "90 seconds").alias("session"), "k").agg(F.count("*").alias("n"))
    return found.select(F.col("session.start").alias("start"), "k", "n")


def bought_within(clicks: Any, buys: Any, how: str) -> Any:
    soon = F.expr("who = k AND bought >= ts AND bought <= ts + INTERVAL 2 MINUTES")
    return clicks.join(buys, soon, how)


def counts_by_timer(frame: Any) -> Any:
    """Rows per key until a minute without a row: a session in user code, which an event-time timer emits."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Sessions(StatefulProcessor):
        def init(self, handle):
            self.handle = handle
            self.count = handle.getValueState("count", "n long")

        def handleInputRows(self, key, rows, timerValues):
            count = self.count.get()[0] if self.count.exists() else 0
            latest = 0
            for batch in rows:
                count += len(batch)
                latest = max(latest, int(batch["ts"].max().timestamp() * 1000))
            self.count.update((count,))
            for timer in list(self.handle.listTimers()):
                latest = max(latest, timer - 90_000)
                self.handle.deleteTimer(timer)
            self.handle.registerTimer(latest + 90_000)
            yield pd.DataFrame({"k": pd.Series([], dtype=str), "n": pd.Series([], dtype="int64")})

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            count = self.count.get()[0]
            self.count.clear()
            yield pd.DataFrame({"k": [key[0]], "n": [count]})

        def close(self):
            pass

    return frame.groupBy("k").transformWithStateInPandas(Sessions(), "k string, n long", "Append", "EventTime")


def counts_by_timeout(frame: Any) -> Any:
    """The same session with the older applyInPandasWithState."""
    import pandas as pd

    def update(key, batches, state):
        if state.hasTimedOut:
            count, _ = state.get
            state.remove()
            yield pd.DataFrame({"k": [key[0]], "n": [count]})
            return
        count, latest = state.get if state.exists else (0, 0)
        for batch in batches:
            count += len(batch)
            latest = max(latest, int(batch["ts"].max().timestamp() * 1000))
        state.update((count, latest))
        state.setTimeoutTimestamp(latest + 90_000)

    grouped = frame.groupBy("k")
    return grouped.applyInPandasWithState(update, "k string, n long", "n long, latest long", "append", "EventTimeTimeout")


def test_every_operator_behind_channels_emits_what_a_batch_computes(lab: Any) -> None:
    """Also: a stage with a sink and seven consumers, a stage with two aggregations, joins and limits into windows."""
    for number in range(4):
        begin = number * 240
        rows = [(k, lab.at(begin + s), s) for s in range(0, 120, 20) for k in ("a", "b")]
        lab.put("clicks", CLICKS, [*rows, *rows[:4]])  # some rows come twice
        lab.put("buys", BUYS, [("a", lab.at(begin + 50), number), ("c", lab.at(begin), number)])

    @bounded_source(watermark=("ts", "1 minute"))
    def clicks(context):
        return lab.stream("clicks", CLICKS)

    @bounded_source(watermark=("bought", "1 minute"))
    def buys(context):
        return lab.stream("buys", BUYS)

    @stage(sink=lab.sink("kept"))
    def kept(clicks):
        return clicks.where("v < 1000")

    @stage(sink=lab.sink("distinct"))
    def distinct(kept):
        return kept.dropDuplicatesWithinWatermark(["k", "ts"])

    @stage(sink=lab.sink("sessions"))
    def sessions(kept):
        return sessions_of(kept)

    @stage(sink=lab.sink("outer"))
    def outer(kept, buys):
        return bought_within(kept, buys, "left_outer")

    @stage
    def joined(kept, buys):
        return bought_within(kept, buys, "inner")

    @stage(sink=lab.sink("joined_windows"))
    def joined_windows(joined):
        return five_minutes(joined, "ts")

    @stage(sink=lab.sink("timers"))
    def timers(kept):
        return counts_by_timer(kept)

    @stage(sink=lab.sink("timeouts"))
    def timeouts(kept):
        return counts_by_timeout(kept)

    @stage(sink=lab.sink("twice"))
    def twice(kept):
        minutes = kept.groupBy(F.window("ts", "1 minute"), "k").agg(F.sum("v").alias("v"))
        return five_minutes(minutes.select(F.window_time("window").alias("ts"), "k", "v"), "ts")

    @stage(sink=lab.sink("limited"))
    def limited(kept):
        return kept.limit(1000)

    @stage(sink=lab.sink("limited_windows"))
    def limited_windows(limited):
        return five_minutes(limited, "ts")

    of_kept = [distinct, sessions, outer, joined, joined_windows, timers, timeouts, twice, limited, limited_windows]
    stages = [clicks, buys, kept, *of_kept]
    job = lab.start(Pipeline("zoo", stages, chaining=False), interval=2.0)
    job.finished()

    clicks_table, buys_table = lab.table("clicks", CLICKS), lab.table("buys", BUYS)
    lab.check(clicks_table, "kept")
    lab.check(clicks_table.dropDuplicates(["k", "ts"]), "distinct")
    lab.check(sessions_of(clicks_table), "sessions")
    lab.check(bought_within(clicks_table, buys_table, "left_outer"), "outer")
    assert any(row[3] is None for row in lab.committed("outer")), "the test has no outer rows"
    lab.check(five_minutes(bought_within(clicks_table, buys_table, "inner"), "ts"), "joined_windows")
    minutes = clicks_table.groupBy(F.window("ts", "1 minute"), "k").agg(F.sum("v").alias("v"))
    lab.check(five_minutes(minutes.select(F.window_time("window").alias("ts"), "k", "v"), "ts"), "twice")
    lab.check(clicks_table, "limited")
    lab.check(five_minutes(clicks_table, "ts"), "limited_windows")
    by_key = sessions_of(clicks_table).groupBy("k").agg(F.sum("n").alias("n"))
    for sink in ("timers", "timeouts"):
        totals: dict[str, int] = {}
        for key, count in lab.committed(sink):
            totals[key] = totals.get(key, 0) + count
        assert sorted(totals.items()) == lab.rows(by_key), sink


def test_stages_that_spark_refuses_in_one_query_are_cut_into_two(lab: Any) -> None:
    for number in range(3):
        lab.put("in", CLICKS, [("a", lab.at(number * 60 + s), s) for s in range(0, 60, 20)])

    @bounded_source(watermark=("ts", "1 minute"))
    def clicks(context):
        return lab.stream("in", CLICKS)

    @stage
    def minutes(clicks):
        found = clicks.groupBy(F.window("ts", "1 minute"), "k").agg(F.sum("v").alias("v"))
        return found.select(F.window_time("window").alias("ts"), "k", "v")

    @stage
    def doubled(minutes):
        return minutes.withColumn("v", F.col("v") * 2)

    @stage(sink=lab.sink())
    def grouped(doubled):
        return counts_by_timeout(doubled)

    @bounded_source(watermark=("ts", "1 minute"))
    def others(context):
        return lab.stream("in", CLICKS)

    @stage
    def pairs(others):
        right = others.select(F.col("k").alias("rk"), F.col("ts").alias("rts"))
        return others.join(right, F.expr("k = rk AND rts BETWEEN ts AND ts + INTERVAL 20 SECONDS"))  # two event times

    @stage(sink=lab.sink("different"))
    def different(pairs):
        return pairs.dropDuplicates()

    job = lab.start(Pipeline("p", [clicks, minutes, doubled, grouped, others, pairs, different]))
    job.finished()
    assert job.chains == (("clicks", "minutes", "doubled"), ("grouped",), ("others", "pairs"), ("different",))
    assert sum(count for _, count in lab.committed()) == 3
    assert lab.count("different") == 9 + 8
