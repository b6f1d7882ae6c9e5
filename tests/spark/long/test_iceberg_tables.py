"""A pipeline that commits to a Iceberg table: Spark's files become the table's, through a failure and in a second job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import IcebergSink, SinkCommit, SinkHoldsEarlierRows

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


class FailingIcebergSink(IcebergSink):
    """Fails once, after a commit whose answer is lost."""

    def __init__(self, warehouse: Path, fault: Path, **settings: Any) -> None:
        super().__init__("lab.typed", warehouse=warehouse, **settings)
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

        @stage(sink=FailingIcebergSink(lab.folder / "lake", fault, **settings))
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


def _typed() -> Sequence[Any]:
    return [F.expr(line.strip().rstrip(",")) for line in TYPES.strip().split(",\n")]


def _check(lab: Any, expected: list[tuple[str, int]]) -> None:
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{lab.folder}/lake/catalog.db")
    scan = catalog.load_table("lab.typed").scan()
    files = [task.file.file_path for task in scan.plan_files()]
    found = lab.spark.read.parquet(*files)
    wanted = lab.spark.createDataFrame(expected, ROWS).select("*", *_typed())
    assert lab.rows(found.drop("nothing")) == lab.rows(wanted.drop("nothing"))
    rows = scan.to_arrow()
    catalog.close()
    assert sorted((row["k"], row["v"]) for row in rows.select(["k", "v"]).to_pylist()) == sorted(expected)
    assert all(row["nested"]["a"] == row["v"] and row["even"] == (row["v"] % 2 == 0) for row in rows.to_pylist())
