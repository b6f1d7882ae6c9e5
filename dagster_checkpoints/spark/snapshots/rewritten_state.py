"""Writes the state of a Spark query again, row by row: for other instances, or in another number of state partitions.

Spark's own rewriting of state does it, with which Spark repartitions state: it reads all column families of a store, lets a
function change the rows, and writes them as a whole version. RocksDB only, since Spark 4.2. It must not know the job, how
checkpoints are stored, nor which instance owns which rows.

Source: Spark's `StateRewriter`, `OfflineStateRepartitionRunner` and `StateSourceOptions`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, url
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS, JavaObject, kept
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS, QueryLog
from dagster_checkpoints.spark.session.spark_session import ROCKSDB
from dagster_checkpoints.state.errors import StatePartitionsChanged
from dagster_checkpoints.state.spark_versions import rewrites_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITION_KEY = "partition_key"
"""The column with the key by which Spark divides the rows of a query into state partitions."""
JOIN = "symmetricHashJoin"
"""Spark's name of a join of streams."""
DESCRIPTION = "_metadata"
"""The folder of Spark's description of a stateful operator."""
_ALL_COLUMN_FAMILIES = "_readAllColumnFamilies"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_JOIN_FORMAT = "spark.sql.streaming.join.stateFormatVersion"
_SEVERAL_ROWS_OF_A_KEY = "4"
"""The format of the state of joins in which RocksDB merges the rows of a key: Spark's rewriting writes what it cannot read."""


@dataclass(frozen=True, slots=True)
class StateOfBatch:
    """The state of a query as of its last committed batch.

    Attributes:
        checkpoint: The query's checkpoint directory.
        batch_id: The batch.
    """

    checkpoint: WorkPath
    batch_id: int

    @property
    def partitions(self) -> int:
        """The number of state partitions of each operator that has a key."""
        return int(self.configuration[STATE_PARTITIONS])

    @property
    def configuration(self) -> Mapping[str, str]:
        """The settings of Spark that the query keeps."""
        return QueryLog(self.checkpoint).configuration(self.batch_id)


def repartition_state(spark: SparkSession, where: str, old: StateOfBatch, new: StateOfBatch) -> None:
    """Write the state of a query in another number of state partitions.

    Args:
        spark: The session.
        where: The stage and the checkpoint, for the text of errors.
        old: The state as it is.
        new: The state to be written: a directory with the logs and descriptions of the query, which name the new number.

    Raises:
        StatePartitionsChanged: The state cannot be written again.
    """
    problem = why_not_rewritten(spark, old)
    if problem:
        raise StatePartitionsChanged(
            f"{where}: {problem}. The state keeps its {old.partitions} partitions: leave out repartition_state."
        )
    rewrite_state(spark, _PartitionedRows(spark, old, new.partitions), new)


def why_not_rewritten(spark: SparkSession, old: StateOfBatch | None = None) -> str:
    """What is needed to write a state again, and what was found; empty if it can be written.

    Args:
        spark: The session.
        old: The state; None to ask for the version of Spark alone.
    """
    if not rewrites_state(spark.version):
        return f"expected Spark 4.2 or later, which can write state again, found Spark {spark.version}"
    provider = old.configuration.get(_PROVIDER) if old is not None else ROCKSDB
    if provider != ROCKSDB:
        return f"expected state in RocksDB, which alone can be written again, found {_PROVIDER} = {provider}"
    if old is not None and old.configuration.get(_JOIN_FORMAT) == _SEVERAL_ROWS_OF_A_KEY and _has_join(old.checkpoint):
        return (
            f"expected the state of a join of streams in format 2 or 3, found {_JOIN_FORMAT} = {_SEVERAL_ROWS_OF_A_KEY}, with "
            "which its query has begun: Spark cannot write this format again"
        )
    return ""


def operator_name(checkpoint: WorkPath, operator: str) -> str:
    """Spark's name of a stateful operator, such as :data:`JOIN`."""
    folder = checkpoint / "state" / operator / DESCRIPTION
    found = [
        entry
        for part in (folder, folder / "v2")
        for entry in entries_of(part)
        if entry.name.isdecimal() or entry.name == "metadata"
    ]
    _, _, text = found[0].read_text(encoding="utf-8").partition("\n")
    return str(json.loads(text)["operatorInfo"]["operatorName"])


