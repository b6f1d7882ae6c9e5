"""The figures that a job reports: rows per stage, and a checkpoint with the progress of each stage.

The commits of tasks become commits of stages: all instances of a stage in one checkpoint are one commit. For display only: it
must not change anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dagster_checkpoints.control.requests import ControlRequest
from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint, TaskStatistics
from dagster_checkpoints.coordination.statistics import CheckpointCounts
from dagster_checkpoints.pipeline import Chain, TaskId, total_rows
from dagster_checkpoints.sinks import SinkCommit, merged
from dagster_checkpoints.spark.job.deployment import Deployment
from dagster_checkpoints.spark.job.events import CheckpointDone, SavepointDone, SinkCommitted, StageProgress
from dagster_checkpoints.spark.tasks.messages import TaskCommitted

FINISHED = ""
"""The name under which the rows of all instances that had finished before an attempt are counted."""


@dataclass(slots=True)
class _Stage:
    """A stage with a sink.

    Attributes:
        rows: The number of rows that each instance has committed since the job began.
        reported: The newest checkpoint that each running instance has committed; 0 before the first.
        pending: The commits of instances that are not yet part of a commit of the stage, oldest first.
        restored: Whether rows were restored, and no commit of the stage was reported since.
    """

    rows: dict[str, int] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    pending: list[TaskCommitted] = field(default_factory=list)
    restored: bool = False


class SinkCommits:
    """Collects the commits of one run, over all its attempts."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stage] = {}

    def attempt_began(self, rows: Mapping[str, Mapping[str, int]]) -> None:
        """An attempt begins. A commit of the last attempt that is still pending joins the next commit of its stage.

        Args:
            rows: By stage with a sink and by running instance, the number of rows that were committed since the job began; with
                those of all finished instances as :data:`FINISHED`.
        """
        for name, of_instances in rows.items():
            stage = self._stages.setdefault(name, _Stage())
            stage.rows = dict(of_instances)
            stage.reported = {instance: 0 for instance in of_instances if instance != FINISHED}
            stage.restored = sum(of_instances.values()) > 0

    def take(self, committed: TaskCommitted) -> SinkCommitted | None:
        """The commit of a stage: once all its running instances have committed a checkpoint; None before that.

        None also if there was nothing to commit, unless it is the first commit after a restore.

        Args:
            committed: The commit of an instance.
        """
        stage = self._stages.setdefault(committed.stage, _Stage())
        stage.pending.append(committed)
        if committed.instance in stage.reported:
            stage.reported[committed.instance] = committed.checkpoint_id
            if committed.last:
                del stage.reported[committed.instance]
        newest = max(one.checkpoint_id for one in stage.pending)
        by_all = min(stage.reported.values(), default=newest)
        complete = [one for one in stage.pending if one.checkpoint_id <= by_all]
        stage.pending = [one for one in stage.pending if one.checkpoint_id > by_all]
        for one in complete:
            if one.instance in stage.rows:  # else the instance had finished before the attempt, and is counted
                stage.rows[one.instance] = max(one.rows, stage.rows[one.instance])
        commits = [one.commit for one in complete if one.commit is not None]
        commit = merged(commits) if commits else None
        if commit is not None and not _has_content(commit):
            commit = None
        if not complete or (commit is None and not stage.restored):
            return None
        stage.restored = False
        checkpoint_id = max(one.checkpoint_id for one in complete)
        watermarks = [one.watermark_ms for one in complete if one.checkpoint_id == checkpoint_id]
        known = [watermark for watermark in watermarks if watermark is not None]
        return SinkCommitted(
            stage=committed.stage,
            checkpoint_id=checkpoint_id,
            commit=commit,
            rows=sum(stage.rows.values()),
            watermark_ms=min(known) if known and len(known) == len(watermarks) else None,
            last=not stage.reported,
            checks=tuple(evaluation for one in complete for evaluation in one.checked.checks),
            sample=next((one.checked.sample for one in reversed(complete) if one.checked.sample), ()),
        )


def _has_content(commit: SinkCommit) -> bool:
    return commit.rows is None or commit.rows > 0 or bool(commit.files)


def stage_rows(deployment: Deployment, stage: str) -> int | None:
    """The number of rows that a stage has emitted since the job began, over all runs; None if it is not known."""
    chain = next(c for c in deployment.chains if stage in c.stages)
    tasks = (deployment.tasks.get(task) for task in _tasks(chain))
    return total_rows([deployment.rows_of_finished.get(stage, 0), *(task.rows_of(stage) for task in tasks if task is not None)])


