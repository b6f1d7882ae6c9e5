"""Failures that a job survives, or does not: a stage that raises, unavailable storage."""

from __future__ import annotations

import re
import shutil
import time
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.control.history import read_history
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.errors import StorageUnavailable
from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.errors import JobFailedError, StageFailedError
from dagster_checkpoints.spark.job import storage_driver
from dagster_checkpoints.spark.job.events import (
    CheckpointDone,
    CheckpointNotDone,
    JobRestarting,
    JobStarted,
    PipelineAcquired,
    QueryStarted,
    StageFinished,
)
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.ownership import Ownership

ROWS = "k string, ts timestamp, v long"


def take_checkpoint(job: Any) -> Any:
    before = len(job.checkpoints())
    job.wait_until(lambda: job.execution.coordinator is not None and bool(job.execution.coordinator.roots))
    job.ask("checkpoint")
    job.wait_until(lambda: len(job.checkpoints()) > before)
    return job.checkpoints()[-1]


def check_history(job: Any, storage: CheckpointStorage, status: str, ended_by: str = "") -> None:
    """The history, and the page, have every checkpoint and every restart of a job that has ended."""
    epoch = job.of(PipelineAcquired)[0].epoch
    with storage:
        entries, problems = read_history(storage)
        written = storage.store.get(storage.layout.report).decode()
    assert problems == ()
    own = [entry for entry in entries.checkpoints if entry.epoch == epoch]
    assert [entry.checkpoint_id for entry in own if entry.status == "completed"] == [
        done.checkpoint_id for done in job.checkpoints()
    ]
    failed = [(event.checkpoint_id, event.reason) for event in job.of(CheckpointNotDone) if event.checkpoint_id is not None]
    kept = [(entry.checkpoint_id, entry.reason) for entry in own if entry.status == "failed"]
    assert kept[: len(failed)] == failed
    assert {reason for _, reason in kept[len(failed) :]} <= {"CHECKPOINT_COORDINATOR_SHUTDOWN"}, "no event reports these"
    for entry in own:
        names = [part.name for vertex in entry.vertices for part in vertex.instances if part.measured is not None]
        assert len(names) == entry.acknowledged <= entry.expected
    events = [event for event in entries.events if event.epoch == epoch]
    assert [event.attempt for event in events if event.kind == "restarting"] == [each.attempt for each in job.of(JobRestarting)]
    assert [event.checkpoint_id for event in events if event.kind == "job_started"] == [
        started.restored_checkpoint for started in job.of(JobStarted)
    ]
    assert events[0].kind == "run_started" and events[0].settings["interval"] is not None
    assert (events[-1].kind, events[-1].status, events[-1].ended_by) == ("run_ended", status, ended_by)
    rows = [sample.stages[stage].rows for sample in entries.samples if sample.epoch == epoch for stage in sample.stages]
    assert any(rows)
    assert f'"checkpoint_id":{own[-1].checkpoint_id},"epoch":{epoch}' in written and "the run has ended" in written


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def live_hours(lab: Any) -> list[Stage]:
    """A source without an end, and its hours."""

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("hours"))
    def hours(live):
        return in_hours(live)

    return [live, hours]


class Fragile(Stage):
    """Raises while a file exists."""

    def __init__(self, fault: Any, **options: Any) -> None:
        super().__init__(**options)
        self.fault = fault

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        if self.fault.exists():
            if self.fault.read_text() == "once":
                self.fault.unlink()
            raise ValueError("a plane without wings")  # the user's own line
        return batch


