"""How the rows of a stage join those of a lake table, by the sink's settings: added, by key, or by partition."""

from __future__ import annotations

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.lake.placement import AppendedRows, FilesOf, PlaceRows
from dagster_checkpoints.sinks.lake.replaced_partitions import JobPartitions, ReplacedPartitions
from dagster_checkpoints.sinks.lake.replaced_rows import ReplacedRows
from dagster_checkpoints.sinks.lake.replacement import Replacement
from dagster_checkpoints.sinks.lake.rewritable_log import RewritableLog


def rows_placement(log: RewritableLog, replacement: Replacement, context: SinkContext, files_of: FilesOf, sink: str) -> PlaceRows:
    """How the rows of an instance's transactions join those of the table.

    Args:
        log: the table.
        replacement: which rows the stage's rows replace.
        context: the instance.
        files_of: returns the data files of a transaction.
        sink: the sink as errors name it.
    """
    key = replacement.key
    if key:
        return lambda name, staged: ReplacedRows(log, context, sink, name, staged.files, key)
    if replacement.partitions:
        job = JobPartitions(log, context, files_of)
        return lambda name, staged: ReplacedPartitions(log, staged.files, job)
    return lambda name, staged: AppendedRows(staged.files)
