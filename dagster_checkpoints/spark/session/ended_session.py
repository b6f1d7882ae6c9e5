"""Whether the Spark session of a job still lives. Must not know jobs.

A session that has ended does not come back in its process: every call of Spark from then on fails with an error of the
connection to Java, which does not have the cause.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from dagster_checkpoints.errors import DagsterCheckpointsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXIT_SECONDS = 10.0
"""Maximum seconds from the end of a killed process's connections to its exit code: Linux frees its memory between."""

_OUT_OF_HEAP = 52
"""Spark's exit code for an OutOfMemoryError (`SparkExitCode.OOM`)."""
_HEAP = (
    "This exit code says that Java's heap was full (OutOfMemoryError): raise spark.driver.memory in the resource's spark_config, "
    "or let a micro-batch have fewer rows"
)
_MEMORY = (
    "Linux ends it by signal 9 when the machine or the container has no memory left: give it more, or lower spark.driver.memory "
    "in the resource's spark_config"
)
_MESSAGES = "Java's own messages are in the run's standard error"


class SparkEndedError(DagsterCheckpointsError):
    """The Spark session has ended while its job ran: its Java process has, or its SparkContext was stopped."""


def session_end(spark: SparkSession) -> SparkEndedError | None:
    """The error of a session that has ended; None for one that lives.

    Args:
        spark: The session.
    """
    context = spark.sparkContext
    if context._jsc is None:
        return _ended("spark.stop() was called in this process", "Do not call it there: stop the pipeline instead")
    try:
        if not context._jsc.sc().isStopped():
            return None
    except Exception:  # of py4j, or of its connection
        code = _exit_code(context)
        return _ended(f"Spark's Java process {_exit(code)}", f"{_HEAP if code == _OUT_OF_HEAP else _MEMORY}. {_MESSAGES}")
    return _ended(
        "its SparkContext was stopped in Java, for example because the cluster's master has ended the application",
        "The standard error of the run and the logs of the cluster have the reason",
    )


def _ended(found: str, remedy: str) -> SparkEndedError:
    return SparkEndedError(
        f"expected the Spark session to live as long as the job, found that {found}. No stage can run in this process any more, "
        f"so the job ends without another attempt. {remedy}. The next run continues from the newest checkpoint"
    )


def _exit_code(context: object) -> int | None:
    process = getattr(getattr(context, "_gateway", None), "proc", None)  # none if this process did not start Java
    try:
        code: int | None = process.wait(_EXIT_SECONDS) if process is not None else None
    except subprocess.TimeoutExpired:
        return None
    return code


def _exit(code: int | None) -> str:
    if code is None:
        return "does not answer"
    return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
