"""The tasks of one attempt, and what else is known of it. It must not know how tasks are built: `deployer` does that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pyspark.sql.types import StructType

from dagster_checkpoints.execution.attempt_plan import AttemptPlan
from dagster_checkpoints.execution.splits import SplitCounts
from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.spark.job.task_sinks import SettledSink
from dagster_checkpoints.spark.tasks.task import Task

Number = TypeVar("Number", int, int | None)


@dataclass
class Deployment:
    """The tasks of one attempt, not yet started.

    Attributes:
        plan: The plan of the attempt; after a part of it has restarted, that of the part.
        tasks: The tasks that are not finished.
        finished: The tasks that had finished at the restored checkpoint; they have no task object.
        schemas: The output schema of each chain's last stage.
        rows_of_finished: The number of rows that finished tasks had emitted, by stage, None if it is not known; for reports.
        late_rows_of_finished: The number of late rows that finished tasks had dropped, by stage; for reports.
        begin_at_end: The tasks with a source that begins at its present end, which no checkpoint holds.
        settled: The sinks of the instances that do not run, see `AttemptPlan.settled`.
        split_counts: Gives the progress of each split source.
    """

    plan: AttemptPlan
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    finished: frozenset[TaskId] = frozenset()
    schemas: dict[str, StructType] = field(default_factory=dict)
    rows_of_finished: dict[str, int | None] = field(default_factory=dict)
    late_rows_of_finished: dict[str, int] = field(default_factory=dict)
    begin_at_end: set[TaskId] = field(default_factory=set)
    settled: list[SettledSink] = field(default_factory=list)
    split_counts: Callable[[], Mapping[str, SplitCounts]] = dict

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chains, producers before consumers."""
        return self.plan.chains

    def with_restarted(self, part: Deployment, vertices: Set[str]) -> Deployment:
        """This deployment after a part of it was built again.

        Args:
            part: The deployment of that part.
            vertices: Its chains.
        """
        stages = {stage for chain in part.chains if chain.name in vertices for stage in chain.stages}
        kept = {task: made for task, made in self.tasks.items() if task.vertex not in vertices}
        finished = [t for t in self.finished if t.vertex not in vertices] + [t for t in part.finished if t.vertex in vertices]
        return replace(
            self,
            plan=part.plan,
            tasks=kept | part.tasks,
            finished=frozenset(finished),
            schemas=self.schemas | part.schemas,
            rows_of_finished=_replaced(self.rows_of_finished, part.rows_of_finished, stages),
            late_rows_of_finished=_replaced(self.late_rows_of_finished, part.late_rows_of_finished, stages),
            begin_at_end=part.begin_at_end,
            settled=part.settled,
        )

    def settle_sinks(self) -> None:
        """Make the sinks of instances that do not run show exactly the rows of the restored checkpoint.

        Raises:
            SinkError: Rows that are needed again have been deleted.
        """
        for each in self.settled:
            each.sink.settle(each.transactions, each.files, self.plan.take_back_after, self.plan.next_checkpoint_id)


def _replaced(before: Mapping[str, Number], part: Mapping[str, Number], stages: Set[str]) -> dict[str, Number]:
    """The numbers before, except for these stages, which have those of the part."""
    return {s: n for s, n in before.items() if s not in stages} | {s: n for s, n in part.items() if s in stages}


def has_caught_up(task: Task, stage: str, splits: SplitCounts | None) -> bool | None:
    """Whether a task has read all input of a stage that was there when it last looked, or has ended; None if it cannot know.

    Args:
        task: The task.
        stage: A stage of its chain.
        splits: The progress of the stage, if it is a split source.
    """
    if stage in task.machine.ended_sources:
        return True
    return splits.read_all if splits is not None and task.machine.running else task.caught_up(stage)
