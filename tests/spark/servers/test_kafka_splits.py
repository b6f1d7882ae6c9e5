"""A Kafka topic as splits, with a real broker: what is discovered, and that each message is read once."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from bench.free_ports import free_port
from bench.kafka_broker import KafkaBroker, add_connector
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.pipeline import DiscoveryContext, Pipeline, split_source
from dagster_checkpoints.sources import InvalidSource, KafkaSplit, KafkaSplits, SourceUnavailable
from dagster_checkpoints.spark.errors import SourceRowsLostError

ROWS = "text STRING, partition INT, offset LONG"


@pytest.fixture
def lab(lab: Any, kafka_jars: list[Path]) -> Any:
    """The test environment, whose session has Spark's connector, as with the setting `spark.jars`."""
    add_connector(lab.spark, kafka_jars)
    return lab


def options(kafka: KafkaBroker, **others: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": kafka.servers, **{name.replace("_", "."): value for name, value in others.items()}}


def numbered(first: int, end: int) -> list[str]:
    return [f"{n:05d}" for n in range(first, end)]


def source(splits: KafkaSplits, discover: Any, read: Any = None, **settings: Any) -> Any:
    @split_source(schema=ROWS, discover=discover, split_type=KafkaSplit, **settings)
    def past(context: Any, split: KafkaSplit) -> Any:
        if read is not None:
            read(split)
        return splits.read(context.spark, split).selectExpr("CAST(value AS STRING) AS text", "partition", "offset")

    return past


def test_each_message_is_read_once_through_a_failure_and_by_other_instances(lab: Any, kafka: KafkaBroker) -> None:
    """One partition is empty; one has a transaction, an aborted one, and one that is open when the splits are discovered."""
    kafka.create_topic("ranges", 4)
    kafka.send("ranges", numbered(0, 200), 0)
    kafka.send("ranges", numbered(300, 390), 3)
    writer = Producer({"bootstrap.servers": kafka.servers, "transactional.id": "ranges", "log_level": 0})
    writer.init_transactions()

    def transaction(values: Iterable[str]) -> None:
        writer.begin_transaction()
        for value in values:
            writer.produce("ranges", value, partition=2)
        writer.flush()

    transaction(numbered(200, 230))
    writer.commit_transaction()
    transaction(["aborted"] * 15)
    writer.abort_transaction()
    transaction(["open"] * 5)
    splits = KafkaSplits("ranges", options(kafka, kafka_isolation_level="read_committed"), rows_per_split=25)
    failed, reads = threading.Event(), [0]

    def fail_after_a_commit(split: KafkaSplit) -> None:
        reads[0] += 1
        until = time.monotonic() + 3.0  # the barrier of a checkpoint passes between two splits
        while reads[0] > 4 and not lab.count() and time.monotonic() < until:
            time.sleep(0.1)
        if lab.count():
            failed.set()
            raise RuntimeError("an engine without a plane")

    def pipeline(*instances: str, read: Any = None) -> Pipeline:
        return Pipeline("ranges", [source(splits, splits, read, instances=instances, sink=lab.sink())])

    job = lab.start(pipeline("a", "b", read=fail_after_a_commit), interval=0.3, restart=NoRestart())
    assert job.result().status == "FAILED" and failed.is_set(), job.story()
    before = lab.count()
    assert 0 < before < 320
    writer.commit_transaction()
    kafka.send("ranges", ["later"], 1)
    lab.start(pipeline("c", "a", "b"), interval=0.3).finished()
    expected = numbered(0, 230) + numbered(300, 390)
    found = lab.committed()
    assert sorted(row[0] for row in found) == expected
    assert len({row[1:] for row in found}) == len(expected)

    # Without read_committed: three of the offsets are markers of transactions, also the last one.
    everything = KafkaSplits("ranges", options(kafka))
    context = DiscoveryContext(lab.spark, "past", logging.getLogger("tests"))
    (whole,) = (split for split in everything(context) if split.partition == 2)
    assert (whole.start, whole.end, everything.read(lab.spark, whole).count()) == (0, 53, 50)

    kafka.delete_before("ranges", 0, 50)
    lost = Pipeline("lost", [source(splits, [KafkaSplit("ranges", 0, 40, 60)], sink=lab.sink("lost"))])
    error = lab.start(lost).result().error
    assert isinstance(error.__cause__, SourceRowsLostError) and "retention has deleted them" in str(error), error


def test_the_splits_of_topics(lab: Any, kafka: KafkaBroker) -> None:
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for name in ("shop-1", "shop-2", "my-shop-1"):
        kafka.create_topic(name, 2)
    sender = Producer({"bootstrap.servers": kafka.servers, "log_level": 0})
    for hour in range(6):
        sender.produce("shop-1", str(hour), partition=1, timestamp=round((at + dt.timedelta(hours=hour)).timestamp() * 1000))
    sender.flush()
    kafka.send("my-shop-1", ["x"], 0)
    kafka.delete_before("shop-1", 1, 1)

    def found(*topics: str, stage: str = "past", **arguments: Any) -> list[KafkaSplit]:
        context = DiscoveryContext(lab.spark, stage, logging.getLogger("tests"))
        return KafkaSplits(**{"topics": topics, "options": options(kafka), **arguments})(context)

    def hours(number: float) -> dt.datetime:
        return at + dt.timedelta(hours=number)

    assert found("shop-1", "shop-2") == found(pattern="shop-.*") == [KafkaSplit("shop-1", 1, 1, 6)]
    assert found("my-shop-1", "shop-1") == [KafkaSplit("my-shop-1", 0, 0, 1), KafkaSplit("shop-1", 1, 1, 6)]
    assert found("shop-1", start=hours(2), end=hours(3.5)) == [KafkaSplit("shop-1", 1, 2, 4)]
    assert found("shop-1", start=hours(4), end=hours(99)) == [KafkaSplit("shop-1", 1, 4, 6)]
    assert found("shop-1", start=hours(99)) == found("shop-1", end=hours(-1)) == []
    (split,) = found("shop-1", start=hours(2), end=hours(3.5))
    rows = KafkaSplits("shop-1", options(kafka)).read(lab.spark, split).collect()
    assert [(row.value, row.offset) for row in rows] == [(b"2", 2), (b"3", 3)]
    with pytest.raises(InvalidSource, match=r"'past': expected the topics nosuch, shop-1, found none that is named 'nosuch'"):
        found("shop-1", "nosuch")
    with pytest.raises(InvalidSource, match=r"whole names match 'shop', found none among the \d+ of"):
        found(pattern="shop")
    with pytest.raises(InvalidSource, match=r"while connecting: ConfigException: .*Correct the options"):
        found("shop-1", options=options(kafka, kafka_security_protocol="NONE"))
    away = {"kafka.bootstrap.servers": f"127.0.0.1:{free_port()}", "kafka.default.api.timeout.ms": 600}
    with pytest.raises(SourceUnavailable, match=r"'past': .* while listing the topics: TimeoutException.* its brokers run"):
        found("shop-1", options={**away, "kafka.request.timeout.ms": 500})
