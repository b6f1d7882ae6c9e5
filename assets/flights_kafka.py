"""Kafka in the flights pipeline: the live flights as a topic (SOURCE=kafka), the tables as topics (SINK=kafka).

KAFKA_SERVERS names the brokers. `make run` starts a broker of its own, from jars of Maven Central.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from assets.flights_data import AIRPORTS, FLIGHTS, FlightsData

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SERVERS = "KAFKA_SERVERS"
_JARS = "KAFKA_CONNECTOR_JARS"
_LIVE = "flights-live"
SOURCES = ("files", "kafka")


def kind_of_source() -> str:
    """The value of SOURCE.

    Raises:
        ValueError: It is not one of `SOURCES`.
    """
    kind = os.environ.get("SOURCE") or SOURCES[0]
    if kind not in SOURCES:
        raise ValueError(f"expected the environment variable SOURCE to be one of {', '.join(SOURCES)}, found {kind!r}")
    return kind


@contextmanager
def running_broker(topics: tuple[str, ...]) -> Iterator[None]:
    """A broker with these topics and that of the live flights; the environment says where it is.

    Raises:
        JarsUnavailable: Its jars cannot be fetched.
    """
    from bench.kafka_broker import BROKER, CONNECTOR, KafkaBroker
    from bench.maven_jars import fetched
    from dagster_checkpoints.spark.session.java import find_java_home

    java = f"{find_java_home()}/bin/java"
    connector = fetched(CONNECTOR, java)
    broker = KafkaBroker(java, fetched(BROKER, java))
    try:
        broker.create_topic(_LIVE, len(AIRPORTS))
        for topic in topics:
            broker.create_topic(topic)
        os.environ |= {SERVERS: broker.servers, _JARS: ",".join(map(str, connector))}
        yield
    finally:
        broker.close()


def spark_settings() -> dict[str, str]:
    """The settings of a session that reads from Kafka; none if no jars are named."""
    jars = os.environ.get(_JARS)
    return {"spark.jars": jars} if jars else {}


def send_flights(airport: str, file: Path) -> None:
    """Send the flights of one day and airport; each airport has a partition of the topic."""
    import pyarrow.parquet as pq
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": os.environ[SERVERS], "enable.idempotence": True})
    for row in pq.read_table(file).to_pylist():
        value = json.dumps({**row, "ts": row["ts"].isoformat()})
        producer.produce(_LIVE, value, partition=AIRPORTS.index(airport))
    producer.flush()


def live_flights(spark: SparkSession, airport: str) -> DataFrame:
    """The stream of the live flights of one airport."""
    from pyspark.sql import functions as F

    options = {
        "kafka.bootstrap.servers": os.environ[SERVERS],
        "assign": json.dumps({_LIVE: [AIRPORTS.index(airport)]}),
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "1000",
    }
    messages = spark.readStream.format("kafka").options(**options).load()
    return messages.select(F.from_json(F.col("value").cast("string"), FLIGHTS).alias("flight")).select("flight.*")


def staging_directory(data: FlightsData) -> Path:
    """Where rows wait that a sink has not sent yet."""
    return data.root / "staging"


def rows_of_topic(spark: SparkSession, topic: str, schema: StructType) -> DataFrame:
    """The rows that a sink has sent to a topic."""
    from pyspark.sql import functions as F

    from bench.kafka_broker import messages_of

    values = [((message.value() or b"").decode(),) for message in messages_of(os.environ[SERVERS], topic)]
    parsed = spark.createDataFrame(values, "value STRING").select(F.from_json("value", schema).alias("row"))
    return parsed.select("row.*")
