"""The number of rows that each stage has emitted: of every stage, wherever it runs, also after a restore; or known as unknown."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import (
    Pipeline,
    StageInput,
    UnknownRowsError,
    bounded_source,
    split_source,
    stage,
    unbounded_source,
)
from dagster_checkpoints.spark.job.events import InstanceFinished, StageFinished

ROWS = "k string, ts timestamp, v long"
NAMES = "k string, name string"
INPUTS = ("chained", "left", "right", "shared", "several", "twice", "ranged")


def put(lab: Any, first: int) -> None:
    """20 rows more in each input folder: 10 values of v, each with two keys."""
    for name in INPUTS:
        lab.put(name, ROWS, [(key, lab.at(v), v) for v in range(first, first + 10) for key in "ab"])


def counted_pipeline(lab: Any) -> Pipeline:
    @unbounded_source
    def chained(context):
        return lab.stream("chained", ROWS).where("k = 'a' OR v % 2 = 0")

    @stage
    def even(chained):
        return chained.where("v % 2 = 0")

    @stage
    def exploded(even):
        return even.select("v", F.explode(F.array(F.lit(1), F.lit(2), F.lit(3))).alias("n"))

    @stage(sink=lab.sink("chained"))
    def few(exploded):
        return exploded.where("n = 1")

    @unbounded_source(watermark=("ts", "1 second"))
    def left(context):
        return lab.stream("left", ROWS)

    @unbounded_source(watermark=("ts", "1 second"))
    def right(context):
        return lab.stream("right", ROWS).where("k = 'a'")

    @stage(inputs={"left": StageInput(fuse=True), "right": StageInput(fuse=True)})
    def both(left, right):
        return left.unionByName(right).where("k = 'a'")

    @stage(sink=lab.sink("fused"))
    def windows(both):
        return both.groupBy(F.window("ts", "10 seconds")).count().select("count")

    @unbounded_source
    def shared(context):
        return lab.stream("shared", ROWS)

    @stage
    def odd(shared):
        return shared.where("v % 2 = 1")

    @stage(sink=lab.sink("odd"))
    def odd_sink(odd):
        return odd.where("k = 'a'")

    @stage
    def copied(shared):
        return shared

    @stage(sink=lab.sink("pairs"))
    def pairs(copied):
        return copied.crossJoin(lab.table("names", NAMES).select("name").hint("shuffle_replicate_nl"))

    @unbounded_source(instances=["x", "y"])
    def several(context):
        return lab.stream("several", ROWS).where(F.col("k") == ("a" if context.instance == "x" else "b"))

    @stage(instances=["x", "y"], sink=lab.sink("several"))
    def several_even(several):
        return several.where("v % 2 = 0")

    @split_source(schema=ROWS, discover=["0", "1"])
    def splits(context, split):
        return lab.spark.createDataFrame([("a", lab.at(0), int(split))] * 5, ROWS)

    @stage(sink=lab.sink("splits"))
    def of_splits(splits):
        return splits.where("v = 1")

    @bounded_source
    def names(context):
        return lab.table("names", NAMES)

    @stage(inputs={"names": StageInput(mode="static")})
    def renamed(names):
        return names.withColumnRenamed("name", "title")

    @stage(sink=lab.sink("titles"))
    def titles(renamed):
        return renamed.where("k = 'b'")

    @unbounded_source
    def twice(context):
        return lab.stream("twice", ROWS)

    @stage
    def doubled(twice):
        return twice.unionByName(twice)

    @stage(sink=lab.sink("all_doubled"))
    def all_doubled(doubled):
        return doubled

    @unbounded_source
    def ranged(context):
        return lab.stream("ranged", ROWS)

    @stage(sink=lab.sink("in_order"))
    def in_order(ranged):
        return ranged.repartitionByRange(2, "v")

    return Pipeline(
        "counted",
        [
            *(
                chained,
                even,
                exploded,
                few,
                left,
                right,
                both,
                windows,
                shared,
                odd,
                odd_sink,
                copied,
                pairs,
                several,
                several_even,
            ),
            *(splits, of_splits, names, renamed, titles, twice, doubled, all_doubled, ranged, in_order),
        ],
    )


# The rows that one file of each input lets each stage emit.
PER_FILE = {
    "chained": 15, "even": 10, "exploded": 30, "few": 10, "left": 20, "right": 10, "both": 20, "shared": 20, "odd": 10,
    "odd_sink": 5, "pairs": 40, "several": 20, "several_even": 10, "twice": 20, "doubled": 40, "all_doubled": 40, "in_order": 20,
}  # fmt: skip
ONCE = {"splits": 10, "of_splits": 5, "names": 2, "renamed": 2, "titles": 1}


@pytest.fixture(scope="module")
def runs(shared_lab: Any) -> dict[str, Any]:
    """A run that is suspended and one that resumes it: the rows that each of them reports."""
    lab = shared_lab
    lab.put("names", NAMES, [("a", "Anna"), ("b", "Bob")])
    put(lab, 0)
    put(lab, 10)
    pipeline = counted_pipeline(lab)
    found: dict[str, Any] = {}
    for run, files in (("first", 2), ("resumed", 3)):
        if run == "resumed":
            put(lab, 20)
        job = lab.start(pipeline)
        job.wait_until(lambda job=job, files=files: done(job, files), 300.0)
        found[run] = job.execution.rows(), {name: files * rows for name, rows in PER_FILE.items()} | ONCE
        if run == "first":
            job.done("stop", drain=False)
            job.result()
        else:
            job.drain()
            job.finished()
            found["ends"] = {event.stage: event.rows for event in job.of(StageFinished)}
            found["instances"] = {(event.stage, event.instance): event.rows for event in job.of(InstanceFinished)}
    return found


def done(job: Any, files: int) -> bool:
    """Whether all rows have reached the sinks: the rows of the last stages of queries are those of the files that they wrote."""
    rows = job.execution.rows()
    tails = ("few", "odd_sink", "several_even", "all_doubled", "in_order", "pairs")
    if not rows or rows["titles"] != 1 or rows["of_splits"] != 5 or rows["windows"] != files - 1:
        return False
    return all(rows[name] == files * PER_FILE[name] for name in tails)


@pytest.mark.parametrize("run", ["first", "resumed"])
@pytest.mark.parametrize("name", [*PER_FILE, *ONCE])
def test_a_stage_reports_the_rows_that_it_has_emitted(runs: dict[str, Any], run: str, name: str) -> None:
    rows, wanted = runs[run]
    assert rows[name] == wanted[name]


@pytest.mark.parametrize("name", [*PER_FILE, *ONCE])
def test_the_end_of_a_stage_reports_the_same_rows(runs: dict[str, Any], name: str) -> None:
    assert runs["ends"][name] == runs["resumed"][1][name]


@pytest.mark.parametrize("name", ["copied", "ranged"])
def test_rows_that_spark_evaluates_twice_are_named_as_unknown(runs: dict[str, Any], name: str) -> None:
    for run in ("first", "resumed"):
        with pytest.raises(UnknownRowsError, match=f"rows of stage '{name}', whose number is not known"):
            runs[run][0].get(name, 0)
    assert runs["ends"][name] is None


def test_instances_report_their_own_rows(runs: dict[str, Any]) -> None:
    assert runs["instances"]["several", "x"] == runs["instances"]["several", "y"] == 30
