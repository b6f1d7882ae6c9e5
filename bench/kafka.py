"""Kafka as a source, through a pipeline and by a hand-written query; and KafkaSink against Spark's own writer to Kafka."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import maven_jars
from bench.environment import BenchFailed, Environment
from bench.kafka_broker import BROKER, CONNECTOR, KafkaBroker, add_connector
from bench.measures import Measure, at_least
from bench.sink_runs import batch_of_sales, run_batches
from dagster_checkpoints.pipeline import Pipeline, bounded_source
from dagster_checkpoints.sinks import KafkaSink, ParquetSink
from dagster_checkpoints.spark.session.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SOURCE, SINK = "Kafka source", "Kafka sink"
PARTITIONS = 4
BATCHES = 4


@contextmanager
def running_broker(environment: Environment) -> Iterator[KafkaBroker | None]:
    """A broker, and a session with Spark's connector; None where their jars cannot be fetched."""
    java = f"{find_java_home()}/bin/java"
    try:
        jars, connector = maven_jars.fetched(BROKER, java), maven_jars.fetched(CONNECTOR, java)
    except maven_jars.JarsUnavailable as problem:
        environment.say(f"  skipped: {problem}")
        yield None
        return
    add_connector(environment.spark, connector)
    broker = KafkaBroker(java, jars)
    try:
        yield broker
    finally:
        broker.close()


def measure_source(environment: Environment) -> Iterator[Measure]:
    """The same stream to its end in five micro-batches or so, written as Parquet."""
    with running_broker(environment) as broker:
        if broker is None:
            return
        count = min(environment.rows, 2_000_000)
        broker.create_topic("sales", PARTITIONS)
        _as_json(batch_of_sales(environment, count, 0)).write.format("kafka").options(**_where(broker, "sales")).save()
        plain: list[float] = []
        ours: list[float] = []
        for _ in range(environment.repeats):
            plain.append(_plain(environment, broker, count))
            ours.append(_pipeline(environment, broker, count))
        yield Measure(SOURCE, "rows/s through a pipeline", count / median(ours), "rows/s")
        ratio = median(a / b for a, b in zip(plain, ours, strict=True))
        note = f"{count:,} messages; the pipeline's time includes its start and its final checkpoint"
        yield at_least(SOURCE, "rate / rate of a hand-written query", ratio, "", 0.9, note)


def measure_sink(environment: Environment) -> Iterator[Measure]:
    """The rows of some DataFrames as JSON messages, sent by Spark and by the sink."""
    with running_broker(environment) as broker:
        if broker is None:
            return
        count = min(environment.rows, 800_000) // BATCHES
        spark: list[float] = []
        ours: list[float] = []
        alone: list[float] = []
        for number in range(environment.repeats):
            for topic in (f"spark-{number}", f"sink-{number}"):
                broker.create_topic(topic, PARTITIONS)
            began = time.perf_counter()
            for batch in range(BATCHES):
                frame = _as_json(batch_of_sales(environment, count, batch))
                frame.write.format("kafka").options(**_where(broker, f"spark-{number}")).save()
            spark.append(time.perf_counter() - began)
            folder = environment.fresh("kafka-sink")
            sink = KafkaSink(f"sink-{number}", broker.servers, staging=folder / "staging")
            segments, sending = run_batches(environment, sink, folder, count, BATCHES)
            ours.append(segments + sending)
            alone.append(sending)
            if (found := broker.count(f"sink-{number}")) != BATCHES * count:
                raise BenchFailed(f"KafkaSink: expected {BATCHES * count:,} messages, found {found:,}")
        note = f"{BATCHES} batches of {count:,} rows, a checkpoint after each; Spark's writer has no transaction"
        yield Measure(SINK, "rows/s of the sink alone", BATCHES * count / median(alone), "rows/s")
        ratio = median(a / b for a, b in zip(spark, ours, strict=True))
        yield at_least(SINK, "rows/s, Spark and the sink / Spark's writer", ratio, "", 0.8, note)


def _as_json(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("to_json(struct(*)) AS value")


def _where(broker: KafkaBroker, topic: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": broker.servers, "topic": topic}


def _read(environment: Environment, broker: KafkaBroker, count: int) -> DataFrame:
    options: dict[str, Any] = {
        "kafka.bootstrap.servers": broker.servers,
        "subscribe": "sales",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": count // 5,
    }
    messages = environment.spark.readStream.format("kafka").options(**options).load()
    return messages.selectExpr(
        "from_json(CAST(value AS STRING), 'id LONG, shop STRING, amount DOUBLE, ts TIMESTAMP') AS row", "offset"
    )


def _plain(environment: Environment, broker: KafkaBroker, count: int) -> float:
    folder = environment.fresh("kafka-plain")
    began = time.perf_counter()
    writer = (
        _read(environment, broker, count).writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    )
    writer.trigger(availableNow=True).start(str(folder / "out")).awaitTermination()
    took = time.perf_counter() - began
    _check(environment, folder / "out", count)
    return took


def _pipeline(environment: Environment, broker: KafkaBroker, count: int) -> float:
    folder = environment.fresh("kafka-pipeline")

    @bounded_source(sink=ParquetSink(folder / "out"))
    def sales(context: Any) -> Any:
        return _read(environment, broker, count)

    seconds = environment.run_job(Pipeline("sales", [sales]), folder).seconds
    _check(environment, folder / "out", count)
    return seconds


def _check(environment: Environment, folder: Path, count: int) -> None:
    found = environment.spark.read.parquet(str(folder)).count()
    if found != count:
        raise BenchFailed(f"{folder}: expected {count:,} rows, found {found:,}")
