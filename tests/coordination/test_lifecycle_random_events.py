"""Any events in any order: a task never waits for an event that cannot come, and ends once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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

CLOSE = [CloseOperators(), EmitEndOfPartition(), TaskFinished()]


class AnyOrder(RuleBasedStateMachine):
    @initialize(checkpointing=st.sampled_from([True, True, False]))
    def start(self, checkpointing: bool) -> None:
        self.life = TaskLifecycle(checkpointing)
        self.checkpointing = checkpointing
        self.snapshots: dict[int, SnapshotTaken] = {}
        self.after_finish: set[int] = set()
        """Checkpoints with which the task may end: their snapshots were taken after finish()."""
        self.outcomes: set[int] = set()
        self.final = False
        """One of those, or a later one, has completed."""
        self.done: list[LifecycleAction] = []

    def tell(self, event: LifecycleEvent) -> list[LifecycleAction]:
        was_paused, was_finished = self.life.paused, self.life.state is LifecycleState.FINISHED
        actions = self.life.handle(event)
        paused = was_paused
        for action in actions:
            match action:
                case PauseOperators() | ResumeOperators():
                    assert paused == isinstance(action, ResumeOperators)
                    paused = not paused
                case FinishOperators():
                    assert not paused
                case EmitEndOfData(drain):
                    assert drain != paused, "events after a suspend's snapshot are not sent to other tasks"
        assert self.life.paused == (paused and self.life.state is not LifecycleState.FINISHED)
        ends = self.life.state is LifecycleState.FINISHED and not was_finished
        assert (actions[-3:] == CLOSE) == ends
        assert ends or not any(action in CLOSE for action in actions)
        assert not (was_finished and actions)
        self.done += actions
        for kind in (FinishOperators, EmitEndOfData):
            assert sum(isinstance(action, kind) for action in self.done) <= 1
        return actions

    def refused(self, event: LifecycleEvent) -> None:
        before = self.life.state, self.life.paused
        with pytest.raises(UnexpectedEvent):
            self.life.handle(event)
        assert (self.life.state, self.life.paused) == before

    @property
    def newest(self) -> int:
        return max(self.snapshots, default=0)

    @property
    def finished(self) -> bool:
        return self.life.state is LifecycleState.FINISHED

    @rule()
    def the_data_ends(self) -> None:
        self.tell(EndOfDataReceived(True))

    @rule()
    def an_input_has_ended_with_a_suspend(self) -> None:
        if self.life.state is LifecycleState.RUNNING and not self.life.paused:
            self.refused(EndOfDataReceived(False))
        else:
            assert self.tell(EndOfDataReceived(False)) == []

    @rule()
    def the_operators_have_finished(self) -> None:
        if self.life.state is not LifecycleState.FINISHING:
            self.refused(OperatorsFinished())
            return
        self.tell(OperatorsFinished())
        assert self.life.operators_finished

    @rule()
    def it_is_restored(self) -> None:
        if self.life.state is not LifecycleState.RUNNING or self.snapshots:
            self.refused(RestoredAfterFinish())
        else:
            assert self.tell(RestoredAfterFinish())[0] == EmitEndOfData(True)

    @rule()
    def a_drain_is_announced(self) -> None:
        self.checkpointing |= not self.finished
        assert self.tell(DrainAnnounced()) == []

    @rule(ahead=st.integers(-1, 3), kind=st.sampled_from(["checkpoint", "checkpoint", "savepoint", "stop"]))
    def a_snapshot_is_taken(self, ahead: int, kind: str) -> None:
        taken = SnapshotTaken(self.newest + ahead, stops_job=kind == "stop", savepoint=kind != "checkpoint")
        if self.finished or ahead <= 0:
            self.refused(taken)
            return
        actions = self.tell(taken)
        self.snapshots[taken.checkpoint_id] = taken
        aborted = taken.checkpoint_id in self.outcomes
        if self.life.operators_finished and kind == "checkpoint" and not aborted:
            self.after_finish.add(taken.checkpoint_id)
        assert actions in ([], [PauseOperators()])
        assert not actions or (kind == "stop" and not aborted and not self.life.operators_finished)

    @precondition(lambda self: self.newest)
    @rule(data=st.data())
    def one_completes(self, data: st.DataObject) -> None:
        """A checkpoint completes only with this task's snapshot, and has one outcome."""
        open_ids = [i for i in self.snapshots if i not in self.outcomes]
        if not open_ids:
            return
        taken = self.snapshots[data.draw(st.sampled_from(open_ids))]
        self.outcomes.add(taken.checkpoint_id)
        if taken.savepoint and not taken.stops_job:
            actions = self.tell(SavepointCompletedNotice(taken.checkpoint_id))
            assert not any(isinstance(action, CommitUpTo) for action in actions)
            return
        finished = self.finished
        self.final |= any(i <= taken.checkpoint_id for i in self.after_finish)
        actions = self.tell(CheckpointCompletedNotice(taken.checkpoint_id))
        assert actions[:1] == ([] if finished else [CommitUpTo(taken.checkpoint_id)])

    @rule(offset=st.integers(-3, 3))
    def one_is_aborted(self, offset: int) -> None:
        checkpoint_id = self.newest + offset
        if checkpoint_id < 1 or checkpoint_id in self.outcomes:
            return
        self.outcomes.add(checkpoint_id)
        self.after_finish.discard(checkpoint_id)
        self.tell(CheckpointAbortedNotice(checkpoint_id))

    @invariant()
    def nothing_is_waited_for_that_cannot_come(self) -> None:
        if not hasattr(self, "life"):
            return
        state = self.life.state
        open_ids = self.snapshots.keys() - self.outcomes
        if not open_ids:
            # Every outcome was reported: records are not held back, and a task that may end has ended.
            assert not self.life.paused
            assert not (state is LifecycleState.WAITING_FOR_FINAL_CHECKPOINT and self.final)
        assert not self.life.paused or any(self.snapshots[i].stops_job for i in open_ids)

    def teardown(self) -> None:
        """The outcomes come, the operators finish, one more checkpoint completes: every task has ended."""
        if not hasattr(self, "life"):
            return
        for checkpoint_id in sorted(self.snapshots.keys() - self.outcomes):
            self.one_is_aborted(checkpoint_id - self.newest)
        self.the_data_ends()
        if self.life.state is LifecycleState.FINISHING:
            self.the_operators_have_finished()
        if not self.finished:
            last = max(self.newest, *self.outcomes, 0) + 1
            self.tell(SnapshotTaken(last))
            self.tell(CheckpointCompletedNotice(last))
        assert self.finished
        assert self.done[-3:] == CLOSE
        assert sum(isinstance(action, EmitEndOfData) for action in self.done) == 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
