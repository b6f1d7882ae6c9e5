"""From a row to its reader: seconds from the rename of a file with one row to the committed row, seen by a reader that polls.

A source of files in one query with a stage that passes its rows on to a sink; by sink, and by the interval of checkpoints.
"""

from __future__ import annotations

import json
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from bench.control import request, run_under_control, wait_until
from bench.environment import BenchFailed, Environment
from bench.kafka import running_broker
from bench.measures import Measure, below, percentile
from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.sinks import DeltaSink, KafkaSink, ParquetSink, TwoPhaseCommitSink
from dagster_checkpoints.spark.job.job_execution import JobExecution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bench.kafka_broker import KafkaBroker

PART = "Row to reader"
INTERVALS = (0.2, 1.0, 5.0)
GOAL_INTERVAL, GOAL_MEDIAN, GOAL_P99 = 1.0, 1.2, 2.5
WARM_UP_ROWS, ROWS = 20, 100
PAUSES = (0.1, 0.4)
"""The shortest and the longest time between two rows, seconds."""
POLL_SECONDS = 0.02


class Reader(ABC):
    """Reads what is committed, again and again."""

    @abstractmethod
    def new(self) -> list[int]:
        """The rows that were committed since the last call."""

    def close(self) -> None:  # noqa: B027 - files need none
        """End reading."""


class FileReader(Reader):
    """Reads the files of a directory, or those that a Delta table names."""

    def __init__(self, folder: Path, *, delta: bool) -> None:
        self._folder = folder
        self._delta = delta
        self._known: set[str] = set()

    def new(self) -> list[int]:
        fresh = [file for file in self._files() if file not in self._known]
        self._known.update(fresh)
        return [number for file in fresh for number in pq.read_table(file, columns=["v"], partitioning=None)["v"].to_pylist()]

    def _files(self) -> list[str]:
        if not self._delta:
            return [str(file) for file in self._folder.glob("checkpoint=*/*.parquet")]
        try:
            return DeltaTable(self._folder).file_uris()
        except TableNotFoundError:
            return []


class TopicReader(Reader):
    """Reads the committed messages of a topic."""

    def __init__(self, broker: KafkaBroker, topic: str) -> None:
        from confluent_kafka import Consumer

        settings = {"group.id": topic, "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
        self._consumer = Consumer({"bootstrap.servers": broker.servers, **settings})
        self._consumer.subscribe([topic])

    def new(self) -> list[int]:
        return [
            json.loads(message.value() or b"")["v"] for message in self._consumer.consume(1000, 0.0) if message.error() is None
        ]

    def close(self) -> None:
        self._consumer.close()


Places = Callable[[Path], tuple[TwoPhaseCommitSink, Reader]]


def measure(environment: Environment) -> Iterator[Measure]:
    with ExitStack() as servers:
        places: dict[str, Places] = {
            "ParquetSink": lambda folder: (ParquetSink(folder), FileReader(folder, delta=False)),
            "DeltaSink": lambda folder: (DeltaSink(folder), FileReader(folder, delta=True)),
        }
        broker = servers.enter_context(running_broker(environment))
        if broker is not None:
            places["KafkaSink"] = lambda folder: _topic(broker, folder)
        latencies(environment, places["ParquetSink"], INTERVALS[0])  # warms up
        for name, place in places.items():
            for interval in INTERVALS:
                took = latencies(environment, place, interval)
                what = f"{name}, a checkpoint every {interval:g} s"
                environment.say(f"  {what}: median {median(took):.2f} s, longest {took[-1]:.2f} s")
                if interval == GOAL_INTERVAL:
                    yield below(PART, f"{what}: median", median(took), "s", GOAL_MEDIAN, f"of {len(took)} rows")
                    yield below(PART, f"{what}: p99", percentile(took, 99), "s", GOAL_P99)
                else:
                    yield Measure(PART, f"{what}: median", median(took), "s")
                    yield Measure(PART, f"{what}: p99", percentile(took, 99), "s")


def _topic(broker: KafkaBroker, folder: Path) -> tuple[TwoPhaseCommitSink, Reader]:
    topic = folder.parent.name
    broker.create_topic(topic, 1)
    return KafkaSink(topic, broker.servers, staging=folder), TopicReader(broker, topic)


def latencies(environment: Environment, place: Places, interval: float) -> list[float]:
    """The latency of each row in seconds, sorted; the first rows only warm up."""
    folder = environment.fresh("latency")
    sink, reader = place(folder / "result")
    written: dict[int, float] = {}
    seen: dict[int, float] = {}

    def control(job: JobExecution) -> None:
        over = threading.Event()
        feeding = threading.Thread(target=feed, args=(folder, written, over))
        feeding.start()
        try:
            wait_until(lambda: _take(reader, seen) >= WARM_UP_ROWS + ROWS)
        finally:
            over.set()
            feeding.join()
        request(job, "stop", drain=True)

    run_under_control(environment, pipeline(folder, sink), folder, control, interval=interval)
    _take(reader, seen)
    reader.close()
    # A drain ends the source at what it has read: rows that were written right before it are not in the table.
    if len(seen) < WARM_UP_ROWS + ROWS or sorted(seen) != list(range(len(seen))):
        raise BenchFailed(f"latency: expected the first rows of {len(written)}, each once, found {len(seen)}: {sorted(seen)}")
    return sorted(at - written[number] for number, at in seen.items() if WARM_UP_ROWS <= number < WARM_UP_ROWS + ROWS)


def _take(reader: Reader, seen: dict[int, float]) -> int:
    for number in reader.new():
        if number in seen:
            raise BenchFailed(f"latency: row {number} was committed twice")
        seen[number] = time.monotonic()
    time.sleep(POLL_SECONDS)
    return len(seen)


def feed(folder: Path, written: dict[int, float], over: threading.Event) -> None:
    """Write rows one by one, each as a file, until told to end."""
    pauses = random.Random(1)
    while not over.wait(pauses.uniform(*PAUSES)):
        number = len(written)
        file = folder / f"{number}.part"
        file.write_text(json.dumps({"v": number}) + "\n")
        written[number] = time.monotonic()
        file.rename(folder / "rows" / f"{number:06d}.json")


def pipeline(folder: Path, sink: TwoPhaseCommitSink) -> Pipeline:
    (folder / "rows").mkdir()

    @unbounded_source
    def rows(context: StageContext) -> DataFrame:
        return context.spark.readStream.schema("v bigint").json(str(folder / "rows"))

    @stage(sink=sink)
    def table(rows: DataFrame) -> DataFrame:
        return rows

    return Pipeline("latency", [rows, table])
