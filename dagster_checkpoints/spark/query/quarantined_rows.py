"""Evaluates the conditions of a stage's quarantine over its rows, and checks before anything runs that Spark can.

It must not know where the rows go, nor their limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from dagster_checkpoints.pipeline import REFUSED_BY, REFUSED_IN_CHECKPOINT, Condition, Quarantine
from dagster_checkpoints.spark.errors import StageError, StageQuarantineError
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.query.error_text import text_of_error
from dagster_checkpoints.spark.query.stage_calls import StageCall, refusing_queries
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe

_NOT_MET = "__dagster_checkpoints_not_met__"


def not_met(quarantine: Quarantine, rows: DataFrame) -> Column:
    """The conditions that a row does not meet, as a BIGINT: bit n stands for the n-th one, from 0."""
    bits = [
        F.when(_column(condition, rows), F.lit(0).cast("bigint")).otherwise(F.lit(1 << number).cast("bigint"))
        for number, condition in enumerate(quarantine.conditions.values())
    ]
    return reduce(Column.__add__, bits)


def with_reasons(quarantine: Quarantine, rows: DataFrame, files: Sequence[WorkPath], not_met: Column) -> DataFrame:
    """Refused rows with the names of the conditions that they do not meet.

    One table, however many sets of conditions are not met: Spark plans a union of hundreds of tables for minutes.

    Args:
        quarantine: The conditions.
        rows: The rows of which these are a part.
        files: The files of the refused rows; at least one.
        not_met: What :func:`not_met` says of them, as a column of these files.
    """
    return table_dataframe(rows.sparkSession, rows.schema, files).withColumn(REFUSED_BY, _reasons(quarantine, not_met))


def divided(quarantine: Quarantine, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    """The rows of a batch that pass, and those that are refused, as the stage behind gets them; for tests of a pipeline.

    Each of the two evaluates the conditions.
    """
    marked = rows.withColumn(_NOT_MET, not_met(quarantine, rows))
    refused = marked.where(F.col(_NOT_MET) != 0).withColumn(REFUSED_BY, _reasons(quarantine, F.col(_NOT_MET)))
    return marked.where(F.col(_NOT_MET) == 0).drop(_NOT_MET), refused.drop(_NOT_MET)


def refused_schema(schema: StructType) -> StructType:
    """The columns of refused rows on their way to the stage that commits them.

    Args:
        schema: The columns of the stage.
    """
    return StructType([*schema.fields, StructField(REFUSED_BY, StringType())])


def check_quarantine(call: StageCall, quarantine: Quarantine, rows: DataFrame) -> None:
    """Let Spark analyse the conditions; nothing is evaluated.

    Args:
        call: The stage that has the quarantine.
        quarantine: Its conditions.
        rows: Its output.

    Raises:
        StageQuarantineError: A condition cannot be evaluated for each row by itself, or a column has a name that is needed.
    """
    taken = [name for name in rows.columns if name.lower() in (REFUSED_BY, REFUSED_IN_CHECKPOINT)]
    if taken:
        raise _refused(
            call, f"expected no column {taken[0]!r} beside quarantine=, which adds it to refused rows. Rename the column"
        )
    # A micro-batch has these columns, and none that are hidden (`_metadata`) or named by an alias.
    batch = rows.sparkSession.createDataFrame([], rows.schema)
    for name, condition in quarantine.conditions.items():
        try:
            with refusing_queries(call.stage, call.context.instance):
                for frame in (rows, batch):
                    # Spark refuses here what is no condition on one row: aggregates, window functions, no BOOLEAN.
                    frame.where(_column(condition, frame))
                    frame.select(F.when(_column(condition, frame), 0))
        except StageError:
            raise
        except Exception as error:
            raise _refused(
                call,
                f"its quarantine's condition {name!r} cannot be evaluated. Expected Spark's SQL, or a function from the rows to "
                f"a Column, that is true or false for a row by itself and uses the columns {', '.join(rows.columns)}. Found: "
                f"{text_of_error(error)}",
            ) from error


def _reasons(quarantine: Quarantine, not_met: Column) -> Column:
    bits = [not_met.bitwiseAND(F.lit(1 << number)) != 0 for number in range(len(quarantine.conditions))]
    return F.concat_ws(", ", *(F.when(bit, F.lit(name)) for bit, name in zip(bits, quarantine.conditions, strict=True)))


def _column(condition: Condition, rows: DataFrame) -> Column:
    column = F.expr(condition) if isinstance(condition, str) else condition(rows)
    if not isinstance(column, Column):
        raise TypeError(f"the function returned {column!r}, not a Column")
    return column


def _refused(call: StageCall, text: str) -> StageQuarantineError:
    return StageQuarantineError(call.stage.name, call.context.instance, f"({call.stage.location}) {text}")
