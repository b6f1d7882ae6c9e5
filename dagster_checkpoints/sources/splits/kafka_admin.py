"""Questions to a Kafka cluster: which topics and partitions there are, and the offsets at which they begin and end.

Kafka's own Java client asks them, in the driver. Spark's connector brings it along, and it takes the options of Spark's source:
the answers come from the cluster that the rows are read from, with the same credentials. It must not know splits.

Source: https://kafka.apache.org/documentation/#adminapi
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from dagster_checkpoints.sources.errors import InvalidSource, SourceError, SourceLibraryMissing, SourceUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TopicPartition = tuple[str, int]
"""A topic's name, and the number of one of its partitions."""
_REPEATS = re.compile(r"Authori[sz]ation|Authentication|Config|Login|Jaas|IllegalArgument|InvalidTopic|UnsupportedVersion")
"""Java's exceptions that another attempt would raise again."""
_SECRET = re.compile("password|secret|token|jaas|private|keystore.key", re.IGNORECASE)
_PREFIX = "kafka."


class KafkaAdmin:
    """A client of a cluster, open inside of a `with` block.

    Args:
        spark: The session, with Spark's connector for Kafka.
        options: Options of Spark's source; used are those that begin with `kafka.`.
        asked_by: The discovery, as errors name it.

    Raises:
        SourceLibraryMissing: The session does not have the connector.
        InvalidSource: Kafka's client refuses an option.
    """

    def __init__(self, spark: SparkSession, options: Mapping[str, str], asked_by: str) -> None:
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        self._asked_by = asked_by
        self._settings = {name[len(_PREFIX) :]: value for name, value in options.items() if name.lower().startswith(_PREFIX)}
        client = self._jvm.org.apache.kafka.clients.admin.AdminClient
        if type(client).__name__ == "JavaPackage":  # what a name without a class is
            raise SourceLibraryMissing(
                f"{asked_by}: expected Spark's connector for Kafka, found that the session does not have it. Name its package in "
                "the resource: spark_config={'spark.jars.packages': 'org.apache.spark:spark-sql-kafka-0-10_2.13:…'}, see "
                "docs/sources/kafka.md."
            )
        self._client = self._asked("connecting", lambda: client.create(self._map(self._settings)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.close()

    def topics(self) -> list[str]:
        """The names of the topics that this user may see, sorted; without Kafka's own."""
        return sorted(map(str, self._asked("listing the topics", lambda: self._client.listTopics().names().get())))

    def partitions(self, topics: Iterable[str]) -> list[TopicPartition]:
        """The partitions of topics, sorted."""
        names = self._jvm.java.util.ArrayList()
        for topic in topics:
            names.add(topic)
        described = self._asked("describing the topics", lambda: self._client.describeTopics(names).allTopicNames().get())
        return sorted((str(topic), int(part.partition())) for topic in described for part in described[topic].partitions())

    def earliest(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets of the first messages that partitions still have."""
        return self._offsets(partitions, self._specification.earliest())

    def latest(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets behind the last messages.

        With `kafka.isolation.level=read_committed` those in front of the first transaction that is still open.
        """
        return self._offsets(partitions, self._specification.latest())

    def at(self, time: dt.datetime, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets of the first messages at this time or later; partitions without one are left out."""
        milliseconds = round(time.timestamp() * 1000)
        found = self._offsets(partitions, self._specification.forTimestamp(milliseconds))
        return {partition: offset for partition, offset in found.items() if offset >= 0}

    @property
    def _specification(self) -> Any:
        return self._jvm.org.apache.kafka.clients.admin.OffsetSpec

    def _offsets(self, partitions: Iterable[TopicPartition], specification: Any) -> dict[TopicPartition, int]:
        partition_of = self._jvm.org.apache.kafka.common.TopicPartition
        level = self._jvm.org.apache.kafka.common.IsolationLevel
        committed = self._settings.get("isolation.level") == "read_committed"
        options = self._jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(
            level.READ_COMMITTED if committed else level.READ_UNCOMMITTED
        )
        asked = self._map({partition_of(*partition): specification for partition in partitions})
        found = self._asked("asking for offsets", lambda: self._client.listOffsets(asked, options).all().get())
        return {(str(each.topic()), int(each.partition())): int(found[each].offset()) for each in found}

    def _map(self, values: Mapping[Any, Any]) -> Any:
        made = self._jvm.java.util.HashMap()
        for name, value in values.items():
            made.put(name, value)
        return made

    def _asked(self, doing: str, ask: Any) -> Any:
        """The answer to a question; raises an error of sources for one of Java's."""
        try:
            return ask()
        except Exception as error:
            raised = getattr(error, "java_exception", None)
            if raised is None:
                raise
            raise self._failed(doing, raised) from None  # its text may have credentials

    def _failed(self, doing: str, raised: Any) -> SourceError:
        names, text = [], ""
        while raised is not None:
            names.append(str(raised.getClass().getSimpleName()))
            text = f"{names[-1]}: {raised.getMessage()}"
            raised = raised.getCause()
        for name, value in self._settings.items():
            text = text.replace(value, "***") if _SECRET.search(name) and value else text
        servers = self._settings.get("bootstrap.servers")
        found = f"{self._asked_by}: expected an answer of the Kafka cluster {servers}, found while {doing}: {text}."
        if any(map(_REPEATS.search, names)):
            return InvalidSource(f"{found} Correct the options, or give this user the right to describe the topics.")
        return SourceUnavailable(f"{found} Check that its brokers run, and kafka.bootstrap.servers.")
