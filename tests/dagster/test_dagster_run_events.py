"""What the runtime's events become in Dagster: order, rates, numbers."""

from __future__ import annotations

import logging
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import Pipeline
from dagster_checkpoints.coordination import MAX_WATERMARK_MS
from dagster_checkpoints.run_events import RunReporter, failure
from dagster_checkpoints.spark.errors import JobFailedError, StageFailedError
from dagster_checkpoints.spark.events import (
    CheckpointDone,
    CheckpointNotDone,
    InstanceFinished,
    JobEvent,
    JobStarted,
    StageFinished,
    StageProgress,
)
from dagster_checkpoints.stage_assets import StageAssets
from dagster_checkpoints.storage import CheckpointStorage, open_store


class Recorder:
    """Takes the place of Dagster's context, and the clock's."""

    def __init__(self) -> None:
        self.log = logging.Logger("recorder")
        self.lines: list[tuple[str, str]] = []
        self.log.addHandler(self._Lines(self.lines))
        self.events: list[Any] = []
        self.now = 0.0

    class _Lines(logging.Handler):
        def __init__(self, lines: list[tuple[str, str]]) -> None:
            super().__init__()
            self._lines = lines

        def emit(self, record: logging.LogRecord) -> None:
            self._lines.append((record.levelname, record.getMessage()))

    def log_event(self, event: Any) -> None:
        self.events.append(event)


def nowhere() -> CheckpointStorage:
    return CheckpointStorage(open_store("/nowhere"), "numbers")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def reporter(recorder: Recorder, numbers_pipeline: Pipeline) -> RunReporter:
    keys = {stage.name: dg.AssetKey([stage.name]) for stage in numbers_pipeline.stages}
    context: Any = recorder
    return RunReporter(
        context,
        numbers_pipeline,
        StageAssets(keys, frozenset(keys)),
        observe_every=30.0,
        storage=nowhere,
        clock=lambda: recorder.now,
    )


STARTED = JobStarted(1, 7, None, None, (), (("numbers", "doubled"), ("total",)))


def report(reporter: RunReporter, *events: JobEvent) -> list[str]:
    """The keys that are yielded."""
    return [str(result.asset_key.to_user_string()) for event in events for result in reporter.report(event)]


def checkpoint(number: int, watermark_ms: int | None = None, finished: tuple[str, ...] = ()) -> CheckpointDone:
    stages = {name: StageProgress(10 * number, 0, 1, 5, watermark_ms) for name in ("numbers", "doubled", "total")}
    return CheckpointDone(number, f"checkpoints/chk-{number}-1", ("numbers",), finished, 0.5, 0.1, 0.2, 0.0, 100, 200, stages)


def test_a_stage_is_held_back_until_those_it_reads_were_materialized(reporter: RunReporter) -> None:
    assert report(reporter, STARTED, StageFinished("total", 10, 4), StageFinished("doubled", 0, 4)) == []
    assert reporter.missing() == ["numbers", "doubled", "total"]
    assert report(reporter, StageFinished("numbers", 10, 4)) == ["numbers", "doubled", "total"]
    assert reporter.missing() == []


def test_finished_is_published_at_once_all_the_same(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, StageFinished("total", 10, 4))
    (observation,) = recorder.events
    assert observation.asset_key == dg.AssetKey(["total"])
    assert observation.metadata["state"] == dg.MetadataValue.text("finished")
    assert observation.metadata["rows"] == dg.MetadataValue.int(10)


def test_a_stage_is_materialized_once_however_often_its_end_is_told(reporter: RunReporter) -> None:
    assert report(reporter, STARTED, StageFinished("numbers", 10, 4), StageFinished("numbers", 10, 4)) == ["numbers"]


def test_what_was_not_selected_holds_nobody_back(recorder: Recorder, numbers_pipeline: Pipeline) -> None:
    keys = {stage.name: dg.AssetKey([stage.name]) for stage in numbers_pipeline.stages}
    context: Any = recorder
    reporter = RunReporter(context, numbers_pipeline, StageAssets(keys, frozenset({"total"})), observe_every=1.0, storage=nowhere)
    assert report(reporter, STARTED, StageFinished("total", 10, 4)) == ["total"]
    assert reporter.missing() == []


