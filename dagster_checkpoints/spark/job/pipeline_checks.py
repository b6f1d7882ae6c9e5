"""Checks a pipeline without running it: every plan, built as a run builds it, and every sink.

The sinks are asked whether they can be written, and take the columns of their stages. It must not know how plans are built.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.sinks import SinkError
from dagster_checkpoints.sinks.temporary_folder import temporary_folder
from dagster_checkpoints.spark.errors import StageSinkError
from dagster_checkpoints.spark.job.deployer import Deployer
from dagster_checkpoints.spark.query.error_text import text_of_error
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.spark.query.plan_report import PlanReport
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.tasks.task_sink import reaching_sink, sink_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from dagster_checkpoints.pipeline import Chain, Pipeline, Stage
    from dagster_checkpoints.spark.query.plan_report import PlanReport


def check_plans(pipeline: Pipeline, spark: SparkSession, restored: Restored | None = None) -> PlanReport:
    """Build and check the plan of every stage, as a run does; runs nothing, and accesses neither storage nor sinks.

    Args:
        pipeline: The pipeline; its stages' `open`, `transform` and `close` are called.
        spark: A session made by :func:`dagster_checkpoints.spark.session.spark_session.build_session`.
        restored: A checkpoint whose state the plans have to fit, and whose layout of queries they use; None for a new start.

    Returns:
        Every stage as passed, failed or unchecked, and the warnings of a run's start.
    """
    log = logging.Logger("dagster_checkpoints.check", logging.WARNING)
    warnings = _Warnings()
    log.addHandler(warnings)
    report = Deployer(pipeline, spark, None, log).check(restored)
    report.warnings = list(dict.fromkeys(warnings.texts))
    return report


def plan_as_one_query(pipeline: Pipeline, spark: SparkSession, chain: Chain) -> tuple[QueryPlan, PlanDescription]:
    """The plan of stages as one query, whether they run as one or not; runs nothing.

    Args:
        pipeline: The pipeline; the stages' `open`, `transform` and `close` are called.
        spark: The session.
        chain: The stages, sources first.

    Raises:
        StageError, RefusedAtStage: Spark does not accept the plan.
    """
    log = logging.Logger("dagster_checkpoints.check", logging.CRITICAL)
    return Deployer(pipeline, spark, None, log).as_one_query(chain)


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


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
