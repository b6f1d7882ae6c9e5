"""Moves Spark's keyed state to other instances of a stage: each gets the keys of its key groups, from all old instances.

Spark's own rewriting of state does it, with which Spark repartitions state: it reads all column families of a store, lets a
function change the rows, and writes them as a whole version. The function here reads the checkpoint directories of all old
instances instead of one. It places each row in one of as many partitions as all new instances have together, so each store is
read and written once, in one Spark job, whatever the number of instances; then the partitions are moved to their instances by
name. RocksDB only. It must not know the job, nor how checkpoints are stored.

Source: Spark's `StateRewriter`, `OfflineStateRepartitionRunner` and `StateSourceOptions`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from dagster_checkpoints.spark.channels.segments import key_group, owner_of_group
from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, rename, url
from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS, JavaObject, kept
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS, QueryLog
from dagster_checkpoints.spark.query.routed_keys import RoutedKey
from dagster_checkpoints.spark.session.spark_session import ROCKSDB
from dagster_checkpoints.state import InstancesChanged, KeyedStateShare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ALL_COLUMN_FAMILIES = "_readAllColumnFamilies"
_KEY = "partition_key"
_JOIN = "symmetricHashJoin"
_DESCRIPTION = "_metadata"
_PLACE = "__dagster_checkpoints_partition__"
_MISROUTED = "dagster_checkpoints: a key is held by an instance that does not own it"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"


@dataclass(frozen=True, slots=True)
class StateMove:
    """The move of the keyed state of a rescaled stage's instances.

    Attributes:
        where: The stage and the checkpoint, for the text of errors.
        shares: By new instance, its part.
        key: The column by which rows are routed.
        batches: By old instance, the last committed batch of its query.
        sources: By old instance, its query's checkpoint directory.
        batch_id: The last committed batch of the query that all new instances continue.
        target: A directory for the state of all new instances, with the logs and descriptions of that query, and without its
            state.
    """

    where: str
    shares: Sequence[KeyedStateShare]
    key: RoutedKey
    batches: Mapping[int, int]
    sources: Mapping[int, WorkPath]
    batch_id: int
    target: WorkPath


def move_state(spark: SparkSession, move: StateMove) -> MovedState:
    """Write the state of all new instances, each row once.

    Raises:
        InstancesChanged: The state is not in RocksDB, or does not belong to the key by which rows are routed.
    """
    from pyspark.java_gateway import ensure_callback_server_started

    configuration = QueryLog(move.target).configuration(move.batch_id)
    if configuration.get(_PROVIDER) != ROCKSDB:
        raise InstancesChanged(
            f"{move.where}: expected state in RocksDB, which alone can be moved to other instances, found "
            f"{_PROVIDER} = {configuration.get(_PROVIDER)}. Give the stage the same instances, or start the pipeline without "
            "this checkpoint (restore_from: none), with RocksDB."
        )
    jvm: Any = spark._jvm
    ensure_callback_server_started(spark.sparkContext._gateway)
    session, option = spark._jsparkSession, jvm.scala.Option
    partitions = int(configuration[STATE_PARTITIONS])
    target, hadoop = url(move.target), session.sessionState().newHadoopConf()
    function = option.apply(_Rows(spark, move, partitions))
    rewriter = jvm.org.apache.spark.sql.execution.streaming.state.StateRewriter
    try:
        made = rewriter(session, move.batch_id, move.batch_id, target, hadoop, option.apply(target), function, option.empty())
        made.run()
    except Exception as error:
        failed = KEPT_ERRORS.take(error)
        if failed is not None:
            raise failed from None
        if _MISROUTED in str(error):
            raise InstancesChanged(
                f"{move.where}: expected each key in the state at the instance that owns the key group of "
                f"{move.shares[0].key!r}, found others: the stage computes its keys, or another release has routed its rows. "
                "Give the stage the same instances; or end the old pipeline with a drain, and begin with other instances as a "
                "new start (restore_from: none)."
            ) from error
        raise
    return MovedState(move.target, partitions)


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
        if entry.name == _DESCRIPTION:
            continue
        if entry.name in (found.name for found in entries_of(target)):
            _move(entry, target / entry.name)
        else:
            rename(entry, target / entry.name)


def _operator_name(checkpoint: WorkPath, operator: str) -> str:
    """Spark's name of a stateful operator, such as "symmetricHashJoin"."""
    folder = checkpoint / "state" / operator / _DESCRIPTION
    found = [
        entry
        for part in (folder, folder / "v2")
        for entry in entries_of(part)
        if entry.name.isdecimal() or entry.name == "metadata"
    ]
    _, _, text = found[0].read_text(encoding="utf-8").partition("\n")
    return str(json.loads(text)["operatorInfo"]["operatorName"])


