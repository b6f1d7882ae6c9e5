"""At-least-once: barriers block nothing, and no row is lost; a backlog keeps periodic checkpoints away until it has ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dagster_checkpoints.pipeline import Pipeline, Stage, stage, unbounded_source
from dagster_checkpoints.pipeline.stages import StageKind
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted, StageFinished

ROWS = "k string, ts timestamp, v long"
PER_FILE = 40


class HeldHistory(Stage):
    """A bounded source whose first micro-batch waits until a file exists."""

    kind = StageKind.BOUNDED_SOURCE

    def __init__(self, folder: Path, free: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder
        self.free = free

    def transform(self, context: Any) -> Any:
        return context.spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).parquet(str(self.folder))

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        while not self.free.exists():
            time.sleep(0.02)
        return batch


def test_no_row_is_lost_and_a_backlog_postpones_checkpoints(lab: Any) -> None:
    free = lab.folder / "free"
    written = {"history": 0, "live": 0}

    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("rows"))
    def rows(history, live):
        return history.unionByName(live)

    history = HeldHistory(lab.input("history"), free, name="history")
    pipeline = Pipeline("atleast", [history, live, rows], chaining=False)

    def more(source: str, files: int) -> None:
        for _ in range(files):
            first = written[source]
            written[source] += PER_FILE
            lab.put(source, ROWS, [(source, lab.at(60 * m), m) for m in range(first, first + PER_FILE)])

    def start() -> Any:
        return lab.start(
            pipeline, interval=0.2, checkpoints={"mode": "at_least_once", "interval_during_backlog": 0.0, "max_concurrent": 3}
        )

    def read_all(job: Any) -> None:
        job.wait_until(lambda: all(job.execution.rows().get(name) == rows for name, rows in written.items()))

    more("history", 2)
    more("live", 2)
    job = start()
    for _ in range(3):
        job.wait_until(lambda: job.execution.rows().get("rows") == written["live"])
        more("live", 1)
    assert job.checkpoints() == []  # the third file was read several intervals after all tasks ran
    free.touch()
    job.wait_for(StageFinished, lambda event: event.stage == "history")
    more("live", 3)
    read_all(job)
    done = job.wait_for(CheckpointDone, lambda event: event.stages["live"].rows == written["live"])
    more("live", 1)
    job.cancel()
    job.result()

    again = start()
    assert (again.wait_for(JobStarted).restored_checkpoint or 0) >= done.checkpoint_id
    more("live", 2)
    read_all(again)
    again.drain()
    again.finished()
    table = lab.table("history", ROWS).unionByName(lab.table("live", ROWS))
    difference = lab.difference(table, "rows")
    assert difference.missing == difference.unexpected == ()
