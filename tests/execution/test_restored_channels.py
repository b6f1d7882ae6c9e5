"""The first elements of a restored channel."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS, ChannelWatermark
from dagster_checkpoints.execution.elements import EndOfData, EndOfPartition, WatermarkAt
from dagster_checkpoints.execution.input_channel import GateChannel, first_elements, gate_channel
from dagster_checkpoints.state.metadata import ChannelEnd, ChannelSnapshot

END = [EndOfData(drain=True), EndOfPartition()]


def test_a_channel_begins_with_what_was_in_flight_at_its_consumer_then_at_its_producer_then_with_its_end() -> None:
    assert first_elements((), False) == []
    assert first_elements(["row", WatermarkAt(7)], False) == ["row", WatermarkAt(7)]
    assert first_elements(["received"], False, ["sent"]) == ["received", "sent"]
    assert first_elements((), True) == END
    assert first_elements(["received"], True, ["sent"]) == ["received", "sent", *END]


def test_a_channel_that_no_checkpoint_holds_is_known_by_its_name_and_kind() -> None:
    assert gate_channel("a[0]->b[1]", True, 5, None) == GateChannel("a[0]->b[1]", static=True, position=5, restored=None)
    assert gate_channel("a[0]->b[1]", False, 0, None) == GateChannel("a[0]->b[1]", static=False, position=0, restored=None)


@pytest.mark.parametrize(
    ("ended", "known"), [("none", "none"), ("drain", "drain"), ("suspend", "suspend"), ("partition", "drain")]
)
def test_a_channel_continues_with_its_event_time_and_its_end(ended: ChannelEnd, known: str) -> None:
    saved = ChannelSnapshot("c", position=9, watermark=40, idle=True, ended=ended)
    restored = ChannelWatermark(40, True, known)  # type: ignore[arg-type]  # a parameter of the test
    assert gate_channel("c", False, 9, saved) == GateChannel("c", False, 9, restored)


def test_a_channel_without_a_watermark_begins_with_the_lowest_one() -> None:
    saved = ChannelSnapshot("c", position=3)
    assert gate_channel("c", True, 4, saved) == GateChannel("c", True, 4, ChannelWatermark(MIN_WATERMARK_MS, False, "none"))
    zero = ChannelSnapshot("c", position=3, watermark=0)
    assert gate_channel("c", True, 4, zero).restored == ChannelWatermark(0, False, "none")
