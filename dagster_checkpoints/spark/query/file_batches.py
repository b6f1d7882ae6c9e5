"""The files of a micro-batch of Spark's own file streams: what Spark would multiply or mix up without an error.

Spark maps columns by their position, and learns which of them are partition columns where a query begins.

Source: Spark's `FileStreamSource.getBatch` and `MicroBatchExecution.runBatch`
"""

from __future__ import annotations

import json
from typing import Any

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.query.file_paths import check_read_once
from dagster_checkpoints.spark.query.plan_nodes import streams_of_batch


class PartitionColumnsAppeared(DagsterCheckpointsError):
    """A file stream has got partition columns since its query began: the next attempt reads them."""


def check_files(execution: Any) -> None:
    """Check that the micro-batch that a query processes reads the rows of its file streams right, and each once.

    Args:
        execution: Spark's execution of the query, a Java object.

    Raises:
        FilesReadTwice: a file is there more than once.
        PartitionColumnsAppeared: values would come into other columns.
    """
    batch = execution.lastExecution().logical()
    check_read_once(batch)
    for position, leaf in enumerate(streams_of_batch(batch)):
        if leaf.nodeName() == "LogicalRelation" and leaf.relation().partitionSchema().size():
            _check_columns(streams_of_batch(execution.logicalPlan())[position], leaf)


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
