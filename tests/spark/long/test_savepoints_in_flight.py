"""Savepoints of a job that runs on: they do not disturb it, and each restores exactly its own state, from any directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.errors import CorruptStateFile, MissingSavepoint, MissingStateFile
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.spark.job.events import JobStarted, SavepointDone
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.errors import CorruptMetadata
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage import open_store

ROWS = "k string, ts timestamp, v long"
PER_FILE = 40


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


class Scene:
    """A pipeline over one feed, in as many places as a test wants: each place has its own store and sinks."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.files = 0

    @property
    def rows(self) -> int:
        return self.files * PER_FILE

    def more(self, files: int = 1) -> None:
        for _ in range(files):
            minutes = range(self.files * PER_FILE, (self.files + 1) * PER_FILE)
            self.lab.put("live", ROWS, [("ab"[m % 2], self.lab.at(60 * m), m) for m in minutes])
            self.files += 1

    def pipeline(self, place: str) -> Pipeline:
        lab = self.lab

        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context):
            return lab.stream("live", ROWS)

        @stage(sink=lab.sink(f"{place}/rows"))
        def rows(live):
            return live

        @stage(sink=lab.sink(f"{place}/hours"))
        def hours(rows):
            return in_hours(rows)

        return Pipeline("flight", [live, rows, hours], chaining=False)

    def start(self, place: str = "home", **options: Any) -> Any:
        """Without periodic checkpoints."""
        storage = self.lab.storage("flight", open_store(str(self.lab.folder / place / "store")))
        return self.lab.start(self.pipeline(place), interval=3600.0, storage=storage, **options)

    def root(self, place: str = "home") -> Path:
        return Path(self.lab.folder / place / "store" / "flight")

    def state(self, place: str = "home") -> Any:
        return json.loads((self.root(place) / "state.json").read_text())

    def read_all(self, job: Any) -> None:
        job.wait_until(lambda: job.execution.rows().get("rows") == self.rows)

    def committed(self, place: str = "home") -> int:
        return int(self.lab.count(f"{place}/rows"))

    def checkpoint(self, job: Any, place: str = "home") -> Any:
        """Take a checkpoint, after which all rows are committed."""
        self.read_all(job)
        answer = job.done("checkpoint")
        job.wait_until(lambda: self.committed(place) == self.rows)
        return answer

    def check(self, place: str = "home") -> None:
        self.lab.check(self.lab.table("live", ROWS), f"{place}/rows")
        self.lab.check(in_hours(self.lab.table("live", ROWS)), f"{place}/hours")


@pytest.fixture
def scene(lab: Any) -> Scene:
    return Scene(lab)


def cancel(job: Any) -> None:
    """End a run like a crash: only a savepoint can use the pre-committed rows."""
    job.cancel()
    assert job.result().status == "CANCELED"


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(bytes(data))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def refusal(job: Any) -> BaseException:
    """The error of a run that must not start any task."""
    try:
        error: BaseException | None = job.result().error
    except Exception as raised:
        error = raised
    assert error is not None and not job.of(JobStarted), job.story()
    return error


