"""Reports a running job: turns actions of the job machine into events for display.

For the thread of the job's loop; `progress` and `rows` for any thread. It must not decide anything.

The start reports of tasks become events of queries, one per query and attempt: a query has as many tasks as its chain has
instances, and the number of events must not grow with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set

from dagster_checkpoints.control.requests import ControlRequest
from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    RequestCompleted,
    RequestNotCompleted,
)
from dagster_checkpoints.pipeline import Chain, Pipeline, StageRows, TaskId
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.events import FirstBatch, JobEvent, QueryEvent, QueryStarted, QueryWaiting, StageProgress
from dagster_checkpoints.spark.job.reporting import (
    SinkCommits,
    checkpoint_done,
    committed_rows,
    late_rows,
    savepoint_done,
    stage_progress,
    stage_rows,
)
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.messages import (
    StartProgress,
    TaskCommitRefused,
    TaskCommitted,
    TaskFirstBatch,
    TaskQueryStarted,
    TaskWaiting,
)


class QueryStarts:
    """The starts of one attempt's queries.

    Args:
        chains: The chains of the attempt.
        tasks: The tasks that will start a query.
        began: The time at which they were started, monotonic seconds.
    """

    def __init__(self, chains: Iterable[Chain], tasks: Iterable[TaskId], began: float) -> None:
        self._chains = {chain.name: chain for chain in chains}
        self._starting: dict[str, set[TaskId]] = {}
        for task in tasks:
            self._starting.setdefault(task.vertex, set()).add(task)
        self._instances = {name: len(tasks) for name, tasks in self._starting.items()}
        self._began = began
        self._started = 0
        self._waiting: set[str] = set()
        self._rows: dict[str, int] = {}
        """The number of rows in the first batch that was reported, by query."""

    def take(self, progress: StartProgress, now: float) -> QueryEvent | None:
        """The event of a query for a task's report; None if there is none.

        Args:
            progress: The task's report.
            now: Monotonic seconds.
        """
        chain = self._chains[progress.task.vertex]
        match progress:
            case TaskQueryStarted(task):
                starting = self._starting.get(task.vertex, set())
                if task not in starting:
                    return None  # the task has started its query a second time, for the last batch
                starting.discard(task)
                if starting:
                    return None
                self._started += 1
                total, instances = len(self._starting), self._instances[task.vertex]
                return QueryStarted(chain.stages, instances, self._started, total, now - self._began)
            case TaskWaiting(task, inputs):
                if task.vertex in self._waiting:
                    return None
                self._waiting.add(task.vertex)
                return QueryWaiting(chain.stages, inputs)
            case TaskFirstBatch(task, rows, seconds, rows_read):
                if self._rows.get(task.vertex) or (not rows and task.vertex in self._rows):
                    return None
                self._rows[task.vertex] = rows
                return FirstBatch(chain.stages, chain.instances[task.index], rows, seconds, rows_read)


CheckpointReport = CheckpointTriggered | CheckpointCompleted | CheckpointFailed | RequestCompleted | RequestNotCompleted


class JobReporter:
    """Reports one run.

    Args:
        pipeline: The pipeline that runs.
        on_event: Receives the events.

    Attributes:
        deployment: The current attempt's tasks; None before the first attempt.
        coordinator: The coordinator of all attempts; None before the first attempt.
        announced: The stages whose end was reported.
    """

    def __init__(self, pipeline: Pipeline, on_event: Callable[[JobEvent], None]) -> None:
        self.deployment: Deployment | None = None
        self.coordinator: CheckpointCoordinator | None = None
        self.announced: set[str] = set()
        self._pipeline = pipeline
        self._on_event = on_event
        self._finished: set[TaskId] = set()
        self._reported: set[TaskId] = set()
        """The tasks whose end was reported in this run."""
        self._triggered: set[str] = set()
        """The requests whose checkpoint was triggered: the checkpoint's failure says more than the request's."""
        self._query_starts: QueryStarts | None = None
        self._sink_commits = SinkCommits()

    # For any thread

    def progress(self) -> Mapping[str, StageProgress]:
        """The current progress of each stage; empty before the start."""
        if self.deployment is None or self.coordinator is None:
            return {}
        latest = self.coordinator.latest_completed
        return stage_progress(self.deployment, self._finished, latest.statistics if latest else {})

    def rows(self) -> Mapping[str, int]:
        """The number of rows that each stage has emitted since the job began; empty before the start."""
        deployment = self.deployment
        return {} if deployment is None else StageRows({s.name: stage_rows(deployment, s.name) for s in self._pipeline.stages})

    # An attempt

    def attempt_began(
        self,
        deployment: Deployment,
        coordinator: CheckpointCoordinator,
        attempt: int,
        job_id: int,
        restored: Restored | None,
        seconds: float,
        vertices: Set[str] | None = None,
    ) -> None:
        """An attempt, or a part of it, is about to be started.

        Args:
            deployment: The attempt's tasks.
            coordinator: The coordinator of all attempts.
            attempt: The attempt's number within the run, from 1.
            job_id: The job's id.
            restored: The checkpoint that the attempt starts from; None for a new start.
            seconds: The time that building the attempt took.
            vertices: The chains that start again, while the tasks of the others go on; None for all.
        """
        built = deployment.plan.built
        names, stages = {chain.name for chain in built}, {stage for chain in built for stage in chain.stages}
        self.deployment, self.coordinator = deployment, coordinator
        self._finished = {task for task in self._finished if task.vertex not in names} | set(deployment.finished)
        starting = [t.id for t in deployment.tasks.values() if t.id.vertex in names and not t.parts.finished_before]
        self._query_starts = QueryStarts(deployment.chains, starting, time.monotonic())
        self._sink_commits.attempt_began({stage: rows for stage, rows in committed_rows(deployment).items() if stage in stages})
        fully = tuple(s.name for s in self._pipeline.stages if restored and s.name in restored.plan.fully_finished)
        checkpoint_id = restored.plan.checkpoint_id if restored else None
        self._on_event(
            events.JobStarted(
                attempt=attempt,
                job_id=job_id,
                restored_checkpoint=checkpoint_id,
                restored_location=restored.location if restored else None,
                finished_stages=fully,
                chains=tuple(chain.stages for chain in deployment.chains),
                seconds=seconds,
                columns={
                    stage: tuple((column.name, column.dataType.simpleString()) for column in schema)
                    for stage, schema in deployment.schemas.items()
                },
                restarted=tuple(s.name for s in self._pipeline.stages if s.name in stages) if vertices is not None else (),
            )
        )
        for stage in (name for name in fully if name not in self.announced):
            self.announced.add(stage)
            rows, late = stage_rows(deployment, stage), late_rows(deployment, stage)
            self._on_event(events.StageFinished(stage, rows, checkpoint_id, True, late))

    def start_progressed(self, progress: StartProgress) -> None:
        """Report the progress of a task's start in the current attempt."""
        event = self._query_starts.take(progress, time.monotonic()) if self._query_starts else None
        if event is not None:
            self._on_event(event)

    def task_committed(self, committed: TaskCommitted) -> None:
        """Report what a stage has committed, once all its instances have; of any attempt: the rows are visible."""
        event = self._sink_commits.take(committed)
        if event is not None:
            self._on_event(event)

    def commit_refused(self, refused: TaskCommitRefused) -> None:
        """Report that rows did not pass a blocking check."""
        self._on_event(events.CommitRefused(refused.stage, refused.checks))

    def task_finished(self, task: TaskId) -> None:
        """Report that a task of the current attempt has finished."""
        deployment = self.deployment
        assert deployment is not None
        self._finished.add(task)
        if deployment.tasks[task].suspended:
            return  # its data has not ended: it continues when the job is resumed
        chain = next(c for c in deployment.chains if c.name == task.vertex)
        if task not in self._reported:  # a task restored after its finish ends a second time
            self._reported.add(task)
            for stage in (name for name in chain.stages if name not in self.announced):
                rows = deployment.tasks[task].rows_of(stage)
                self._on_event(events.InstanceFinished(stage, chain.instances[task.index], rows))
        tasks = [TaskId(chain.name, index) for index in range(len(chain.instances))]
        suspended = any(i in deployment.tasks and deployment.tasks[i].suspended for i in tasks)
        if all(i in self._finished for i in tasks) and not suspended:
            latest = self.coordinator.latest_completed if self.coordinator is not None else None
            self._announce(chain.stages, latest.checkpoint_id if latest else None)

    def _announce(self, stages: Iterable[str], checkpoint_id: int | None) -> None:
        """Report that stages have finished, once in a run; the checkpoint is the one with which they have."""
        assert self.deployment is not None
        for stage in (name for name in stages if name not in self.announced):
            self.announced.add(stage)
            rows, late = stage_rows(self.deployment, stage), late_rows(self.deployment, stage)
            self._on_event(events.StageFinished(stage, rows, checkpoint_id, late_rows=late))

    def _fused_sources_ended(self, completed: CompletedCheckpoint) -> None:
        """Report the fused sources whose stages have finished with this checkpoint, while their tasks run on."""
        assert self.deployment is not None
        for task, statistics in completed.statistics.items():
            chain = next(c for c in self.deployment.chains if c.name == task.vertex)
            ended = [name for name in statistics.ended_sources if name not in self.announced]
            for stage in ended:
                rows = self.deployment.tasks[task].rows_of(stage)
                self._on_event(events.InstanceFinished(stage, chain.instances[task.index], rows))
            self._announce(ended, completed.checkpoint_id)

    # Checkpoints

    def report_checkpoint(self, action: CheckpointReport, request: ControlRequest | None, *, of_burst: bool = False) -> None:
        """Report the coordinator's action on a checkpoint, or on a request for a checkpoint.

        Args:
            action: The coordinator's action.
            request: The request of a completed savepoint, if the request is open.
            of_burst: Whether the job itself has asked for the savepoint, because its sources have read what was there.
        """
        match action:
            case CheckpointTriggered(_, _, request_id):
                if request_id is not None:
                    self._triggered.add(request_id)
            case CheckpointCompleted(completed):
                self._on_event(self._completed(completed, request, of_burst))
                if completed.properties.commits:
                    self._fused_sources_ended(completed)
            case CheckpointFailed(checkpoint_id, reason, message):
                self._on_event(events.CheckpointNotDone(checkpoint_id, reason.name, message))
            case RequestCompleted(request_id):
                self._triggered.discard(request_id)
            case RequestNotCompleted(request_id, reason, message):
                if reason.pre_flight and request_id not in self._triggered:  # else its checkpoint's failure was reported
                    self._on_event(events.CheckpointNotDone(None, reason.name, message))
                self._triggered.discard(request_id)

    def _completed(self, completed: CompletedCheckpoint, request: ControlRequest | None, of_burst: bool) -> JobEvent:
        assert self.deployment is not None and self.coordinator is not None
        counts = self.coordinator.statistics.counts
        if completed.is_savepoint:
            return savepoint_done(self.deployment, completed, counts, request, of_burst=of_burst)
        return checkpoint_done(self.deployment, completed, counts)
