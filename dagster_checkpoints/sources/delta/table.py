"""`read_delta_table`: what a user calls in a source. Checks in the driver what can be known before the first row."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dagster_checkpoints.sources.errors import InvalidSource, SourceLibraryMissing
from dagster_checkpoints.systems.errors import InvalidSinkPath
from dagster_checkpoints.systems.locations import delta_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_checkpoints.sources.lake.positions import ChangedRows

NAME = "delta"
_SCHEMES = ("file", "s3", "s3a")


def read_delta_table(
    spark: SparkSession,
    table: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    files_per_trigger: int = 1000,
    changed_rows: ChangedRows = "refuse",
    version: int | None = None,
) -> DataFrame:
    """A Delta Lake table as a stream: all its rows, then those that later commits add.

    In a ``@bounded_source`` the stream ends with the version that is the newest one when the source starts. The log is read by
    the ``deltalake`` library, the data files by Spark; no jar is needed.

    Args:
        spark: the session, ``context.spark``.
        table: the table's directory, or its URL ``s3://bucket/path``.
        storage_options: options of the ``deltalake`` library for the store, such as credentials. Default: the environment.
        files_per_trigger: the largest number of data files in one micro-batch. Default: 1000.
        changed_rows: what happens to a later commit that deletes or changes rows: ``"refuse"`` ends the run, ``"skip"`` reads
            no row of that commit. Default: ``"refuse"``. Files that were only rewritten are no change.
        version: read this version of the table, with its columns, and no other. Default: the newest one, and those that follow.

    Raises:
        InvalidSource: there is no such table, or one that cannot be read file by file.
        SourceUnavailable: the store does not answer.
        SourceLibraryMissing: the library is not installed.

    Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md
    """
    try:
        url = delta_url(table, _SCHEMES)
    except InvalidSinkPath as error:
        raise InvalidSource(f"read_delta_table: {error}") from None
    if find_spec("deltalake") is None:
        raise SourceLibraryMissing(
            "read_delta_table: expected the library deltalake, found that it is not installed: "
            "pip install 'dagster-checkpoints[delta]'"
        )
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructField, StructType

    from dagster_checkpoints.sources.delta.history import DeltaHistory
    from dagster_checkpoints.sources.lake.positions import check_arguments
    from dagster_checkpoints.sources.lake.stream import LakeReading, lake_stream
    from dagster_checkpoints.spark.identifiers import identifier

    history = DeltaHistory(url, storage_options or {}, changed_rows, version)
    check_arguments(history.shown, files_per_trigger, changed_rows)
    history.open()
    fields = [StructField(each.name, each.dataType) for each in StructType.fromJson(history.schema).fields]
    in_files = [each for each in fields if each.name not in history.partition_by]
    in_log = [each for name in history.partition_by for each in fields if each.name == name]
    reading = LakeReading(history, StructType(in_files), StructType(in_log), files_per_trigger, version)
    frame = lake_stream(spark, NAME, {"path": url}, reading)
    return frame.select(*[F.col(identifier(each.name)) for each in fields]) if in_log else frame
