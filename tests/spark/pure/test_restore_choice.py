"""The start point of a run, chosen from the checkpoints in storage; without Spark."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints import ParquetSink, Pipeline, unbounded_source
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.execution.start_point import is_repeated_start
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.job.job_start import JobStart, StartPoint, choose_start
from dagster_checkpoints.spark.session.spark_version import installed_version
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.errors import CorruptMetadata, SparkVersionChanged
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.storage import CheckpointStorage, open_store


@dataclass(frozen=True)
class Options:
    """The part of a job's options that concerns the start."""

    restore_from: str = "latest"
    allow_non_restored_state: bool = False
    allow_older_checkpoint: bool = False
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM


class Runs:
    """The runs of one pipeline, one after another, as storage sees them."""

    def __init__(self, root: Path) -> None:
        @unbounded_source(sink=ParquetSink(root.parent / "table"))
        def live(context):
            return context.spark.readStream.format("rate").load()

        self.pipeline = Pipeline("numbers", [live])
        self.root = root
        self._number = 0

    @contextmanager
    def run(self) -> Iterator[CheckpointStorage]:
        """A run that owns the pipeline inside the block, and is released without a record of its end."""
        self._number += 1
        with CheckpointStorage(open_store(str(self.root)), "numbers") as storage:
            ownership = storage.acquire(Owner(run_id=f"run-{self._number}", host="here", pid=1), 60.0)
            yield storage
            ownership.release()

    @contextmanager
    def job(self) -> Iterator[CheckpointStorage]:
        """A run that begins a new job."""
        with self.run() as storage:
            assert storage.ownership is not None
            storage.ownership.begin_job(resume=False)
            yield storage

    def choose(self, storage: CheckpointStorage, restore_from: str = "latest", **options: Any) -> StartPoint:
        return choose_start(self.pipeline, storage, Options(restore_from=restore_from, **options))

    def metadata(self, storage: CheckpointStorage, number: int, **fields: Any) -> bytes:
        assert storage.ownership is not None
        task = TaskSnapshot(stages={"live": StageInstanceSnapshot()})
        stages = (StageMetadata("live", 1, ("0",)),)
        values = {"job_id": str(storage.ownership.job_id), "epoch": storage.ownership.epoch, **fields}
        return encode(CheckpointMetadata("numbers", number, stages, (ChainMetadata("live", ("live",), {0: task}),), **values))

    def checkpoint(self, storage: CheckpointStorage, number: int, **fields: Any) -> str:
        ownership = storage.ownership
        assert ownership is not None
        location = storage.write_metadata(number, ownership.epoch, self.metadata(storage, number, **fields))
        ownership.complete(number, location)
        return location

    def stops_savepoint(self, storage: CheckpointStorage, number: int, target: str = "") -> str:
        ownership = storage.ownership
        assert ownership is not None
        directory = storage.savepoint_directory(number, "stop", target)
        location = directory.write_metadata(self.metadata(storage, number, kind="savepoint"), {})
        ownership.complete(number, location, kind="savepoint")
        return location


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "storage")


def test_a_users_savepoint_is_not_deleted_when_the_job_restores_an_older_checkpoint(runs: Runs) -> None:
    with runs.job() as storage:
        runs.checkpoint(storage, 4)
        runs.stops_savepoint(storage, 5)
        runs.checkpoint(storage, 6)
    with runs.run() as storage:
        start = runs.choose(storage, "4")
        assert start.resume and start.next_checkpoint_id == 7
        assert [c.checkpoint_id for c in start.retained] == [4]
        assert [c.checkpoint_id for c in start.passed_over] == [6]


def test_a_claimed_savepoint_that_is_passed_over_is_deleted_by_the_system(runs: Runs) -> None:
    with runs.job() as storage:
        runs.checkpoint(storage, 4)
        runs.stops_savepoint(storage, 5)
    with runs.run() as storage:
        assert storage.ownership is not None
        start = runs.choose(storage, claim_mode=ClaimMode.CLAIM)
        assert start.pointer is not None and start.pointer.claimed
        storage.ownership.begin_job(resume=start.resume, restored=start.pointer)
        assert [c.checkpoint_id for c in runs.choose(storage, "4").passed_over] == [5]


