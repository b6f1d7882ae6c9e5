"""Commits the offsets of a task's Kafka sources to consumer groups, each source's on a thread of its own: no task waits for it.

`execution.offset_commits` has the rule. It is for monitoring alone: no error of it reaches the task.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.execution.offset_commits import OffsetCommits, PartitionOffsets
from dagster_checkpoints.spark.query.kafka_offsets import GroupClient, KafkaGroup, groups_of
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.tasks.task_parts import TaskParts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END_SECONDS = 5.0
"""How long the end of a task waits for the commit of its last checkpoint."""


class GroupOffsets:
    """What the Kafka sources of one task commit.

    Args:
        parts: The task's parts.
        log: The offset log of the task's query.
    """

    def __init__(self, parts: TaskParts, log: QueryLog) -> None:
        self._log = log
        kafka = parts.described is not None and any("kafka" in text.lower() for text in parts.described.sources)
        groups = groups_of(parts.plan.frame) if kafka and parts.plan is not None else ()
        self._sources = [
            _SourceOffsets(parts.spark, group, str(parts.id), parts.instances[0].call.context.log) for group in groups
        ]

    def pin(self, checkpoint_id: int, batch_id: int) -> None:
        """A snapshot covers the query up to a batch; -1 for none."""
        if self._sources and batch_id >= 0:
            with suppress(OSError, ValueError, LookupError):
                offsets = self._log.planned(batch_id).sources
                for each in self._sources:
                    each.pin(checkpoint_id, offsets)

    def complete(self, checkpoint_id: int) -> None:
        """A checkpoint is complete."""
        for each in self._sources:
            each.complete(checkpoint_id)

    def close(self, *, wait: bool) -> None:
        """The task has ended.

        Args:
            wait: Whether to wait some seconds for the commit of the last checkpoint: not where the task restarts.
        """
        for each in self._sources:
            each.end()
        for each in self._sources if wait else ():
            each.join(END_SECONDS)


class _SourceOffsets:
    """The offsets of one source, and the thread that commits them."""

    def __init__(self, spark: SparkSession, group: KafkaGroup, task: str, log: logging.Logger) -> None:
        self._spark = spark
        self._group = group
        self._task = task
        self._log = log
        self._changed = threading.Condition()
        self._offsets = OffsetCommits()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"offsets of {task}", daemon=True)

    def pin(self, checkpoint_id: int, offsets: Sequence[Any]) -> None:
        with self._changed:
            self._offsets.pin(checkpoint_id, offsets[self._group.position])

    def complete(self, checkpoint_id: int) -> None:
        with self._changed:
            self._offsets.complete(checkpoint_id)
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        client = GroupClient(self._spark, self._group)
        while (due := self._next()) is not None:
            try:
                client.commit(due)
            except Exception as error:
                self._failed(error)
        with suppress(Exception):  # the session may have ended
            client.close()

    def _next(self) -> PartitionOffsets | None:
        """What is to be committed next; None at the end."""
        with self._changed:
            while (due := self._offsets.take()) is None and not self._ended:
                self._changed.wait()
            return due

    def _failed(self, error: Exception) -> None:
        with self._changed:
            warn = self._offsets.fail() and not self._ended
        if warn:
            self._log.warning(
                "Task %s: offsets of Kafka were not committed to the consumer group %r: %s. The group shows older offsets than "
                "checkpoints hold. The job goes on, and tries again with each checkpoint; this is said once.",
                self._task,
                self._group.name,
                error,
            )
