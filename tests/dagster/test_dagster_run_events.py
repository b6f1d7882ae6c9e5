"""The Dagster events of the runtime's events: order, rates, numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import CheckpointCoordinatorResource, ParquetSink, Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.source_answers import Silence
from dagster_checkpoints.plugin.run_events import RunReporter, failure
from dagster_checkpoints.spark.errors import JobFailedError, StageFailedError
from dagster_checkpoints.spark.job.events import (
    AttemptBuilding,
    CheckpointDone,
    CheckpointNotDone,
    FirstBatch,
    InstanceFinished,
    JobRestarting,
    JobStarted,
    LeaseWatched,
    PipelineAcquired,
    QueryStarted,
    QueryWaiting,
    SourceAnswered,
    SourceSilent,
    SparkStarted,
    SparkStarting,
    StageFinished,
    StageProgress,
    StartChosen,
)
from tests.dagster.recorded_run import STARTED, Recorder, report


def checkpoint(number: int, watermark_ms: int | None = None, finished: tuple[str, ...] = ()) -> CheckpointDone:
    stages = {name: StageProgress(10 * number, 0, 1, 5, watermark_ms) for name in ("numbers", "doubled", "total")}
    return CheckpointDone(number, f"checkpoints/chk-{number}-1", ("numbers",), finished, 0.5, 0.1, 0.2, 0.0, 100, 200, stages)


def running(rows: int) -> StageProgress:
    return StageProgress(rows, 0, 1, 0, None)


def test_a_stage_is_materialized_after_the_stages_that_it_reads(reporter: RunReporter) -> None:
    assert report(reporter, STARTED, StageFinished("total", 10, 4), StageFinished("doubled", 0, 4)) == []
    assert reporter.missing() == ["numbers", "doubled", "total"]
    assert report(reporter, StageFinished("numbers", 10, 4)) == ["numbers", "doubled", "total"]
    assert reporter.missing() == []


def test_the_end_of_a_stage_is_observed_at_once_before_its_materialization(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, StageFinished("total", 10, 4))
    (observation,) = recorder.events
    assert observation.asset_key == dg.AssetKey(["total"])
    assert observation.metadata["state"] == dg.MetadataValue.text("finished")
    assert observation.metadata["rows"] == dg.MetadataValue.int(10)


def test_a_stage_is_materialized_once_if_its_end_is_reported_twice(reporter: RunReporter) -> None:
    assert report(reporter, STARTED, StageFinished("numbers", 10, 4), StageFinished("numbers", 10, 4)) == ["numbers"]


def test_a_stage_that_was_not_selected_does_not_delay_its_consumers(recorder: Recorder, numbers_pipeline: Pipeline) -> None:
    reporter = recorder.reporter(numbers_pipeline, frozenset({"total"}))
    assert report(reporter, STARTED, StageFinished("total", 10, 4)) == ["total"]
    assert reporter.missing() == []


def test_each_stage_of_a_query_reports_its_rows_unless_their_number_is_not_known(reporter: RunReporter) -> None:
    report(reporter, STARTED)
    (inside,) = reporter.report(StageFinished("numbers", 7, 4))
    assert (inside.metadata or {})["rows"] == 7
    (unknown,) = reporter.report(StageFinished("doubled", None, 4))
    assert "rows" not in (unknown.metadata or {})


def test_a_source_that_does_not_answer_is_logged_and_observed_until_it_answers(reporter: RunReporter, recorder: Recorder) -> None:
    silence = Silence(24.0, "asking", "Getting offsets from KafkaV2[Subscribe[clicks]]")
    recorder.now = 60.0
    report(reporter, STARTED, SourceSilent(("numbers",), "0", silence), SourceAnswered(("numbers",), "0"))
    (warned,) = [text for level, text in recorder.lines if level == "WARNING"]
    assert "Source 'numbers' has not answered for 24 s; Spark says: Getting offsets from KafkaV2[Subscribe[clicks]]" in warned
    silent, answered = recorder.observed("numbers")
    assert (silent["state"], silent["since"]) == ("no answer", 1_388_534_400 + 36.0)
    assert (silent["spark"], silent["check"]) == (silence.words, warned)
    assert answered == {"state": "running", "instance": "0"}


def test_a_first_batch_that_takes_long_is_no_warning(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, SourceSilent(("numbers",), "0", Silence(24.0, "reading", "Processing new data")))
    assert [level for level, text in recorder.lines if "first batch has been running for 24 s" in text] == ["INFO"]
    assert [seen["state"] for seen in recorder.observed("numbers")] == ["no rows yet"]


def test_stages_and_checkpoints_are_observed_at_the_configured_rate(reporter: RunReporter, recorder: Recorder) -> None:
    list(reporter.report(STARTED))
    for now, number in ((0.0, 1), (10.0, 2), (29.0, 3), (31.0, 4), (40.0, 5)):
        recorder.now = now
        list(reporter.report(checkpoint(number)))
    assert [shown["rows"] for shown in recorder.observed("total")] == [10, 40]
    assert [shown["checkpoint"] for shown in recorder.observed("checkpoints/numbers")] == [1, 4]
    lines = [line for _, line in recorder.lines if "completed in" in line]
    assert [line.split(" completed")[0] for line in lines] == ["Checkpoint 1", "Checkpoint 4"]
    assert lines[1].endswith("2 more since the last line, the longest in 0.50 s")

    reporter.ended()  # the newest checkpoint is shown, once
    reporter.ended()
    assert [shown["checkpoint"] for shown in recorder.observed("checkpoints/numbers")] == [1, 4, 5]
    assert "Checkpoint 5 completed" in recorder.lines[-1][1] and "more since" not in recorder.lines[-1][1]


def test_a_change_of_the_roots_is_shown_at_once(reporter: RunReporter, recorder: Recorder) -> None:
    report(
        reporter,
        STARTED,
        checkpoint(1),
        checkpoint(2),
        checkpoint(3, finished=("numbers",)),
        checkpoint(4, finished=("numbers",)),
    )
    shown = recorder.observed("checkpoints/numbers")
    assert [(one["checkpoint"], one["finished_stages"]) for one in shown] == [(1, "none"), (3, "numbers")]


def test_a_stage_is_observed_between_two_checkpoints(reporter: RunReporter, recorder: Recorder) -> None:
    """Stages are observed also with a long interval of checkpoints, or without one."""
    report(reporter, STARTED)
    assert not reporter.may_be_due
    recorder.progress = {"numbers": running(0), "doubled": running(0), "total": running(5)}
    report(reporter, FirstBatch(("total",), "0", 5, 1.5))
    assert [shown["rows"] for shown in recorder.observed("total")] == [5]
    assert recorder.observed("numbers") == []  # it has not processed any batch
    recorder.now, recorder.progress = 29.0, {"total": running(20)}
    assert not reporter.may_be_due
    recorder.now = 30.0
    assert reporter.may_be_due
    reporter.report_due()
    assert recorder.observed("total")[1:] == [{"rows": 20, "state": "running", "rows_per_second": 0.5}]


def test_the_order_of_metadata_in_a_stages_observation(tmp_path: Path, recorder: Recorder) -> None:
    @bounded_source
    def history(context):
        return context.spark.range(5)

    @unbounded_source(instances=["left", "right"])
    def live(context):
        return context.spark.readStream.format("rate").load()

    @stage(sink=ParquetSink(tmp_path / "both"))
    def both(history, live):
        return history

    reporter = recorder.reporter(Pipeline("lagging", [history, live, both]))
    shop = {
        "history": StageProgress(7, 0, 1, 70, 1_388_534_400_000 - 90_250),
        "live": StageProgress(1200, 1, 2, 5000, 1_388_534_400_000 - 90_250),
        "both": StageProgress(4, 0, 1, 0, None),
    }
    started = JobStarted(1, 7, None, None, (), (("history",), ("live",), ("both",)))
    done = CheckpointDone(3, "checkpoints/chk-3-1", ("live",), (), 0.51234, 0.1, 0.2, 0.0, 100, 200, shop, 3, 1)
    report(reporter, started, done)
    (live_shown,) = recorder.observed("live")
    assert list(live_shown.items()) == [
        ("rows", 1200),
        ("watermark", 1_388_534_400 - 90.25),
        ("lag_seconds", 90),
        ("state", "running"),
        ("state_bytes", 5000),
        ("finished_instances", 1),
    ]
    assert "lag_seconds" not in recorder.observed("history")[0], "a backfill is old, not late"
    assert recorder.observed("both") == [{"rows": 4, "state": "running"}]
    (checkpoint_shown,) = recorder.observed("checkpoints/lagging")
    assert checkpoint_shown == {
        "checkpoint": 3,
        "duration_seconds": 0.512,
        "total_bytes": 200,
        "new_bytes": 100,
        "roots": "live",
        "finished_stages": "none",
        "location": "checkpoints/chk-3-1",
        "sync_seconds": 0.1,
        "async_seconds": 0.2,
        "alignment_seconds": 0.0,
        "longest_duration_seconds": 0.512,
        "completed": 3,
        "failed": 1,
    }


@pytest.mark.parametrize(
    ("storage", "report_at"),
    [
        ("s3://b/numbers", dg.MetadataValue.url("s3://b/numbers/report.html")),
        ("file:///a%20b/numbers", dg.MetadataValue.path("/a b/numbers/report.html")),
    ],
)
def test_the_checkpoints_link_the_report(
    storage: str, report_at: dg.MetadataValue[Any], reporter: RunReporter, recorder: Recorder
) -> None:
    report(reporter, PipelineAcquired(storage, 3, 0.1), STARTED, checkpoint(1))
    (shown,) = [each for each in recorder.events if each.asset_key == dg.AssetKey(["checkpoints", "numbers"])]
    assert shown.metadata["report"] == report_at


def test_rows_dropped_as_late_are_shown_by_the_stage_that_dropped_them(reporter: RunReporter, recorder: Recorder) -> None:
    late = {"numbers": StageProgress(0, 0, 1, 0, None, late_rows=3), "doubled": running(5), "total": running(5)}
    report(reporter, STARTED, dataclasses.replace(checkpoint(3), stages=late))
    assert [recorder.observed(name)[0].get("late_rows") for name in late] == [3, None, None]
    (result,) = reporter.report(StageFinished("numbers", 0, 4, late_rows=7))
    assert (result.metadata or {})["late_rows"] == 7
    (result,) = reporter.report(StageFinished("doubled", 5, 4))
    assert "late_rows" not in (result.metadata or {})


def test_a_stage_inside_a_query_says_where_its_state_is_shown(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, checkpoint(3, watermark_ms=1_388_534_400_000))
    (inside,) = recorder.observed("numbers")
    assert list(inside) == ["rows", "watermark", "state", "query"]
    assert (inside["rows"], inside["query"]) == (30, "numbers > doubled; its state is shown at doubled")
    (tail,) = recorder.observed("doubled")
    assert (tail["rows"], tail["state_bytes"], tail["query"]) == (30, 5, "numbers > doubled")


def test_a_failing_checkpoint_does_not_fill_the_log(reporter: RunReporter, recorder: Recorder) -> None:
    for second in range(0, 301):
        recorder.now = float(second)
        report(reporter, CheckpointNotDone(second, "CHECKPOINT_EXPIRED", "after 600 s"))
    assert len(recorder.lines) == 11  # in five minutes, one each 30 seconds
    assert recorder.lines[1][1].endswith("(29 more for this reason since the last line)")


def test_a_day_of_a_running_pipeline_writes_as_many_events_as_the_documentation_says(
    recorder: Recorder, numbers_pipeline: Pipeline
) -> None:
    """Whatever the interval of the checkpoints, here five seconds: 288 for each of three stages, and two for the checkpoints."""
    reporter = recorder.reporter(numbers_pipeline, observe=CheckpointCoordinatorResource().observe_every)
    report(reporter, STARTED)
    day, written = 24 * 60 * 60, []
    for number in range(1, 2 * day // 5 + 1):
        recorder.now = 5.0 * number
        recorder.progress = {stage.name: running(number) for stage in numbers_pipeline.stages}
        report(reporter, checkpoint(number))
        if reporter.may_be_due:
            reporter.report_due()
        written.append((recorder.now, len(recorder.events) + len(recorder.lines)))
    after_a_day = next(count for now, count in written if now >= day)
    assert written[-1][1] - after_a_day == 288 * (3 + 2)
    assert after_a_day <= 297 * (3 + 2) + 1  # and the event of the start


def test_from_the_launch_to_the_first_checkpoint_each_step_is_a_line(reporter: RunReporter, recorder: Recorder) -> None:
    recorder.progress = {"total": running(5)}
    report(
        reporter,
        LeaseWatched("owned by run r1 on host h (process 7) since yesterday", 30.0),
        LeaseWatched("owned by run r1 on host h (process 7) since yesterday", 0.0),
        PipelineAcquired("s3://b/numbers", 3, 31.25),
        StartChosen(
            7, "checkpoints/chk-7-1", ("numbers",), ("rescaled: 1 to 2 instances of doubled.", "left behind: the state of 'old'.")
        ),
        SparkStarting(),
        SparkStarted("4.3.0", "local[2]", "local-1", None, 8.04),
        AttemptBuilding(1, ("doubled", "total"), 7),
        JobStarted(1, 2, 7, "checkpoints/chk-7-1", ("numbers",), (("numbers",), ("doubled",), ("total",)), 2.26),
        QueryStarted(("doubled",), 2, 1, 2, 1.5),
        QueryWaiting(("total",), ("doubled",)),
        FirstBatch(("doubled",), "left", 1, 0.72),
        QueryStarted(("total",), 1, 2, 2, 3.0),
        FirstBatch(("total",), "0", 0, 0.72),
        FirstBatch(("total",), "0", 0, 0.72, 4000),
        FirstBatch(("total",), "0", 1000, 0.72),
    )
    assert [line for _, line in recorder.lines] == [
        "Pipeline 'numbers' is owned by run r1 on host h (process 7) since yesterday. This run watches the lease and takes the "
        "pipeline over within 30 s, unless that run renews the lease: then this run is refused.",
        "Pipeline 'numbers' is owned by run r1 on host h (process 7) since yesterday. That process and all processes "
        "that it had started have ended: this run takes the pipeline over at once.",
        "This run owns pipeline 'numbers' in s3://b/numbers (epoch 3), after 31.2 s.",
        "Continues from checkpoint 7 (checkpoints/chk-7-1); finished before: numbers.\n"
        "rescaled: 1 to 2 instances of doubled.\n"
        "left behind: the state of 'old'.",
        "Spark is starting.",
        "Spark 4.3.0 runs at local[2] (application local-1), after 8.0 s.",
        "Building the plans of 2 stages, and fetching the state of checkpoint 7: doubled, total.",
        "Job 2, attempt 1, from checkpoint 7: plans built in 2.3 s. 2 queries will start: doubled; total; the first checkpoint "
        "is due 60 s after that.",
        "Query 1 of 2 has started: doubled (2 instances), after 1.5 s.",
        "Query total waits until its static inputs have been read: doubled.",
        "First rows of query doubled (instance left): 1 row from doubled in 0.7 s.",
        "Query 2 of 2 has started: total, after 3.0 s.",
        "First batch of query total in 0.7 s: no rows emitted yet.",
        "First batch of query total in 0.7 s: 4,000 rows read, none emitted yet.",
        "First rows of query total: 1,000 rows from total in 0.7 s.",
    ]
    assert recorder.observed("total") == [{"rows": 5, "state": "running"}] * 3


def test_a_restart_names_the_stages_that_restart(reporter: RunReporter, recorder: Recorder) -> None:
    report(
        reporter,
        JobRestarting(2, 1.0, "a plane without wings", ("total",)),
        AttemptBuilding(2, ("total",), 7),
        dataclasses.replace(STARTED, attempt=2, restored_checkpoint=7, seconds=0.5, restarted=("total",)),
        JobRestarting(3, 2.0, "no plane"),
    )
    assert recorder.lines == [
        (
            "ERROR",
            "a plane without wings\nThe stages total start again from the latest checkpoint in 1 s (attempt 2); the others are "
            "not connected with them, and go on.",
        ),
        ("INFO", "Building the plans of 1 stage, and fetching the state of checkpoint 7: total."),
        (
            "INFO",
            "Job 7, attempt 2, from checkpoint 7: plans built in 0.5 s. 1 query will start: total; the first checkpoint is due "
            "60 s after that.",
        ),
        ("ERROR", "no plane\nThe unfinished stages start again from the latest checkpoint in 2 s (attempt 3)."),
    ]


@pytest.mark.parametrize("watermark_ms", [MAX_WATERMARK_MS, 253_402_300_800_000, -(10**14)])
def test_a_watermark_that_can_be_no_date_is_not_shown(reporter: RunReporter, recorder: Recorder, watermark_ms: int) -> None:
    """That of the end of event time, and of rows with an event time that is wrong."""
    list(reporter.report(STARTED))
    list(reporter.report(checkpoint(3, watermark_ms=watermark_ms)))
    assert "watermark" not in recorder.observed("total")[0]


def test_finished_stages_are_not_observed_again(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, checkpoint(1, finished=("numbers",)))
    assert [event.asset_key.path[-1] for event in recorder.events] == ["doubled", "total", "numbers"]
    assert recorder.events[-1].asset_key == dg.AssetKey(["checkpoints", "numbers"])


def test_instances_are_partitions_of_an_asset_beside_the_stage(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, InstanceFinished("doubled", "left", 5), InstanceFinished("total", "0", 10))
    (event,) = recorder.events  # `total` has one instance, which is the stage
    assert isinstance(event, dg.AssetMaterialization)
    assert event.asset_key == dg.AssetKey(["doubled_instances"])
    assert event.partition == "left"
    assert event.metadata["rows"] == dg.MetadataValue.int(5)


def test_a_failed_checkpoint_warns_unless_the_end_of_a_stage_has_caused_it(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, CheckpointNotDone(4, "CHECKPOINT_EXPIRED", "after 600 s"))
    report(reporter, CheckpointNotDone(5, "CHECKPOINT_DECLINED_TASK_CLOSING", "task total[0] is FINISHED"))
    assert [level for level, _ in recorder.lines] == ["WARNING", "INFO"]
    assert "Checkpoint 4" in recorder.lines[0][1] and "after 600 s" in recorder.lines[0][1]


def test_a_failure_names_the_stage_and_the_checkpoint(numbers_pipeline: Pipeline) -> None:
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
