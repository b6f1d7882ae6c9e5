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
from typing import Any, Literal, get_args

import pyarrow.parquet as pq

from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.kafka.cluster import SET_BY_THE_SINK, KafkaCluster
from dagster_checkpoints.sinks.kafka.messages import MessageFormat
from dagster_checkpoints.sinks.kafka.target import KafkaTarget, OlderRestore
from dagster_checkpoints.sinks.kafka.topics import KafkaTopics, ledger_topic_name
from dagster_checkpoints.sinks.target_sink import TargetSink
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import InvalidSinkPath

KafkaAtNewStart = Literal["refuse", "keep"]
"""What a new start does if an earlier job has sent messages: they cannot be removed from a log."""

_TOPIC = re.compile(r"[A-Za-z0-9._\-]+")


class KafkaSink(TargetSink):
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

    kind = "kafka"
    noun = "topic"

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
        if at_new_start not in get_args(KafkaAtNewStart):
            raise ValueError(
                f"expected KafkaSink(at_new_start='refuse' or 'keep'), found {at_new_start!r}: messages cannot be removed from a "
                "topic. To begin without them, give the new job another topic"
            )
        super().__init__(at_new_start)
        self.topic = topic
        self.staging = _directory(staging)
        self.key = key
        self.value = value
        self.headers = (headers,) if isinstance(headers, str) else tuple(headers)
        self.older_restore: OlderRestore = older_restore
        self.retry_for = retry_for
        self._servers = bootstrap_servers
        self._options = dict(options or {})
        _check_settings(self, self._options)

    def __repr__(self) -> str:
        return f"KafkaSink({self.topic!r}, {self._shown_servers!r})"

    @property
    def _shown_servers(self) -> str:
        name = getattr(self._servers, "env_var_name", None)
        return f"${name}" if isinstance(name, str) else str(self._servers)

    @property
    def replaces_jobs(self) -> bool:
        return False

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
        super().check_new_start(context)

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
        self._messages().check(pq.read_schema(rows))
        KafkaTopics(self._cluster(), str(self)).target(self.topic)

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkFenced: a newer run of the pipeline writes to the topic.
            InvalidSinkTopic: there is no such topic, or no access to it.
            SinkUnavailable: the cluster does not answer.
        """
        self._check_names(context)
        super().open(context)

    def new_target(self) -> KafkaTarget:
        return KafkaTarget(
            self._cluster(), self.topic, self.staging, self._messages(), self.older_restore, self.retry_for, str(self)
        )

    def _messages(self) -> MessageFormat:
        return MessageFormat(self.key, self.value, self.headers, str(self))

    def _cluster(self) -> KafkaCluster:
        return KafkaCluster(self._servers, self._options, str(self), self.retry_for)


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
    if sink.older_restore not in get_args(OlderRestore):
        raise ValueError(f"expected KafkaSink(older_restore='refuse' or 'write_again'), found {sink.older_restore!r}")
    check_seconds("KafkaSink", least=0, retry_for=sink.retry_for)
    reserved = sorted(SET_BY_THE_SINK & set(options))
    if reserved:
        raise ValueError(f"expected KafkaSink(options=...) without {', '.join(reserved)}: the sink sets them itself")
