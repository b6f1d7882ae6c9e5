"""A sink that writes rows to a Delta Lake table: its settings. The life of an instance is that of :mod:`sinks.lake.sink`.

Must not import Spark.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from dagster_checkpoints.sinks.base import AtNewStart
from dagster_checkpoints.sinks.delta.log import DeltaLog, library_missing
from dagster_checkpoints.sinks.lake.columns import SchemaEvolution
from dagster_checkpoints.sinks.lake.sink import LakeSink
from dagster_checkpoints.systems.locations import delta_url, location_of, uri_of

_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss")


class DeltaSink(LakeSink):
    """Commits a stage's rows to a Delta Lake table: one Delta commit per instance and checkpoint.

    Other programs may write to the same table; without ``key`` and ``overwrite_partitions`` the sink never touches their rows.
    Needs ``pip install dagster-checkpoints[delta]``.

    Args:
        table: path of a local or mounted directory, or URL of an object store (``s3://``, ``gs://``, ``az://``, ``abfss://``). A
            table that does not exist is created with the stage's columns.
        storage_options: options of the ``deltalake`` library for the object store, such as credentials; what is missing comes
            from the environment (``AWS_…``). They are never shown.
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
        InvalidSinkPath: the location is empty, a URL of another kind, or contains credentials.
        SinkLibraryMissing: the library ``deltalake`` is not installed.
        ValueError: a setting has none of its values, or does not go with another one.

    Examples:
        >>> sink = DeltaSink("s3://lake/hourly_delays", at_new_start="replace")
    """

    kind = "delta"

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, str] | None = None,
        at_new_start: AtNewStart = "refuse",
        partition_by: str | Sequence[str] | None = None,
        schema_evolution: SchemaEvolution = "refuse",
        key: str | Sequence[str] | None = None,
        overwrite_partitions: bool = False,
    ) -> None:
        super().__init__(at_new_start, partition_by, schema_evolution, key, overwrite_partitions)
        self.table = delta_url(table, _SCHEMES)
        self._storage_options = dict(storage_options or {})
        if find_spec("deltalake") is None:
            raise library_missing(str(self))

    @property
    def location(self) -> str:
        """The table's directory, absolute and without symbolic links, or its URL."""
        return location_of(self.table)

    @property
    def uri(self) -> str:
        """The table's URL."""
        return uri_of(self.table)

    def _new_log(self) -> DeltaLog:
        return DeltaLog(self.table, self._storage_options, str(self))