def test_no_checkpoint_completes_without_the_state_that_was_deleted(lab: Any) -> None:
    """By a program that cleans the work directory: behind a batch and behind a restore, each in front of a checkpoint."""
    minutes = iter(range(0, 1000, 40))

    def more() -> None:
        first = next(minutes)
        lab.put("live", ROWS, [(k, lab.at(60 * m), m) for m in range(first, first + 40) for k in "ab"])

    def refused_without(name: str, job: Any) -> str:
        for found in list((lab.folder / "work").rglob(f"checkpoint/{name}")):
            shutil.rmtree(found) if found.is_dir() else found.unlink()
        failed = len(job.of(CheckpointNotDone))
        job.ask("checkpoint")
        job.wait_until(lambda: len(job.of(CheckpointNotDone)) > failed)
        said = str(job.of(CheckpointNotDone)[-1].message)
        return str(job.wait_for(JobRestarting).cause) if "is FAILED" in said else said  # a batch was due, and has found it first

    no_state = "expected the state of 1 stateful operators, found no version in ['state/0']: another program has"

    more()
    options: Any = {"interval": 3600.0, "restart": FixedDelayRestart(9, 0.1)}
    job = lab.start(Pipeline("cleaned", live_hours(lab)), **options)
    job.wait_until(lambda: job.execution.rows().get("live") == 80)
    take_checkpoint(job)
    more()
    job.wait_until(lambda: job.execution.rows().get("live") == 160)
    assert no_state in refused_without("state", job)
    more()
    cause = job.wait_for(JobRestarting).cause
    assert "the work directory cannot be used" in cause and "/state/0/" in cause
    job.wait_until(lambda: job.execution.rows().get("live") == 240)
    job.wait_until(lambda: job.execution.rows().get("hours") == 2)
    take_checkpoint(job)
    job.cancel()
    job.result()

    job = lab.start(Pipeline("cleaned", live_hours(lab)), **options)
    job.wait_for(QueryStarted)
    assert re.search("the work directory cannot be used: .* found: .*/checkpoint/metadata", refused_without("metadata", job))
    job.cancel()
    job.result()

    job = lab.start(Pipeline("cleaned", live_hours(lab)), **options)
    job.wait_for(QueryStarted)
    found = refused_without("state", job)
    assert no_state in found or ("the work directory cannot be used" in found and "/state/0/" in found)
    more()
    job.wait_for(JobRestarting)
    job.drain()
    job.finished()
    lab.check(in_hours(lab.table("live", ROWS)), "hours")


def test_a_stage_that_raises_is_restarted_from_the_checkpoint(lab: Any) -> None:
    """Finished stages do not run again; a source whose end was requested still ends after the restart."""
    built: list[str] = []
    fault = lab.folder / "fault"

    @bounded_source(watermark=("ts", "10 minutes"))
    def history(context):
        built.append("history")
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "10 minutes"))
    def live(context):
        built.append("live")
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("hours"))
    def hours(history, fragile):
        return in_hours(history.unionByName(fragile))

    pipeline = Pipeline("fragile", [history, live, Fragile(fault, name="fragile"), hours])
    minutes = iter(range(0, 1000, 20))

    def more(name: str = "live") -> None:
        begin = next(minutes)
        lab.put(name, ROWS, [(k, lab.at(60 * m), m) for m in range(begin, begin + 20) for k in "ab"])

    for _ in range(3):
        more("history")
    more()
    job = lab.start(pipeline, interval=3600.0, restart=FixedDelayRestart(2, 1.0))
    job.wait_until(lambda: job.execution.rows().get("hours", -1) >= 0)
    while not job.of(StageFinished):
        take_checkpoint(job)
    take_checkpoint(job)
    job.wait_until(lambda: job.execution.rows()["fragile"] == 40)
    fault.write_text("once")
    more()
    restarting = job.wait_for(JobRestarting)
    assert restarting.attempt == 2
    assert all(part in restarting.cause for part in ("'fragile'", "instance '0'", "a plane without wings"))
    assert "test_recovery_failures.py:" in restarting.cause and "# the user's own line" in restarting.cause
    again = job.wait_for(JobStarted, lambda started: started.attempt == 2)
    assert again.finished_stages == ("history",)
    assert again.restored_checkpoint == job.checkpoints()[-1].checkpoint_id

    job.wait_until(lambda: job.execution.rows().get("fragile", 0) == 80)
    take_checkpoint(job)
    more()
    job.wait_until(lambda: job.execution.rows().get("fragile", 0) == 120)
    fault.write_text("once")
    more()
    job.wait_for(JobRestarting, lambda event: event.attempt == 3)
    job.drain()  # no run is alive at this moment
    job.finished()
    check_history(job, lab.storage(pipeline.name), "FINISHED", "drain")
    assert built.count("history") == 1
    lab.check(in_hours(lab.table("history", ROWS).unionByName(lab.table("live", ROWS))), "hours")


