"""The target of a KafkaSink: messages wait in files, and go to the topic in one Kafka transaction with the ledger's record.

Messages cannot be taken back: a restore of an older checkpoint is refused, or they are sent a second time, as configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks.engine import Plan, SinkScope
from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.sinks.kafka.messages import KEY, VALUE, MessageFormat, StagedMessages, headers_of, read_messages
from dagster_checkpoints.sinks.kafka.topics import KafkaTopics, LedgerBlocked, LedgerTopic, LedgerValues
from dagster_checkpoints.sinks.kafka.transactions import KafkaTransactions, Outbox
from dagster_checkpoints.sinks.ledger import Change, Commit, Ledger, Staged, parse_name
from dagster_checkpoints.sinks.target import AtomicTarget, Batch, Guard, Sealed
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkPathInUse, SinkTargetChanged

OlderRestore = Literal["refuse", "write_again"]
"""What a restore of an older checkpoint does, after which the job gives rows again that are in the topic."""
POSITION = "dagster-checkpoints"
"""Name of the header with each message's place: ``pipeline/stage/instance/job/checkpoint/number``."""
_DIGITS = 40
_ROWS_AT_A_TIME = 8192


class KafkaTarget(AtomicTarget):
    """A topic, for one instance.

    Args:
        cluster: the cluster.
        topic: the topic's name.
        staging: the directory of files that wait.
        messages: how rows become messages.
        older_restore: what a restore of an older checkpoint does.
        retry_for: how long a transaction is repeated while brokers are away, in seconds.
        sink: the sink as errors name it.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        staging: Path,
        messages: MessageFormat,
        older_restore: OlderRestore,
        retry_for: float,
        sink: str,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._root = staging
        self._messages = messages
        self._older_restore = older_restore
        self._retry_for = retry_for
        self._sink = sink
        self._ledger_topic = LedgerTopic(cluster, topic, sink)
        self._batches: dict[str, dict[int, int]] = {}
        self._transactions: KafkaTransactions | None = None

    @property
    def place(self) -> str:
        return self._topic

    # Before a run

    def jobs(self, scope: SinkScope) -> list[str]:
        topics = KafkaTopics(self._cluster, self._sink)
        topics.target(self._topic)
        if topics.find(self._ledger_topic.name) is None:
            return []
        try:
            values = self._ledger_topic.read()
        except LedgerBlocked:  # a killed run has left a transaction open: the run that starts ends it
            values = self._ledger_topic.read_committed()
        self._check_format(values, scope)
        ledgers = values.of_stage(scope).values()
        return sorted({job for ledger in ledgers for job, found in ledger.jobs.items() if found.newest})

    def foreign(self) -> list[str]:
        return []  # other programs may write to the topic

    # A run

    def open(self, scope: SinkScope, guard: Guard) -> None:
        topics = KafkaTopics(self._cluster, self._sink)
        target = topics.target(self._topic)
        self._ledger_topic.create(topics, target)
        self._scope, self._message_bytes = scope, target.message_bytes
        self._staged = StagedMessages(self._root, scope, self._sink)
        self._transactions = KafkaTransactions(
            self._cluster, target, self._ledger_topic, scope, guard, self._retry_for, self._sink
        )
        self._transactions.take_over()
        self._check_format(self._transactions.values, scope)
        self._was_unknown = self._transactions.values.ledger(scope) is None

    def close(self) -> None:
        for name in self._batches:
            self._staged.delete(name)
        self._batches = {}
        if self._transactions is not None:
            self._transactions.close()

    def read_ledger(self) -> Ledger:
        assert self._transactions is not None
        return self._transactions.ledger

    def committed(self, job: str) -> list[Commit]:
        """The newest commit of each branch: a restore is refused for what is behind it, and nothing is moved."""
        return [Commit(job, self._scope.index, newest) for newest in self.read_ledger().job(job).newest.values()]

    def stage(self, name: str, batch: Batch) -> None:
        batches = self._batches.setdefault(name, {})
        found = self._encoded(batch.files)
        first = next(found, None)
        if first is not None:
            batches[batch.id] = self._staged.write(name, batch.id, first.schema, chain((first,), found))
        elif batches.pop(batch.id, None) is not None:
            self._staged.drop_batch(name, batch.id)

    def _encoded(self, files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with pq.ParquetFile(file) as parquet:
                self._messages.check(parquet.schema_arrow)
                for batch in parquet.iter_batches(_ROWS_AT_A_TIME):
                    encoded = self._messages.encoded(batch)
                    place = self._place(Commit(self._scope.job, self._scope.index, 0))
                    self._messages.check_sizes(encoded, len(POSITION) + len(place) + _DIGITS, self._message_bytes)
                    yield encoded

    def seal(self, name: str, commit: Commit) -> Sealed | None:
        rows = sum(self._batches.pop(name, {}).values())
        return Sealed(rows, payload=self._staged.make_durable(name)) if rows else None

    def staged(self) -> list[str]:
        return self._staged.names()

    def discard(self, names: Sequence[str]) -> None:
        assert self._transactions is not None
        self._transactions.check_owner()
        for name in names:
            self._staged.delete(name)

    def copies(self, staged: Staged) -> dict[str, Path]:
        return self._staged.files(staged.name, staged.payload)

    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        self._staged.restore(staged.name, staged.payload, files)

    def transact(self, plan: Plan) -> None:
        assert self._transactions is not None
        done = self._transactions.perform(plan, self._send)
        for staged in done.moves.publish if done is not None else ():
            self._staged.delete(staged.name)

    def _send(self, change: Change, outbox: Outbox) -> None:
        if change.moves.hide and self._older_restore == "refuse":
            newest = max(commit.checkpoint for commit in change.moves.hide)
            raise SinkCannotTakeBack(
                f"{self._sink}: the job is restored from an older checkpoint, and expected that no later one has sent messages, "
                f"found messages of checkpoints up to {newest}. The job would give their rows again, and messages cannot be "
                f"removed from a topic. Nothing was changed. Restore checkpoint {newest} or a later one; or choose "
                "KafkaSink(older_restore='write_again'): then readers get these rows twice"
            )
        for staged in change.moves.publish:
            self._check_known(staged)
            self._publish(staged, outbox)

    def _check_known(self, staged: Staged) -> None:
        """Whether the ledger can say that a transaction of an earlier attempt is not committed."""
        found = parse_name(staged.name)
        if self._was_unknown and found is not None and found.attempt != self._scope.attempt:
            raise SinkTargetChanged(
                f"{self._sink}: expected to find in the topic {self._ledger_topic.name!r} what instance {self._scope.index} has "
                f"committed in job {staged.commit.job}, found nothing: the topic was deleted, or the job wrote to another "
                "cluster. What is committed is not known, and rows might be sent twice. Restore the topic, or begin a new job"
            )

    def _publish(self, staged: Staged, outbox: Outbox) -> None:
        place = self._place(staged.commit)
        number = 0
        for file in self._staged.files(staged.name, staged.payload).values():
            for batch in read_messages(file):
                keys, values = batch.column(KEY).to_pylist(), batch.column(VALUE).to_pylist()
                given = headers_of(batch)
                for row, (key, value) in enumerate(zip(keys, values, strict=True)):
                    headers: list[tuple[str, str | bytes | None]] = [(POSITION, b"%s%d" % (place, number))]
                    headers += [(name, column[row]) for name, column in given]
                    outbox.send(key, value, headers)
                    number += 1

    def _place(self, commit: Commit) -> bytes:
        scope = self._scope
        return f"{scope.pipeline}/{scope.stage}/{scope.index}/{commit.job}/{commit.checkpoint}/".encode()

    def _check_format(self, values: LedgerValues, scope: SinkScope) -> None:
        if values.is_of_earlier_release(scope):
            raise SinkPathInUse(
                f"{self._sink}: expected no record of an earlier release of dagster-checkpoints in the topic "
                f"{self._ledger_topic.name!r}, found one, whose format this release does not read: what it says of committed "
                "messages would be lost. Let that release drain the pipeline, and give the new job another topic"
            )
