"""A real Kafka broker for tests and measurements: one process in KRaft mode, with its files in a directory of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from bench.free_ports import free_port
from bench.maven_jars import pinned

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BROKER = pinned(Path(__file__).with_name("kafka-broker-jars.txt"))
"""The broker; the libraries that Spark has as well come from Spark."""
CONNECTOR = pinned(Path(__file__).with_name("kafka-connector-jars.txt"))
"""Spark's source and writer for Kafka; there is none for Spark 4.3 in the registry, and the one for 4.2 works with it."""
PASSWORD = "s3cret/§ word"
_SECONDS = 60.0
_MARKER_SECONDS = 6.0


def add_connector(spark: SparkSession, jars: Sequence[Path]) -> None:
    """Give a session that has begun what the setting `spark.jars` gives to a new one, on a local master.

    Args:
        spark: The session.
        jars: The files of :data:`CONNECTOR`.
    """
    assert spark._jvm is not None
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()  # of the driver; `spark.jars` are added to it
    for jar in jars:
        loader.addURL(spark._jvm.java.io.File(str(jar)).toURI().toURL())


_NO_COORDINATOR = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)


def _when_coordinated(call: Callable[[], Any]) -> Any:
    """Call again while the broker has not loaded the group yet: this client does not do that itself."""
    until = time.monotonic() + _SECONDS
    while True:
        try:
            return call()
        except KafkaException as error:
            if error.args[0].code() not in _NO_COORDINATOR or time.monotonic() > until:
                raise
            time.sleep(0.2)


class KafkaBroker:
    """A broker, which is its own controller.

    Args:
        java: Path of the Java program.
        jars: The files of :data:`BROKER`.
    """

    def __init__(self, java: str, jars: Sequence[Path]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kafka-"))
        classes = [*map(str, jars), f"{Path(pyspark.__file__).parent}/jars/*"]
        self._java = [java, "-Xmx512m", "-XX:+UseSerialGC", "-cp", ":".join(classes)]
        self._port, controller, self._login_port = (free_port() for _ in range(3))
        self._settings = self._folder / "server.properties"
        self._settings.write_text(_properties(self._folder, self._port, controller, self._login_port))
        cluster = ["-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", str(self._settings)]
        formatted = subprocess.run([*self._java, "kafka.tools.StorageTool", "format", *cluster], capture_output=True, text=True)
        assert formatted.returncode == 0, formatted.stdout + formatted.stderr
        self.start()
        self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def servers_with_login(self) -> str:
        """The listener that asks for the user "tester" and the password."""
        return f"127.0.0.1:{self._login_port}"

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            command = [*self._java, "kafka.Kafka", str(self._settings)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        until = time.monotonic() + _SECONDS
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < until, f"Kafka did not start: {self._log()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End it at once, as a lost machine does."""
        self._process.kill()
        self._process.wait(_SECONDS)

    def freeze(self) -> None:
        """Let it answer nothing until :meth:`thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Topics

    def create_topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        config = {key.replace("_", "."): value for key, value in settings.items()}
        until, new = time.monotonic() + _SECONDS, name not in self.topics()
        while True:
            try:
                _result(self.admin.create_topics([NewTopic(name, partitions, 1, config=config)]))
                break
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS and new:
                    break  # the answer to the client's first request came too late, and it has asked again
                # Its own controller may have missed the broker for a moment.
                if error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR or time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self._until(lambda: name in self.topics())

    def set_topic(self, name: str, **settings: str) -> None:
        """Change settings of a topic."""
        entries = [
            ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for key, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        _result(self.admin.incremental_alter_configs([resource]))

    def delete_topic(self, name: str) -> None:
        _result(self.admin.delete_topics([name]))
        self._until(lambda: name not in self.topics())

    def topics(self) -> set[str]:
        return set(self.admin.list_topics(timeout=_SECONDS).topics)

    def add_partitions(self, name: str, total: int) -> None:
        _result(self.admin.create_partitions([NewPartitions(name, total)]))

    def delete_before(self, name: str, partition: int, offset: int) -> None:
        """Delete the messages before an offset, as retention does."""
        _result(self.admin.delete_records([TopicPartition(name, partition, offset)]))

    def send(self, name: str, values: Iterable[str], partition: int = -1) -> None:
        """Send messages to a partition, or spread them over the partitions."""
        self._send(name, ((None, value, partition) for value in values))

    def send_keyed(self, name: str, messages: Iterable[tuple[str, str]]) -> None:
        """Send keys and values."""
        self._send(name, ((key, value, -1) for key, value in messages))

    def _send(self, name: str, messages: Iterable[tuple[str | None, str, int]]) -> None:
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 5, "log_level": 0})
        for key, value, partition in messages:
            producer.produce(name, value, key, partition=partition)
            producer.poll(0)
        assert producer.flush(_SECONDS) == 0

    def messages(self, name: str, **settings: Any) -> list[Message]:
        """All messages that a reader of committed messages finds now."""
        return messages_of(self.servers, name, **settings)

    def count(self, name: str) -> int:
        """The number of committed messages."""
        return len(self.messages(name))

    # Consumer groups

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The offsets that a consumer group has committed, by partition; without those of which there are none."""
        with closing(self._consumer(group)) as consumer:
            partitions = [
                TopicPartition(topic, number) for number in consumer.list_topics(topic, _SECONDS).topics[topic].partitions
            ]
            found = _when_coordinated(lambda: consumer.committed(partitions, _SECONDS))
            return {each.partition: each.offset for each in found if each.offset >= 0}

    def reset_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit other offsets in a group without members."""
        with closing(self._consumer(group)) as consumer:
            wanted = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
            _when_coordinated(lambda: consumer.commit(offsets=wanted, asynchronous=False))

    def _consumer(self, group: str) -> Consumer:
        return Consumer({"bootstrap.servers": self.servers, "group.id": group, "enable.auto.commit": False})

    @contextmanager
    def member_of(self, group: str, topic: str) -> Iterator[None]:
        """Within the block a consumer is a member of a group; it commits nothing."""
        consumer = self._consumer(group)
        consumer.subscribe([topic])
        try:
            until = time.monotonic() + _SECONDS
            while not consumer.assignment():
                assert time.monotonic() < until, f"no partition of {topic} was assigned to the member of {group}"
                consumer.poll(0.05)
            yield
        finally:
            consumer.close()

    def _until(self, known: Callable[[], bool]) -> None:
        """Wait until the broker has heard what its controller has decided."""
        until = time.monotonic() + _SECONDS
        while not known():
            assert time.monotonic() < until, self._log()
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)):
                return False
        try:
            found = AdminClient({"bootstrap.servers": self.servers, "log_level": 0}).list_topics(timeout=5)
        except KafkaException:
            return False
        return bool(found.brokers)

    def _log(self) -> str:
        return (self._folder / "log").read_text()[-3000:]


def messages_of(servers: str, name: str, **settings: Any) -> list[Message]:
    """All messages of a topic that a reader of committed messages finds now; none if there is no topic.

    Brokers show a transaction soon after its commit has been answered: the reader waits for that, but not for open transactions.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "isolation.level": "read_committed",
            **settings,
        }
    )
    try:
        topic = consumer.list_topics(name, _SECONDS).topics[name]
        if topic.error is not None:
            return []
        ends = _ends(servers, name, topic.partitions)
        open_ends = set(topic.partitions)
        consumer.assign([TopicPartition(name, partition, OFFSET_BEGINNING) for partition in open_ends])
        found: list[Message] = []
        read: set[int | None] = set()
        began = time.monotonic()
        while open_ends:
            assert time.monotonic() < began + _SECONDS, f"the ends of partitions {open_ends} of {name} were not reached"
            if time.monotonic() > began + _MARKER_SECONDS:
                open_ends -= read
            for message in consumer.consume(10_000, 0.02):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    read.add(message.partition())
                    if (message.offset() or 0) >= ends[message.partition() or 0]:
                        open_ends.discard(message.partition() or 0)
                else:
                    raise KafkaException(error)
        return found
    finally:
        consumer.close()


