"""One simulated process: from acquiring the pipeline to saying how it ended.

Mirrors `spark.job`, `spark.job_loop` and `spark.checkpointing`: the loop with its queue, one thread for input and output,
uploads beside the tasks, attempts under a restart strategy. Everything in here is lost in a crash; `storage` and `sinks`
are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import (
    Acknowledged,
    AlignedBarrierHandler,
    AlignedWithTimeoutBarrierHandler,
    BarrierHandler,
    CheckpointBarrier,
    CheckpointCompleted,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointProperties,
    CheckpointSnapshot,
    CheckpointTriggered,
    CompletedCheckpoint,
    Declined,
    DiscardCheckpoint,
    DiscardStates,
    DrainBegan,
    FailJob,
    FailureReason,
    GiveUp,
    JobRestarting,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
    NotifyAborted,
    NotifyComplete,
    NotifySavepointComplete,
    RequestCompleted,
    RequestFailed,
    RestartStrategy,
    Shutdown,
    TaskState,
    TaskStateChanged,
    TaskStatistics,
    Tick,
    TrackingBarrierHandler,
    TriggerFailed,
    TriggerTask,
    UnalignedBarrierHandler,
    WriteMetadata,
)
from dagster_checkpoints.coordination import JobStatus as CoordinatorStatus
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import PartlyFinishedUnionState, RestoreError, check_union_states
from dagster_checkpoints.storage.pipeline_state import JobStatus
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from simulation.control import Control, Request, StopFailed
from simulation.cuts import check_cut
from simulation.deployment import deploy
from simulation.restoring import From, NothingToRestore, Restored, StartPoint, as_recorded, choose_start, read_restored
from simulation.shapes import Shape
from simulation.storage import (
    PAUSE,
    PUT,
    WAIT,
    CheckpointDiscarded,
    Metadata,
    OutcomeUnknown,
    Ownership,
    OwnershipLost,
    Savepoint,
    Steps,
    StorageError,
    StorageUnavailable,
    acquire,
)
from simulation.task import Ghost, Snapshot, Task
from simulation.violations import Violation, check

if TYPE_CHECKING:
    from simulation.world import World

LEASE = 12.0
TURN = "turn"
"""The main thread waits for something to come into its queue."""
_NEVER = float("inf")


class Canceled(Exception):
    """Somebody cancels the job."""


class AttemptFailed(Exception):
    """A task has failed."""


class JobFailed(Exception):
    """Too many checkpoints in a row have failed."""


class Upload:
    """A pinned snapshot on its way to storage."""

    __slots__ = ("attempt", "barrier", "snapshot", "statistics", "task")

    def __init__(self, task: Task, barrier: CheckpointBarrier, snapshot: Snapshot, statistics: TaskStatistics) -> None:
        self.task = task
        self.attempt = task.attempt
        self.barrier = barrier
        self.snapshot = snapshot
        self.statistics = statistics


_ENDS = (Canceled, AttemptFailed, JobFailed, StopFailed, StorageError)


class Process:
    """See the module's text. `number` is its place among all processes of the world."""

    def __init__(self, world: World, number: int, start: From) -> None:
        self.world = world
        self.number = number
        self.settings = world.scenario.settings
        self.config = self.settings.config
        self.shape: Shape = world.shapes[start.variant]
        self.asked_start = start
        self.may_idle = self.settings.idle
        self.knows_event_time = not self.settings.idle and self.settings.exactly_once
        """Whether the watermark of a task follows from its channels alone, and nothing is late."""
        self.coordinator: CheckpointCoordinator
        self.control = Control(self)
        self.registry = SharedStateRegistry()
        self.ownership: Ownership | None = None
        self.strategy: RestartStrategy = self.settings.restart.fresh()
        self.queue: deque[Any] = deque()
        self.io: deque[Callable[[], Steps[Any]]] = deque()
        self.io_now: Steps[Any] | None = None
        self.io_waits = ""
        self.uploads: list[Upload] = []
        self.tasks: dict[TaskId, Task] = {}
        self.running: list[Task] = []
        self.finished: set[TaskId] = set()
        self.ghosts: dict[TaskId, Ghost] = {}
        self.attempt = 0
        self.paused = False
        self.crashed = False
        self.over = False
        self.status = ""
        self.started = False
        self.restarting = False
        self.job_id = 0
        self.lineage: tuple[tuple[int, int | None], ...] = ()
        self.ended_sources: set[int] = set()
        self.ended_by = ""
        self.completed = 0
        """Checkpoints."""
        self.dirty = bool(world.active)
        """Something has gone wrong of which only a later run can clear up the traces."""
        self.asked: list[Request] = []
        self.restored: Restored | None = None
        self.checked = 0
        """The last attempt whose restored sinks were compared."""
        self._start: StartPoint | None = None
        self._passed_over: tuple[DiscardCheckpoint, ...] = ()
        self._draining = False
        self._drain_later = False
        self._sleeping_until = 0.0
        self._waits_for: Callable[[], bool] | None = None
        self._files = 0
        self._savepoints: dict[int, str] = {}
        self._kept: set[int] = set()
        self._last_id = 0
        self._main = self._run()
        self._waiting = "start"
        self._due = _NEVER

    # Time, counting, naming

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def epoch(self) -> int:
        assert self.ownership is not None
        return self.ownership.epoch

    @property
    def superseded(self) -> bool:
        """Whether another process has taken the pipeline over."""
        state = self.world.store.state
        return self.ownership is not None and state is not None and self.ownership.epoch < state.epoch

    def count(self, what: str) -> None:
        self.world.counts[what] += 1

    def new_file(self) -> str:
        self._files += 1
        return f"{self.number}.{self._files}"

    def new_handler(self, channels: Iterable[str]) -> BarrierHandler:
        barriers = self.settings.barriers
        if barriers == "at_least_once":
            return TrackingBarrierHandler(channels)
        if barriers == "unaligned":
            return UnalignedBarrierHandler(channels)
        if barriers == "timeout":
            return AlignedWithTimeoutBarrierHandler(channels, timeout=self.settings.alignment_timeout)
        return AlignedBarrierHandler(channels)

    # What the world lets happen

    def ready(self) -> bool:
        """Whether the main thread has something to do."""
        if self.over:
            return False
        waiting = self._waiting
        if waiting == TURN:
            return bool(self.queue) or self.world.now >= self._due
        if waiting == WAIT:
            return self.now >= self._sleeping_until and (self._waits_for is None or self._waits_for())
        return True

    @property
    def seems_ready(self) -> bool:
        """The same without a look at the time."""
        return bool(self.queue) or self._waiting != TURN

    def next_time(self) -> float | None:
        """When time alone makes something happen."""
        times = [self._sleeping_until] if self._waiting == WAIT and self._sleeping_until > self.now else []
        if self._waiting == TURN and self._due < _NEVER:
            times.append(self._due)
        if self.superseded and self.ownership is not None and not self.ownership.lost:
            times.append(self.now + LEASE / 4)  # the renewing thread will find out
        return min(times, default=None)

    def step(self, outcome: str) -> None:
        """The main thread goes on; `outcome` is that of the write it stands in front of."""
        try:
            self._waiting = self._main.send(outcome if self._waiting == PUT else None)  # type: ignore[arg-type]
            if self._waiting == TURN:
                times = (self.coordinator.next_deadline(), self.control.due_at())
                self._due = min((t for t in times if t is not None), default=_NEVER)
        except StopIteration:
            self.over = True
            self.world.process_ended(self)

    @property
    def at_write(self) -> bool:
        return self._waiting == PUT

    @property
    def io_at_write(self) -> bool:
        return self.io_waits == PUT

    @property
    def io_may_go_on(self) -> bool:
        return self.io_waits != WAIT or not (self.ownership is not None and self.ownership.locked)

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
        """The renewing thread."""
        ownership = self.ownership
        if ownership is None or ownership.released or self.over or not ownership.renewal_due:
            return
        try:
            ownership.renew()
        except StorageError as error:
            if not any(isinstance(item, OwnershipLost) for item in self.queue):
                self.queue.append(error)

    # The job

    def _run(self) -> Generator[str, str, None]:
        try:
            self.ownership = ownership = yield from acquire(
                self.world.store, str(self.number), LEASE, lambda: self.world.now, self._sleep
            )
        except StorageError:
            self.status = "REFUSED"
            return
        self.count("take-overs" if ownership.previous.lease is not None else "acquisitions")
        status = "before it began"
        try:
            start = yield from self._begin()
            status = "FAILED"
            error = yield from self._execute(start)
            status = "FINISHED" if error is None else "CANCELED" if isinstance(error, Canceled) else "FAILED"
        except (StorageError, NothingToRestore, RestoreError) as error:
            self.world.note(f"process {self.number} does not start: {error!r}")
        begun: JobStatus | None = None if status == "before it began" else status  # type: ignore[assignment]
        self.status = status
        self.ended_by = self._how if status == "FINISHED" else ""
        with suppress(StorageError):
            yield from ownership.release(begun)
        self.control.over(status, [item for item in self.queue if isinstance(item, Request)])

    def _sleep(self, seconds: float) -> None:
        self._sleeping_until, self._waits_for = self.now + seconds, None

    def _begin(self) -> Steps[StartPoint]:
        ownership = self.ownership
        assert ownership is not None
        yield PAUSE
        start = choose_start(self.world.store, ownership, self.asked_start, self.world.shapes, self.number)
        for pointer in ownership.retained:
            if pointer.kind != "savepoint":
                if pointer.location in self.world.store.metadata:
                    self.registry.register(pointer.location, self.world.store.check_whole(pointer.location).files)
                else:
                    ownership.gone(pointer.location)
        if start.restored is not None and not start.restored.savepoint:
            self.registry.register(start.restored.location, start.restored.metadata.files)
        self._start = start
        before = ownership.previous.job
        self.job_id = yield from ownership.begin_job(resume=start.resume, restored=start.pointer)
        self._set_lineage(start, before.job_id)
        if start.claimed and start.pointer is not None:
            yield from ownership.claim(start.pointer)
        return start

    def _set_lineage(self, start: StartPoint, before: int) -> None:
        restored = start.restored
        if restored is None:
            self.lineage = ((self.job_id, None),)
        elif start.resume:
            check(self.job_id == before, "a resumed job has another id")
            self.lineage = restored.metadata.lineage
        else:
            parents = tuple(
                (job, restored.metadata.checkpoint_id if upto is None else upto) for job, upto in restored.metadata.lineage
            )
            self.lineage = (*parents, (self.job_id, None))

    def _execute(self, start: StartPoint) -> Steps[BaseException | None]:
        self.io.append(self._sweep)
        restored = start.restored
        self.count("restores" if restored is not None else "new starts")
        self.restored = restored
        first = True
        status: JobStatus = "FAILED"
        ended: BaseException | None
        while True:
            yield PAUSE
            restored = self.restored
            self._deploy(restored)
            if first:
                first = False
                self.coordinator = CheckpointCoordinator(
                    self.shape.graph,
                    self.config,
                    next_checkpoint_id=start.next_checkpoint_id,
                    finished=self.finished,
                    completed=start.retained,
                )
                self._passed_over = tuple(DiscardCheckpoint(checkpoint) for checkpoint in start.passed_over)
            error = yield from self._one_attempt()
            if error is None:
                status, ended = "FINISHED", None
                break
            ended = yield from self._restart(error)
            if ended is not None:
                status = "CANCELED" if isinstance(ended, Canceled) else "FAILED"
                break
        yield from self._shut_down(status)
        self.uploads.clear()
        self._sleeping_until, self._waits_for = 0.0, lambda: not self.io_ready()
        while self.io_ready():
            yield WAIT
        return ended

    def _deploy(self, restored: Restored | None) -> None:
        self.attempt += 1
        if restored is not None:
            if self.superseded:
                raise OwnershipLost  # what it was to fetch may have been deleted by the new owner
            self.world.store.check_whole(restored.location)
        deploy(self, restored, self._start)
        if restored is not None and not restored.savepoint:
            self.registry.known(restored.metadata.files)

    def _one_attempt(self) -> Steps[BaseException | None]:
        self.restarting = False
        self.count("attempts")
        try:
            while len(self.finished) < self.shape.graph.instance_count:
                yield TURN
                self._turn()
            while self.coordinator.finalizing is not None:
                # Its outcome must be known before the job is over: else it lands in a finished job, and stays for ever.
                yield TURN
                self._turn()
            self.control.all_finished()
            return None
        except _ENDS as error:
            return error
        finally:
            self.tasks_stopped()

    def tasks_stopped(self) -> None:
        """Those that had not finished are cancelled."""
        for task in self.running:
            if not task.done:
                task.done = True
                task.close()
        self.running = []

    def _turn(self) -> None:
        self._take(self._next())
        self.control.go_on()

    def _next(self) -> Any:
        if self.queue:
            return self.queue.popleft()
        return Tick()

    def _take(self, item: Any) -> None:
        if isinstance(item, tuple) and item[0] == "report":
            _, attempt, event = item
            if attempt == self.attempt and not self.restarting:
                self._take_report(event)
        elif isinstance(item, Request):
            self.control.take(item)
        elif isinstance(item, StorageError):
            raise item
        elif item == "cancel":
            raise Canceled
        elif item == "drain":
            self.drain()
        else:
            self.handle(item)

    def _take_report(self, event: Any) -> None:
        if isinstance(event, AttemptFailed):
            raise event
        self.handle(event)
        if isinstance(event, TaskStateChanged) and event.state is TaskState.FINISHED:
            self.finished.add(event.task)
            self.count("finished tasks")

    def handle(self, event: Any) -> None:
        for action in self.coordinator.handle(event, self.now):
            self.perform(action)

    def perform(self, action: Any) -> None:
        match action:
            case TriggerTask(task, barrier):
                if task in self.tasks and task not in self.finished:
                    self._send([task], ("trigger", barrier))
                else:
                    self.queue.append(TriggerFailed(task, barrier.checkpoint_id))
            case WriteMetadata(snapshot):
                ghosts = {task: self.ghosts[task] for task in snapshot.plan.finished}
                self.io.append(lambda: self._write(snapshot, ghosts))
            case NotifyComplete(tasks, checkpoint_id):
                named = (self.job_id, checkpoint_id) in self.world.store.named
                check(named, f"tasks are told that {checkpoint_id} has completed, and the state has never named it")
                self._send(tasks, ("complete", checkpoint_id))
            case NotifySavepointComplete(tasks, checkpoint_id):
                self._send(tasks, ("savepoint", checkpoint_id))
            case NotifyAborted(tasks, checkpoint_id):
                self._send(tasks, ("aborted", checkpoint_id))
            case DiscardStates(discarded):
                self.io.append(lambda: self._discard_states(discarded))
            case DiscardCheckpoint(checkpoint):
                self.io.append(lambda: self._delete(checkpoint.location))
            case CheckpointTriggered(checkpoint_id, properties):
                last = max(self._last_id, self.world.store.taken.get(self.job_id, 0))
                check(checkpoint_id > last or self.superseded, f"id {checkpoint_id} after {last}")
                self._last_id = checkpoint_id
                if properties.is_savepoint:
                    self._savepoint_directory(checkpoint_id)
            case CheckpointCompleted(completed):
                self._completed(completed)
            case RequestCompleted(request_id, completed):
                self.control.completed(request_id, completed)
            case RequestFailed(request_id, reason, message):
                self.control.failed(request_id, reason, message)
            case CheckpointFailed(checkpoint_id, reason):
                subsumed = reason is FailureReason.CHECKPOINT_SUBSUMED and checkpoint_id in self._savepoints
                check(not subsumed, f"savepoint {checkpoint_id} was subsumed")
                self.world.counts[f"failed: {reason.name}"] += 1
                if checkpoint_id is not None and checkpoint_id in self._savepoints:
                    self.io.append(lambda: self._discard_savepoint(checkpoint_id))
            case FailJob(_, message):
                raise JobFailed(message)

    def _send(self, tasks: Iterable[TaskId], mail: tuple[str, Any]) -> None:
        for task in tasks:
            if task in self.tasks:
                self.tasks[task].mailbox.append(mail)

    def _completed(self, completed: CompletedCheckpoint) -> None:
        for passed_over in self._passed_over:
            self.perform(passed_over)
        self._passed_over = ()
        if completed.is_savepoint:
            self.count("savepoints")
        else:
            self.completed += 1
            self.count("checkpoints")
            kept = {checkpoint.location for checkpoint in self.coordinator.completed}
            assert self.ownership is not None
            for pointer in self.ownership.retained:
                if not pointer.ours and pointer.location not in kept:
                    self.io.append(lambda location=pointer.location: self._forget(location))  # type: ignore[misc]

    def _forget(self, location: str) -> Steps[None]:
        assert self.ownership is not None
        yield from self.ownership.forget(location)

    # Sources

    def drain(self) -> None:
        """End every source, without a savepoint."""
        if self.control.stop is not None:
            self._drain_later = True
            return
        self._draining = True
        self.handle(DrainBegan())
        self.end_sources(None)

    def drain_if_wanted(self) -> None:
        if self._drain_later:
            self._drain_later = False
            self.drain()

    def end_sources(self, stage: int | None, *, remember: bool = True) -> None:
        for task in self.tasks.values():
            if task.source and stage in (None, task.head):
                if remember:
                    self.ended_sources.add(task.head)
                self._send([task.id], ("end_input", None))

    # Tasks

    def report(self, attempt: int, event: object) -> None:
        self.queue.append(("report", attempt, event))

    def task_failed(self, task: Task, message: str) -> None:
        self.count("task failures")
        self.running = [t for t in self.running if t is not task]
        self.report(task.attempt, AttemptFailed(f"{task.id}: {message}", task.id))

    def task_ended(self, task: Task) -> None:
        """Called by the task when it is FINISHED."""
        self.ghosts[task.id] = task.ghost()
        self.running = [t for t in self.running if t is not task]
        stopped = self.control.stopped
        if stopped is not None:
            check(
                task.ended_with == stopped.checkpoint_id,
                f"{task.id} ends with checkpoint {task.ended_with}, the others with {stopped.checkpoint_id}",
            )

    def submit_upload(self, task: Task, barrier: CheckpointBarrier, snapshot: Snapshot, statistics: TaskStatistics) -> None:
        self.uploads.append(Upload(task, barrier, snapshot, statistics))

    def may_upload(self, upload: Upload) -> bool:
        """False if it has to wait for a deletion."""
        deleting = self.registry._deleting
        return not deleting or upload.barrier.properties.is_savepoint or not deleting.intersection(upload.snapshot.files)

    def upload(self, upload: Upload, outcome: str) -> bool:
        """An upload ends. False if it has to wait for a deletion."""
        if not self.may_upload(upload):
            return False
        store, checkpoint_id = self.world.store, upload.barrier.checkpoint_id
        task, files = upload.task.id, upload.snapshot.files
        try:
            if upload.barrier.properties.is_savepoint:
                savepoint = store.savepoints.get(self._savepoint_directory(checkpoint_id))
                if savepoint is None or savepoint.deleted:
                    raise CheckpointDiscarded
                savepoint.marked = True
                if outcome == UPLOADED:
                    savepoint.files.update(files)
            else:
                key = self._key(checkpoint_id)
                for number, file in enumerate(files):
                    if outcome != UPLOADED and number == 1:
                        break
                    if self.registry.reserve(key, file):
                        store.shared.add(file)
                        self.registry.stored(key, file)
            if outcome != UPLOADED:
                raise StorageUnavailable
            self.report(upload.attempt, Acknowledged(task, checkpoint_id, upload.snapshot, upload.statistics))
        except StorageError:
            reason = FailureReason.IO_EXCEPTION
            self.report(upload.attempt, Declined(task, checkpoint_id, reason, "the upload failed"))
        except Exception as error:
            if isinstance(error, Violation):
                raise
            reason = FailureReason.CHECKPOINT_ASYNC_EXCEPTION
            self.report(upload.attempt, Declined(task, checkpoint_id, reason, str(error)))
        self.uploads.remove(upload)
        return True

    # Writing

    def _key(self, checkpoint_id: int) -> str:
        return f"checkpoints/chk-{checkpoint_id}-{self.epoch}"

    def _savepoint_directory(self, checkpoint_id: int) -> str:
        if checkpoint_id not in self._savepoints:
            location = f"savepoints/savepoint-{checkpoint_id}-{self.epoch}"
            self._savepoints[checkpoint_id] = location
            self.world.store.savepoints[location] = Savepoint(location, True, self.epoch)
        return self._savepoints[checkpoint_id]

    def _write(self, checkpoint: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Steps[None]:
        self.queue.append((yield from self._written(checkpoint, ghosts)))

    def _written(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Steps[Any]:
        checkpoint_id, properties = snapshot.checkpoint_id, snapshot.properties
        ownership = self.ownership
        assert ownership is not None
        try:
            metadata = self._metadata(snapshot, ghosts)
            if self.world.has_union:
                check_union_states(as_recorded(metadata, self.shape))
            if self.settings.exactly_once:
                check_cut(self.shape, metadata)
            if properties.is_savepoint:
                location = yield from self._write_savepoint(checkpoint_id, metadata)
            else:
                location = self._key(checkpoint_id)
                yield from self._create(location, metadata)
            if properties.commits:
                yield from ownership.complete(checkpoint_id, location, metadata.kind)
            self._kept.add(checkpoint_id)
        except OutcomeUnknown:
            self._kept.add(checkpoint_id)
            return MetadataOutcomeUnknown(checkpoint_id, "unknown")
        except PartlyFinishedUnionState as error:
            check(not self._union_partly_finished(metadata), f"no checkpoint is possible any more: {error}")
            return MetadataWriteFailed(checkpoint_id, str(error), FailureReason.CHECKPOINT_DECLINED)
        except StorageError as error:
            return MetadataWriteFailed(checkpoint_id, repr(error))
        return MetadataWritten(checkpoint_id, location)

    def _union_partly_finished(self, metadata: Metadata) -> bool:
        """Whether some, but not all, instances of a stage with union list state have finished: there is no way on."""
        for chain in self.shape.chains:
            if any(self.shape.stages[int(name[1:])].kind == "union" for name in chain.stages):
                gone = sum(TaskId(chain.name, index) in metadata.finished for index in range(len(chain.instances)))
                if 0 < gone < len(chain.instances):
                    return True
        return False

    def _metadata(self, snapshot: CheckpointSnapshot, ghosts: dict[TaskId, Ghost]) -> Metadata:
        states: dict[TaskId, Any] = dict(snapshot.states)
        return Metadata(
            checkpoint_id=snapshot.checkpoint_id,
            kind=snapshot.properties.kind.value,
            stops_job=snapshot.properties.stops_job,
            epoch=self.epoch,
            job_id=self.job_id,
            variant=self.asked_start.variant,
            states=states,
            finished=frozenset(snapshot.plan.finished),
            ghosts=ghosts,
            files=frozenset(file for state in states.values() for file in state.files),
            lineage=self.lineage,
        )

    def _create(self, location: str, metadata: Metadata) -> Steps[None]:
        for attempt in range(3):
            outcome = yield PUT
            if outcome == "unavailable":
                raise StorageUnavailable
            if outcome != "lost":
                there = self.world.store.metadata.setdefault(location, metadata)
                check(there is metadata, f"two checkpoints are called {location}")
            if outcome not in ("lost", "landed"):
                return
            if attempt == 2:
                raise OutcomeUnknown

    def _write_savepoint(self, checkpoint_id: int, metadata: Metadata) -> Steps[str]:
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        yield from ownership.reserve(checkpoint_id)
        location = self._savepoint_directory(checkpoint_id)
        savepoint = store.savepoints.get(location)
        if savepoint is None or metadata.files - savepoint.files:
            raise StorageUnavailable
        outcome = yield PUT
        if outcome == "unavailable":
            raise StorageUnavailable
        if outcome == "lost":
            raise OutcomeUnknown
        if store.savepoints.get(location) is not savepoint:
            store.savepoints[location] = Savepoint(location, True, self.epoch)  # swept meanwhile: metadata without files
            store.savepoints[location].metadata = metadata
        else:
            savepoint.metadata = metadata
        if outcome == "landed":
            raise OutcomeUnknown
        yield from ownership.confirm()
        store.take_id(metadata)
        savepoint.marked = False
        return location

    # Deleting

    def _discard_states(self, checkpoint_id: int) -> Steps[None]:
        yield from self._discard_savepoint(checkpoint_id)
        yield from self._discard(self._key(checkpoint_id))

    def _discard(self, key: str) -> Steps[None]:
        ownership = self.ownership
        assert ownership is not None
        with self.registry.discarding(key) as orphans:
            if orphans:
                ownership.ensure()
                yield PAUSE
                self.world.store.delete_shared(orphans)

    def _discard_savepoint(self, checkpoint_id: int) -> Steps[None]:
        location = self._savepoints.get(checkpoint_id)
        if location is None or checkpoint_id in self._kept:
            return
        yield PAUSE
        savepoint = self.world.store.savepoints.get(location)
        if savepoint is not None:
            savepoint.deleted = True
            savepoint.metadata = None
        self.world.store.delete_savepoint(location)

    def _delete(self, location: str) -> Steps[None]:
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        retained = [c.location for c in self.coordinator.completed]
        check(location not in retained, f"{location} is deleted, and is still retained")
        ownership.ensure()
        yield from ownership.forget(location)
        yield PAUSE
        if location in store.savepoints:
            store.delete_savepoint(location)
            return
        store.delete_metadata(location)
        yield PAUSE
        yield from self._discard(location)

    def _sweep(self) -> Steps[None]:
        """Delete what killed processes have left behind."""
        ownership, store = self.ownership, self.world.store
        assert ownership is not None
        for savepoint in [s for s in store.savepoints.values() if s.own and s.epoch < self.epoch]:
            if savepoint.metadata is None:
                ownership.ensure()
                yield PAUSE
                if savepoint.metadata is None:
                    store.delete_savepoint(savepoint.location)
        kept = {p.location for p in (*ownership.retained, *([ownership.state.newest] if ownership.state.newest else ()))}
        for location, metadata in list(store.metadata.items()):
            in_use = location in self.registry.checkpoints()
            if metadata.epoch < self.epoch and location not in kept and not in_use:
                ownership.ensure()
                yield PAUSE
                store.delete_metadata(location)
        with self.registry.sweeping(set(store.shared)) as orphans:
            ownership.ensure()
            yield PAUSE
            store.delete_shared(orphans)

    # Failing and ending

    def _restart(self, error: BaseException) -> Steps[BaseException | None]:
        if isinstance(error, Canceled | StorageError):
            return error
        self.restarting = True
        try:
            self.control.attempt_failed(str(error))
            decision = self.strategy.on_failure(self.now)
            if isinstance(decision, GiveUp):
                return JobFailed(decision.reason)
            self.count("restarts")
            until = self.now + decision.delay
            self._tasks_are_gone(error)
            while self.coordinator.finalizing is not None or self.now < until:
                self._sleeping_until = until
                self._waits_for = None
                if self.queue:
                    yield PAUSE
                    self._take(self.queue.popleft())
                elif self.coordinator.finalizing is not None:
                    self._sleeping_until, self._waits_for = 0.0, lambda: bool(self.queue)
                    yield WAIT
                else:
                    yield WAIT
            self.control.attempt_failed(str(error))
            latest = yield from self._latest()
        except (Canceled, StorageError, JobFailed) as ended:
            return ended
        at_start = self._start.restored if self._start is not None else None
        if latest is None:
            self.handle(JobRestarting())
        else:
            # A savepoint that has landed although nobody knew stays the user's.
            users = latest.savepoint and latest.location not in self.world.store.claimed
            properties = CheckpointProperties.for_savepoint(stops_job=True) if users else CheckpointProperties()
            known = (
                CompletedCheckpoint(latest.plan.checkpoint_id, latest.location, properties) if latest is not at_start else None
            )
            self.handle(JobRestarting(frozenset(latest.plan.finished), known))
        self.restored = latest
        return None

    def _tasks_are_gone(self, error: BaseException) -> None:
        failed = error.args[1] if isinstance(error, AttemptFailed) else None
        for task in self.tasks:
            if task not in self.finished:
                self.handle(TaskStateChanged(task, TaskState.FAILED if task == failed else TaskState.CANCELED))

    def _latest(self) -> Steps[Restored | None]:
        """What to restart from, as storage has it."""
        ownership = self.ownership
        assert ownership is not None
        while True:
            try:
                yield from ownership.confirm()
                newest = ownership.state.newest
                at_start = self._start.restored if self._start is not None else None
                if newest is None or newest.epoch != self.epoch:
                    return at_start
                return read_restored(self.world.store, newest.location, self.world.shapes)
            except (StorageUnavailable, OutcomeUnknown):
                if self.queue:
                    self._take(self.queue.popleft())

    @property
    def _how(self) -> str:
        stopped = self.control.stopped
        if stopped is not None:
            return "drain" if stopped.drain else "suspend"
        return "drain" if self._draining else "end_of_data"

    def _shut_down(self, status: JobStatus) -> Steps[None]:
        actions = self.coordinator.handle(Shutdown(CoordinatorStatus[status]), self.now)
        if status == "FINISHED":
            ownership = self.ownership
            assert ownership is not None
            keep = not any(isinstance(action, DiscardCheckpoint) for action in actions)
            try:
                dropped = yield from ownership.end_job(status, keep=keep, ended_by=self._how)  # type: ignore[arg-type]
            except StorageError:
                return
            known = {action.checkpoint.location for action in actions if isinstance(action, DiscardCheckpoint)}
            for location in dropped:
                if location not in known:
                    self.io.append(lambda location=location: self._delete(location))  # type: ignore[misc]
        for action in actions:
            if isinstance(action, DiscardCheckpoint | DiscardStates):
                self.perform(action)


UPLOADED = "uploaded"
