"""Segments: Spark counts the rows that it writes, and the files must hold them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.spark.channels.segments import SegmentRowsError, Split, write_parts, write_segment
from dagster_checkpoints.state.key_groups import owner_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def losing(spark: SparkSession, folder: Path) -> DataFrame:
    """Ten rows in two tasks; the second task deletes the file of the first, as a program that cleans up might."""
    text = str(folder)

    def rows(batches):
        import pyspark

        for batch in batches:
            until = time.monotonic() + 60
            while pyspark.TaskContext.get().partitionId() == 1 and time.monotonic() < until:
                written = [file for file in Path(text).rglob("part-00000*.parquet") if "_temporary" not in file.parts]
                for file in written:
                    file.unlink()
                if written:
                    break
                time.sleep(0.02)
            yield batch

    return spark.range(0, 10, 1, 2).mapInPandas(rows, "id long")


def test_a_segment_that_lacks_rows_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    for name, write in (
        ("whole", lambda frame, folder: write_segment(frame, folder)),
        ("split", lambda frame, folder: write_parts(frame, folder, Split(1, "id", 128).column())),
    ):
        folder = tmp_path / name
        with pytest.raises(
            SegmentRowsError, match=rf"expected 10 rows in the files of a batch in {folder}.*found 5\..*work_directory="
        ):
            write(losing(spark, folder), folder)


@pytest.mark.parametrize(("parallelism", "groups"), [(1, 128), (3, 128), (7, 128), (96, 128), (128, 128), (5, 32_768)])
def test_rows_go_to_the_owners_of_their_key_groups(spark: SparkSession, parallelism: int, groups: int) -> None:
    group = F.pmod(F.hash("id"), F.lit(groups))
    rows = spark.range(3000).select(group.alias("group"), Split(parallelism, "id", groups).column().alias("owner")).collect()
    assert len({row.group for row in rows}) > 100
    assert [row.owner for row in rows] == [owner_of(row.group, parallelism, groups) for row in rows]


@pytest.mark.parametrize("name", ["a.b", "a`b", "`a`", "a``b.c", "``", "a b", "é"])
def test_rows_go_by_a_key_of_any_name(spark: SparkSession, name: str) -> None:
    rows = spark.range(300).withColumnRenamed("id", name)
    owners = rows.select(Split(3, name, 128).column()).collect()
    assert owners == spark.range(300).select(Split(3, "id", 128).column()).collect()


def test_rows_are_counted_whatever_the_plan(spark: SparkSession, tmp_path: Path) -> None:
    """Also where adaptive execution changes it, and where there is nothing to write."""
    ids = spark.range(1000).withColumn("k", F.col("id") % 7)
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    plans = {"ids": (ids, 1000), "counted": (ids.groupBy("k").count(), 7), "sorted": (ids.orderBy("k"), 1000)}
    plans["joined"] = (ids.join(ids.groupBy("k").count(), "k"), 1000)
    for name, (frame, rows) in plans.items():
        segment = write_segment(frame, tmp_path / name)
        assert segment is not None and segment.rows == rows
    assert write_segment(ids.where("id < 0"), tmp_path / "none") is None
    assert write_segment(ids.limit(0), tmp_path / "empty") is None
    parts = write_parts(ids, tmp_path / "split", Split(3, "k", 128).column())
    assert sum(part.rows for part in parts.values()) == 1000


def test_nothing_stays_of_a_segment_that_is_released(spark: SparkSession, tmp_path: Path) -> None:
    """Spark writes checksums beside the files, and a directory for each micro-batch: of a run of months there are millions."""
    ids, halves = spark.range(10), Split(2, "id", 128).column()
    whole = write_segment(ids, tmp_path / "whole")
    first, second = write_parts(ids, tmp_path / "split", halves).values()
    assert whole is not None
    write_segment(ids.where("id < 0"), tmp_path / "none")
    write_parts(ids.where("id < 0"), tmp_path / "no parts", halves)
    for segment in (whole, first, second):
        segment.hold()
        segment.hold()
    whole.release()
    first.release()
    first.release()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["split", "whole"]
    assert all(file.exists() for segment in (whole, second) for file in segment.files)
    whole.release()
    second.release()
    second.release()
    assert list(tmp_path.iterdir()) == []
