"""Base of sinks that write rows to a lake table: their settings; :mod:`target` has the rows.

Must not import Spark. Batches arrive as Parquet files that are already written; where the table's format allows it, they become
the table's data files as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.lake.columns import SchemaEvolution
from dagster_checkpoints.sinks.lake.fitting import FileFitting
from dagster_checkpoints.sinks.lake.placement import Replacement
from dagster_checkpoints.sinks.lake.table_log import TableLog
from dagster_checkpoints.sinks.lake.target import LakeTarget
from dagster_checkpoints.sinks.target_sink import TargetSink
from dagster_checkpoints.sinks.unwritable import try_directory


class LakeSink(TargetSink):
    """Commits a stage's rows to a lake table: one commit per instance and checkpoint.

    Args:
        at_new_start: what a new start does with rows that an earlier job of this stage has committed to the table.
        partition_by: the table's partition columns, in order; None: those that the table has, none for a new table.
        schema_evolution: what happens to differences between the stage's columns and the table's.
        key: name or names of the columns by which a row replaces an earlier one; None to add every row.
        overwrite_partitions: whether the rows of a job replace those of the partitions that they are in.

    Raises:
        ValueError: a setting has none of its values, or does not go with another one.
    """

    noun = "table"
    table: str

    def __init__(
        self,
        at_new_start: AtNewStart,
        partition_by: str | Sequence[str] | None,
        schema_evolution: SchemaEvolution,
        key: str | Sequence[str] | None = None,
        overwrite_partitions: bool = False,
    ) -> None:
        super().__init__(at_new_start)
        if schema_evolution not in get_args(SchemaEvolution):
            raise ValueError(f"expected {type(self).__name__}(schema_evolution='refuse' or 'add'), found {schema_evolution!r}")
        self.partition_by = _names(partition_by) or None
        self.schema_evolution: SchemaEvolution = schema_evolution
        self.key = _names(key)
        self.overwrite_partitions = overwrite_partitions
        _check_replacement(self)

    def __repr__(self) -> str:
        key = [f"key={list(self.key)}"] if self.key else []
        overwrite = ["overwrite_partitions=True"] if self.overwrite_partitions else []
        return f"{type(self).__name__}({', '.join([repr(self.table), *key, *overwrite])})"

    @property
    def bounded_only(self) -> bool:
        return self.overwrite_partitions

    @property
    def replaces_jobs(self) -> bool:
        return not self.overwrite_partitions

    @property
    def replaces_by_key(self) -> bool:
        return bool(self.key)

    @property
    def appends(self) -> bool:
        return not self.replacement

    @property
    def replacement(self) -> Replacement:
        """Which rows the stage's rows replace."""
        return Replacement(self.key, self.overwrite_partitions)

    @abstractmethod
    def _new_log(self) -> TableLog:
        """The table, which has not been read."""

    def _new_fitting(self) -> FileFitting:
        return FileFitting(self._new_log(), self.partition_by, self.schema_evolution, str(self), self.replacement)

    def new_target(self) -> LakeTarget:
        return LakeTarget(self._new_fitting(), str(self))

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the table; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job of this stage has committed rows to the table.
            SinkPathInUse: the table holds rows of a job with the number that the new job will have; or, with
                ``at_new_start="replace"`` and a key, another program may have rewritten the table's rows.
            SinkColumnsMismatch: the table asks something of its writers that this sink does not do.
            InvalidSinkPath: the table's directory cannot be written.
            SinkUnavailable: the location cannot be read, or its file system is full.
        """
        self._check_names(context)
        self._try_directory(f"Stage {context.stage!r} of pipeline {context.pipeline!r}: {self}")
        super().check_new_start(context)

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check that the table can be read, its directory be written, and that the stage's columns fit the table.

        Nothing is written to a location that is not a directory: there the run finds out.

        Raises:
            InvalidSinkPath: the directory cannot be written.
            SinkColumnsMismatch: the columns do not fit, or the table asks something of its writers that this sink does not do.
            SinkUnavailable: the location cannot be read, or is full.
        """
        self._check_names(context)
        self._try_directory(str(self))
        fitting = self._new_fitting()
        with closing(fitting.log):
            fitting.check_rows(rows)

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkFenced: a newer run of the pipeline writes to the table.
            SinkColumnsMismatch: the table asks something of its writers that this sink does not do.
        """
        self._check_names(context)
        super().open(context)

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        target = self._opened().target
        if self.overwrite_partitions and restored is None and isinstance(target, LakeTarget):
            target.check_continued()
        super().recover(committed, restored=restored)

    def _try_directory(self, sink: str) -> None:
        directory = local_path(self.uri) if self.uri is not None else None
        if directory is not None:
            try_directory(directory, sink)


def _names(columns: str | Sequence[str] | None) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns or ())


def _check_replacement(sink: LakeSink) -> None:
    """Refuse settings of ``key`` and ``overwrite_partitions`` that do not go together."""
    name = type(sink).__name__
    if len(set(sink.key)) != len(sink.key) or "" in sink.key:
        raise ValueError(f"expected {name}(key=...) to name different columns, found {list(sink.key)}")
    if not sink.overwrite_partitions:
        return
    if sink.key:
        raise ValueError(f"expected {name}(key=...) or {name}(overwrite_partitions=True), found both")
    if sink.partition_by is None:
        raise ValueError(f"expected the partition columns, {name}(partition_by=...), with overwrite_partitions=True, found none")
    if sink.at_new_start == "replace":
        raise ValueError(
            f"expected {name}(at_new_start='keep' or 'refuse') with overwrite_partitions=True, found 'replace', which removes "
            "all rows of earlier jobs. With 'keep' a new job replaces the partitions that it writes to"
        )
