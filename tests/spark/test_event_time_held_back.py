"""A source without a watermark beside one that has one: refused or warned of by name where a stage waits for event time."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

ROWS = "k string, ts timestamp, v long"


def windows(rows: Any) -> Any:
    return rows.groupBy(F.window("ts", "10 minutes"), "k").count().select(F.window_time("window").alias("ts"), "count")


def outer(live: Any, other: Any) -> Any:
    right = other.select(F.col("k").alias("rk"), F.col("ts").alias("rts"))
    return live.join(right, F.expr("k = rk AND rts BETWEEN ts AND ts + INTERVAL 1 HOUR"), "leftOuter").select("k", "ts", "rts")


def inner(live: Any, other: Any) -> Any:
    return live.join(other.select(F.col("k").alias("rk"), F.col("v").alias("w")), F.expr("k = rk")).select("k", "ts", "v", "w")


def union(live: Any, other: Any) -> Any:
    return live.unionByName(other)


MEETINGS: dict[str, Any] = {
    "union and windows": lambda live, other: windows(union(live, other)),
    "distinct by time": lambda live, other: union(live, other).dropDuplicates(["k", "ts"]),
    "SELECT DISTINCT": lambda live, other: live.sparkSession.sql("SELECT DISTINCT k, ts FROM {f}", f=union(live, other)),
    "inner": inner,
    "no state": union,
    "lookup and windows": lambda live, other: windows(live.join(other.select("k"), "k")),
}


def pipeline(lab: Any, kind: str, meeting: str, *, watermark: Any = None, static: bool = False, behind: str = "") -> Pipeline:
    """`live`, with a watermark, and `other` meet in `met`; `behind` says what reads that, or what is behind `other`."""
    sink = {} if behind == "windows" else {"sink": lab.sink()}
    define: Any = {"unbounded": unbounded_source, "bounded": bounded_source}[kind]

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @define(watermark=watermark)
    def other(context):
        return lab.stream("other", ROWS)

    @stage
    def timed(other):
        return other.withWatermark("ts", "1 minute")

    @stage(**sink, name="met")
    def of_timed(live, timed):
        return MEETINGS[meeting](live, timed)

    @stage(**sink, inputs={"other": StageInput(mode="static")} if static else {})
    def met(live, other):
        return MEETINGS[meeting](live, other)

    @stage(sink=lab.sink())
    def counted(met):
        return windows(met)

    stages = {"own watermark": [timed, of_timed], "windows": [met, counted]}.get(behind, [met])
    return Pipeline("p", [live, other, *stages])


@pytest.mark.parametrize(
    ("kind", "meeting", "options", "outcome"),
    [
        ("unbounded", "union and windows", {}, "refused: no row would be emitted before the pipeline is drained"),
        ("unbounded", "no state", {"behind": "windows"}, "refused: no row would be emitted before the pipeline is drained"),
        ("unbounded", "SELECT DISTINCT", {}, "refused: no row would be emitted before the pipeline is drained"),
        ("unbounded", "distinct by time", {}, "warned: its state is not dropped"),
        ("unbounded", "inner", {}, "warned: its state is not dropped"),
        ("unbounded", "no state", {}, ""),
        ("bounded", "union and windows", {}, "warned: no row is emitted before that source has ended"),
        ("bounded", "lookup and windows", {"static": True}, ""),
        ("unbounded", "union and windows", {"watermark": ("ts", "1 hour")}, ""),
        ("unbounded", "union and windows", {"behind": "own watermark"}, ""),
    ],
)
def test_what_is_said_of_a_source_without_a_watermark(
    lab: Any, kind: str, meeting: str, options: dict[str, Any], outcome: str
) -> None:
    report = check_plans(pipeline(lab, kind, meeting, **options), lab.spark)
    refused = [f"refused: {error}" for error in report.failed.values()]
    found = refused or [f"warned: {text}" for text in report.warnings if "watermark" in text and "keeps every row" not in text]
    if not outcome:
        assert found == []
        return
    how, _, words = outcome.partition(": ")
    [text] = found
    assert text.startswith(how) and words in text
    assert "'live' (" in text and "'other' (" in text and "Declare watermark=(column, lateness) at 'other'" in text
