"""The end of a task's life, as rows of events and the actions they lead to."""

from __future__ import annotations

import re

import pytest

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.lifecycle import (
    CheckpointAbortedNotice,
    CheckpointCompletedNotice,
    CloseOperators,
    CommitUpTo,
    DrainAnnounced,
    EmitEndOfData,
    EmitEndOfPartition,
    EndOfDataReceived,
    FinishOperators,
    LifecycleAction,
    LifecycleEvent,
    LifecycleState,
    OperatorsFinished,
    PauseOperators,
    RestoredAfterFinish,
    ResumeOperators,
    SavepointCompletedNotice,
    SnapshotTaken,
    TaskFinished,
    TaskLifecycle,
)

EVENTS: dict[str, LifecycleEvent] = {
    "end": EndOfDataReceived(True),
    "suspend": EndOfDataReceived(False),
    "finished": OperatorsFinished(),
    "restored": RestoredAfterFinish(),
    "drain": DrainAnnounced(),
}
CLOSE: list[LifecycleAction] = [CloseOperators(), EmitEndOfPartition(), TaskFinished()]


def event(text: str) -> LifecycleEvent:
    """Reads ``s42`` (snapshot taken; ``p`` of a savepoint, ``t`` of a stop's), ``c42`` (completed; ``d`` a savepoint
    of a job that runs on), ``a42`` (aborted) or a name of EVENTS."""
    if text in EVENTS:
        return EVENTS[text]
    checkpoint_id = int(text[1:])
    events: dict[str, LifecycleEvent] = {
        "s": SnapshotTaken(checkpoint_id),
        "p": SnapshotTaken(checkpoint_id, savepoint=True),
        "t": SnapshotTaken(checkpoint_id, stops_job=True, savepoint=True),
        "c": CheckpointCompletedNotice(checkpoint_id),
        "d": SavepointCompletedNotice(checkpoint_id),
        "a": CheckpointAbortedNotice(checkpoint_id),
    }
    return events[text[0]]


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
        # A later one than the first after finish counts.
        ("end finished s42 c45", [45], True),
        # An older one does not.
        ("s41 end finished s42 c41", [41], False),
        # The task waits for one that began before, unless it aborts.
        ("s41 end finished s42 c42", [42], False),
        ("s41 end finished s42 c42 a41", [42], True),
        ("s41 end finished s42 c42 c41", [42, 41], True),
        ("s41 end finished s42 a41 c42", [42], True),
        # A task does not end with an aborted one.
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


def test_the_steps_to_the_end_of_a_task() -> None:
    life = TaskLifecycle()
    assert life.handle(EndOfDataReceived(True)) == [FinishOperators()]
    assert life.state is LifecycleState.FINISHING
    assert not life.operators_finished
    assert life.handle(OperatorsFinished()) == [EmitEndOfData(True)]
    assert life.state is LifecycleState.WAITING_FOR_FINAL_CHECKPOINT
    assert life.operators_finished


def test_a_task_restored_after_finish_does_not_finish_again_and_reports_its_end_of_data() -> None:
    life = TaskLifecycle()
    assert life.handle(RestoredAfterFinish()) == [EmitEndOfData(True)]
    assert life.operators_finished
    assert life.handle(EndOfDataReceived(True)) == []


@pytest.mark.parametrize("events", ["end finished", "restored"])
def test_with_checkpointing_off_no_task_waits(events: str) -> None:
    life = TaskLifecycle(checkpointing=False)
    actions = [action for text in events.split() for action in life.handle(event(text))]
    assert actions[-5:] == [EmitEndOfData(True), CommitUpTo(None), *CLOSE]


