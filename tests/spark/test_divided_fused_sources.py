"""A restore divides the query that sources share with their reader: before and after one of them has ended, for each change."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted, SavepointDone, StageFinished
from tests.spark.test_fused_sources import ROWS, windows_of

FILES = 12
"""The backfill: a file of ten minutes each, read one by one."""
BEHIND = 10_000
"""The value of rows that come after the end of the backfill."""
CHANGES: dict[str, tuple[str, ...]] = {
    "readers": ("live", "seen", "windows"),
    "limit": ("live", "windows"),
    "apart": ("live", "windows"),
    "instances": ("live", "windows"),
    "between": ("live", "checked", "windows"),
}
"""By change, the heads of the queries of the changed pipeline, without that of the backfill."""


class Meeting:
    """history -> plain -> windows <- live, in one query; and with the changes."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    def pipeline(self, name: str = "first", change: str = "") -> Pipeline:
        lab = self.lab

        @bounded_source(watermark=("ts", "1 minute"), sink=lab.sink(f"{name}/raw") if change == "readers" else None)
        def history(context):
            return lab.stream("history", ROWS)

        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context):
            return lab.stream("live", ROWS)

        @stage
        def plain(history):
            return history.where("v >= 0")

        @stage
        def checked(live):
            return live.where("v >= 0")

        @stage(sink=lab.sink(f"{name}/seen"))
        def seen(live):
            return live

        class Windows(Stage):
            def transform(self, context, **inputs):
                return windows_of(reduce(DataFrame.unionByName, inputs.values()))

        between = change == "between"
        how = StageInput(key="k" if change == "instances" else None, fuse=False if change == "apart" else None)
        windows = Windows(
            "windows",
            inputs=dict.fromkeys(("history", "checked") if between else ("plain", "live"), how),
            instances=["a", "b"] if change == "instances" else None,
            sink=lab.sink(f"{name}/windows"),
            max_rows_per_trigger=30 if change == "limit" else None,
        )
        more = [checked] if between else [plain, seen] if change == "readers" else [plain]
        return Pipeline(name, [history, live, *more, windows])

    def put(self, name: str, minutes: range, plus: int = 0) -> None:
        self.lab.put(name, ROWS, [(key, self.lab.at(60 * m), m + plus) for m in minutes for key in "abc"])

    def savepoint(self, finished: tuple[str, ...], history: int) -> str:
        """Run the pipeline until a checkpoint says so, and suspend it with a savepoint.

        Args:
            finished: the stages that have finished.
            history: the least number of rows that the backfill has emitted.
        """
        job = self.lab.start(self.pipeline(), interval=0.3)
        assert set(job.chains) == {("history", "live", "plain", "windows")}
        job.wait_for(
            CheckpointDone,
            lambda done: done.finished_stages == finished and done.stages["history"].rows >= history and done.stages["live"].rows,
        )
        place = job.done("stop", drain=False).url
        job.finished()
        self.saved = job.of(SavepointDone)[-1].checkpoint.checkpoint_id
        return place

    def restored(self, savepoint: str, change: str, ended: bool, heads: set[str]) -> None:
        """Go on from a savepoint with a change, as a pipeline of its own, until everything is read."""
        job = self.lab.start(self.pipeline(change, change), interval=0.5, restore_from=savepoint, allow_non_restored_state=True)
        assert {chain[0] for chain in job.chains} == heads, change
        assert job.wait_for(JobStarted).finished_stages == (("history",) if ended else ())
        job.wait_for(CheckpointDone, lambda done: "history" in done.finished_stages and done.stages["live"].rows == 60)
        job.drain()
        job.finished()
        assert not job.wait_for(StageFinished, lambda done: done.stage == "windows").late_rows


def committed_before(lab: Any, name: str, savepoint: int) -> list[Any]:
    """What a sink has committed before a savepoint, whose own rows a pipeline that is restored from it commits, too."""
    if not lab.committed(name):
        return []
    rows = lab.spark.read.parquet(str(lab.folder / name))
    return lab.rows(rows.where(~F.col("checkpoint").cast("string").startswith(f"{savepoint}-")).drop("checkpoint"))


def test_each_change_divides_the_query_of_the_sources(lab: Any) -> None:
    check_each_change(lab, ended=True)


def check_each_change(lab: Any, ended: bool) -> None:
    """Go on from a savepoint behind the end of the backfill, or before it, with each of the changes."""
    flow = Meeting(lab)
    for file in range(FILES):
        flow.put("history", range(10 * file, 10 * file + 10))
    flow.put("live", range(60, 70))
    savepoint = flow.savepoint((), 60)
    if ended:
        savepoint = flow.savepoint(("history",), 30 * FILES)
    flow.put("live", range(65, 75), plus=1000)  # the window of the first five is open: event time is that of the live feed
    if ended:
        flow.put("history", range(0, 10), plus=BEHIND)  # the backfill has ended
    expected = windows_of(lab.table("history", ROWS).where(f"v < {BEHIND}").unionByName(lab.table("live", ROWS)))
    wanted, before = lab.rows(expected), committed_before(lab, "first/windows", flow.saved)
    assert len(before) < len(wanted)
    for change, heads in CHANGES.items():
        alone = change == "readers" or (ended and change != "between")  # not in the query of the backfill
        flow.restored(savepoint, change, ended, {"history", *heads, *(("plain",) if alone else ())})
        lab.check([row for row in wanted if row not in before], f"{change}/windows")
    lab.check(lab.table("live", ROWS).where("v >= 1000"), "readers/seen")
    raw = lab.difference(lab.table("history", ROWS).where(f"v < {BEHIND}"), "readers/raw")
    assert not (raw.unexpected or raw.duplicated) and bool(raw.missing), raw


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

    flow = Meeting(lab)
    flow.put("left", range(40))
    flow.put("right", range(0, 30, 3), plus=100)
    first = lab.start(pipeline("first", how=StageInput(), instances=["0"]), interval=0.5)
    assert set(first.chains) == {("left", "right", "pairs")}
    first.wait_for(CheckpointDone, lambda done: (done.stages["left"].rows, done.stages["right"].rows) == (120, 30))
    place = first.done("stop", drain=False).url
    first.finished()

    flow.put("right", range(30, 60, 3), plus=100)
    flow.put("left", range(40, 60))
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
