"""Restores with another number of state partitions: every row counts once, in each kind of state."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pyspark
import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, stage, unbounded_source
from dagster_checkpoints.sinks import SqlSink
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS
from dagster_checkpoints.spark.session.spark_session import ROCKSDB
from dagster_checkpoints.spark.snapshots import rewritten_state
from dagster_checkpoints.spark.stored_state import read_state
from dagster_checkpoints.state.errors import StatePartitionsChanged
from dagster_checkpoints.state.spark_versions import rewrites_state
from tests.spark.numbered_keys import NumberedKeys, numbered_by_key

ROWS = "k string, ts timestamp, v long"
KEYS = [f"key {number}" for number in range(30)]
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
OTHER_STORE = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
STAGES = ("hours", "pairs", "firsts", "numbered", "sessions", "counted", "total")


@pytest.fixture
def partitions(lab: Any) -> Iterator[Any]:
    before = lab.spark.conf.get(STATE_PARTITIONS)
    yield lambda number: lab.spark.conf.set(STATE_PARTITIONS, number)
    lab.spark.conf.set(STATE_PARTITIONS, before)


def in_hours(rows: Any) -> Any:
    counted = rows.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def paired(rows: Any, others: Any) -> Any:
    soon = F.expr("r.k = o.k AND o.ts BETWEEN r.ts AND r.ts + INTERVAL 1 HOUR")
    return rows.alias("r").join(others.alias("o"), soon, "left").select("r.k", "r.v", F.col("o.v").alias("other"))


def sessions_of(rows: Any) -> Any:
    return rows.groupBy(F.session_window("ts", "1 hour").alias("session"), "k").agg(F.count("*").alias("n")).select("k", "n")


def counted_by_key(rows: Any) -> Any:
    import pandas as pd

    def update(key: Any, batches: Any, state: Any) -> Any:
        count = state.get[0] if state.exists else 0
        for batch in batches:
            for v in sorted(batch["v"]):
                count += 1
                yield pd.DataFrame({"k": [key[0]], "v": [v], "number": [count]})
        state.update((count,))

    return rows.groupBy("k").applyInPandasWithState(update, "k string, v long, number long", "n long", "append", "NoTimeout")


def flow(lab: Any, instances: str) -> Pipeline:
    @unbounded_source(watermark=("ts", "10 minutes"))
    def rows(context):
        return lab.stream("rows", ROWS)

    @unbounded_source(watermark=("ts", "10 minutes"))
    def others(context):
        return lab.stream("others", ROWS)

    @stage(inputs={"rows": StageInput(key="k")}, instances=list(instances), sink=lab.sink("hours"))
    def hours(rows):
        return in_hours(rows)

    @stage(sink=lab.sink("pairs"))
    def pairs(rows, others):
        return paired(rows, others)

    @stage(sink=lab.sink("firsts"))
    def firsts(rows):
        return rows.select("k").dropDuplicates()

    @stage(sink=lab.sink("numbered"))
    def numbered(rows):
        return numbered_by_key(rows)

    @stage(sink=lab.sink("sessions"))
    def sessions(rows):
        return sessions_of(rows)

    @stage(sink=lab.sink("counted"))
    def counted(rows):
        return counted_by_key(rows)

    @stage(output_mode="update", sink=SqlSink(f"sqlite:///{lab.folder}/total.db", "total", key="name"))
    def total(rows):
        return rows.agg(F.count("*").alias("n"), F.sum("v").alias("v")).select(F.lit("all").alias("name"), "n", "v")

    return Pipeline("repartitioned", [rows, others, hours, pairs, firsts, numbered, sessions, counted, total])


def partitions_of(lab: Any, url: str, stages: Sequence[str] = STAGES) -> dict[str, set[int]]:
    """By stage, the numbers of the state partitions that hold a key."""
    found: dict[str, set[int]] = {}
    for name in stages:
        for keyed in read_state(lab.spark, url, stage=name).keyed:
            found.setdefault(name, set()).update(row[0] for row in lab.rows(keyed.rows.select("partition_id").distinct()))
    return found


def wait_for_rows(job: Any, count: int) -> None:
    job.wait_until(lambda: [job.execution.rows().get(name) for name in ("rows", "others", "numbered", "counted")] == [count] * 4)


@pytest.mark.skipif(not rewrites_state(pyspark.__version__), reason="needs Spark 4.2 or later")
def test_each_kind_of_state_in_more_and_fewer_partitions_with_and_without_other_instances(lab: Any, partitions: Any) -> None:
    put, number = 0, 0
    expected = NumberedKeys()
    for wanted, hours in ((2, "ab"), (5, "abc"), (3, "abc")):
        partitions(wanted)
        for keys in (KEYS, KEYS[7:12]):
            lab.put("rows", ROWS, [(key, lab.at(900 * number), number) for key in keys])
            lab.put("others", ROWS, [(key, lab.at(900 * number + 60), number) for key in keys])
            expected.put(keys, number)
            put += len(keys)
            number += 1
        job = lab.start(flow(lab, hours), interval=3600.0, repartition_state=wanted != 2)
        wait_for_rows(job, put)
        if wanted == 3:
            job.drain()
            job.finished()
            break
        url = job.ask("stop").result(120).url
        job.finished()
        held = partitions_of(lab, url)
        assert held.pop("total") == {0}
        assert set().union(*held.values()) == held["firsts"] == held["numbered"] == set(range(wanted)), held
    rows, others = lab.table("rows", ROWS), lab.table("others", ROWS)
    lab.check(in_hours(rows), "hours")
    lab.check(paired(rows, others), "pairs")
    lab.check([(key,) for key in KEYS], "firsts")
    lab.check(expected.rows, "numbered")
    lab.check([row[:3] for row in expected.rows], "counted")
    lab.check(sessions_of(rows), "sessions")
    with closing(sqlite3.connect(lab.folder / "total.db")) as database:
        assert database.execute("SELECT name, n, v FROM total").fetchall() == [("all", put, sum(v for _, v, *_ in expected.rows))]


def deduplicating(lab: Any) -> Pipeline:
    @unbounded_source
    def rows(context):
        return lab.stream("rows", ROWS)

    @stage(sink=lab.sink())
    def firsts(rows):
        return rows.select("k").dropDuplicates()

    return Pipeline("deduplicating", [rows, firsts])


@pytest.mark.parametrize("store", [ROCKSDB, OTHER_STORE])
def test_state_keeps_its_partitions_if_no_other_is_asked_for_or_it_cannot_be_written_again(
    lab: Any, partitions: Any, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    def partitions_after(keys: list[str], rows: int) -> set[int]:
        lab.put("rows", ROWS, [(key, lab.at(0), 0) for key in keys])
        job = lab.start(deduplicating(lab), interval=3600.0)
        job.wait_until(lambda: job.execution.rows().get("firsts") == rows)
        url = job.ask("stop").result(120).url
        job.finished()
        return partitions_of(lab, url, ["firsts"])["firsts"]

    monkeypatch.setattr(rewritten_state, "rewrites_state", lambda version: store != ROCKSDB)
    lab.spark.conf.set(PROVIDER, store)
    try:
        partitions(2)
        assert partitions_after(KEYS[:20], 20) == {0, 1}
        partitions(3)
        assert partitions_after(KEYS, 30) == {0, 1}
        job = lab.start(deduplicating(lab), repartition_state=True)
        refused = job.result().error
    finally:
        lab.spark.conf.set(PROVIDER, ROCKSDB)
    found = r"Spark 4.2 or later, .* found Spark" if store == ROCKSDB else r"state in RocksDB, .* found .*HDFSBacked"
    text = rf"Stage 'rows', .*savepoint-.* expected {found}.*\. The state keeps its 2 partitions: leave out repartition_state"
    assert isinstance(refused, StatePartitionsChanged) and re.search(text, str(refused)), refused
    assert not job.of(JobStarted)
    lab.check([(key,) for key in KEYS])
