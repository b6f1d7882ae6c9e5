"""Turns the commits of tasks into commits of stages: all instances of a stage in one checkpoint are one commit.

For display only. It must not know threads, nor how a sink commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_checkpoints.sinks import SinkCommit, merged
from dagster_checkpoints.spark.job.events import SinkCommitted
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
