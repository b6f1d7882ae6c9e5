"""`read_iceberg_table`: what a user calls in a source. Checks in the driver what can be known before the first row."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dagster_checkpoints.sources.errors import InvalidSource, SourceLibraryMissing
from dagster_checkpoints.systems.errors import InvalidSinkPath
from dagster_checkpoints.systems.iceberg_catalogs import catalog_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_checkpoints.sources.lake.positions import ChangedRows

NAME = "iceberg"


def read_iceberg_table(
    spark: SparkSession,
    table: str,
    *,
    warehouse: str | os.PathLike[str] | None = None,
    catalog: str | Mapping[str, str] | None = None,
    files_per_trigger: int = 1000,
    changed_rows: ChangedRows = "refuse",
    snapshot: int | None = None,
) -> DataFrame:
    """An Apache Iceberg table as a stream: all its rows, then those that later snapshots of the main branch add.

    In a ``@bounded_source`` the stream ends with the snapshot that is the newest one when the source starts. The metadata is read
    by the ``pyiceberg`` library, the data files by Spark; no jar is needed.

    Args:
        spark: the session, ``context.spark``.
        table: the table's name with its namespace, such as ``"shop.events"``.
        warehouse: the directory of the warehouse with a SQLite file as catalog, as an ``IcebergSink`` makes it. Default: the
            catalog knows it.
        catalog: properties of the library ``pyiceberg``, of which ``name`` is the catalog's name; or the name of a catalog in
            the library's configuration. Default: the SQLite file in the warehouse.
        files_per_trigger: the largest number of data files in one micro-batch. Default: 1000.
        changed_rows: what happens to a later snapshot that deletes or changes rows: ``"refuse"`` ends the run, ``"skip"`` reads
            no row of that snapshot. Default: ``"refuse"``. Files that were only rewritten are no change.
        snapshot: the id of the only snapshot that is read. Default: the newest one, and those that follow.

    Raises:
        InvalidSource: there is no such table, or one that cannot be read file by file.
        SourceUnavailable: the catalog or the store does not answer.
        SourceLibraryMissing: the library is not installed.

    Source: https://iceberg.apache.org/spec/
    """
    identifier = tuple(part for part in table.split(".") if part)
    if len(identifier) < 2:
        raise InvalidSource(f"read_iceberg_table: expected a table's name with its namespace, 'shop.events', found {table!r}")
    if find_spec("pyiceberg") is None or find_spec("sqlalchemy") is None:
        raise SourceLibraryMissing(
            "read_iceberg_table: expected the libraries pyiceberg and sqlalchemy, found that one is not installed: "
            "pip install 'dagster-checkpoints[iceberg]'"
        )
    try:
        settings = catalog_settings(warehouse, catalog)
    except InvalidSinkPath as error:
        raise InvalidSource(str(error).replace("IcebergSink", "read_iceberg_table")) from None
    from pyspark.sql.types import StructType

    from dagster_checkpoints.sources.iceberg.history import IcebergHistory
    from dagster_checkpoints.sources.iceberg.schemas import field_of, spark_schema
    from dagster_checkpoints.sources.lake.positions import check_arguments
    from dagster_checkpoints.sources.lake.stream import LakeReading, lake_stream

    history = IcebergHistory(identifier, settings, changed_rows)
    check_arguments(history.shown, files_per_trigger, changed_rows)
    history.open()
    if snapshot is not None:
        history.files(snapshot)
    layout = history.layout
    in_files = spark_schema({"fields": layout.in_files})
    constants = {"type": "struct", "fields": [field_of(name, kind) for name, kind in layout.constants]}
    reading = LakeReading(history, StructType.fromJson(in_files), StructType.fromJson(constants), files_per_trigger, snapshot)
    frame = lake_stream(spark, NAME, {"table": table}, reading)
    return frame if layout.expressions is None else frame.selectExpr(*layout.expressions)
