"""What a terminated run does with its job, at each moment of the job; without Spark."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import CommitCheckResult, Pipeline
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.coordination.retention import JobStatus
from dagster_checkpoints.pipeline import CheckEvaluation
from dagster_checkpoints.plugin.job_run import JobEnded, JobRun, JobThread
from dagster_checkpoints.plugin.run_events import RunReporter
from dagster_checkpoints.plugin.stage_assets import reports_end
from dagster_checkpoints.spark.job.events import JobResult, LeaseWatched, SinkCommitted, StageFinished
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.storage import CheckpointStorage, open_store
from tests.dagster.recorded_run import STARTED, Recorder, report


class ScriptedThread(JobThread):
    """A job that answers a termination with these items, and then has ended.

    Args:
        items: what the job gives.
        canceled: its last item, if it is cancelled before.
        alive: whether it has not ended behind the items.
    """

    def __init__(self, items: list[Any], canceled: JobEnded | None = None, *, alive: bool = False) -> None:
        self._alive = alive
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._script = items
        self.job: Any = SimpleNamespace(cancel=lambda error: self._items.put(canceled) if canceled is not None else None)
        self.asked: list[ControlRequest] = []

    @property
    def is_alive(self) -> bool:
        return self._alive

    def ask(self, request: ControlRequest, *, termination: bool = False) -> None:
        assert termination
        self.asked.append(request)
        for item in self._script:
            self._items.put(item)


def ended(status: JobStatus, ended_by: Any = "", checkpoint_id: int | None = 4, savepoint: str | None = None) -> JobEnded:
    location = f"checkpoints/chk-{checkpoint_id}-1" if checkpoint_id is not None else None
    return JobEnded(JobResult(status, None, 1, checkpoint_id, location, (), {}, ended_by, savepoint), None)


def terminated(thread: JobThread, suspend_seconds: float | None, name: str = "flights") -> tuple[list[str], list[str]]:
    """The texts of the log, and the savepoints that are reported, after the termination of a run."""
    texts: list[str] = []
    savepoints: list[str] = []
    log = SimpleNamespace(info=texts.append, warning=texts.append)
    context: Any = SimpleNamespace(log=log, run=SimpleNamespace(run_id="run"))
    reporter: Any = SimpleNamespace(ended=lambda: None, suspended=savepoints.append, report=lambda event: ())
    pipeline: Any = SimpleNamespace(name=name)
    JobRun(pipeline, context, thread, reporter, suspend_seconds=suspend_seconds).terminate()
    return texts, savepoints


NOW = datetime(2026, 1, 1, tzinfo=UTC)
SAVEPOINT = "s3://lake/savepoints/s"
SUSPENDED = ended(JobStatus.FINISHED, "suspend", savepoint=SAVEPOINT)
DRAINED = ended(JobStatus.FINISHED, "drain", savepoint=SAVEPOINT)
FINISHED = ended(JobStatus.FINISHED, "end_of_data", None)
CANCELED = ended(JobStatus.CANCELED)
SUSPENDING = "Suspending pipeline 'flights' before the run ends; at most 5 s."
CONTINUES = "Canceled. The next run continues from checkpoint 4 (checkpoints/chk-4-1)."
NEW_START = "Pipeline 'flights' {} before it was cancelled: all its rows are committed, and the next run is a new start."


def answer(status: Any, message: str = "") -> Answer:
    return Answer(request_id="t", status=status, message=message, answered_at=NOW)


@pytest.mark.parametrize(
    ("script", "canceled", "texts", "savepoints"),
    [
        ([answer("done"), SUSPENDED], None, [], [SAVEPOINT]),
        ([answer("done"), DRAINED], None, [NEW_START.format("was drained")], []),  # a drain was under way
        (
            [answer("failed", "too slow")],
            CANCELED,
            ["No savepoint was taken at the termination of the run: too slow", CONTINUES],
            [],
        ),
        ([FINISHED], None, [NEW_START.format("had come to its end")], []),
        ([], None, [], []),  # it never started: nothing is waited for
        ([], SUSPENDED, [], [SAVEPOINT]),
        ([ended(JobStatus.FAILED)], None, [CONTINUES], []),
    ],
)
def test_a_termination_suspends_the_job_and_says_what_comes_next(
    script: list[Any], canceled: JobEnded | None, texts: list[str], savepoints: list[str]
) -> None:
    thread = ScriptedThread(script, canceled)
    assert terminated(thread, 5.0) == ([SUSPENDING, *texts], savepoints)
    [request] = thread.asked
    assert (request.kind, request.drain, request.deadline_seconds) == ("stop", False, 5.0)


@pytest.mark.parametrize(("canceled", "texts", "savepoints"), [(SUSPENDED, [], [SAVEPOINT]), (CANCELED, [CONTINUES], [])])
def test_a_job_that_is_not_suspended_in_time_is_cancelled(canceled: JobEnded, texts: list[str], savepoints: list[str]) -> None:
    """Its savepoint may have been complete in time, with an end that took longer."""
    late = "The pipeline was not suspended within 0.01 s, and is canceled now."
    begun = SUSPENDING.replace("5 s", "0.01 s")
    assert terminated(ScriptedThread([], canceled, alive=True), 0.01) == ([begun, late, *texts], savepoints)


@pytest.mark.parametrize(
    ("canceled", "texts", "savepoints"),
    [
        (CANCELED, [CONTINUES], []),
        (SUSPENDED, [], [SAVEPOINT]),
        (FINISHED, [NEW_START.format("had come to its end")], []),
        (ended(JobStatus.CANCELED, checkpoint_id=None), [], []),
    ],
)
def test_without_a_savepoint_the_job_is_cancelled_and_its_end_is_said(
    canceled: JobEnded, texts: list[str], savepoints: list[str]
) -> None:
    thread = ScriptedThread([], canceled)
    assert terminated(thread, None) == (texts, savepoints)
    assert thread.asked == []


@pytest.mark.parametrize("suspend_seconds", [5.0, None])
@pytest.mark.parametrize(
    ("end", "texts", "savepoints"),
    [
        (DRAINED, [NEW_START.format("was drained")], []),
        (FINISHED, [NEW_START.format("had come to its end")], []),
        (SUSPENDED, [], [SAVEPOINT]),
        (CANCELED, [CONTINUES], []),
    ],
)
def test_a_job_whose_end_an_interrupt_has_taken_says_what_comes_next(
    end: JobEnded, texts: list[str], savepoints: list[str], suspend_seconds: float | None
) -> None:
    job: Any = SimpleNamespace(run=lambda: end.result, cancel=lambda error: None, ask=lambda *request, **how: None)
    thread = JobThread(lambda on_event, log: job, name="flights")
    thread.start()
    assert thread.next(10.0) == end
    thread._thread.join(10.0)
    assert terminated(thread, suspend_seconds) == ([SUSPENDING, *texts] if suspend_seconds else texts, savepoints)


@pytest.mark.parametrize("suspend_seconds", [5.0, None])
def test_the_ends_of_stages_are_materialized_although_the_op_yields_nothing_more(
    suspend_seconds: float | None, reporter: RunReporter, recorder: Recorder, numbers_pipeline: Pipeline
) -> None:
    """The job comes to its end while its run is terminated. The next run is a new start, so no other run reports these ends."""
    checked = CheckEvaluation("few", "", 9, blocking=True, result=CommitCheckResult(True, "5 rows"))
    ends = [StageFinished(stage, 5, 9) for stage in ("total", "numbers", "doubled")]
    items = [SinkCommitted("total", 9, None, 5, None, last=True, checks=(checked,)), *ends]
    thread = ScriptedThread([*items, FINISHED] if suspend_seconds else [], FINISHED)
    report(reporter, STARTED)
    for item in [] if suspend_seconds else items:
        thread._items.put(item)
    context: Any = recorder
    JobRun(numbers_pipeline, context, thread, reporter, suspend_seconds=suspend_seconds).terminate()
    materialized = [event for event in recorder.events if isinstance(event, dg.AssetMaterialization) and reports_end(event)]
    assert [event.asset_key.to_user_string() for event in materialized] == ["numbers", "doubled", "total"]
    assert {(event.tags or {})["dagster/data_version"] for event in materialized} == {"job-7"}
    assert [event.metadata["checkpoint"].value for event in materialized] == [9] * 3
    (evaluation,) = [event for event in recorder.events if isinstance(event, dg.AssetCheckEvaluation)]
    assert (evaluation.check_name, evaluation.passed, evaluation.description) == ("few", True, "5 rows")


@pytest.mark.parametrize(
    ("suspend_seconds", "texts"),
    [
        (None, []),
        (
            60.0,
            [
                "Suspending pipeline 'numbers' before the run ends; at most 60 s.",
                "No savepoint was taken at the termination of the run: the run did not own the pipeline yet.",
            ],
        ),
    ],
)
def test_a_run_that_waits_for_a_lease_ends_at_once_and_takes_nothing_over(
    suspend_seconds: float | None, texts: list[str], tmp_path: Path, numbers_pipeline: Pipeline, owner: Callable[..., Any]
) -> None:
    first = owner(numbers_pipeline, "the-first-run", lease_seconds=600.0)

    def create(on_event: Any, log: Any) -> JobExecution:
        return JobExecution(
            numbers_pipeline,
            storage=CheckpointStorage(open_store(str(tmp_path / "storage")), "numbers"),
            options=JobOptions(CheckpointConfig(interval=None), NoRestart(), tmp_path / "work"),
            session=lambda: pytest.fail("Spark was started"),
            on_event=on_event,
            run_id="the-second-run",
            log=log,
        )

    thread = JobThread(create, name="numbers")
    thread.start()
    assert isinstance(thread.next(10.0), LeaseWatched)
    began = time.monotonic()
    assert terminated(thread, suspend_seconds, "numbers") == (texts, [])
    assert time.monotonic() - began < 10.0
    assert not thread.is_alive
    state = first.storage.read_state()
    assert (state.lease.owner.run_id, state.epoch) == ("the-first-run", 1)
