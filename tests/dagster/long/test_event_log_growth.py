"""How Dagster's event log grows in a month: the number of events, by the schedules that ship, and the size of such events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import CheckpointCoordinatorResource, ParquetSink, Pipeline, pipeline_assets, stage, unbounded_source
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.plugin import job_run
from dagster_checkpoints.plugin.event_schedules import CommitSchedule, ObservationSchedule
from dagster_checkpoints.plugin.job_run import JobEnded, JobRun
from dagster_checkpoints.plugin.run_events import ReportIntervals, RunReporter
from dagster_checkpoints.plugin.stage_assets import StageAssets
from dagster_checkpoints.sinks import SinkCommit
from dagster_checkpoints.spark.job.events import (
    CheckpointDone,
    JobEvent,
    JobResult,
    JobStarted,
    PipelineAcquired,
    SinkCommitted,
    StageProgress,
)
from tests.dagster.recorded_run import Recorder, nowhere

INTERVAL = 10
HOUR = 60 * 60
MONTH = 30 * 24 * 60 * 60
STAGES = ("orders", "clicks", "visits", "hourly_sales", "daily_sales")
DEFAULTS = CheckpointCoordinatorResource()
PAGE = Path(__file__).parents[3] / "docs" / "dagster.md"
SETTINGS = {
    "the defaults": (DEFAULTS.observe_every, DEFAULTS.materialize_every),
    "each commit": (DEFAULTS.observe_every, 0.0),
    "once an hour": (3600.0, 3600.0),
}


def events_of(observe_every: float, materialize_every: float | None, seconds: int) -> tuple[int, int]:
    """The events of a running pipeline, by its schedules alone: observations with lines of the log, and materializations."""
    observations, commits = ObservationSchedule(observe_every), CommitSchedule(materialize_every)
    observed = materialized = 0
    for now in range(INTERVAL, seconds + 1, INTERVAL):
        observed += sum(observations.due(stage, now, now) is not None for stage in STAGES)
        observed += 2 * (observations.due("checkpoints", now, now) is not None)  # and a line of the log
        materialized += sum(commits.committed(stage, now) for stage in STAGES)
    return observed, materialized


def row_of(setting: str) -> list[str]:
    """The cells of the page's table for a setting."""
    observe_every, materialize_every = SETTINGS[setting]
    (row,) = re.findall(
        rf"^\| {observe_every:g} s \| {materialize_every:g} s .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_month_has_as_many_events_as_the_page_says(setting: str) -> None:
    observed, materialized = events_of(*SETTINGS[setting], MONTH)
    assert row_of(setting)[2:4] == [f"{observed:,}", f"{materialized:,}"]


@pytest.fixture
def five_stages(tmp_path: Path) -> Pipeline:
    """Five stages with sinks: three sources that never end, and two stages that read them."""

    def rows(context):  # type: ignore[no-untyped-def]
        return context.spark.readStream.format("rate").load()

    def source(name: str) -> Any:
        return unbounded_source(name=name, watermark=("timestamp", "1 minute"), sink=ParquetSink(tmp_path / name))(rows)

    @stage(sink=ParquetSink(tmp_path / "hourly_sales"))
    def hourly_sales(orders, clicks, visits):  # type: ignore[no-untyped-def]
        return orders

    @stage(sink=ParquetSink(tmp_path / "daily_sales"))
    def daily_sales(hourly_sales):  # type: ignore[no-untyped-def]
        return hourly_sales

    return Pipeline("shop", [*map(source, STAGES[:3]), hourly_sales, daily_sales])


def start() -> Iterator[JobEvent]:
    columns = (("timestamp", "timestamp"), ("shop", "string"), ("item", "bigint"), ("amount", "decimal(10,2)"))
    yield PipelineAcquired("s3://bucket/checkpoints/shop", 3, 0.1)
    yield JobStarted(1, 7, None, None, (), tuple((each,) for each in STAGES), columns={each: columns for each in STAGES})


def checkpoint(number: int) -> Iterator[JobEvent]:
    """A checkpoint, and the commits of all stages."""
    watermark_ms = 1_388_534_400_000 + 10_000 * number
    stages = {each: StageProgress(1000 * number, 0, 1, 5_000_000, watermark_ms) for each in STAGES}
    location = f"checkpoints/chk-{number}-3"
    yield CheckpointDone(number, location, STAGES[:3], (), 0.512, 0.1, 0.2, 0.01, 100_000, 20_000_000, stages, number, 1)
    for each in STAGES:
        yield SinkCommitted(each, number, SinkCommit(1000, 50_000, 2), 1000 * number, watermark_ms)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_hour_of_a_run_has_the_events_of_its_schedules(setting: str, recorder: Recorder, five_stages: Pipeline) -> None:
    observe_every, materialize_every = SETTINGS[setting]
    reporter = recorder.reporter(five_stages, observe=observe_every, materialize=materialize_every)
    for event in start():
        list(reporter.report(event))
    before = len(recorder.events) + len(recorder.lines)
    for number in range(1, HOUR // INTERVAL + 1):
        recorder.now = float(INTERVAL * number)
        for event in checkpoint(number):
            list(reporter.report(event))
        if reporter.may_be_due:
            reporter.report_due()
    assert len(recorder.events) + len(recorder.lines) - before == sum(events_of(observe_every, materialize_every, HOUR))


def size_of_a_run(home: Path, five_stages: Pipeline, kind: type[JobEvent] | None, number: int) -> int:
    """The bytes of Dagster's SQLite files after a run that has reported a number of checkpoints with all events of a kind.

    Args:
        home: The directory of Dagster's instance.
        five_stages: The pipeline.
        kind: The kind; None for no events.
        number: The number of checkpoints.
    """

    @pipeline_assets(pipeline=five_stages)
    def shop(context: dg.AssetExecutionContext):  # type: ignore[no-untyped-def]
        reporter = RunReporter(
            context,
            five_stages,
            StageAssets.of(context, five_stages),
            intervals=ReportIntervals(observe=0.0, materialize=0.0, checkpoint=INTERVAL),
            progress=dict,
            storage=nowhere,
        )
        events = [event for each in range(1, number + 1) for event in checkpoint(each) if type(event) is kind]
        for event in [*start(), *events]:
            list(reporter.report(event))
        yield from ()

    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        dg.materialize([shop], instance=instance, raise_on_error=False)
        stored = {
            event.dagster_event_type for event in instance.all_logs(instance.get_runs()[0].run_id) if event.is_dagster_event
        }
        assert dg.DagsterEventType.STEP_FAILURE not in stored
    return sum(file.stat().st_size for file in (home / "history").rglob("*") if file.is_file())


def test_the_events_are_as_large_in_sqlite_as_the_page_says(tmp_path: Path, five_stages: Pipeline) -> None:
    checkpoints = 25
    none, observations, materializations = (
        size_of_a_run(tmp_path / name, five_stages, kind, checkpoints)
        for name, kind in {"none": None, "observations": CheckpointDone, "materializations": SinkCommitted}.items()
    )
    bytes_observed = (observations - none) / (checkpoints * (len(STAGES) + 2))
    bytes_materialized = (materializations - none) / (checkpoints * len(STAGES))
    print(f"{bytes_observed:.0f} bytes of an observation or a line, {bytes_materialized:.0f} of a materialization")
    for setting in SETTINGS:
        observed, materialized, shown = (int(cell.split()[0].replace(",", "")) for cell in row_of(setting)[2:5])
        assert shown == pytest.approx((observed * bytes_observed + materialized * bytes_materialized) / 1e6, rel=0.2)


def test_a_run_does_not_keep_the_events_that_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster holds each logged event in memory until the op yields, which a pipeline without an end never does."""
    monkeypatch.setattr(job_run, "_FORGET_SECONDS", 0.0)
    held: list[bool] = []

    @dg.asset
    def live(context):  # type: ignore[no-untyped-def]
        def report(event: Any) -> tuple[()]:
            held.append(context.op_execution_context.has_events())
            context.log_event(dg.AssetObservation("live", metadata={"number": event}))
            return ()

        result = JobResult(JobStatus.FINISHED, None, 1, None, None, (), {}, "end_of_data", None)
        items: Iterator[Any] = iter([0, 1, 2, JobEnded(result, None)])
        thread: Any = SimpleNamespace(next=lambda timeout: next(items))
        reporter: Any = SimpleNamespace(
            report=report, may_be_due=False, ended=lambda: None, missing=lambda: [], last_checkpoint=None
        )
        pipeline: Any = SimpleNamespace(name="live")
        assert list(JobRun(pipeline, context, thread, reporter, suspend_seconds=None).follow(None, None)) == []

    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize([live], instance=instance).success
        assert len(instance.fetch_observations(dg.AssetKey("live"), limit=10).records) == 3
    assert held == [False, False, False]
