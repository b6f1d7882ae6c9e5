"""Checks the sinks of a pipeline without running it: whether they can be written, and take the columns of their stages.

It must not know the sinks, nor how plans are built.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.sinks import SinkError
from dagster_checkpoints.sinks.temporary_folder import temporary_folder
from dagster_checkpoints.spark.errors import StageSinkError
from dagster_checkpoints.spark.query.error_text import text_of_error
from dagster_checkpoints.spark.tasks.task_sink import reaching_sink, sink_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from dagster_checkpoints.pipeline import Pipeline, Stage
    from dagster_checkpoints.spark.query.plan_report import PlanReport


def check_sinks(pipeline: Pipeline, spark: SparkSession, report: PlanReport) -> None:
    """Check the sink of every stage whose plan can run, and record what was found in the report.

    Args:
        pipeline: The pipeline.
        spark: A session with a local master: it writes a file of this machine.
        report: The checked plans; a sink that refuses its rows, or fails, makes its stage a failed one, a sink of which that
            could not be found out gives a warning.
    """
    for stage in pipeline.stages:
        schema = report.schemas.get(stage.name)
        if stage.sink is None or stage.name not in report.passed or schema is None:
            continue
        try:
            with reaching_sink(stage.sink), temporary_folder() as folder:
                stage.sink.check_target(sink_context(pipeline, stage, 0, None, 0, ""), _without_rows(spark, schema, folder))
        except SinkError as error:
            if error.repeats:
                _refuse(report, stage, error, f"cannot take its rows: {error}")
            else:
                report.warnings.append(f"Stage {stage.name!r}: whether its sink takes its rows is not known: {error}")
        except Exception as error:  # of a sink of the user's: the other stages are checked all the same
            _refuse(report, stage, error, f"fails while it is checked. {text_of_error(error)}")


def _refuse(report: PlanReport, stage: Stage, error: Exception, what: str) -> None:
    refused = StageSinkError(stage.name, stage.instances[0], f"its sink ({stage.location}) {what}")
    refused.__cause__ = error
    report.refuse(refused)


def _without_rows(spark: SparkSession, schema: StructType, folder: Path) -> Path:
    """A Parquet file with the columns, as Spark writes them in a run."""
    target = Path(folder, "rows")
    spark.createDataFrame([], schema).coalesce(1).write.parquet(target.as_uri())
    return next(target.glob("*.parquet"))
