"""One instance of a Kafka sink: its current transaction, and the steps of a start.

Must not know the sink's settings as users write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks.base import SinkCommit, SinkContext
from dagster_checkpoints.sinks.kafka.ledger import KafkaJobLedger
from dagster_checkpoints.sinks.kafka.messages import KEY, VALUE, MessageFormat, headers_of
from dagster_checkpoints.sinks.kafka.staging import StagedMessages, read_messages
from dagster_checkpoints.sinks.kafka.topics import KafkaTopic
from dagster_checkpoints.sinks.kafka.transactions import KafkaTransactions, Outbox
from dagster_checkpoints.sinks.lake.names import job_name
from dagster_checkpoints.sinks.transactions import (
    AbortRest,
    CommitStep,
    ContinueFrom,
    Settle,
    TakeFence,
    begins_timeline,
    new_start,
    recovery,
)
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, UnreadableSinkTransaction

OlderRestore = Literal["refuse", "write_again"]
"""What a restore of an older checkpoint does, after which the job gives rows again that are in the topic."""
POSITION = "dagster-checkpoints"
"""Name of the header with each message's place: ``pipeline/stage/instance/job/checkpoint/number``."""
_DIGITS = 40
_ROWS_AT_A_TIME = 8192


class KafkaTransaction(msgspec.Struct, frozen=True, tag="kafka", tag_field="sink"):
    """A transaction's text in a checkpoint, decoded.

    Args:
        topic: the topic.
        staging: the name of its directory.
        job: the job that wrote it.
        index: the index of the instance that wrote it.
        checkpoint: id of the checkpoint that it was pre-committed for.
        branch: the first checkpoint of the branch that the checkpoint is on; 0 for the job's first branch.
        rows: number of its messages.
        files: the sizes of its files, by name.
    """

    topic: str
    staging: str
    job: str
    index: int
    checkpoint: int
    branch: int
    rows: int
    files: dict[str, int]
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_TEXTS = msgspec.json.Decoder(KafkaTransaction)


@dataclass(slots=True)
class _OpenTransaction:
    """The current transaction: the number of messages of each batch."""

    name: str
    batches: dict[int, int] = field(default_factory=dict)


