"""Where the flights pipeline commits its tables: the environment variable SINK chooses the kind of sink.

parquet (default)   a directory for each table
delta               a Delta Lake table for each
files               Parquet files for each, in a directory for each airport
iceberg             an Apache Iceberg table for each, in one catalog
kafka               a Kafka topic for each; KAFKA_SERVERS names the brokers
sql                 tables of one SQLite database
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import EnvVar

from assets.flights_kafka import SERVERS, rows_of_topic, staging_directory
from dagster_checkpoints import DeltaSink, FileSink, IcebergSink, KafkaSink, ParquetSink, SqlSink, TwoPhaseCommitSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from assets.flights_data import FlightsData

KINDS = ("parquet", "delta", "files", "iceberg", "kafka", "sql")


def kind_of_sink() -> str:
    """The value of SINK.

    Raises:
        ValueError: It is not one of `KINDS`.
    """
    kind = os.environ.get("SINK") or KINDS[0]
    if kind not in KINDS:
        raise ValueError(f"expected the environment variable SINK to be one of {', '.join(KINDS)}, found {kind!r}")
    return kind


def sink_of(data: FlightsData, table: str) -> TwoPhaseCommitSink:
    """The sink that commits a table; a new start of the pipeline replaces its rows, except those in Kafka, which stay."""
    path = data.table(table)
    match kind_of_sink():
        case "delta":
            return DeltaSink(path, at_new_start="replace")
        case "files":
            return FileSink(path, partition_by="origin", at_new_start="replace")
        case "iceberg":
            return IcebergSink(f"flights.{table}", warehouse=_warehouse(data), at_new_start="replace")
        case "kafka":
            return KafkaSink(table, EnvVar(SERVERS), staging=staging_directory(data), at_new_start="keep")
        case "sql":
            return SqlSink(_database(data), table, at_new_start="replace")
        case _:
            return ParquetSink(path, at_new_start="replace")


def committed_rows(spark: SparkSession, data: FlightsData, table: str, schema: StructType) -> DataFrame:
    """All rows of a table that its sink has committed so far, as a reader sees them; none if there is no table.

    Args:
        spark: The session.
        data: Where the tables are.
        table: The table's name.
        schema: Its columns and their types.
    """
    path = data.table(table)
    match kind_of_sink():
        case "delta":
            from deltalake import DeltaTable

            files = DeltaTable(path).file_uris() if (path / "_delta_log").is_dir() else []
            found = spark.read.parquet(*files) if files else None
        case "files":
            any_rows = any(path.glob("origin=*/*.parquet"))
            found = spark.read.schema(schema).parquet(str(path)).select(*schema.names) if any_rows else None
        case "iceberg":
            files = _iceberg_files(data, table)
            found = spark.read.parquet(*files) if files else None
        case "kafka":
            found = rows_of_topic(spark, table, schema)
        case "sql":
            found = _rows_of_database(spark, data, table, schema)
        case _:
            # A directory per checkpoint, which Spark reads as a column.
            any_rows = any(path.glob("checkpoint=*/*.parquet"))
            found = spark.read.parquet(str(path)).drop("checkpoint") if any_rows else None
    return spark.createDataFrame([], schema) if found is None else found


def _iceberg_files(data: FlightsData, table: str) -> list[str]:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError

    database = _warehouse(data) / "catalog.db"
    if not database.exists():
        return []
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{database}")
    try:
        return [task.file.file_path for task in catalog.load_table(f"flights.{table}").scan().plan_files()]
    except NoSuchTableError:
        return []
    finally:
        catalog.close()


def _warehouse(data: FlightsData) -> Path:
    return data.root / "lake"


def _rows_of_database(spark: SparkSession, data: FlightsData, table: str, schema: StructType) -> DataFrame | None:
    from sqlalchemy import create_engine, inspect, text

    engine = create_engine(_database(data))
    if not inspect(engine).has_table(table):
        return None
    columns = ", ".join(f'"{field.name}"' for field in schema)
    with engine.connect() as connection:
        rows = [tuple(map(_as_text, row)) for row in connection.execute(text(f'SELECT {columns} FROM "{table}"'))]
    # SQLite has no type for times: they are text.
    as_text = spark.createDataFrame(rows, ", ".join(f"`{field.name}` STRING" for field in schema))
    return as_text.select(*(as_text[field.name].cast(field.dataType) for field in schema))


def _as_text(value: object) -> str | None:
    return None if value is None else str(value)


def _database(data: FlightsData) -> str:
    return f"sqlite:///{data.root / 'tables.db'}"
