"""What KafkaSink alone does on a broker: what it refuses, brokers that are away, owners that were replaced, readers."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from bench.kafka_broker import PASSWORD, KafkaBroker
from dagster_checkpoints.sinks import (
    InvalidSinkTopic,
    KafkaSink,
    SinkCannotTakeBack,
    SinkFenced,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionLost,
    SinkUnavailable,
)
from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.testing.model_job import ModelJob
from tests.sinks.test_kafka_messages import Variable

LOGIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "tester"}


@pytest.fixture
def topic(kafka: KafkaBroker, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"sink-{abs(hash(request.node.name)):x}"
    kafka.create_topic(name, partitions=3)
    yield name


@pytest.fixture
def job(kafka: KafkaBroker, topic: str, tmp_path: Path) -> Any:
    def new(instances: int = 1, **settings: Any) -> ModelJob:
        sink = KafkaSink(topic, kafka.servers, **{"staging": tmp_path / "staging", "retry_for": 30, **settings})
        return ModelJob(sink, tmp_path / "job", instances)

    return new


def numbers(kafka: KafkaBroker, topic: str, **settings: Any) -> list[int]:
    return sorted(json.loads(message.value() or b"")["n"] for message in kafka.messages(topic, **settings))


def impatient(job: ModelJob) -> None:
    """From now on the sink gives up after half a second."""
    job.sinks[0]._sink._instance.target._transactions._retry_for = 0.5  # type: ignore[attr-defined]


def test_messages_have_keys_headers_and_a_place(kafka: KafkaBroker, topic: str, job: Any) -> None:
    running = job(key="n", headers=("text",), options={"compression.type": "lz4"})
    running.start()
    running.write(50)
    running.checkpoint(1)
    messages = kafka.messages(topic)
    assert len({message.partition() for message in messages}) == 3
    for message in messages:
        value = json.loads(message.value() or b"")
        headers = dict(message.headers() or [])  # type: ignore[arg-type]
        assert value == {"n": int(message.key() or b"")}
        assert headers["text"] == f"row {value['n']}".encode()
    places = {dict(message.headers() or [])["dagster-checkpoints"] for message in messages}  # type: ignore[call-overload]
    assert places == {f"conformance/stage/0/1.history/1/{number}".encode() for number in range(50)}
    sent = {json.loads(m.value() or b"")["n"]: m.partition() for m in messages}
    kafka.create_topic(f"{topic}-java", 3)  # the partition that Java's clients choose for this key: murmur2("7") % 3
    assert sent[7] == (_murmur2(b"7") & 0x7FFFFFFF) % 3
    order = [json.loads(m.value() or b"")["n"] for m in messages if m.partition() == sent[7]]
    assert order == sorted(order, key=_written_order)


def _written_order(n: int) -> tuple[int, int]:
    return n % 2, n  # a model job's batch has even numbers in its first file


def _murmur2(data: bytes) -> int:
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    if data[whole:]:
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_a_transaction_is_larger_than_the_queue_of_the_producer(kafka: KafkaBroker, topic: str, job: Any) -> None:
    running = job(options={"queue.buffering.max.messages": 10})
    running.start()
    for checkpoint_id, rows in enumerate((10, 25, 11), 1):  # the queue is full when the last message is sent, or not
        running.write(rows)
        taken = running.checkpoint(checkpoint_id)
        assert numbers(kafka, topic) == taken.visible


class _Interrupted:
    """A producer whose first commit of messages reports a time-out, before or after it has committed."""

    def __init__(self, producer: Producer, faults: list[str]) -> None:
        self._producer = producer
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def commit_transaction(self, timeout: float) -> None:
        fault = self._faults.pop() if self._faults else ""
        if fault != "before":
            self._producer.commit_transaction(timeout)
        if fault:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer, {fault} the commit"))


@pytest.mark.parametrize("faults", [["before"], ["after"], ["after", "before", "before"]], ids="-".join)
def test_a_commit_of_unknown_outcome_is_looked_up(
    kafka: KafkaBroker, topic: str, job: Any, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of uncommitted messages may get messages twice, and sees it by their place."""
    running = job()
    running.start()
    running.write(5)
    taken = running.snapshot(1)
    producer, sends = KafkaCluster.producer, 1 + faults.count("before")
    monkeypatch.setattr(KafkaCluster, "producer", lambda *given: _Interrupted(producer(*given), faults))
    running.sinks[0]._sink._instance.target._transactions.close()
    running.commit(1)
    assert faults == [] and numbers(kafka, topic) == taken.visible
    seen = kafka.messages(topic, **{"isolation.level": "read_uncommitted"})
    assert len(seen) > 5 * (sends - 1)
    by_place = {dict(m.headers() or [])["dagster-checkpoints"]: json.loads(m.value() or b"")["n"] for m in seen}  # type: ignore[call-overload]
    assert sorted(by_place.values()) == taken.visible