def _ends(servers: str, name: str, partitions: Iterable[int]) -> dict[int, int]:
    """The ends of a topic's partitions, behind messages of transactions that are not committed, too."""
    asked = {TopicPartition(name, partition): OffsetSpec.latest() for partition in partitions}
    until = time.monotonic() + _SECONDS
    while True:
        admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})  # it keeps for long what it was told at first
        found = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        try:
            return {at.partition: future.result(_SECONDS).offset for at, future in found.items()}
        except KafkaException:  # a broker that has just started may not know its own topics yet
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _properties(folder: Path, port: int, controller: int, login: int) -> str:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"BROKER://127.0.0.1:{port},LOGIN://127.0.0.1:{login},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"BROKER://127.0.0.1:{port},LOGIN://127.0.0.1:{login}",
        "listener.security.protocol.map": "BROKER:PLAINTEXT,LOGIN:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "listener.name.login.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.login.plain.sasl.jaas.config": f'{module} required user_tester="{PASSWORD}";',
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": f"{folder}/data",
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "log.retention.ms": "-1",  # messages of tests are older than the default allows
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "broker.session.timeout.ms": "1000",  # otherwise a broker that was killed may start again after nine seconds
        "broker.heartbeat.interval.ms": "200",
    }
    lines = (f"{name}={value}" for name, value in settings.items())
    return "".join(f"{line}\n" for line in lines).encode("ascii", "backslashreplace").decode().replace("\\xa7", "\\u00a7")


def _result(futures: dict[Any, Any]) -> None:
    for future in futures.values():
        future.result(_SECONDS)
