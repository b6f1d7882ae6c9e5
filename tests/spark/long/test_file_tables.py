"""A pipeline that commits to files of all formats: Spark reads back the same rows, through a failure and in a second job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage
from dagster_checkpoints.sinks import FileSink, SinkCommit, SinkHoldsEarlierRows

ROWS = "k string, v long"
FLAT = {
    "small": "CAST(v AS SMALLINT)",
    "amount": "CAST(-v AS DECIMAL(38, 18))",
    "share": "IF(v = 3, double('nan'), IF(v = 4, double('-infinity'), v / 7))",
    "at": "timestamp_micros(v * 3600000001)",
    "wall": "TIMESTAMP_NTZ '2024-01-01 10:00:00.000001'",
    "day": "date_add(DATE '2024-02-28', CAST(v AS INT))",
    "even": "IF(v = 5, NULL, v % 2 = 0)",
    "text": "IF(v = 1, '', IF(v = 2, NULL, concat('\"quoted\", \\\\ and\\nlonger ', v)))",
}
NESTED = {
    "items": "array(named_struct('a', v, 'at', timestamp_seconds(v)), NULL)",
    "counts": "map(k, CAST(v AS SMALLINT))",
    "bytes": "IF(v = 1, NULL, X'00ff')",
}


class FailingFileSink(FileSink):
    """Fails once, after a commit whose answer is lost."""

    def __init__(self, fault: Path, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.fault = fault

    def commit(self, transaction: str) -> SinkCommit:
        done = super().commit(transaction)
        if self.fault.exists():
            self.fault.unlink()
            raise OSError("the answer was lost")
        return done


def test_rows_of_all_types_are_read_back_once_through_a_failure_and_a_second_job(lab: Any) -> None:
    for name in "ab":
        for part in range(3):
            lab.put(name, ROWS, [(f"{name}{n % 3}", n + 10 * part) for n in range(10)])
    fault = lab.folder / "fault"
    fault.touch()

    def copying(at_new_start: Any = "refuse") -> Pipeline:
        def sink(format: Any, **settings: Any) -> FileSink:
            return FailingFileSink(fault, lab.folder / format, format, at_new_start=at_new_start, **settings)

        @bounded_source(instances=["a", "b"])
        def numbers(context: StageContext) -> DataFrame:
            return lab.stream(context.instance, ROWS)  # type: ignore[no-any-return]

        @stage(sink=sink("parquet"))
        def parquet(numbers: DataFrame) -> DataFrame:
            return _typed(numbers, FLAT | NESTED)

        @stage(sink=sink("orc", partition_by=["day", "k"]))
        def orc(numbers: DataFrame) -> DataFrame:
            return _typed(numbers, FLAT | NESTED).drop("wall")  # Spark reads it back as an instant

        @stage(sink=sink("csv", rows_per_file=4))
        def csv(numbers: DataFrame) -> DataFrame:
            return _typed(numbers, FLAT)

        @stage(sink=sink("json", manifest=True, partition_by="even"))
        def json(numbers: DataFrame) -> DataFrame:
            return _typed(numbers, FLAT | NESTED)

        return Pipeline("copying", [numbers, parquet, orc, csv, json])

    lab.start(copying(), restart=FixedDelayRestart(2, 0.1)).finished()
    assert not fault.exists()
    expected = [(f"{name}{n % 3}", n + 10 * part) for name in "ab" for part in range(3) for n in range(10)]
    _check(lab, expected)
    with pytest.raises(SinkHoldsEarlierRows, match=r"job 1"):
        lab.start(copying()).result()
    lab.start(copying("replace")).finished()
    _check(lab, expected)


def _typed(rows: DataFrame, columns: dict[str, str]) -> DataFrame:
    return rows.select("*", *(F.expr(text).alias(name) for name, text in columns.items()))


def _check(lab: Any, expected: list[tuple[str, int]]) -> None:
    rows = lab.spark.createDataFrame(expected, ROWS)
    csv = {"header": True, "escape": '"', "multiLine": True, "nullValue": "no such text", "mode": "FAILFAST"}
    options = {"csv": csv, "json": {"mode": "FAILFAST"}}
    for format in ("parquet", "orc", "csv", "json"):
        wanted = _typed(rows, FLAT if format == "csv" else FLAT | NESTED)
        wanted = wanted.drop("wall") if format == "orc" else wanted
        reader = lab.spark.read.format(format).options(**options.get(format, {})).schema(wanted.schema)
        found = reader.load(str(lab.folder / format)).select(*wanted.columns)
        assert list(map(repr, lab.rows(found))) == list(map(repr, lab.rows(wanted))), format  # NaN is not equal to itself
    sizes = [len(file.read_text().split('\n"')) for file in (lab.folder / "csv").glob("*.csv")]
    assert len(sizes) >= 15 and (lab.folder / "orc/day=2024-02-29/k=a1").is_dir()
    assert len(list((lab.folder / "json/_manifests").iterdir())) > 0
