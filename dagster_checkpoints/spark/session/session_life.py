"""A Spark session before and after its job: created early, on a thread of its own, and found to have ended.

A run that waits for the lease of another owner can start Spark meanwhile, which touches nothing of the pipeline. An owner that is
alive renews its lease within a third of it, and then this run is refused; so Spark is started only after that.

A session that has ended does not come back in its process: every call of Spark from then on fails with an error of the
connection to Java, which does not have the cause. Must not know jobs, storage, nor why a run waits.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_checkpoints.errors import DagsterCheckpointsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class EarlySession:
    """Creates a session at the first call, or earlier. Each method is called on one and the same thread.

    Args:
        create: Creates or joins the session; called once, on any thread but the main one.
    """

    def __init__(self, create: Callable[[], SparkSession]) -> None:
        self._create = create
        self._decided = threading.Event()  # to end the delay: the session is needed, or will not be
        self._closed = False
        self._thread: threading.Thread | None = None
        self._session: SparkSession | None = None
        self._error: BaseException | None = None

    def create_after(self, seconds: float) -> None:
        """Create the session on a thread after a delay, in seconds, unless it is needed before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(seconds,), name="spark-start", daemon=True)
            self._thread.start()

    def __call__(self) -> SparkSession:
        """The session; waits for it if it is being created.

        Raises:
            Exception: The error of `create`.
        """
        if self._thread is None:
            return self._create()
        self._decided.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._session is not None
        return self._session

    def close(self) -> None:
        """Do not create the session any more; wait for one that is being created."""
        self._closed = True
        self._decided.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, seconds: float) -> None:
        self._decided.wait(seconds)
        if self._closed:
            return
        try:
            self._session = self._create()
        except BaseException as error:
            self._error = error


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
