"""Queries of fused sources that a restore divides: also in the middle of the backfill, and where sources meet twice."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted, SavepointDone, StageFinished
from tests.spark.long.test_divided_fused_sources import check_join, committed_before, put
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


@pytest.mark.parametrize("ended", [True, False])
def test_each_change_divides_the_query_of_the_sources(lab: Any, ended: bool) -> None:
    """Go on from a savepoint behind the end of the backfill, or before it, with each of the changes."""
    flow = Meeting(lab)
    for file in range(FILES):
        put(lab, "history", range(10 * file, 10 * file + 10))
    put(lab, "live", range(60, 70))
    savepoint = flow.savepoint((), 60)
    if ended:
        savepoint = flow.savepoint(("history",), 30 * FILES)
    put(lab, "live", range(65, 75), plus=1000)  # the window of the first five is open: event time is that of the live feed
    if ended:
        put(lab, "history", range(0, 10), plus=BEHIND)  # the backfill has ended
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


def test_a_join_of_two_feeds_keeps_both_sides_when_its_query_is_divided(lab: Any) -> None:
    check_join(lab, ["0"])


def test_sources_that_meet_twice_are_divided_at_one_stage(lab: Any) -> None:
    """history and live go on in one query, in which history has ended, and other in a query of its own."""

    def feed(name: str, bounded: bool = False) -> Any:
        def read(context):
            return lab.stream(name, ROWS)

        return (bounded_source if bounded else unbounded_source)(name=name, watermark=("ts", "1 minute"))(read)

    @stage
    def both(history, live):
        return history.unionByName(live)

    @stage(sink=lab.sink("second/seen"))
    def seen(both):
        return both

    def pipeline(name: str, *more: Any) -> Pipeline:
        @stage(sink=lab.sink(f"{name}/windows"))
        def windows(other, both):
            return windows_of(other.unionByName(both))

        return Pipeline(name, [feed("history", bounded=True), feed("live"), feed("other"), both, windows, *more])

    def wait(job: Any, rows: int) -> None:
        job.wait_for(
            CheckpointDone,
            lambda done: (
                done.finished_stages == ("history",) and [done.stages[name].rows for name in ("live", "other")] == [rows, rows]
            ),
        )

    for name, minutes in (("history", range(30)), ("live", range(20, 50)), ("other", range(10, 40))):
        put(lab, name, minutes)
    first = lab.start(pipeline("first"), interval=0.5)
    assert set(first.chains) == {("history", "live", "other", "both", "windows")}
    wait(first, 90)
    place = first.done("stop", drain=False).url
    first.finished()
    put(lab, "history", range(10), plus=BEHIND)
    put(lab, "live", range(45, 75), plus=100)
    put(lab, "other", range(38, 68), plus=100)
    for attempt in range(2):  # the second one goes on from a checkpoint of the divided queries
        options = {"restore_from": place} if attempt == 0 else {}
        second = lab.start(pipeline("second", seen), interval=0.5, **options)
        assert set(second.chains) == {("history", "live", "both"), ("other",), ("windows",), ("seen",)}
        wait(second, 180)
        if attempt == 0:
            second.cancel()
            second.result()
    second.drain()
    second.finished()
    assert not second.wait_for(StageFinished, lambda done: done.stage == "windows").late_rows
    live, other = lab.table("live", ROWS), lab.table("other", ROWS)
    read = lab.table("history", ROWS).where(f"v < {BEHIND}").unionByName(live).unionByName(other)
    before = committed_before(lab, "first/windows", first.of(SavepointDone)[-1].checkpoint.checkpoint_id)
    lab.check([row for row in lab.rows(windows_of(read)) if row not in before], "second/windows")
    lab.check(live.where("v >= 100"), "second/seen")
