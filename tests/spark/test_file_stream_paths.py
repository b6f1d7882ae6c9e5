"""Spark's file streams over paths that look like patterns: what Spark would not read once is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.pipeline import Pipeline, Stage, StageKind, bounded_source, unbounded_source
from dagster_checkpoints.spark.errors import SourcePathError, SourceRowsLostError
from dagster_checkpoints.spark.job.events import CheckpointDone, JobRestarting
from dagster_checkpoints.spark.query.file_streams import (
    FilesOutsidePartitions,
    FilesReadTwice,
    PartitionColumnsAppeared,
    PlannedFilesGone,
    check_file_paths,
)
from dagster_checkpoints.spark.query.stage_calls import StageCall

FOLDERS = ["raw [2026]", "raw {a,b}", "raw {a", "raw *", "raw ?", "raw ]", "raw plain", "raw 50%", "raw #1", "a/x", "b/x"]


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        pq.write_table(pa.table({"n": [number]}), folder / name)


@pytest.mark.parametrize(
    ("path", "limit", "found"),
    [
        (
            "raw [2026]",
            1,
            r"exists, but .* matches nothing\. Escape .* set maxFilesPerTrigger to 1: '.*raw \\\\\[",
        ),
        ("raw {a,b}", 1, r"exists, but .* matches nothing"),
        ("raw *", 1, r"exists, but .* and others\. Escape"),
        ("raw ?", 1, r"exists, but .*Escape"),
        ("raw \\[2026\\]", 2, r"the paths of its files, as in .*raw \[2026\]', look like patterns"),
        ("raw \\[2026\\]", 1, ""),
        ("raw \\{a\\,b\\}", 1, ""),
        ("raw \\{a", 1, ""),
        ("raw ]", 2, r"the paths of its files, as in .*raw \]', look like patterns"),
        ("raw ]", 1, ""),
        ("later \\[x\\]", 2, r"look like patterns"),
        ("later [x]", 2, ""),
        ("ra[vw] p*", 2, ""),
        ("{a,b}/x", 2, ""),
        ("raw plain", 2, ""),
        ("raw 50%", 2, ""),
        ("raw #1", 2, ""),
    ],
)
def test_a_path_that_spark_does_not_read_once_is_refused(spark: Any, tmp_path: Path, path: str, limit: int, found: str) -> None:
    for folder in FOLDERS:
        put(tmp_path / folder, "0.parquet", "1.parquet")

    @bounded_source
    def raw(context):
        return context.spark.readStream.schema("n long").option("maxFilesPerTrigger", limit).parquet(f"{tmp_path}/{path}")

    context: Any = SimpleNamespace(spark=spark, instance="0")
    frame = raw.transform(context)
    if not found:
        check_file_paths(StageCall(raw, context), frame)
        return
    with pytest.raises(SourcePathError, match=found) as raised:
        check_file_paths(StageCall(raw, context), frame)
    assert raised.value.repeats and str(raised.value).startswith("Stage 'raw' (instance '0'): expected a path of which Spark")


def test_a_pattern_in_front_of_partition_directories_and_paths_without_files(spark: Any, tmp_path: Path) -> None:
    """Spark finds the partition columns below a pattern, and reads no values of them without the option basePath."""
    put(tmp_path / "in/raw/day=1", "0.parquet")
    found: list[int] = []

    def checked(path: str, kind: Any = bounded_source, **options: str) -> list[str]:
        @kind
        def raw(context):
            reader = context.spark.readStream.schema("n long").options(maxFilesPerTrigger=2, **options)
            return reader.parquet(f"{tmp_path}/{path}")

        context: Any = SimpleNamespace(spark=spark, instance="0")
        frame = raw.transform(context)
        warnings = check_file_paths(StageCall(raw, context), frame)
        writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(row.day for row in batch.collect()))
        checkpoint = str(tmp_path / f"checkpoint {len(found)}{kind.__name__}")
        if not warnings:
            writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
        return warnings

    with pytest.raises(SourcePathError, match=r"the partition columns day, and .* Set \.option\(\"basePath\", …\)"):
        checked("in/*")
    assert checked("in/*", basePath=f"{tmp_path}/in/raw") == [] and found == [1]
    assert checked("in/raw") == [] and found == [1, 1]
    (warning,) = checked("in/row*")
    assert warning.startswith("Stage 'raw': nothing is found at '") and "row*' (" in warning and "file system mounted?" in warning
    assert checked("in/row*", unbounded_source) == []
    (tmp_path / "not mounted").mkdir()
    assert "not mounted' (" in checked("not mounted")[0] and checked("not mounted", unbounded_source) == []


@pytest.mark.parametrize("directory", ["raw [2026]", "back\\slash", "raw #1"])
def test_a_relative_path_is_read_with_the_characters_of_the_working_directory(spark: Any, tmp_path: Path, directory: str) -> None:
    put(tmp_path / directory / "in", "0.parquet", "1.parquet")
    hadoop = spark._jvm.org.apache.hadoop.fs
    local = hadoop.FileSystem.get(spark._jsparkSession.sessionState().newHadoopConf())
    before = local.getWorkingDirectory()
    local.setWorkingDirectory(hadoop.Path(f"{tmp_path}/{directory}"))

    @bounded_source
    def raw(context):
        return context.spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).parquet("in")

    context: Any = SimpleNamespace(spark=spark, instance="0")
    try:
        frame = raw.transform(context)
        if directory == "raw #1":
            assert check_file_paths(StageCall(raw, context), frame) == []
            return
        with pytest.raises(SourcePathError, match=r"a directory of that very name exists, but .* Escape the characters"):
            check_file_paths(StageCall(raw, context), frame)
    finally:
        local.setWorkingDirectory(before)


def test_at_the_start_and_in_a_micro_batch(lab: Any) -> None:
    put(lab.folder / "raw [2026]", "0.parquet", "1.parquet")
    put(lab.folder / "raw", "0.parquet", "1.parquet")
    paths = {"raw": str(lab.folder / "raw [2026]")}

    @bounded_source(sink=lab.sink())
    def raw(context):
        return context.spark.readStream.schema("n long").option("maxFilesPerTrigger", 5).parquet(paths["raw"])

    pipeline = Pipeline("raw", [raw])
    assert type(lab.start(pipeline).result().error) is SourcePathError
    paths["raw"] = f"{lab.folder}/raw*"
    assert type(lab.start(pipeline).result().error) is SourcePathError
    paths["raw"] = str(lab.folder / "raw")
    put(lab.folder / "raw", "0.parquet", "1.parquet", "data[1].parquet")  # only the name of a file
    job = lab.start(pipeline, restart=FixedDelayRestart(3, 0.1))
    error = job.result().error
    assert repeats_by_nature(error) and FilesReadTwice.__name__ in str(error) and "data[1].parquet" in str(error)
    assert job.of(JobRestarting) == [] and lab.count() == 0
    (lab.folder / "raw/data[1].parquet").rename(lab.folder / "raw/data 1.parquet")
    lab.start(pipeline).finished()
    lab.check([(0,), (1,), (2,)])


@pytest.mark.parametrize("ignored", [False, True])
def test_a_file_that_is_deleted_before_its_micro_batch(lab: Any, ignored: bool) -> None:
    """Spark finds several files at once, and lists them again when it reads them: it leaves out what is gone by then."""
    put(lab.folder / "in", *(f"{number}.parquet" for number in range(4)))
    for number in range(4):
        os.utime(lab.folder / f"in/{number}.parquet", (number, number))

    class Files(Stage):
        def transform(self, context: Any) -> Any:
            reader = context.spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d")
            return reader.option("ignoreMissingFiles", ignored).parquet(str(lab.folder / "in"))

        def process_batch(self, batch: Any, batch_id: int) -> Any:
            (lab.folder / "in/2.parquet").unlink(missing_ok=True)
            return batch

    pipeline = Pipeline("gone", [Files("files", kind=StageKind.BOUNDED_SOURCE, sink=lab.sink())])
    job = lab.start(pipeline, restart=FixedDelayRestart(3, 0.1))
    if ignored:
        job.finished()
        lab.check([(0,), (1,), (3,)])
        return
    error = job.result().error
    assert isinstance(error.__cause__, SourceRowsLostError) and PlannedFilesGone.__name__ in str(error), error
    assert "found that 1 of them were deleted" in str(error) and "in/2.parquet" in str(error)
    assert job.of(JobRestarting) == []


def test_partition_directories_that_appear_when_a_query_runs(lab: Any) -> None:
    """Spark maps the columns of a file stream by position: partition columns come last as soon as there are directories."""
    (lab.folder / "in").mkdir()

    @unbounded_source(sink=lab.sink())
    def sales(context):
        reader = context.spark.readStream.schema("region string, name string").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(lab.folder / "in"))

    job = lab.start(Pipeline("sales", [sales]), restart=FixedDelayRestart(3, 0.1))
    job.wait_for(CheckpointDone)
    for region, name in (("eu", "Anna"), ("us", "Bob")):
        (lab.folder / f"in/region={region}").mkdir()
        pq.write_table(pa.table({"name": [name]}), lab.folder / f"in/region={region}/0.parquet")
    job.wait_until(lambda: lab.count() == 2)
    (restarted,) = job.of(JobRestarting)
    assert PartitionColumnsAppeared.__name__ in restarted.cause
    job.drain()
    job.finished()
    found = lab.spark.read.parquet(str(lab.folder / "out")).select("region", "name")
    assert lab.rows(found) == [("eu", "Anna"), ("us", "Bob")]


def test_a_file_beside_partition_directories_in_one_micro_batch(lab: Any) -> None:
    """Spark reads only the files in these directories."""
    put(lab.folder / "in", "0.parquet")
    put(lab.folder / "in/day=1", "0.parquet", "1.parquet")

    @bounded_source(sink=lab.sink())
    def days(context):
        reader = context.spark.readStream.schema("n long, day int").option("maxFilesPerTrigger", 5)
        return reader.option("maxFileAge", "36500d").parquet(str(lab.folder / "in"))

    job = lab.start(Pipeline("days", [days]), interval=None, restart=FixedDelayRestart(3, 0.1))
    error = job.result().error
    assert repeats_by_nature(error) and FilesOutsidePartitions.__name__ in str(error) and "found 1 beside these" in str(error)
    assert job.of(JobRestarting) == [] and lab.count() == 0
    (lab.folder / "in/0.parquet").rename(lab.folder / "in/day=1/2.parquet")
    lab.start(Pipeline("days", [days])).finished()
    lab.check([(0, 1), (1, 1), (0, 1)])
