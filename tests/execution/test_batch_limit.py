"""A gate whose micro-batches are limited: how far it opens, whose turn it is, and how barriers pass what waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.barriers.events import AlignmentTick
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointKind, CheckpointProperties
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.execution.elements import BarrierMark, EndOfData, Mark, WatermarkAt
from dagster_checkpoints.execution.gate_snapshots import InputsCaptured, PinDue
from dagster_checkpoints.execution.input_channel import GateChannel
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.task_events import (
    BuildQuery,
    ElementsArrived,
    HoldQuery,
    OpenTo,
    QueryBuilt,
    QueryConsumed,
    QueryHeld,
    QueryRunning,
    SnapshotPinned,
    TaskOpened,
    UnreadBarrier,
)

ALIGNED = CheckpointConfig(interval=None)
UNALIGNED = CheckpointConfig(interval=None, unaligned=True)
TIMEOUT = CheckpointConfig(interval=None, unaligned=True, aligned_checkpoint_timeout=5.0)
DRAIN = EndOfData(True)
Waiting = int | Mark
"""What waits on a channel: records, as their number of rows, or a mark."""


def mark(checkpoint_id: int, timestamp: float = 0.0) -> BarrierMark:
    return BarrierMark(CheckpointBarrier(checkpoint_id, timestamp))


def savepoint(checkpoint_id: int) -> BarrierMark:
    return BarrierMark(CheckpointBarrier(checkpoint_id, 0.0, CheckpointProperties(kind=CheckpointKind.SAVEPOINT, forced=True)))


class Stage:
    """A limited gate in front of the logs of its channels, driven as a task on Spark drives it."""

    def __init__(self, max_rows: int | None, config: CheckpointConfig = ALIGNED, static: Sequence[str] = (), **logs: Any) -> None:
        self.logs: dict[str, list[Waiting]] = {name: list(elements) for name, elements in logs.items()}
        self.gate = InputGate([GateChannel(name, name in static) for name in logs], config, max_rows=max_rows)
        self.open: dict[str, int] = dict.fromkeys(logs, 0)
        self.consumed: dict[str, int] = dict.fromkeys(logs, 0)
        self.watermark: int | None = None
        self.batches: list[dict[str, list[int]]] = []
        self.actions: list[Any] = []
        self.handle(TaskOpened())

    def handle(self, event: object) -> None:
        for action in self.gate.handle(event, 0.0):
            self.actions.append(action)
            match action:
                case OpenTo(positions, watermark):
                    self.open.update(positions)
                    self.watermark = watermark
                case BuildQuery():
                    self.handle(QueryBuilt())
                    self.handle(QueryRunning())
                case PinDue():
                    self.handle(SnapshotPinned(action.pin.barrier.checkpoint_id))

    def step(self, *names: str) -> None:
        """Hand the gate what it reads, then announce what it does not read up to."""
        arrived = [(name, self.logs[name][self.gate.scanned(name) :]) for name in names or self.logs if self.gate.reads(name)]
        rows = {name: [e if isinstance(e, int) else 0 for e in elements] for name, elements in arrived}
        self.handle(ElementsArrived(arrived, rows))
        for name in self.logs:
            newer_than = self.gate.announces(name)
            unread = self.logs[name][self.gate.scanned(name) :]
            for at, element in enumerate(unread):
                if newer_than is not None and isinstance(element, BarrierMark) and element.barrier.checkpoint_id > newer_than:
                    self.handle(UnreadBarrier(name, element.barrier, tuple(unread[:at])))
                    break

    def batch(self) -> None:
        """Run a micro-batch over everything that is open."""
        self.batches.append(
            {n: [e for e in log[self.consumed[n] : self.open[n]] if isinstance(e, int)] for n, log in self.logs.items()}
        )
        self.consumed.update(self.open)
        self.handle(QueryConsumed(dict(self.open)))

    def run(self, batches: int = 1_000) -> list[list[int]]:
        """Run micro-batches until nothing is left; returns the rows of the elements of each."""
        for _ in range(batches):
            self.step()
            if self.open == self.consumed:
                break
            self.batch()
        return [[rows for channel in batch.values() for rows in channel] for batch in self.batches]

    @property
    def pinned(self) -> list[int]:
        return [action.pin.barrier.checkpoint_id for action in self.actions if isinstance(action, PinDue)]


@pytest.mark.parametrize(
    ("limit", "elements", "batches"),
    [
        (None, [3, 3, 9], [[3, 3, 9]]),
        (10, [3, 3, 3, 3, 3], [[3, 3, 3], [3, 3]]),
        (9, [3, 3, 3, 3], [[3, 3, 3], [3]]),
        (8, [3, 3, 3, 3], [[3, 3], [3, 3]]),
        (1, [1, 1], [[1], [1]]),
        (5, [9, 2, 9, 2, 2], [[9], [2], [9], [2, 2]]),  # larger than the limit: a micro-batch of its own
        (5, [2, WatermarkAt(1), 2, WatermarkAt(2), 2], [[2, 2], [2]]),
    ],
)
def test_where_a_micro_batch_ends(limit: int | None, elements: list[Waiting], batches: list[list[int]]) -> None:
    assert Stage(limit, a=elements).run() == batches


def test_a_watermark_behind_records_that_wait_waits_with_them() -> None:
    stage = Stage(4, a=[2, WatermarkAt(10), 2, WatermarkAt(20), 2, WatermarkAt(30)])
    stage.step()
    assert (stage.open, stage.watermark) == ({"a": 3}, 20)
    stage.batch()
    stage.step()
    assert (stage.open, stage.watermark) == ({"a": 5}, 30)


def test_the_data_ends_behind_the_last_micro_batch() -> None:
    stage = Stage(1, a=[1, 1, DRAIN])
    assert stage.run() == [[1], [1]]
    assert not stage.gate.open


@pytest.mark.parametrize(
    ("a", "b", "batches"),
    [
        ([2, 2, 2], [2, 2, 2], [{"a": [2, 2], "b": [2]}, {"a": [2], "b": [2, 2]}]),
        ([1] * 6, [3, 3], [{"a": [1, 1, 1], "b": [3]}, {"a": [1, 1, 1], "b": [3]}]),
        ([], [2, 2, 2], [{"a": [], "b": [2, 2, 2]}]),
    ],
)
def test_inputs_share_the_limit_by_rows(a: list[int], b: list[int], batches: list[dict[str, list[int]]]) -> None:
    stage = Stage(6, a=a, b=b)
    stage.run()
    assert stage.batches == batches


def test_an_input_with_large_elements_gets_its_turn_beside_one_that_never_ends() -> None:
    stage = Stage(4, a=[1] * 100, b=[9])
    stage.step("a")
    stage.step("b")
    for _ in range(2):
        stage.consumed["a"] += 1  # the query never catches up with everything that is open
        stage.handle(QueryConsumed({"a": stage.consumed["a"]}))
        stage.step()
    assert stage.open["a"] == 5, "after the element that began to wait before b, the room is kept for b"
    stage.batch()
    stage.step()
    assert stage.open["b"] == 1


def test_a_barrier_in_front_of_records_that_wait_is_read_at_once() -> None:
    stage = Stage(2, a=[2, mark(1), 2])
    stage.step()
    assert stage.pinned == []
    stage.batch()
    assert stage.pinned == [1]


def test_an_aligned_barrier_waits_for_the_micro_batches_in_front_of_it() -> None:
    stage = Stage(2, a=[2, 2, 2, mark(1), 2])
    stage.run(batches=2)
    assert stage.pinned == []
    stage.run(batches=1)
    assert stage.pinned == [1]


def test_an_unaligned_barrier_waits_for_the_running_micro_batch_only() -> None:
    stage = Stage(2, UNALIGNED, a=[2] * 100 + [mark(1)])
    stage.step()
    assert [a for a in stage.actions if isinstance(a, HoldQuery)] == [HoldQuery(1)]
    stage.handle(QueryHeld(1, {"a": 1}))
    (pin,) = [action.pin for action in stage.actions if isinstance(action, PinDue)]
    (channel,) = pin.inputs.channels
    assert (channel.snapshot.position, channel.in_flight) == (1, ())
    (captured,) = [action for action in stage.actions if isinstance(action, InputsCaptured)]
    assert captured == InputsCaptured(1, {"a": (2,) * 99})


@pytest.mark.parametrize("other", [[], [2, 2]], ids=["read", "announced"])
def test_an_unaligned_barrier_on_one_channel_does_not_wait_for_what_another_channel_queues(other: list[Waiting]) -> None:
    stage = Stage(2, UNALIGNED, a=[*other, mark(1)], b=[2] * 100 + [mark(1)])
    stage.step()
    if stage.gate.holding:
        stage.handle(QueryHeld(1, stage.consumed | {"a": stage.open["a"]}))
    stage.step()
    (captured,) = [action for action in stage.actions if isinstance(action, InputsCaptured)]
    assert sum(captured.captured["b"]) == 200  # type: ignore[arg-type]


def test_a_second_unaligned_barrier_overtakes_behind_the_first_one_that_is_still_unread() -> None:
    stage = Stage(1, UNALIGNED, a=[1, 1, 1, mark(1), 1, mark(2)])
    stage.step()
    stage.handle(QueryHeld(1, {"a": 1}))
    stage.step()
    stage.handle(QueryHeld(2, {"a": 2}))
    captured = [action for action in stage.actions if isinstance(action, InputsCaptured)]
    assert captured == [InputsCaptured(1, {"a": (1, 1)}), InputsCaptured(2, {"a": (1, 1)})]
    assert stage.run()[-1] == [1]
    assert stage.pinned == [1, 2], "a barrier that is read behind its snapshot takes no other"


def test_an_announced_barrier_overtakes_when_its_time_has_passed() -> None:
    stage = Stage(1, TIMEOUT, a=[1, 1, mark(1)])
    stage.step()
    assert stage.gate.holding is None
    stage.handle(AlignmentTick(5.0))
    assert stage.gate.holding == 1


def test_the_barrier_of_a_savepoint_does_not_overtake_what_waits() -> None:
    stage = Stage(1, UNALIGNED, a=[1, 1, savepoint(1)])
    stage.step()
    assert stage.gate.holding is None
    stage.batch()
    assert stage.pinned == []
    stage.step()
    stage.batch()
    assert stage.pinned == [1]


@pytest.mark.parametrize("config", [ALIGNED, UNALIGNED])
def test_what_was_held_for_a_static_input_is_opened_as_far_as_it_fits(config: CheckpointConfig) -> None:
    stage = Stage(4, config, static=["table"], a=[2, WatermarkAt(1), 2, 2, WatermarkAt(2)], b=[2, 2], table=[])
    stage.step()
    assert stage.open == {"a": 0, "b": 0, "table": 0}
    stage.logs["table"].append(DRAIN)
    stage.step()
    assert stage.gate.open and (stage.open["a"], stage.open["b"]) == (1, 1)
    stage.logs["a"].append(2)
    for _ in range(4):
        stage.batch()
        stage.step()
    stage.batch()
    read = {name: [rows for batch in stage.batches for rows in batch[name]] for name in ("a", "b")}
    assert read == {"a": [2, 2, 2, 2], "b": [2, 2]}
    assert all(sum(batch["a"]) + sum(batch["b"]) <= 4 for batch in stage.batches)


ELEMENT = st.one_of(st.integers(1, 6), st.integers(0, 9).map(WatermarkAt))


@given(
    limit=st.integers(1, 8),
    logs=st.lists(st.lists(ELEMENT, max_size=12), min_size=1, max_size=3),
    static=st.booleans(),
    unaligned=st.booleans(),
    choices=st.lists(st.integers(0, 11), max_size=60),
)
def test_a_micro_batch_never_has_more_rows_than_the_limit_and_everything_is_read(
    limit: int, logs: list[list[Waiting]], static: bool, unaligned: bool, choices: list[int]
) -> None:
    named: dict[str, Any] = {f"c{n}": [*log, DRAIN] for n, log in enumerate(logs)}
    inputs = list(named)
    if static:
        named["table"] = []
    stage = Stage(limit, UNALIGNED if unaligned else ALIGNED, static=["table"] if static else (), **named)

    def fits() -> None:
        rows = [e for n in inputs for e in stage.logs[n][stage.consumed[n] : stage.open[n]] if isinstance(e, int)]
        assert len(rows) <= 1 or sum(rows) <= limit

    for choice in choices:
        name = inputs[choice % len(inputs)]
        if choice < 6:
            stage.step(name)
        elif choice < 9 and stage.open[name] > stage.consumed[name]:
            stage.consumed[name] += 1  # the running micro-batch was planned before the gate opened further
            stage.handle(QueryConsumed({name: stage.consumed[name]}))
        elif choice == 9 and static:
            stage.logs["table"] = [DRAIN]
        fits()
    if static:
        stage.logs["table"] = [DRAIN]
        stage.step()
    for _ in range(200):
        stage.step()
        fits()
        stage.batch()
    assert not stage.gate.open, "the data has ended"
    assert {n: stage.gate.scanned(n) for n in inputs} == {n: len(named[n]) for n in inputs}
