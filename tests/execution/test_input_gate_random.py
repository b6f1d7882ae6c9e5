"""The gate under random logs, reads and queries: which records come before a snapshot, and when the data ends."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import BarrierMark, EndOfData, EndOfPartition, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.gate_snapshots import PinDue
from dagster_checkpoints.execution.input_channel import GateChannel
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.task_events import (
    ElementsArrived,
    OpenTo,
    QueryBuilt,
    QueryConsumed,
    QueryRunning,
    SnapshotPinned,
    TaskOpened,
)

BARRIERS = 3
ROW = "row"


@st.composite
def logs(draw: st.DrawFn) -> dict[str, list[Any]]:
    """A log per channel: barriers 1 to 3 in order, rows, watermarks and idleness between them, and its end."""
    made = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        log: list[Any] = []
        watermark = 0
        ends_before = draw(st.sampled_from([None, None, 2, 3]))  # the producer ends before this barrier
        for checkpoint_id in range(1, BARRIERS + 1):
            if checkpoint_id == ends_before:
                break
            for kind in draw(st.lists(st.sampled_from(["row", "row", "watermark", "idle"]), max_size=4)):
                watermark += 1
                marks = {"row": ROW, "watermark": WatermarkAt(watermark), "idle": WatermarkStatus(watermark % 2 == 0)}
                log.append(marks[kind])
            log.append(BarrierMark(CheckpointBarrier(checkpoint_id, 0.0)))
        made[name] = [*log, ROW, WatermarkAt(MAX_WATERMARK_MS), EndOfData(True), EndOfPartition()]
    return made


class World:
    """A gate, its logs, and a query that runs independently."""

    def __init__(self, channels: dict[str, list[Any]]) -> None:
        self.logs = channels
        self.gate = InputGate([GateChannel(name) for name in channels], CheckpointConfig(interval=None))
        self.open_to = dict.fromkeys(channels, 0)
        self.consumed = dict.fromkeys(channels, 0)
        self.pinned: list[int] = []
        self.ended = False
        for event in (TaskOpened(), QueryBuilt(), QueryRunning()):
            self.handle(event)

    def handle(self, event: object) -> None:
        for action in self.gate.handle(event, 0.0):
            assert not self.ended, f"{action} behind the end"
            if isinstance(action, OpenTo):
                assert all(action.positions[name] >= position for name, position in self.open_to.items())
                self.open_to = dict(action.positions)
            elif isinstance(action, PinDue):
                self._check_cut(action.pin.barrier.checkpoint_id)
                self.pinned.append(action.pin.barrier.checkpoint_id)
                self.handle(SnapshotPinned(self.pinned[-1]))
            elif isinstance(action, life.EndOfDataReceived):
                assert action.drain
                assert self.consumed == {name: log.index(EndOfData(True)) - 1 for name, log in self.logs.items()}
                self.ended = True

    def _check_cut(self, checkpoint_id: int) -> None:
        """The query has consumed exactly the rows before the barriers, and no element behind them was read."""
        assert self.consumed == self.open_to
        for name, log in self.logs.items():
            barrier = BarrierMark(CheckpointBarrier(checkpoint_id, 0.0))
            place = log.index(barrier) if barrier in log else log.index(EndOfPartition())
            assert self.gate.scanned(name) == place + 1
            assert ROW not in log[self.consumed[name] : place]
            assert self.consumed[name] <= place

    def read(self, name: str, elements: int) -> None:
        position = self.gate.scanned(name)
        if self.gate.reads(name) and position < len(self.logs[name]):
            self.handle(ElementsArrived(((name, self.logs[name][position : position + elements]),)))

    def consume(self, name: str, elements: int) -> None:
        upto = min(self.consumed[name] + elements, self.open_to[name])
        if upto > self.consumed[name]:
            self.consumed[name] = upto
            self.handle(QueryConsumed({name: upto}))


@given(logs(), st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 4)), max_size=60))
def test_snapshots_are_consistent_cuts_and_the_end_comes_last(
    channels: dict[str, list[Any]], steps: list[tuple[bool, int, int]]
) -> None:
    world = World(channels)
    names = list(channels)
    rest = [(reads, channel, 4) for _ in range(40) for channel in range(3) for reads in (True, False)]
    for reads, channel, elements in [*steps, *rest]:
        if world.ended:
            break
        (world.read if reads else world.consume)(names[channel % len(names)], elements)
    brought = {e.barrier.checkpoint_id for log in channels.values() for e in log if isinstance(e, BarrierMark)}
    assert world.pinned == sorted(brought)
    assert world.ended
