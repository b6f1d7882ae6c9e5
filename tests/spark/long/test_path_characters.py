"""Directories whose names have characters that mean something in patterns, URLs or partition paths: rows are exact everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyspark.sql.types import LongType, StructField, StructType

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import DeltaSink, FileSink, IcebergSink
from dagster_checkpoints.sources import read_delta_table, read_iceberg_table
from dagster_checkpoints.spark.query.driver_sources import DriverSources
from dagster_checkpoints.spark.query.partitioned_scan import PartitionedScan
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from tests.spark.conftest import Lab

NAMES = [
    "{a,b}",
    "{a",
    "b}",
    "[v1]",
    "[v",
    "v]",
    "a*b",
    "a?b",
    "a\\b",
    "a\\[b",
    "50%",
    "a%20b",
    "a%5Bb",
    "a b",
    "a#b",
    "a+b",
    "a=b",
    "a:b",
    "a'b\"c",
    "ü 日",
    "^a&b;c",
]
ALL = [f"{{prod}} [v1] a*b?c\\d {rest}" for rest in ("}]{[", "%20 50% #1 a+b k=v x:y ü 日")]
N = StructType([StructField("n", LongType())])


@pytest.fixture(scope="module")
def sources(spark: Any) -> DriverSources:
    return DriverSources(spark)


@pytest.mark.parametrize("name", NAMES)
def test_files_in_a_directory_are_read_once(spark: Any, sources: DriverSources, tmp_path: Path, name: str) -> None:
    """By the reader of channels and lake tables, and by that of static tables; some of the files are in a plain directory."""
    file_name = name.replace(":", "")  # Hadoop opens no local file with a colon in its name
    files = [tmp_path / "plain" / "0.parquet", *(tmp_path / name / f"{number}{file_name}.parquet" for number in (1, 2))]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"n": [number]}), file)
    (tmp_path / "axb").mkdir()  # matches some of the names
    pq.write_table(pa.table({"n": [9]}), tmp_path / "axb/1axb.parquet")
    assert Lab.rows(table_dataframe(spark, N, files)) == [(0,), (1,), (2,)]
    scan = PartitionedScan(sources, N, StructType([StructField("at", LongType())]))
    planned = [file for part in scan.plan({f"file:{file}": (None,) for file in files}) for file in part.files()]
    assert sorted(str(file.filePath().toPath().toString()) for file in planned) == sorted(f"file:{file}" for file in files)


@pytest.mark.parametrize("name", ALL, ids=["patterns", "others"])
def test_a_pipeline_whose_places_have_such_names(lab: Any, name: str) -> None:
    """Tables of two formats, a static table, a work directory, storage and every sink of files, through a suspend."""
    folder = lab.folder / name
    folder.mkdir()
    tables = lab.folder / re.sub(r"[\[\]\\^]|%20", "", name)  # DeltaSink and its source refuse these
    inside = Lab(lab.spark, folder)
    warehouse = lab.folder / "{prod} [v1] a*b\\c 'd' k=v x:y ü 日"  # the sink and the source refuse '#', '?' and '%'
    catalog = {"type": "sql", "uri": f"sqlite:///{lab.folder}/catalog.db", "warehouse": f"file://{warehouse}"}
    lake = load_catalog("default", **catalog)
    lake.create_namespace("shop")
    table = lake.create_table("shop.t", pa.schema([("n", pa.int64()), ("word", pa.string())]))
    expected: list[tuple[Any, ...]] = []

    def append(first: int) -> None:
        for number in range(first, first + 3):
            rows = pa.table({"n": [number], "word": [f"{name}/{number % 2}"]})
            write_deltalake(tables / "t", rows, mode="append", partition_by=["word"])
            more = rows.set_column(0, "n", pa.array([number + 1000]))
            table.append(more)
            expected.extend((row["n"], row["word"], row["n"] % 3) for row in (*rows.to_pylist(), *more.to_pylist()))

    append(0)
    write_deltalake(tables / "static", pa.table({"m": [0, 1, 2], "k": [0, 1, 2]}), partition_by=["k"])

    @bounded_source
    def known(context):
        return read_delta_table(context.spark, tables / "static")

    @unbounded_source
    def delta(context):
        return read_delta_table(context.spark, tables / "t")

    @unbounded_source
    def iceberg(context):
        return read_iceberg_table(context.spark, "shop.t", warehouse=warehouse, catalog=catalog)

    @stage(sink=inside.sink("parquet"), inputs={"known": StageInput(mode="static")})
    def joined(delta, iceberg, known):
        rows = delta.unionByName(iceberg)
        return rows.join(known, rows.n % 3 == known.m).select("n", "word", "k").dropDuplicates(["n", "word"])

    @stage(sink=FileSink(folder / "files", "json", partition_by="word"))
    def files(joined):
        return joined

    @stage(sink=DeltaSink(tables / "out", partition_by="word"))
    def to_delta(joined):
        return joined

    @stage(sink=IcebergSink("shop.out", warehouse=warehouse, catalog=catalog, partition_by="word"))
    def to_iceberg(joined):
        return joined

    pipeline = Pipeline("names", [known, delta, iceberg, joined, files, to_delta, to_iceberg], chaining=False)
    job = inside.start(pipeline, interval=0.3)
    job.wait_until(lambda: inside.count("parquet") >= len(expected))
    job.done("stop", drain=False)
    job.finished()
    append(3)
    job = inside.start(pipeline, interval=0.3)
    job.wait_until(lambda: inside.count("parquet") >= len(expected))
    job.drain()
    job.finished()
    wanted = sorted(expected)
    committed = pq.ParquetDataset(str(folder / "parquet")).read(["n", "word", "k"]).to_pylist()
    assert sorted(tuple(row.values()) for row in committed) == wanted
    written = DeltaTable(tables / "out").to_pyarrow_table().select(["n", "word", "k"]).to_pylist()
    assert sorted(tuple(row.values()) for row in written) == wanted
    assert sorted(tuple(row.values()) for row in lake.load_table("shop.out").scan().to_arrow().to_pylist()) == wanted
    numbers = [line for file in (folder / "files").rglob("*.json") for line in file.read_text().splitlines()]
    assert len(numbers) == len(wanted)