# Savepoints


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        # With a savepoint of a job that runs on no task ends or commits, and the task waits for its outcome.
        ("p1 d1", ["", ""]),
        ("end finished p1 d1", ["finish", "end(true)", "", ""]),
        ("end finished p1 s2 c2 d1", ["finish", "end(true)", "", "", "commit2", "close"]),
        ("end finished p1 s2 c2 a1", ["finish", "end(true)", "", "", "commit2", "close"]),
        ("p1 end finished s2 c2 d1", ["", "finish", "end(true)", "", "commit2", "close"]),
        # Suspend: paused by the snapshot, ended by its completion, without MAX_WATERMARK, end_input, finish.
        ("t5 c5", ["pause", "commit5 end(false) close"]),
        ("s4 t5 a4 c5", ["", "pause", "", "commit5 end(false) close"]),
        # It fails: the task resumes.
        ("t5 a5 s6 c6", ["pause", "resume", "", "commit6"]),
        ("t5 a5 t6 c6", ["pause", "resume", "pause", "commit6 end(false) close"]),
        # An abort's notice that comes after the next stop's barrier.
        ("t5 t6 a5 c6", ["pause", "", "", "commit6 end(false) close"]),
        # Data that ends in the meantime ends afterwards, if there is one.
        ("t5 end a5 finished", ["pause", "", "resume finish", "end(true)"]),
        ("t5 end c5", ["pause", "", "commit5 end(false) close"]),
        # Another task got the notice of completion first.
        ("t5 suspend c5", ["pause", "", "commit5 end(false) close"]),
        ("t5 c5 suspend", ["pause", "commit5 end(false) close", ""]),
        # In the middle of finish.
        ("end t5 a5 finished", ["finish", "pause", "resume", "end(true)"]),
        ("end t5 c5", ["finish", "pause", "commit5 end(false) close"]),
        # The operators have finished meanwhile: the end of data is reported only if the savepoint fails.
        ("end t5 finished c5", ["finish", "pause", "", "commit5 end(false) close"]),
        ("end t5 finished a5 s6 c6", ["finish", "pause", "", "resume end(true)", "", "commit6 close"]),
        ("end s4 t5 finished s6 c6 a4 a5", ["finish", "", "pause", "", "", "commit6", "", "resume end(true) close"]),
        ("t5 end a5 t6 finished a6", ["pause", "", "resume finish", "pause", "", "resume end(true)"]),
        # The notice of an abort comes before the snapshot: the task neither waits nor pauses.
        ("a5 t5 end finished s6 c6", ["", "", "finish", "end(true)", "", "commit6 close"]),
        ("end finished a5 t5 s6 c6", ["finish", "end(true)", "", "", "", "commit6 close"]),
        ("end finished a4 a5 s5 c6", ["finish", "end(true)", "", "", "", "commit6"]),
        ("a4 s4 end finished s5 c5", ["", "", "finish", "end(true)", "", "commit5 close"]),
        ("end finished a4 p4 s5 c5", ["finish", "end(true)", "", "", "", "commit5 close"]),
        # The abort of a checkpoint that the task has not seen yet affects no other one.
        ("a5 s4 end finished s6 c6 c4", ["", "", "finish", "end(true)", "", "commit6", "commit4 close"]),
        # Drain, or a suspend that finds the task at its end: nothing to pause.
        ("end finished t5 c5", ["finish", "end(true)", "", "commit5 close"]),
        ("end finished t5 suspend c5", ["finish", "end(true)", "", "", "commit5 close"]),
        # While waiting for the final checkpoint: the task ends with exactly the stop's savepoint …
        ("end finished s4 t5 c4 c5", ["finish", "end(true)", "", "", "commit4", "commit5 close"]),
        ("end finished s4 t5 a4 c5", ["finish", "end(true)", "", "", "", "commit5 close"]),
        ("end finished t5 s6 c6 c5", ["finish", "end(true)", "", "", "commit6", "commit5 close"]),
        # … and if that fails, with the checkpoint that has completed instead.
        ("end finished s4 t5 c4 a5", ["finish", "end(true)", "", "", "commit4", "close"]),
        ("end finished s4 t5 a5 c4", ["finish", "end(true)", "", "", "", "commit4 close"]),
        ("end finished t5 a5 s6 c6", ["finish", "end(true)", "", "", "", "commit6 close"]),
    ],
)
def test_savepoints(events: str, steps: list[str]) -> None:
    life = TaskLifecycle()
    assert [described(life.handle(event(text))) for text in events.split()] == steps
    assert (life.state is LifecycleState.FINISHED) == any("close" in step for step in steps)


@pytest.mark.parametrize(("events", "paused"), [("t5", True), ("t5 a5", False), ("t5 c5", False), ("end finished t5", False)])
def test_whether_records_may_pass(events: str, paused: bool) -> None:
    life = TaskLifecycle()
    for text in events.split():
        life.handle(event(text))
    assert life.paused == paused


def test_with_checkpointing_off_a_drain_is_waited_for() -> None:
    life = TaskLifecycle(checkpointing=False)
    steps = [described(life.handle(event(text))) for text in ["drain", "end", "finished", "t1", "c1"]]
    assert steps == ["", "finish", "end(true)", "", "commit1 close"]


def described(actions: list[LifecycleAction]) -> str:
    words = []
    for action in actions:
        match action:
            case FinishOperators():
                words.append("finish")
            case PauseOperators():
                words.append("pause")
            case ResumeOperators():
                words.append("resume")
            case EmitEndOfData(drain):
                words.append(f"end({str(drain).lower()})")
            case CommitUpTo(checkpoint_id):
                words.append(f"commit{checkpoint_id}")
            case CloseOperators():
                words.append("close")
    # Closing is always the whole of it, in this order, and last.
    if "close" in words:
        assert actions[-3:] == CLOSE
        assert words[-1] == "close"
    else:
        assert len(words) == len(actions)
    return " ".join(words)


@pytest.mark.parametrize(
    "events",
    [
        "finished",
        "end finished finished",
        "end t1 finished finished",
        "end restored",
        "restored restored",
        "t1 restored",
        "s1 restored",
        "t1 c1 s1",
        "suspend",
        # Snapshots come in the order of their checkpoints, and one of each.
        "s1 s1",
        "s2 s1",
        "a1 s1 s1",
    ],
)
def test_an_impossible_event_is_refused(events: str) -> None:
    life = TaskLifecycle()
    *before, last = events.split()
    for text in before:
        life.handle(event(text))
    order = r"\. The runtime delivered events in an order that is not possible\.$"
    message = f"^A task that is {life.state.value} cannot take {re.escape(repr(event(last)))}: .*{order}"
    with pytest.raises(UnexpectedEvent, match=message):
        life.handle(event(last))


def test_late_notices_to_a_finished_task_are_ignored() -> None:
    life = TaskLifecycle()
    for text in ["end", "finished", "s42", "s43", "c42"]:
        life.handle(event(text))
    assert life.handle(CheckpointCompletedNotice(43)) == []
    assert life.handle(CheckpointAbortedNotice(43)) == []


def test_what_is_no_event_of_a_life_cycle_is_refused_by_name() -> None:
    with pytest.raises(UnexpectedEvent, match="cannot take 'a word'"):
        TaskLifecycle().handle("a word")  # type: ignore[arg-type]
