"""KafkaSink passes the suite for sinks, on a real broker; the readers are consumers of committed messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from bench.kafka_broker import KafkaBroker
from dagster_checkpoints.sinks import KafkaSink
from dagster_checkpoints.testing import SinkConformance
from tests.sinks.suites import TargetConformance

SERVERS = "DAGSTER_CHECKPOINTS_TEST_KAFKA"


class KafkaRows(SinkConformance):
    crash_points = 1
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def server(self, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv(SERVERS, kafka.servers)  # the processes of the crash test read it
        yield

    @staticmethod
    def topic(folder: Path) -> str:
        return str(folder)[-100:].replace("/", ".")

    def make_sink(self, folder: Path) -> KafkaSink:
        topic, broker = self.topic(folder), connected()
        if topic not in broker.topics():
            broker.create_topic(topic)
        return KafkaSink(topic, os.environ[SERVERS], staging=folder / "staging", **self.settings)

    def read(self, folder: Path) -> Sequence[int]:
        topic = self.topic(folder)
        broker = connected()
        if topic not in broker.topics():
            return []
        return [msgspec.json.decode(message.value() or b"")["n"] for message in broker.messages(topic)]


def connected() -> KafkaBroker:
    """The broker whose address the environment holds; it cannot be started or stopped."""
    from confluent_kafka.admin import AdminClient

    class Connected(KafkaBroker):
        def __init__(self) -> None:
            self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})

        @property
        def servers(self) -> str:
            return os.environ[SERVERS]

    return Connected()


class TestKafka(TargetConformance, KafkaRows):
    older_restore = "refuses"
    crash_points = 4


class TestKafkaThatWritesAgain(KafkaRows):
    """Read as a compacted topic: the newest message of each key counts."""

    older_restore = "rewrites"
    new_start = "keep"
    settings: ClassVar[dict[str, Any]] = {"older_restore": "write_again", "at_new_start": "keep", "key": "text"}

    def read(self, folder: Path) -> Sequence[int]:
        return sorted(set(super().read(folder)))
