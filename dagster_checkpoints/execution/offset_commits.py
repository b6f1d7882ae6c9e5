"""Which offsets of a Kafka source a task commits to a consumer group, for monitoring: those of the newest completed checkpoint.

A restore takes the offsets of its checkpoint, and never reads those of the group. Must not know Kafka's client.

Source: "Consumer Offset Committing",
https://nightlies.apache.org/flink/flink-docs-stable/docs/connectors/datastream/kafka/#consumer-offset-committing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PartitionOffsets = Mapping[tuple[str, int], int]
"""By topic and number of the partition, the offset of the next message to read."""


class OffsetCommits:
    """The offsets of one source."""

    def __init__(self) -> None:
        self._pinned: dict[int, PartitionOffsets] = {}
        self._due: PartitionOffsets | None = None
        self._warned = False

    def pin(self, checkpoint_id: int, offset: Any) -> None:
        """A snapshot of the task covers the source up to an offset.

        Args:
            checkpoint_id: The checkpoint that the snapshot is for.
            offset: The offset as Spark's log has it, ``{"topic": {"0": 120}}``; None before the first message.
        """
        if offset is not None:
            self._pinned[checkpoint_id] = {
                (topic, int(partition)): next_read
                for topic, partitions in offset.items()
                for partition, next_read in partitions.items()
            }

    def complete(self, checkpoint_id: int) -> None:
        """A checkpoint is complete: its offsets are due, if this attempt has taken it, in place of older ones."""
        self._due = self._pinned.get(checkpoint_id, self._due)
        self._pinned = {taken: offsets for taken, offsets in self._pinned.items() if taken > checkpoint_id}

    def take(self) -> PartitionOffsets | None:
        """The offsets to commit now; None if there are none."""
        due, self._due = self._due, None
        return due

    def fail(self) -> bool:
        """A commit has failed, and is not repeated: the next checkpoint commits newer offsets.

        Returns:
            Whether to warn: the first time only.
        """
        first, self._warned = not self._warned, True
        return first