def _has_join(checkpoint: WorkPath) -> bool:
    operators = (entry.name for entry in entries_of(checkpoint / "state") if entry.name.isdecimal())
    return any(operator_name(checkpoint, operator) == JOIN for operator in operators)


def rewrite_state(spark: SparkSession, rows: StateRows, target: StateOfBatch) -> None:
    """Write state in one Spark job per store.

    Args:
        spark: The session.
        rows: The rows of each store, each in the state partition of its partition.
        target: A checkpoint directory with logs and descriptions, and the batch as of which the state is written.

    Raises:
        BaseException: What `rows` has raised.
    """
    from pyspark.java_gateway import ensure_callback_server_started

    jvm = jvm_of(spark)
    ensure_callback_server_started(spark.sparkContext._gateway)
    session, option, folder, batch_id = spark._jsparkSession, jvm.scala.Option, url(target.checkpoint), target.batch_id
    rewriter = jvm.org.apache.spark.sql.execution.streaming.state.StateRewriter
    hadoop = session.sessionState().newHadoopConf()
    with KEPT_ERRORS.raised():
        rewriter(session, batch_id, batch_id, folder, hadoop, option.apply(folder), option.apply(rows), option.empty()).run()


class StateRows(JavaObject):
    """The function that replaces the rows of a state store by others.

    Args:
        spark: The session.
        partitions: The new number of state partitions of a query.
    """

    def __init__(self, spark: SparkSession, partitions: int) -> None:
        self._spark = spark
        self.partitions = partitions

    @kept
    def apply(self, store: Any) -> Any:
        options = store.queryExecution().analyzed().options()
        return self.of_store({name: str(options.get(name)) for name in ("operatorId", "storeName")})._jdf

    def of_store(self, store: Mapping[str, str]) -> DataFrame:
        """The rows of a store of an operator (`operatorId`, `storeName`), by state partition."""
        raise NotImplementedError

    def read(self, old: StateOfBatch, store: Mapping[str, str]) -> DataFrame:
        """The rows of a store of an old query, by its state partitions.

        Raises:
            StatePartitionsChanged: The store has another number of partitions than the query's log says.
        """
        reader = self._spark.read.format("statestore").option("batchId", old.batch_id).options(**store)
        rows = reader.option(_ALL_COLUMN_FAMILIES, "true").load(url(old.checkpoint))
        expected = old.partitions if _has_key(rows) else 1
        operator = store["operatorId"]
        found = {entry.name for entry in entries_of(old.checkpoint / "state" / operator) if entry.name.isdecimal()}
        if found != {str(number) for number in range(expected)}:
            raise StatePartitionsChanged(
                f"Expected {expected} state partitions of operator {operator} of the query in {url(old.checkpoint)}, as its log "
                f"says, found {len(found)}. Leave out repartition_state, and give the stage the same instances; or start the "
                "pipeline without this checkpoint (restore_from: none)."
            )
        return rows

    def repartitioned(self, rows: DataFrame, old: StateOfBatch) -> DataFrame:
        """The rows of an old query in the new number of partitions: Spark divides them by the same hash of the same key.

        An operator without a key, such as a count of all rows, has one partition, whatever the number.
        """
        same = old.partitions == self.partitions or not _has_key(rows)
        return rows if same else rows.repartition(self.partitions, F.col(PARTITION_KEY))

    class Java:
        implements = ("scala.Function1",)


class _PartitionedRows(StateRows):
    """The rows of one query in another number of partitions."""

    def __init__(self, spark: SparkSession, old: StateOfBatch, partitions: int) -> None:
        super().__init__(spark, partitions)
        self._old = old

    def of_store(self, store: Mapping[str, str]) -> DataFrame:
        return self.repartitioned(self.read(self._old, store), self._old)


def _has_key(rows: DataFrame) -> bool:
    key = rows.schema[PARTITION_KEY].dataType
    return isinstance(key, StructType) and bool(key.fields)
