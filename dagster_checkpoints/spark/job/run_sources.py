"""The sources of a running job: where those begin that begin at their present end, and which of them do not answer.

A source such as a topic's latest message begins where it is when its query has had its first batch, and a checkpoint holds that
from then on. A restart before that checkpoint begins at what is the end then, and what came in between would not be read. So the
run asks itself for a checkpoint.

All running tasks are looked at every few seconds; `execution.source_answers` has the rule. For the thread of the job's loop: a
task's own thread may be the one that waits.

Source: Spark's `MicroBatchExecution`, which writes the offsets of a query's first batch before it runs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Set
from datetime import UTC, datetime

from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.execution.job_requests import SourceInstance
from dagster_checkpoints.execution.source_answers import Silence, SourceAnswers
from dagster_checkpoints.pipeline import Chain, Pipeline, StageKind, TaskId
from dagster_checkpoints.spark.job.deployment import Deployment, has_caught_up
from dagster_checkpoints.spark.job.events import SourceAnswered, SourceEvent, SourceSilent
from dagster_checkpoints.spark.job.runtime import QueuedRequest
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskFirstBatch


class SourcePositions:
    """Asks for a checkpoint when the sources of an attempt have begun that begin at their present end.

    Args:
        epoch: Fencing epoch of the run.
        deadline_seconds: The time that a checkpoint may take.
        log: Receives a warning if it fails.
    """

    def __init__(self, epoch: int, deadline_seconds: float, log: logging.Logger) -> None:
        self._epoch = epoch
        self._deadline_seconds = deadline_seconds
        self._log = log
        self._waits_for: frozenset[TaskId] = frozenset()
        self._asked = 0

    def deployed(self, unrecorded: Set[TaskId], vertices: Set[str] | None) -> None:
        """The tasks of an attempt are built.

        Args:
            unrecorded: The tasks of these vertices whose sources begin at an end that no checkpoint holds.
            vertices: The vertices that restart; None for all.
        """
        others = () if vertices is None else (task for task in self._waits_for if task.vertex not in vertices)
        self._waits_for = frozenset([*others, *unrecorded])

    def began(self, progress: StartProgress) -> QueuedRequest | None:
        """The request for a checkpoint, if this was the last of the first batches that it waits for."""
        if not isinstance(progress, TaskFirstBatch) or progress.task not in self._waits_for:
            return None
        self._waits_for -= {progress.task}
        if self._waits_for:
            return None
        self._asked += 1
        request = ControlRequest(
            request_id=f"sources-began-e{self._epoch}-{self._asked}",
            kind="checkpoint",
            epoch=self._epoch,
            deadline_seconds=self._deadline_seconds,
            asked_by="the run, for where its sources begin",
            asked_at=datetime.now(UTC),
        )
        return QueuedRequest(request, self._answered, time.monotonic())

    def _answered(self, answer: Answer) -> None:
        if answer.status == "failed":
            self._log.warning(
                "The checkpoint that records where sources began at their latest row has failed: %s. After a failure before the "
                "next checkpoint they begin at what is the latest then, and what came in between is not read. To be independent "
                "of that, let them begin at a named offset or at the earliest.",
                answer.message,
            )


LOOK_SECONDS = 2.0
"""Seconds between two looks."""


class SourceWatch:
    """The watch over one run's sources.

    Args:
        pipeline: The pipeline that runs.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._due = 0.0
        self._watched: dict[TaskId, tuple[object, SourceAnswers]] = {}
        """By task that reads sources, the attempt's task, and what is known of its sources."""

    @property
    def silences(self) -> Mapping[TaskId, Silence]:
        """The sources that were silent at the last look, by task."""
        return {task: answers.silence for task, (_, answers) in self._watched.items() if answers.silence is not None}

    def look(self, deployment: Deployment, now: float) -> Iterator[SourceEvent]:
        """Look at all tasks if a look is due, and yield what is to be reported.

        Args:
            deployment: The tasks of the current attempt.
            now: Monotonic seconds.
        """
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        for chain in deployment.chains:
            sources = self.sources(chain)
            for index, instance in enumerate(chain.instances) if sources else ():
                task = deployment.tasks.get(TaskId(chain.name, index))
                if task is None:
                    continue
                known = self._watched.get(task.id)
                if known is None or known[0] is not task:
                    known = self._watched[task.id] = (task, SourceAnswers(now, local=task.reads_locally))
                answers = known[1]
                if answers.look(task.look_at_sources(), now):
                    silence = answers.silence
                    yield SourceSilent(sources, instance, silence) if silence else SourceAnswered(sources, instance)

    def forget(self) -> None:
        """No task runs: none of their sources is silent."""
        self._watched.clear()

    def behind(self, deployment: Deployment) -> Iterator[str]:
        """The instances of unbounded sources that may have more to read.

        Args:
            deployment: The tasks of the current attempt.
        """
        splits = deployment.split_counts()
        for chain in deployment.chains:
            for stage in map(self._pipeline.stage, self.sources(chain)):
                for index, instance in enumerate(chain.instances if stage.kind is StageKind.UNBOUNDED_SOURCE else ()):
                    task = deployment.tasks.get(TaskId(chain.name, index))
                    if task is not None and not has_caught_up(task, stage.name, splits.get(stage.name)):
                        yield str(SourceInstance(stage.name, instance, task.id))

    def sources(self, chain: Chain) -> tuple[str, ...]:
        """The sources of a chain."""
        return tuple(name for name in chain.stages if self._pipeline.stage(name).kind.is_source)
