"""Stages whose key groups are state partitions: other instances take whole partitions, and every row counts once."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.snapshots import moved_partitions, rescaled_state
from dagster_checkpoints.spark.snapshots.moved_partitions import MOST_EMPTY_VERSIONS
from dagster_checkpoints.spark.stored_state import read_state
from tests.spark.numbered_keys import NumberedKeys, numbered_by_key

ROWS = "k string, ts timestamp, v long"
KEYS = [f"key {number}" for number in range(40)]
PARTITIONS = 4


def pairs(rows: Any, others: Any) -> Any:
    soon = F.expr("r.k = o.k AND o.ts BETWEEN r.ts AND r.ts + INTERVAL 1 HOUR")
    return rows.alias("r").join(others.alias("o"), soon).select("r.k", "r.v", F.col("o.v").alias("other"))


def joining(lab: Any, instances: str) -> Pipeline:
    @unbounded_source(watermark=("ts", "1 day"))
    def rows(context):
        return lab.stream("rows", ROWS)

    @unbounded_source(watermark=("ts", "1 day"))
    def others(context):
        return lab.stream("others", ROWS)

    by_key = {"rows": StageInput(key="k"), "others": StageInput(key="k")}

    @stage(inputs=by_key, instances=list(instances), state_partitions=PARTITIONS, sink=lab.sink("joined"))
    def joined(rows, others):
        return pairs(rows, others)

    return Pipeline("partitions", [rows, others, joined])


def numbering(lab: Any, instances: str) -> Pipeline:
    @unbounded_source
    def rows(context):
        return lab.stream("rows", ROWS)

    @stage(
        inputs={"rows": StageInput(key="k")}, instances=list(instances), state_partitions=PARTITIONS, sink=lab.sink("numbered")
    )
    def numbered(rows):
        return numbered_by_key(rows)

    return Pipeline("numbered", [rows, numbered])


def wait_for_count(job: Any, name: str, count: int) -> None:
    job.wait_until(lambda: job.execution.rows().get(name) == count)


def wait_for_rows(job: Any, count: int) -> None:
    for feed in ("rows", "others"):
        wait_for_count(job, feed, count)


def test_whole_partitions_move_between_four_one_and_two_instances(lab: Any, monkeypatch: Any) -> None:
    """Of four instances each has one partition, not as many as the session. A file with few keys gives few instances a batch, so
    that the partitions of a later instance have different versions."""

    def rewrite(*_: Any) -> None:
        raise AssertionError("state was written again, row by row")

    monkeypatch.setattr(rescaled_state, "move_state", rewrite)
    put = 0
    expected: set[str] = set()
    for instances in ("abcd", "x", "ab"):
        for number, keys in enumerate((KEYS, KEYS[:1], [KEYS[1], f"only with {instances}"])):
            for feed in ("rows", "others"):
                lab.put(feed, ROWS, [(key, lab.at(600 * number), number) for key in keys])
            put += len(keys)
            expected |= set(keys)
        job = lab.start(joining(lab, instances), interval=3600.0)
        wait_for_rows(job, put)
        assert (job.wait_for(JobStarted).restored_checkpoint is None) == (instances == "abcd")
        answer = job.ask("stop").result(120)
        job.finished()
    for keyed in read_state(lab.spark, answer.url, stage="joined").keyed:
        held = lab.rows(keyed.rows.select("partition_id", "key.field0").distinct())
        assert ({key for _, key in held}, {number for number, _ in held}) == (expected, {0, 1}), keyed.operator
    lab.check(pairs(lab.table("rows", ROWS), lab.table("others", ROWS)), "joined")


@pytest.mark.parametrize(("most_empty_versions", "row_by_row"), [(MOST_EMPTY_VERSIONS, False), (-1, True)])
def test_a_processors_values_and_lists_move_whole_or_row_by_row_where_very_many_versions_were_needed(
    lab: Any, monkeypatch: Any, most_empty_versions: int, row_by_row: bool
) -> None:
    moved, move_state = [], rescaled_state.move_state

    def move(*given: Any) -> Any:
        moved.append(given)
        return move_state(*given)

    monkeypatch.setattr(rescaled_state, "move_state", move)
    monkeypatch.setattr(moved_partitions, "MOST_EMPTY_VERSIONS", most_empty_versions)
    expected, number = NumberedKeys(), 0
    for instances in ("abcd", "x", "ab"):
        for keys in (KEYS, KEYS[:1], [KEYS[1], f"only with {instances}"]):
            lab.put("rows", ROWS, [(key, lab.at(0), number) for key in keys])
            expected.put(keys, number)
            number += 1
        job = lab.start(numbering(lab, instances), interval=3600.0)
        wait_for_count(job, "numbered", len(expected.rows))
        job.ask("stop").result(120)
        job.finished()
        lab.check(expected.rows, "numbered")
    assert bool(moved) == row_by_row
