"""A simulated job for the tests of the job machine: two sources and a stage behind them, driven action by action."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.events import Acknowledged, MetadataWritten, TaskStateChanged, WriteMetadata
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.coordination.restarts import FailoverStrategy, FixedDelayRestart, RestartStrategy
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_actions import JobAction
from dagster_checkpoints.execution.job_events import Failure, JobBeginning, JobMachineEvent, RestorePoint
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_requests import Request, RequestReceived, SourceInstance
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge

A, B, C = TaskId("history", 0), TaskId("live", 0), TaskId("delays", 0)
ALL = (A, B, C)
GRAPH = ExecutionGraph(
    (Vertex("history", ("history",), 1), Vertex("live", ("live",), 1), Vertex("delays", ("delays",), 1)),
    (VertexEdge(0, 2, EdgePattern.ALL_TO_ALL), VertexEdge(1, 2, EdgePattern.ALL_TO_ALL)),
)
SOURCES = (SourceInstance("history", "0", A, bounded=True), SourceInstance("live", "EWR", B))
EPOCH = 3
NEW_START = JobBeginning()
BROKEN = Failure("a plane without wings")

T = TypeVar("T")


def pick(actions: Iterable[JobAction], kind: type[T]) -> list[T]:
    """The actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: Iterable[JobAction]) -> list[tuple[tuple[TaskId, ...], object]]:
    """The messages to tasks."""
    return [(tuple(action.tasks), action.message) for action in pick(actions, do.SendToTasks)]


def restore_point(checkpoint_id: int, *finished: TaskId) -> RestorePoint:
    return RestorePoint(checkpoint_id, f"chk-{checkpoint_id}", frozenset(finished), state=object())


class Job:
    """A job machine, and its clock."""

    def __init__(
        self,
        restart: RestartStrategy | None = None,
        beginning: JobBeginning = NEW_START,
        graph: ExecutionGraph = GRAPH,
        failover: FailoverStrategy = "region",
        burst: bool = False,
        **config: Any,
    ) -> None:
        settings = CheckpointConfig(**{"interval": None, **config})
        self.machine = JobMachine("flights", settings, restart or FixedDelayRestart(2, 5.0), EPOCH, failover, burst=burst)
        self.graph = graph
        self.tasks = tuple(graph.tasks())
        self.attempts = dict.fromkeys(self.tasks, 1)
        self.beginning = beginning
        self.now = 100.0

    def do(self, event: JobMachineEvent, after: float = 0.0) -> list[JobAction]:
        """Hand an event in, some seconds later."""
        self.now += after
        return self.machine.handle(event, self.now)

    def report(self, event: Any, attempt: int | None = None) -> list[JobAction]:
        return self.do(on.TaskReport(self.attempts[event.task] if attempt is None else attempt, event))

    def deploy(self, *finished: TaskId) -> list[JobAction]:
        actions = self.do(on.Deployed(self.graph, frozenset(finished), SOURCES))
        self.attempts = {task: self.attempt_of(task) for task in self.tasks}
        return actions

    def attempt_of(self, task: TaskId) -> int:
        """The attempt of a task's reports: that of its deployment."""
        attempt = self.machine.attempt
        return attempt if self.machine.runs(task, attempt) else self.attempts[task]

    def confirm(self, newest: CompletedCheckpoint | None = None, epoch: int = EPOCH) -> list[JobAction]:
        return self.do(on.OwnershipConfirmed(newest, epoch))

    def begin(self) -> list[JobAction]:
        """Begin the job up to running tasks; returns the last actions."""
        self.do(on.BeginningChosen(self.beginning))
        restored = self.beginning.restored
        self.deploy(*(restored.finished if restored is not None else ()))
        self.do(on.JobBegun())
        return self.run_tasks()

    def run_tasks(self) -> list[JobAction]:
        """Confirm the ownership, and let every task report that it runs."""
        actions = self.confirm()
        for task in self.tasks:
            if task not in self.machine.finished:
                actions += self.report(TaskStateChanged(task, TaskState.RUNNING))
        return actions

    def ask(self, kind: Any, requester: int = 1, seconds: float = 60.0, **what: Any) -> list[JobAction]:
        """Hand in a request; its id is its kind by default."""
        request = Request(what.pop("request_id", kind), kind, seconds, **what)
        return self.do(RequestReceived(request, requester, self.now))

    def acknowledge(self, checkpoint_id: int, *, finished: bool = False) -> list[JobAction]:
        """Let every unfinished task acknowledge; returns the actions of the last acknowledgement, which write the metadata."""
        actions: list[JobAction] = []
        for task in self.tasks:
            if task not in self.machine.finished:
                statistics = TaskStatistics(operators_finished=finished)
                actions = self.report(Acknowledged(task, checkpoint_id, None, statistics))
        assert [a.checkpoint.checkpoint_id for a in pick(actions, WriteMetadata)] == [checkpoint_id]
        return actions

    def complete(self, checkpoint_id: int, *, finished: bool = False) -> list[JobAction]:
        """Complete a triggered checkpoint."""
        self.acknowledge(checkpoint_id, finished=finished)
        return self.do(MetadataWritten(checkpoint_id, f"chk-{checkpoint_id}"))

    def finish(self, *tasks: TaskId) -> list[JobAction]:
        actions: list[JobAction] = []
        for task in tasks or self.tasks:
            actions = self.report(TaskStateChanged(task, TaskState.FINISHED))
        return actions

    def fail(self, failure: Failure = BROKEN, task: TaskId = B) -> list[JobAction]:
        """Let a task fail, and stop the tasks; returns the actions."""
        assert self.report(on.TaskFailure(task, failure))[-1] == do.StopTasks()
        return self.do(on.TasksStopped())
