"""A Kafka cluster: its clients with the sink's settings, and their errors as the sink's errors, without credentials.

Must not know transactions. Imports the client library when it is needed: a code location without a KafkaSink does not have it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_checkpoints.systems.errors import (
    InvalidSinkTopic,
    SinkError,
    SinkLibraryMissing,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkUnavailable,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer
    from confluent_kafka.admin import AdminClient

_REQUEST_SECONDS = 2.0, 20.0
SET_BY_THE_SINK = frozenset(
    {
        "acks",
        "bootstrap.servers",
        "delivery.report.only.error",
        "enable.auto.commit",
        "enable.idempotence",
        "enable.partition.eof",
        "error_cb",
        "group.id",
        "isolation.level",
        "message.max.bytes",
        "message.timeout.ms",
        "metadata.broker.list",
        "on_delivery",
        "request.required.acks",
        "transactional.id",
    }
)
"""Options that the guarantees rest on."""
_SECRET = re.compile(r"password|secret|token|jaas|\.pem$|private", re.IGNORECASE)
_QUIET = {"log_level": 1, "reconnect.backoff.max.ms": 1000}  # the sink's errors say why a broker cannot be reached
T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_TRANSACTION_MILLISECONDS = 900_000  # a broker's default for transaction.max.timeout.ms
_ONLY_OF_PRODUCERS = re.compile(
    r"transaction\.|compression\.|linger\.|batch\.|queue\.buffering\.|partitioner|sticky\.|delivery\."
)


class KafkaCluster:
    """The cluster that a sink writes to.

    Args:
        servers: addresses of some brokers, ``host:port,host:port``; or an object with ``env_var_name``, such as ``dg.EnvVar``.
        options: options of librdkafka, by name; values may be such objects, too.
        sink: the sink as errors name it.
        retry_for: how long the sink tries, in seconds.

    Attributes:
        request_seconds: how long a single question to the cluster may take.

    Raises:
        SinkLibraryMissing: the library ``confluent-kafka`` is not installed.
        InvalidSinkTopic: an environment variable is not set.
    """

    def __init__(self, servers: Any, options: Mapping[str, Any], sink: str, retry_for: float) -> None:
        least, most = _REQUEST_SECONDS
        self.request_seconds = min(max(least, retry_for), most)
        self._sink = sink
        self._servers = self._value(servers, "bootstrap_servers")
        self._options = {name: self._value(value, name) for name, value in options.items()}
        self._reported: list[KafkaError] = []

    def producer(
        self, transactional_id: str, message_bytes: int, delivered: Callable[[KafkaError | None, Message], None]
    ) -> Producer:
        """A transactional producer, not initialized.

        Args:
            transactional_id: its id, by which a later producer replaces it.
            message_bytes: the longest message that the topic accepts.
            delivered: is called with the error of each message that is not delivered.
        """
        _library(self._sink)
        from confluent_kafka import Producer

        return self._made(
            Producer,
            {
                "linger.ms": 20,
                "queue.buffering.max.kbytes": 65536,  # messages of a large transaction wait in their files
                "partitioner": "murmur2_random",  # the same partition for a key as Java's clients choose
                "transaction.timeout.ms": _TRANSACTION_MILLISECONDS,
                **self._options,
                "transactional.id": transactional_id,
                "message.max.bytes": message_bytes,
                "delivery.report.only.error": True,
                "on_delivery": delivered,
            },
        )

    def consumer(self) -> Consumer:
        """A consumer of committed messages, without a partition."""
        _library(self._sink)
        from confluent_kafka import Consumer

        return self._made(
            Consumer,
            {
                **self._general(),
                "group.id": "dagster-checkpoints",  # demanded by the library; the sink joins no group
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 20,
            },
        )

    def admin(self) -> AdminClient:
        """A client for questions about topics."""
        _library(self._sink)
        from confluent_kafka.admin import AdminClient

        return self._made(AdminClient, self._general())

    def failed(self, found: BaseException | KafkaError, doing: str) -> SinkError:
        """A client's error as the sink's.

        Args:
            found: what the client has raised or returned.
            doing: what the sink did, after "while".

        Returns:
            A :class:`SinkUnavailable` if another attempt may succeed.
        """
        error = _kafka_error(found)
        text = self._without_credentials(error.str() if error is not None else str(found))
        kind, advice = self._kind(error)
        return kind(f"{self._sink}: while {doing}: {text}{self._reports()}. {advice}")

    def _kind(self, error: KafkaError | None) -> tuple[type[SinkError], str]:
        names = {error.name()} if error is not None else set()
        for kind, codes, advice in _KINDS:
            if names & codes:
                return kind, advice
        if {each.name() for each in self._reported} & _CREDENTIALS:
            return InvalidSinkTopic, _CREDENTIALS_ADVICE
        return SinkUnavailable, "The brokers did not answer as expected: the run tries again as its restart strategy says"

    def _reports(self) -> str:
        """Why no broker can be reached, as a client has reported it by itself: the reason, not what follows from it."""
        if not self._reported:
            return ""
        reasons = [each for each in self._reported if each.name() in _CREDENTIALS]
        reasons = reasons or [each for each in self._reported if each.name() != "_ALL_BROKERS_DOWN"] or self._reported
        return f" ({self._without_credentials(reasons[-1].str())})"

    def _made(self, kind: Callable[[dict[str, Any]], T], settings: Mapping[str, Any]) -> T:
        kafka = _library(self._sink)
        self._reported.clear()
        try:
            return kind(
                {**_QUIET, **settings, "bootstrap.servers": self._servers, "error_cb": self._reported.append, "logger": _LOGGER},
            )
        except (kafka.KafkaException, TypeError, ValueError) as error:
            found = _kafka_error(error)
            text = self._without_credentials(found.str() if found is not None else str(error))
            raise InvalidSinkTopic(
                f"{self._sink}: expected options that Kafka's client library (librdkafka) accepts, found that it refuses them: "
                f"{text}. Correct KafkaSink(options=...)"
            ) from None

    def _general(self) -> dict[str, Any]:
        """The options that are not a producer's alone."""
        return {name: value for name, value in self._options.items() if not _ONLY_OF_PRODUCERS.match(name)}

    def _value(self, given: Any, name: str) -> Any:
        variable = getattr(given, "env_var_name", None)
        if not isinstance(variable, str):
            return given
        if not os.environ.get(variable):
            raise InvalidSinkTopic(
                f"{self._sink}: expected the value of {name} in the environment variable {variable}, found that it is not set. "
                "Set it for the process of the run"
            )
        return os.environ[variable]

    def _without_credentials(self, text: str) -> str:
        for name, value in self._options.items():
            if _SECRET.search(name) and str(value):
                text = text.replace(str(value), "***")
        return text


