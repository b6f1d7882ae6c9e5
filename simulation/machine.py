"""The parts of a simulated process: its threads, its queue, its clock, and everything that a crash loses.

Must not know what the threads do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, TaskStatistics
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.errors import OwnershipLost, StorageError
from dagster_checkpoints.execution.attempt_plan import AttemptPlan
from dagster_checkpoints.execution.job_events import Failure, FatalError, TaskReport
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_requests import Request
from dagster_checkpoints.execution.ownership import SAFETY
from dagster_checkpoints.execution.shared_files import SharedNames
from dagster_checkpoints.pipeline import TaskId
from simulation.channels import Ghost, Snapshot
from simulation.requests import OK, PUT, WAIT, Performer, Steps, shared_name
from simulation.restoring import RequestedStart, Restored, StartPoint
from simulation.shapes import Shape
from simulation.task import Task
from simulation.task_data import TaskData

if TYPE_CHECKING:
    from simulation.world import World

LEASE = 12.0
TURN, SLEEP, FINISH = "turn", "sleep", "finish"
"""What a thread also stops for: work in its queue, or a deadline; a time; the end of all queued input and output."""
_NEVER = float("inf")


class Upload(msgspec.Struct, eq=False):
    """A pinned snapshot that is being uploaded."""

    task: TaskData
    barrier: CheckpointBarrier
    snapshot: Snapshot
    statistics: TaskStatistics


class Thread:
    """Steps that are taken one at a time.

    Attributes:
        steps: the remaining steps.
        at: where it has stopped: before a write (PUT), before a step that relies on a check (PAUSE), or waiting (others).
    """

    __slots__ = ("at", "steps")

    def __init__(self, steps: Steps[Any], at: str) -> None:
        self.steps, self.at = steps, at

    def step(self, outcome: str) -> None:
        """Take the next step; `outcome` is the result of the write before which it stopped."""
        self.at = self.steps.send(outcome if self.at == PUT else None)  # type: ignore[arg-type]


class Machine(Performer, ABC):
    """A process and its threads, as the world sees them.

    Attributes:
        number: position in the list of all processes of the world, from 0.
        knows_event_time: whether the watermark of a task follows from its channels alone, and no record is late.
        epoch: of its ownership; 0 until it has acquired the pipeline.
        slow: the main thread's queued actions that take steps.
        io: the queued work of the input/output thread.
        discoveries: by split source, the number of discoveries of its splits in this attempt.
        completed: number of completed checkpoints.
        restarted: the vertices that were deployed last.
        dirty: whether a fault has left files that only a later run can delete.
        end_requested: whether a user has ended all sources.
        asked_to_end: the sources that users were told would end, also in the runs before it.
        sent_reports: the last acknowledgements and declines; each may be delivered a second time.
        most_instances: by the uid of a stage, the largest number of instances that the job and the retained checkpoints know.
        unanswered: by requester number, the request that has no answer yet.
        fair: by checkpoint and by name of a request, when it would expire: those that were triggered or made since the world is
            calm. No fault happens, and time passes only when nothing else can happen, so none of them does.
    """

    # Slots, because a dictionary of more than 30 attributes is slow.
    __slots__ = (
        "_due", "_kept", "_last_id", "_loss_reported", "_savepoints", "_start", "asked_to_end", "attempt",
        "completed", "config", "crashed", "dirty", "discoveries", "end_requested", "ended", "ended_by",
        "ended_sources", "epoch", "fair", "ghosts", "io", "io_thread", "job", "job_id", "knows_event_time", "lineage",
        "main", "most_instances", "names", "number", "paused", "plan", "queue", "requested_start", "restarted",
        "restored", "running", "scenario", "sent_reports", "shape", "shut_down", "slow", "status", "tasks",
        "unanswered", "uploads", "world",
    )  # fmt: skip

    def __init__(self, world: World, number: int, start: RequestedStart) -> None:
        super().__init__(world.store)
        self.world = world
        self.number = number
        self.scenario = world.scenario
        self.config = self.scenario.config
        self.shape: Shape = world.shapes[start.variant]
        self.requested_start = start
        self.knows_event_time = not self.scenario.idle and self.scenario.exactly_once
        self.job: JobMachine
        self.epoch = 0
        self.paused = self.crashed = self.ended = self.shut_down = self.end_requested = False
        self.dirty = bool(world.active)
        self.queue: deque[Any] = deque()
        self.io: deque[Steps[Any]] = deque()
        self.io_thread = Thread(self._run_io(), TURN)
        self.main = Thread(self._run(), "")
        self.slow: deque[Steps[Any]] = deque()
        self.uploads: list[Upload] = []
        self.tasks: dict[TaskId, Task] = {}
        self.running: list[Task] = []
        self.discoveries: Counter[str] = Counter()
        self.ghosts: dict[TaskId, Ghost] = {}
        self.status = self.ended_by = ""
        self.attempt = self.job_id = self.completed = 0
        self.lineage: tuple[tuple[int, int | None], ...] = ()
        self.ended_sources: frozenset[tuple[str, str]] = frozenset()
        self.asked_to_end: frozenset[str] = frozenset()
        self.sent_reports: deque[TaskReport] = deque(maxlen=6)
        self.most_instances: dict[str, int] = {}
        self.unanswered: dict[int, Request] = {}
        self.fair: dict[int | str, float] = {}
        self.restored: Restored | None = None
        self.plan: AttemptPlan
        """The plan of the newest attempt."""
        self.restarted: Set[str] = frozenset()
        self.names = SharedNames(lambda: self.epoch)
        self._start: StartPoint
        self._loss_reported = False
        """The lease thread has reported to the main thread that this process is no longer the owner."""
        self._savepoints: dict[int, str] = {}
        self._kept: set[int] = set()
        self._last_id = 0
        self._due: float | None = None

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """The coordinator, for reading only."""
        assert self.job.coordinator is not None
        return self.job.coordinator

    @property
    def superseded(self) -> bool:
        """Whether another process has taken over the pipeline."""
        state = self.store.state
        return state is not None and 0 < self.epoch < state.epoch

    def count(self, what: str) -> None:
        self.world.counts[what] += 1

    # State files

    def known(self, restored: Restored) -> None:
        """Record that the files of a restored checkpoint were just fetched and verified."""
        if self.owner.vouches_for(restored.location, restored.metadata.pointer.epoch):
            names = restored.metadata.files
            self.names.known(map(shared_name, names))
            self.registry.known(names)

    def being_deleted(self, content: str) -> bool:
        """Whether a file with this content is being deleted, so that an upload of it has to wait."""
        earlier = self.names.earlier(content)
        lent = earlier is not None and str(earlier) in self.registry._stored
        return not lent and str(self.names.own(content)) in self.registry._deleting

    # Steps

    def run_main(self, outcome: str, times: int) -> bool:
        return self._take_steps(self.main, self.ready, outcome, times)

    def run_io(self, outcome: str, times: int) -> bool:
        return self._take_steps(self.io_thread, self.io_ready, outcome, times)

    def _take_steps(self, thread: Thread, ready: Callable[[], bool], outcome: str, times: int) -> bool:
        """Take up to `times` steps of a thread; `outcome` is the result of the write before which it stopped."""
        if not ready() or (outcome != OK and thread.at != PUT):
            return False
        self.dirty = self.dirty or outcome != OK
        thread.step(outcome)
        for _ in range(times - 1):
            if (thread is self.main and not self.queue) or not ready():
                break
            thread.step(OK)
        return True

    def _run_io(self) -> Steps[None]:
        while True:
            with suppress(StorageError):  # a deletion failed: a later run sweeps its files
                yield from self.io.popleft()
            yield TURN

    def io_busy(self) -> bool:
        return self.io_thread.at != TURN or bool(self.io)

    def io_ready(self) -> bool:
        at = self.io_thread.at
        return bool(self.io) if at == TURN else at != WAIT or not self.locked

    def pause(self) -> bool:
        """Stop all threads of the process until the world wakes it."""
        if not self.world.spend("pause"):
            return False
        self.paused = True
        self.count("pauses")
        return True

    def ready(self) -> bool:
        if self.ended:
            return False
        at = self.main.at
        if at in (TURN, SLEEP):
            return (at == TURN and bool(self.queue)) or self.world.now >= self._due_at()
        return at != FINISH or not self.io_busy()

    def _due_at(self) -> float:
        """The time until which it sleeps, or the job machine's next deadline; cached until the next event."""
        if self._due is None:
            due = self.job.next_deadline()
            self._due = _NEVER if due is None else due
        return self._due

    def next_time(self) -> float | None:
        """The earliest time at which the process acts without another step; None if there is none."""
        due = self._due_at() if self.main.at in (TURN, SLEEP) else _NEVER
        if self.superseded and not self._loss_reported:
            due = min(due, self.world.now + LEASE / 4)  # the lease thread will notice the loss
        return due if due < _NEVER else None

    def forget(self) -> None:
        """Break the reference cycles, so that the garbage collector does not have to."""
        self.crash()
        self.io.clear()
        self.slow.clear()
        del self.world, self.names
        if self.epoch:
            del self.owner

    def crash(self) -> None:
        self.crashed = self.ended = True
        self.main.steps.close()
        self.io_thread.steps.close()
        self.drop_tasks()
        self.uploads = []

    def drop_tasks(self, vertices: Set[str] | None = None) -> None:
        """Forget the tasks of these vertices, or all."""
        for task in list(self.tasks.values()):
            if vertices is None or task.id.vertex in vertices:
                task.operators.clear()  # they refer to the task
                del task.process
                del self.tasks[task.id]
        if vertices is None:
            self.running = []

    def renew_if_due(self) -> None:
        """The lease thread: renew the lease if it is time. Its steps are never interrupted."""
        if not self.epoch or self.ended or self.locked or self.owner.released:
            return
        if self.world.now < self.owner.deadline - self.owner.lease_seconds * (SAFETY - 1 / 3):
            return
        try:
            for step in self.owned(self.owner.renew()):
                assert step is PUT
        except OwnershipLost as error:
            self._loss_reported = True
            if not any(isinstance(item, FatalError) for item in self.queue):
                self.queue.append(FatalError(Failure(repr(error))))

    @abstractmethod
    def _run(self) -> Steps[None]:
        """The main thread, one step at a time."""
