"""What a task says of event time."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.output_event_time import OutputEventTime
from dagster_checkpoints.execution.task_events import WatermarkReached


def test_a_watermark_is_sent_once_and_never_goes_back() -> None:
    said = OutputEventTime()
    assert said.watermark is None
    assert not said.idle
    assert said.handle(WatermarkReached(5)) == [WatermarkAt(5)]
    assert said.handle(WatermarkReached(5)) == []
    assert said.handle(WatermarkReached(4)) == []
    assert said.handle(WatermarkReached(6)) == [WatermarkAt(6)]
    assert said.watermark == 6


def test_the_lateness_that_a_stage_declares_is_taken_off() -> None:
    said = OutputEventTime(lateness_ms=3)
    assert said.handle(WatermarkReached(5)) == [WatermarkAt(2)]
    assert said.handle(WatermarkAt(4)) == [WatermarkAt(4)]  # as it is


def test_max_watermark_is_sent_only_after_finish() -> None:
    said = OutputEventTime()
    assert said.handle(WatermarkReached(MAX_WATERMARK_MS)) == []
    assert said.handle(WatermarkReached(MAX_WATERMARK_MS + 1)) == []
    assert said.handle(WatermarkReached(MAX_WATERMARK_MS - 1)) == [WatermarkAt(MAX_WATERMARK_MS - 1)]
    assert said.handle(WatermarkAt(MAX_WATERMARK_MS)) == [WatermarkAt(MAX_WATERMARK_MS)]
    assert said.handle(WatermarkAt(MAX_WATERMARK_MS)) == []


def test_a_restored_task_continues_from_its_last_watermark() -> None:
    said = OutputEventTime(watermark=5)
    assert said.watermark == 5
    assert said.handle(WatermarkReached(5)) == []
    assert said.handle(WatermarkReached(6)) == [WatermarkAt(6)]


@pytest.mark.parametrize(("before", "said_first"), [(False, False), (None, True), (True, True)])
def test_idleness_is_sent_when_it_changes_or_is_unknown(before: bool | None, said_first: bool) -> None:
    said = OutputEventTime(idle=before)
    assert said.idle is (before is True)
    assert said.handle(WatermarkStatus(False)) == ([WatermarkStatus(False)] if said_first else [])
    assert not said.idle
    assert said.handle(WatermarkStatus(True)) == [WatermarkStatus(True)]
    assert said.idle
    assert said.handle(WatermarkStatus(True)) == []
    assert said.handle(WatermarkStatus(False)) == [WatermarkStatus(False)]
