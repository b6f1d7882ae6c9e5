"""What a simulated process consists of: its threads, its queue, the clock, and what is lost in a crash.

Must not know what the threads do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_checkpoints.coordination import (
    CheckpointBarrier,
    CheckpointCoordinator,
    TaskStatistics,
)
from dagster_checkpoints.execution.job_events import TaskReport
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.ownership import SAFETY
from dagster_checkpoints.execution.shared_files import SharedNames
from dagster_checkpoints.execution.storage_errors import OwnershipLost, StorageError
from dagster_checkpoints.pipeline import TaskId
from simulation.channels import Ghost, Snapshot
from simulation.requests import OK, PUT, WAIT, Performer, Steps, shared_name
from simulation.restoring import From, Restored, StartPoint
from simulation.shapes import Shape
from simulation.task import Task
from simulation.task_data import TaskData
from simulation.user_requests import UserRequest

if TYPE_CHECKING:
    from simulation.world import World

LEASE = 12.0
TURN = "turn"
"""The main thread waits for something to come into its queue."""
_NEVER = float("inf")


class Upload(NamedTuple):
    """A pinned snapshot on its way to storage."""

    task: TaskData
    attempt: int
    barrier: CheckpointBarrier
    snapshot: Snapshot
    statistics: TaskStatistics


class Thread:
    """Steps that are taken one at a time.

    Attributes:
        steps: what is left of them.
        at: where it stands: in front of a write (PUT), between a check and what relies on it (PAUSE), or it waits.
    """

    __slots__ = ("at", "steps")

    def __init__(self, steps: Steps[Any]) -> None:
        self.steps, self.at = steps, ""

    def step(self, outcome: str) -> bool:
        """Go on; `outcome` is that of the write that it stands in front of. False if that was the last step."""
        try:
            self.at = self.steps.send(outcome if self.at == PUT else None)  # type: ignore[arg-type]
        except StopIteration:
            return False
        return True


class Machine(Performer, ABC):
    """A process and its threads, as the world sees them. `number` is its place among all processes.

    Attributes:
        knows_event_time: whether the watermark of a task follows from its channels alone, and nothing is late.
        epoch: of its ownership; 0 until it has acquired the pipeline.
        io: what the thread for input and output has to do, and `io_now` does.
        enumerators: by source stage, the splits that nobody reads yet.
        completed: number of checkpoints.
        dirty: something has gone wrong of which only a later run can clear up the traces.
        told_to_end: a user has ended all sources.
        said: the last acknowledgements and declines, which may come once more.
        checked: the last attempt whose restored sinks were compared.
    """

    # Slots, because a dictionary of more than 30 attributes is slow.
    __slots__ = (
        "_due", "_kept", "_last_id", "_savepoints", "_sleeping_until", "_start", "_told_of_loss", "_waits_for", "asked",
        "asked_start", "attempt", "checked", "completed", "config", "crashed", "dirty", "ended_by", "ended_sources",
        "enumerators", "epoch", "ghosts", "io", "io_now", "job", "job_id", "knows_event_time", "lineage", "main",
        "names", "number", "over", "paused", "queue", "restored", "running", "said",
        "settings", "shape", "shut_down", "status", "tasks", "told_to_end", "uploads", "world",
    )  # fmt: skip

    def __init__(self, world: World, number: int, start: From) -> None:
        super().__init__(world.store)
        self.world = world
        self.number = number
        self.settings = world.scenario.settings
        self.config = self.settings.config
        self.shape: Shape = world.shapes[start.variant]
        self.asked_start = start
        self.knows_event_time = not self.settings.idle and self.settings.exactly_once
        self.job: JobMachine
        self.epoch = 0
        self.paused = self.crashed = self.over = self.shut_down = self.told_to_end = False
        self.dirty = bool(world.active)
        self.queue: deque[Any] = deque()
        self.io: deque[Callable[[], Steps[Any]]] = deque()
        self.io_now: Thread | None = None
        self.main = Thread(self._run())
        self.uploads: list[Upload] = []
        self.tasks: dict[TaskId, Task] = {}
        self.running: list[Task] = []
        self.enumerators: dict[int, deque[int]] = {}
        self.ghosts: dict[TaskId, Ghost] = {}
        self.status = self.ended_by = ""
        self.attempt = self.job_id = self.completed = self.checked = 0
        self.lineage: tuple[tuple[int, int | None], ...] = ()
        self.ended_sources: frozenset[tuple[str, str]] = frozenset()
        self.asked: list[UserRequest] = []
        self.said: deque[TaskReport] = deque(maxlen=6)
        self.restored: Restored | None = None
        self.names = SharedNames(lambda: self.epoch)
        self._start: StartPoint | None = None
        self._told_of_loss = False
        """The renewing thread has told the main thread that it is no longer the owner."""
        self._sleeping_until = 0.0
        self._waits_for: Callable[[], bool] | None = None
        self._savepoints: dict[int, str] = {}
        self._kept: set[int] = set()
        self._last_id = 0
        self._due: float | None = None

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """To be looked at only."""
        assert self.job.coordinator is not None
        return self.job.coordinator

    @property
    def superseded(self) -> bool:
        """Whether another process has taken the pipeline over."""
        state = self.store.state
        return state is not None and 0 < self.epoch < state.epoch

    def count(self, what: str) -> None:
        self.world.counts[what] += 1

    # State files

    def known(self, restored: Restored) -> None:
        """The files of a restored checkpoint were fetched and verified just now."""
        if self.owner.vouches_for(restored.location, restored.metadata.pointer.epoch):
            names = restored.metadata.files
            self.names.known(map(shared_name, names))
            self.registry.known(names)

    def being_deleted(self, content: str) -> bool:
        """Whether an upload that wants to store it has to wait."""
        registry, earlier = self.registry, self.names.earlier(content)
        if earlier is not None and str(earlier) in registry._stored and str(earlier) not in registry._deleting:
            return False
        return str(self.names.own(content)) in registry._deleting

    # Steps

    def run_main(self, outcome: str, times: int) -> bool:
        """The main thread goes on, by some steps at one go; `outcome` is that of the write that it stands at."""
        if not self.ready() or (outcome != OK and self.main.at != PUT):
            return False
        self.dirty = self.dirty or outcome != OK
        for n in range(times):
            if n and not (self.queue and self.ready()):
                break
            self._due = None
            if not self.main.step(OK if n else outcome):
                self.over = True
                self.world.process_ended(self)  # type: ignore[arg-type]
        return True

    def run_io(self, outcome: str, times: int) -> bool:
        """The thread for input and output goes on."""
        if not self.io_ready() or (outcome != OK and (self.io_now is None or self.io_now.at != PUT)):
            return False
        self.dirty = self.dirty or outcome != OK
        for n in range(times):
            if n and not (self.io_ready() and self.io_may_go_on()):
                break
            thread = self.io_now = self.io_now or Thread(self.io.popleft()())
            try:
                if not thread.step(OK if n else outcome):
                    self.io_now = None
            except StorageError:
                self.io_now = None  # cleaning up: what fails here is swept up by a later run
        return True

    def io_ready(self) -> bool:
        return self.io_now is not None or bool(self.io)

    def io_may_go_on(self) -> bool:
        return self.io_now is None or self.io_now.at != WAIT or not self.locked

    def pause(self) -> bool:
        """All of its threads stand still until it wakes."""
        if not self.world.spend("pause"):
            return False
        self.paused = True
        self.count("pauses")
        return True

    def ready(self) -> bool:
        """Whether the main thread has something to do."""
        if self.over:
            return False
        at = self.main.at
        if at == TURN:
            return bool(self.queue) or self.world.now >= self._due_at()
        if at == WAIT:
            return self.world.now >= self._sleeping_until and (self._waits_for is None or self._waits_for())
        return True

    def _due_at(self) -> float:
        """When time alone gives the main thread something to do: the same until its next step."""
        if self._due is None:
            due = self.job.next_deadline()
            self._due = _NEVER if due is None else due
        return self._due

    def next_time(self) -> float | None:
        """When time alone makes something happen."""
        now, at = self.world.now, self.main.at
        times = [self._sleeping_until] if at == WAIT and self._sleeping_until > now else []
        if at == TURN and self._due_at() < _NEVER:
            times.append(self._due_at())
        if self.superseded and not self._told_of_loss:
            times.append(now + LEASE / 4)  # the renewing thread will find out
        return min(times, default=None)

    def forget(self) -> None:
        """Break the circles of references, so that no garbage collector has to."""
        self.crash()
        self.io = deque()
        del self.world, self.names

    def crash(self) -> None:
        """Everything volatile is gone at once."""
        self.crashed = self.over = True
        self.main.steps.close()
        if self.io_now is not None:
            self.io_now.steps.close()
        self.drop_tasks()
        self.uploads = []

    def drop_tasks(self) -> None:
        """The tasks of an attempt are gone."""
        for task in self.tasks.values():
            task.operators.clear()  # these refer to it
            del task.process
        self.tasks, self.running = {}, []

    def renew_if_due(self) -> None:
        """The renewing thread. Nothing can come between its steps."""
        if not self.epoch or self.over or self.locked or self.owner.released:
            return
        if self.world.now < self.owner.deadline - self.owner.lease_seconds * (SAFETY - 1 / 3):
            return
        try:
            for step in self.owned(self.owner.renew()):
                assert step is PUT
        except StorageError as error:
            self._told_of_loss = True
            if not any(isinstance(item, OwnershipLost) for item in self.queue):
                self.queue.append(error)

    @abstractmethod
    def _run(self) -> Generator[str, str, None]:
        """From the start to the end, one step at a time."""
