"""Hides what a stage reads from Spark's optimizer: no rule may conclude anything from an input of a stage.

The optimizer plans each micro-batch from scratch, and what it finds below an input changes from batch to batch: a source without
new rows is an empty relation, and a watermark's row is dropped by a filter. From these it would derive filters for the other
side of a join, leave out a branch of a union, push a join through a union, or move it because a side seems small. Rows would be
lost, or the query would have other stateful operators than in the batch before. Must not know stages or channels.

Source: Spark's `InferFiltersFromConstraints`, `PropagateEmptyRelation`, `PushDownLeftSemiAntiJoin` and `EliminateLimits`.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.spark.identifiers import identifier


def opaque(*branches: DataFrame) -> DataFrame:
    """The rows of some streams with the same columns, as one stream through which the optimizer does not look.

    One more branch has no rows and no partitions, which the optimizer does not know: so the stream is neither empty nor small in
    any micro-batch. The filter drops nothing; since it is not deterministic, nothing is pushed below it.

    Args:
        branches: The streams; the first one decides the columns' metadata, such as the watermark.
    """
    frame = branches[0]
    for other in branches[1:]:
        frame = frame.unionByName(other)
    return frame.union(_without_rows(branches[0])).where(F.spark_partition_id() >= 0)


def whole(frame: DataFrame) -> DataFrame:
    """The same rows, of which the optimizer leaves out no column: a source reads all of them, whatever its reader uses.

    The condition is true for each row; what is behind it, and names all columns, is never evaluated.
    """
    columns = F.struct(*[F.col(identifier(name)) for name in frame.columns])
    return frame.where(F.when(F.spark_partition_id() >= 0, True).otherwise(F.raise_error(columns.cast("string")).cast("boolean")))


def opaque_condition(condition: Column) -> Column:
    """The same condition as one expression that is not deterministic: no part of it is pushed down or counts as a constraint."""
    return F.when(F.spark_partition_id() >= 0, condition)


def _without_rows(frame: DataFrame) -> DataFrame:
    """A stream without rows that is no source of the query: Spark never replaces it by an empty relation."""
    session: Any = frame.sparkSession
    rows = session.sparkContext._jsc.emptyRDD().rdd()
    return DataFrame(session._jsparkSession.internalCreateDataFrame(rows, frame._jdf.schema(), True), session)