class Held(Stage):
    """Keeps each batch until a file is gone."""

    def __init__(self, gate: Any, **options: Any) -> None:
        super().__init__(inputs={"live": StageInput()}, **options)
        self.gate = gate

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        while self.gate.exists():
            time.sleep(0.02)
        return batch


def test_a_cleaned_work_directory_fails_the_attempt_and_loses_nothing(lab: Any) -> None:
    gate = lab.folder / "gate"

    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    pipeline = Pipeline("cleaned", [live, Held(gate, name="held", sink=lab.sink("held"))], chaining=False)
    job = lab.start(pipeline, restart=FixedDelayRestart(1, 0.1))

    def more(first: int) -> None:
        read = job.execution.rows().get("live", 0)
        lab.put("live", ROWS, [("a", lab.at(v), v) for v in range(first, first + 10)])
        job.wait_until(lambda: job.execution.rows().get("live", 0) == read + 10)

    more(0)
    take_checkpoint(job)
    gate.touch()
    for first in (10, 20, 30):  # the first of them is in a batch, the others wait
        more(first)
    segments = list((lab.folder / "work").rglob("tasks/live.0/segments/**/*.parquet"))
    assert len(segments) >= 2
    for file in segments:
        file.unlink(missing_ok=True)  # those that have been read are released at any moment
    gate.unlink()
    restarting = job.wait_for(JobRestarting)
    assert all(part in restarting.cause for part in ("'held'", "SegmentsLostError", "files of the next records of input 'live'"))
    job.wait_until(lambda: job.execution.rows().get("held", 0) == 40)
    job.drain()
    job.finished()
    lab.check(lab.table("live", ROWS), "held")


def test_a_sink_whose_place_vanishes_while_a_run_lives_or_between_two_commits_nothing_elsewhere(lab: Any) -> None:
    @unbounded_source(sink=lab.sink("kept"))
    def live(context):
        return lab.stream("live", ROWS)

    pipeline = Pipeline("moved", [live])
    place, away = lab.folder / "kept", lab.folder / "away"

    job = lab.start(pipeline, restart=FixedDelayRestart(1, 0.1))
    lab.put("live", ROWS, [("a", lab.at(v), v) for v in range(10)])
    job.wait_until(lambda: lab.count("kept") == 10)
    take_checkpoint(job)  # it names what the one before has committed
    place.rename(away)
    lab.put("live", ROWS, [("a", lab.at(v), v) for v in range(10, 20)])
    job.ask("checkpoint")
    shown = str(job.result().error)
    assert all(part in shown for part in ("SinkTargetChanged", "'live'", str(place), "moved, deleted, unmounted")), shown
    # The next run finds the same, also in a place that is there and empty.
    for status in ("absent", "empty"):
        shutil.rmtree(place, ignore_errors=True)
        if status == "empty":
            place.mkdir()
        again = lab.start(pipeline)
        assert "SinkTargetChanged" in str(again.result().error)
        assert not list(place.rglob("*.parquet"))
    shutil.rmtree(place)
    away.rename(place)
    resumed = lab.start(pipeline)
    resumed.wait_until(lambda: resumed.execution.rows().get("live", 0) == 20)
    resumed.drain()
    resumed.finished()
    lab.check(lab.table("live", ROWS), "kept")


def test_a_job_given_up_after_its_restarts_shows_stage_instance_and_the_users_own_line(lab: Any) -> None:
    @F.udf("long")
    def broken(value):
        raise KeyError("tail number")  # in the worker

    lab.put("in", ROWS, [("a", lab.at(0), 1)])

    @bounded_source(instances=["north"])
    def numbers(context):
        return lab.stream("in", ROWS)

    @stage(instances=["north"], sink=lab.sink())
    def mapped(numbers):
        return numbers.withColumn("v", broken("v"))

    job = lab.start(Pipeline("broken", [numbers, mapped]), interval=3600.0, restart=FixedDelayRestart(1, 0.1))
    failed = job.result()
    assert [event.attempt for event in job.of(JobRestarting)] == [2]
    assert isinstance(failed.error, JobFailedError) and "restarted 1 times" in str(failed.error)
    cause = failed.error.__cause__
    assert isinstance(cause, StageFailedError) and (cause.stage, cause.instance) == ("mapped", "north")
    text = str(failed.error)
    assert failed.status == "FAILED"
    assert "'mapped'" in text and "'north'" in text and "tail number" in text
    assert re.search(r" at \S*test_recovery_failures\.py:\d+, in .*# in the worker\n", text), "the line of the user's function"


