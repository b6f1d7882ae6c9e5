"""What a checkpoint or savepoint holds of one stage, as tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.types import StructType

from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.session.spark_version import installed_version
from dagster_checkpoints.spark.snapshots.query_snapshots import relocate
from dagster_checkpoints.spark.stored_state.state_stores import KeyedState, read_stores
from dagster_checkpoints.state.errors import UnknownStage
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    EnumeratorState,
    Segment,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.spark_versions import check_spark_version
from dagster_checkpoints.storage.locating import StoredCheckpoint, opened_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class OperatorStateValues:
    """One of the states of `context.state`, of one instance.

    Attributes:
        instance: Name of the instance.
        name: Name of the state.
        kind: "list", "union" or "broadcast".
        values: The items of a list or union, of a union those that the instance itself has added; a broadcast's mapping.
    """

    instance: str
    name: str
    kind: str
    values: list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class InstanceOffsets:
    """How far an instance's query has read its sources.

    Attributes:
        instance: Name of the instance.
        batch_id: The last micro-batch in the checkpoint.
        watermark_ms: The watermark of that batch, epoch ms.
        sources: For each streaming source, in Spark's order, its description and its offset (None before the first). The
            sources of a stage behind channels are its channels, with positions in their logs.
    """

    instance: str
    batch_id: int
    watermark_ms: int
    sources: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StageState:
    """What a checkpoint or savepoint holds of one stage.

    The DataFrames read copies of the files in `directory`.

    Attributes:
        stage: Name of the stage.
        checkpoint_id: The checkpoint or savepoint.
        query_of: All stages that share the stage's query, in order: the keyed state and the offsets are those of the query.
        finished: Names of the instances that had finished, which have no state.
        keyed: The keyed state of the query's stateful operators.
        operator: The states of `context.state`.
        offsets: How far the query's sources were read.
        in_flight: By upstream stage, the rows that had left it, and were not processed yet, with the `instance` that gets them.
        static: By upstream stage, the rows of a static input, with the `instance`.
        transactions: By instance, the number of the sink's transactions that were not committed yet.
        splits: Of a split source, its splits as text; None for other stages.
        directory: Where the copies are.
    """

    stage: str
    checkpoint_id: int
    query_of: tuple[str, ...]
    finished: tuple[str, ...]
    keyed: tuple[KeyedState, ...]
    operator: tuple[OperatorStateValues, ...]
    offsets: tuple[InstanceOffsets, ...]
    in_flight: Mapping[str, DataFrame]
    static: Mapping[str, DataFrame]
    transactions: Mapping[str, int]
    directory: Path = field(repr=False)
    splits: EnumeratorState | None = None


def read_state(
    spark: SparkSession,
    location: str,
    *,
    stage: str,
    directory: str | Path | None = None,
    open_at: Callable[[str], ObjectStore] = open_store,
) -> StageState:
    """Read what a checkpoint or savepoint holds of a stage. The pipeline may run meanwhile; nothing in storage changes.

    Args:
        spark: A session, of the Spark version that the pipeline runs with.
        location: URL or path of the checkpoint or savepoint, as `dagster-checkpoints list` and savepoint assets show it.
        stage: Name of the stage.
        directory: An empty or new directory for copies of the files, which the executors see under the same path. They are
            needed as long as the DataFrames are used. Default: a temporary directory, with a local Spark only.
        open_at: Opens the store at a URL; default: with boto3's own configuration.

    Raises:
        UnknownStage: The checkpoint has no such stage.
        SparkVersionChanged: Another version of Spark wrote the checkpoint, and the session's may not read it.
        StorageError: The files cannot be read.
        ValueError: `directory` is not empty; or it is needed, because Spark is not local.
    """
    with opened_at(location, open_at) as stored:
        metadata = stored.read()
        check_spark_version(metadata, installed_version())
        recorded = _recorded(metadata, stage, stored.url)
        folder = _empty(directory, spark)
        chain = next((chain for chain in metadata.chains if stage in chain.stages), ChainMetadata(stage, (stage,)))
        return _Reader(spark, stored, metadata, recorded, chain, folder).read()


def _recorded(metadata: CheckpointMetadata, stage: str, url: str) -> StageMetadata:
    for recorded in metadata.stages:
        if recorded.name == stage:
            return recorded
    names = suggestion(stage, (recorded.name for recorded in metadata.stages))
    raise UnknownStage(f"expected a stage {stage!r} in {url}, found none of that name. {names}")


def _empty(directory: str | Path | None, spark: SparkSession) -> Path:
    if directory is None:
        if not (spark.sparkContext.master or "").startswith("local"):
            raise ValueError(
                f"Spark runs at {spark.sparkContext.master}, and no directory for copies of the state was given. Name one that "
                "all executors see under the same path: read_state(…, directory=…)."
            )
        return Path(tempfile.mkdtemp(prefix="dagster-checkpoints-state-"))
    folder = Path(directory).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(path.name for path in folder.iterdir())
    if found:
        raise ValueError(f"expected an empty directory for copies of the state, found {found[:5]} in {folder}. Name another one.")
    return folder


class _Reader:
    def __init__(
        self,
        spark: SparkSession,
        stored: StoredCheckpoint,
        metadata: CheckpointMetadata,
        recorded: StageMetadata,
        chain: ChainMetadata,
        folder: Path,
    ) -> None:
        self._spark = spark
        self._stored = stored
        self._metadata = metadata
        self._recorded = recorded
        self._chain = chain
        self._folder = folder
        self._tasks = {recorded.instances[index]: task for index, task in sorted(chain.tasks.items())}

    def read(self) -> StageState:
        stage = self._recorded.name
        states = {instance: task.stages[stage] for instance, task in self._tasks.items() if stage in task.stages}
        checkpoints = {name: found for name, task in self._tasks.items() if (found := self._query(name, task)) is not None}
        return StageState(
            stage=stage,
            checkpoint_id=self._metadata.checkpoint_id,
            query_of=self._chain.stages,
            finished=tuple(name for name in self._recorded.instances if name not in states),
            keyed=read_stores(self._spark, checkpoints),
            operator=tuple(
                OperatorStateValues(instance, state.name, state.kind, _values(state.kind, state.items))
                for instance, own in states.items()
                for state in own.operator_states
            ),
            offsets=tuple(self._offsets(instance, checkpoint) for instance, checkpoint in checkpoints.items()),
            in_flight=self._tables(segments_in_flight(self._tasks)),
            static=self._tables(
                {(table.input, instance): list(table.segments) for instance, task in self._tasks.items() for table in task.static}
            ),
            transactions={instance: len(own.transactions) for instance, own in states.items() if own.transactions},
            directory=self._folder,
            splits=self._recorded.enumerator,
        )

    def _query(self, instance: str, task: TaskSnapshot) -> Path | None:
        """The instance's checkpoint directory, fetched; None if its query had committed no batch."""
        if task.query is None or task.query.batch_id < 0:
            return None
        checkpoint = self._folder / instance / "checkpoint"
        self._stored.fetch(task.query.files, checkpoint)
        relocate(checkpoint, checkpoint)
        return checkpoint

    def _offsets(self, instance: str, checkpoint: Path) -> InstanceOffsets:
        query = self._tasks[instance].query
        assert query is not None
        planned = QueryLog(checkpoint).planned(query.batch_id)
        names = query.sources or ("",) * len(planned.sources)
        return InstanceOffsets(instance, query.batch_id, planned.watermark_ms, tuple(zip(names, planned.sources, strict=True)))

    def _tables(self, segments: Mapping[tuple[str, str], list[Segment]]) -> dict[str, DataFrame]:
        """Rows by upstream stage, of segments by upstream stage and instance."""
        from pyspark.sql import functions as F

        tables: dict[str, DataFrame] = {}
        for (upstream, instance), found in segments.items():
            if not found:
                continue
            folder = self._folder / instance / "rows" / upstream
            self._stored.fetch([file for segment in found for file in segment.files], folder)
            files = [folder / file.path for segment in found for file in segment.files]
            rows = table_dataframe(self._spark, self._schema(upstream), files).withColumn("instance", F.lit(instance))
            tables[upstream] = tables[upstream].unionByName(rows) if upstream in tables else rows
        return tables

    def _schema(self, upstream: str) -> StructType:
        recorded = next(stage for stage in self._metadata.stages if stage.name == upstream)
        return StructType.fromJson(msgspec.json.decode(recorded.output_schema))


def segments_in_flight(tasks: Mapping[str, TaskSnapshot]) -> dict[tuple[str, str], list[Segment]]:
    """The segments that wait in front of the instances of a stage, by upstream stage and instance.

    Args:
        tasks: The task of each instance. It has a channel from each upstream instance that sends to it.
    """
    found: dict[tuple[str, str], list[Segment]] = {}
    for instance, task in tasks.items():
        for channel in task.channels:
            waiting = found.setdefault((ChannelId.parse(channel.channel).producer, instance), [])
            waiting += [element for element in channel.in_flight if isinstance(element, Segment)]
    return found


def _values(kind: str, items: tuple[bytes, ...]) -> list[Any] | dict[str, Any]:
    values = [msgspec.json.decode(item) for item in items]
    return dict(values) if kind == "broadcast" else values
