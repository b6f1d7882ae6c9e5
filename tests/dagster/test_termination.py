"""The end of a run that is terminated: what it says of a savepoint, however long the job takes to end behind it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.coordination import JobStatus
from dagster_checkpoints.plugin.job_run import JobRun
from dagster_checkpoints.plugin.job_thread import JobEnded
from dagster_checkpoints.spark.job.events import JobResult

URL = "file:///storage/p/savepoints/savepoint-7-termination-1a2b3c"


class Thread:
    """A job that ends while its savepoint is waited for, or only when it is cancelled."""

    def __init__(self, ended: JobEnded, *, in_time: bool) -> None:
        self._ended = ended
        self._in_time = in_time

    def ask(self, request: Any, *, termination: bool) -> None:
        assert (request.kind, request.drain, termination) == ("stop", False, True)

    def next(self, timeout: float) -> JobEnded | None:
        return self._ended if self._in_time else None

    def cancel(self, seconds: float) -> JobEnded:
        return self._ended


def end_of(status: JobStatus, ended_by: Any = "", savepoint: str | None = None) -> JobEnded:
    return JobEnded(JobResult(status, None, 1, 7, "checkpoints/chk-7-1", (), {}, ended_by, savepoint), None)


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize(
    ("ended", "savepoints", "says"),
    [
        (end_of(JobStatus.FINISHED, "suspend", URL), [URL], []),
        (end_of(JobStatus.CANCELED), [], ["Canceled. The next run continues from checkpoint 7 (checkpoints/chk-7-1)."]),
    ],
)
def test_a_job_that_was_suspended_is_reported_as_that(
    ended: JobEnded, savepoints: list[str], says: list[str], in_time: bool, caplog: pytest.LogCaptureFixture
) -> None:
    suspended: list[str] = []
    reporter: Any = SimpleNamespace(suspended=suspended.append, ended=lambda: None)
    context: Any = SimpleNamespace(log=logging.getLogger("termination"), run=SimpleNamespace(run_id="a run"))
    pipeline: Any = SimpleNamespace(name="p")
    thread: Any = Thread(ended, in_time=in_time)
    with caplog.at_level(logging.INFO, "termination"):
        JobRun(pipeline, context, thread, reporter, suspend_seconds=0.01).terminate()
    assert suspended == savepoints
    begun, *lines = caplog.messages
    assert begun.startswith("Suspending pipeline 'p' before the run ends")
    assert lines == [*([] if in_time else ["The pipeline was not suspended within 0.01 s, and is canceled now."]), *says]
