"""The checkpoints that a run may start from: the newest, an older, a damaged one; and the checkpoints that storage keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.errors import CorruptStateFile, MissingStateFile
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.state.errors import CorruptMetadata, UnknownMetadataVersion
from dagster_checkpoints.state.metadata_file import _header, decode

ROWS = "k string, ts timestamp, v long"
FILES = 4
PER_FILE = 20
RETAINED = 3


def take_checkpoint(job: Any) -> Any:
    before = len(job.checkpoints())
    job.wait_until(lambda: job.execution.coordinator is not None and bool(job.execution.coordinator.roots))
    job.ask("checkpoint")
    job.wait_until(lambda: len(job.checkpoints()) > before)
    return job.checkpoints()[-1]


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


@dataclass
class Scene:
    """A pipeline that was cancelled after several checkpoints, each after one more input file."""

    lab: Any
    pipeline: Pipeline
    completed: list[Any]

    @property
    def root(self) -> Path:
        return Path(self.lab.folder / "store" / "kept")

    def metadata(self, done: Any) -> Any:
        return decode((self.root / done.location / "_metadata").read_bytes(), done.location)

    def start(self, **options: Any) -> Any:
        return self.lab.start(self.pipeline, interval=3600.0, checkpoints={"retained": RETAINED}, **options)


def put(lab: Any, number: int) -> None:
    lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(number * PER_FILE, (number + 1) * PER_FILE)])


@pytest.fixture
def scene(lab: Any) -> Scene:
    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("rows", at_new_start="keep"))
    def rows(live):
        return live

    @stage(sink=lab.sink("hours", at_new_start="keep"))
    def hours(rows):
        return in_hours(rows)

    made = Scene(lab, Pipeline("kept", [live, rows, hours], chaining=False), [])
    put(lab, 0)
    job = made.start()
    for number in range(FILES):
        wanted = PER_FILE * (number + 1)
        job.wait_until(lambda wanted=wanted: job.execution.rows().get("rows", 0) == wanted)
        made.completed.append(take_checkpoint(job))
        if number + 1 < FILES:
            put(lab, number + 1)
    job.cancel()
    assert job.result().status == "CANCELED"
    return made


def check_retention(scene: Scene) -> None:
    kept = scene.completed[-RETAINED:]
    assert {folder.name for folder in (scene.root / "checkpoints").iterdir()} == {Path(d.location).name for d in kept}
    named = {hash_ for done in kept for hash_ in scene.metadata(done).files()}
    assert {file.name for file in (scene.root / "shared").iterdir()} == named


def only_of_the_newest(scene: Scene) -> Path:
    """A state file that the newest checkpoint names and the one before does not."""
    newest, before = (scene.metadata(done).files() for done in (scene.completed[-1], scene.completed[-2]))
    return Path(scene.root / "shared" / min(newest - before))


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(bytes(data))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def raise_the_version(file: Path) -> None:
    body = file.read_bytes().partition(b"\n")[2]
    file.write_bytes(_header(999, body.removesuffix(b"\n")) + b"\n" + body)


def damage(scene: Scene, act: Callable[[Path], None], what: str) -> Path:
    newest = scene.root / scene.completed[-1].location / "_metadata"
    file = newest if what == "metadata" else only_of_the_newest(scene)
    act(file)
    return file


def refusal(scene: Scene, **options: Any) -> BaseException:
    """The error of a run that must not start any task."""
    job = scene.start(**options)
    try:
        error = job.result().error
    except Exception as raised:
        error = raised
    assert error is not None and not job.of(JobStarted), job.story()
    return error


def test_damaged_checkpoints_are_refused_by_name_and_older_ones_tried_only_if_the_user_says_so(scene: Scene) -> None:
    """Also: sinks take back the rows of later checkpoints, and a new checkpoint leads to the deletion of the damaged one."""
    lab = scene.lab
    check_retention(scene)
    pristine = lab.folder / "pristine"
    shutil.copytree(lab.folder / "store", pristine)

    def restore_storage() -> None:
        shutil.rmtree(lab.folder / "store")
        shutil.copytree(pristine, lab.folder / "store")

    damages: list[tuple[Callable[[Path], None], str, type[Exception]]] = [
        (truncate, "metadata", CorruptMetadata),
        (flip_a_byte, "metadata", CorruptMetadata),
        (raise_the_version, "metadata", UnknownMetadataVersion),
        (Path.unlink, "state", MissingStateFile),
        (flip_a_byte, "state", CorruptStateFile),
    ]
    for act, what, expected in damages:
        restore_storage()
        file = damage(scene, act, what)
        error = refusal(scene)
        assert type(error) is expected, error
        assert (file.name if what == "state" else scene.completed[-1].location) in str(error)

    older = scene.start(allow_older_checkpoint=True)  # the last damage still exists
    started = older.wait_for(JobStarted)
    assert started.restored_checkpoint == scene.completed[-2].checkpoint_id
    put(lab, FILES)
    older.wait_until(lambda: older.execution.rows().get("rows", 0) == PER_FILE * (FILES + 1))
    done = take_checkpoint(older)
    assert done.checkpoint_id == scene.completed[-1].checkpoint_id + 1
    lab.check(lab.table("live", ROWS), "rows")
    older.wait_until(lambda: not (scene.root / scene.completed[-1].location / "_metadata").exists())
    scene.completed[-1:] = [done]
    older.cancel()
    assert older.result().status == "CANCELED"
    check_retention(scene)

    # The next start deletes files of a crashed run that no checkpoint names.
    orphan = scene.root / "shared" / ("0" * 64)
    orphan.write_bytes(b"of a run that was killed while it uploaded")
    last = scene.start()
    last.wait_until(lambda: not orphan.exists())
    last.wait_until(lambda: last.execution.rows().get("rows", 0) == PER_FILE * (FILES + 1))
    last.drain()
    last.finished()
    lab.check(lab.table("live", ROWS), "rows")
    lab.check(in_hours(lab.table("live", ROWS)), "hours")
    left = {path.relative_to(scene.root).parts[0] for path in scene.root.rglob("*") if path.is_file()}
    assert left == {"state.json", "status.json", "history", "report.html"}, "a finished job leaves no checkpoint"


def test_a_run_may_name_the_checkpoint_it_starts_from_or_none(scene: Scene) -> None:
    lab = scene.lab
    oldest = scene.completed[-RETAINED]
    given_up = scene.completed[0].checkpoint_id
    error = refusal(scene, restore_from=str(given_up))
    assert isinstance(error, NothingToRestoreError)
    assert all(str(done.checkpoint_id) in str(error) for done in scene.completed[-RETAINED:])

    everything = PER_FILE * FILES
    for restore_from in (f"chk-{oldest.checkpoint_id}", lab.storage("kept").url_of(oldest.location)):
        job = scene.start(restore_from=restore_from)
        assert job.wait_for(JobStarted).restored_checkpoint == oldest.checkpoint_id
        job.wait_until(lambda job=job: job.execution.rows().get("rows", 0) == everything)
        if restore_from.startswith("chk-"):
            job.cancel()  # before its first checkpoint: the next run chooses again
            assert job.result().status == "CANCELED"
    take_checkpoint(job)
    lab.check(lab.table("live", ROWS), "rows")
    job.cancel()
    assert job.result().status == "CANCELED"

    anew = scene.start(restore_from="none")
    started = anew.wait_for(JobStarted)
    assert (started.restored_checkpoint, started.job_id) == (None, 2)
    anew.wait_until(lambda: anew.execution.rows().get("rows", 0) == everything)
    assert take_checkpoint(anew).checkpoint_id == 1
    anew.drain()
    anew.finished()
    twice = lab.table("live", ROWS).unionByName(lab.table("live", ROWS))  # the sink appends: the user asked for it
    lab.check(twice, "rows")