_CREDENTIALS = {
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
    "UNSUPPORTED_SASL_MECHANISM",
    "ILLEGAL_SASL_STATE",
    "_SSL",
}
_CREDENTIALS_ADVICE = "Correct the credentials or the security options in KafkaSink(options=...)"
_KINDS: tuple[tuple[type[SinkError], set[str], str], ...] = (
    (InvalidSinkTopic, _CREDENTIALS, _CREDENTIALS_ADVICE),
    (
        InvalidSinkTopic,
        {
            "TOPIC_AUTHORIZATION_FAILED",
            "CLUSTER_AUTHORIZATION_FAILED",
            "GROUP_AUTHORIZATION_FAILED",
            "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        },
        "The sink needs the rights Read, Write and Describe for the topic and its ledger topic, Create for the ledger topic, and "
        "Write for transactional ids that begin with 'dagster-checkpoints'",
    ),
    (
        InvalidSinkTopic,
        {"INVALID_TRANSACTION_TIMEOUT"},
        "The brokers' transaction.max.timeout.ms is less than the sink's transaction.timeout.ms, 15 minutes unless "
        "KafkaSink(options={'transaction.timeout.ms': ...}) says another: give the brokers' value there. A transaction that "
        "takes longer is aborted",
    ),
    (
        SinkTargetChanged,
        {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"},
        "The topic was deleted while the job ran: create it again; the staged rows are sent when the run starts again",
    ),
    (
        SinkRowsRefused,
        {"MSG_SIZE_TOO_LARGE", "INVALID_MSG_SIZE", "RECORD_LIST_TOO_LARGE", "INVALID_RECORD", "INVALID_MSG", "POLICY_VIOLATION"},
        "The topic does not accept a message. The rows stay staged: correct the topic (max.message.bytes; a compacted topic "
        "needs a key in each message) and start the run again",
    ),
)
"""Errors that repeat, by the names of librdkafka's codes."""


def _kafka_error(found: BaseException | KafkaError) -> KafkaError | None:
    from confluent_kafka import KafkaError

    if isinstance(found, KafkaError):
        return found
    for each in (found, found.__cause__):  # a callback that was called beside a fatal error hides it in a SystemError
        error = next(iter(each.args), None) if each is not None else None
        if isinstance(error, KafkaError):
            return error
    return None


def _library(sink: str) -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise SinkLibraryMissing(
            f"{sink}: expected the package confluent-kafka, found that it is not installed: "
            "pip install 'dagster-checkpoints[kafka]'"
        ) from error
    return confluent_kafka
