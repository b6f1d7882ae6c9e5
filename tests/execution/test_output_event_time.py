"""The event time that a task sends."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.event_time import OutputEventTime
from dagster_checkpoints.execution.task_events import WatermarkReached


def test_a_watermark_is_sent_once_and_never_goes_back() -> None:
    output = OutputEventTime()
    assert output.watermark is None
    assert not output.idle
    assert output.handle(WatermarkReached(5)) == [WatermarkAt(5)]
    assert output.handle(WatermarkReached(5)) == []
    assert output.handle(WatermarkReached(4)) == []
    assert output.handle(WatermarkReached(6)) == [WatermarkAt(6)]
    assert output.watermark == 6


def test_the_lateness_that_a_stage_declares_is_taken_off() -> None:
    output = OutputEventTime(lateness_ms=3)
    assert output.handle(WatermarkReached(5)) == [WatermarkAt(2)]
    assert output.handle(WatermarkAt(4)) == [WatermarkAt(4)]  # unchanged


def test_max_watermark_is_sent_only_after_finish() -> None:
    output = OutputEventTime()
    assert output.handle(WatermarkReached(MAX_WATERMARK_MS)) == []
    assert output.handle(WatermarkReached(MAX_WATERMARK_MS + 1)) == []
    assert output.handle(WatermarkReached(MAX_WATERMARK_MS - 1)) == [WatermarkAt(MAX_WATERMARK_MS - 1)]
    assert output.handle(WatermarkAt(MAX_WATERMARK_MS)) == [WatermarkAt(MAX_WATERMARK_MS)]
    assert output.handle(WatermarkAt(MAX_WATERMARK_MS)) == []


def test_a_restored_task_continues_from_its_last_watermark() -> None:
    output = OutputEventTime(watermark=5)
    assert output.watermark == 5
    assert output.handle(WatermarkReached(5)) == []
    assert output.handle(WatermarkReached(6)) == [WatermarkAt(6)]


@pytest.mark.parametrize(("before", "sent_first"), [(False, False), (None, True), (True, True)])
def test_idleness_is_sent_when_it_changes_or_is_unknown(before: bool | None, sent_first: bool) -> None:
    output = OutputEventTime(idle=before)
    assert output.idle is (before is True)
    assert output.handle(WatermarkStatus(False)) == ([WatermarkStatus(False)] if sent_first else [])
    assert not output.idle
    assert output.handle(WatermarkStatus(True)) == [WatermarkStatus(True)]
    assert output.idle
    assert output.handle(WatermarkStatus(True)) == []
    assert output.handle(WatermarkStatus(False)) == [WatermarkStatus(False)]