def test_pipelines_of_one_name_on_two_storages_share_a_work_directory(lab: Any) -> None:
    """As on two machines that each have a storage under one path: both runs have the same epoch and the same attempt."""

    def pipeline(name: str) -> Pipeline:
        @unbounded_source
        def live(context):
            return lab.stream(name, ROWS)

        @stage(sink=lab.sink(f"{name}_rows"))
        def rows(live):
            return live

        return Pipeline("numbers", [live, rows], chaining=False)

    jobs = {}
    for name in ("staging", "production"):
        lab.put(name, ROWS, [(name, lab.at(v), v) for v in range(10)])
        store = open_store(str(lab.folder / f"machine_{name}/store"))
        jobs[name] = lab.start(pipeline(name), storage=lab.storage("numbers", store), interval=0.5)
        jobs[name].wait_until(lambda name=name: lab.count(f"{name}_rows") == 10)
    for name, job in jobs.items():
        lab.put(name, ROWS, [(name, lab.at(v), v) for v in range(10, 20)])
        job.wait_until(lambda job=job: job.execution.rows().get("rows") == 20)
        job.drain()
        job.finished()
        lab.check(lab.table(name, ROWS), f"{name}_rows")


def test_state_files_that_another_program_deletes_from_storage_are_named_and_stored_again(
    lab: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab.put("live", ROWS, [("a", lab.at(60 * v), v) for v in range(100)])
    pipeline = Pipeline("expired", live_hours(lab))
    job = lab.start(pipeline, interval=3600.0)
    job.wait_until(lambda: job.execution.rows().get("live") == 100)
    shared = lab.folder / "store/expired/shared"
    stored = take_checkpoint(job).new_bytes
    for file in shared.iterdir():
        file.unlink()
    monkeypatch.setattr(storage_driver, "LOOK_SECONDS", 0.0)
    assert take_checkpoint(job).new_bytes == 0, "the query has no new batch"
    job.wait_until(lambda: "Another program has deleted" in caplog.text)
    assert f"state files from {shared.as_uri()}, such as " in caplog.text
    caplog.clear()
    assert take_checkpoint(job).new_bytes == stored
    job.cancel()
    job.result()
    again = lab.start(pipeline)
    again.wait_for(JobStarted, lambda started: started.restored_checkpoint == 3)
    again.drain()
    again.finished()
    lab.check(in_hours(lab.table("live", ROWS)), "hours")
    assert "Another program" not in caplog.text


def test_a_checkpoint_that_storage_does_not_complete_leaves_neither_metadata_nor_files(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of `state.json` the checkpoints in storage are listed by their metadata: each of them must have its files."""
    lab.put("live", ROWS, [("a", lab.at(60 * v), v) for v in range(100)])
    complete, given_up = Ownership.complete, list[str]()

    def complete_later(ownership: Ownership, checkpoint_id: int, location: str, **options: Any) -> None:
        if checkpoint_id == 1:
            given_up.append(location)
            raise StorageUnavailable("storage is away")
        complete(ownership, checkpoint_id, location, **options)

    monkeypatch.setattr(Ownership, "complete", complete_later)
    job = lab.start(Pipeline("away", live_hours(lab)), interval=0.5)
    failed = job.wait_for(CheckpointNotDone)
    assert (failed.checkpoint_id, failed.reason) == (1, "FINALIZE_CHECKPOINT_FAILURE"), failed
    done = job.wait_for(CheckpointDone)
    found = {path.parent.name for path in (lab.folder / "store/away/checkpoints").glob("*/_metadata")}
    assert given_up == ["checkpoints/chk-1-1"] and "chk-1-1" not in found and done.location.rpartition("/")[2] in found
    job.wait_until(lambda: job.execution.rows().get("live") == 100)
    job.drain()
    job.finished()
    lab.check(in_hours(lab.table("live", ROWS)), "hours")
