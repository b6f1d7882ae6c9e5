"""Places the keyed state of the instances of rescaled stages in the directories of their tasks, in the cheapest way.

Where key groups are state partitions, whole partitions are fetched under other numbers; otherwise rows are written again. It must
not know tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.spark.files.work_folder import WorkFolder
from dagster_checkpoints.spark.query.routed_keys import RoutedKey
from dagster_checkpoints.spark.snapshots.moved_partitions import MovedPartitions
from dagster_checkpoints.spark.snapshots.moved_state import MovedState, move_state
from dagster_checkpoints.spark.snapshots.restored_state import RestoredState
from dagster_checkpoints.state import QuerySnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class RescaledState:
    """The keyed state of the rescaled chains of one attempt.

    Args:
        spark: The session in which the tasks run.
        state: The state of the checkpoint that the attempt starts from.
        attempt: The attempt's directory.
    """

    def __init__(self, spark: SparkSession, state: RestoredState, attempt: WorkFolder) -> None:
        self._spark = spark
        self._state = state
        self._attempt = attempt
        self._whole: dict[str, list[MovedPartitions | None] | None] = {}
        self._written: dict[str, MovedState] = {}

    def place(self, chain: Chain, task: TaskId, key: RoutedKey, folder: WorkFolder) -> QuerySnapshot:
        """Make the checkpoint directory of an instance that gets state of other instances. Returns the query that it continues.

        Args:
            chain: The chain.
            task: Its instance.
            key: The column by which rows are routed.
            folder: The task's directory.

        Raises:
            InstancesChanged: The state cannot be moved.
        """
        if chain.name not in self._whole:
            self._whole[chain.name] = self._state.whole_partitions(chain)
        whole = self._whole[chain.name]
        moved = None if whole is None else whole[task.index]
        if moved is not None:
            self._state.fetch_partitions(self._spark, moved, folder)
            return moved.query
        if chain.name not in self._written:
            self._written[chain.name] = move_state(self._spark, self._state.fetch_move(chain, key, self._attempt))
        return self._state.place_moved(task, self._written[chain.name], folder)