def test_a_claimed_savepoint_stays_claimed_when_the_job_is_resumed_from_it(runs: Runs) -> None:
    with runs.job() as storage:
        runs.stops_savepoint(storage, 5)
    for options in ({"claim_mode": ClaimMode.CLAIM}, {}):
        with runs.run() as storage:
            assert storage.ownership is not None
            start = runs.choose(storage, **options)
            assert start.pointer is not None and start.pointer.claimed
            assert not start.retained[-1].is_savepoint  # deleted when it is subsumed
            storage.ownership.begin_job(resume=start.resume, restored=start.pointer)


@pytest.mark.parametrize("burst", [True, False])
def test_a_run_that_dies_when_its_job_has_begun_has_claimed_its_savepoint(runs: Runs, tmp_path: Path, burst: bool) -> None:
    with runs.job() as storage:
        assert storage.ownership is not None
        runs.stops_savepoint(storage, 5, "" if burst else str(tmp_path / "archive"))
        asked_by: Any = "caught_up" if burst else "request"
        storage.ownership.end_job("FINISHED", keep_checkpoints=False, ended_by="suspend", stop_asked_by=asked_by)
    for number in range(3):
        with runs.run() as storage:
            assert storage.ownership is not None
            claim = ClaimMode.NO_CLAIM if burst or number else ClaimMode.CLAIM
            options = JobOptions(CheckpointConfig(None), NoRestart(), tmp_path, claim_mode=claim)
            starting = JobStart(runs.pipeline, storage, options, lambda event: None, logging.getLogger("run"))
            start = starting.choose(storage.ownership)
            assert start.pointer is not None and start.pointer.claimed and not start.retained[-1].is_savepoint
            assert starting.begin(start) == storage.ownership.job_id
            assert [each.claimed for each in storage.ownership.retained] == [True]


def test_without_a_claim_a_savepoint_stays_the_users(runs: Runs) -> None:
    with runs.job() as storage:
        runs.stops_savepoint(storage, 5)
    with runs.run() as storage:
        start = runs.choose(storage)
        assert start.pointer is not None and not start.pointer.claimed and start.retained[-1].is_savepoint


@pytest.mark.parametrize("asked", ["latest", "5", "location"])
def test_a_job_that_was_stopped_with_a_savepoint_elsewhere_goes_on(runs: Runs, tmp_path: Path, asked: str) -> None:
    """Also if the run that goes on from it dies before its first checkpoint."""
    with runs.job() as storage:
        runs.checkpoint(storage, 4)
        location = runs.stops_savepoint(storage, 5, str(tmp_path / "archive"))
        assert location.startswith("file://")
    for _ in range(2):
        with runs.run() as storage:
            start = runs.choose(storage, location if asked == "location" else asked)
            assert start.resume and start.next_checkpoint_id == 6 and start.pointer is not None and not start.pointer.claimed
            assert [c.checkpoint_id for c in start.retained] == [4, 5] and start.retained[-1].is_savepoint
            assert storage.ownership is not None
            assert storage.ownership.begin_job(resume=start.resume, restored=start.pointer) == 1


@pytest.mark.parametrize("asked", ["5", "chk-5", "location", "url"])
def test_a_checkpoint_of_an_earlier_job_is_refused(runs: Runs, asked: str) -> None:
    with runs.job() as storage:
        location = runs.checkpoint(storage, 5)
    with runs.job() as storage:
        runs.checkpoint(storage, 6)
    with runs.run() as storage:
        wanted = {"location": location, "url": storage.url_of(location)}.get(asked, asked)
        with pytest.raises(NothingToRestoreError, match=r"latest job \(2\), found that .*chk-5-1 is of job 1.*savepoint"):
            runs.choose(storage, wanted)
        assert runs.choose(storage).pointer is not None  # the newest is not


def test_a_savepoint_of_an_earlier_job_begins_a_new_one(runs: Runs) -> None:
    with runs.job() as storage:
        location = runs.stops_savepoint(storage, 5)
    with runs.job() as storage:
        runs.checkpoint(storage, 6)
    with runs.run() as storage:
        start = runs.choose(storage, location)
        assert not start.resume and start.next_checkpoint_id == 6
        assert [c.checkpoint_id for c in start.passed_over] == [6]


