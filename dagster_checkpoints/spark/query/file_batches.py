"""The files of a micro-batch of Spark's own file streams: what Spark would lose, multiply or mix up without an error.

Spark lists a directory, plans the files that it has not read, and lists these again when it reads them: those that are gone by
then it leaves out, and those beside directories of partitions. It maps columns by their position, and learns which of them are
partition columns where a query begins.

Source: Spark's `FileStreamSource.getBatch`, `HadoopFSUtils.listLeafFiles`, `PartitioningUtils.parsePartitions` and
`MicroBatchExecution.runBatch`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.errors import LostRows
from dagster_checkpoints.spark.query.file_index import listed_files, unlisted
from dagster_checkpoints.spark.query.file_paths import check_read_once
from dagster_checkpoints.spark.query.plan_nodes import streams_of_batch

SKIPS_MISSING_FILES = "ignoreMissingFiles"
"""Spark's option, and the end of the name of its setting, with which it skips files that are gone."""
_SHOWN = 3


class PlannedFilesGone(LostRows):
    """Files that Spark's file stream has found were deleted before it read them; no row of the micro-batch has left the query."""


class PartitionColumnsAppeared(DagsterCheckpointsError):
    """A file stream has got partition columns since its query began: the next attempt reads them."""


class FilesOutsidePartitions(DagsterCheckpointsError):
    """A micro-batch has files beside directories of partitions, whose rows Spark does not read."""

    repeats: ClassVar[bool] = True


def check_files(execution: Any) -> None:
    """Check that the micro-batch that a query processes reads the rows of its file streams right, and each once.

    Args:
        execution: Spark's execution of the query, a Java object.

    Raises:
        FilesReadTwice: a file is there more than once.
        PlannedFilesGone: a file is not there any more.
        FilesOutsidePartitions: Spark would not read a file.
        PartitionColumnsAppeared: values would come into other columns.
    """
    batch = execution.lastExecution().logical()
    check_read_once(batch)
    for position, leaf in enumerate(streams_of_batch(batch)):
        if leaf.nodeName() == "LogicalRelation":
            relation = leaf.relation()
            _check_there(relation)
            if relation.partitionSchema().size():
                _check_in_partitions(relation)
                _check_columns(streams_of_batch(execution.logicalPlan())[position], leaf)


def _check_there(relation: Any) -> None:
    index = relation.location()
    if index.allFiles().size() == index.rootPaths().size() or _skips_missing_files(relation):
        return
    files = str(index.rootPaths().mkString("\n")).split("\n")
    gone = unlisted(index, files)
    raise PlannedFilesGone(
        f"expected the {len(files)} files of a micro-batch that Spark's file stream has found before, found that {len(gone)} of "
        f"them were deleted before they were read: {_shown(gone)}. No row of the micro-batch was emitted. Keep "
        "files until no checkpoint in use is older than their rows. Put them back, or empty files of these names if their rows "
        f'are not needed; or set .option("{SKIPS_MISSING_FILES}", "true"), with which Spark skips such files without an error'
    )


def _skips_missing_files(relation: Any) -> bool:
    option = relation.options().get(SKIPS_MISSING_FILES)
    if option.isDefined():
        return str(option.get()).lower() == "true"
    return bool(relation.sparkSession().sessionState().conf().ignoreMissingFiles())


def _check_in_partitions(relation: Any) -> None:
    index = relation.location()
    no_filter = index.rootPaths().take(0)
    read = {path for path, _ in listed_files(index.listFiles(no_filter, no_filter))}
    lost = [path for path, size in listed_files(index.allFiles()) if size != "0" and path not in read]
    if lost:
        columns = ", ".join(_names(relation.partitionSchema()))
        raise FilesOutsidePartitions(
            f"expected files in directories of the partition columns {columns}, found {len(lost)} beside these in a micro-batch: "
            f"{_shown(lost)}. Spark would read no row of them, without an error. No row of the micro-batch was emitted. Move "
            "them into such directories, or read them with a source of their own"
        )


def _shown(files: Sequence[str]) -> str:
    return f"{', '.join(files[:_SHOWN])}{f' and {len(files) - _SHOWN} more' if len(files) > _SHOWN else ''}"


def _check_columns(stream: Any, leaf: Any) -> None:
    expected, found = _names(stream), _names(leaf)
    if [name.lower() for name in expected] != [name.lower() for name in found]:
        raise PartitionColumnsAppeared(
            f"expected files with the columns {', '.join(expected)}, in this order, found {', '.join(found)}: directories of the "
            f"partition columns {', '.join(_names(leaf.relation().partitionSchema()))} have appeared since the query began, and "
            "Spark would put values into other columns. No row of the micro-batch was emitted. The next attempt reads them right"
        )


def _names(columns: Any) -> list[str]:
    """The names of a plan's, or a type's, columns."""
    kind = columns if columns.getClass().getSimpleName() == "StructType" else columns.schema()
    return [field["name"] for field in json.loads(str(kind.json()))["fields"]]
