"""Which rows of a lake table a stage's rows replace, and how they join it: added, by key, or by partition."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.lake.placement import AppendedRows, FilesOf, PlaceRows
from dagster_checkpoints.sinks.lake.replaced_partitions import JobPartitions, ReplacedPartitions
from dagster_checkpoints.sinks.lake.replaced_rows import ReplacedRows
from dagster_checkpoints.sinks.lake.table_log import TableLog


@dataclass(frozen=True, slots=True)
class Replacement:
    """What the rows of a stage replace; nothing by default.

    Args:
        key: the columns by which a row replaces an earlier one; empty if rows do not replace rows.
        partitions: whether the rows of a job replace those of the partitions that they are in.
    """

    key: tuple[str, ...] = ()
    partitions: bool = False

    def __bool__(self) -> bool:
        return bool(self.key) or self.partitions


def rows_placement(log: TableLog, replacement: Replacement, scope: SinkScope, files_of: FilesOf, sink: str) -> PlaceRows:
    """How the rows of an instance's transactions join those of the table.

    Args:
        log: the table.
        replacement: which rows the stage's rows replace.
        scope: the instance.
        files_of: returns the data files of a transaction.
        sink: the sink as errors name it.
    """
    key = replacement.key
    if key:
        return lambda name, staged: ReplacedRows(log, scope, sink, name, staged.files, key)
    if replacement.partitions:
        job = JobPartitions(log, scope, files_of)
        return lambda name, staged: ReplacedPartitions(log, staged.files, job)
    return lambda name, staged: AppendedRows(staged.files)