def test_a_new_job_from_a_savepoint_warns_that_no_rows_are_taken_back(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of a savepoint, restored by its URL, is not known to be of this job: its later rows would be written twice."""
    with runs.job() as storage:
        own = runs.stops_savepoint(storage, 5)
        runs.checkpoint(storage, 6)
    copy = tmp_path / "copied" / "savepoint-5"
    shutil.copytree(runs.root / "numbers" / own, copy)
    for asked, warns in ((own, False), ("latest", False), (str(copy), True)):
        with runs.run() as storage:
            assert storage.ownership is not None
            options = JobOptions(CheckpointConfig(None), NoRestart(), tmp_path, restore_from=asked)
            starting = JobStart(runs.pipeline, storage, options, lambda event: None, logging.getLogger("run"))
            assert starting.choose(storage.ownership).resume != warns
            assert (f"restore_from: {asked!r} begins a new job" in caplog.text) == warns


def test_a_retry_goes_on_although_another_run_has_continued_from_its_savepoint(runs: Runs, tmp_path: Path) -> None:
    """The run that has named the savepoint dies before its first checkpoint; another one goes on, and completes some."""
    with runs.job() as storage:
        savepoint = runs.stops_savepoint(storage, 5, str(tmp_path / "archive"))
    with runs.job() as storage:
        runs.checkpoint(storage, 6)
    for asked in (savepoint, "latest"):
        with runs.run() as storage:
            assert storage.ownership is not None
            start = runs.choose(storage, asked)
            assert start.pointer is not None and start.pointer.location == savepoint
            storage.ownership.begin_job(resume=start.resume, restored=start.pointer, named=asked != "latest")
    with runs.run() as storage:
        assert storage.ownership is not None
        assert is_repeated_start(savepoint, {"run-3"}, storage.ownership.previous)
        storage.ownership.begin_job(resume=False)
    with runs.run() as storage:
        assert storage.ownership is not None
        assert storage.ownership.previous.job.begun_by == "run-5", "a new start is a choice"


def test_a_checkpoint_of_a_spark_whose_state_is_not_read_is_refused_or_passed_over(runs: Runs) -> None:
    with runs.job() as storage:
        older = runs.checkpoint(storage, 1, spark_version=installed_version())
        runs.checkpoint(storage, 2, spark_version="4.9.0")
    with runs.run() as storage:
        with pytest.raises(SparkVersionChanged, match=r"Spark 4\.9\.0 has written checkpoint 2"):
            runs.choose(storage)
        start = runs.choose(storage, allow_older_checkpoint=True)
        assert start.pointer is not None and start.pointer.location == older


def test_a_run_warns_of_an_older_checkpoint_that_cannot_be_read(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runs.job() as storage:
        damaged = runs.checkpoint(storage, 5)
        runs.checkpoint(storage, 6)
    for warns in (False, True):
        with runs.run() as storage:
            assert storage.ownership is not None
            options = JobOptions(CheckpointConfig(None), NoRestart(), tmp_path)
            start = JobStart(runs.pipeline, storage, options, lambda event: None, logging.getLogger("run"))
            assert start.choose(storage.ownership).pointer is not None
            assert ("Not every retained checkpoint" in caplog.text) == warns
        (runs.root / "numbers" / damaged / "_metadata").write_bytes(b"DCKP damaged")


def test_one_unreadable_checkpoint_keeps_the_files_of_all(runs: Runs) -> None:
    with runs.job() as storage:
        runs.checkpoint(storage, 5)
        damaged = runs.checkpoint(storage, 6)
    (runs.root / "numbers" / damaged / "_metadata").write_bytes(b"DCKP damaged")
    with runs.run() as storage:
        with pytest.raises(CorruptMetadata, match="chk-6-1"):
            runs.choose(storage)
        older = runs.choose(storage, allow_older_checkpoint=True)
        assert older.pointer is not None and older.pointer.checkpoint_id == 5
        assert not older.sweep
        assert [c.checkpoint_id for c in older.passed_over] == [6]
