"""Moves Spark's keyed state to other instances of a stage: each gets the keys of its key groups, from all old instances.

State is written again by `rewritten_state`. It reads the checkpoint directories of all old instances, and places each row in one
of as many partitions as all new instances have together, so each store is read and written once, in one Spark job, whatever the
number of instances; then the partitions are moved to their instances by name. RocksDB only. It must not know the job, nor how
checkpoints are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from dagster_checkpoints.spark.channels.segments import key_group, owner_of_group
from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, rename
from dagster_checkpoints.spark.identifiers import identifier
from dagster_checkpoints.spark.query.routed_keys import RoutedKey
from dagster_checkpoints.spark.snapshots.rewritten_state import (
    DESCRIPTION,
    JOIN,
    PARTITION_KEY,
    StateOfBatch,
    StateRows,
    operator_name,
    rewrite_state,
    why_not_rewritten,
)
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.fitted_checkpoint import KeyedStateShare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PLACE = "__dagster_checkpoints_partition__"
_MISROUTED = "dagster_checkpoints: a key is held by an instance that does not own it"


@dataclass(frozen=True, slots=True)
class StateMove:
    """The move of the keyed state of a rescaled stage's instances.

    Attributes:
        where: The stage and the checkpoint, for the text of errors.
        shares: The parts of the new instances that have one.
        instances: The number of all new instances.
        key: The column by which rows are routed.
        old: By old instance, its state.
        target: The query that all new instances continue: a directory for the state of all of them, with its logs and
            descriptions, and without its state. The logs name the number of state partitions that an instance has now.
    """

    where: str
    shares: Sequence[KeyedStateShare]
    instances: int
    key: RoutedKey
    old: Mapping[int, StateOfBatch]
    target: StateOfBatch


def move_state(spark: SparkSession, move: StateMove) -> MovedState:
    """Write the state of all new instances, each row once.

    Raises:
        InstancesChanged: The state cannot be written again, or does not belong to the key by which rows are routed.
    """
    check_movable(spark, move.where, move.target)
    partitions = move.target.partitions
    try:
        rewrite_state(spark, _Rows(spark, move, partitions), move.target)
    except Exception as error:
        if _MISROUTED in str(error):
            raise InstancesChanged(
                f"{move.where}: expected each key in the state at the instance that owns the key group of "
                f"{move.shares[0].key!r}, found others: the stage computes its keys, a processor that reads pandas DataFrames "
                "has met a null key among numbers, another release has routed its rows, or an earlier release has given the "
                "initial state of a processor to each instance. Give the stage the same instances; "
                "or end the old pipeline with a drain, and begin with other instances as a new start (restore_from: none)."
            ) from error
        raise
    return MovedState(move.target.checkpoint, partitions)


def check_movable(spark: SparkSession, where: str, state: StateOfBatch | None = None) -> None:
    """Check that state can be moved row by row.

    Args:
        spark: The session.
        where: The stage and the checkpoint, for the text of errors.
        state: The state; None to check the version of Spark alone.

    Raises:
        InstancesChanged: It cannot.
    """
    problem = why_not_rewritten(spark, state)
    if problem:
        raise InstancesChanged(
            f"{where}: {problem}. The state cannot move to other instances: give the stage the same ones, or start the pipeline "
            "without this checkpoint (restore_from: none)."
        )


@dataclass(frozen=True, slots=True)
class MovedState:
    """The written state of all new instances: those of an instance are `partitions` state partitions in a row.

    Attributes:
        folder: The directory.
        partitions: The number of state partitions of each instance.
    """

    folder: WorkPath
    partitions: int

    def take(self, index: int, target: WorkPath) -> None:
        """Move the state of an instance into its query's checkpoint directory, which holds logs and descriptions."""
        for operator in entries_of(self.folder / "state"):
            for number in range(self.partitions):
                source = operator / str(index * self.partitions + number)
                _move(source, target / "state" / operator.name / str(number))


def _move(source: WorkPath, target: WorkPath) -> None:
    """Move the stores of a state partition; their descriptions are in the target already."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in entries_of(source):
        if entry.name == DESCRIPTION:
            continue
        if entry.name in (found.name for found in entries_of(target)):
            _move(entry, target / entry.name)
        else:
            rename(entry, target / entry.name)


class _Rows(StateRows):
    """The rows of all new instances, each in its partition.

    State partition n of an old instance has the rows of partition n of the new ones: Spark divides the rows of each instance by
    the same hash of the same key. If the number of partitions changes, Spark divides them again first. Where key groups are state
    partitions, the number of a row's group is that of its partition.
    """

    def __init__(self, spark: SparkSession, move: StateMove, partitions: int) -> None:
        super().__init__(spark, partitions)
        self._move = move

    def of_store(self, store: Mapping[str, str]) -> DataFrame:
        frames = [self._held(index, old, store) for index, old in sorted(self._move.old.items())]
        rows = functools.reduce(DataFrame.unionByName, frames)
        placed = rows.repartitionById(self.partitions * self._move.instances, F.col(_PLACE))
        return placed.drop(_PLACE)

    def _held(self, index: int, old: StateOfBatch, store: Mapping[str, str]) -> DataFrame:
        """The rows of an old instance, with the number of the partition that gets them."""
        move, share = self._move, self._move.shares[0]
        rows = self.read(old, store)
        key = self._key_column(rows.schema[PARTITION_KEY].dataType, store["operatorId"])
        group, held = key_group(F.col(f"{PARTITION_KEY}.{identifier(key)}"), share.number), share.held[index]
        if share.whole_partitions:
            place = group
        else:
            rows = self.repartitioned(rows, old)  # each part of the union has as many partitions as an instance
            owner = owner_of_group(group, move.instances, share.number)
            place = owner * F.lit(self.partitions) + F.pmod(F.spark_partition_id(), F.lit(self.partitions))
        misrouted = F.raise_error(F.lit(_MISROUTED)).cast("int")
        return rows.withColumn(_PLACE, F.when(group.between(held.start, held.stop - 1), place).otherwise(misrouted))

    def _key_column(self, found: DataType, operator: str) -> str:
        """The name of the column by which rows are routed in the key of an operator's state."""
        key = self._move.key
        is_join = operator_name(self._move.target.checkpoint, operator) == JOIN
        wanted = key.in_joins if is_join else key.column
        fields = found.fields if isinstance(found, StructType) else []
        if wanted is None or not any(field.name == wanted and field.dataType == key.type for field in fields):
            raise InstancesChanged(
                f"{self._move.where}: expected state whose key holds the column {key.column!r} of type "
                f"{key.type.simpleString()}, by which rows are routed, found {found.simpleString()} (operator {operator} of the "
                "query). Give the stage the same instances, or start the pipeline without this checkpoint (restore_from: none)."
            )
        return wanted
