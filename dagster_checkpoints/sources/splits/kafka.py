"""The partitions of Kafka topics, or ranges of their offsets, as splits."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from dagster_checkpoints.pipeline import DiscoveryContext
from dagster_checkpoints.pipeline.number_values import is_count
from dagster_checkpoints.sources.errors import InvalidSource
from dagster_checkpoints.sources.splits.kafka_admin import KafkaAdmin, TopicPartition
from dagster_checkpoints.spark.query.source_checks import COMMITS_OFFSETS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