class KafkaInstance:
    """An open instance.

    Args:
        context: the instance.
        target: the topic.
        transactions: sends messages.
        staged: keeps messages.
        messages: how rows become messages.
        older_restore: what a restore of an older checkpoint does.
        sink: the sink as errors name it.
    """

    def __init__(
        self,
        context: SinkContext,
        target: KafkaTopic,
        transactions: KafkaTransactions,
        staged: StagedMessages,
        messages: MessageFormat,
        older_restore: OlderRestore,
        sink: str,
    ) -> None:
        self._context = context
        self._target = target
        self._transactions = transactions
        self._staged = staged
        self._messages = messages
        self._older_restore = older_restore
        self._sink = sink
        self._job = job_name(context)
        self._current: _OpenTransaction | None = None
        self._origin: int | None = None

    def write(self, files: Sequence[Path], batch_id: int) -> None:
        """Put a batch into the current transaction; see ``KafkaSink.write``."""
        if not files and self._current is None:
            return
        current = self._current = self._current or _OpenTransaction(self._staged.new_name())
        found = self._encoded(files)
        first = next(found, None)
        if first is None:
            current.batches.pop(batch_id, None)
            self._staged.drop_batch(current.name, batch_id)
            return
        current.batches[batch_id] = self._staged.write(current.name, batch_id, first.schema, chain((first,), found))

    def _encoded(self, files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with pq.ParquetFile(file) as parquet:
                self._messages.check(parquet.schema_arrow)
                for batch in parquet.iter_batches(_ROWS_AT_A_TIME):
                    encoded = self._messages.encoded(batch)
                    self._messages.check_sizes(
                        encoded, len(POSITION) + len(self._place(self._job, "")) + _DIGITS, self._target.message_bytes
                    )
                    yield encoded

    def pre_commit(self, checkpoint_id: int) -> str | None:
        """Close the current transaction; see ``TwoPhaseCommitSink.pre_commit``."""
        if self._origin is not None and begins_timeline(self._origin, checkpoint_id):
            self._begin_branch(self._origin, checkpoint_id)
            self._origin = None
        current, self._current = self._current, None
        rows = sum(current.batches.values()) if current is not None else 0
        if current is None or not rows:
            return None
        return msgspec.json.encode(
            KafkaTransaction(
                topic=self._target.name,
                staging=current.name,
                job=self._job,
                index=self._context.index,
                checkpoint=checkpoint_id,
                branch=self._transactions.job(self._job).branches.branch_of(checkpoint_id),
                rows=rows,
                files=self._staged.make_durable(current.name),
            )
        ).decode()

    def _begin_branch(self, restored: int, first: int) -> None:
        def plan(found: KafkaJobLedger | None) -> KafkaJobLedger | None:
            before = found or KafkaJobLedger()
            after = before.begun(restored, first)
            return None if after == before else after

        self._transactions.perform(self._job, plan)

    def commit(self, text: str) -> SinkCommit:
        """Send a transaction's messages; see ``KafkaSink.commit``."""
        decoded = self._decode(text)

        def plan(found: KafkaJobLedger | None) -> KafkaJobLedger | None:
            known = found or self._transactions.job(decoded.job)  # raises
            return (
                None
                if known.is_committed(decoded.branch, decoded.checkpoint)
                else known.committed(decoded.branch, decoded.checkpoint)
            )

        self._transactions.perform(decoded.job, plan, lambda outbox: self._send(decoded, outbox))
        self._staged.delete(decoded.staging)
        return SinkCommit(rows=decoded.rows)

    def _send(self, decoded: KafkaTransaction, outbox: Outbox) -> None:
        place = self._place(decoded.job, str(decoded.checkpoint))
        number = 0
        for file in self._staged.files(decoded.staging, decoded.files).values():
            for batch in read_messages(file):
                keys, values = batch.column(KEY).to_pylist(), batch.column(VALUE).to_pylist()
                given = headers_of(batch)
                for row, (key, value) in enumerate(zip(keys, values, strict=True)):
                    headers: list[tuple[str, str | bytes | None]] = [(POSITION, b"%s%d" % (place, number))]
                    headers += [(name, column[row]) for name, column in given]
                    outbox.send(key, value, headers)
                    number += 1

    def _place(self, job: str, checkpoint: str) -> bytes:
        context = self._context
        return f"{context.pipeline}/{context.stage}/{context.index}/{job}/{checkpoint}/".encode()

    def abort(self, text: str) -> None:
        """Delete a transaction's messages, unless they were sent."""
        self._staged.delete(self._decode(text).staging)

    def transaction_files(self, text: str) -> dict[str, Path]:
        """The files of a transaction by name, none if it is committed. Raises SinkTransactionLost."""
        decoded = self._decode(text)
        return {} if self._is_committed(decoded) else self._staged.files(decoded.staging, decoded.files)

    def restore_transaction(self, text: str, files: Mapping[str, Path]) -> None:
        """Stage a savepoint's files again; see ``KafkaSink.restore_transaction``."""
        decoded = self._decode(text)
        if not self._is_committed(decoded):
            self._staged.restore(decoded.staging, decoded.files, files)

    def recover(self, committed: Sequence[str], restored: int | None) -> None:
        """The steps after a restore; see ``TwoPhaseCommitSink.recover``."""
        for text in committed:
            self._decode(text)
        self._perform(recovery(committed, restored))

    def start_new(self) -> None:
        """The steps of a new start; see ``TwoPhaseCommitSink.start_new``."""
        self._transactions.begin_job(self._job)
        self._perform(new_start())

    def close(self) -> None:
        """Release the producer, and delete the open transaction."""
        if self._current is not None:
            self._staged.delete(self._current.name)
        self._current = None
        self._transactions.close()

    def _perform(self, steps: Sequence[TakeFence | Settle | CommitStep[str] | AbortRest | ContinueFrom]) -> None:
        for step in steps:
            match step:
                case TakeFence():
                    pass  # taken when the sink was opened
                case Settle(restored):
                    self._settle(restored)
                case CommitStep(transaction):
                    self.commit(transaction)
                case AbortRest():
                    self._staged.delete_all(keep=lambda name: self._current is not None and name == self._current.name)
                case ContinueFrom(restored):
                    self._origin = self._beginning() if restored is None else restored

    def _settle(self, restored: int) -> None:
        """Refuse a restore after which rows come twice, or record that they do."""
        later = self._transactions.job(self._job).not_on_the_way(restored)
        if not later:
            return
        if self._older_restore == "refuse":
            raise SinkCannotTakeBack(
                f"{self._sink}: the job is restored from checkpoint {restored}, and expected that no checkpoint has sent "
                f"messages that do not belong to it, found messages of checkpoints up to {max(later.values())}. The job would "
                "give their rows again, and messages cannot be removed from a topic. Nothing was changed. Restore checkpoint "
                f"{max(later.values())} or a later one; or choose KafkaSink(older_restore='write_again'): then readers get these "
                "rows twice"
            )

        def plan(found: KafkaJobLedger | None) -> KafkaJobLedger | None:
            return (found or KafkaJobLedger()).writing_again(later)

        self._transactions.perform(self._job, plan)

    def _beginning(self) -> int | None:
        """The origin of a job that continues from no checkpoint of its own: 0, its beginning; None if it has sent messages.

        A savepoint may have completed before a crash, after which the job begins a second time.
        """
        self._transactions.begin_job(self._job)
        return None if self._transactions.job(self._job).newest else 0

    def _is_committed(self, decoded: KafkaTransaction) -> bool:
        return self._transactions.job(decoded.job).is_committed(decoded.branch, decoded.checkpoint)

    def _decode(self, text: str) -> KafkaTransaction:
        try:
            decoded = _TEXTS.decode(text)
        except msgspec.DecodeError as error:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected the text of one of its transactions, found {text!r}: {error}. Did the stage have "
                "another kind of sink when the checkpoint was taken? Restore with that kind of sink, or start "
                "the job without restoring"
            ) from error
        if (decoded.topic, decoded.index) != (self._target.name, self._context.index) or "/" in decoded.staging:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected a transaction of instance {self._context.index} for topic {self._target.name!r}, found "
                f"one of instance {decoded.index} for topic {decoded.topic!r}: restore with that topic, "
                "or start the job without restoring"
            )
        return decoded
