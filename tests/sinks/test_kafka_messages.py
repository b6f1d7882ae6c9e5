"""What KafkaSink alone does that needs no broker: messages, settings, places, the texts of errors."""

from __future__ import annotations

import base64
import datetime as dt
import inspect
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from bench.kafka_broker import PASSWORD
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.errors import InvalidDurationError
from dagster_checkpoints.sinks import (
    InvalidSinkPath,
    InvalidSinkTopic,
    KafkaSink,
    SinkColumnsMismatch,
    SinkPathInUse,
    SinkRowsRefused,
    SinkUnavailable,
)
from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.sinks.kafka.messages import MessageFormat
from dagster_checkpoints.sinks.kafka.topics import LedgerValues, ledger_key
from dagster_checkpoints.sinks.ledger import SinkOwner

TEXTS = ["plain", 'a "quote" and a \\', "line\nand\ttab\r\b\f\x00\x1f", "§ 漢 😀 \u2028", "", None]
SCOPE = SinkScope("flights", "delays", 0, 1, "1.h1", SinkOwner(1, "h1"), "a1")


class Variable:
    """Stands for ``dg.EnvVar``."""

    def __init__(self, name: str) -> None:
        self.env_var_name = name


def formatted(table: pa.Table, **settings: Any) -> pa.RecordBatch:
    messages = MessageFormat(**{"key": None, "value": None, "headers": (), "sink": "sink", **settings})
    messages.check(table.schema)
    (batch,) = table.combine_chunks().to_batches()
    return messages.encoded(batch)


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


def test_a_column_that_is_not_sent_may_hold_what_no_message_can() -> None:
    """As of a message that could not be parsed: its bytes are sent on, and a copy of them as text is left out."""
    data = pa.array([b"\xff {", b"{}"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, data.buffers())
    table = pa.table({"value": data, "refused_by": ["is_parsed", "is_known"], "_corrupt_record": text})
    sent = formatted(table, value="value", headers=("refused_by",))
    assert sent.column("value").to_pylist() == [b"\xff {", b"{}"]
    for settings in ({}, {"value": "_corrupt_record"}, {"value": "value", "headers": ("_corrupt_record",)}):
        with pytest.raises(SinkRowsRefused, match=r"expected text in UTF-8, found b'\\xff \{' in column '_corrupt_record'"):
            formatted(table, **settings)


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


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/sinks/kafka.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("settings", [{}, {"key": "i"}, {"value": "i"}, {"headers": ("i",)}])
def test_an_interval_is_refused_although_it_is_a_number_in_the_file(settings: dict[str, Any]) -> None:
    fields = [{"name": "i", "type": "interval day to second"}, {"name": "n", "type": "long"}]
    recorded = {"org.apache.spark.sql.parquet.row.metadata": json.dumps({"type": "struct", "fields": fields})}
    rows = pa.table({"i": pa.array([1], pa.int64()), "n": [1]}).replace_schema_metadata(recorded)
    with pytest.raises(SinkColumnsMismatch, match=r"column 'i' .* found interval day to second"):
        formatted(rows, **settings)
