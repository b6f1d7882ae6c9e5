"""Parts of a gate's event time: how its channels have ended, and what a restore leaves of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS
from dagster_checkpoints.execution.elements import EndOfData, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.event_time import GateWatermarks, OutputEventTime
from dagster_checkpoints.execution.gate_snapshots import BarrierMemory, pinned_inputs
from dagster_checkpoints.execution.input_channel import GateChannel, InputChannel, gate_channel
from dagster_checkpoints.execution.task_events import Forward, QueryBuilt, WatermarkReached


@pytest.mark.parametrize(("drain", "ended"), [(True, "drain"), (False, "suspend")])
def test_the_first_end_of_a_channel_is_the_one_that_counts(drain: bool, ended: str) -> None:
    channel = InputChannel(GateChannel("a"))
    watermarks = GateWatermarks([channel], {}, None)
    watermarks.take_in(channel, EndOfData(drain))
    watermarks.take_in(channel, EndOfData(not drain))
    assert channel.ended == watermarks.snapshot().channels["a"].ended == ended


class Gate:
    """The event time of a task without state: of its channels, and what its consumers know."""

    def __init__(self) -> None:
        self.channels = {name: InputChannel(GateChannel(name)) for name in "abc"}
        self.watermarks = GateWatermarks(list(self.channels.values()), {}, None)
        self.output = OutputEventTime()
        self.known: tuple[int | None, bool] = (None, False)
        """The watermark and the idleness that the consumers know."""

    def take(self, channel: str, mark: Any, *, told: bool) -> None:
        """Take in a mark; `told`: whether the consumers are told, too, before a checkpoint."""
        self.watermarks.take_in(self.channels[channel], mark)
        if told:
            self.tell()

    def tell(self) -> None:
        self.watermarks.let_through(QueryBuilt(takes_watermark=False))
        for event in self.watermarks.between_batches(caught_up=True):
            assert isinstance(event, WatermarkReached | Forward)
            for mark in self.output.handle(event if isinstance(event, WatermarkReached) else event.mark):  # type: ignore[arg-type]
                watermark, idle = self.known
                self.known = (mark.ms, idle) if isinstance(mark, WatermarkAt) else (watermark, mark.idle)  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Another attempt begins with what a checkpoint records of this one."""
        inputs = pinned_inputs(self.channels.values(), self.watermarks.snapshot(), 1, BarrierMemory())
        begins = [gate_channel(name, False, 0, each.snapshot) for name, each in zip("abc", inputs.channels, strict=True)]
        self.channels = {each.name: InputChannel(each) for each in begins}
        restored = {each.name: each.restored for each in begins if each.restored is not None}
        self.watermarks = GateWatermarks(list(self.channels.values()), restored, inputs.valve_watermark)
        self.watermarks.moved = inputs.valve_watermark is not None  # every query gets the watermark of the restored checkpoint
        self.output = OutputEventTime(watermark=self.output.watermark, idle=None)


MARKS = [WatermarkStatus(True), WatermarkStatus(False), EndOfData(True), EndOfData(False), *map(WatermarkAt, range(1, 10))]

ALL_ACTIVE_ARE_BEHIND = [
    *[("a", WatermarkAt(10)), ("b", WatermarkAt(7)), ("c", WatermarkAt(2)), ("c", WatermarkStatus(True))],
    *[("a", WatermarkStatus(True)), ("b", WatermarkStatus(True)), ("c", WatermarkStatus(False))],
]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(MARKS), st.booleans()), max_size=30))
@example([(channel, mark, True) for channel, mark in ALL_ACTIVE_ARE_BEHIND])
@example([(name, WatermarkStatus(True), True) for name in "abc"] + [("a", WatermarkStatus(False), False)])
def test_a_restore_behind_any_step_moves_event_time_neither_on_nor_back(steps: list[tuple[str, Any, bool]]) -> None:
    gate, restored = Gate(), Gate()
    for channel, mark, told in steps:
        gate.take(channel, mark, told=told)
        restored.take(channel, mark, told=told)
        restored.restore()
        assert restored.watermarks.snapshot() == gate.watermarks.snapshot()
        assert restored.watermarks.watermark == max(gate.watermarks.watermark, MIN_WATERMARK_MS)
    gate.tell()
    restored.tell()
    assert restored.known == gate.known
