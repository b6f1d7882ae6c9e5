"""Deliberate faults in the rules of a run: the machines of `execution` with one rule broken each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from dagster_checkpoints.coordination import DiscardCheckpoint
from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.execution import input_gate
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_requests import JobRequests
from dagster_checkpoints.execution.task_events import ElementsArrived
from dagster_checkpoints.execution.task_machine import TaskMachine

Patches = Iterator[tuple[object, str, Any]]


def _ended_sources_forgotten() -> Patches:
    deploy = JobMachine._deploy

    def broken(self: Any) -> None:
        with patch.multiple(self._job, ended_sources=set()):
            deploy(self)

    yield JobMachine, "_deploy", broken


def _barrier_passed() -> Patches:
    arrived = InputGate._arrived

    def broken(self: Any, *arguments: Any) -> None:
        due, self._due = self._due, deque()
        arrived(self, *arguments)
        self._due = due + self._due

    yield input_gate, "_TAKES", {**input_gate._TAKES, ElementsArrived: broken}
    yield InputGate, "reads", lambda self, channel: not (self._paused or self._awaits or self._known(channel).blocked)


def _older_of_two() -> Patches:
    def broken(self: Any, event: on.OwnershipConfirmed) -> None:
        self._newest = None
        self._restart_from(self._start.restored)

    yield JobMachine, "_newest_known", broken


def _end_before_commit() -> Patches:
    perform = TaskMachine._perform

    def broken(self: Any, decided: Any) -> Any:
        return perform(self, sorted(decided, key=lambda action: isinstance(action, life.CommitUpTo)))

    yield TaskMachine, "_perform", broken


def _stop_answered_twice() -> Patches:
    all_finished = JobRequests.all_finished

    def broken(self: Any) -> Any:
        actions = all_finished(self)
        self._answers_at_end *= 2
        return actions

    yield JobRequests, "all_finished", broken


def _earlier_attempt_counts() -> Patches:
    take = JobMachine._take

    def broken(self: Any, event: Any) -> None:
        take(self, on.TaskReport(self._attempt, event.event) if isinstance(event, on.TaskReport) else event)

    yield JobMachine, "_take", broken


def _not_caught_up(method: str) -> Patches:
    original = getattr(InputGate, method)

    def broken(self: Any, *arguments: Any) -> None:
        with patch.object(InputGate, "caught_up", True):
            original(self, *arguments)

    yield InputGate, method, broken


def _deleted_before_the_end_is_recorded() -> Patches:
    finish = JobMachine._finish

    def broken(self: Any, *arguments: Any) -> None:
        finish(self, *arguments)
        self._job.actions[-1:-1] = self._to_discard
        self._to_discard = []

    yield JobMachine, "_finish", broken


def _passed_over_deleted_at_once() -> Patches:
    begin = JobMachine._begin_attempt

    def broken(self: Any) -> None:
        self._job.actions += [DiscardCheckpoint(later) for later in self._job._passed_over]
        self._job._passed_over = ()
        begin(self)

    yield JobMachine, "_begin_attempt", broken


def _waiting_drain_forgotten() -> Patches:
    yield JobRequests, "resume_drain", lambda self: []


def _aborted_snapshot_taken() -> Patches:
    aborted = InputGate._aborted

    def broken(self: Any, *arguments: Any) -> None:
        due = self._due
        aborted(self, *arguments)
        self._due = due

    yield input_gate, "_TAKES", {**input_gate._TAKES, life.CheckpointAborted: broken}


RUN_FAULTS: tuple[tuple[str, Callable[[], Patches]], ...] = (
    ("a restart does not tell the ended sources that they shall end", _ended_sources_forgotten),
    ("a gate reads on behind the barrier at which its snapshot is due", _barrier_passed),
    ("a restart begins from the start of the run, though a newer checkpoint is complete", _older_of_two),
    ("a task ends before it has committed", _end_before_commit),
    ("the requester of a stop is answered twice", _stop_answered_twice),
    ("a report of an earlier attempt counts in the present one", _earlier_attempt_counts),
    ("a snapshot is taken before the query has consumed what it was let through to", lambda: _not_caught_up("_take_due")),
    ("the data ends before the query has consumed what it was let through to", lambda: _not_caught_up("_end")),
    ("a finished job deletes its checkpoints before its end is recorded", _deleted_before_the_end_is_recorded),
    ("passed-over checkpoints are deleted before the run has one of its own", _passed_over_deleted_at_once),
    ("a drain that waits behind a stop is forgotten when the stop fails", _waiting_drain_forgotten),
    ("an aborted checkpoint's due snapshot is taken nevertheless", _aborted_snapshot_taken),
)
