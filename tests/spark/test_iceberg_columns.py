"""Columns of an Iceberg table that its data files have by other names, with other types, in the partition only, or not at all."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
)
from pyspark.errors import StreamingQueryException

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sources import InvalidSource, read_iceberg_table
from dagster_checkpoints.spark.job.events import JobRestarting
from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS
from tests.spark.conftest import Lab

NAME = "shop.t"


def fields(*columns: tuple[str, Any]) -> Schema:
    return Schema(*(NestedField(at, name, kind, required=False) for at, (name, kind) in enumerate(columns, 1)))


class IcebergTable:
    """A table in a warehouse, and what the source reads of it."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.catalog = load_catalog("default", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
        self.catalog.create_namespace("shop")
        self._files = 0

    def create(self, schema: Schema, *partition_by: int) -> Any:
        parts = [PartitionField(each, 1000 + each, IdentityTransform(), f"p{each}") for each in partition_by]
        return self.catalog.create_table(NAME, schema, partition_spec=PartitionSpec(*parts))

    @property
    def table(self) -> Any:
        return self.catalog.load_table(NAME)

    def append(self, **columns: list[Any]) -> None:
        schema = self.table.schema().as_arrow()
        self.table.append(pa.table({name: pa.array(columns[name], schema.field(name).type) for name in columns}, None))

    def add(self, rows: pa.Table, partition: dict[str, Any] | None = None) -> Path:
        """Add a file of another program, of which the manifest has the partition."""
        self._files += 1
        path = self.folder / f"added-{self._files}.parquet"
        pq.write_table(rows, path)
        if partition is None:
            self.table.add_files([f"file://{path}"])
            return path
        self.commit(path, rows.num_rows, partition, "PARQUET")
        return path

    def commit(self, path: Path, rows: int, partition: dict[str, Any], kind: str) -> None:
        """A manifest that names a data file."""
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        table = self.table
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"file://{path}",
            file_format=FileFormat(kind),
            partition=Record(*partition.values()),
            record_count=rows,
            file_size_in_bytes=path.stat().st_size,
        )
        file.spec_id = table.spec().spec_id
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as snapshot:
            snapshot.append_data_file(file)

    def rows(self) -> list[tuple[Any, ...]]:
        """What the source reads, in one run."""
        found: list[tuple[Any, ...]] = []
        frame = read_iceberg_table(self.spark, NAME, warehouse=self.folder)
        assert frame.columns == [field.name for field in self.table.schema().fields]
        writer = frame.writeStream.option("checkpointLocation", str(self.folder / "checkpoint"))
        query = writer.trigger(availableNow=True).foreachBatch(lambda batch, _: found.extend(Lab.rows(batch))).start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            raise KEPT_ERRORS.take(error) or error from None
        return sorted(found, key=repr)

    def scanned(self) -> list[tuple[Any, ...]]:
        """What the library reads."""
        return sorted((tuple(row.values()) for row in self.table.scan().to_arrow().to_pylist()), key=repr)


@pytest.fixture
def lake(spark: Any, tmp_path: Path) -> Iterator[IcebergTable]:
    made = IcebergTable(spark, tmp_path)
    yield made
    made.catalog.close()


def test_identity_partitions_of_files_that_another_program_added(lake: IcebergTable) -> None:
    """Their files do not hold the columns; some values are null; a column of every type."""
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678901)
    values: list[tuple[str, Any, Any, Any]] = [  # type, what the manifest holds, what the row holds
        ("text", StringType(), "ü/x=1%", "ü/x=1%"),
        ("empty", StringType(), "", ""),
        ("none", StringType(), None, None),
        ("whole", IntegerType(), -7, -7),
        ("long", LongType(), 1 << 40, 1 << 40),
        ("flag", BooleanType(), True, True),
        ("small", FloatType(), 0.5, 0.5),
        ("day", DateType(), (dt.date(1969, 12, 30) - dt.date(1970, 1, 1)).days, dt.date(1969, 12, 30)),
        ("local", TimestampType(), (at - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1), at),
        ("price", DecimalType(9, 2), Decimal("-1.50"), Decimal("-1.50")),
    ]
    schema = fields(("n", LongType()), *((name, kind) for name, kind, _, _ in values), ("word", StringType()))
    lake.create(schema, *range(2, len(values) + 2))
    lake.add(pa.table({"n": [1, 2], "word": ["a", "b"]}), {name: value for name, _, value, _ in values})
    with lake.table.transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": lake.table.schema().name_mapping.model_dump_json()})
    lake.append(**{"n": [3], **{name: [None] for name, *_ in values}, "word": ["c"], "text": ["other"]})
    there = tuple(value for *_, value in values)
    nothing = ("other", *[None] * (len(values) - 1))
    assert lake.rows() == sorted([(1, *there, "a"), (2, *there, "b"), (3, *nothing, "c")], key=repr)


