"""The materializations of running stages, from the events of their commits: content, number, and what a restore changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import dagster as dg
import pytest

from dagster_checkpoints import ParquetSink, Pipeline, stage, unbounded_source
from dagster_checkpoints.plugin.run_events import RunReporter
from dagster_checkpoints.plugin.stage_assets import COMMITTED_ROWS, LIVE
from dagster_checkpoints.sinks import SinkCommit
from dagster_checkpoints.spark.job.events import SinkCommitted, StageFinished
from tests.dagster.recorded_run import STARTED, Recorder, report


def committed(checkpoint_id: int, rows: int, watermark_ms: int | None = None, last: bool = False) -> SinkCommitted:
    """A commit of stage `total` with ten new rows in two files."""
    return SinkCommitted("total", checkpoint_id, SinkCommit(10, 1000, 2, f"{checkpoint_id}"), rows, watermark_ms, last)


def test_a_commit_of_a_running_stage_materializes_its_asset(reporter: RunReporter, recorder: Recorder, tmp_path: Path) -> None:
    started = dataclasses.replace(STARTED, columns={"total": (("id", "bigint"), ("at", "timestamp"))})
    assert report(reporter, started, committed(3, 10, 1_388_534_400_000 - 90_250)) == []
    assert reporter.missing() == ["numbers", "doubled", "total"]
    (event,) = recorder.events
    assert event.tags == {
        "dagster_checkpoints/live": "true",
        "dagster_checkpoints/committed_rows": "10",
        "dagster/data_version": "job-7-checkpoint-3",
        "dagster/data_version_is_user_provided": "true",
        "dagster/code_version": recorder.assets_def.code_versions_by_key[dg.AssetKey("total")],
        "dagster/input_data_version/doubled": "INITIAL",
        "dagster/input_event_pointer/doubled": "NULL",
    }
    (shown,) = recorder.live("total")
    columns = shown.pop("dagster/column_schema").columns
    assert [(column.name, column.type) for column in columns] == [("id", "bigint"), ("at", "timestamp")]
    assert shown == {
        "dagster/row_count": 10,
        "dagster/uri": (tmp_path / "total").as_uri(),
        "committed_rows": 10,
        "committed_bytes": 1000,
        "committed_files": 2,
        "table_version": "3",
        "watermark": 1_388_534_400 - 90.25,
        "state": "running",
        "job": 7,
        "checkpoint": 3,
    }


def test_a_sample_is_a_table_that_the_ui_can_read(reporter: RunReporter, recorder: Recorder) -> None:
    """JSON has no NaN: Dagster's UI could not parse the row."""
    rows = ({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": None, "e": True},)
    report(reporter, STARTED, dataclasses.replace(committed(3, 10), sample=rows))
    (shown,) = recorder.live("total")
    (row,) = shown["sample"].records
    assert json.loads(json.dumps(row.data, allow_nan=False)) == {"a": "nan", "b": "inf", "c": 1.5, "d": "None", "e": True}


def test_commits_are_merged_until_the_next_materialization_and_the_end_of_the_stage_shows_the_last(
    reporter: RunReporter, recorder: Recorder
) -> None:
    report(reporter, STARTED, committed(3, 10), committed(4, 20), committed(5, 30))
    assert [shown["checkpoint"] for shown in recorder.live("total")] == [3]
    recorder.now = 60.0
    assert reporter.may_be_due
    reporter.report_due()
    assert not reporter.may_be_due
    merged = recorder.live("total")[1]
    assert (merged["dagster/row_count"], merged["committed_rows"], merged["committed_files"]) == (30, 20, 4)
    assert (merged["commits"], merged["first_checkpoint"], merged["checkpoint"]) == (2, 4, 5)

    recorder.now = 200.0
    report(reporter, committed(6, 40, last=True))
    assert not reporter.may_be_due
    report(reporter, StageFinished("numbers", 0, 6), StageFinished("doubled", 40, 6))
    (result,) = reporter.report(StageFinished("total", 40, 6))
    assert result.metadata is not None and result.data_version == dg.DataVersion("job-7") and result.tags is None
    assert {label: result.metadata[label] for label in ("rows", "dagster/row_count", "committed_rows")} == {
        "rows": 40, "dagster/row_count": 40, "committed_rows": 10,
    }  # fmt: skip
    reporter.ended()
    assert len(recorder.live("total")) == 2


@pytest.mark.parametrize(("every", "shown"), [(60.0, [3, 5]), (0.0, [3, 4, 5]), (None, [])])
def test_what_was_held_is_materialized_when_the_run_ends(
    recorder: Recorder, numbers_pipeline: Pipeline, every: float | None, shown: list[int]
) -> None:
    reporter = recorder.reporter(numbers_pipeline, materialize=every)
    report(reporter, STARTED, committed(3, 10), committed(4, 20), committed(5, 30, last=True))
    reporter.ended()
    reporter.ended()
    assert [each["checkpoint"] for each in recorder.live("total")] == shown


@pytest.mark.parametrize(
    ("job", "rows", "expected"),
    [(7, 30, []), (7, 20, [10]), (7, 50, [None]), (6, 30, [30]), (None, 0, [30])],
)
def test_what_a_restore_has_committed_is_materialized_unless_it_is_shown(
    reporter: RunReporter, recorder: Recorder, job: int | None, rows: int, expected: list[int | None]
) -> None:
    tags = {LIVE: "true", COMMITTED_ROWS: str(rows)}
    if job is not None:
        recorder.instance.report_runless_asset_event(dg.AssetMaterialization("total", metadata={"job": job}, tags=tags))
    report(reporter, STARTED, SinkCommitted("total", 9, None, 30))
    shown = recorder.live("total")
    assert [each.get("committed_rows") for each in shown] == expected
    assert all(each["dagster/row_count"] == 30 and each["checkpoint"] == 9 for each in shown)


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_stage_is_never_unsynced_because_of_a_stage_that_it_reads(
    recorder: Recorder, tmp_path: Path, reader_first: bool
) -> None:
    """Two sinks, one behind the other, whose commits come in any order, for five minutes: Dagster sees the read one first."""

    @unbounded_source(sink=ParquetSink(tmp_path / "clicks"))
    def clicks(context): ...  # type: ignore[no-untyped-def]

    @stage(sink=ParquetSink(tmp_path / "by_page"))
    def by_page(clicks): ...  # type: ignore[no-untyped-def]

    reporter = recorder.reporter(Pipeline("numbers", [clicks, by_page]))
    report(reporter, dataclasses.replace(STARTED, chains=(("clicks",), ("by_page",))))
    order = ["by_page", "clicks"] if reader_first else ["clicks", "by_page"]
    unsynced = []
    for checkpoint in range(1, 31):
        recorder.now += 10.0
        for name in order:
            report(reporter, SinkCommitted(name, checkpoint, SinkCommit(10), 10 * checkpoint))
        reporter.report_due()
        if checkpoint > 1:  # the first commit of each stage is shown at once
            unsynced.append(recorder.unsynced("by_page"))
    reporter.ended()
    assert len(recorder.live("clicks")) >= len(recorder.live("by_page")) == 6
    assert not any(unsynced[6:]) and sum(unsynced) <= 6 * reader_first
    assert not recorder.unsynced("by_page")


def test_a_restore_after_commits_that_are_held_counts_no_row_twice(reporter: RunReporter, recorder: Recorder) -> None:
    report(reporter, STARTED, committed(3, 10), committed(4, 20))
    report(reporter, STARTED, SinkCommitted("total", 9, None, 20), SinkCommitted("total", 9, None, 25))
    reporter.ended()
    assert [each["committed_rows"] for each in recorder.live("total")] == [10, 15]


def test_a_stage_that_was_not_selected_is_not_materialized_by_commits(recorder: Recorder, numbers_pipeline: Pipeline) -> None:
    reporter = recorder.reporter(numbers_pipeline, frozenset({"numbers", "doubled"}))
    report(reporter, STARTED, committed(3, 10))
    assert recorder.events == []
