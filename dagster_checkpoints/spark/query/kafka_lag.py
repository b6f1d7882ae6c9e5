"""How many messages of its topics a query has not read yet, from the progress that Spark reports for each micro-batch.

With the option `minOffsetsPerTrigger` Spark's source gives no messages until there are that many, or a time has passed. Spark
then says what it says of a source without new messages (`KafkaMicroBatchStream.latestOffset`, `delayBatch`).

Must not know tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dagster_checkpoints.spark.query.plan_nodes import V2_STREAM, streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
