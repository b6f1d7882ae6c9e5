"""Checks a pipeline without running it: builds and checks every plan as a run does, without data.

It needs a Spark session, and neither storage, sinks nor Dagster.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dagster_checkpoints.spark.job.deployer import Deployer
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.spark.query.plan_report import PlanReport
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.snapshots.restored_state import Restored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_checkpoints.pipeline import Chain, Pipeline


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
