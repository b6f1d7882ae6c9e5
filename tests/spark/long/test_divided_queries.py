"""Queries of fused sources that a restore divides: also in the middle of the backfill, and where sources meet twice."""

from __future__ import annotations

from typing import Any

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, SavepointDone, StageFinished
from tests.spark.test_divided_fused_sources import BEHIND, Meeting, check_each_change, check_join, committed_before
from tests.spark.test_fused_sources import ROWS, windows_of


def test_each_change_divides_the_query_before_a_source_has_ended(lab: Any) -> None:
    check_each_change(lab, ended=False)


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

    flow = Meeting(lab)
    for name, minutes in (("history", range(30)), ("live", range(20, 50)), ("other", range(10, 40))):
        flow.put(name, minutes)
    first = lab.start(pipeline("first"), interval=0.5)
    assert set(first.chains) == {("history", "live", "other", "both", "windows")}
    wait(first, 90)
    place = first.done("stop", drain=False).url
    first.finished()
    flow.put("history", range(10), plus=BEHIND)
    flow.put("live", range(45, 75), plus=100)
    flow.put("other", range(38, 68), plus=100)
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
