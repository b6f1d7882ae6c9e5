"""The partitions of Kafka topics, or ranges of their offsets, as splits.

Kafka's own Java client asks the cluster which topics and partitions there are, and the offsets at which they begin and end.
Spark's connector brings it along, and it takes the options of Spark's source: the answers come from the cluster that the rows are
read from, with the same credentials.

Source: https://kafka.apache.org/documentation/#adminapi
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from dagster_checkpoints.pipeline import DiscoveryContext
from dagster_checkpoints.pipeline.setting_values import is_count
from dagster_checkpoints.sources.errors import InvalidSource, SourceError, SourceLibraryMissing, SourceUnavailable
from dagster_checkpoints.spark.query.source_checks import COMMITS_OFFSETS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


_SERVERS = "kafka.bootstrap.servers"
_SET_BY_THE_SPLITS = frozenset(
    {
        "assign",
        "endingoffsets",
        "endingoffsetsbytimestamp",
        "endingtimestamp",
        "maxoffsetspertrigger",
        "startingoffsets",
        "startingoffsetsbytimestamp",
        "startingtimestamp",
        "subscribe",
        "subscribepattern",
    }
)
"""Options of Spark's source that say which messages are read, in lower case."""


class KafkaSplit(msgspec.Struct, frozen=True):
    """A range of offsets of a partition.

    Attributes:
        topic: Name of the topic.
        partition: Number of the partition.
        start: The first offset.
        end: The offset behind the last one.
    """

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KafkaSplits:
    """The messages that Kafka topics have now: a discovery for a bounded `split_source`, with `split_type=KafkaSplit`.

    A split is a partition, or a range of its offsets; :meth:`read` returns its messages. The topics must keep them until they are
    read: a split with messages that retention has deleted fails the job. Partitions without a message are no split.

    Args:
        topics: Names of topics, or one name.
        options: Options of `spark.read.format("kafka")`, at least `kafka.bootstrap.servers`. Values may be `dg.EnvVar("NAME")`.
            They are not part of a split, and so of no checkpoint.
        pattern: Regular expression of whole names of topics, instead of `topics`.
        start: Messages from this time on; None for all that the topics still have.
        end: Messages before this time; None for those that the topics have at the discovery.
        rows_per_split: Maximum number of offsets in a split; None for whole partitions. The ranges of all partitions are ordered
            by their place in their partition, so that partitions advance together.

    Raises:
        InvalidSource: An argument cannot be used.

    Source: https://spark.apache.org/docs/latest/streaming/structured-streaming-kafka-integration.html

    Examples:
        >>> sales = KafkaSplits("sales", {"kafka.bootstrap.servers": "broker:9092"}, rows_per_split=1_000_000)
    """

    bounded_only: ClassVar[str] = (
        "KafkaSplits gives the messages that topics have at one moment. To go on with those that come, read the topic with "
        'Spark\'s own source, context.spark.readStream.format("kafka"): checkpoints hold its position (docs/sources/kafka.md)'
    )
    """Why an unbounded source cannot have this discovery: `split_source` refuses it with this text."""

    topics: str | Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    pattern: str | None = None
    start: dt.datetime | None = None
    end: dt.datetime | None = None
    rows_per_split: int | None = None

    def __post_init__(self) -> None:
        if bool(self.names) == bool(self.pattern) or not all(isinstance(name, str) and name for name in self.names):
            raise InvalidSource(
                f"KafkaSplits: expected names of topics, or a pattern of them, found topics={self.topics!r} and pattern="
                f"{self.pattern!r}."
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise InvalidSource(
                f"KafkaSplits: expected a regular expression of names of topics, found {self.pattern!r}: {error}."
            ) from None
        self._check_options()
        times = [each for each in (self.start, self.end) if each is not None]
        if any(not isinstance(each, dt.datetime) or each.tzinfo is None for each in times) or times != sorted(set(times)):
            raise InvalidSource(
                "KafkaSplits: expected start and end to be of datetime.datetime with a time zone, and start to be before end, "
                f"found {self.start!r} and {self.end!r}."
            )
        rows = self.rows_per_split
        if rows is not None and not is_count(rows, least=1):
            raise InvalidSource(f"KafkaSplits: expected rows_per_split of at least 1, or None, found {rows!r}.")

    def _check_options(self) -> None:
        if not isinstance(self.options, Mapping) or _SERVERS not in self.options:
            raise InvalidSource(
                f"KafkaSplits: expected options of spark.read.format('kafka'), with {_SERVERS}: "
                f'options={{"{_SERVERS}": "broker:9092"}}.'
            )
        wrong = [name for name in self.options if name.lower() in _SET_BY_THE_SPLITS]
        if wrong:
            raise InvalidSource(
                f"KafkaSplits: expected no option that says which messages are read, found {wrong[0]!r}. Set topics or pattern, "
                "start, end and rows_per_split instead."
            )
        commits = [name for name in self.options if name.lower() == COMMITS_OFFSETS]
        if commits:
            raise InvalidSource(
                f"KafkaSplits: expected no option {commits[0]!r}, which belongs to an unbounded source: instances read splits in "
                "any order, and a consumer group has one offset for each partition. Remove it."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The topics that are named."""
        return (self.topics,) if isinstance(self.topics, str) and self.topics else tuple(self.topics or ())

    def __call__(self, context: DiscoveryContext) -> list[KafkaSplit]:
        """The splits of the messages that the topics have now; a list, since they belong to one moment.

        Raises:
            SourceUnavailable: The cluster did not answer.
            InvalidSource: There is no such topic, or no right to read it; or the source is unbounded.
            SourceLibraryMissing: The session does not have Spark's connector for Kafka.
        """
        asked_by = f"KafkaSplits of {context.stage!r}"
        if not context.bounded:
            raise InvalidSource(f"{asked_by}: expected a bounded source: {self.bounded_only}.")
        if self._values().get("failondataloss", "").lower() == "false":
            context.log.warning(
                f"{asked_by} has failOnDataLoss=false: rows that Kafka has deleted before they were read are skipped, without an "
                "error."
            )
        with KafkaAdmin(context.spark, self._values(), asked_by) as admin:
            partitions = admin.partitions(self._chosen(admin.topics(), asked_by))
            # The ends before the beginnings: what retention deletes in between is not part of a split.
            ends = admin.latest(partitions)
            if self.end is not None:
                ends |= admin.at(self.end, partitions)
            starts = admin.earliest(partitions) if self.start is None else {**ends, **admin.at(self.start, partitions)}
        return in_order(starts, ends, self.rows_per_split)

    def read(self, spark: SparkSession, split: KafkaSplit) -> DataFrame:
        """The messages of a split, with the columns of Spark's source, such as `key`, `value`, `offset` and `timestamp`.

        Args:
            spark: The session: `context.spark`.
            split: One of the splits.
        """
        partition = str(split.partition)
        return (
            spark.read.format("kafka")
            .options(**self._values())
            .option("assign", json.dumps({split.topic: [split.partition]}))
            .option("startingOffsets", json.dumps({split.topic: {partition: split.start}}))
            .option("endingOffsets", json.dumps({split.topic: {partition: split.end}}))
            .load()
        )

    def _chosen(self, found: Sequence[str], asked_by: str) -> list[str]:
        if self.pattern is None:
            missing = sorted(set(self.names) - set(found))
            if missing:
                raise InvalidSource(
                    f"{asked_by}: expected the topics {', '.join(sorted(self.names))}, found none that is named {missing[0]!r} "
                    f"in the cluster {self._values()[_SERVERS]}, or no right to describe it. Check the name and the options."
                )
            return sorted(set(self.names))
        chosen = [name for name in found if re.fullmatch(self.pattern, name)]
        if not chosen:
            raise InvalidSource(
                f"{asked_by}: expected topics whose whole names match {self.pattern!r}, found none among the {len(found)} of the "
                f"cluster {self._values()[_SERVERS]}. Check the pattern and the options."
            )
        return chosen

    def _values(self) -> dict[str, str]:
        """The options by name in lower case, as Spark and Kafka take them: as texts."""
        return {name.lower(): _text(name, value) for name, value in self.options.items()}


def in_order(starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], rows: int | None) -> list[KafkaSplit]:
    """The splits of partitions, in the order in which they are read.

    Ranges are ordered by their place in their partition, in proportion to its length: partitions of one topic mostly span the
    same time, whatever number of messages each has.

    Args:
        starts: By partition, its first offset.
        ends: By partition, the offset behind the last one.
        rows: Maximum number of offsets in a split; None for whole partitions.
    """
    splits: list[tuple[float, TopicPartition, int]] = []
    for partition, end in ends.items():
        start = starts[partition]
        step = rows or max(1, end - start)
        splits += (((first - start) / (end - start), partition, first) for first in range(start, end, step))
    return [
        KafkaSplit(*partition, first, min(ends[partition], first + rows if rows else ends[partition]))
        for _, partition, first in sorted(splits)
    ]


def _text(name: str, value: Any) -> str:
    variable = getattr(value, "env_var_name", None)
    if isinstance(variable, str):
        if not os.environ.get(variable):
            raise InvalidSource(
                f"KafkaSplits: expected the value of {name} in the environment variable {variable}, found that it is not set. "
                "Set it for the process of the run."
            )
        return os.environ[variable]
    return str(value).lower() if isinstance(value, bool) else str(value)
