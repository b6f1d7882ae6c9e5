"""The topics of a KafkaSink as the cluster describes them: the target, and the ledger topic beside it.

The ledger topic is compacted, has one partition, and is read whole at each start. It holds the ledger of each instance, recorded
in one Kafka transaction with the messages::

    ["ledger", "flights", "delays", 0]    the ledger of instance 0 (see sinks/ledger.py)

Committed offsets of a consumer group would do as well while the pipeline runs, but brokers delete them after a week without
consumers (``offsets.retention.minutes``), and a pipeline may be suspended for longer. Messages of a compacted topic stay. Must
not know what messages mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.sinks.ledger import Ledger, stored_ledger
from dagster_checkpoints.systems.errors import InvalidSinkTopic, SinkTargetChanged, SinkUnavailable

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient


_DEFAULT_MESSAGE_BYTES = 1_000_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A topic.

    Args:
        name: its name.
        partitions: number of partitions.
        replicas: the least number of replicas of a partition.
        message_bytes: the largest batch of messages that it accepts, in bytes.
        compacted: whether only the newest message of a key is kept, and none expires.
    """

    name: str
    partitions: int
    replicas: int
    message_bytes: int
    compacted: bool


class KafkaTopics:
    """Questions about topics.

    Args:
        cluster: the cluster.
        sink: the sink as errors name it.
    """

    def __init__(self, cluster: KafkaCluster, sink: str) -> None:
        self._cluster = cluster
        self._sink = sink
        self._admin: AdminClient = cluster.admin()

    def target(self, name: str) -> KafkaTopic:
        """The topic that the sink writes to.

        Raises:
            InvalidSinkTopic: there is no such topic, or no access to it.
            SinkUnavailable: the cluster does not answer.
        """
        found = self.find(name)
        if found is None:
            raise InvalidSinkTopic(
                f"{self._sink}: expected a topic {name!r}, found none in the cluster. The sink does not create it, since its "
                f"partitions and replicas are your choice: kafka-topics.sh --create --topic {name} --partitions ..."
            )
        return found

    def find(self, name: str) -> KafkaTopic | None:
        """A topic; None if there is none. Raises what :meth:`target` raises."""
        from confluent_kafka import TopicCollection

        doing = f"looking up topic {name!r}"
        try:
            described = self._answer(doing, self._admin.describe_topics, TopicCollection([name]))
        except SinkTargetChanged:
            return None
        settings = self._settings(name)
        return KafkaTopic(
            name,
            len(described.partitions),
            min(len(partition.replicas) for partition in described.partitions),
            int(settings.get("max.message.bytes", _DEFAULT_MESSAGE_BYTES)),
            settings.get("cleanup.policy", "compact") == "compact",
        )

    def create_compacted(self, name: str, replicas: int) -> None:
        """Create a compacted topic of one partition, unless there is one."""
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        settings = {
            "cleanup.policy": "compact",
            "segment.bytes": "16777216",  # the newest segment is not compacted, and a start reads the whole topic
            "min.cleanable.dirty.ratio": "0.1",
        }
        topic = NewTopic(name, num_partitions=1, replication_factor=replicas, config=settings)
        doing = f"creating the compacted topic {name!r} of one partition"
        self._answer(doing, self._admin.create_topics, [topic], accept="TOPIC_ALREADY_EXISTS")

    def _settings(self, name: str) -> dict[str, str]:
        """The topic's settings; none if this user may not read them."""
        from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

        doing, resource = f"reading the settings of topic {name!r}", ConfigResource(ResourceType.TOPIC, name)
        found = self._answer(doing, self._admin.describe_configs, [resource], accept="TOPIC_AUTHORIZATION_FAILED")
        return {} if found is None else {key: entry.value for key, entry in found.items()}

    def _answer(self, doing: str, ask: Callable[..., dict[Any, Future[Any]]], subject: Any, accept: str = "") -> Any:
        """The answer to a question about one subject; None for the error with the accepted name."""
        from confluent_kafka import KafkaException

        try:
            (future,) = ask(subject, request_timeout=self._cluster.request_seconds).values()
            return future.result(self._cluster.request_seconds + 5)
        except (KafkaException, TimeoutError) as error:
            if isinstance(error, KafkaException) and error.args[0].name() == accept:
                return None
            self._admin.poll(0)  # lets the client report why a broker cannot be reached
            raise self._cluster.failed(error, doing) from None


_SUFFIX = "-dagster-checkpoints"
_LONGEST_NAME = 249
_PATIENCE = 5.0
_FORMER = ("owner", "job")
"""The kinds of keys in the format of earlier releases."""