def test_a_savepoint_does_not_disturb_the_job_and_can_be_restored_after_a_crash_and_later_checkpoints(scene: Scene) -> None:
    lab = scene.lab
    scene.more(2)
    job = scene.start()
    scene.read_all(job)
    early = job.done("savepoint", name="early")
    far = job.done("savepoint", name="far", target=str(lab.folder / "elsewhere"))
    assert (early.checkpoint_id, far.checkpoint_id) == (1, 2)
    assert early.location.startswith("savepoints/savepoint-1-early-") and far.location == far.url
    assert "/elsewhere/savepoint-2-far-" in far.url
    assert [(done.stops, done.location) for done in job.of(SavepointDone)] == [("", early.location), ("", far.location)]
    # They commit nothing, no restart uses them, and no checkpoint has their ids.
    assert scene.committed() == 0 and lab.count("home/hours") == 0
    state = scene.state()
    assert (state["newest"], state["retained"], state["highest_checkpoint_id"]) == (None, [], 2)
    metadata = decode((scene.root() / early.location / "_metadata").read_bytes(), "")
    held = [
        file
        for task in metadata.chains
        for s in task.tasks.values()
        for one in s.stages.values()
        for file in one.transaction_files
    ]
    assert held, "the savepoint does not hold the uncommitted rows"
    scene.more()
    assert scene.checkpoint(job).checkpoint_id == 3
    assert [pointer["checkpoint_id"] for pointer in scene.state()["retained"]] == [3]
    scene.more()
    scene.read_all(job)
    cancel(job)

    # Damaged copies of it are refused by name, before anything starts, and disturb no other run.
    saved = scene.root() / early.location
    state_file = min((saved / "state").iterdir(), key=lambda file: -file.stat().st_size).name
    damages: list[tuple[Callable[[Path], object], str, type[Exception]]] = [
        (truncate, "_metadata", CorruptMetadata),
        (flip_a_byte, "_metadata", CorruptMetadata),
        (Path.unlink, "_metadata", MissingSavepoint),
        (flip_a_byte, f"state/{state_file}", CorruptStateFile),
        (Path.unlink, f"state/{state_file}", MissingStateFile),
    ]
    for number, (damage, file, expected) in enumerate(damages):
        copy = lab.folder / "damaged" / f"copy-{number}"
        shutil.copytree(saved, copy)
        damage(copy / file)
        error = refusal(scene.start(restore_from=str(copy)))
        assert type(error) is expected, error
        assert str(copy) in str(error) and Path(file).name in str(error), error
    missing = refusal(scene.start(restore_from="7"))
    assert isinstance(missing, NothingToRestoreError) and early.location in str(missing)

    # Without a named savepoint the job continues from its latest checkpoint.
    again = scene.start()
    assert again.wait_for(JobStarted).restored_checkpoint == 3
    assert scene.checkpoint(again).checkpoint_id == 4
    scene.more()
    assert scene.checkpoint(again).checkpoint_id == 5
    cancel(again)

    # A restore of the savepoint, in the same job: rows of later checkpoints are taken back, and written again.
    for restore_from in ("1", saved.as_uri()):
        back = scene.start(restore_from=restore_from)
        started = back.wait_for(JobStarted)
        assert (started.job_id, started.restored_checkpoint, started.restored_location) == (1, 1, early.location)
        scene.read_all(back)
        assert scene.committed() == 2 * PER_FILE
        if restore_from == "1":
            cancel(back)
    assert scene.checkpoint(back).checkpoint_id == 7, "each run that goes back takes an id of its own"
    back.wait_until(lambda: [p["checkpoint_id"] for p in scene.state()["retained"]] == [7])
    back.done("stop", drain=True)
    back.finished()
    scene.check()
    assert (saved / "_metadata").exists() and any((lab.folder / "elsewhere").glob("savepoint-2-far-*/_metadata"))


def test_a_savepoint_that_was_copied_elsewhere_is_restored_there_and_may_then_be_claimed_or_deleted(scene: Scene) -> None:
    lab = scene.lab
    scene.more(2)
    job = scene.start()
    scene.read_all(job)
    saved = job.done("savepoint", name="copied", target=str(lab.folder / "elsewhere"))
    cancel(job)
    assert scene.committed() == 0
    original = Path(saved.url.removeprefix("file://"))
    lent, given = (lab.folder / "copies" / name for name in ("lent", "given"))
    for copy in (lent, given):
        shutil.copytree(original, copy)
    shutil.rmtree(original)
    shutil.rmtree(lab.folder / "home")  # nothing is needed but the savepoint

    # Another store, other sinks: the savepoint brings the rows that were uncommitted when it was taken.
    away = scene.start("away", restore_from=str(lent))
    started = away.wait_for(JobStarted)
    assert (started.job_id, started.restored_checkpoint) == (1, saved.checkpoint_id)
    away.wait_until(lambda: scene.committed("away") == scene.rows)
    scene.more()
    assert scene.checkpoint(away, "away").checkpoint_id == saved.checkpoint_id + 1
    # It is the user's: after the first checkpoint the job does not need it any more.
    shutil.rmtree(lent)
    scene.more()
    scene.checkpoint(away, "away")
    cancel(away)
    scene.more()
    resumed = scene.start("away")
    started = resumed.wait_for(JobStarted)
    assert started.restored_checkpoint == saved.checkpoint_id + 2
    assert started.restored_location is not None and started.restored_location.startswith("checkpoints/")
    scene.read_all(resumed)
    resumed.done("stop", drain=True)
    resumed.finished()
    scene.check("away")

    # Claimed, it is the system's: deleted when two newer checkpoints are retained, and not before.
    claimed = scene.start("third", restore_from=str(given), claim_mode=ClaimMode.CLAIM)
    claimed.wait_until(lambda: scene.committed("third") == 2 * PER_FILE)
    first = scene.checkpoint(claimed, "third")
    kept = [pointer["checkpoint_id"] for pointer in scene.state("third")["retained"]]
    assert kept == [first.checkpoint_id, saved.checkpoint_id] and (given / "_metadata").exists()
    scene.more()
    second = scene.checkpoint(claimed, "third")
    claimed.wait_until(lambda: not given.exists())
    newer = [second.checkpoint_id, first.checkpoint_id]
    claimed.wait_until(lambda: [pointer["checkpoint_id"] for pointer in scene.state("third")["retained"]] == newer)
    cancel(claimed)
    scene.more()
    last = scene.start("third")
    assert last.wait_for(JobStarted).restored_checkpoint == second.checkpoint_id
    scene.read_all(last)
    last.done("stop", drain=True)
    last.finished()
    scene.check("third")
