"""The settings of a Spark session that decide what rows a plan computes. Must not know stages, nor how a session is made."""

from __future__ import annotations

from pyspark.sql import SparkSession

DECIDE_ROWS = (
    "spark.sql.ansi.",
    "spark.sql.caseSensitive",
    "spark.sql.legacy.",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.session.timeZone",
    "spark.sql.storeAssignmentPolicy",
)
"""How their names begin. Spark reads them when it analyzes a plan, from the session."""


def row_settings(spark: SparkSession) -> dict[str, str]:
    """Those that are set in the session, by name, as one message from the JVM."""
    lines = str(spark._jsparkSession.conf().getAll().mkString("\n")).split("\n")
    pairs = (line.split(" -> ", 1) for line in lines if line.startswith(DECIDE_ROWS) and " -> " in line)
    return {name: value for name, value in pairs}


def set_back(spark: SparkSession, name: str, value: str | None) -> None:
    """Give a setting a former value; None if it was not set."""
    spark.conf.unset(name) if value is None else spark.conf.set(name, value)
