"""A pipeline that commits to a Delta table: Spark's files become the table's, through a failure and in a second job."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import DeltaSink, SinkCommit, SinkHoldsEarlierRows

ROWS = "k string, v long"
TYPES = """
    named_struct('a', v, 'b', array(CAST(v AS INT), NULL)) AS nested,
    map(k, CAST(v AS SMALLINT)) AS counts,
    CAST(v / 4 AS DECIMAL(9, 2)) AS small_amount,
    CAST(-v AS DECIMAL(38, 18)) AS amount,
    timestamp_seconds(v * 3600) AS at,
    TIMESTAMP_NTZ '2024-01-01 10:00:00.000001' AS wall,
    DATE '2024-02-29' AS day,
    X'00ff' AS bytes,
    float('nan') AS nothing,
    v % 2 = 0 AS even
"""


class FailingDeltaSink(DeltaSink):
    """Fails once, after a commit whose answer is lost."""

    def __init__(self, table: Path, fault: Path, **settings: Any) -> None:
        super().__init__(table, **settings)
        self.fault = fault

    def commit(self, transaction: str) -> SinkCommit:
        done = super().commit(transaction)
        if self.fault.exists():
            self.fault.unlink()
            raise OSError("the answer was lost")
        return done


def test_rows_of_all_types_arrive_once_through_a_failure_and_a_second_job(lab: Any) -> None:
    for name in "ab":
        for part in range(3):
            lab.put(name, ROWS, [(f"{name}{n % 3}", n + 10 * part) for n in range(10)])
    fault = lab.folder / "fault"
    fault.touch()

    def copying(**settings: Any) -> Pipeline:
        @bounded_source(instances=["a", "b"])
        def numbers(context: StageContext) -> DataFrame:
            return lab.stream(context.instance, ROWS)  # type: ignore[no-any-return]

        @stage(sink=FailingDeltaSink(lab.folder / "delta", fault, **settings))
        def typed(numbers: DataFrame) -> DataFrame:
            return numbers.select("*", *_typed())

        return Pipeline("typing", [numbers, typed])

    lab.start(copying(), restart=FixedDelayRestart(2, 0.1)).finished()
    assert not fault.exists()
    expected = [(f"{name}{n % 3}", n + 10 * part) for name in "ab" for part in range(3) for n in range(10)]
    _check(lab, expected)
    with pytest.raises(SinkHoldsEarlierRows, match=r"job 1"):
        lab.start(copying()).result()
    lab.start(copying(at_new_start="replace")).finished()
    _check(lab, expected)


def test_rows_are_replaced_by_key_and_by_partition_through_a_failure_and_in_a_second_job(lab: Any) -> None:
    """Totals are counted on in update mode, while a reader polls and another program compacts the table."""
    fault = lab.folder / "fault"
    fault.touch()
    totals_table, days_table = lab.folder / "totals", lab.folder / "days"
    seen: list[list[tuple[str, int]]] = []

    @bounded_source
    def numbers(context: StageContext) -> DataFrame:
        return lab.stream("numbers", ROWS)  # type: ignore[no-any-return]

    @stage(sink=FailingDeltaSink(totals_table, fault, key="k", at_new_start="keep"), output_mode="update")
    def totals(numbers: DataFrame) -> DataFrame:
        return numbers.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))

    @stage(sink=DeltaSink(days_table, partition_by="k", overwrite_partitions=True, at_new_start="keep"))
    def days(numbers: DataFrame) -> DataFrame:
        return numbers

    def poll() -> None:
        while not ended.wait(0.02):
            if DeltaTable.is_deltatable(str(totals_table)):
                seen.append([(row["k"], row["n"]) for row in DeltaTable(totals_table).to_pyarrow_table().to_pylist()])
                if len(seen) % 10 == 0:
                    with suppress(CommitFailedError):  # the sink was faster
                        DeltaTable(totals_table).optimize.compact()

    for part in range(8):
        lab.put("numbers", ROWS, [(f"k{n % (part + 2)}", 100 * part + n) for n in range(10)])
    pipeline = Pipeline("sums", [numbers, totals, days])
    ended = Event()
    reader = Thread(target=poll)
    reader.start()
    try:
        lab.start(pipeline, restart=FixedDelayRestart(2, 0.1), interval=0.2).finished()
    finally:
        ended.set()
        reader.join(60)
    assert not fault.exists()
    rows = [(f"k{n % (part + 2)}", 100 * part + n) for part in range(8) for n in range(10)]
    assert _totals(totals_table) == _summed(rows)
    assert sorted(_pairs(days_table)) == sorted(rows)
    assert seen and [found for found in seen if len(found) != len(dict(found))] == []  # never two rows of one key
    for before, after in pairwise(map(dict, seen)):
        assert all(after.get(k, 0) >= n for k, n in before.items())

    shutil.rmtree(lab.input("numbers"))
    lab.put("numbers", ROWS, [("k1", 5), ("new", 6)])
    lab.start(pipeline).finished()
    assert _totals(totals_table) == {**_summed(rows), "k1": (1, 5), "new": (1, 6)}
    assert sorted(_pairs(days_table)) == sorted([row for row in rows if row[0] != "k1"] + [("k1", 5), ("new", 6)])


def _totals(table: Path) -> dict[str, tuple[int, int]]:
    found = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert len({row["k"] for row in found}) == len(found)
    return {row["k"]: (row["n"], row["total"]) for row in found}


def _summed(rows: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    values = {k: [v for key, v in rows if key == k] for k, _ in rows}
    return {k: (len(each), sum(each)) for k, each in values.items()}


def _pairs(table: Path) -> list[tuple[str, int]]:
    return [(row["k"], row["v"]) for row in DeltaTable(table).to_pyarrow_table().to_pylist()]


def _typed() -> Sequence[Any]:
    return [F.expr(line.strip().rstrip(",")) for line in TYPES.strip().split(",\n")]


def _check(lab: Any, expected: list[tuple[str, int]]) -> None:
    table = DeltaTable(lab.folder / "delta")
    files = [str(file) for file in table.file_uris()]
    found = lab.spark.read.parquet(*files)
    wanted = lab.spark.createDataFrame(expected, ROWS).select("*", *_typed())
    assert lab.rows(found.drop("nothing")) == lab.rows(wanted.drop("nothing"))
    rows = table.to_pyarrow_table()
    assert sorted((row["k"], row["v"]) for row in rows.select(["k", "v"]).to_pylist()) == sorted(expected)
    assert all(row["nested"]["a"] == row["v"] and row["even"] == (row["v"] % 2 == 0) for row in rows.to_pylist())
