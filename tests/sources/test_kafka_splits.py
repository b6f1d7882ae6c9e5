"""Ranges of Kafka topics as splits: their order, and what is refused before a broker is asked."""

from __future__ import annotations

import datetime as dt
import logging
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from py4j.java_gateway import JavaPackage

from dagster_checkpoints.pipeline import DiscoveryContext, split_source
from dagster_checkpoints.pipeline.errors import InvalidSplitSourceError
from dagster_checkpoints.sources import InvalidSource, KafkaSplit, KafkaSplits, SourceLibraryMissing
from dagster_checkpoints.sources.splits.kafka import in_order

SERVERS = {"kafka.bootstrap.servers": "broker:9092"}
DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def test_ranges_are_in_the_order_of_their_place_in_their_partition() -> None:
    starts = {("a", 0): 0, ("a", 1): 7, ("a", 2): 5, ("b", 0): 100, ("b", 1): 9}
    ends = {("a", 0): 40, ("a", 1): 7, ("a", 2): 4, ("b", 0): 119, ("b", 1): 10}
    found = [(each.topic, each.partition, each.start, each.end) for each in in_order(starts, ends, 10)]
    assert found == [
        ("a", 0, 0, 10),
        ("b", 0, 100, 110),
        ("b", 1, 9, 10),
        ("a", 0, 10, 20),
        ("a", 0, 20, 30),
        ("b", 0, 110, 119),
        ("a", 0, 30, 40),
    ]
    assert in_order(starts, ends, None) == [
        KafkaSplit("a", 0, 0, 40),
        KafkaSplit("b", 0, 100, 119),
        KafkaSplit("b", 1, 9, 10),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, r"names of topics, or a pattern of them, found topics=\(\) and pattern=None"),
        ({"topics": "t", "pattern": "t.*"}, "found topics='t' and pattern='t.*'"),
        ({"topics": ["t", ""]}, "names of topics"),
        ({"pattern": "t("}, "expected a regular expression .* found 't\\('"),
        ({"topics": "t", "options": {}}, "with kafka.bootstrap.servers: options="),
        (
            {"topics": "t", "options": {**SERVERS, "startingOffsets": "latest"}},
            "which messages are read, found 'startingOffsets'",
        ),
        ({"topics": "t", "start": "earliest"}, "of datetime.datetime with a time zone, .* found 'earliest' and None"),
        ({"topics": "t", "end": dt.datetime(2026, 1, 1)}, "with a time zone"),
        ({"topics": "t", "start": DAY, "end": DAY}, "start to be before end"),
        ({"topics": "t", "rows_per_split": 0}, "rows_per_split of at least 1, or None, found 0"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSource, match=text):
        KafkaSplits(**{"options": SERVERS, **arguments})


def context(bounded: bool, spark: Any = None) -> DiscoveryContext:
    return DiscoveryContext(spark, "sales", logging.getLogger("tests"), bounded=bounded)


def test_an_unbounded_source_is_refused() -> None:
    splits = KafkaSplits("t", SERVERS)
    with pytest.raises(InvalidSplitSourceError, match=r"'sales'.*found bounded=False: .*readStream\.format\(.kafka.\)"):
        split_source(schema="value BINARY", discover=splits, split_type=KafkaSplit, bounded=False, name="sales")(
            lambda split: split
        )
    with pytest.raises(InvalidSource, match=r"of 'sales': expected a bounded source: .* at one moment"):
        splits(context(bounded=False))


def test_what_is_missing_is_named_and_credentials_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {**SERVERS, "kafka.sasl.jaas.config": dg.EnvVar("SALES_LOGIN")}
    splits = KafkaSplits("t", secret)
    monkeypatch.delenv("SALES_LOGIN", raising=False)
    with pytest.raises(InvalidSource, match=r"kafka.sasl.jaas.config in the environment variable SALES_LOGIN, .* not set"):
        splits(context(bounded=True))
    monkeypatch.setenv("SALES_LOGIN", "open sesame")
    admin = SimpleNamespace(AdminClient=JavaPackage("org.apache.kafka.clients.admin.AdminClient", None))
    kafka = SimpleNamespace(clients=SimpleNamespace(admin=admin))
    spark = SimpleNamespace(_jvm=SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(kafka=kafka))))
    with pytest.raises(SourceLibraryMissing, match=r"of 'sales': expected Spark's connector .*spark\.jars\.packages"):
        splits(context(bounded=True, spark=spark))
    assert "open sesame" not in repr(splits) and "SALES_LOGIN" not in repr(splits)
