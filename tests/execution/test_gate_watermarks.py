"""Parts of a gate's event time: how its channels have ended."""

from __future__ import annotations

import pytest

from dagster_checkpoints.execution.elements import EndOfData
from dagster_checkpoints.execution.gate_watermarks import GateWatermarks
from dagster_checkpoints.execution.input_channel import GateChannel, InputChannel


@pytest.mark.parametrize(("drain", "ended"), [(True, "drain"), (False, "suspend")])
def test_the_first_end_of_a_channel_is_the_one_that_counts(drain: bool, ended: str) -> None:
    channel = InputChannel(GateChannel("a"))
    watermarks = GateWatermarks([channel], {}, None)
    watermarks.take_in(channel, EndOfData(drain))
    watermarks.take_in(channel, EndOfData(not drain))
    assert channel.ended == watermarks.snapshot().channels["a"].ended == ended
