"""A case as one Spark query over the inputs that a stage gets: channels, fused sources, or what stands in for ended ones.

The plan is the runtime's own (`plans.build_plan`, `stage_inputs`, `fused_plans`); this module plays the task: it opens the gate,
tells the watermark, and ends the inputs. `plain` is the same in Spark alone, to tell a fault of Spark from one of this project.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException

from bench.stream_programs.arrivals import LATENESS_MINUTES, SIDES, Row, write_rows
from bench.stream_programs.program import COLUMNS, frame_of
from bench.stream_programs.random_programs import Case
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.pipeline import (
    ChannelId,
    Pipeline,
    Stage,
    StageContext,
    StageInput,
    stage,
    unbounded_source,
)
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.channels.channel_log import Channel, Records, segment_of
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.query.channel_sources import ChannelSources
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage, stand_in
from dagster_checkpoints.spark.query.plans import build_plan
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stage_inputs import EventTime, StreamInput, stream_dataframe
from dagster_checkpoints.spark.session.spark_session import ROCKSDB

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LATENESS = f"{LATENESS_MINUTES} minutes"
DEADLINE_SECONDS = 600.0
_LATENESS_MS = LATENESS_MINUTES * 60_000
_ON_HEAP = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
# What Spark says of a plan that it cannot run as a stream, where it finds that only when the query runs.
_REFUSALS = ("not supported", "UNSUPPORTED", "MULTIPLE_EVENT_TIME_COLUMNS")


class Refused(Exception):
    """Spark or this project does not run this program as a stream."""


class NotAsFused(Refused):
    """The program runs, but its sources cannot be fused."""


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that Spark cannot run the plan as a stream."""
    return any(part in str(error).partition("===")[0] for part in _REFUSALS)


def batch_rows(spark: SparkSession, case: Case, folder: Path) -> list[tuple[Any, ...]]:
    """The result of the case's program over all rows."""
    frames = {}
    for side in SIDES:
        rows = [row for arrival in case.arrivals for row in arrival.rows[side]]
        file = folder / f"all-{side}.parquet"
        if not file.exists():
            write_rows(rows, file)
        frames[side] = spark.read.schema(COLUMNS).parquet(str(file))
    return rows_of(frame_of(case.program, frames))


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in frame.toArrow().to_pylist()), key=repr)


def stages_of(
    case: Case, folder: Path, source: Callable[[str], Callable[[StageContext], DataFrame]], **of_result: Any
) -> list[Stage]:
    """The sources `a` and `b`, and the stage `result` that holds the program.

    Args:
        case: The case.
        folder: The directory of the sink.
        source: By name, the function of a source.
        of_result: Further arguments of `@stage`.
    """

    @stage(sink=ParquetSink(folder / "result"), **of_result)
    def result(a: DataFrame, b: DataFrame) -> DataFrame:
        return frame_of(case.program, {"a": a, "b": b})

    watermark = ("ts", LATENESS) if case.event_time else None
    return [*(unbounded_source(name=side, watermark=watermark)(source(side)) for side in SIDES), result]


def configure(spark: SparkSession, case: Case, *, rocksdb: bool) -> None:
    """Give the session the settings of a case."""
    spark.conf.set("spark.sql.shuffle.partitions", case.partitions)
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB if rocksdb else _ON_HEAP)
    spark.conf.set("spark.sql.codegen.wholeStage", case.compiled)


def query_rows(spark: SparkSession, case: Case, folder: Path, layout: str) -> list[tuple[Any, ...]]:
    """The rows that the case's query emits in all its micro-batches.

    Raises:
        Refused: The program does not run as a stream.
    """
    configure(spark, case, rocksdb=case.rocksdb)
    kinds: dict[str, Callable[[SparkSession, Case, Path], _Query]] = {
        "channels": _OfChannels,
        "fused": _OfFusedSources,
        "plain": _OfSparkAlone,
    }
    query = kinds[layout](spark, case, folder)
    try:
        return query.run()
    except RefusedAtStage as refusal:
        raise NotAsFused(str(refusal)) from refusal
    except (AnalysisException, StageError) as refusal:
        raise Refused(str(refusal)) from refusal
    finally:
        query.stop()


