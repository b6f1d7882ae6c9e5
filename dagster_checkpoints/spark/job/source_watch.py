"""Looks at the sources of all running tasks every few seconds, and reports those that do not answer.

For the thread of the job's loop: a task's own thread may be the one that waits. `execution.source_answers` has the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagster_checkpoints.execution.job_requests import SourceInstance
from dagster_checkpoints.execution.source_answers import Silence, SourceAnswers
from dagster_checkpoints.pipeline import Chain, Pipeline, StageKind, TaskId
from dagster_checkpoints.spark.job.deployment import Deployment, has_caught_up
from dagster_checkpoints.spark.job.events import SourceAnswered, SourceEvent, SourceSilent

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