def test_brokers_that_are_away_during_a_commit_are_waited_for(kafka: KafkaBroker, topic: str, job: Any) -> None:
    running = job()
    running.start()
    running.write(4)
    running.checkpoint(1)
    running.write(3)
    taken = running.snapshot(2)
    kafka.stop()
    threading.Timer(2, kafka.start).start()
    running.commit(2)
    assert numbers(kafka, topic) == taken.visible
    running.write(2)
    again = running.snapshot(3)
    kafka.freeze()
    threading.Timer(1, kafka.thaw).start()
    running.commit(3)
    assert numbers(kafka, topic) == again.visible


def test_a_commit_gives_up_and_another_attempt_commits(kafka: KafkaBroker, topic: str, job: Any) -> None:
    running = job()
    running.start()
    running.write(3)
    taken = running.snapshot(1)
    impatient(running)
    kafka.stop()
    try:
        with pytest.raises(SinkUnavailable, match=r"while (committing|reading)"):
            running.commit(1)
    finally:
        kafka.start()
    again = job()
    again.start(taken, epoch=2)
    assert numbers(kafka, topic) == taken.visible


def test_an_older_owner_that_takes_the_producer_away_does_not_stop_the_newer_one(
    kafka: KafkaBroker, topic: str, job: Any
) -> None:
    older, newer = job(), job()
    older.start(epoch=1)
    older.write(2)
    completed = older.checkpoint(1)
    older.write(1)
    late = older.snapshot(2)
    newer.start(completed, epoch=2)
    newer.write(3)
    # The older owner was paused after it had read the ledger, and creates its producer now.
    stolen = Producer(
        {"bootstrap.servers": kafka.servers, "transactional.id": f"dagster-checkpoints/conformance/stage/0/{topic}"}
    )
    stolen.init_transactions(20)
    with pytest.raises(SinkFenced, match="epoch 2"):
        older.sinks[0]._sink.commit(late.transactions[0][-1])
    taken = newer.checkpoint(2)
    assert numbers(kafka, topic) == taken.visible
    with pytest.raises(KafkaException) as fenced:
        stolen.begin_transaction()
        stolen.produce(topic, b"{}")
        stolen.commit_transaction(20)
    assert fenced.value.args[0].fatal()


@pytest.mark.parametrize("killed", [0, 1, 2], ids=["its own", "one opened later", "one that there is no more"])
@pytest.mark.parametrize("sent", ["messages", "record"])
def test_a_transaction_that_a_killed_run_has_left_open_is_not_waited_for(
    kafka: KafkaBroker, topic: str, job: Any, killed: int, sent: str
) -> None:
    """Killed while it sent, or between the ledger's record and the commit: what lies behind the record cannot be read."""
    earlier = job(instances=3)
    earlier.start()
    for index in range(3):
        earlier.write(2, index)
    taken = earlier.checkpoint(1)
    earlier.close()
    left = Producer(
        {"bootstrap.servers": kafka.servers, "transactional.id": f"dagster-checkpoints/conformance/stage/{killed}/{topic}"}
    )
    left.init_transactions(20)
    left.begin_transaction()
    left.produce(topic, b'{"n": -1}')
    if sent == "record":
        left.produce(f"{topic}-dagster-checkpoints", b"{}", b'["job","conformance","stage",0,"of the killed run"]')
    assert left.flush(20) == 0

    again = job(instances=2, retry_for=10)
    again.start(msgspec.structs.replace(taken, rows=taken.rows[:2], transactions=taken.transactions[:2]), epoch=2)
    again.write(3, 0)
    again.write(3, 1)
    expected = sorted([*again.checkpoint(2).visible, 2_000_000, 2_000_001])
    assert numbers(kafka, topic) == expected, "readers of committed messages do not wait, either"