class _Query(ABC):
    """The case's query, stopped and started again as the case says."""

    def __init__(self, spark: SparkSession, case: Case, folder: Path) -> None:
        self.spark, self.case, self.folder = spark, case, folder
        self.checkpoint = folder / "checkpoint"
        self.attempt = 0
        self.sent = dict.fromkeys(SIDES, 0)
        """By input, the number of micro-batches that had rows of it."""
        self._left = {side: sum(bool(arrival.rows[side]) for arrival in case.arrivals) for side in SIDES}
        self._emitted: dict[int, list[tuple[Any, ...]]] = {}
        self._query: Any = None

    def run(self) -> list[tuple[Any, ...]]:
        self.start(self.frame(()))
        for number, arrival in enumerate(self.case.arrivals):
            for side in SIDES:
                if arrival.rows[side]:
                    self.send(side, arrival.rows[side])
                    self.sent[side] += 1
            self.settle()
            if number in self.case.restarts:
                self.stop()
                self.start(self.frame(self.ended()))
                self.settle()
        self.drain()
        return sorted((row for rows in self._emitted.values() for row in rows), key=repr)

    def ended(self) -> list[str]:
        """The inputs that have ended, and whose end is known."""
        return [side for side in SIDES if self.sent[side] == self._left[side]] if self.case.ends_early else []

    def start(self, frame: DataFrame, **trigger: Any) -> None:
        self.attempt += 1
        writer = frame.writeStream.option("checkpointLocation", str(self.checkpoint)).foreachBatch(self._keep)
        self._query = (writer.trigger(**trigger) if trigger else writer).start()

    def _keep(self, batch: DataFrame, batch_id: int) -> None:
        self._emitted[batch_id] = rows_of(batch)
        self.batch_ran()

    def batch_ran(self) -> None:  # noqa: B027
        """After each micro-batch."""

    def check(self) -> None:
        """Raise what the query has failed with."""
        error = None if self._query.isActive else self._query.exception()
        if error is None:
            return
        if is_refusal(error):
            raise Refused(str(error))
        raise error

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()

    @abstractmethod
    def frame(self, ended: Collection[str]) -> DataFrame:
        """The query's plan, where some inputs have ended."""

    @abstractmethod
    def send(self, side: str, rows: Sequence[Row]) -> None:
        """Let rows of an input arrive."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the query has read everything."""

    @abstractmethod
    def drain(self) -> None:
        """End event time, and wait until everything is emitted."""

    def calls(self, stages: Sequence[Stage]) -> list[StageCall]:
        log = logging.getLogger(__name__)
        return [StageCall(each, StageContext(self.spark, each.name, "0", 0, 1, None, log)) for each in stages]  # type: ignore[arg-type]


class _OfChannels(_Query):
    """Behind channels: a gate that the driver opens, and watermarks that it tells."""

    def __init__(self, spark: SparkSession, case: Case, folder: Path) -> None:
        super().__init__(spark, case, folder)
        self._channels = {side: [Channel(ChannelId(side, n, "result", 0)) for n in range(case.channels)] for side in SIDES}
        self._positions = {str(channel.id): 0 for channels in self._channels.values() for channel in channels}
        self._gate = QueryGate(self._positions)
        self._newest: dict[str, int] = {}
        self._sources = ChannelSources(spark)
        self._pipeline = Pipeline("case", stages_of(case, folder, _no_source), chaining=False)
        self._segments = 0

    def frame(self, ended: Collection[str]) -> DataFrame:
        schema = self._sources.spark.createDataFrame([], COLUMNS).schema
        event_time = EventTime("ts", _LATENESS_MS) if self.case.event_time else None
        inputs = {}
        for side in SIDES:
            channels = {str(channel.id): channel for channel in self._channels[side]}
            inputs[side] = stream_dataframe(
                self._sources, StreamInput(side, schema, self._gate, channels, event_time, self.attempt + 1)
            )
        return build_plan(self._pipeline, self.calls([self._pipeline.stage("result")]), inputs).frame

    def start(self, frame: DataFrame, **trigger: Any) -> None:
        self._gate.begin()
        super().start(frame, **trigger)

    def send(self, side: str, rows: Sequence[Row]) -> None:
        for number, channel in enumerate(self._channels[side]):
            part = rows[number :: len(self._channels[side])]
            if part:
                file = write_rows(part, self.folder / f"segment-{self._segments}.parquet")
                self._segments += 1
                channel.append(Records(segment_of([file], len(part))))
                self._positions[str(channel.id)] += 1
        times = [int(time_of.timestamp() * 1000) for _, time_of, _ in rows if time_of is not None]
        if times:
            self._newest[side] = max(*times, self._newest.get(side, times[0]))

    def settle(self) -> None:
        self._open(self._watermark())

    def _watermark(self) -> int | None:
        """The earliest watermark of the inputs whose end is not known."""
        ended = [side for side in self.ended()]
        open_sides = [side for side in SIDES if side not in ended] or list(SIDES)
        if not self.case.event_time or any(side not in self._newest for side in open_sides):
            return None
        return min(self._newest[side] for side in open_sides) - _LATENESS_MS

    def _open(self, watermark: int | None) -> None:
        self._gate.open_to(self._positions, watermark)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self._gate.idle:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the query is not idle after {DEADLINE_SECONDS:.0f} s: {self._query.status}")
            time.sleep(0.005)

    def drain(self) -> None:
        if self.case.event_time:
            self._open(MAX_WATERMARK_MS)

    def batch_ran(self) -> None:
        self._gate.batch_ran()

    def check(self) -> None:
        if self._gate.error is not None:
            raise self._gate.error
        super().check()

    def stop(self) -> None:
        self._gate.close()
        super().stop()


