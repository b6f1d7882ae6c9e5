"""When a run writes its history and the page, and that neither reaches the job."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control.history import Entries, EventEntry, HistorySample, StageSample, read_history
from dagster_checkpoints.control.status import InstanceStatus, PipelineStatus, StageStatus, StopStatus
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.execution.job_events import JobOutcome
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobRestarting, JobStarted, SparkStarting, StageFinished
from dagster_checkpoints.spark.job.history import HistoryRecorder, HistoryWriter
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.storage import CheckpointStorage, open_store

AT = datetime(2026, 1, 31, tzinfo=UTC)


class Run:
    """A run whose clock the test turns; it counts the versions of each file."""

    def __init__(self, folder: Path) -> None:
        self.storage = CheckpointStorage(open_store(str(folder)), "flights")
        self.storage.acquire(Owner(run_id="a run", host="a host", pid=1))
        self.log = logging.Logger("run")
        self.lines: list[str] = []
        self.log.handle = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign,assignment]
        self.now = 0.0
        self.writer = HistoryWriter(self.storage, 1, self.log, lambda: self.now)
        self.rows = 0

    def status(self, phase: Any = "running") -> PipelineStatus:
        live = StageStatus(name="live", finished=False, rows=self.rows, instances=(InstanceStatus(name="0", state="RUNNING"),))
        at = AT + timedelta(seconds=self.now)
        stages = () if phase == "starting" else (live,)
        return PipelineStatus(
            pipeline="flights", run_id="a run", epoch=1, phase=phase, sequence=1, updated_at=at, started_at=AT, stages=stages
        )

    def turn(self, seconds: float, phase: Any = "running", *, event: bool = False, moving: bool = False) -> tuple[bool, bool]:
        """Write a status after some seconds. Returns whether the history, and the page, were written."""
        self.now += seconds
        self.rows += 10 if moving else 0
        status = self.status(phase)
        events = (EventEntry(at=status.updated_at, epoch=1, kind="stopping"),) if event else ()
        samples = (HistorySample(status.updated_at, 1, {"live": StageSample(self.rows)}),)
        for file in self.files():
            file.unlink()
        self.writer.add(Entries((), events, samples))
        self.writer.write(status)
        names = {file.name for file in self.files()}
        return any(name.endswith(".json") for name in names), "report.html" in names

    def files(self) -> list[Path]:
        root = Path(self.storage.store.url.removeprefix("file://")) / "flights"
        return [file for file in (root / "report.html", *root.glob("history/*.json")) if file.exists()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_page_is_written_once_a_minute_and_when_there_is_news(run: Run) -> None:
    assert run.turn(0, "starting", event=True) == (True, False), "no stage is known yet"
    assert run.turn(5, moving=True) == (False, True)
    assert run.turn(5, moving=True) == (False, False), "entries wait for 15 seconds"
    assert run.turn(5, moving=True) == (True, False)
    assert run.turn(5, event=True) == (True, False), "an event does not wait"
    assert run.turn(45) == (True, True)
    assert run.turn(60) == (True, False), "nothing has moved"
    assert run.turn(60, moving=True) == (True, True)
    assert run.turn(60) == (True, False)
    assert run.turn(60, event=True) == (True, True)
    assert run.turn(1, "ended", event=True) == (True, True)


def test_a_page_of_a_live_run_loads_itself_again(run: Run) -> None:
    run.turn(0, event=True)
    (page,) = [file for file in run.files() if file.name == "report.html"]
    assert '"refresh_seconds":60.0' in page.read_text()
    run.turn(1, "ended", event=True)
    assert '"refresh_seconds":null' in page.read_text() and '"running":false' in page.read_text()


def test_nothing_that_fails_reaches_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a mistake in the page")

    monkeypatch.setattr("dagster_checkpoints.spark.job.history.page", broken)
    run.turn(0, event=True)
    run.turn(90, event=True)
    assert run.lines == ["The history of the pipeline cannot be written now. ZeroDivisionError: a mistake in the page"], "once"
    assert len(read_history(run.storage)[0].events) == 2


# The entries


@unbounded_source(sink=ParquetSink("rows"))
def live(context):
    raise AssertionError("no query starts here")


def recorder() -> HistoryRecorder:
    options = JobOptions(CheckpointConfig(interval=60.0), NoRestart(), Path("/nowhere"))
    return HistoryRecorder(Pipeline("flights", [live]), options, "a run", AT, 7)


def test_the_events_of_a_run() -> None:
    made = recorder()
    made.happened(SparkStarting(), AT)
    made.happened(JobStarted(1, 3, None, None, (), (("live",),)), AT)
    made.happened(JobRestarting(2, 1.0, "lost \udcff", ("live",)), AT)
    made.happened(JobStarted(2, 3, 41, "checkpoints/chk-41-7", (), (("live",),), restarted=("live",)), AT)
    made.happened(StageFinished("old", 1, 41, restored=True), AT)
    made.happened(StageFinished("live", 1, 42), AT)
    made.run_ended(JobOutcome(JobStatus.FAILED, "given up"), AT)
    first, *events = made.take().events
    assert first.kind == "run_started" and first.run_id == "a run" and first.instances == {"live": 1}
    assert first.settings["interval"] == 60.0 and first.settings["failover"] == "region" and first.settings["retained"] == 1
    assert [(each.kind, each.attempt, each.checkpoint_id, each.text, each.stages, each.status) for each in events] == [
        ("job_started", 1, None, "", (), ""),
        ("restarting", 2, None, "lost ?", ("live",), ""),
        ("job_started", 2, 41, "", ("live",), ""),
        ("stage_finished", 0, None, "", ("live",), ""),
        ("run_ended", 0, None, "given up", (), "FAILED"),
    ]
    assert {each.epoch for each in events} == {7}
    assert not made.take()


@pytest.mark.parametrize("jump", [timedelta(hours=-1), timedelta(0), timedelta(hours=1)])
def test_samples_are_frequent_at_the_beginning_and_rare_later(jump: timedelta) -> None:
    made = recorder()
    for seconds in range(0, 4 * 3600, 5):
        stage = StageStatus(name="live", finished=False, rows=seconds)
        start = AT if seconds < 3600 else AT + jump
        at = start + timedelta(seconds=seconds)
        status = PipelineStatus(
            pipeline="flights", run_id="a", epoch=7, phase="running", sequence=1, updated_at=at, started_at=start, stages=(stage,)
        )
        made.sampled(status)
    found = [sample.stages["live"].rows or 0 for sample in made.take().samples]
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert found[:3] == [0, 5, 10] and gaps == sorted(gaps) and gaps[-1] == 60
    assert len(found) < 500


def test_a_stop_is_an_event_once() -> None:
    made = recorder()
    for _ in range(2):
        status = PipelineStatus(
            pipeline="flights", run_id="a", epoch=7, phase="stopping", sequence=1, updated_at=AT, started_at=AT,
            stop=StopStatus(request_id="s", drain=True, state="WAITING"),
        )  # fmt: skip
        made.sampled(status)
    assert [(each.kind, each.text) for each in made.take().events] == [("run_started", ""), ("stopping", "drain")]
