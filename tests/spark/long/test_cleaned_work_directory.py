"""Another program deletes files of the work directory during a run: every checkpoint that completes can be restored."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.query import query

ROWS = "k string, ts timestamp, v long"
KINDS = (
    r"hours\.\d/checkpoint/state",
    r"hours\.\d/checkpoint/state/0/1",
    r"hours\.0/checkpoint/state/0/\d/\d+\.(changelog|zip)",
    r"hours\.1/checkpoint/offsets",
    r"pairs\.0/checkpoint/state/0/\d/right-keyToNumValues",
    r"pairs\.0/checkpoint/state/0/0",
    r"pairs\.0/checkpoint/metadata",
    r"live\.0/checkpoint/sources",
    r"live\.0/segments",
    r"rows\.0",
)
"""What is deleted, below `tasks/`: all paths of the pattern."""


def windows_of(frame: DataFrame) -> DataFrame:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def delete(work: Path, kind: str) -> int:
    found = [path for path in list(work.rglob("*")) if re.search(rf"/tasks/{kind}$", str(path))]
    for path in found:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return len(found)


def test_every_checkpoint_that_completes_can_be_restored(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "COMMIT_TIMEOUT_SECONDS", 10.0)  # for an entry of the log that was deleted before it was seen

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("rows"))
    def rows(live):
        return live

    @stage(sink=lab.sink("hours"), instances=("a", "b"), inputs={"rows": StageInput(key="k")})
    def hours(rows):
        return windows_of(rows)

    @stage(sink=lab.sink("pairs"))
    def pairs(rows, live):
        other = live.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"), F.col("v").alias("v2"))
        near = "k = k2 AND v = v2 AND ts2 BETWEEN ts - INTERVAL 1 MINUTE AND ts + INTERVAL 1 MINUTE"
        return rows.join(other, F.expr(near)).select("k", "v", "v2")

    def more() -> int:
        first = next(minutes)
        lab.put("live", ROWS, [(k, lab.at(60 * m), m) for m in range(first, first + 30) for k in "abcd"])
        return 4 * (first + 30)

    def start() -> Any:
        checkpoints = {"tolerable_failed_checkpoints": 2, "retained": 1}
        return lab.start(pipeline, interval=0.5, restart=FixedDelayRestart(20, 0.1), checkpoints=checkpoints)

    def committed(written: int) -> None:
        """Wait until a checkpoint holds all rows, and the checkpoint behind it is there."""
        done = len(job.checkpoints())
        job.wait_until(lambda: any(c.stages["rows"].rows == written for c in job.checkpoints()[done:-1]))

    minutes: Iterator[int] = iter(range(0, 100_000, 30))
    pipeline = Pipeline("cleaned", [live, rows, hours, pairs], chaining=False)
    for kind in KINDS:
        job = start()
        committed(more())
        assert delete(lab.folder / "work", kind), kind
        committed(more())
        job.cancel()
        job.result()
        shutil.rmtree(lab.folder / "work")
    job = start()
    job.wait_until(lambda: len(job.checkpoints()) > 1)
    job.drain()
    job.finished()
    whole = lab.table("live", ROWS)
    lab.check(whole, "rows")
    lab.check(windows_of(whole), "hours")
    lab.check(whole.select("k", "v", F.col("v").alias("v2")), "pairs")
