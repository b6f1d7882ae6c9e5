"""Requests to a pipeline of the benchmark while it runs."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.environment import BenchFailed, Environment, JobRun
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.job_execution import JobExecution

DEADLINE_SECONDS = 900.0
_NUMBERS = itertools.count()


def run_under_control(
    environment: Environment,
    pipeline: Pipeline,
    folder: Path,
    control: Callable[[JobExecution], None],
    on_event: Callable[[JobEvent, JobExecution], None] = lambda event, job: None,
    **options: Any,
) -> JobRun:
    """Run a pipeline to its end while `control`, on another thread, sends it requests; the rest is as for `run_job`."""
    controlling: list[Future[None]] = []
    pool = ThreadPoolExecutor(1)

    def take(event: JobEvent, job: JobExecution) -> None:
        on_event(event, job)
        if not controlling:
            controlling.append(pool.submit(_or_cancel, job, control))

    try:
        run = environment.run_job(pipeline, folder, on_event=take, **options)
    except BenchFailed:
        if controlling and controlling[0].done():
            controlling[0].result()
        raise
    controlling[0].result()
    return run


def _or_cancel(job: JobExecution, control: Callable[[JobExecution], None]) -> None:
    try:
        control(job)
    except BaseException:
        job.cancel()
        raise


def request(job: JobExecution, kind: Any, **fields: Any) -> Answer:
    answered: Future[Answer] = Future()
    asked = ControlRequest(
        request_id=f"{kind}-{next(_NUMBERS)}",
        kind=kind,
        epoch=0,
        deadline_seconds=DEADLINE_SECONDS,
        asked_by="bench",
        asked_at=dt.datetime.now(dt.UTC),
        **fields,
    )
    job.ask(asked, answered.set_result)
    answer = answered.result(DEADLINE_SECONDS)
    if answer.status != "done":
        raise BenchFailed(f"a request of kind {kind!r} failed: {answer.reason}: {answer.message}")
    return answer


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise BenchFailed(f"expected a condition to become true within {DEADLINE_SECONDS:.0f} s")
        time.sleep(0.02)