class _OfFiles(_Query):
    """Over Spark's own file sources."""

    def folder_of(self, side: str) -> Path:
        folder = self.folder / f"input-{side}"
        folder.mkdir(exist_ok=True)
        return folder

    def stream(self, side: str) -> DataFrame:
        return self.spark.readStream.schema(COLUMNS).parquet(str(self.folder_of(side)))

    def send(self, side: str, rows: Sequence[Row]) -> None:
        write_rows(rows, self.folder_of(side) / f"{self.sent[side]:04d}.parquet", self.sent[side])

    def settle(self) -> None:
        with contextlib.suppress(Exception):  # `check` raises it
            self._query.processAllAvailable()
        self.check()

    def drain(self) -> None:
        if not self.case.event_time:
            return
        self.stop()
        log = QueryLog(self.checkpoint)
        log.plan_batch(log.last_committed() + 1, MAX_WATERMARK_MS)
        self.start(self.frame(self.ended()), once=True)
        self._query.awaitTermination(DEADLINE_SECONDS)
        self.check()


class _OfFusedSources(_OfFiles):
    """The sources in the query of the stage that reads them; an ended one is replaced at a restart."""

    def __init__(self, spark: SparkSession, case: Case, folder: Path) -> None:
        super().__init__(spark, case, folder)
        fused = dict.fromkeys(SIDES, StageInput(fuse=True))
        self._pipeline = Pipeline("case", stages_of(case, folder, lambda side: lambda context: self.stream(side), inputs=fused))
        self._sources = ChannelSources(spark)
        self._replaced: set[str] = set()

    def frame(self, ended: Collection[str]) -> DataFrame:
        log = QueryLog(self.checkpoint)
        schema = self.spark.createDataFrame([], COLUMNS).schema
        stand_ins = {side: stand_in(self._sources, self._pipeline.stage(side), schema) for side in ended}
        names = [side for side in SIDES if side not in stand_ins] + ["result"]
        plan = build_plan(self._pipeline, self.calls([self._pipeline.stage(name) for name in names]), {}, stand_ins)
        for side in sorted(set(ended) - self._replaced):
            log.forget_source(plan.fused[side].position)
            self._replaced.add(side)
        return plan.frame


class _OfSparkAlone(_OfFiles):
    """The same program in Spark alone."""

    def frame(self, ended: Collection[str]) -> DataFrame:
        frames: Mapping[str, DataFrame] = {side: self.stream(side) for side in SIDES}
        if self.case.event_time:
            frames = {side: frame.withWatermark("ts", LATENESS) for side, frame in frames.items()}
        return frame_of(self.case.program, frames)


def _no_source(side: str) -> Callable[[StageContext], DataFrame]:
    def read(context: StageContext) -> DataFrame:
        raise AssertionError(f"the source {side} is read through channels")

    return read