def test_a_message_that_is_too_large_is_refused_before_its_checkpoint(kafka: KafkaBroker, tmp_path: Path) -> None:
    kafka.create_topic("small", max_message_bytes="1000")
    for length in (600, 1200):
        job = ModelJob(
            KafkaSink("small", kafka.servers, staging=tmp_path / "staging", at_new_start="keep"), tmp_path / str(length)
        )
        job.start(job_id=length)
        (tmp_path / "rows.parquet").unlink(missing_ok=True)
        pq.write_table(pa.table({"n": [length], "text": ["x" * length]}), tmp_path / "rows.parquet")
        if length > 1000:
            with pytest.raises(SinkRowsRefused, match=r"at most 1000 bytes, the topic's max.message.bytes, found one of 1"):
                job.sinks[0]._sink.write(None, [str(tmp_path / "rows.parquet")], 0)
        else:
            job.sinks[0]._sink.write(None, [str(tmp_path / "rows.parquet")], 0)
            job.checkpoint(1)
    assert numbers(kafka, "small") == [600]


def test_messages_that_the_topic_refuses_stay_staged(kafka: KafkaBroker, tmp_path: Path) -> None:
    kafka.create_topic("compacted", cleanup_policy="compact")
    job = ModelJob(KafkaSink("compacted", kafka.servers, staging=tmp_path / "staging"), tmp_path / "job")
    job.start()
    job.write(2)
    taken = job.snapshot(1)
    with pytest.raises(SinkRowsRefused, match="a compacted topic needs a key"):
        job.commit(1)
    assert numbers(kafka, "compacted") == []
    kafka.set_topic("compacted", cleanup_policy="delete")
    again = ModelJob(KafkaSink("compacted", kafka.servers, staging=tmp_path / "staging"), tmp_path / "job")
    again.start(taken, epoch=2)
    assert numbers(kafka, "compacted") == taken.visible


def test_wrong_topics_servers_and_credentials_are_refused(
    kafka: KafkaBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def check(topic: str, servers: Any, **options: Any) -> None:
        sink = pickle.loads(pickle.dumps(KafkaSink(topic, servers, staging=tmp_path, options=options, retry_for=6)))
        sink.check_new_start(ModelJob(sink, tmp_path).context(0, epoch=1))

    check(topic, kafka.servers)
    check(topic, kafka.servers_with_login, **LOGIN, **{"sasl.password": PASSWORD})
    with pytest.raises(InvalidSinkTopic, match="expected a topic 'missing', found none in the cluster"):
        check("missing", kafka.servers)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "rows.parquet")
    context = ModelJob(KafkaSink(topic, kafka.servers, staging=tmp_path), tmp_path).context(0, epoch=1)
    KafkaSink(topic, kafka.servers, staging=tmp_path).check_target(context, tmp_path / "rows.parquet")
    with pytest.raises(InvalidSinkTopic, match="expected a topic 'missing', found none in the cluster"):
        KafkaSink("missing", kafka.servers, staging=tmp_path).check_target(context, tmp_path / "rows.parquet")
    assert "missing" not in kafka.topics()
    with pytest.raises(SinkUnavailable, match=r"looking up topic .*127\.0\.0\.1:1/bootstrap"):
        check(topic, "127.0.0.1:1")
    with pytest.raises(InvalidSinkTopic, match=r"Authentication failed.* Correct the credentials") as refused:
        check(topic, kafka.servers_with_login, **LOGIN, **{"sasl.password": "wrong one"})
    assert "wrong one" not in str(refused.value)
    with pytest.raises(InvalidSinkTopic, match='No such configuration property: "colour"'):
        check(topic, kafka.servers, colour="blue")
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(
        InvalidSinkTopic, match=r"sasl.password in the environment variable KAFKA_PASSWORD, found that it is not set"
    ):
        check(topic, kafka.servers, **{"sasl.password": Variable("KAFKA_PASSWORD")})
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    monkeypatch.setenv("KAFKA_SERVERS", kafka.servers_with_login)
    check(topic, Variable("KAFKA_SERVERS"), **LOGIN, **{"sasl.password": Variable("KAFKA_PASSWORD")})


