"""Pipelines of different shapes: what their sinks commit is what Spark computes over the same files as a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage
from dagster_checkpoints.sinks import SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.spark.job.events import CheckpointDone, StageFinished

FLIGHTS = "k string, ts timestamp, v long"


def hourly(frame: Any) -> Any:
    windows = frame.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return windows.select(F.col("window.start").alias("start"), "k", "v", "n")


def put_hours(lab: Any, name: str, files: int, key: str = "a", begin: int = 0) -> None:
    for number in range(begin, begin + files):
        lab.put(name, FLIGHTS, [(key, lab.at(number * 600 + second), second) for second in range(0, 600, 60)])


def test_chained_and_unchained_stages_compute_the_same_with_a_static_input(lab: Any) -> None:
    put_hours(lab, "in", 4)
    lab.put("names", "k string, name string", [("a", "Anna"), ("b", "Bob")])

    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @bounded_source
    def names(context):
        return lab.table("names", "k string, name string")

    @stage
    def kept(flights):
        return flights.where("v > 0")

    @stage(inputs={"names": StageInput(mode="static")})
    def named(kept, names):
        return kept.join(F.broadcast(names), "k", "left").withColumn("k", F.col("name")).drop("name")

    def counts(to):
        @stage(sink=lab.sink(to), name="counts")
        def made(named):
            return hourly(named)

        return made

    chained = lab.start(Pipeline("chained", [flights, names, kept, named, counts("chained")]))
    chained.finished()
    unchained = lab.start(Pipeline("unchained", [flights, names, kept, named, counts("unchained")], chaining=False))
    unchained.finished()

    expected = hourly(lab.table("in", FLIGHTS).where("v > 0").withColumn("k", F.lit("Anna")))
    lab.check(expected, "chained")
    lab.check(expected, "unchained")
    assert chained.chains == (("flights", "kept"), ("names",), ("named", "counts"))
    assert unchained.chains == (("flights",), ("names",), ("kept",), ("named",), ("counts",))


class LatestSink(TwoPhaseCommitSink):
    """Keeps the rows of the newest checkpoints: by key ("update"), or the whole table ("complete")."""

    supported_output_modes = frozenset({"append", "update", "complete"})

    def __init__(self, path: Path, whole: bool) -> None:
        self.path = path
        self.whole = whole

    def open(self, context: SinkContext) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, Any] = {}

    def write(self, batch: Any, files: Sequence[str], batch_id: int) -> None:
        if self.whole:
            self.rows = {}
        self.rows.update((row[0], list(row[1:])) for row in batch.collect())

    def pre_commit(self, checkpoint_id: int) -> str | None:
        written, self.rows = self.rows, {}
        return json.dumps([checkpoint_id, written]) if written else None

    def commit(self, transaction: str) -> None:
        checkpoint_id, rows = json.loads(transaction)
        (self.path / f"{checkpoint_id:06d}.json").write_text(json.dumps(rows))

    def abort(self, transaction: str) -> None:
        pass

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        for transaction in committed:
            self.commit(transaction)

    def start_new(self) -> None:
        pass

    def close(self) -> None:
        pass

    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in sorted(self.path.glob("*.json")):
            rows = json.loads(file.read_text())
            found = rows if self.whole else {**found, **rows}
        return found


class Keeper(Stage):
    """Holds rows with v = 60 back until the end; counts rows in list state; records the calls."""

    calls: list[str]  # the test's own

    def open(self, context):
        self.context = context
        self.held: list[Any] = []
        self.calls.append("open")

    def transform(self, context, solo):
        return solo

    def process_batch(self, batch, batch_id):
        self.held += batch.where("v = 60").collect()
        self.context.state.list("seen").add(batch.count())
        return batch.where("v <> 60")

    def end_input(self, name):
        self.calls.append(f"end_input {name}")

    def finish(self):
        self.calls.append("finish")
        return self.context.spark.createDataFrame(self.held, FLIGHTS).select("v", "k", "ts")

    def snapshot_state(self, checkpoint_id):
        self.calls.append("snapshot")

    def notify_checkpoint_complete(self, checkpoint_id):
        self.calls.append("complete")

    def close(self):
        seen = sum(self.context.state.list("seen"))
        self.calls.append(f"close, seen {seen}")


def test_pointwise_instances_output_modes_and_a_stage_with_the_whole_life_cycle(lab: Any) -> None:
    """Three instances to one to two; one of the three has nothing to read; a stage that reads only a static input."""
    put_hours(lab, "x", 4, "x")
    put_hours(lab, "y", 1, "y")
    lab.put("names", "k string, name string", [("x", "Xenia"), ("y", "Yves")])

    @bounded_source(watermark=("ts", "12 hours"), instances=["x", "y", "nothing"])
    def trio(context):
        return lab.stream(context.instance, FLIGHTS)

    @stage(instances=["x", "y", "nothing"])
    def rows(trio):
        return trio.where("v >= 0")

    @stage
    def solo(rows):
        return rows

    calls: list[str] = []
    keeper = Keeper()
    keeper.calls = calls

    @stage(instances=["p", "q"], sink=lab.sink("duo"))
    def duo(context, keeper):
        return keeper.withColumn("by", F.lit(context.instance))

    @stage(sink=lab.sink("windows"))
    def windows(keeper):
        return hourly(keeper)

    whole, latest = LatestSink(lab.folder / "whole", True), LatestSink(lab.folder / "latest", False)

    @stage(sink=whole, output_mode="complete")
    def totals(keeper):
        return keeper.groupBy("k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))

    @stage(sink=latest, output_mode="update")
    def highest(keeper):
        return keeper.groupBy("k").agg(F.max("v").alias("v"))

    @bounded_source
    def names(context):
        return lab.table("names", "k string, name string")

    @stage(inputs={"names": StageInput(mode="static")}, sink=lab.sink("initials"))
    def initials(names):
        return names.select("k", F.substring("name", 1, 1).alias("initial"))

    stages = [trio, rows, solo, keeper, duo, windows, totals, highest, names, initials]
    job = lab.start(Pipeline("p", stages))
    job.finished()

    table = lab.table("x", FLIGHTS).unionByName(lab.table("y", FLIGHTS))
    lab.check(hourly(table), "windows")  # also of the rows that were held back: the lateness covers them
    by = [row[-1] for row in lab.committed("duo")]
    assert sorted([row[:-1] for row in lab.committed("duo")], key=repr) == lab.rows(table.select("k", "ts", "v"))
    assert set(by) == {"p", "q"}
    assert whole.table() == {"x": [4 * 2700, 40], "y": [2700, 10]}
    assert latest.table() == {"x": [540], "y": [540]}
    lab.check([("x", "X"), ("y", "Y")], "initials")
    assert job.chains == (
        ("trio", "rows"),
        ("solo", "keeper"),
        ("duo",),
        ("windows",),
        ("totals",),
        ("highest",),
        ("names",),
        ("initials",),
    )
    assert calls[0] == "open"
    assert calls[-1] == "close, seen 50"
    end = calls.index("end_input solo")
    assert calls[end : end + 2] == ["end_input solo", "finish"]
    assert calls.index("snapshot", end) < len(calls) - 1 - calls[::-1].index("complete")
    assert not lab.spark.streams.active, "a query outlived its job"


def test_sources_that_are_empty_or_end_at_once_end_the_job(lab: Any) -> None:
    lab.put("names", "k string, name string", [])
    lab.put("one", FLIGHTS, [("a", lab.at(0), 1)])

    @bounded_source(watermark=("ts", "1 minute"))
    def nothing(context):
        return lab.stream("nothing", FLIGHTS)

    @bounded_source
    def names(context):
        return lab.table("names", "k string, name string")

    @bounded_source(watermark=("ts", "1 minute"))
    def one(context):
        return lab.stream("one", FLIGHTS)

    @stage(inputs={"names": StageInput(mode="static")}, sink=lab.sink())
    def windows(nothing, one, names):
        return hourly(nothing.unionByName(one).join(names, "k", "left").drop("name"))

    @stage(sink=lab.sink("none"))
    def none(nothing):
        return hourly(nothing)

    job = lab.start(Pipeline("p", [nothing, names, one, windows, none]), interval=600.0)
    result = job.finished()
    lab.check([(lab.at(0), "a", 1, 1)])
    assert lab.committed("none") == []
    assert set(result.finished_stages) == {"nothing", "names", "one", "windows", "none"}
    assert len(job.of(CheckpointDone)) == 1
    assert len(job.of(StageFinished)) == 5