def test_partition_specs_that_changed(lake: IcebergTable) -> None:
    lake.create(fields(("n", LongType()), ("region", StringType()), ("day", DateType())), 2)
    lake.append(n=[1], region=["x"], day=[dt.date(2026, 1, 1)])
    with lake.table.update_spec() as update:
        update.add_identity("day")
    lake.append(n=[2], region=["y"], day=[dt.date(2026, 1, 2)])
    with lake.table.update_spec() as update:
        update.remove_field("p2")
    lake.append(n=[3], region=["z"], day=[dt.date(2026, 1, 3)])
    assert lake.rows() == lake.scanned()


def renamed(lake: IcebergTable) -> None:
    lake.create(fields(("n", LongType()), ("a", StringType()), ("b", StringType())))
    lake.append(n=[1], a=["a1"], b=["b1"])
    with lake.table.update_schema() as update:
        update.rename_column("a", "c")
    lake.append(n=[2], c=["c2"], b=["b2"])
    with lake.table.update_schema() as update:
        update.rename_column("b", "a")
    lake.append(n=[3], c=["c3"], a=["a3"])


def dropped_and_added_again(lake: IcebergTable) -> None:
    lake.create(fields(("n", LongType()), ("a", StringType())))
    lake.append(n=[1], a=["old"])
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("a")
    with lake.table.update_schema() as update:
        update.add_column("a", StringType())
    lake.append(n=[2], a=["new"])


def promoted(lake: IcebergTable) -> None:
    lake.create(
        fields(
            ("n", IntegerType()),
            ("f", FloatType()),
            ("d", DecimalType(5, 2)),
            ("s", StructType(NestedField(9, "i", IntegerType(), required=False))),
        )
    )
    lake.append(n=[1], f=[1.5], d=[Decimal("1.25")], s=[{"i": 1}])
    with lake.table.update_schema() as update:
        update.update_column("n", LongType())
        update.update_column("f", DoubleType())
        update.update_column("d", DecimalType(18, 2))
        update.update_column(("s", "i"), LongType())
    lake.append(n=[1 << 40], f=[0.1], d=[Decimal("1234567890.25")], s=[{"i": 1 << 40}])


def nested(lake: IcebergTable) -> None:
    inner = StructType(NestedField(10, "x", LongType(), required=False), NestedField(11, "y", StringType(), required=False))
    lake.create(
        fields(
            ("n", LongType()),
            ("s", inner),
            ("l", ListType(20, StructType(NestedField(21, "z", LongType(), required=False)), False)),
            ("m", MapType(30, StringType(), 31, StructType(NestedField(32, "w", LongType(), required=False)), False)),
        )
    )
    lake.append(n=[1], s=[{"x": 1, "y": "y"}], l=[[{"z": 1}, None]], m=[[("k", {"w": 1})]])
    with lake.table.update_schema() as update:
        update.rename_column(("s", "x"), "x2")
        update.add_column(("s", "added"), StringType())
        update.rename_column(("l", "element", "z"), "z2")
        update.add_column(("m", "value", "more"), StringType())
    lake.append(n=[2], s=[{"x2": 2, "y": "yy", "added": "a"}], l=[[{"z2": 2}]], m=[[("k", {"w": 2, "more": "m"})]])
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column(("s", "y"))
        update.move_first("m")
    lake.append(n=[3], s=[{"x2": 3, "added": None}], l=[None], m=[None])


def names_that_writers_encode(lake: IcebergTable) -> None:
    lake.create(
        fields(
            ("@", LongType()),
            ("a b", StringType()),
            ("1st", StringType()),
            ("s", StructType(NestedField(9, "x-y", LongType(), required=False))),
        )
    )
    lake.append(**{"@": [1], "a b": ["x"], "1st": ["y"], "s": [{"x-y": 1}]})
    assert "_x40" in pq.read_schema(next(lake.folder.rglob("data/*.parquet"))).names


def files_without_ids(lake: IcebergTable) -> None:
    lake.create(fields(("n", LongType()), ("a", StringType()), ("later", StringType())))
    lake.add(
        pa.table(
            {"n": [1], "a": ["a1"], "later": [None]}, pa.schema([("n", pa.int64()), ("a", pa.string()), ("later", pa.string())])
        )
    )
    with lake.table.update_schema() as update:
        update.rename_column("a", "b")
    lake.append(n=[2], b=["b2"])
    lake.add(pa.table({"n": [3], "b": ["b3"], "later": ["l"]}))


