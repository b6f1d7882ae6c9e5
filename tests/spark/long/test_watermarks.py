"""Event time across stages: no row is late, windows are emitted when they are due, and all of them at the end."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, InstanceFinished, StageFinished

FLIGHTS = "k string, ts timestamp, v long"
LIVE = ("a", "b", "c")


def test_a_live_feed_far_ahead_of_a_backfill_loses_nothing_and_its_windows_come_out_without_a_drain(lab: Any) -> None:
    """Three live instances, rows distributed by key to three instances; one live instance ends before the others."""
    for file in range(4):
        rows = [(key, lab.at(file * 600 + second), second) for second in range(0, 600, 60) for key in LIVE]
        lab.put("history", FLIGHTS, rows)
    day = 86_400
    for name in LIVE:
        lab.put(f"live/{name}", FLIGHTS, [(name, lab.at(day + second), 1) for second in range(0, 1800, 60)])

    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", FLIGHTS)

    @unbounded_source(watermark=("ts", "1 minute"), instances=LIVE)
    def live(context):
        return lab.stream(f"live/{context.instance}", FLIGHTS)

    @stage(inputs={"live": StageInput(edge="all_to_all"), "history": StageInput(edge="all_to_all")})
    def both(history, live):
        return history.unionByName(live)

    @stage(inputs={"both": StageInput(key="k")}, instances=["x", "y", "z"], sink=lab.sink())
    def windows(context, both):
        found = both.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
        return found.select(F.col("window.start").alias("start"), "k", "v", "n", F.lit(context.instance).alias("by"))

    def expected(*names: str) -> Any:
        rows = lab.table("history", FLIGHTS)
        for name in names:
            rows = rows.unionByName(lab.table(f"live/{name}", FLIGHTS))
        found = rows.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
        return found.select(F.col("window.start").alias("start"), "k", "v", "n")

    def without_instance() -> list[Any]:
        return [row[:-1] for row in lab.committed()]

    job = lab.start(Pipeline("p", [history, live, both, windows]))
    first = job.wait_for(CheckpointDone)
    assert set(first.roots) <= {"history", "live"}
    job.wait_for(StageFinished, lambda e: e.stage == "history")
    later = job.wait_for(CheckpointDone, lambda e: "history" in e.finished_stages and e.roots == ("live",))
    assert later.stages["live"].finished_instances == 0
    # All live windows but the last of each key: their end is before 30 minutes minus a minute of lateness.
    due = [row for row in lab.rows(expected(*LIVE)) if row[0] < lab.at(day + 1200)]
    job.wait_until(lambda: len(lab.committed()) >= len(due))
    assert sorted(without_instance(), key=repr) == sorted(due, key=repr)

    job.execution.end_source("live", "b")
    job.wait_for(InstanceFinished, lambda e: (e.stage, e.instance) == ("live", "b"))
    assert not [e for e in job.of(InstanceFinished) if e.stage == "live" and e.instance != "b"]
    partly = job.wait_for(CheckpointDone, lambda e: e.stages["live"].finished_instances == 1)
    assert partly.roots == ("live",)
    lab.put("live/a", FLIGHTS, [("a", lab.at(2 * day), 5)])
    job.wait_until(lambda: job.execution.rows()["live"] >= 91)
    job.drain()
    result = job.finished()

    assert sorted(without_instance(), key=repr) == lab.rows(expected(*LIVE))
    instances = {(key, by) for _, key, _, _, by in lab.committed()}
    assert len({key for key, _ in instances}) == len(instances), "a key went to two instances"
    assert result.rows["history"] == 120
    assert result.finished_stages[-1] == "windows"


def test_watermarks_pass_six_unchained_stages_which_end_with_one_checkpoint(lab: Any) -> None:
    for number in range(8):
        lab.put("in", FLIGHTS, [("ab"[s % 2], lab.at(number * 300 + s * 30), s) for s in range(10)])

    @unbounded_source(watermark=("ts", "30 seconds"))
    def events(context):
        return lab.stream("in", FLIGHTS, files_per_trigger=3)

    def windows(frame: Any, length: str, time: str) -> Any:
        sums = frame.groupBy(F.window(time, length), "k").agg(F.sum("v").alias("v"))
        return sums.select(F.window_time("window").alias("ts"), "k", "v")

    @stage
    def minutes(events):
        return windows(events, "1 minute", "ts")

    @stage
    def kept(minutes):
        return minutes.where("v >= 0")

    @stage(event_time="at")
    def fives(kept):
        return windows(kept, "5 minutes", "ts").withColumnRenamed("ts", "at")

    @stage
    def plus(fives):
        return fives.withColumn("v", F.col("v") + 1)

    @stage(sink=lab.sink())
    def tens(plus):
        return windows(plus, "10 minutes", "at")

    stages = [events, minutes, kept, fives, plus, tens]
    rows = windows(lab.table("in", FLIGHTS), "1 minute", "ts")
    rows = windows(rows, "5 minutes", "ts").withColumn("v", F.col("v") + 1)
    expected = lab.rows(windows(rows, "10 minutes", "ts"))
    due = [row for row in expected if row[0] < lab.at(1800)]

    job = lab.start(Pipeline("p", stages, chaining=False), interval=600.0)

    job.wait_until(lambda: job.execution.rows().get("tens", 0) >= len(due))
    job.ask("checkpoint")
    job.wait_for(CheckpointDone)
    job.wait_until(lambda: len(lab.committed()) >= len(due))
    assert lab.committed() == due
    job.drain()
    job.finished()
    lab.check(expected)
    assert len(job.checkpoints()) == 2, job.story()


def test_an_idle_instance_does_not_hold_the_watermark_back_and_a_busy_one_does(lab: Any) -> None:
    for name, keys in (("busy", "a"), ("silent", "b")):
        lab.put(name, FLIGHTS, [(keys, lab.at(0), 1)])
    lab.put("busy", FLIGHTS, [("a", lab.at(3600), 1)])

    @unbounded_source(watermark=("ts", "0 seconds"), instances=["busy", "silent"], idle_after=2.0)
    def feed(context):
        return lab.stream(context.instance, FLIGHTS)

    @stage
    def all_of_it(feed):
        return feed.where("v > 0")

    @stage(inputs={"all_of_it": StageInput(edge="all_to_all")}, sink=lab.sink())
    def windows(all_of_it):
        found = all_of_it.groupBy(F.window("ts", "1 minute"), "k").count()
        return found.select(F.col("window.start").alias("start"), "k", "count")

    passes = stage(name="all_of_it", instances=["busy", "silent"])(all_of_it.function)
    job = lab.start(Pipeline("p", [feed, passes, windows], chaining=False))
    job.wait_until(lambda: len(lab.committed()) == 2)
    lab.check([(lab.at(0), "a", 1), (lab.at(0), "b", 1)])

    # It sends rows again, which are not late.
    lab.put("silent", FLIGHTS, [("b", lab.at(3700), 1)])
    job.wait_until(lambda: job.execution.rows()["feed"] == 4)
    job.drain()
    job.finished()
    everything = [(0, "a"), (0, "b"), (3600, "a"), (3660, "b")]
    lab.check([(lab.at(second), key, 1) for second, key in everything])