def test_a_transaction_time_that_brokers_do_not_allow_is_refused(kafka: KafkaBroker, job: Any) -> None:
    with pytest.raises(InvalidSinkTopic, match=r"transaction.max.timeout.ms is less than"):
        job(options={"transaction.timeout.ms": 1_000_000}).start()


def test_topics_that_are_deleted_under_a_job(kafka: KafkaBroker, topic: str, job: Any) -> None:
    running = job()
    running.start()
    running.write(2)
    taken = running.snapshot(1)
    impatient(running)
    kafka.delete_topic(topic)
    with pytest.raises((SinkTargetChanged, SinkUnavailable)):
        running.commit(1)
    with pytest.raises(InvalidSinkTopic, match="found none in the cluster"):
        job().start(taken, epoch=2)
    kafka.create_topic(topic)
    job().start(taken, epoch=2)
    assert numbers(kafka, topic) == taken.visible
    kafka.delete_topic(f"{topic}-dagster-checkpoints")
    with pytest.raises(SinkTargetChanged, match="rows might be sent twice"):
        job().start(taken, epoch=3)
    assert numbers(kafka, topic) == taken.visible


def test_a_ledger_topic_that_another_program_has_created_is_refused(kafka: KafkaBroker, topic: str, job: Any) -> None:
    kafka.create_topic(f"{topic}-dagster-checkpoints", 2)
    with pytest.raises(InvalidSinkTopic, match=r"one partition and cleanup.policy=compact, found 2 partitions"):
        job().start()


def test_staged_files_that_are_lost_are_reported(kafka: KafkaBroker, topic: str, job: Any, tmp_path: Path) -> None:
    running = job()
    running.start()
    running.write(2)
    taken = running.snapshot(1)
    (lost,) = (tmp_path / "staging").rglob("*.arrow")
    os.truncate(lost, 10)
    with pytest.raises(SinkTransactionLost, match="expected the 1 files of a pre-committed transaction"):
        running.commit(1)
    lost.unlink()
    with pytest.raises(SinkTransactionLost):
        job().start(taken, epoch=2)
    assert numbers(kafka, topic) == []


def test_an_older_restore_that_may_write_again_is_remembered(kafka: KafkaBroker, topic: str, job: Any) -> None:
    running = job()
    running.start()
    running.write(2)
    older = running.checkpoint(1)
    running.write(2)
    running.checkpoint(2)
    with pytest.raises(SinkCannotTakeBack, match=r"older checkpoint, .* checkpoints up to 2.*write_again"):
        job().start(older, epoch=2)
    again = job(older_restore="write_again")
    again.start(older, epoch=3)
    again.write(2)
    taken = again.checkpoint(3)
    assert numbers(kafka, topic) == [0, 1, 2, 2, 3, 3]
    later = job()  # the rows that came twice are known, and are no reason to refuse the next restore
    later.start(taken, epoch=4)
    later.write(1)
    later.checkpoint(4)
    assert numbers(kafka, topic) == [0, 1, 2, 2, 3, 3, 4]
