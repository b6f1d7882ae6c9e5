"""max_concurrent: several checkpoints in progress at the same time, also when an older one takes longer than a newer one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, CheckpointNotDone, JobStarted, StageFinished
from dagster_checkpoints.spark.snapshots.uploads import SnapshotUploader

ROWS = "k string, ts timestamp, v long"
PER_FILE = 40


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


class Scene:
    """A backfill and a feed that meet in windows; a sink in the middle, and one at the end."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.files = 0

        @bounded_source(watermark=("ts", "1 minute"))
        def history(context):
            return lab.stream("history", ROWS)

        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context):
            return lab.stream("live", ROWS)

        @stage(sink=lab.sink("rows"))
        def rows(history, live):
            return history.unionByName(live)

        @stage(sink=lab.sink("hours"))
        def hours(rows):
            return in_hours(rows)

        self.pipeline = Pipeline("concurrent", [history, live, rows, hours], chaining=False)

    def more(self, source: str = "live") -> None:
        minutes = range(self.files * PER_FILE, (self.files + 1) * PER_FILE)
        self.lab.put(source, ROWS, [("ab"[m % 2], self.lab.at(60 * m), m) for m in minutes])
        self.files += 1

    def start(self) -> Any:
        settings = {"max_concurrent": 3, "initial_delay": 0.0, "retained": 1}
        return self.lab.start(self.pipeline, interval=0.3, checkpoints=settings, upload_threads=24, status_seconds=0.1)

    def read_all(self, job: Any) -> None:
        job.wait_until(lambda: job.execution.rows().get("rows") == self.files * PER_FILE)

    def pending(self) -> list[int]:
        status = self.lab.control("concurrent").status()
        return [each.checkpoint_id for each in status.pending]


class SlowUploads:
    """Holds the uploads of chosen checkpoints until a test releases them.

    Attributes:
        waiting: ids of checkpoints of which at least one upload is or was held.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waiting: set[int] = set()
        self._held: set[int] = set()
        self._changed = threading.Condition()
        store = SnapshotUploader._store

        def slow(uploader: SnapshotUploader, barrier: Any, pinned: Any) -> Any:
            with self._changed:
                if barrier.checkpoint_id in self._held:
                    self.waiting.add(barrier.checkpoint_id)
                    assert self._changed.wait_for(lambda: barrier.checkpoint_id not in self._held, 120.0), "never released"
            return store(uploader, barrier, pinned)

        patch.setattr(SnapshotUploader, "_store", slow)

    def hold_from(self, checkpoint_id: int) -> None:
        with self._changed:
            self._held = set(range(checkpoint_id, checkpoint_id + 1000))

    def let_go(self, *ids: int) -> None:
        """Release the uploads of these checkpoints, or of all."""
        with self._changed:
            self._held = self._held - set(ids) if ids else set()
            self._changed.notify_all()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowUploads]:
    uploads = SlowUploads(monkeypatch)
    yield uploads
    uploads.let_go()


def test_a_newer_checkpoint_overtakes_older_ones_and_is_restored_exactly(lab: Any, slow: SlowUploads) -> None:
    scene = Scene(lab)
    for _ in range(3):
        scene.more("history")
    job = scene.start()
    job.wait_for(StageFinished, lambda event: event.stage == "history")
    slow.hold_from(job.checkpoints()[-1].checkpoint_id + 2)
    job.wait_until(scene.pending)
    scene.more()
    # Three at a time, none of which can be stored, and no fourth one; the newest is stored first.
    job.wait_until(lambda: len(scene.pending()) == 3 and slow.waiting.issuperset(scene.pending()))
    older, middle, newest = scene.pending()
    slow.let_go(newest)
    job.wait_for(CheckpointDone, lambda event: event.checkpoint_id == newest)
    for overtaken in (older, middle):
        failure = job.wait_for(CheckpointNotDone, lambda event, checkpoint_id=overtaken: event.checkpoint_id == checkpoint_id)
        assert failure.reason == "CHECKPOINT_SUBSUMED"
    # The uploads of the slow ones end too late: their files are deleted, except those that the newest one names.
    slow.let_go(older, middle)
    scene.more()
    scene.read_all(job)
    job.wait_until(lambda: len(scene.pending()) == 3)
    assert not {older, middle, newest} & set(scene.pending())
    job.cancel()
    slow.let_go()
    assert job.result().status == "CANCELED"
    assert {event.reason for event in job.of(CheckpointNotDone)} <= {"CHECKPOINT_SUBSUMED", "CHECKPOINT_COORDINATOR_SHUTDOWN"}

    again = scene.start()
    assert again.wait_for(JobStarted).restored_checkpoint == newest
    scene.more()
    scene.read_all(again)
    again.drain()
    again.finished()
    table = lab.table("history", ROWS).unionByName(lab.table("live", ROWS))
    lab.check(table, "rows")
    lab.check(in_hours(table), "hours")


def test_the_job_ends_while_an_older_checkpoint_is_still_being_stored(lab: Any, slow: SlowUploads) -> None:
    scene = Scene(lab)
    scene.more("history")
    scene.more()
    job = scene.start()
    job.wait_for(CheckpointDone)
    slow.hold_from(job.checkpoints()[-1].checkpoint_id + 2)
    job.wait_until(lambda: len(scene.pending()) == 3 and slow.waiting.issuperset(scene.pending()))
    oldest = scene.pending()[0]
    scene.read_all(job)  # a drain ends sources where they are
    job.drain()
    slow.let_go(*range(oldest + 1, oldest + 1001))
    job.wait_for(StageFinished, lambda event: event.stage == "hours")
    slow.let_go()
    job.finished()
    table = lab.table("history", ROWS).unionByName(lab.table("live", ROWS))
    lab.check(table, "rows")
    lab.check(in_hours(table), "hours")
