"""What KafkaSink alone does: messages, what it refuses, brokers that are away, owners that were replaced, readers."""

from __future__ import annotations

import base64
import datetime as dt
import inspect
import json
import os
import pickle
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from bench.kafka_broker import PASSWORD, KafkaBroker
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.errors import InvalidDurationError
from dagster_checkpoints.sinks import (
    InvalidSinkPath,
    InvalidSinkTopic,
    KafkaSink,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkFenced,
    SinkPathInUse,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionLost,
    SinkUnavailable,
)
from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.sinks.kafka.ledger_topic import LedgerValues, ledger_key
from dagster_checkpoints.sinks.kafka.messages import MessageFormat
from dagster_checkpoints.sinks.ledger import SinkOwner
from dagster_checkpoints.testing.model_job import ModelJob

LOGIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "tester"}
TEXTS = ["plain", 'a "quote" and a \\', "line\nand\ttab\r\b\f\x00\x1f", "§ 漢 😀 \u2028", "", None]


class Variable:
    """Stands for ``dg.EnvVar``."""

    def __init__(self, name: str) -> None:
        self.env_var_name = name


def formatted(table: pa.Table, **settings: Any) -> pa.RecordBatch:
    messages = MessageFormat(**{"key": None, "value": None, "headers": (), "sink": "sink", **settings})
    messages.check(table.schema)
    (batch,) = table.combine_chunks().to_batches()
    return messages.encoded(batch)


# Messages


def test_a_value_is_json_that_gives_every_value_back() -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC)
    columns: dict[str, Any] = {
        'text "§"': TEXTS,
        "n": pa.array([1, -(2**63), 2**63 - 1, 0, 7, None], pa.int64()),
        "x": [0.1, 1e300, -2.5, float("nan"), float("-inf"), None],
        "price": pa.array(
            [Decimal("12.50"), Decimal("-0.01"), Decimal("1E+5"), Decimal(0), Decimal("0.05"), None], pa.decimal128(20, 2)
        ),
        "ok": [True, False, True, False, True, None],
        "at": pa.array([moment] * 5 + [None], pa.timestamp("us", "America/New_York")),
        "wall": pa.array([moment.replace(tzinfo=None)] * 5 + [None], pa.timestamp("us")),
        "day": pa.array([dt.date(2024, 2, 29)] * 5 + [None], pa.date32()),
        "data": [b"\x00\xff", b"", b"a", b"ab", b"abc", None],
    }
    table = pa.table(columns)
    values = [json.loads(value, parse_float=Decimal) for value in formatted(table).column("value").to_pylist()]
    assert [list(value) for value in values] == [list(columns)] * 6
    assert [value['text "§"'] for value in values] == TEXTS
    assert [value["n"] for value in values] == table["n"].to_pylist()
    assert [value["price"] for value in values] == table["price"].to_pylist()
    assert [value["ok"] for value in values] == table["ok"].to_pylist()
    assert [value["x"] if isinstance(value["x"], str) else value["x"] and float(value["x"]) for value in values] == [
        0.1, 1e300, -2.5, "NaN", "-Infinity", None
    ]  # fmt: skip
    assert [value["at"] and dt.datetime.fromisoformat(value["at"]) for value in values] == [moment] * 5 + [None]
    assert values[0]["wall"] == "2026-01-02T03:04:05.000006" and values[0]["day"] == "2024-02-29"
    assert [value["data"] if value["data"] is None else base64.b64decode(value["data"]) for value in values] == columns["data"]


def test_columns_become_keys_values_and_headers_as_they_are() -> None:
    table = pa.table({"k": [1, None], "v": [b"\xff", None], "h": ["§", None], "at": [dt.datetime(2026, 1, 1), None]})
    found = formatted(table, key="k", value="v", headers=("h", "at")).to_pydict()
    assert found == {
        "key": [b"1", None],
        "value": [b"\xff", None],
        "headers.h": ["§".encode(), None],
        "headers.at": [b"2026-01-01T00:00:00.000000", None],
    }
    assert formatted(table.select(["k", "h"]), headers=("h",)).column("value").to_pylist() == [b'{"k":1}', b'{"k":null}']


@pytest.mark.parametrize(
    ("settings", "columns", "expected"),
    [
        ({"key": "id"}, {"n": [1]}, "expected the column 'id' that KafkaSink\\(key=...\\) names, found the columns n"),
        ({"value": "body"}, {"n": [1]}, "expected the column 'body' that KafkaSink\\(value=...\\) names"),
        ({"headers": ("n",)}, {"n": [1]}, "found that every column is a header"),
        ({}, {"n": [1], "tags": [["a"]]}, "column 'tags' to be a number, .* found list<.*F.to_json\\('tags'\\)"),
    ],
)
def test_columns_that_cannot_be_messages_are_refused(settings: Any, columns: Any, expected: str) -> None:
    with pytest.raises(SinkColumnsMismatch, match=expected):
        formatted(pa.table(columns), **settings)


