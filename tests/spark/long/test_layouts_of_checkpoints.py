"""A checkpoint keeps the queries that it was taken with; what cannot share one is read through channels."""

from __future__ import annotations

from typing import Any

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage
from dagster_checkpoints.spark.job.events import CheckpointDone
from tests.spark.test_fused_sources import ROWS, put, windows_of


def test_checkpoints_keep_their_layout_and_what_cannot_be_fused_is_read_through_channels(lab: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "dagster_checkpoints")
    for file in range(3):
        put(lab, "history", 10 * file)
        put(lab, "again", 10 * file)

    def reads(name: str, fuse: bool | None, distinct: bool = False, between: bool = False) -> Pipeline:
        def once(rows):
            return rows.dropDuplicates(["k", "v"]) if distinct else rows

        @bounded_source(watermark=("ts", "1 minute"))
        def history(context):
            return lab.stream("history", ROWS) if between else once(lab.stream("history", ROWS))

        @bounded_source(watermark=("ts", "1 minute"))
        def again(context):
            return lab.stream("again", ROWS)

        @stage(name="history_rows")
        def passed(history):
            return once(history)

        @stage(sink=lab.sink(name), inputs={"again": StageInput(fuse=fuse)})
        def windows(history_rows, again):
            return windows_of(history_rows.unionByName(again))

        return Pipeline(name, [history, again, passed, windows])

    together, apart = (("history", "again", "history_rows", "windows"),), (("history", "history_rows"), ("again",), ("windows",))
    for name, fuse, distinct in (("never", None, True), ("out", False, False)):
        job = lab.start(reads(name, fuse=fuse, distinct=distinct), interval=0.3)
        assert job.chains == apart
        job.wait_for(CheckpointDone)
        job.cancel()
        job.result()
        caplog.clear()
        job = lab.start(reads(name, fuse=True, distinct=distinct))
        assert job.chains == apart
        job.finished()
        kept = [line for line in caplog.messages if "keep separate queries, as in the checkpoint" in line]
        assert len(kept) == (0 if distinct else 2)  # not told to begin again where that would change nothing
    expected = lab.rows(windows_of(lab.table("history", ROWS).unionByName(lab.table("again", ROWS))))
    lab.check(expected)

    for pipeline, chains, why in (
        (reads("fused", fuse=None), together, ""),
        (
            reads("state", fuse=True, distinct=True),
            apart,
            "'windows' reads 'again' through channels, in spite of fuse=True: 'history'",
        ),
        (reads("between", fuse=None, distinct=True, between=True), apart, "'windows' begins a query of its own: 'history_rows'"),
    ):
        caplog.clear()
        job = lab.start(pipeline)
        assert job.chains == chains
        job.finished()
        said = [line for line in caplog.messages if "fuse=True" in line or "begins a query" in line]
        assert len(said) == (2 if "fuse" in why else 1 if why else 0)
        assert not why or any(why in line and "keeps state" in line for line in said)
    lab.check(expected, "fused")
