"""The topics of a KafkaSink as the cluster describes them: the target, and the ledger topic beside it.

Must not know what messages mean.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.systems.errors import InvalidSinkTopic, SinkTargetChanged

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
