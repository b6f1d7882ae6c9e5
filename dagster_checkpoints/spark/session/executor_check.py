"""Before a job starts: every executor proves that it sees the driver's work directory, and can write there.

An executor that comes later is not asked: a batch in which it takes part is refused by the count of its rows (`segments`).
It must not know jobs.
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

from dagster_checkpoints.spark.session.executor_probe import QUESTION, probe
from dagster_checkpoints.spark.session.work_directory import SHARED_REMEDY, WorkDirectoryNotSharedError

if TYPE_CHECKING:
    from pyspark import SparkContext

SETTLE_SECONDS = 5.0
"""A shared file system shows what another machine has written after some time, NFS after its attribute cache's."""
ALL_SECONDS = 60.0
"""From the first answer on: for the others of those executors that are registered."""
_REMIND_SECONDS = 30.0
_POLL_SECONDS = 0.1
_MOST_TASKS = 8  # per executor


@dataclass(frozen=True)
class Answer:
    """What one executor has found.

    Attributes:
        executor: Differs between any two executors.
        host: Its machine's name.
        file: What it has written, a name within the folder; empty if it has not.
        problem: Why the folder is not the driver's; empty if it is.
    """

    executor: str
    host: str
    file: str = ""
    problem: str = ""


class ExecutorCheck:
    """Asks the executors of a Spark application.

    Args:
        context: Spark's.
        folder: A new one in the work directory.
        check_canceled: Raises if the job was cancelled; asked again and again while executors are waited for.
        log: Told what is waited for, and of executors that could not be asked.
    """

    def __init__(self, context: SparkContext, folder: Path, check_canceled: Callable[[], None], log: logging.Logger) -> None:
        self._context = context
        self._folder = folder
        self._check_canceled = check_canceled
        self._log = log
        self._group = f"work-directory-{uuid4().hex}"

    def run(self) -> int:
        """Ask until each executor that is registered has answered. Returns how many have.

        It waits for the first executor as long as Spark itself does. One that cannot be asked in time, because all of its
        cores are busy, is passed over with a warning.

        Raises:
            WorkDirectoryNotSharedError: An executor sees another directory; names its host.
        """
        word = uuid4().hex
        (self._folder / QUESTION).write_text(word, encoding="utf-8")
        answers: dict[str, Answer] = {}
        until: float | None = None
        tasks_each = 1
        with ThreadPoolExecutor(1, thread_name_prefix="executor-check") as thread:
            while True:
                tasks = max(1, len(self._registered())) * tasks_each
                found = self._wait(thread.submit(self._ask, tasks, word))
                answers.update((answer.executor, answer) for answer in found)
                self._check(answers, word)
                registered = self._registered()
                if len(answers) >= len(registered):
                    return len(answers)
                until = until or time.monotonic() + ALL_SECONDS
                if time.monotonic() >= until:
                    self._log.warning(
                        "%d of %d executors have not proven within %.0f s that they see the work directory %s; registered are "
                        "%s. A batch whose rows do not reach the driver fails.",
                        len(registered) - len(answers),
                        len(registered),
                        ALL_SECONDS,
                        self._folder.parent,
                        ", ".join(registered),
                    )
                    return len(answers)
                tasks_each = min(2 * tasks_each, _MOST_TASKS)

    def _ask(self, tasks: int, word: str) -> list[Answer]:
        """Run this number of tasks at the same time. Spark deals them out to all executors that have a free core."""
        folder, seconds = str(self._folder), SETTLE_SECONDS
        self._context.setJobGroup(self._group, "Does every executor see the work directory?", interruptOnCancel=True)
        found = self._context.parallelize(range(tasks), tasks).map(lambda _: probe(folder, word, seconds)).collect()
        return [Answer(**answer) for answer in found]

    def _wait(self, asked: Future[list[Answer]]) -> list[Answer]:
        remind_at = time.monotonic() + _REMIND_SECONDS
        while True:
            try:
                return asked.result(_POLL_SECONDS)
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

    def _check(self, answers: dict[str, Answer], word: str) -> None:
        until = time.monotonic() + SETTLE_SECONDS
        problems = []
        for answer in answers.values():
            problem = answer.problem or self._unseen(answer, word, until)
            if problem:
                problems.append(f"an executor on host {answer.host}: {problem}")
        if problems:
            raise WorkDirectoryNotSharedError(
                f"Not every executor of Spark's master {self._context.master} shares the work directory with the driver. "
                f"Expected in {self._folder}, on each, what the driver writes there, and on the driver what the executor writes. "
                f"Found {'; '.join(sorted(set(problems)))}. {SHARED_REMEDY}. Nothing was started"
            )

    def _unseen(self, answer: Answer, word: str, until: float) -> str:
        """Why the driver does not see what an executor has written; empty if it does."""
        while True:
            try:
                if (self._folder / answer.file).read_text(encoding="utf-8") == word:
                    return ""
                problem = "it has written something else"
            except OSError as error:
                problem = f"the driver does not see what it has written: {error}"
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