@pytest.mark.parametrize(
    "make", [renamed, dropped_and_added_again, promoted, nested, names_that_writers_encode, files_without_ids]
)
def test_columns_are_those_of_the_specification(lake: IcebergTable, make: Callable[[IcebergTable], None]) -> None:
    make(lake)
    assert lake.rows() == lake.scanned()


def test_a_double_in_a_partition_is_read_from_the_files_alone(lake: IcebergTable) -> None:
    """The library rounds it to 32 bits when it reads a manifest."""
    lake.create(fields(("n", LongType()), ("real", DoubleType())), 2)
    lake.append(n=[1], real=[1e-7])
    assert lake.rows() == [(1, 1e-7)]
    lake.add(pa.table({"n": [2]}), {"real": 1e-7})
    with lake.table.transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": lake.table.schema().name_mapping.model_dump_json()})
    with pytest.raises(InvalidSource, match=r"added-1\.parquet does not hold real"):
        lake.rows()


@pytest.mark.parametrize("kind", ["ORC", "AVRO"])
def test_data_files_of_other_formats_are_refused_when_the_table_is_opened(lake: IcebergTable, kind: str) -> None:
    lake.create(fields(("n", LongType())))
    path = lake.folder / "other"
    path.write_bytes(b"ORC")
    lake.commit(path, 1, {}, kind)
    with pytest.raises(InvalidSource, match=rf"expected data files in the format Parquet, found .*/other in the format {kind}"):
        read_iceberg_table(None, NAME, warehouse=lake.folder)  # type: ignore[arg-type]


def test_a_file_without_ids_in_a_table_without_a_name_mapping_is_refused(lake: IcebergTable) -> None:
    lake.create(fields(("n", LongType()), ("word", StringType())))
    path = lake.folder / "f.parquet"
    pq.write_table(pa.table({"n": [1]}), path)
    lake.commit(path, 1, {}, "PARQUET")
    with pytest.raises(InvalidSource, match=r"f\.parquet has no field ids\. Set the property"):
        lake.rows()


def test_a_backlog_in_older_columns_is_read_as_the_table_is_now(lab: Any) -> None:
    """Read, suspend, append in the old columns, widen, add, drop and rename, append, resume; then a new column in the run."""
    lake = IcebergTable(lab.spark, lab.folder)
    inner = StructType(NestedField(10, "x", IntegerType(), required=False))
    lake.create(fields(("n", IntegerType()), ("gone", StringType()), ("s", inner), ("word", StringType())))

    @unbounded_source(sink=lab.sink())
    def live(context):
        frame = read_iceberg_table(context.spark, NAME, warehouse=lab.folder)
        return frame.selectExpr("CAST(n AS LONG) AS n", "to_json(struct(*)) AS row")

    def append(number: int, **columns: Any) -> None:
        lake.append(n=[number], **{name: [value] for name, value in columns.items()})

    append(1, gone="g", s={"x": 1}, word="a")
    pipeline = Pipeline("backlog", [live])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count() == 1)
    job.done("stop", drain=False)
    job.finished()
    append(2, gone="g", s={"x": 2}, word="b")
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.update_column("n", LongType())
        update.update_column(("s", "x"), LongType())
        update.add_column(("s", "y"), StringType())
        update.delete_column("gone")
        update.rename_column("word", "text")
    append(1 << 40, s={"x": 1 << 40, "y": "y"}, text="c")
    job = lab.start(pipeline, interval=0.3, restart=FixedDelayRestart(5, 0.1))
    job.wait_until(lambda: lab.count() == 3)
    assert job.of(JobRestarting) == []
    with lake.table.update_schema() as update:
        update.add_column("later", DateType())
    append(4, s=None, text="d", later=dt.date(2026, 1, 1))
    job.wait_until(lambda: lab.count() == 4)
    assert len(job.of(JobRestarting)) == 1
    job.drain()
    job.finished()
    lake.catalog.close()
    lab.check(
        [
            (1, '{"n":1,"gone":"g","s":{"x":1},"word":"a"}'),
            (2, '{"n":2,"s":{"x":2},"text":"b"}'),
            (1 << 40, '{"n":1099511627776,"s":{"x":1099511627776,"y":"y"},"text":"c"}'),
            (4, '{"n":4,"text":"d","later":"2026-01-01"}'),
        ]
    )
