"""The offsets of a query's Kafka sources: how many messages are unread, and the consumer groups that are told what was read.

With the option `minOffsetsPerTrigger` Spark's source gives no messages until there are that many, or a time has passed. Spark
then says what it says of a source without new messages (`KafkaMicroBatchStream.latestOffset`, `delayBatch`).

Kafka's own Java client commits offsets, in the driver. Spark's connector brings it along, and it takes the options of Spark's
source. It joins no group. Must not know checkpoints.

Source: Flink's options `commit.offsets.on.checkpoint` and `group.id` (https://nightlies.apache.org/flink/flink-docs-stable/docs/
connectors/datastream/kafka/#additional-properties), Kafka's `Admin.alterConsumerGroupOffsets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dagster_checkpoints.execution.offset_commits import PartitionOffsets
from dagster_checkpoints.spark.query.plan_nodes import V2_STREAM, streams
from dagster_checkpoints.spark.query.source_checks import COMMITS_OFFSETS, GROUP, source_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_KAFKA = "KafkaV2["
_MINIMUM = "minoffsetspertrigger"


class SourceOffsets(Protocol):
    """A source in Spark's progress: its description, and offsets as JSON, ``{"topic": {"0": 120}}`` for Kafka."""

    @property
    def description(self) -> str: ...

    @property
    def endOffset(self) -> str | None: ...

    @property
    def latestOffset(self) -> str | None: ...


def rows_behind(sources: Iterable[SourceOffsets]) -> int | None:
    """The number of messages between what was read and the ends of the topics, when the last micro-batch was planned.

    Args:
        sources: the sources of a query's last progress.

    Returns:
        The sum over all partitions; None if a source is not Kafka's, or has not looked yet.
    """
    total, known = 0, False
    for source in sources:
        if not source.description.startswith(_KAFKA):
            return None
        read, latest = _offsets(source.endOffset), _offsets(source.latestOffset)
        if read is None or latest is None:
            return None
        total += _between(read, latest)
        known = True
    return total if known else None


def streams_with_minimum(frame: DataFrame) -> tuple[int, ...]:
    """The positions of a DataFrame's streams that hold messages back until there are enough of them."""
    return tuple(
        number
        for number, leaf in enumerate(streams(frame))
        if leaf.nodeName() == V2_STREAM and _MINIMUM in {str(name).lower() for name in dict(leaf.extraOptions())}
    )


def reads_only_kafka(frame: DataFrame) -> bool:
    """Whether all streams of a DataFrame are Kafka's, as far as their names say: `kafka`, or a class whose name has it."""
    return all(leaf.nodeName() == V2_STREAM and "kafka" in str(leaf.sourceName()).lower() for leaf in streams(frame))


def rows_between(start: str, end: str) -> int:
    """The number of messages from one offset of a Kafka source to another, both as JSON."""
    return _between(_offsets(start) or {}, _offsets(end) or {})


def _between(start: Mapping[tuple[str, str], int], end: Mapping[tuple[str, str], int]) -> int:
    return sum(max(0, offset - start.get(partition, 0)) for partition, offset in end.items())


def _offsets(text: Any) -> dict[tuple[str, str], int] | None:
    found = json.loads(text) if text else None
    if not isinstance(found, dict):
        return None
    return {(topic, partition): offset for topic, partitions in found.items() for partition, offset in partitions.items()}


_PREFIX = "kafka."
_SECRET = re.compile("password|secret|token|jaas|private|keystore.key", re.IGNORECASE)
_SECONDS = 20
"""How long one commit may take."""


@dataclass(frozen=True)
class KafkaGroup:
    """The consumer group of one source.

    Attributes:
        position: Position of the source's stream among the streams of the query, from 0.
        name: The group's id.
        settings: Settings of Kafka's client, some of which may be secret.
    """

    position: int
    name: str
    settings: Mapping[str, str] = field(repr=False)


class GroupCommitFailed(Exception):
    """Offsets could not be committed; the text has no credentials."""


def groups_of(frame: DataFrame) -> tuple[KafkaGroup, ...]:
    """The groups of a query's Kafka sources that commit their offsets."""
    groups = []
    for position, leaf in enumerate(streams(frame)):
        source = source_of(frame, leaf)
        if source.options.get(COMMITS_OFFSETS, "").lower() == "true":
            settings = {name[len(_PREFIX) :]: value for name, value in source.options.items() if name.startswith(_PREFIX)}
            groups.append(KafkaGroup(position, source.options[GROUP], settings))
    return tuple(groups)


class GroupClient:
    """Commits the offsets of one source.

    Args:
        spark: A session with Spark's connector for Kafka.
        group: The source's group.
    """

    def __init__(self, spark: SparkSession, group: KafkaGroup) -> None:
        self._jvm: Any = spark._jvm  # not `jvm_of`: the connector may have been added after the session's start
        self._group = group
        self._client: Any = None

    def commit(self, offsets: PartitionOffsets) -> None:
        """Commit offsets, and wait for the answer.

        Raises:
            GroupCommitFailed: The offsets are not committed, or it is not known.
        """
        jvm = self._jvm
        try:
            if self._client is None:
                settings = jvm.java.util.HashMap()
                for name, value in self._group.settings.items():
                    settings.put(name, value)
                self._client = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
            values = jvm.java.util.HashMap()
            for (topic, partition), offset in offsets.items():
                of = jvm.org.apache.kafka.common.TopicPartition(topic, partition)
                values.put(of, jvm.org.apache.kafka.clients.consumer.OffsetAndMetadata(offset))
            committed = self._client.alterConsumerGroupOffsets(self._group.name, values).all()
            committed.get(_SECONDS, jvm.java.util.concurrent.TimeUnit.SECONDS)
        except Exception as error:
            raised = getattr(error, "java_exception", None)
            if raised is None:
                raise
            raise GroupCommitFailed(self._text(raised)) from None  # its text may have credentials

    def close(self) -> None:
        """Release the client, without waiting."""
        if self._client is not None:
            self._client.close(self._jvm.java.time.Duration.ZERO)

    def _text(self, raised: Any) -> str:
        while raised.getCause() is not None:
            raised = raised.getCause()
        name, text = str(raised.getClass().getSimpleName()), str(raised.getMessage() or "")
        for setting, value in self._group.settings.items():
            text = text.replace(value, "***") if _SECRET.search(setting) and value else text
        if name in ("UnknownMemberIdException", "GroupNotEmptyException"):
            text = "another program is a member of this group, and commits offsets of its own: give the source a group of its own"
        return f"{name}: {text}" if text else name
