"""Which splits an enumerator hands out, what a checkpoint holds of them, and what a task does with them."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.events import EndOfDataReached, TaskStateChanged
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.execution.split_events import (
    AssignSplit,
    EnumeratorStart,
    NoMoreSplits,
    SplitRequest,
    SplitsDiscovered,
)
from dagster_checkpoints.execution.splits import SplitCounts, SplitEnumerator, SplitEnumerators
from dagster_checkpoints.execution.task_events import EndInput, PinSnapshot, ReadSplit, Report, SplitRead, StopSource, TaskOpened
from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import EnumeratorState, TaskSnapshot
from dagster_checkpoints.state.recording import recorded_enumerators

A, B = TaskId("days", 0), TaskId("days", 1)


def start(bounded: bool = True, state: EnumeratorState = EnumeratorState(), *held: str) -> EnumeratorStart:  # noqa: B008
    return EnumeratorStart("days", (A, B), bounded, 5.0, state, frozenset(held))


def enumerator(*splits: str, bounded: bool = True, last: bool = True) -> SplitEnumerator:
    made = SplitEnumerator(start(bounded))
    made.discover()
    assert made.discovered(SplitsDiscovered("days", splits, last), 0.0) == []
    return made


def asks(task: TaskId, *finished: str) -> SplitRequest:
    return SplitRequest(task, finished, asks=True)


def test_each_split_goes_to_one_task_and_tasks_end_one_by_one() -> None:
    of = enumerator("1", "2", "1", "3")
    assert of.asked(asks(A)) == [(A, AssignSplit("1"))]
    assert of.asked(asks(B)) == [(B, AssignSplit("2"))]
    assert of.asked(asks(A, "1")) == [(A, AssignSplit("3"))]
    assert of.asked(asks(B, "2")) == [(B, NoMoreSplits())]
    assert of.counts == SplitCounts(discovered=3, assigned=1, finished=2, complete=True)
    assert of.asked(asks(A, "3")) == [(A, NoMoreSplits())]
    assert of.state() == EnumeratorState((), (), ("1", "2", "3"), complete=True)
    with pytest.raises(UnexpectedEvent, match="'1', which it was not assigned"):
        of.asked(asks(A, "1"))


def test_tasks_wait_for_splits_while_a_discovery_runs_and_of_an_unbounded_source_for_ever() -> None:
    of = enumerator(last=False)
    assert of.asked(asks(A)) == of.asked(asks(B)) == []
    assert of.discovered(SplitsDiscovered("days", ("1",)), 1.0) == [(A, AssignSplit("1"))]
    assert of.discovered(SplitsDiscovered("days", ("1",), last=True), 1.0) == [(B, NoMoreSplits())]
    assert of.next_discovery is None

    of = enumerator("1", bounded=False)
    assert of.asked(asks(A)) == [(A, AssignSplit("1"))]
    assert of.asked(asks(A, "1")) == []
    assert of.next_discovery == 5.0
    of.discover()
    assert of.next_discovery is None, "one runs"
    assert of.discovered(SplitsDiscovered("days", ("1", "2"), last=True), 7.0) == [(A, AssignSplit("2"))]
    assert of.next_discovery == 12.0


def test_a_task_that_is_to_end_gets_no_split_and_nothing_is_discovered_for_ended_tasks() -> None:
    of = enumerator("1", bounded=False)
    of.end([A])
    assert of.asked(asks(A)) == [(A, NoMoreSplits())]
    assert of.asked(asks(B)) == [(B, AssignSplit("1"))]
    assert of.next_discovery == 5.0
    of.end([B])
    assert of.next_discovery is None


@pytest.mark.parametrize("burst", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("ended", [(A,), (A, B)], ids=["one", "all"])
def test_a_source_that_was_ended_before_a_restart_leaves_no_split_that_it_had_read(
    ended: tuple[TaskId, ...], bounded: bool, burst: bool
) -> None:
    """Split 3 was discovered, and read, behind the restored checkpoint; split 2 is of an instance that is gone."""
    of = SplitEnumerator(start(bounded, EnumeratorState((), ("1", "2")), "1"), set(ended), burst=burst)
    assert of.next_discovery is not None
    of.discover()
    assert of.asked(asks(B, "1")) == [(B, AssignSplit("2"))]
    assert of.asked(asks(A)) == ([(A, NoMoreSplits())] if ended == (A,) else [])
    given = of.discovered(SplitsDiscovered("days", ("1", "2", "3"), last=True), 7.0) + of.asked(asks(B, "2"))
    ends = bounded or ended == (A, B)
    if ended == (A, B):
        assert given == [(A, AssignSplit("3")), (B, NoMoreSplits())]
        assert of.asked(asks(A, "3")) == [(A, NoMoreSplits())]
    else:
        assert given == [(B, AssignSplit("3"))]
        assert of.asked(asks(B, "3")) == ([(B, NoMoreSplits())] if ends else [])
    assert of.next_discovery == (None if ends or burst else 12.0)
    assert (of.counts.complete, of.has_read_all) == (ends, not ends)


def test_a_restored_enumerator_knows_all_splits_and_assigns_again_what_no_task_holds() -> None:
    taken = EnumeratorState(("4",), ("2", "3"), ("1",), complete=False)
    of = SplitEnumerator(start(True, taken, "3"))
    assert of.next_discovery is not None, "the discovery had not come to its end"
    assert of.discovered(SplitsDiscovered("days", ("1", "2", "3", "4", "5"), last=True), 0.0) == []
    assert of.state() == EnumeratorState(("2", "4", "5"), ("3",), ("1",), complete=True)
    assert SplitEnumerator(start(True, of.state())).next_discovery is None, "its set of splits is fixed"


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("ended", [(), (A,), (A, B)], ids=["none", "one", "all"])
@pytest.mark.parametrize("burst", [False, True])
def test_a_source_of_which_a_complete_discovery_was_made_discovers_again_if_it_does_not_end(
    bounded: bool, ended: tuple[TaskId, ...], burst: bool
) -> None:
    """It was bounded, or its instances were to end; now its code says that it is unbounded, or it has other instances, too."""
    of = SplitEnumerator(start(bounded, EnumeratorState(("2",), (), ("1",), complete=True)), set(ended), burst=burst)
    ends = bounded or ended == (A, B)
    assert (of.counts.complete, of.next_discovery is None) == (ends, ends)
    assert of.asked(asks(B)) == [(B, AssignSplit("2"))]
    if ends:
        assert of.asked(asks(B, "2")) == [(B, NoMoreSplits())]
        return
    of.discover()
    assert of.asked(asks(B, "2")) == []
    assert of.discovered(SplitsDiscovered("days", ("1", "2", "3"), last=True), 7.0) == [(B, AssignSplit("3"))]
    assert of.asked(asks(B, "3")) == []
    assert of.next_discovery == (None if burst else 12.0)


def test_a_checkpoint_holds_the_enumerator_at_its_trigger_and_the_tasks_at_their_barriers() -> None:
    """Each split is in the checkpoint once, whatever happens between the trigger, the barriers and the last acknowledgement."""
    of = SplitEnumerators()
    of.begin([start()], frozenset())
    assert of.discover(0.0, {"days"}) == ["days"]
    of.take(SplitsDiscovered("days", ("1", "2", "3", "4"), last=True), 0.0)
    of.take(asks(A), 0.0), of.take(asks(B), 0.0)
    of.triggered(7)
    # A has read "1" before the barrier reaches it; its next split is behind the barrier. B holds "2".
    assert of.take(asks(A, "1"), 0.0) == [(A, AssignSplit("3"))]
    of.triggered(8)
    snapshots = {A: TaskSnapshot(), B: TaskSnapshot(splits=("2",)), TaskId("other", 0): TaskSnapshot(splits=("1",))}
    taken = recorded_enumerators(of.written(7), snapshots)
    assert taken == {"days": EnumeratorState(("3", "4"), ("2",), ("1",), complete=True)}
    assert of.written(7) == {}
    of.failed(8)
    assert of.written(8) == {}


# A task


def actions_of(machine: TaskMachine, event: Any) -> list[Any]:
    return machine.handle(event, 0.0)


def opened(*held: str) -> tuple[TaskMachine, list[Any]]:
    machine = TaskMachine(A, CheckpointConfig(interval=None), splits=held)
    running, *actions = actions_of(machine, TaskOpened())
    assert running == Report(TaskStateChanged(A, TaskState.RUNNING))
    return machine, actions


def test_a_task_reads_one_split_after_the_other_and_asks_when_it_has_none() -> None:
    machine, actions = opened()
    assert actions == [Report(SplitRequest(A, (), asks=True))]
    assert actions_of(machine, AssignSplit("1")) == [ReadSplit("1")]
    assert actions_of(machine, AssignSplit("2")) == []
    assert actions_of(machine, SplitRead("1")) == [Report(SplitRequest(A, ("1",))), ReadSplit("2")]
    assert actions_of(machine, SplitRead("2")) == [Report(SplitRequest(A, ("2",), asks=True))]
    ended = actions_of(machine, NoMoreSplits())
    assert ended == [life.FinishOperators()]
    assert Report(EndOfDataReached(A)) in actions_of(machine, life.OperatorsFinished())
    assert actions_of(machine, AssignSplit("3")) == [], "too late"


def test_a_restored_task_begins_with_its_splits_and_a_snapshot_holds_those_that_are_not_read_to_their_end() -> None:
    machine, actions = opened("1", "2")
    assert actions == [ReadSplit("1")]
    trigger = TriggerReceived(CheckpointBarrier(3, 0.0, CheckpointProperties()))
    (pin,) = actions_of(machine, trigger)
    assert isinstance(pin, PinSnapshot)
    assert pin.inputs.splits == ("1", "2")
    assert actions_of(machine, SplitRead("1")) == [Report(SplitRequest(A, ("1",))), ReadSplit("2")]


def test_a_task_that_is_to_end_reads_the_splits_that_it_has() -> None:
    machine, _ = opened("1", "2")
    assert actions_of(machine, EndInput()) == []
    assert actions_of(machine, SplitRead("1")) == [Report(SplitRequest(A, ("1",))), ReadSplit("2")]
    assert actions_of(machine, SplitRead("2")) == [Report(SplitRequest(A, ("2",))), life.FinishOperators()]
    machine, _ = opened()
    assert actions_of(machine, EndInput()) == [life.FinishOperators()]
    assert StopSource() not in actions_of(machine, life.OperatorsFinished())


@pytest.mark.parametrize("event", [AssignSplit("1"), NoMoreSplits(), SplitRead("1")])
def test_a_task_of_another_source_refuses_splits(event: Any) -> None:
    machine = TaskMachine(A, CheckpointConfig(interval=None))
    with pytest.raises(UnexpectedEvent, match="reads no splits"):
        actions_of(machine, event)
