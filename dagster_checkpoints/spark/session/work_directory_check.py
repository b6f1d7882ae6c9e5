"""The check, before a job starts, that the driver and all executors can use one work directory.

On a file system that is mounted, every executor has to see the driver's directory, and to write to it. An executor that registers
later is not checked: if it does not share the directory, the count of its batch's rows is wrong, and the batch is refused
(`segments`). On a file system that only Hadoop's client reaches, an executor without a jar, credentials or network would fail
every batch; one job of Spark shows that at start. Must not know jobs of the pipeline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_checkpoints.spark.files.work_path import WorkPath, literal, url
from dagster_checkpoints.spark.session.executor_probe import QUESTION, probe
from dagster_checkpoints.spark.session.work_directory import SHARED_REMEDY, WorkDirectoryError, WorkDirectoryNotSharedError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


SETTLE_SECONDS = 5.0
"""Maximum seconds until a shared file system shows a file that another machine has written (NFS: its attribute cache)."""
ALL_SECONDS = 60.0
"""Maximum seconds from the first answer to the answers of all registered executors."""
_REMIND_SECONDS = 30.0
_POLL_SECONDS = 0.1
_MAX_TASKS_EACH = 8  # per executor


@dataclass(frozen=True)
class ProbeResult:
    """The result of the probe on one executor.

    Attributes:
        executor: Unique name of the executor.
        host: Name of the executor's machine.
        file: Name of the file that the executor has written to the folder; empty if it has written none.
        problem: Why the executor's folder is not the driver's; empty if it is.
    """

    executor: str
    host: str
    file: str = ""
    problem: str = ""


class ExecutorCheck:
    """Checks the executors of a Spark application.

    Args:
        context: The Spark context.
        folder: A new folder in the work directory.
        check_canceled: Raises if the job was cancelled; called repeatedly while the check waits for executors.
        log: Gets a line while the check waits, and a warning about executors that could not be checked.
    """

    def __init__(self, context: SparkContext, folder: Path, check_canceled: Callable[[], None], log: logging.Logger) -> None:
        self._context = context
        self._folder = folder
        self._check_canceled = check_canceled
        self._log = log
        self._group = f"work-directory-{uuid4().hex}"

    def run(self) -> int:
        """Probe until each registered executor has answered. Returns the number of executors that have.

        Waits for the first executor as long as Spark itself does. An executor that cannot be probed in time, because all of its
        cores are busy, is skipped with a warning.

        Raises:
            WorkDirectoryNotSharedError: An executor sees another directory; names its host.
        """
        word = uuid4().hex
        (self._folder / QUESTION).write_text(word, encoding="utf-8")
        results: dict[str, ProbeResult] = {}
        until: float | None = None
        tasks_each = 1
        with ThreadPoolExecutor(1, thread_name_prefix="executor-check") as thread:
            while True:
                tasks = max(1, len(self._registered())) * tasks_each
                new_results = self._wait(thread.submit(self._probe, tasks, word))
                results.update((result.executor, result) for result in new_results)
                self._check(results, word)
                registered = self._registered()
                if len(results) >= len(registered):
                    return len(results)
                until = until or time.monotonic() + ALL_SECONDS
                if time.monotonic() >= until:
                    self._log.warning(
                        "%d of %d executors have not proven within %.0f s that they see the work directory %s; registered are "
                        "%s. A batch whose rows do not reach the driver fails.",
                        len(registered) - len(results),
                        len(registered),
                        ALL_SECONDS,
                        self._folder.parent,
                        ", ".join(registered),
                    )
                    return len(results)
                tasks_each = min(2 * tasks_each, _MAX_TASKS_EACH)

    def _probe(self, tasks: int, word: str) -> list[ProbeResult]:
        """Run this number of probes at the same time. Spark distributes them to all executors with a free core."""
        folder, seconds = str(self._folder), SETTLE_SECONDS
        self._context.setJobGroup(self._group, "Does every executor see the work directory?", interruptOnCancel=True)
        fields = self._context.parallelize(range(tasks), tasks).map(lambda _: probe(folder, word, seconds)).collect()
        return [ProbeResult(**each) for each in fields]

    def _wait(self, results: Future[list[ProbeResult]]) -> list[ProbeResult]:
        remind_at = time.monotonic() + _REMIND_SECONDS
        while True:
            try:
                return results.result(_POLL_SECONDS)
            except NotYet:
                pass
            try:
                self._check_canceled()
            except BaseException:
                self._context.cancelJobGroup(self._group)
                raise
            if time.monotonic() >= remind_at:
                remind_at = time.monotonic() + _REMIND_SECONDS
                self._log.info("The start waits for an executor of %s with a free core.", self._context.master)

    def _check(self, results: dict[str, ProbeResult], word: str) -> None:
        until = time.monotonic() + SETTLE_SECONDS
        problems = []
        for result in results.values():
            problem = result.problem or self._problem_with_file(result, word, until)
            if problem:
                problems.append(f"an executor on host {result.host}: {problem}")
        if problems:
            raise WorkDirectoryNotSharedError(
                f"Not every executor of Spark's master {self._context.master} shares the work directory with the driver. "
                f"Expected that each executor sees the driver's file in {self._folder}, and the driver the executor's file. "
                f"Found {'; '.join(sorted(set(problems)))}. {SHARED_REMEDY}. Nothing was started"
            )

    def _problem_with_file(self, result: ProbeResult, word: str, until: float) -> str:
        """Why the driver does not see the executor's file; empty if it does."""
        while True:
            try:
                if (self._folder / result.file).read_text(encoding="utf-8") == word:
                    return ""
                problem = "its file has another content"
            except OSError as error:
                problem = f"the driver does not see its file: {error}"
            if time.monotonic() >= until:
                return problem
            time.sleep(_POLL_SECONDS)

    def _registered(self) -> list[str]:
        """Host and number of each executor that is registered, without the driver."""
        scheduler = self._context._jsc.sc()
        ids = scheduler.getExecutorIds()
        hosts = scheduler.statusStore().executorList(True)
        names = {}
        for index in range(hosts.size()):
            executor = hosts.apply(index)
            names[str(executor.id())] = str(executor.hostPort()).rpartition(":")[0]
        known = [str(ids.apply(index)) for index in range(ids.size())]
        return [f"{number} on {names.get(number, 'a host not known yet')}" for number in known]


