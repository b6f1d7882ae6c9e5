"""The end of a task's life, as rows of events and the actions they lead to."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination import LifecycleState, TaskLifecycle, UnexpectedEvent
from dagster_checkpoints.coordination.lifecycle import (
    CheckpointAborted,
    CheckpointCompleted,
    CloseOperators,
    CommitUpTo,
    EmitEndOfData,
    EmitEndOfPartition,
    EndOfDataReceived,
    FinishOperators,
    LifecycleAction,
    LifecycleEvent,
    OperatorsFinished,
    RestoredAfterFinish,
    SnapshotTaken,
    TaskFinished,
)

EVENTS: dict[str, LifecycleEvent] = {
    "end": EndOfDataReceived(True),
    "suspend": EndOfDataReceived(False),
    "finished": OperatorsFinished(),
    "restored": RestoredAfterFinish(),
}
CLOSE: list[LifecycleAction] = [CloseOperators(), EmitEndOfPartition(), TaskFinished()]


def event(text: str) -> LifecycleEvent:
    """Reads ``s42`` (snapshot taken), ``c42`` (completed), ``a42`` (aborted) or a name of EVENTS."""
    if text in EVENTS:
        return EVENTS[text]
    kinds: dict[str, type[SnapshotTaken | CheckpointCompleted | CheckpointAborted]] = {
        "s": SnapshotTaken,
        "c": CheckpointCompleted,
        "a": CheckpointAborted,
    }
    return kinds[text[0]](int(text[1:]))


@pytest.mark.parametrize(
    ("events", "commits", "closes"),
    [
        # Commits in order; whether the task closes, and then at the last event of the row.
        ("end finished s1 c1", [1], True),
        ("end finished", [], False),
        ("end finished s1", [], False),
        # Before the end: commits, no closing.
        ("s1 c1 end finished", [1], False),
        ("s1 end finished c1", [1], False),
        # Snapshot during finish is one before finish.
        ("end s1 finished c1", [1], False),
        ("end s1 finished c1 s2 c2", [1, 2], True),
        # Any checkpoint triggered after finish, not the first.
        ("end finished s42 s43 s44 c43", [43], True),
        ("end finished s42 s43 s44 c42", [42], True),
        # A later one than its own least counts.
        ("end finished s42 c45", [45], True),
        # An older one does not.
        ("s41 end finished s42 c41", [41], False),
        # One that began before is waited for, unless it aborts.
        ("s41 end finished s42 c42", [42], False),
        ("s41 end finished s42 c42 a41", [42], True),
        ("s41 end finished s42 c42 c41", [42, 41], True),
        ("s41 end finished s42 a41 c42", [42], True),
        # An aborted one lets nobody go.
        ("end finished s42 a42 c43", [43], False),
        ("end finished s42 a42 s43 c43", [43], True),
        # Restored after finish: straight into waiting.
        ("restored", [], False),
        ("restored c7", [7], False),
        ("restored s8 c8", [8], True),
        ("restored end s8 c8", [8], True),
    ],
)
def test_final_checkpoint(events: str, commits: list[int], closes: bool) -> None:
    life = TaskLifecycle()
    actions = [life.handle(event(text)) for text in events.split()]
    flat = [action for step in actions for action in step]
    assert [a.checkpoint_id for a in flat if isinstance(a, CommitUpTo)] == commits
    assert (actions[-1][-3:] == CLOSE) == closes
    assert sum(isinstance(a, TaskFinished) for a in flat) == closes
    assert (life.state is LifecycleState.FINISHED) == closes
    if closes and isinstance(actions[-1][0], CommitUpTo):
        # The commit needs the resources that close releases.
        assert len(actions[-1]) == 4


def test_the_way_to_the_end() -> None:
    life = TaskLifecycle()
    assert life.handle(EndOfDataReceived(True)) == [FinishOperators()]
    assert life.state is LifecycleState.FINISHING
    assert not life.operators_finished
    assert life.handle(OperatorsFinished()) == [EmitEndOfData(True)]
    assert life.state is LifecycleState.WAITING_FOR_FINAL_CHECKPOINT
    assert life.operators_finished


def test_restored_after_finish_does_not_finish_again_and_says_that_its_data_has_ended() -> None:
    life = TaskLifecycle()
    assert life.handle(RestoredAfterFinish()) == [EmitEndOfData(True)]
    assert life.operators_finished
    assert life.handle(EndOfDataReceived(True)) == []


@pytest.mark.parametrize("events", ["end finished", "restored"])
def test_with_checkpointing_off_nobody_waits(events: str) -> None:
    life = TaskLifecycle(checkpointing=False)
    actions = [action for text in events.split() for action in life.handle(event(text))]
    assert actions[-5:] == [EmitEndOfData(True), CommitUpTo(None), *CLOSE]


def test_a_suspended_task_flushes_nothing() -> None:
    life = TaskLifecycle()
    life.handle(SnapshotTaken(5))
    assert life.handle(CheckpointCompleted(5)) == [CommitUpTo(5)]
    assert life.handle(EndOfDataReceived(False)) == [EmitEndOfData(False), *CLOSE]


@pytest.mark.parametrize("events", ["finished", "end finished finished", "end restored", "restored restored", "suspend s1"])
def test_what_cannot_come_is_refused(events: str) -> None:
    life = TaskLifecycle()
    *before, last = events.split()
    for text in before:
        life.handle(event(text))
    with pytest.raises(UnexpectedEvent, match=life.state.value):
        life.handle(event(last))


def test_late_notices_to_a_finished_task_are_ignored() -> None:
    life = TaskLifecycle()
    for text in ["end", "finished", "s42", "s43", "c42"]:
        life.handle(event(text))
    assert life.handle(CheckpointCompleted(43)) == []
    assert life.handle(CheckpointAborted(43)) == []
