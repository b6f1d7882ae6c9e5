"""The loop around the coordinator: takes what tasks, uploads and people say, and performs what the coordinator asks for.

A single thread runs it; everything else reaches it through one queue. One loop serves all attempts of a run. It must not know
how a run begins, restarts or ends.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    CheckpointCompleted,
    CheckpointCoordinator,
    CheckpointFailed,
    CheckpointProperties,
    CheckpointRequested,
    CheckpointTriggered,
    CompletedCheckpoint,
    CoordinatorAction,
    CoordinatorEvent,
    DiscardCheckpoint,
    DiscardStates,
    DrainBegan,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    NotifySavepointComplete,
    RequestCompleted,
    RequestFailed,
    TaskState,
    TaskStateChanged,
    Tick,
    TriggerFailed,
    TriggerTask,
    WriteMetadata,
)
from dagster_checkpoints.pipeline import Pipeline, TaskId
from dagster_checkpoints.spark.errors import JobFailedError
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.checkpointing import CheckpointWriter
from dagster_checkpoints.spark.job.control_requests import ControlRequests
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.events import JobEvent, StageProgress
from dagster_checkpoints.spark.job.query_starts import QueryStarts
from dagster_checkpoints.spark.job.reporting import checkpoint_done, late_rows, savepoint_done, stage_progress, stage_rows
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.messages import (
    AskCheckpoint,
    Asked,
    Cancel,
    CheckpointIsAborted,
    CheckpointIsComplete,
    EndInput,
    EndSources,
    FromAttempt,
    Item,
    Mail,
    OwnershipIsLost,
    SavepointIsComplete,
    TaskFailed,
    TaskFirstBatch,
    TaskNews,
    TaskQueryStarted,
    TaskWaiting,
    TriggerCheckpoint,
)
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.storage import StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IDLE_TICK = 0.5


class Canceled(Exception):
    """Unwinds the loop when the job is cancelled."""


class TaskFailure(Exception):
    """A task has failed."""

    def __init__(self, task: TaskId, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.task = task
        self.cause = cause


class NotDeployed(Exception):
    """A restart could not be deployed: a stage could not be built, or storage did not answer."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class JobLoop:
    """What exists once a job has its Spark session and a first deployment.

    Args:
        pipeline: What runs.
        coordinator: Of the whole run.
        writer: Writes its checkpoints.
        control: What people ask of the run.
        savepoints: Where the savepoints being taken go.
        items: The queue.
        io: One thread, for writing metadata and deleting.
        on_event: Told of everything that happens, on the loop's thread.

    Attributes:
        attempt: Number of the deployment that runs; what earlier ones still say is of no interest.
        finished: Tasks that have finished, in this run or before.
        told: Those of them whose end was told in this run.
        announced: Stages whose end was told.
        passed_over: Checkpoints that are later than the one the job has gone on from.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        coordinator: CheckpointCoordinator,
        writer: CheckpointWriter,
        control: ControlRequests,
        savepoints: SavepointsInProgress,
        items: queue.SimpleQueue[Item],
        io: ThreadPoolExecutor,
        on_event: Callable[[JobEvent], None],
        log: logging.Logger,
    ) -> None:
        self.pipeline = pipeline
        self.spark = spark
        self.coordinator = coordinator
        self.writer = writer
        self.control = control
        self.attempt = 0
        self.deployment: Deployment | None = None
        self.finished: set[TaskId] = set()
        self.told: set[TaskId] = set()
        self.announced: set[str] = set()
        self.passed_over: tuple[DiscardCheckpoint, ...] = ()
        self.ended_sources: set[tuple[str, str]] = set()
        self.restarting = False
        self._savepoints = savepoints
        self._items = items
        self._io = io
        self._on_event = on_event
        self._log = log
        self._drain_later = False
        self._triggered: set[str] = set()
        self._query_starts: QueryStarts | None = None

    @property
    def tasks(self) -> Mapping[TaskId, Task]:
        """Of the deployment that runs."""
        return self.deployment.tasks if self.deployment else {}

    def progress(self) -> Mapping[str, StageProgress]:
        """How far each stage is now; any thread."""
        latest = self.coordinator.latest_completed
        return stage_progress(self.deployment, self.finished, latest.statistics if latest else {}) if self.deployment else {}

    @property
    def all_finished(self) -> bool:
        return self.deployment is not None and len(self.finished) >= self.deployment.graph.instance_count

    # Turns of the loop

    def turn(self) -> None:
        """Wait for the next item, or for what time asks for, and deal with it.

        Raises:
            Canceled, TaskFailure, JobFailedError, StorageError: What ends the attempt.
        """
        self.take(self.next())
        self.control.go_on(self)

    def next(self) -> Item:
        """The next item; a Tick if there is none for a while, or when one is due."""
        deadline = self.coordinator.next_deadline()
        wait = _IDLE_TICK if deadline is None else min(max(deadline - time.monotonic(), 0.0), _IDLE_TICK)
        try:
            return self._items.get(timeout=wait) if wait > 0 else self._items.get_nowait()
        except queue.Empty:
            return Tick()

    def take(self, item: Item) -> None:
        """Deal with one item."""
        match item:
            case Cancel():
                raise Canceled
            case OwnershipIsLost(error):
                raise error
            case Asked():
                self.control.take(item)
            case EndSources(None, None):
                self.drain()
            case EndSources(stage, instance):
                assert stage is not None
                self.end_sources(stage, instance)
            case AskCheckpoint(request_id):
                self.handle(CheckpointRequested(request_id, CheckpointProperties()))
            case FromAttempt(attempt, event):
                if attempt == self.attempt and not self.restarting:
                    self._take_report(event)
            case event:
                self.handle(event)

    def _take_report(self, event: CoordinatorEvent | TaskFailed | TaskNews) -> None:
        if isinstance(event, TaskFailed):
            raise TaskFailure(event.task, event.error)
        if isinstance(event, TaskWaiting | TaskQueryStarted | TaskFirstBatch):
            told = self._query_starts.take(event, time.monotonic()) if self._query_starts else None
            if told is not None:
                self._on_event(told)
            return
        self.handle(event)
        if isinstance(event, TaskStateChanged) and event.state is TaskState.FINISHED:
            self._task_finished(event.task)

    def handle(self, event: CoordinatorEvent) -> None:
        """Give an event to the coordinator and perform what it answers."""
        for action in self.coordinator.handle(event, time.monotonic()):
            self.perform(action)

    def perform(self, action: CoordinatorAction) -> None:
        """Do what the coordinator asks for."""
        match action:
            case TriggerTask(task, barrier):
                if task in self.tasks and task not in self.finished:
                    self.tasks[task].send(TriggerCheckpoint(barrier))
                else:
                    self._items.put(TriggerFailed(task, barrier.checkpoint_id))
            case WriteMetadata(checkpoint):
                finished = frozenset(checkpoint.plan.finished)
                self._io.submit(lambda: self._items.put(self.writer.write(checkpoint, finished)))
            case NotifyComplete(tasks, checkpoint_id):
                self._send(tasks, CheckpointIsComplete(checkpoint_id))
            case NotifySavepointComplete(tasks, checkpoint_id):
                self._send(tasks, SavepointIsComplete(checkpoint_id))
            case NotifyAborted(tasks, checkpoint_id):
                self._send(tasks, CheckpointIsAborted(checkpoint_id))
            case DiscardStates(discarded):
                self._later(lambda: self.writer.discard_states(discarded))
            case DiscardCheckpoint(completed):
                self._later(lambda: self.writer.delete(completed))
            case CheckpointTriggered(checkpoint_id, properties, request_id):
                if request_id is not None:
                    self._triggered.add(request_id)
                if properties.is_savepoint:
                    self._savepoints.directory(checkpoint_id, properties)
            case CheckpointCompleted(completed):
                self._completed(completed)
            case RequestCompleted(request_id, completed):
                self._triggered.discard(request_id)
                self.control.completed(self, request_id, completed)
            case RequestFailed(request_id, reason, message):
                if reason.pre_flight and request_id not in self._triggered:  # else its checkpoint's failure was told
                    self._on_event(events.CheckpointNotDone(None, reason.name, message))
                self._triggered.discard(request_id)
                self.control.failed(self, request_id, reason, message)
            case CheckpointFailed(checkpoint_id, reason, message):
                if checkpoint_id is not None:
                    self._later(lambda: self._savepoints.discard(checkpoint_id))
                self._on_event(events.CheckpointNotDone(checkpoint_id, reason.name, message))
            case FailJob(reason, message):
                raise JobFailedError(f"Pipeline {self.pipeline.name!r}: {message} ({reason.name}).")
            case _:
                pass

    def _send(self, tasks: Iterable[TaskId], mail: Mail) -> None:
        for task in tasks:
            if task in self.tasks:
                self.tasks[task].send(mail)

    def _later(self, act: Callable[[], object]) -> None:
        self._io.submit(self.quietly, act)

    def quietly(self, act: Callable[[], object]) -> None:
        """Cleaning up: what fails here is swept up by a later run."""
        try:
            act()
        except StorageError as error:
            self._log.warning("%s: %s", type(error).__name__, error)

    def _completed(self, completed: CompletedCheckpoint) -> None:
        for passed_over in self.passed_over:
            # The job has gone on from an earlier checkpoint: the later ones, whose rows were taken back, are of no use.
            self.perform(passed_over)
        self.passed_over = ()
        assert self.deployment is not None
        if completed.is_savepoint:
            asked = self.control.asked(completed.properties.target)
            self._on_event(savepoint_done(self.deployment, completed, self.coordinator.statistics.counts, asked))
        else:
            self.writer.forget_savepoints(self.coordinator.completed)
            self._on_event(checkpoint_done(self.deployment, completed, self.coordinator.statistics.counts))

    # Tasks

    def drain(self) -> None:
        """End every source, without a savepoint; behind a stop that is under way, if that one fails."""
        if self.control.stop is not None:
            self._drain_later = True
            return
        self.handle(DrainBegan())
        for source, instance in self._sources():
            self.end_sources(source, instance)

    def drain_if_wanted(self) -> None:
        """The stop that was under way has failed: the drain that waited behind it goes on."""
        if self._drain_later:
            self._drain_later = False
            self.drain()

    def end_sources(self, stage: str | None, instance: str | None = None, *, remember: bool = True) -> None:
        """End one source (instance), or all of them (None), as if the input were exhausted.

        Args:
            remember: After a restart they end again.
        """
        assert self.deployment is not None
        for chain in self.deployment.chains:
            source = self.pipeline.stage(chain.stages[0])
            if not source.kind.is_source or stage not in (None, source.name):
                continue
            for index, name in enumerate(source.instances):
                if instance in (None, name):
                    if remember:
                        self.ended_sources.add((source.name, name))
                    self._send([TaskId(chain.name, index)], EndInput())

    def _sources(self) -> list[tuple[str, str]]:
        return [(s.name, name) for s in self.pipeline.stages if s.kind.is_source for name in s.instances]

    def _task_finished(self, task: TaskId) -> None:
        assert self.deployment is not None
        self.finished.add(task)
        if self.tasks[task].suspended:
            return  # its data has not ended: it goes on when the job is resumed
        chain = next(c for c in self.deployment.chains if c.name == task.vertex)
        rows = self.tasks[task].rows_out
        tail = chain.stages[-1]
        if task not in self.told:  # a task restored after its finish ends once more
            self.told.add(task)
            for stage in chain.stages:
                kept = rows if stage == tail else 0
                self._on_event(events.InstanceFinished(stage, chain.instances[task.index], kept))
        tasks = [TaskId(chain.name, index) for index in range(len(chain.instances))]
        suspended = any(i in self.tasks and self.tasks[i].suspended for i in tasks)
        if all(i in self.finished for i in tasks) and not suspended:
            latest = self.coordinator.latest_completed
            for stage in (name for name in chain.stages if name not in self.announced):
                self.announced.add(stage)
                total = stage_rows(self.deployment, stage)
                late = late_rows(self.deployment, stage)
                self._on_event(events.StageFinished(stage, total, latest.checkpoint_id if latest else None, late_rows=late))

    def tasks_are_gone(self, error: BaseException) -> None:
        """No checkpoint is triggered, and none waits for a task, between a failure and the restart."""
        failed = error.task if isinstance(error, TaskFailure) else None
        for task in self.tasks:
            if task not in self.finished:
                state = TaskState.FAILED if task == failed else TaskState.CANCELED
                self.handle(TaskStateChanged(task, state))

    # Attempts

    def begin_attempt(self, deployment: Deployment, attempt: int, restored: Restored | None, seconds: float) -> None:
        """Serve this deployment from now on, and tell of it.

        Args:
            seconds: That building the deployment took.
        """
        self.attempt, self.deployment, self.restarting = attempt, deployment, False
        self.finished = set(deployment.finished)
        starting = [task.id for task in deployment.tasks.values() if not task.restored_after_finish]
        self._query_starts = QueryStarts(deployment.chains, starting, time.monotonic())
        self.writer.deployed(deployment)
        fully = tuple(s.name for s in self.pipeline.stages if restored and s.name in restored.plan.fully_finished)
        self._on_event(
            events.JobStarted(
                attempt=attempt % 10_000,
                job_id=self.writer.job_id,
                restored_checkpoint=restored.plan.checkpoint_id if restored else None,
                restored_location=restored.location if restored else None,
                finished_stages=fully,
                chains=tuple(chain.stages for chain in deployment.chains),
                seconds=seconds,
            )
        )
        for stage in (name for name in fully if name not in self.announced):
            self.announced.add(stage)
            rows = stage_rows(deployment, stage)
            checkpoint_id = restored.plan.checkpoint_id if restored else None
            self._on_event(events.StageFinished(stage, rows, checkpoint_id, True, late_rows(deployment, stage)))
