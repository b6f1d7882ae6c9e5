"""The tasks of one attempt, and what else is known of it. It must not know how tasks are built: `deployer` does that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pyspark.sql.types import StructType

from dagster_checkpoints.execution.split_enumerators import SplitCounts
from dagster_checkpoints.pipeline import Chain, ExecutionGraph, TaskId
from dagster_checkpoints.spark.job.task_sinks import SettledSink
from dagster_checkpoints.spark.tasks.task import Task

Number = TypeVar("Number", int, int | None)


@dataclass
class Deployment:
    """The tasks of one attempt, not yet started.

    Attributes:
        graph: The execution graph of the attempt.
        chains: The chains, producers before consumers.
        tasks: The tasks that are not finished.
        finished: The tasks that had finished at the restored checkpoint; they have no task object.
        schemas: The output schema of each chain's last stage.
        rows_of_finished: The number of rows that finished tasks had emitted, by stage, None if it is not known; for reports.
        late_rows_of_finished: The number of late rows that finished tasks had dropped, by stage; for reports.
        finished_sinks: The sinks of finished tasks and of instances that the pipeline does not have any more: they show the rows
            committed up to the restored checkpoint, and no others.
        key_groups: By stage whose rows are routed by key, its number of key groups.
        most_instances: By stage that has had more instances than it has now, their largest number.
        split_counts: Gives the progress of each split source.
    """

    graph: ExecutionGraph
    chains: tuple[Chain, ...]
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    finished: frozenset[TaskId] = frozenset()
    schemas: dict[str, StructType] = field(default_factory=dict)
    rows_of_finished: dict[str, int | None] = field(default_factory=dict)
    late_rows_of_finished: dict[str, int] = field(default_factory=dict)
    finished_sinks: list[SettledSink] = field(default_factory=list)
    key_groups: dict[str, int] = field(default_factory=dict)
    most_instances: dict[str, int] = field(default_factory=dict)
    split_counts: Callable[[], Mapping[str, SplitCounts]] = dict

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
            graph=part.graph,
            chains=part.chains,
            tasks=kept | part.tasks,
            finished=frozenset(finished),
            schemas=self.schemas | part.schemas,
            rows_of_finished=_replaced(self.rows_of_finished, part.rows_of_finished, stages),
            late_rows_of_finished=_replaced(self.late_rows_of_finished, part.late_rows_of_finished, stages),
            finished_sinks=part.finished_sinks,
        )

    def settle_finished_sinks(self) -> None:
        """Make the sinks of finished tasks show exactly the rows of the restored checkpoint, which may be older than the newest.

        Raises:
            SinkError: Rows that are needed again have been deleted.
        """
        for settled in self.finished_sinks:
            settled.sink.settle(settled.transactions, settled.files, settled.restored, settled.next_checkpoint_id)


def _replaced(before: Mapping[str, Number], part: Mapping[str, Number], stages: Set[str]) -> dict[str, Number]:
    """The numbers before, except for these stages, which have those of the part."""
    return {s: n for s, n in before.items() if s not in stages} | {s: n for s, n in part.items() if s in stages}
