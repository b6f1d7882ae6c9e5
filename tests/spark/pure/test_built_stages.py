"""The stages of tasks that are built: each is closed once, also where its task is never started. Without Spark."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints import ParquetSink, Pipeline, Stage, StageContext, StageKind
from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.job.stage_instances import StageInstances
from dagster_checkpoints.spark.tasks.operator_chain import OperatorChain
from dagster_checkpoints.spark.tasks.source_task import BatchTask
from dagster_checkpoints.spark.tasks.task_parts import StageInstance

LOG = logging.getLogger("test_built_stages")


class Connected(Stage):
    """A source that says when it is closed, and then raises."""

    kind = StageKind.BOUNDED_SOURCE
    closed: list[str]

    def transform(self, context: StageContext) -> Any: ...

    def close(self) -> None:
        self.closed.append(self.name)
        raise OSError("the server is gone")


@pytest.fixture
def closed() -> list[str]:
    Connected.closed = []
    return Connected.closed


def opened(*names: str) -> tuple[StageInstances, list[StageInstance]]:
    """Instances of these stages."""
    state: Any = SimpleNamespace(operator_states=lambda name, index: {})
    pipeline = Pipeline("flights", [Connected(name, sink=ParquetSink(f"/lake/{name}")) for name in names])
    no_settings = SimpleNamespace(getAll=lambda: SimpleNamespace(mkString=lambda between: ""))
    session: Any = SimpleNamespace(_jsparkSession=SimpleNamespace(conf=lambda: no_settings))
    instances = StageInstances(pipeline, session, state, LOG, {})
    chains = [Chain(name, (name,), ("0",)) for name in names]
    return instances, [each for chain in chains for each in instances.of_chain(chain, 0, None)]


def built(instance: StageInstance) -> BatchTask:
    """A task of this stage that is built and not started."""
    task = object.__new__(BatchTask)
    parts: Any = SimpleNamespace(instances=(instance,), sink=None)
    task.id, task._canceled, task._done = TaskId(instance.stage.name, 0), threading.Event(), False
    task.operators = object.__new__(OperatorChain)
    task.operators._parts, task.operators._closed = parts, False
    task.output, task.job_tag = SimpleNamespace(channels=()), "tag"  # type: ignore[assignment]
    task._mailbox = SimpleNamespace(put=lambda mail: None)  # type: ignore[assignment]
    task._thread = threading.Thread(target=task.operators.close)
    return task


def driver_of(*tasks: BatchTask) -> AttemptDriver:
    driver = object.__new__(AttemptDriver)
    nothing: Any = SimpleNamespace(stop=lambda vertices: None, cancelAllJobs=lambda: None, cancelJobsWithTag=lambda tag: None)
    nothing._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    driver._discovery, driver._spark = nothing, SimpleNamespace(sparkContext=nothing)  # type: ignore[assignment]
    driver.deployment = SimpleNamespace(tasks={task.id: task for task in tasks})  # type: ignore[assignment]
    return driver


def test_all_stages_of_a_deployment_that_fails_are_closed_and_their_errors_hide_no_other(
    closed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    instances, _ = opened("history", "live")
    instances.close()
    assert closed == ["live", "history"]
    assert caplog.text.count("raised OSError('the server is gone')") == 2
    instances.close()
    assert len(closed) == 2


@pytest.mark.parametrize("vertices", [None, {"history"}])
def test_tasks_that_are_stopped_before_their_start_are_closed(closed: list[str], vertices: Any) -> None:
    _, (history, live) = opened("history", "live")
    driver = driver_of(built(history), built(live))
    driver.stop((), vertices)
    assert sorted(closed) == (["history"] if vertices else ["history", "live"])
    driver.close()
    assert sorted(closed) == ["history", "live"], "at the end of the job all of them, each once"


def test_a_task_that_runs_closes_its_stages_itself(closed: list[str]) -> None:
    _, (history,) = opened("history")
    task = built(history)
    task._thread.start()
    driver = driver_of(task)
    driver.stop(())
    driver.close()
    assert closed == ["history"]
