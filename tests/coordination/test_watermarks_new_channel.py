"""A channel that is new in a restore holds event time back until its first watermark, also after a second restore."""

from __future__ import annotations

from dagster_checkpoints.coordination.watermarks import ChannelWatermark, ValveState, WatermarkValve


def test_a_channel_that_has_not_spoken_still_holds_back_after_a_second_restore() -> None:
    valve = WatermarkValve(["old"])
    valve.advance("old", 10)

    grown = WatermarkValve(["old", "new"])
    grown.restore(valve.snapshot())
    assert grown.advance("old", 20) is None  # the new one has sent no watermark yet

    again = WatermarkValve(["old", "new"])
    again.restore(grown.snapshot())
    assert again.advance("old", 30) is None
    assert again.watermark == 10
    assert again.advance("new", 25) == 25


def test_a_new_channel_that_lags_behind_holds_event_time_back() -> None:
    valve = WatermarkValve(["old", "new"])
    valve.restore(ValveState(10, {"old": ChannelWatermark(10)}))
    valve.advance("new", 5)

    again = WatermarkValve(["old", "new"])
    again.restore(valve.snapshot())
    assert again.advance("old", 30) is None
    assert again.advance("new", 12) == 12