def test_rows_are_given_where_they_are_counted_only(reporter: RunReporter) -> None:
    """A stage inside a chain hands its rows on within Spark; nobody counts them."""
    report(reporter, STARTED)
    (inside,) = reporter.report(StageFinished("numbers", 0, 4))
    assert "rows" not in (inside.metadata or {})


def test_running_stages_are_observed_at_the_rate_asked_for(reporter: RunReporter, recorder: Recorder) -> None:
    list(reporter.report(STARTED))
    for now, number in ((0.0, 1), (10.0, 2), (29.0, 3), (31.0, 4)):
        recorder.now = now
        list(reporter.report(checkpoint(number)))
    observed = [(e.asset_key.path[-1], e.metadata["checkpoint"].value) for e in recorder.events]
    assert observed == [(name, number) for number in (1, 4) for name in ("numbers", "doubled", "total")]
    assert sum("completed in" in line for _, line in recorder.lines) == 4  # each is logged


def test_observations_are_numbers_that_dagster_plots(reporter: RunReporter, recorder: Recorder) -> None:
    list(reporter.report(STARTED))
    list(reporter.report(checkpoint(3, watermark_ms=1_388_534_400_000)))
    metadata = recorder.events[-1].metadata
    assert metadata["rows"] == dg.MetadataValue.int(30)
    assert metadata["checkpoint_duration"] == dg.MetadataValue.float(0.5)
    assert metadata["checkpoint_new_bytes"] == dg.MetadataValue.int(100)
    assert metadata["checkpoint_total_bytes"] == dg.MetadataValue.int(200)
    assert metadata["watermark"] == dg.MetadataValue.timestamp(1_388_534_400.0)


def test_the_end_of_time_is_no_watermark_to_show(reporter: RunReporter, recorder: Recorder) -> None:
    list(reporter.report(STARTED))
    list(reporter.report(checkpoint(3, watermark_ms=MAX_WATERMARK_MS)))
    assert "watermark" not in recorder.events[-1].metadata


def test_finished_stages_are_not_observed_again(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, checkpoint(1, finished=("numbers",)))
    assert [event.asset_key.path[-1] for event in recorder.events] == ["doubled", "total"]


def test_instances_are_partitions_of_an_asset_beside_the_stage(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, InstanceFinished("doubled", "left", 5), InstanceFinished("total", "0", 10))
    (event,) = recorder.events  # `total` has one instance, which is the stage
    assert isinstance(event, dg.AssetMaterialization)
    assert event.asset_key == dg.AssetKey(["doubled_instances"])
    assert event.partition == "left"
    assert event.metadata["rows"] == dg.MetadataValue.int(5)


def test_a_failed_checkpoint_warns_and_one_that_met_a_stages_end_does_not(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, CheckpointNotDone(4, "CHECKPOINT_EXPIRED", "after 600 s"))
    report(reporter, CheckpointNotDone(5, "CHECKPOINT_DECLINED_TASK_CLOSING", "task total[0] is FINISHED"))
    assert [level for level, _ in recorder.lines] == ["WARNING", "INFO"]
    assert "Checkpoint 4" in recorder.lines[0][1] and "after 600 s" in recorder.lines[0][1]


def test_a_failure_says_which_stage_and_where_the_checkpoint_is(numbers_pipeline: Pipeline) -> None:
    broken = StageFailedError("doubled", "left", "ValueError: boom\n  at flights.py:3")
    broken.__cause__ = ValueError("boom")
    error = JobFailedError(f"Pipeline 'numbers' failed. {broken}")
    error.__cause__ = broken
    shown = failure(numbers_pipeline, error, "checkpoints/chk-4-1")
    assert "Stage 'doubled' (instance 'left')" in str(shown.description)
    assert shown.metadata["stage"].value == "doubled"
    assert shown.metadata["instance"].value == "left"
    assert shown.metadata["last_checkpoint"].value == "checkpoints/chk-4-1"
    assert "ValueError: boom" in str(shown.metadata["traceback"].value)
    assert not shown.allow_retries
