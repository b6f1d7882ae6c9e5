"""A burst: a run that suspends its job when every source has read what was there, so that a later run goes on from there.

    reading ── every source has ended, or has read what was there when its query began ──> asks for a suspend, as a user can

A source that has ended does not wait for the others; a job all of whose sources have ended comes to its own end, and is not
suspended. A suspend that fails is asked for again; when it has failed more often than checkpoints may fail, so does the job: a
burst that cannot be suspended would run without end. It must not know: how a source is held to what is there, who runs bursts.

Source: PROTOCOL section 6; FLIP-34; Spark's `Trigger.AvailableNow`.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.execution.job_requests import Request
from dagster_checkpoints.execution.task_events import SourcesRead
from dagster_checkpoints.pipeline import TaskId

AGAIN_SECONDS = 5.0
"""Seconds after which a suspend is asked for again that has failed."""


class Burst:
    """The burst of one execution of a job; see the module's docstring.

    Args:
        config: the settings of checkpoints: the time that a suspend may take, and how many may fail.
        epoch: fencing epoch of the run, for the ids of requests.
    """

    def __init__(self, config: CheckpointConfig, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._read: frozenset[TaskId] = frozenset()
        """The tasks whose sources have read what was there."""
        self._asked = 0
        self._failed = 0
        self._again_at = float("-inf")
        self._open: str | None = None

    @property
    def next_deadline(self) -> float | None:
        """When a suspend is asked for again, in the unit of `now`; None if that is not known."""
        return self._again_at if self._failed and self._open is None else None

    def read(self, report: SourcesRead) -> None:
        """A task has reported that its sources have read what was there."""
        self._read |= {report.task}

    def stopped(self, vertices: Set[str] | None) -> None:
        """The tasks of these vertices are stopped, None for all: those that start in their place read again."""
        self._read = frozenset() if vertices is None else frozenset(t for t in self._read if t.vertex not in vertices)
        self._failed = 0
        self._again_at = float("-inf")

    def is_due(self, tasks: Collection[TaskId], ended: Collection[TaskId], split_sources: Collection[str], now: float) -> bool:
        """Whether to ask for a suspend now: every source has ended or read what was there, and not all have ended.

        Args:
            tasks: the tasks with sources that have not finished.
            ended: those of them all of whose sources have ended.
            split_sources: the unbounded split sources all of whose splits have been read.
            now: seconds.
        """
        if self._open is not None or now < self._again_at or len(ended) == len(tasks):
            return False
        return all(task in ended or task in self._read or task.vertex in split_sources for task in tasks)

    def request(self) -> Request:
        """The suspend to ask for; every task must run, because a restart before it is begun would make sources read again."""
        self._asked += 1
        self._open = f"caught-up-e{self._epoch}-{self._asked}"
        return Request(self._open, "stop", self._config.timeout, asked_by="caught_up")

    def is_own(self, request_id: str) -> bool:
        """Whether the burst waits for the answer to this request."""
        return request_id == self._open

    def failed(self, message: str, now: float, *, restarting: bool) -> str:
        """The suspend has failed. Returns why the job fails with it; "" if it is asked for again.

        Args:
            message: why it failed.
            now: seconds.
            restarting: whether tasks restart, which limits the failures of the job by itself.
        """
        self._open = None
        if restarting:
            return ""
        self._again_at = now + AGAIN_SECONDS
        self._failed += 1
        if self._failed <= self._config.tolerable_failed_checkpoints:
            return ""
        return (
            f"every source has read what was there, and the savepoint with which the run ends has failed {self._failed} times in "
            f"a row: {message}"
        )
