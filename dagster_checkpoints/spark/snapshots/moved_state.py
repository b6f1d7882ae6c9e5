"""Moves Spark's keyed state to other instances of a stage: each gets the keys of its key groups, from all old instances.

Spark's own rewriting of state does it, with which Spark repartitions state: it reads all column families of a store, lets a
function change the rows, and writes them as a whole version. The function here reads several checkpoint directories instead of
one, and keeps the keys of one instance. RocksDB only. It must not know the job, nor how checkpoints are stored.

Source: Spark's `StateRewriter`, `OfflineStateRepartitionRunner` and `StateSourceOptions`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from dagster_checkpoints.spark.channels.segments import key_group
from dagster_checkpoints.spark.files.work_path import WorkPath, url
from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS, JavaObject, kept
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.session.spark_session import ROCKSDB
from dagster_checkpoints.state import InstancesChanged, KeyedStateShare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ALL_COLUMN_FAMILIES = "_readAllColumnFamilies"
_KEY = "partition_key"
_MISROUTED = "dagster_checkpoints: a key is held by an instance that does not own it"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_PARTITIONS = "spark.sql.shuffle.partitions"


@dataclass(frozen=True, slots=True)
class StateMove:
    """The move of an instance's keyed state.

    Attributes:
        where: The instance and the checkpoint, for the text of errors.
        share: The instance's part.
        key_type: The type of the key column in the rows of the inputs.
        batches: By old instance in the share, the last committed batch of its query.
        sources: By old instance in the share, its query's checkpoint directory.
        batch_id: The last committed batch of the query that is continued.
        target: The instance's checkpoint directory, with the logs and descriptions of that query, and without its state.
    """

    where: str
    share: KeyedStateShare
    key_type: DataType
    batches: Mapping[int, int]
    sources: Mapping[int, WorkPath]
    batch_id: int
    target: WorkPath


def move_state(spark: SparkSession, move: StateMove) -> None:
    """Write the state of an instance.

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
    target, hadoop = url(move.target), session.sessionState().newHadoopConf()
    function = option.apply(_Rows(spark, move, int(configuration[_PARTITIONS])))
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
                f"{move.where}: expected each key in the state at the instance that owns the key group of {move.share.key!r}, "
                f"found others: the stage computes its keys, or another release has routed its rows. Give the stage the same "
                "instances; or end the old pipeline with a drain, and begin with other instances as a new start "
                "(restore_from: none)."
            ) from error
        raise


class _Rows(JavaObject):
    """The function that replaces the rows of a state store by those of one instance."""

    def __init__(self, spark: SparkSession, move: StateMove, partitions: int) -> None:
        self._spark = spark
        self._move = move
        self._partitions = partitions

    @kept
    def apply(self, store: Any) -> Any:
        options = store.queryExecution().analyzed().options()
        of_store = {name: str(options.get(name)) for name in ("operatorId", "storeName")}
        move = self._move
        frames = [self._held(index, source, of_store) for index, source in sorted(move.sources.items())]
        rows = functools.reduce(DataFrame.unionByName, frames) if frames else DataFrame(store, self._spark).where("false")
        # As Spark distributes a batch's rows to the partitions of the state.
        return rows.repartition(self._partitions, _KEY)._jdf

    def _held(self, index: int, source: WorkPath, of_store: Mapping[str, str]) -> DataFrame:
        """The rows of an old instance that the new one gets."""
        move, share = self._move, self._move.share
        reader = self._spark.read.format("statestore").option("batchId", move.batches[index]).options(**of_store)
        rows = reader.option(_ALL_COLUMN_FAMILIES, "true").load(url(source))
        key = rows.schema[_KEY].dataType
        self._check_key(key, of_store)
        group, own, held = key_group(F.col(f"{_KEY}.`{share.key}`"), share.number), share.groups, share.held[index]
        owned = group.between(held.start, held.stop - 1)
        misrouted = F.raise_error(F.lit(_MISROUTED)).cast("boolean")
        return rows.where(F.when(owned, group.between(own.start, own.stop - 1)).otherwise(misrouted))

    def _check_key(self, found: DataType, of_store: Mapping[str, str]) -> None:
        share, wanted = self._move.share, self._move.key_type
        fields = found.fields if isinstance(found, StructType) else []
        if not any(field.name == share.key and field.dataType == wanted for field in fields):
            raise InstancesChanged(
                f"{self._move.where}: expected state whose key holds the column {share.key!r} of type {wanted.simpleString()}, "
                f"by which rows are routed, found {found.simpleString()} (operator {of_store['operatorId']} of the query). "
                "Give the stage the same instances, or start the pipeline without this checkpoint (restore_from: none)."
            )

    class Java:
        implements = ("scala.Function1",)
