"""Places the state of Spark's queries in the directories of their tasks, in the cheapest way.

With the same instances files are fetched as they are. With others, whole partitions are fetched under other numbers where key
groups are state partitions; otherwise rows are written again, as for another number of state partitions. It must not know tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.spark.files.work_path import WorkFolder
from dagster_checkpoints.spark.query.routed_keys import RoutedKey
from dagster_checkpoints.spark.snapshots.moved_partitions import MovedPartitions
from dagster_checkpoints.spark.snapshots.moved_state import MovedState, check_movable, move_state
from dagster_checkpoints.spark.snapshots.restored_state import RestoredState
from dagster_checkpoints.spark.snapshots.rewritten_state import repartition_state
from dagster_checkpoints.state.metadata import QuerySnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class RescaledState:
    """The state of the queries of one attempt, which may have other instances, or another number of state partitions.

    Args:
        spark: The session in which the tasks run.
        state: The state of the checkpoint that the attempt starts from.
        attempt: The attempt's directory.
        log: Is told of state that is written again in another number of partitions.
    """

    def __init__(self, spark: SparkSession, state: RestoredState, attempt: WorkFolder, log: logging.Logger) -> None:
        self._log = log
        self._spark = spark
        self._state = state
        self._attempt = attempt
        self._whole: dict[str, list[MovedPartitions | None] | None] = {}
        self._written: dict[str, MovedState] = {}

    def check(self, chain: Chain) -> None:
        """Check, without any file of its state, that the instances of a chain can get state of other ones.

        Raises:
            InstancesChanged: They cannot.
        """
        shared = any(self._state.share(TaskId(chain.name, index)) for index in range(len(chain.instances)))
        if self._state.whole_partitions(chain) is None and shared:
            check_movable(self._spark, self._state.where(chain))

    def place_own(
        self, chain: Chain, task: TaskId, query: QuerySnapshot, folder: WorkFolder, forgotten: Sequence[int], streams: int
    ) -> None:
        """Make the checkpoint directory of an instance that continues its own query.

        Args:
            chain: The chain.
            task: Its instance.
            query: The query.
            folder: The task's directory.
            forgotten: The positions of the streams whose offsets it forgets, see `restored_plans.forgotten_sources`.
            streams: The number of streams of its plan.

        Raises:
            StatePartitionsChanged: It is to get another number of state partitions, and its state cannot be written again.
        """
        before = self._attempt / "repartitioned" / chain.name / str(task.index)
        repartition = self._state.fetch_repartition(chain, query, before, folder, forgotten, streams)
        if repartition is None:
            self._state.fetch_query(query, folder, forgotten, streams)
            return
        old, new = repartition
        where = self._state.where(chain)
        self._log.info("%s: writing the state in %d partitions instead of %d.", where, new.partitions, old.partitions)
        repartition_state(self._spark, where, old, new)
        before.remove()

    def place(self, chain: Chain, task: TaskId, key: RoutedKey, folder: WorkFolder, streams: int) -> QuerySnapshot:
        """Make the checkpoint directory of an instance that gets state of other instances. Returns the query that it continues.

        Args:
            chain: The chain.
            task: Its instance.
            key: The column by which rows are routed.
            folder: The task's directory.
            streams: The number of streams of its plan.

        Raises:
            InstancesChanged: The state cannot be moved.
        """
        if chain.name not in self._whole:
            self._whole[chain.name] = self._state.whole_partitions(chain)
        whole = self._whole[chain.name]
        moved = None if whole is None else whole[task.index]
        if moved is not None:
            self._state.fetch_partitions(self._spark, moved, folder, streams)
            return moved.query
        if chain.name not in self._written:
            self._written[chain.name] = move_state(self._spark, self._state.fetch_move(chain, key, self._attempt, streams))
        return self._state.place_moved(task, self._written[chain.name], folder, streams)
