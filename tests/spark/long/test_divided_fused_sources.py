"""A restore divides the query in which two feeds are joined, and gives their reader two instances."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, SavepointDone
from tests.spark.test_fused_sources import ROWS


def put(lab: Any, name: str, minutes: range, plus: int = 0) -> None:
    """A file of a row a minute for each of three keys."""
    lab.put(name, ROWS, [(key, lab.at(60 * m), m + plus) for m in minutes for key in "abc"])


def committed_before(lab: Any, name: str, savepoint: int) -> list[Any]:
    """What a sink has committed before a savepoint, whose own rows a pipeline that is restored from it commits, too."""
    if not lab.committed(name):
        return []
    rows = lab.spark.read.parquet(str(lab.folder / name))
    return lab.rows(rows.where(~F.col("checkpoint").cast("string").startswith(f"{savepoint}-")).drop("checkpoint"))


def pairs_of(left: DataFrame, right: DataFrame) -> DataFrame:
    both = left.alias("l").join(
        right.alias("r"),
        F.expr("l.k = r.k AND r.ts BETWEEN l.ts - INTERVAL 5 MINUTES AND l.ts + INTERVAL 5 MINUTES"),
        "left_outer",
    )
    return both.selectExpr("l.k AS k", "l.v AS v", "r.v AS w", "l.ts AS ts")


def test_a_join_of_two_feeds_keeps_both_sides_when_its_query_is_divided_and_gets_two_instances(lab: Any) -> None:
    check_join(lab, ["a", "b"])


def check_join(lab: Any, instances: list[str]) -> None:
    """Rows of each side wait for those of the other one, which have yet to come."""

    def pipeline(name: str, *more: Any, how: StageInput, instances: list[str]) -> Pipeline:
        @unbounded_source(watermark=("ts", "1 minute"))
        def left(context):
            return lab.stream("left", ROWS)

        @unbounded_source(watermark=("ts", "1 minute"))
        def right(context):
            return lab.stream("right", ROWS)

        @stage(sink=lab.sink(f"{name}/pairs"), inputs={"left": how, "right": how}, instances=instances)
        def pairs(left, right):
            return pairs_of(left, right).drop("ts")

        return Pipeline(name, [left, right, pairs, *more])

    @stage(sink=lab.sink("second/seen"))
    def seen(right):
        return right

    put(lab, "left", range(40))
    put(lab, "right", range(0, 30, 3), plus=100)
    first = lab.start(pipeline("first", how=StageInput(), instances=["0"]), interval=0.5)
    assert set(first.chains) == {("left", "right", "pairs")}
    first.wait_for(CheckpointDone, lambda done: (done.stages["left"].rows, done.stages["right"].rows) == (120, 30))
    place = first.done("stop", drain=False).url
    first.finished()

    put(lab, "right", range(30, 60, 3), plus=100)
    put(lab, "left", range(40, 60))
    how = StageInput(key="k" if len(instances) > 1 else None)
    second = lab.start(pipeline("second", seen, how=how, instances=instances), interval=0.5, restore_from=place)
    assert {chain[0] for chain in second.chains} == {"left", "right", "pairs", "seen"}
    second.wait_for(CheckpointDone, lambda done: (done.stages["left"].rows, done.stages["right"].rows) == (180, 60))
    second.drain()
    second.finished()
    wanted = lab.rows(pairs_of(lab.table("left", ROWS), lab.table("right", ROWS)).drop("ts"))
    before = committed_before(lab, "first/pairs", first.of(SavepointDone)[-1].checkpoint.checkpoint_id)
    assert 0 < len(before) < len(wanted)
    assert sorted([*before, *lab.committed("second/pairs")], key=repr) == wanted
    lab.check(lab.table("right", ROWS).where("v >= 130"), "second/seen")