_ROWS_EACH = 10
_TASKS_PER_CORE = 2  # so that each executor that is free takes part


def check_remote_directory(spark: SparkSession, folder: WorkPath) -> None:
    """Write rows with all executors, read them again, and let the driver write and read a file.

    Args:
        spark: The session.
        folder: A new folder in the work directory.

    Raises:
        WorkDirectoryError: The driver or an executor cannot write or read there; the text has the cause.
        WorkDirectoryNotSharedError: Rows that executors have written are not there.
    """
    tasks = max(2, _TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    rows = tasks * _ROWS_EACH
    place = url(folder / "rows")
    try:
        (folder / "driver").write_text("written", "utf-8")
        read = (folder / "driver").read_text("utf-8")
        spark.range(0, rows, 1, tasks).write.parquet(place)
        found = spark.read.parquet(literal(place)).count()
    except Exception as error:
        raise WorkDirectoryError(
            f"expected the driver and all executors of {spark.sparkContext.master} to write to the work directory "
            f"{folder.parent} and to read from it, found {type(error).__name__}: {error}. Check that its server runs, that "
            "the session has the file system's jar and settings (spark.hadoop.*), and the permissions of Spark's user. Nothing "
            "was started"
        ) from error
    if (read, found) != ("written", rows):
        raise WorkDirectoryNotSharedError(
            f"expected {rows} rows that {tasks} tasks have written to {place}, found {found}. Nothing was started"
        )
