"""What a simulated process consists of: its threads, its queue, the clock, and what is lost in a crash.

Must not know what the threads do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import (
    CheckpointBarrier,
    CheckpointCoordinator,
    TaskStatistics,
)
from dagster_checkpoints.execution.job_events import TaskReport
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.ownership import SAFETY, OwnershipSteps
from dagster_checkpoints.execution.shared_files import SharedNames
from dagster_checkpoints.execution.storage_errors import OwnershipLost, StorageError
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from simulation.channels import Ghost, Snapshot
from simulation.requests import OK, PAUSE, PUT, WAIT, Performer, Steps, shared_name
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


class Upload:
    """A pinned snapshot on its way to storage."""

    __slots__ = (
        "attempt", "barrier", "snapshot", "statistics", "task",
    )  # fmt: skip

    def __init__(self, task: TaskData, barrier: CheckpointBarrier, snapshot: Snapshot, statistics: TaskStatistics) -> None:
        self.task = task
        self.attempt = task.attempt
        self.barrier = barrier
        self.snapshot = snapshot
        self.statistics = statistics


class Machine(ABC):
    """A process and its threads, as the world sees them. `number` is its place among all processes."""

    # Slots, because a dictionary of more than 30 attributes is slow.
    __slots__ = (
        "_due",
        "_kept",
        "_last_id",
        "_main",
        "_savepoints",
        "_sleeping_until",
        "_start",
        "_told_of_loss",
        "_waiting",
        "_waits_for",
        "asked",
        "asked_start",
        "attempt",
        "checked",
        "completed",
        "config",
        "crashed",
        "dirty",
        "ended_by",
        "ended_sources",
        "enumerators",
        "epoch",
        "ghosts",
        "io",
        "io_now",
        "io_waits",
        "job",
        "job_id",
        "knows_event_time",
        "lineage",
        "locked",
        "may_idle",
        "names",
        "number",
        "over",
        "owner",
        "ownership",
        "paused",
        "performer",
        "queue",
        "registry",
        "restored",
        "running",
        "said",
        "settings",
        "shape",
        "shut_down",
        "status",
        "tasks",
        "told_to_end",
        "uploads",
        "world",
    )  # fmt: skip

    def __init__(self, world: World, number: int, start: From) -> None:
        self.world = world
        self.number = number
        self.performer = Performer(self)
        self.settings = world.scenario.settings
        self.config = self.settings.config
        self.shape: Shape = world.shapes[start.variant]
        self.asked_start = start
        self.may_idle = self.settings.idle
        self.knows_event_time = not self.settings.idle and self.settings.exactly_once
        """Whether the watermark of a task follows from its channels alone, and nothing is late."""
        self.job: JobMachine
        self.registry = SharedStateRegistry()
        self.owner: OwnershipSteps
        """Its right to the pipeline, once acquired."""
        self.epoch = 0
        """Of its ownership; 0 until then."""
        self.locked = False
        """Whether `state.json` is being written: a lease that runs out now cannot be renewed."""
        self.queue: deque[Any] = deque()
        self.io: deque[Callable[[], Steps[Any]]] = deque()
        self.io_now: Steps[Any] | None = None
        self.io_waits = ""
        self.uploads: list[Upload] = []
        self.tasks: dict[TaskId, Task] = {}
        self.running: list[Task] = []
        self.enumerators: dict[int, deque[int]] = {}
        """By source stage: the splits that nobody reads yet."""
        self.ghosts: dict[TaskId, Ghost] = {}
        self.attempt = 0
        self.paused = False
        self.crashed = False
        self.over = False
        self.status = ""
        self.job_id = 0
        self.lineage: tuple[tuple[int, int | None], ...] = ()
        self.ended_sources: frozenset[tuple[str, str]] = frozenset()
        self.ended_by = ""
        self.completed = 0
        """Checkpoints."""
        self.dirty = bool(world.active)
        """Something has gone wrong of which only a later run can clear up the traces."""
        self.asked: list[UserRequest] = []
        self.told_to_end = False
        """A user has ended all sources: nobody needs to say so again."""
        self.said: deque[TaskReport] = deque(maxlen=6)
        """The last acknowledgements and declines: they may come once more."""
        self.shut_down = False
        self._told_of_loss = False
        """The renewing thread has told the main thread that it is no longer the owner."""
        self.restored: Restored | None = None
        self.checked = 0
        """The last attempt whose restored sinks were compared."""
        self._start: StartPoint | None = None
        self._sleeping_until = 0.0
        self._waits_for: Callable[[], bool] | None = None
        self.names = SharedNames(lambda: self.epoch)
        self._savepoints: dict[int, str] = {}
        self._kept: set[int] = set()
        self._last_id = 0
        self._main = self._run()
        self._waiting = "start"
        self._due: float | None = None

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """To be looked at only."""
        assert self.job.coordinator is not None
        return self.job.coordinator

    @property
    def superseded(self) -> bool:
        """Whether another process has taken the pipeline over."""
        state = self.world.store.state
        return state is not None and 0 < self.epoch < state.epoch

    def count(self, what: str) -> None:
        self.world.counts[what] += 1

    # State files

    def known(self, restored: Restored) -> None:
        """The files of a restored checkpoint were fetched and verified just now."""
        if self.owner.vouches_for(restored.location, restored.metadata.epoch):
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
        if not self.ready() or (outcome != OK and not self.at_write):
            return False
        self.dirty = self.dirty or outcome != OK
        self.step(outcome)
        for _ in range(times - 1):
            if not self.queue or not self.ready():
                break
            self.step(OK)
        return True

    def run_io(self, outcome: str, times: int) -> bool:
        """The thread for input and output goes on."""
        if not self.io_ready() or (outcome != OK and not self.io_at_write):
            return False
        self.dirty = self.dirty or outcome != OK
        self.io_step(outcome)
        for _ in range(times - 1):
            if not self.io_ready() or not self.io_may_go_on:
                break
            self.io_step(OK)
        return True

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
        waiting = self._waiting
        if waiting == TURN:
            return bool(self.queue) or self.world.now >= self._due_at()
        if waiting == WAIT:
            return self.now >= self._sleeping_until and (self._waits_for is None or self._waits_for())
        return True

    def _due_at(self) -> float:
        """When time alone gives the main thread something to do: the same until its next step."""
        if self._due is None:
            due = self.job.next_deadline()
            self._due = _NEVER if due is None else due
        return self._due

    @property
    def seems_ready(self) -> bool:
        """The same without a look at the time."""
        return bool(self.queue) or self._waiting != TURN

    def next_time(self) -> float | None:
        """When time alone makes something happen."""
        times = [self._sleeping_until] if self._waiting == WAIT and self._sleeping_until > self.now else []
        if self._waiting == TURN and self._due_at() < _NEVER:
            times.append(self._due_at())
        if self.superseded and not self._told_of_loss:
            times.append(self.now + LEASE / 4)  # the renewing thread will find out
        return min(times, default=None)

    def step(self, outcome: str) -> None:
        """The main thread goes on; `outcome` is that of the write it stands in front of."""
        try:
            self._waiting = self._main.send(outcome if self._waiting == PUT else None)  # type: ignore[arg-type]
            self._due = None
        except StopIteration:
            self.over = True
            self.ended()

    @property
    def at_write(self) -> bool:
        return self._waiting == PUT

    @property
    def io_at_write(self) -> bool:
        return self.io_waits == PUT

    @property
    def io_stands(self) -> bool:
        """In front of a write, or between a check and what relies on it."""
        return self.io_waits in (PUT, PAUSE)

    @property
    def io_may_go_on(self) -> bool:
        return self.io_waits != WAIT or not self.locked

    def io_ready(self) -> bool:
        return bool(self.io or self.io_now is not None)

    def io_step(self, outcome: str) -> None:
        """The thread for input and output goes on."""
        if self.io_now is None:
            self.io_now, self.io_waits = self.io.popleft()(), ""
        try:
            self.io_waits = self.io_now.send(outcome if self.io_waits == PUT else None)  # type: ignore[arg-type]
        except StopIteration:
            self.io_now, self.io_waits = None, ""
        except StorageError:
            self.io_now, self.io_waits = None, ""  # cleaning up: what fails here is swept up by a later run

    def crash(self) -> None:
        """Everything volatile is gone at once."""
        self.crashed = self.over = True
        self._main.close()
        if self.io_now is not None:
            self.io_now.close()
        self.tasks, self.running, self.uploads = {}, [], []

    def renew_if_due(self) -> None:
        """The renewing thread. Nothing can come between its steps."""
        if not self.epoch or self.over or self.locked or self.owner.released:
            return
        if self.world.now < self.owner.deadline - self.owner.lease_seconds * (SAFETY - 1 / 3):
            return
        try:
            for step in self.performer.owned(self.owner.renew()):
                assert step is PUT
        except StorageError as error:
            self._told_of_loss = True
            if not any(isinstance(item, OwnershipLost) for item in self.queue):
                self.queue.append(error)

    @abstractmethod
    def _run(self) -> Generator[str, str, None]:
        """From the start to the end, one step at a time."""

    @abstractmethod
    def ended(self) -> None:
        """It has come to its end by itself."""
