"""A quarantine comes to a running pipeline and goes, is rescaled with its stage, and is known to `check_pipeline`."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import (
    Pipeline,
    Quarantine,
    StageInput,
    stage,
    unbounded_source,
)
from dagster_checkpoints.testing import SourceRows, StageFindingError, check_pipeline
from tests.spark.test_quarantine import CONDITIONS, ROWS


@pytest.mark.parametrize("at_source", [False, True])
def test_a_quarantine_comes_to_a_pipeline_and_goes(lab: Any, at_source: bool) -> None:
    """The stage of refused rows begins, and ends, as any other one. A query that it comes into is divided, with its state."""

    def pipeline(quarantine: Any) -> Pipeline:
        @unbounded_source(watermark=("ts", "1 minute"), quarantine=quarantine if at_source else None)
        def live(context):
            return lab.stream("live", ROWS)

        @stage(sink=lab.sink("totals"), quarantine=None if at_source else quarantine)
        def totals(live):
            return totals_of(live)

        return Pipeline("p", [live, totals])

    def totals_of(rows: Any) -> Any:
        found = rows.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"))
        return found.select("window.start", "k", "v")

    def put(minute: int, v: int) -> None:
        lab.put("live", ROWS, [(0, "a", lab.at(60 * minute), v)])

    quarantine = Quarantine({"is_small": "v < 10"}, sink=lab.sink("large"))
    for number, (given, options) in enumerate([(None, {}), (quarantine, {}), (None, {"allow_non_restored_state": True})]):
        put(20 * number, 6)  # in the window of the row that the run before has read last
        put(20 * number, 12 if at_source else 1)
        put(20 * number + 20, 5)
        lab.start(pipeline(given), interval=0.3, until="caught_up", **options).finished()
    job = lab.start(pipeline(None))
    job.drain()
    job.finished()
    read = lab.table("live", ROWS)
    if at_source:  # one of three such rows was read while there was a quarantine
        assert [row[3:5] for row in lab.committed("large")] == [(12, "is_small")]
        read = read.where(F.col("ts") != F.lit(lab.at(60 * 20))).unionByName(
            read.where((F.col("ts") == F.lit(lab.at(60 * 20))) & (F.col("v") < 10))
        )
        lab.check(totals_of(read), "totals")
        return
    assert [row[2] for row in lab.committed("large")] == [12]
    found = lab.committed("totals") + [row[:3] for row in lab.committed("large")]
    assert sorted(found) == sorted(lab.rows(totals_of(read)))


def test_a_check_of_the_pipeline_knows_the_conditions(lab: Any) -> None:
    def pipeline(conditions: dict[str, Any]) -> Pipeline:
        @unbounded_source(
            watermark=("ts", "1 minute"), quarantine=Quarantine({"has_key": "k IS NOT NULL"}, sink=lab.sink("keyless"))
        )
        def live(context):
            return lab.stream("live", ROWS)

        @stage(sink=lab.sink("orders"), quarantine=Quarantine(conditions, sink=lab.sink("refused"), most_rows=0))
        def orders(live):
            return live

        return Pipeline("p", [live, orders])

    rows = SourceRows(ROWS, [(0, "ab"[n % 2] if n % 4 else None, lab.at(n), n * (-1 if n % 3 == 0 else 1)) for n in range(1, 13)])
    checked = check_pipeline(
        pipeline({"is_positive": "v > 0", "is_small": "v < 11"}), {"live": rows}, histories=2, spark=lab.spark
    )
    assert checked.rows == {"live_refused": 3, "orders": 5, "orders_refused": 4}
    with pytest.raises(StageFindingError, match=r"Stage 'orders' .* uses chance \(rand\(\)\)"):
        check_pipeline(pipeline(CONDITIONS), {"live": rows}, histories=1, spark=lab.spark)


def test_a_stage_with_a_quarantine_is_rescaled(lab: Any) -> None:
    """The stage of refused rows has as many instances as the stage in front, before and behind."""

    def pipeline(*instances: str) -> Pipeline:
        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context):
            return lab.stream("live", ROWS)

        @stage(
            inputs={"live": StageInput(key="v")},
            instances=instances,
            sink=lab.sink("orders"),
            quarantine=Quarantine({"is_new": "n = 1"}, sink=lab.sink("again"), most_share=0.9),
        )
        def orders(live):
            counted = live.groupBy(F.window("ts", "10 minutes"), "v").agg(F.count("*").alias("n"))
            return counted.select("window.start", "v", "n")

        return Pipeline("p", [live, orders])

    lab.put("live", ROWS, [(0, "a", lab.at(0), v % 20) for v in range(30)])
    for number, instances in enumerate(["xy", "wxyz", "x"]):
        lab.put("live", ROWS, [(0, "a", lab.at(900 * number + 800), v) for v in range(20)])
        lab.put("live", ROWS, [(0, "b", lab.at(900 * number + 900), v) for v in range(number, 9)])
        lab.start(pipeline(*instances), interval=0.3, until="caught_up").finished()
    job = lab.start(pipeline("v", "x", "y"))
    job.drain()
    job.finished()
    read = lab.table("live", ROWS)
    counted = read.groupBy(F.window("ts", "10 minutes"), "v").agg(F.count("*").alias("n")).select("window.start", "v", "n")
    lab.check(counted.where("n = 1"), "orders")
    refused = lab.committed("again")
    assert sorted(row[:3] for row in refused) == sorted(lab.rows(counted.where("n <> 1")))
    assert {row[3] for row in refused} == {"is_new"} and len({row[4] for row in refused}) > 1
