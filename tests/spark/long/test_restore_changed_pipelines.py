"""A pipeline that was changed between two runs: changes that a restore refuses, their errors, and changes that it accepts."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from functools import reduce
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted, StartChosen
from dagster_checkpoints.spark.query.restored_plans import forgotten_sources
from dagster_checkpoints.state.errors import InputRowsGone, InputsChanged, NonRestoredState, StatefulPlanChanged
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    InputMetadata,
    QuerySnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import fitted
from dagster_checkpoints.storage.verification import verify_savepoint

ROWS = "k string, ts timestamp, v long"
NAMES = "k string, name string"


# The same pipeline as a user has it in a file, with windows of another length.
IN_A_FILE = """
import pyspark.sql.functions as F
from dagster_checkpoints import ParquetSink, Pipeline, StageInput, bounded_source, stage, unbounded_source

def read(context, name, schema):
    return context.spark.readStream.schema(schema).parquet("FOLDER/input/" + name)

@unbounded_source(watermark=("ts", "1 minute"))
def live(context):
    return read(context, "live", "ROWS").unionByName(read(context, "spare", "ROWS"))

@stage
def rows(live):
    return live.withColumn("w", F.col("v") + 1).where("w > 0").drop("w")

@stage(inputs={"rows": StageInput(key="k")}, instances=["a", "b"], sink=ParquetSink("FOLDER/hours"))
def hours(rows):
    counted = rows.groupBy(F.window("ts", "30 minutes"), "k").agg(F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "n")

@bounded_source(sink=ParquetSink("FOLDER/names"))
def names(context):
    return read(context, "names", "NAMES")

changed = Pipeline("changed", [live, rows, hours, names])
"""


class Flow:
    """live -> rows in one query, two instances of `hours` behind them; names, which ends at once. And variants of it."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    def pipeline(
        self,
        *more: Any,
        key: str = "k",
        window: str = "1 hour",
        sources: tuple[str, ...] = ("live", "spare"),
        between: bool = False,
    ) -> Pipeline:
        lab = self.lab

        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context):
            return reduce(DataFrame.unionByName, [lab.stream(name, ROWS) for name in sources])

        @stage
        def rows(live):
            return live.where("v >= 0")

        @stage
        def checked(rows):
            return rows.where("v <> 1001")

        class Hours(Stage):
            def transform(self, context, **inputs):
                (rows,) = inputs.values()
                counted = rows.groupBy(F.window("ts", window), "k").agg(F.count("*").alias("n"))
                return counted.select(F.col("window.start").alias("start"), "k", "n")

        reads = {"checked" if between else "rows": StageInput(key=key)}
        hours = Hours("hours", inputs=reads, instances=["a", "b"], sink=lab.sink("hours"))
        more = (checked, *more) if between else more

        @bounded_source(sink=lab.sink("names"))
        def names(context):
            return lab.stream("names", NAMES)

        return Pipeline("changed", [live, rows, hours, names, *more])

    def verified(self) -> dict[str, Any]:
        """The output of `dagster-checkpoints verify -f` for the pipeline in a file, in a separate process."""
        text = IN_A_FILE.replace("FOLDER", str(self.lab.folder)).replace("ROWS", ROWS).replace("NAMES", NAMES)
        file = self.lab.folder / "changed.py"
        file.write_text(text)
        command = [sys.executable, "-m", "dagster_checkpoints.cli", "verify", "latest", "-f", str(file), "--json"]
        environment = {**os.environ, "CHECKPOINT_STORAGE": str(self.lab.folder / "store")}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
        assert ran.returncode == 1, ran.stderr
        document: dict[str, Any] = json.loads(ran.stdout)
        return document

    def refused(self, error: type[Exception], pipeline: Pipeline, *words: str, **options: Any) -> None:
        """Check that a restore into the pipeline is refused with an error, and by `verify` with the same text."""
        job = self.lab.start(pipeline, **options)
        with pytest.raises(error) as caught:
            failure = job.result().error
            if failure is not None:
                raise failure
        assert not job.of(JobStarted)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        if error in (InputRowsGone, InputsChanged):
            with self.lab.storage("changed") as storage:
                newest = storage.list_checkpoints()[0].location
                assert [p.what for p in verify_savepoint(storage, newest, pipeline).problems] == [str(caught.value)]


