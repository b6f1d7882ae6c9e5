"""The metrics of a run: which numbers of the status they show, and under which names."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dagster_checkpoints.control import metrics
from dagster_checkpoints.control.metrics import PREFIX, MetricsUnavailableError, PipelineMetrics, check_metrics_available
from dagster_checkpoints.control.status import (
    CheckpointCountsStatus,
    CompletedCheckpointStatus,
    InstanceStatus,
    PendingStatus,
    PipelineStatus,
    StageStatus,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)
STATUS = PipelineStatus(
    pipeline="flights", run_id="a run", epoch=3, phase="running", sequence=7, updated_at=AT, started_at=AT, attempt=3,
    stages=(
        StageStatus(
            name="live", finished=False, rows=40, late_rows=2,
            instances=(
                InstanceStatus(name="EWR", state="RUNNING", watermark_ms=90_000, rows_behind=12),
                InstanceStatus(name="JFK", state="FINISHED", end_of_data=True, watermark_ms=50_000),
            ),
        ),
        StageStatus(name="hourly", finished=False, rows=None, instances=(InstanceStatus(name="0", state="RUNNING"),)),
    ),
    pending=(PendingStatus(checkpoint_id=9, kind="checkpoint", acknowledged=1, expected=3, seconds=1.0),),
    last_checkpoint=CompletedCheckpointStatus(
        checkpoint_id=8, location="checkpoints/chk-8-3", completed_at=AT, duration=0.25, new_bytes=100, total_bytes=5000
    ),
    checkpoints=CheckpointCountsStatus(triggered=9, completed=7, failed=1),
)  # fmt: skip


def observed(reader: InMemoryMetricReader) -> dict[tuple[str, ...], float]:
    """The values by name, stage and instance."""
    data = reader.get_metrics_data()
    found = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics if data is not None else ():
        for point in metric.data.data_points:
            attributes = dict(point.attributes)
            assert attributes.pop("pipeline") == "flights"
            found[(metric.name.removeprefix(PREFIX), *map(str, attributes.values()))] = point.value
    return found


def test_the_numbers_of_the_status_under_the_names_of_flink() -> None:
    reader = InMemoryMetricReader()
    sent = PipelineMetrics("flights", "a run", reader, wall=lambda: 100.0)
    assert observed(reader) == {}, "nothing is known before the first status"
    sent.update(STATUS)
    assert observed(reader) == {
        ("num_restarts",): 2,
        ("total_number_of_checkpoints",): 9,
        ("number_of_completed_checkpoints",): 7,
        ("number_of_failed_checkpoints",): 1,
        ("number_of_in_progress_checkpoints",): 1,
        ("last_checkpoint_duration",): 250.0,
        ("last_checkpoint_size",): 100,
        ("last_checkpoint_full_size",): 5000,
        ("num_records_out", "live"): 40,
        ("num_late_records_dropped", "live"): 2,
        ("num_late_records_dropped", "hourly"): 0,
        ("current_output_watermark", "live", "EWR"): 90_000,
        ("watermark_lag", "live", "EWR"): 10_000.0,
        ("pending_records", "live", "EWR"): 12,
    }
    sent.close()


def test_a_status_before_the_job_has_begun_has_few_numbers() -> None:
    reader = InMemoryMetricReader()
    sent = PipelineMetrics("flights", "a run", reader)
    sent.update(PipelineStatus(
        pipeline="flights", run_id="a run", epoch=3, phase="starting", sequence=1, updated_at=AT, started_at=AT
    ))  # fmt: skip
    assert observed(reader) == {("num_restarts",): 0, ("number_of_in_progress_checkpoints",): 0}
    sent.close()


def test_a_collector_that_is_not_there_does_not_hold_the_end_of_a_run_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    sent = PipelineMetrics("flights", "a run")
    sent.update(STATUS)
    began = time.monotonic()
    sent.close()
    assert time.monotonic() - began < 60


def test_without_the_extra_they_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda module: None)
    with pytest.raises(
        MetricsUnavailableError, match=r"found no opentelemetry.sdk and no .*pip install 'dagster-checkpoints\[otel\]'"
    ):
        check_metrics_available()
