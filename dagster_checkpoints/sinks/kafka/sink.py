"""A sink that writes rows to a Kafka topic, visible exactly once: one Kafka transaction per instance and checkpoint.

::

    write()         rows become messages in files of the staging directory
    pre_commit()    the files are on disk; the transaction's text goes into the checkpoint
    commit()        ONE Kafka transaction: the messages go to the topic, and the record of the commit to its ledger topic

A Kafka transaction cannot be the pre-committed one: brokers abort it after 15 minutes, and no other process could commit it.
So messages wait in files, and of two commits of one transaction the second finds the first in the ledger, also after a commit
whose outcome is unknown.

Must not import Spark or Dagster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pyarrow.parquet as pq

from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.pipeline.durations import check_seconds
from dagster_checkpoints.sinks.base import SinkCommit, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.sinks.kafka.cluster import SET_BY_THE_SINK, KafkaCluster
from dagster_checkpoints.sinks.kafka.instance import KafkaInstance, OlderRestore
from dagster_checkpoints.sinks.kafka.ledger_topic import LedgerBlocked, LedgerTopic, ledger_topic_name
from dagster_checkpoints.sinks.kafka.messages import MessageFormat
from dagster_checkpoints.sinks.kafka.new_start import KafkaAtNewStart, check_new_start
from dagster_checkpoints.sinks.kafka.staging import StagedMessages
from dagster_checkpoints.sinks.kafka.topics import KafkaTopics
from dagster_checkpoints.sinks.kafka.transactions import KafkaTransactions
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkNotOpen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TOPIC = re.compile(r"[A-Za-z0-9._\-]+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class KafkaSink(TwoPhaseCommitSink):
    """Sends a stage's rows to a Kafka topic, in one Kafka transaction per instance and checkpoint.

    Readers with ``isolation.level=read_committed`` see each row once. Other programs may write to the same topic. Needs ``pip
    install dagster-checkpoints[kafka]``, and Kafka 2.5 or newer.

    Args:
        topic: the topic's name. It must exist.
        bootstrap_servers: addresses of some brokers, ``host:port,host:port``; or ``dg.EnvVar("NAME")``.
        staging: directory on a local or mounted file system where rows wait until their checkpoint has completed. It must
            survive what the pipeline is to survive.
        key: column whose values are the messages' keys, text in UTF-8 or bytes; None: messages have no key.
        value: column whose values are the messages' values, likewise; null deletes a key of a compacted topic. None: a JSON
            object of all columns.
        headers: columns whose values become headers of the same name; not part of the JSON object.
        options: options of the client library, by librdkafka's names, such as ``security.protocol`` or ``compression.type``;
            values may be ``dg.EnvVar("NAME")``. They are never shown.
        at_new_start: what a new start, not a resumption, does if an earlier job of this stage has sent messages: ``refuse``
            (default) stops the run before Spark starts, ``keep`` adds the new job's messages.
        older_restore: what a restore of an older checkpoint does if later ones have sent messages: ``refuse`` (default)
            stops the run, ``write_again`` sends the rows a second time.
        retry_for: how long a transaction is repeated while brokers are away, in seconds.

    Raises:
        InvalidSinkPath: the staging directory is not a local path.
        ValueError: a setting has a value that is not allowed.

    Examples:
        >>> sink = KafkaSink("delays", "broker:9092", staging="/data/staging", key="origin")
    """

    def __init__(
        self,
        topic: str,
        bootstrap_servers: Any,
        *,
        staging: str | os.PathLike[str],
        key: str | None = None,
        value: str | None = None,
        headers: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        at_new_start: KafkaAtNewStart = "refuse",
        older_restore: OlderRestore = "refuse",
        retry_for: float = 60.0,
    ) -> None:
        self.topic = topic
        self.staging = _directory(staging)
        self.key = key
        self.value = value
        self.headers = (headers,) if isinstance(headers, str) else tuple(headers)
        self.at_new_start: KafkaAtNewStart = at_new_start
        self.older_restore: OlderRestore = older_restore
        self.retry_for = retry_for
        self._servers = bootstrap_servers
        self._options = dict(options or {})
        self._instance: KafkaInstance | None = None
        _check_settings(self, self._options)

    def __repr__(self) -> str:
        return f"KafkaSink({self.topic!r}, {self._shown_servers!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: a copy in another instance or process is opened separately.
        return {**self.__dict__, "_instance": None}

    @property
    def _shown_servers(self) -> str:
        name = getattr(self._servers, "env_var_name", None)
        return f"${name}" if isinstance(name, str) else str(self._servers)

    @property
    def location(self) -> str:
        """The brokers' addresses and the topic."""
        servers = ",".join(sorted(part.strip() for part in self._shown_servers.split(",")))
        return f"kafka://{servers}/{self.topic}"

    @property
    def uri(self) -> str:
        return self.location

    @property
    def table_name(self) -> str:
        """The topic's name."""
        return self.topic

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the topic; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job of this stage has sent messages.
            SinkPathInUse: the ledger holds messages of a job with the number that the new job will have.
            InvalidSinkTopic: there is no such topic, or no access to it.
            SinkLibraryMissing: the library ``confluent-kafka`` is not installed.
            SinkUnavailable: the cluster does not answer.
        """
        self._check_names(context)
        cluster = self._cluster()
        topics = KafkaTopics(cluster, str(self))
        topics.target(self.topic)
        ledger_topic = LedgerTopic(cluster, self.topic, str(self))
        if topics.find(ledger_topic.name) is not None:
            try:
                ledger = ledger_topic.read()
            except LedgerBlocked:  # a killed run has left a transaction open: the run that starts ends it
                ledger = ledger_topic.read_committed()
            check_new_start(ledger, context, self.at_new_start, str(self))

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check that the staging directory can be written, the columns can become messages, and the topic is there.

        Raises:
            InvalidSinkPath: the staging directory cannot be written.
            SinkColumnsMismatch: a column is missing, or cannot be part of a message.
            InvalidSinkTopic: there is no such topic, or no access to it.
            SinkUnavailable: the cluster does not answer, or the directory's file system is full.
        """
        self._check_names(context)
        try_directory(self.staging, str(self))
        MessageFormat(self.key, self.value, self.headers, str(self)).check(pq.read_schema(rows))
        KafkaTopics(self._cluster(), str(self)).target(self.topic)

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkFenced: a newer run of the pipeline writes to the topic.
            InvalidSinkTopic: there is no such topic, or no access to it.
            SinkUnavailable: the cluster does not answer.
        """
        self._check_names(context)
        self.close()
        cluster = self._cluster()
        topics = KafkaTopics(cluster, str(self))
        target = topics.target(self.topic)
        ledger_topic = LedgerTopic(cluster, self.topic, str(self))
        ledger_topic.create(topics, target)
        transactions = KafkaTransactions(cluster, target, ledger_topic, context, self.retry_for, str(self))
        messages = MessageFormat(self.key, self.value, self.headers, str(self))
        staged = StagedMessages(self.staging, context, str(self))
        instance = KafkaInstance(context, target, transactions, staged, messages, self.older_restore, str(self))
        transactions.take_over()
        self._instance = instance

    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Write the batch's rows to the staging directory, as messages.

        Raises:
            SinkColumnsMismatch: a column is missing, or cannot be part of a message.
            SinkRowsRefused: a message is larger than the topic accepts.
        """
        self._opened().write([local_path(file) or Path(os.path.abspath(file)) for file in files], batch_id)

    def pre_commit(self, checkpoint_id: int) -> str | None:
        return self._opened().pre_commit(checkpoint_id)

    def commit(self, transaction: str) -> SinkCommit:
        """Send the transaction's messages, unless the ledger says that they were sent.

        Raises:
            SinkTransactionLost: files of the transaction have been deleted.
            SinkRowsRefused: the topic does not accept a message.
            SinkTargetChanged: the topic or its ledger topic was deleted.
            SinkFenced: a newer run of the pipeline writes to the topic.
            SinkUnavailable: the cluster does not answer; the outcome may be unknown, and is looked up by the next commit.
            UnreadableSinkTransaction: the text is not a transaction of a KafkaSink for this topic.
        """
        return self._opened().commit(transaction)

    def abort(self, transaction: str) -> None:
        self._opened().abort(transaction)

    def transaction_files(self, transaction: str) -> dict[str, Path]:
        return self._opened().transaction_files(transaction)

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:
        """Put a savepoint's files into the staging directory again, unless they are there.

        Raises:
            UnreadableSinkTransaction: the text is not a transaction of a KafkaSink for this topic.
        """
        if files:
            self._opened().restore_transaction(transaction, files)

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        """Send what the checkpoint holds.

        Raises:
            SinkCannotTakeBack: the checkpoint is an older one, and later ones have sent messages.
        """
        self._opened().recover(committed, restored)

    def start_new(self) -> None:
        self._opened().start_new()

    def close(self) -> None:
        if self._instance is not None:
            self._instance.close()
        self._instance = None

    def _opened(self) -> KafkaInstance:
        if self._instance is None:
            raise SinkNotOpen(f"{self}: expected open(context) before any other call, found that the sink is not open")
        return self._instance

    def _cluster(self) -> KafkaCluster:
        return KafkaCluster(self._servers, self._options, str(self), self.retry_for)

    def _check_names(self, context: SinkContext) -> None:
        for what, name in (("pipeline", context.pipeline), ("stage", context.stage), ("attempt", context.attempt)):
            if name and not _NAME.fullmatch(name):
                raise InvalidSinkPath(f"{self}: expected a name of the {what} that can be part of a file's name, found {name!r}")