# Definition


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"topic": "a/b"}, "expected a topic's name of letters"),
        ({"topic": "a" * 240}, "at most 229 characters"),
        ({"at_new_start": "replace"}, "messages cannot be removed from a topic"),
        ({"older_restore": "hide"}, "'refuse' or 'write_again'"),
        ({"retry_for": -1}, r"retry_for=\.\.\.\): expected at least 0 seconds"),
        ({"options": {"transactional.id": "x", "acks": "1"}}, "without acks, transactional.id"),
    ],
)
def test_settings_are_checked_at_definition(settings: Any, expected: str) -> None:
    with pytest.raises((ValueError, InvalidDurationError), match=expected):
        KafkaSink(**{"topic": "t", "bootstrap_servers": "broker:9092", "staging": "/tmp/s", **settings})


def test_the_staging_directory_is_a_local_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidSinkPath, match="s3://bucket/staging"):
        KafkaSink("t", "broker:9092", staging="s3://bucket/staging")
    assert KafkaSink("t", "broker:9092", staging=tmp_path.as_uri()).staging == tmp_path


def test_a_topic_has_one_location_and_options_are_not_shown() -> None:
    one = KafkaSink("t", "b:9092, a:9092", staging="/s", options={"sasl.password": PASSWORD})
    other = KafkaSink("t", "a:9092,b:9092", staging="/other")
    assert one.location == other.location == "kafka://a:9092,b:9092/t"
    assert KafkaSink("t", Variable("SERVERS"), staging="/s").location == "kafka://$SERVERS/t"
    assert PASSWORD not in repr(one) and repr(one) == "KafkaSink('t', 'b:9092, a:9092')"


# The ledger

SCOPE = SinkScope("flights", "delays", 0, 1, "1.h1", SinkOwner(1, "h1"), "a1")


def test_records_of_an_earlier_release_are_those_of_the_stage() -> None:
    for kind, last in (("owner", ""), ("job", ',"1.h1"')):
        values = LedgerValues({f'["{kind}","flights","delays",0{last}]'.encode(): b"{}"})
        assert values.is_of_earlier_release(SCOPE)
        assert not values.is_of_earlier_release(msgspec.structs.replace(SCOPE, stage="others"))
    assert not LedgerValues({ledger_key(SCOPE): b"{}"}).is_of_earlier_release(SCOPE)


def test_a_ledger_that_cannot_be_read_is_refused_by_name() -> None:
    values = LedgerValues({ledger_key(SCOPE): b'{"version":2}'}, "t-ledger")
    for read in (values.ledger, values.of_stage):
        with pytest.raises(SinkPathInUse, match=r"topic 't-ledger'.*cannot be read: expected version 1, found 2"):
            read(SCOPE)


# On a broker


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


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        ([], "timed out. "),
        (["_ALL_BROKERS_DOWN"], "timed out (2/2 brokers are down)"),
        (["_TRANSPORT", "_ALL_BROKERS_DOWN"], "timed out (refused)"),
        (["_AUTHENTICATION", "_TRANSPORT", "_ALL_BROKERS_DOWN"], "timed out (wrong password). Correct the credentials"),
    ],
)
def test_errors_say_why_no_broker_can_be_reached(reports: list[str], named: str) -> None:
    cluster = KafkaCluster("127.0.0.1:1", {}, "sink", retry_for=1)
    tell = cluster._made(dict[str, Any], {})["error_cb"]
    texts = {"_ALL_BROKERS_DOWN": "2/2 brokers are down", "_TRANSPORT": "refused", "_AUTHENTICATION": "wrong password"}
    for report in reports:
        tell(KafkaError(getattr(KafkaError, report), texts[report]))
    error = cluster.failed(KafkaException(KafkaError(KafkaError._TIMED_OUT, "timed out")), "asking")
    assert f"while asking: {named}" in str(error)
    assert isinstance(error, InvalidSinkTopic if "password" in named else SinkUnavailable)


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


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs/sinks/kafka.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sinks/kafka.md", "exec"), names)
    _, large_sales = (each.sink for each in Pipeline("shop", [names["sales"], names["large_sales"]]).stages)
    assert large_sales is not None and large_sales.location == "kafka://$KAFKA_SERVERS/large-sales"
    settings = set(re.findall(r"^\| `(\w+)` \|", page.split("## What readers see")[0], re.MULTILINE))
    assert settings == set(inspect.signature(KafkaSink).parameters)
    (example,) = re.findall(r"^`(\{.*\})`: one line", page, re.MULTILINE)
    row = pa.table(
        {
            "n": [1],
            "text": ["a"],
            "at": pa.array([dt.datetime(2026, 1, 1)], pa.timestamp("us", "UTC")),
            "price": [Decimal("12.50")],
            "data": [b"\x00\xff"],
            "nothing": pa.nulls(1, pa.string()),
        }
    )
    assert formatted(row).column("value").to_pylist() == [example.encode()]