class _Rows(JavaObject):
    """The function that replaces the rows of a state store by those of all new instances, each in its partition.

    State partition n of an old instance has the rows of partition n of the new ones: Spark divides the rows of each instance by
    the same hash of the same key into the same number of partitions. Where key groups are state partitions, the number of a row's
    group is that of its partition.
    """

    def __init__(self, spark: SparkSession, move: StateMove, partitions: int) -> None:
        self._spark = spark
        self._move = move
        self._partitions = partitions

    @kept
    def apply(self, store: Any) -> Any:
        options = store.queryExecution().analyzed().options()
        of_store = {name: str(options.get(name)) for name in ("operatorId", "storeName")}
        frames = [self._held(index, source, of_store) for index, source in sorted(self._move.sources.items())]
        rows = functools.reduce(DataFrame.unionByName, frames)
        placed = rows.repartitionById(self._partitions * len(self._move.shares), F.col(_PLACE))
        return placed.drop(_PLACE)._jdf

    def _held(self, index: int, source: WorkPath, of_store: Mapping[str, str]) -> DataFrame:
        """The rows of an old instance, with the number of the partition that gets them."""
        move, share, operator = self._move, self._move.shares[0], of_store["operatorId"]
        self._check_partitions(source, operator, len(share.held[index]) if share.whole_partitions else self._partitions)
        reader = self._spark.read.format("statestore").option("batchId", move.batches[index]).options(**of_store)
        rows = reader.option(_ALL_COLUMN_FAMILIES, "true").load(url(source))
        key = self._key_column(rows.schema[_KEY].dataType, operator)
        group, held = key_group(F.col(f"{_KEY}.`{key}`"), share.number), share.held[index]
        if share.whole_partitions:
            place = group
        else:
            owner = owner_of_group(group, len(move.shares), share.number)
            place = owner * F.lit(self._partitions) + F.pmod(F.spark_partition_id(), F.lit(self._partitions))
        misrouted = F.raise_error(F.lit(_MISROUTED)).cast("int")
        return rows.withColumn(_PLACE, F.when(group.between(held.start, held.stop - 1), place).otherwise(misrouted))

    def _check_partitions(self, source: WorkPath, operator: str, expected: int) -> None:
        """Only with one number of state partitions do rows stay in the partition of their number."""
        found = {entry.name for entry in entries_of(source / "state" / operator) if entry.name.isdecimal()}
        if found != {str(number) for number in range(expected)}:
            raise InstancesChanged(
                f"{self._move.where}: expected {expected} state partitions (spark.sql.shuffle.partitions of the query) "
                f"in each instance, found {len(found)} in one of them (operator {operator} of the query). Give the stage the "
                "same instances, or start the pipeline without this checkpoint (restore_from: none)."
            )

    def _key_column(self, found: DataType, operator: str) -> str:
        """The name of the column by which rows are routed in the key of an operator's state."""
        key = self._move.key
        is_join = _operator_name(self._move.target, operator) == _JOIN
        wanted = key.in_joins if is_join else key.column
        fields = found.fields if isinstance(found, StructType) else []
        if wanted is None or not any(field.name == wanted and field.dataType == key.type for field in fields):
            raise InstancesChanged(
                f"{self._move.where}: expected state whose key holds the column {key.column!r} of type "
                f"{key.type.simpleString()}, by which rows are routed, found {found.simpleString()} (operator {operator} of the "
                "query). Give the stage the same instances, or start the pipeline without this checkpoint (restore_from: none)."
            )
        return wanted

    class Java:
        implements = ("scala.Function1",)
