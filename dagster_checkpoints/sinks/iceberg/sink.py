"""A sink that writes rows to an Apache Iceberg table: its settings. The life of an instance is that of :mod:`sinks.lake.sink`.

Must not import Spark.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from dagster_checkpoints.sinks.base import AtNewStart
from dagster_checkpoints.sinks.iceberg.log import IcebergLog
from dagster_checkpoints.sinks.lake.columns import SchemaEvolution
from dagster_checkpoints.sinks.lake.sink import LakeSink
from dagster_checkpoints.systems.errors import InvalidSinkPath
from dagster_checkpoints.systems.iceberg_catalogs import catalog_settings, library_missing


class IcebergSink(LakeSink):
    """Commits a stage's rows to an Apache Iceberg table: one snapshot per instance and checkpoint.

    Other programs may write to the same table; without ``key`` and ``overwrite_partitions`` the sink never touches their rows.
    Needs ``pip install dagster-checkpoints[iceberg]``.

    Args:
        table: the table's name with its namespace, ``flights.hourly_delays``. A table that does not exist is created with the
            stage's columns, and so is its namespace.
        warehouse: the directory, or the object store's URL, below which new tables are stored. By default the catalog knows it.
        catalog: properties of the library ``pyiceberg`` (``type``, ``uri``, ``credential`` …; ``name`` is the catalog's name, by
            default ``default``), or the name of a catalog in the library's configuration. They are never shown. By default a
            SQL catalog: the SQLite file ``catalog.db`` in ``warehouse``, which is then a local or mounted directory.
        at_new_start: what a new start, not a resumption, does with rows that an earlier job of this stage has committed to the
            table: ``refuse`` (default) stops the run before Spark starts, ``keep`` leaves them beside the new job's rows,
            ``replace`` removes them when the new job begins.
        partition_by: the table's partition columns, in order; by default those that the table has, none for a new table. Files
            are then written a second time, when a batch arrives.
        schema_evolution: ``refuse`` (default): the stage and the table have the same columns; ``add``: columns that the table
            does not have are added to it, columns that the stage does not have are null.
        key: name or names of the columns by which a row replaces an earlier one (upsert), the rows of other programs included;
            None to add every row.
        overwrite_partitions: whether the rows of a job replace those of the partitions that they are in: other rows of a
            partition vanish with the job's first commit to it. For bounded stages, with ``partition_by``.

    Raises:
        InvalidSinkPath: the name has no namespace; neither a warehouse nor a catalog is given; the warehouse cannot be one.
        SinkLibraryMissing: the library ``pyiceberg`` or ``sqlalchemy`` is not installed.
        ValueError: a setting has none of its values, or does not go with another one.

    Examples:
        >>> sink = IcebergSink("flights.hourly_delays", warehouse="lake", at_new_start="replace")
    """

    kind = "iceberg"

    def __init__(
        self,
        table: str,
        *,
        warehouse: str | os.PathLike[str] | None = None,
        catalog: str | Mapping[str, str] | None = None,
        at_new_start: AtNewStart = "refuse",
        partition_by: str | Sequence[str] | None = None,
        schema_evolution: SchemaEvolution = "refuse",
        key: str | Sequence[str] | None = None,
        overwrite_partitions: bool = False,
    ) -> None:
        super().__init__(at_new_start, partition_by, schema_evolution, key, overwrite_partitions)
        parts = tuple(table.split("."))
        if len(parts) < 2 or not all(part.strip() and "/" not in part for part in parts):
            raise InvalidSinkPath(
                f"IcebergSink: expected the name of a table with its namespace, such as flights.hourly_delays, found {table!r}"
            )
        self.table = table
        self._identifier = parts
        self._catalog = catalog_settings(warehouse, catalog)
        if find_spec("pyiceberg") is None or find_spec("sqlalchemy") is None:
            raise library_missing(str(self))

    @property
    def location(self) -> str:
        """The catalog's place, and the table's name in it."""
        return f"{self._catalog.place}/{'.'.join(self._identifier[:-1])}/{self._identifier[-1]}"

    @property
    def uri(self) -> str | None:
        """The URL of the table's directory; None if only the catalog knows it."""
        return Path(self.location).as_uri() if self._catalog.directory is not None else None

    @property
    def table_name(self) -> str:
        """The table's name with its namespace."""
        return self.table

    def _new_log(self) -> IcebergLog:
        return IcebergLog(self._identifier, self._catalog, str(self))