def committed_rows(deployment: Deployment) -> dict[str, dict[str, int]]:
    """The rows that were committed when an attempt begins, by stage with a sink; see `SinkCommits.attempt_began`."""
    rows: dict[str, dict[str, int]] = {}
    for chain in deployment.chains:
        running = {TaskId(chain.name, i): name for i, name in enumerate(chain.instances)}
        tasks = {name: deployment.tasks[task] for task, name in running.items() if task in deployment.tasks}
        if any(task.parts.sink is not None for task in tasks.values()):
            finished = {FINISHED: deployment.rows_of_finished.get(chain.stages[-1]) or 0}
            rows[chain.stages[-1]] = finished | {name: task.rows_before for name, task in tasks.items()}
    return rows


def late_rows(deployment: Deployment, stage: str) -> int:
    """The number of late rows that a stage has dropped since the job began, over all runs."""
    chain = next(c for c in deployment.chains if stage in c.stages)
    tasks = (deployment.tasks.get(task) for task in _tasks(chain))
    return deployment.late_rows_of_finished.get(stage, 0) + sum(t.late_rows.of(stage) for t in tasks if t is not None)


def stage_progress(
    deployment: Deployment, finished: Collection[TaskId], statistics: Mapping[TaskId, TaskStatistics]
) -> Mapping[str, StageProgress]:
    """The progress of each stage.

    Args:
        deployment: The tasks of the current attempt.
        finished: The tasks that have finished.
        statistics: The statistics of the latest checkpoint, by task; empty before the first.
    """
    progress, splits = {}, deployment.split_counts()
    for chain in deployment.chains:
        ids = _tasks(chain)
        watermarks = [deployment.tasks[i].output_watermark for i in ids if i in deployment.tasks]
        known = [w for w in watermarks if w is not None]
        for stage in chain.stages:
            progress[stage] = StageProgress(
                rows=stage_rows(deployment, stage),
                late_rows=late_rows(deployment, stage),
                finished_instances=sum(i in finished or (i in statistics and stage in statistics[i].ended_sources) for i in ids),
                instances=len(ids),
                state_bytes=sum(statistics[i].total_bytes for i in ids if i in statistics),
                watermark_ms=min(known) if known and len(known) == len(watermarks) else None,
                splits=splits.get(stage),
            )
    return progress


def checkpoint_done(deployment: Deployment, completed: CompletedCheckpoint, counts: CheckpointCounts) -> CheckpointDone:
    """The event of a completed checkpoint.

    Args:
        deployment: The tasks of the current attempt.
        completed: The checkpoint.
        counts: The numbers of the run's checkpoints, this one included.
    """
    measured = TaskStatistics.of_all(completed.statistics.values())
    return CheckpointDone(
        checkpoint_id=completed.checkpoint_id,
        location=completed.location,
        roots=completed.roots,
        finished_stages=tuple(sorted(completed.fully_finished)),
        duration=completed.duration,
        sync_seconds=measured.sync_seconds,
        async_seconds=measured.async_seconds,
        alignment_seconds=measured.alignment_seconds,
        new_bytes=measured.new_bytes,
        total_bytes=measured.total_bytes,
        stages=stage_progress(deployment, completed.finished, completed.statistics),
        completed=counts.completed,
        failed=counts.failed,
    )


def savepoint_done(
    deployment: Deployment,
    completed: CompletedCheckpoint,
    counts: CheckpointCounts,
    request: ControlRequest | None,
    *,
    of_burst: bool,
) -> SavepointDone:
    """The event of a completed savepoint; see :func:`checkpoint_done`.

    Args:
        deployment: The tasks of the current attempt.
        completed: The savepoint.
        counts: The numbers of the run's checkpoints, this one included.
        request: The request for the savepoint, if it is open.
        of_burst: Whether the job itself has asked for it.
    """
    stops: Literal["", "suspend", "drain"] = ""
    if completed.properties.stops_job:
        stops = "drain" if request is not None and request.drain else "suspend"
    return SavepointDone(
        location=completed.location,
        stops=stops,
        request_id=completed.properties.request_id,
        asked_by=request.asked_by if request else "",
        recorded_by_asker=request.recorded_by_asker if request else False,
        of_burst=of_burst,
        checkpoint=checkpoint_done(deployment, completed, counts),
    )


def _tasks(chain: Chain) -> list[TaskId]:
    return [TaskId(chain.name, index) for index in range(len(chain.instances))]