def _directory(staging: str | os.PathLike[str]) -> Path:
    text = os.fspath(staging)
    scheme = url_scheme(text)
    found = local_path(text) if scheme == "file" else None
    if not text.strip() or (scheme is not None and found is None):
        raise InvalidSinkPath(
            f"expected KafkaSink(staging=...) to be a directory on a local or mounted file system, such as /data/staging, found "
            f"{text!r}"
        )
    return found or Path(os.path.abspath(os.path.expanduser(text)))


def _check_settings(sink: KafkaSink, options: Mapping[str, Any]) -> None:
    if not _TOPIC.fullmatch(sink.topic):
        raise ValueError(f"expected a topic's name of letters, digits, '.', '_' and '-', found {sink.topic!r}")
    ledger_topic_name(sink.topic)
    if sink.at_new_start not in get_args(KafkaAtNewStart):
        raise ValueError(
            f"expected KafkaSink(at_new_start='refuse' or 'keep'), found {sink.at_new_start!r}: messages cannot be removed from "
            "a topic. To begin without them, give the new job another topic"
        )
    if sink.older_restore not in get_args(OlderRestore):
        raise ValueError(f"expected KafkaSink(older_restore='refuse' or 'write_again'), found {sink.older_restore!r}")
    check_seconds("KafkaSink", least=0, retry_for=sink.retry_for)
    reserved = sorted(SET_BY_THE_SINK & set(options))
    if reserved:
        raise ValueError(f"expected KafkaSink(options=...) without {', '.join(reserved)}: the sink sets them itself")