class Renamed:
    """live -> hours by key, two instances; names, which ends, is the static input of table. And the same under other names."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    def pipeline(self, prefix: str) -> Pipeline:
        lab = self.lab

        def called(name: str) -> dict[str, str]:
            return {"name": f"{prefix}{name}", "uid": name}

        @unbounded_source(watermark=("ts", "1 minute"), **called("live"))
        def live(context):
            return lab.stream("live", ROWS)

        @bounded_source(**called("names"))
        def names(context):
            return lab.stream("names", NAMES)

        class Hours(Stage):
            def transform(self, context, **inputs):
                (rows,) = inputs.values()
                counted = rows.groupBy(F.window("ts", "1 hour"), "k").agg(F.count("*").alias("n"))
                return counted.select(F.col("window.start").alias("start"), "k", "n")

        class Table(Stage):
            def transform(self, context, **inputs):
                return inputs[f"{prefix}hours"].join(inputs[f"{prefix}names"], "k").select("k", "n", "name")

        hours = Hours(instances=["a", "b"], inputs={f"{prefix}live": StageInput(key="k")}, event_time="start", **called("hours"))
        inputs = {f"{prefix}hours": StageInput(), f"{prefix}names": StageInput(mode="static")}
        return Pipeline("renamed", [live, names, hours, Table(inputs=inputs, sink=lab.sink("table"), **called("table"))])


def test_a_pipeline_whose_stages_are_renamed(lab: Any) -> None:
    """Keyed state, offsets, a static table, a sink and a finished stage go on under other names."""
    flow = Renamed(lab)
    lab.put("names", NAMES, [("a", "A"), ("b", "B")])
    for number, prefix in enumerate(("", "new_")):
        minutes = range(45 * number, 45 * number + 45)
        lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in minutes])
        job = lab.start(flow.pipeline(prefix))
        assert (job.wait_for(JobStarted).restored_checkpoint is not None) == (number > 0)
        rows, windows = 45 * number + 45, (0, 2)[number]
        stages = {f"{prefix}live": rows, f"{prefix}table": windows}
        job.wait_for(
            CheckpointDone,
            lambda done, s=stages, names=f"{prefix}names": (
                names in done.finished_stages and {name: done.stages[name].rows for name in s} == s
            ),
        )
        if number == 0:
            job.cancel()
            assert job.result().status == "CANCELED"
    job.drain()
    job.finished()
    expected = [(k, n, name) for n in (30, 15) for k, name in ("aA", "bB")]
    assert sorted(lab.committed("table")) == sorted(expected)


class OneQuery:
    """live -> plain -> fresh (drops duplicates) -> hours (counts by window), in one query until more stages read some of them.

    Then `plain` is gone, too, and `odd` is between `fresh` and `hours`.
    """

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    def pipeline(self, *more: Any, hour: str = "1 hour", changed: bool = False) -> Pipeline:
        lab = self.lab

        @unbounded_source(watermark=("ts", "10 minutes"))
        def live(context):
            return lab.stream("live", ROWS).withColumn("key", F.upper("k"))

        @stage
        def plain(live):
            return live.where("v >= 0")

        class Fresh(Stage):
            def transform(self, context, **inputs):
                (rows,) = inputs.values()
                return rows.dropDuplicatesWithinWatermark(["v"]).withColumn("half", F.col("v") % 2)

        @stage
        def odd(fresh):
            return fresh.where("v < 150 or half = 1")

        class Hours(Stage):
            def transform(self, context, **inputs):
                (rows,) = inputs.values()
                counted = rows.groupBy(F.window("ts", hour), "key", "half").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
                return counted.select(F.col("window.start").alias("start"), "key", "half", "n", "v")

        fresh = Fresh("fresh", inputs={"live" if changed else "plain": StageInput()})
        reads = {"odd" if changed else "fresh": StageInput()}
        hours = Hours("hours", inputs=reads, sink=lab.sink("hours"), event_time="start")
        return Pipeline("one", [live, odd if changed else plain, fresh, hours, *more])

    def with_readers(self, **options: Any) -> Pipeline:
        @stage(sink=self.lab.sink("audit"))
        def audit(live):
            return live.select("key", "v")

        @stage(sink=self.lab.sink("news"))
        def news(fresh):
            return fresh.select("key", "v")

        return self.pipeline(audit, news, changed=True, **options)

    def put(self, minutes: range) -> None:
        self.lab.put("live", ROWS, [("ab"[m % 2], self.lab.at(60 * m), m) for m in minutes])


def test_readers_inside_a_chain_divide_its_query_and_its_state(lab: Any) -> None:
    flow = OneQuery(lab)
    flow.put(range(90))
    first = lab.start(flow.pipeline())
    assert first.chains == (("live", "plain", "fresh", "hours"),)
    first.wait_for(CheckpointDone, lambda done: done.stages["hours"].rows == 2)
    first.cancel()
    assert first.result().status == "CANCELED"
    readers = flow.with_readers(hour="30 minutes")
    Flow(lab).refused(
        StatefulPlanChanged,
        readers,
        "aggregate by window(ts, 1 hour), upper(k), (v % 2)",
        "Now: aggregate by window(ts, 30",
        allow_non_restored_state=True,
    )
    Flow(lab).refused(NonRestoredState, flow.with_readers(), "'plain'", "allow_non_restored_state")
    flow.put(range(85, 120))  # 85 to 89 are known: their state is that of another operator number now
    second = lab.start(flow.with_readers(), allow_non_restored_state=True)
    said = [line.partition(": ")[0] for line in second.wait_for(StartChosen).changes]
    assert said == ["other inputs", "divided", "left behind", "new"]
    started = second.wait_for(JobStarted)
    assert started.restored_checkpoint is not None
    assert set(started.chains) == {("live",), ("fresh",), ("odd",), ("hours",), ("audit",), ("news",)}
    second.wait_until(lambda: lab.count("news") == 30)
    flow.put(range(115, 200))
    second.wait_for(CheckpointDone, lambda done: done.stages["news"].rows == 110)
    second.drain()
    second.finished()
    zero = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    expected = []
    for hour in range(4):
        for half, key in enumerate("AB"):
            values = [m for m in range(60 * hour, min(60 * hour + 60, 200)) if m % 2 == half and (m < 150 or half)]
            if values:
                expected.append((zero + dt.timedelta(hours=hour), key, half, len(values), sum(values)))
    assert sorted(lab.committed("hours")) == sorted(expected)
    assert sorted(lab.committed("news")) == sorted(("AB"[m % 2], m) for m in range(90, 200))
    assert sorted(lab.committed("audit")) == sorted(("AB"[m % 2], m) for m in [*range(85, 120), *range(115, 200)])


def test_streams_of_a_replaced_input_begin_again_and_others_go_on(lab: Any) -> None:
    """A restore that takes the stage between out again finds no positions of the channels that were there before."""
    pipeline = Flow(lab).pipeline(between=True)
    texts = ("watermark of input 'rows'", "records of input 'rows'", "records of input 'other'")
    task = TaskSnapshot(query=QuerySnapshot(7, sources=texts))
    inputs = (InputMetadata("rows", "stream", "all_to_all", "k"), InputMetadata("other"))
    recorded = (StageMetadata("rows", 1, ("0",), inputs=()), StageMetadata("hours", 2, ("a", "b"), inputs=inputs))
    chains = (ChainMetadata("hours", ("hours",), {0: task, 1: task}),)
    metadata = fitted(pipeline, CheckpointMetadata("changed", 3, recorded, chains))
    assert forgotten_sources(pipeline, metadata, "hours", task) == [0, 1]
    assert forgotten_sources(pipeline, metadata, "rows", task) == []


def test_changes_around_an_aggregation_are_refused_or_exact(lab: Any) -> None:
    """Spark itself compares the types in the state alone, and would continue one sum as the other one."""

    def pipeline(*columns: str, before: str = "true", behind: str = "true") -> Pipeline:
        @unbounded_source(watermark=("ts", "0 seconds"))
        def live(context):
            return lab.stream("live", ROWS)

        @stage
        def sums(live):
            rows = live.where(before)
            windows = rows.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("a"), F.sum(F.col("v") * 100).alias("b"))
            return windows.where(behind).select(F.window_time("window").alias("ts"), "k", *columns)

        @stage(sink=lab.sink())
        def shown(sums):
            return sums

        return Pipeline("selected", [live, sums, shown])

    def put(*minutes: int) -> None:
        """The last row ends the window before it."""
        lab.put("live", ROWS, [("a", lab.at(60 * minute), 1) for minute in minutes])

    put(1, 61)
    job = lab.start(pipeline("a", "b"), interval=3600.0)
    assert job.wait_for(JobStarted).chains == (("live", "sums", "shown"),)
    job.wait_until(lambda: job.execution.rows().get("shown") == 1)
    job.done("stop")
    job.finished()
    for columns, now in ((("b", "a"), "functions 2, 1"), (("b",), "functions 2")):
        error = lab.start(pipeline(*columns)).result().error
        assert isinstance(error, StatefulPlanChanged) and "in state: functions 1, 2\n" in str(error), error
        assert f"in state: {now}\n" in str(error)
    # Spark would apply the filter in front of the sums, and emit those that are in the state without it.
    error = lab.start(pipeline("a", "b", behind="k > 'c'")).result().error
    assert isinstance(error, StatefulPlanChanged) and "  Now: where (k > 'c')\n" in str(error), error
    put(62, 121)
    lab.put("live", ROWS, [("a", lab.at(60 * 63), 1000)])
    job = lab.start(pipeline("a", "b", before="v < 9"))
    job.wait_until(lambda: job.execution.rows().get("shown") == 2)
    job.drain()
    job.finished()
    assert [row[1:] for row in lab.committed()] == [("a", 1, 100), ("a", 2, 200), ("a", 1, 100)]