@dataclass(frozen=True, slots=True)
class LedgerValues:
    """The newest values of a ledger topic.

    Args:
        values: the encoded values, by encoded key.
        topic: the topic's name, for errors.
    """

    values: Mapping[bytes, bytes] = field(default_factory=dict)
    topic: str = ""

    def ledger(self, scope: SinkScope) -> Ledger | None:
        """The instance's ledger; None if it was never opened with this topic. Raises SinkPathInUse."""
        value = self.values.get(ledger_key(scope))
        return None if value is None else self._decoded(value)

    def of_stage(self, scope: SinkScope) -> dict[int, Ledger]:
        """The ledgers of the stage's instances, by index. Raises SinkPathInUse."""
        found: dict[int, Ledger] = {}
        for key, value in self.values.items():
            match msgspec.json.decode(key):
                case ["ledger", scope.pipeline, scope.stage, int(index)]:
                    found[index] = self._decoded(value)
        return found

    def _decoded(self, value: bytes) -> Ledger:
        return stored_ledger(value, f"the topic {self.topic!r}")

    def is_of_earlier_release(self, scope: SinkScope) -> bool:
        """Whether an earlier release has recorded something of the stage."""
        keys = (msgspec.json.decode(key) for key in self.values)
        return any(key[0] in _FORMER and key[1:3] == [scope.pipeline, scope.stage] for key in keys)


def ledger_key(scope: SinkScope) -> bytes:
    """The key of an instance's ledger."""
    return msgspec.json.encode(["ledger", scope.pipeline, scope.stage, scope.index])


class LedgerBlocked(SinkUnavailable):
    """A transaction in the ledger topic stays open: what was committed behind it cannot be read before its end."""


def ledger_topic_name(topic: str) -> str:
    """The name of a target's ledger topic.

    Raises:
        ValueError: the name would be longer than Kafka allows.
    """
    name = topic + _SUFFIX
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"expected a topic's name of at most {_LONGEST_NAME - len(_SUFFIX)} characters, found {topic!r}")
    return name


class LedgerTopic:
    """The ledger topic of a target.

    Args:
        cluster: the cluster.
        topic: the target's name.
        sink: the sink as errors name it.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, sink: str) -> None:
        self.name = ledger_topic_name(topic)
        self._cluster = cluster
        self._sink = sink

    def create(self, topics: KafkaTopics, target: KafkaTopic) -> None:
        """Create the topic, with as many replicas as the target has, unless there is one.

        Raises:
            InvalidSinkTopic: it may not be created, or there is one that does not keep the newest value of every key.
            SinkUnavailable: the cluster does not answer.
        """
        found = topics.find(self.name)
        until = time.monotonic() + self._cluster.request_seconds
        while found is None:
            topics.create_compacted(self.name, target.replicas)
            found = topics.find(self.name)  # brokers hear of a new topic one after the other
            if found is None and time.monotonic() > until:
                raise SinkUnavailable(f"{self._sink}: expected the topic {self.name!r} after its creation, found none")
        if found.partitions != 1 or not found.compacted:
            raise InvalidSinkTopic(
                f"{self._sink}: expected the topic {self.name!r} to have one partition and cleanup.policy=compact, found "
                f"{found.partitions} partitions and cleanup.policy={'compact' if found.compacted else 'another'}. The sink "
                "records there what it has committed: delete the topic if another program has created it, and let the sink "
                "create it"
            )

    def read_committed(self) -> LedgerValues:
        """The newest committed value of every key, in front of the oldest open transaction: does not wait for its end.

        Raises:
            SinkUnavailable: the cluster does not answer.
        """
        return self._read(committed=True)

    def read(self) -> LedgerValues:
        """The newest committed value of every key, of all transactions that began before the call.

        Raises:
            LedgerBlocked: one of them stays open.
            SinkUnavailable: the cluster does not answer.
        """
        return self._read(committed=False)

    def _read(self, committed: bool) -> LedgerValues:
        from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

        doing = f"reading the ledger topic {self.name!r}"
        values: dict[bytes, bytes] = {}
        consumer = self._cluster.consumer()
        readable: int | None = None
        try:
            end = self._end(committed)
            consumer.list_topics(
                self.name, self._cluster.request_seconds
            )  # otherwise the consumer waits half a second before it asks
            consumer.assign([TopicPartition(self.name, 0, OFFSET_BEGINNING)])
            until = time.monotonic() + self._cluster.request_seconds
            while time.monotonic() < until:
                message = consumer.poll(0.2)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    until = time.monotonic() + self._cluster.request_seconds
                    key, value = message.key(), message.value()
                    if key is not None and value is not None:
                        values[key] = value
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                elif (readable := message.offset() or 0) >= end:
                    return LedgerValues(values, self.name)
                else:
                    until = min(until, time.monotonic() + _PATIENCE)
        except KafkaException as error:
            raise self._cluster.failed(error, doing) from None
        finally:
            consumer.close()
        if readable is not None:
            raise LedgerBlocked(
                f"{self._sink}: while {doing}: expected that every transaction in front of offset {end} ends, found one at "
                f"offset {readable} that stays open. It is another sink's: its run ends it when it starts again, or the brokers "
                "after its transaction.timeout.ms"
            )
        raise SinkUnavailable(
            f"{self._sink}: while {doing}: expected its end at offset {end}, found nothing new for "
            f"{self._cluster.request_seconds:.0f} s"
        )

    def _end(self, committed: bool) -> int:
        """The end of the topic, or of what is in front of open transactions."""
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        admin = self._cluster.admin()  # answers nothing once it is garbage
        asked = admin.list_offsets(
            {TopicPartition(self.name, 0): OffsetSpec.latest()},  # type: ignore[no-untyped-call]
            isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
            request_timeout=self._cluster.request_seconds,
        )
        (future,) = asked.values()
        return int(future.result(self._cluster.request_seconds + 5).offset)
