"""A Spark session that ends while its job runs: the job ends with that reason, after its tasks. Without Spark."""

from __future__ import annotations

import errno
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, JavaObject
from py4j.protocol import Py4JJavaError, Py4JNetworkError

from dagster_checkpoints import StageContext, bounded_source
from dagster_checkpoints.errors import CorruptStateFile
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.spark.errors import StageFailedError
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.job.job_driver import JobDriver
from dagster_checkpoints.spark.job.runtime import failure_of
from dagster_checkpoints.spark.session.session_life import SparkEndedError, session_end
from dagster_checkpoints.spark.session.work_directory import WorkDirectory, WorkDirectoryError
from dagster_checkpoints.spark.tasks.messages import TaskRaised
from dagster_checkpoints.spark.tasks.source_task import BatchTask
from dagster_checkpoints.spark.tasks.stage_errors import StageErrors


def session(answer: bool | Exception = False, *, exit_code: int | None = None, stopped_here: bool = False) -> Any:
    """A session whose SparkContext answers whether it is stopped, or does not answer."""

    def java_context() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(isStopped=lambda: answer)

    def call(*_: Any) -> None:
        if stopped_here:
            raise AttributeError("'NoneType' object has no attribute 'sc'")
        if isinstance(answer, Exception):
            raise answer
        assert not answer, "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext"

    def wait(seconds: float) -> int:
        """Linux tells a process's connections of its end before it tells its parent, to which it has none yet."""
        if exit_code is None:
            raise subprocess.TimeoutExpired("java", seconds)
        return exit_code

    context = SimpleNamespace(
        _jsc=None if stopped_here else SimpleNamespace(sc=java_context),
        _gateway=SimpleNamespace(proc=SimpleNamespace(poll=lambda: None, wait=wait)),
        cancelAllJobs=call,
        cancelJobsWithTag=call,
    )
    return SimpleNamespace(sparkContext=context)


REFUSED = ConnectionRefusedError(111, "Connection refused")
ENDED = [
    (session(stopped_here=True), r"found that spark\.stop\(\) was called in this process.*stop the pipeline instead"),
    (session(True), r"found that its SparkContext was stopped in Java.*logs of the cluster"),
    (session(REFUSED, exit_code=-9), r"found that Spark's Java process was ended by signal 9\..*spark\.driver\.memory"),
    (session(REFUSED, exit_code=52), r"found that .* has ended with exit code 52\..*heap was full.*raise spark\.driver\.memory"),
    (session(REFUSED, exit_code=3), r"found that Spark's Java process has ended with exit code 3\."),
    (session(Py4JNetworkError("Answer from Java side is empty")), r"found that Spark's Java process does not answer\."),
]


@pytest.mark.parametrize(("spark", "text"), ENDED)
def test_the_end_of_a_session_has_its_reason(spark: Any, text: str) -> None:
    ended = session_end(spark)
    assert isinstance(ended, SparkEndedError)
    with pytest.raises(SparkEndedError, match=f"expected the Spark session to live as long as the job, {text}"):
        raise ended
    assert "The next run continues from the newest checkpoint" in str(ended)


def test_a_session_that_lives_has_not_ended() -> None:
    assert session_end(session()) is None


def driver_with(spark: Any, **parts: Any) -> AttemptDriver:
    driver = object.__new__(AttemptDriver)
    driver._spark, driver._discovery = spark, SimpleNamespace(stop=lambda vertices: None)  # type: ignore[assignment]
    for name, part in parts.items():
        setattr(driver, name, part)
    return driver


@pytest.mark.parametrize("vertices", [None, {"live"}])
@pytest.mark.parametrize("spark", [spark for spark, _ in ENDED])
def test_all_tasks_are_stopped_before_the_job_ends_with_the_session(spark: Any, vertices: Any) -> None:
    done: list[str] = []

    def joined(seconds: float) -> bool:
        done.append("joined")
        return True

    channel = SimpleNamespace(close=lambda: done.append("closed"))
    task: Any = SimpleNamespace(
        id=SimpleNamespace(vertex="live"),
        cancel=lambda: done.append("cancelled"),
        join=joined,
        job_tag="tag",
        output=SimpleNamespace(channels=(channel,)),
    )
    driver = driver_with(spark, deployment=SimpleNamespace(tasks={task.id.vertex: task}))
    with pytest.raises(SparkEndedError):
        driver.stop((), vertices)
    assert done == ["cancelled", "joined", "closed"], "otherwise a task may still commit when the pipeline is released"


FAILURES = [
    (StageFailedError("live", "0", "failed: Connection refused"), on.DeployFailed),
    (OSError("no space left on device"), on.DeployFailed),
    (CorruptStateFile("cut off"), on.DeployFailed),
    (REFUSED, on.DeployFailed),
    (RuntimeError("wings"), RuntimeError),
]


@pytest.mark.parametrize(("error", "of_a_session_that_lives"), FAILURES)
def test_no_other_attempt_is_built_in_a_session_that_has_ended(error: Exception, of_a_session_that_lives: type) -> None:
    """With `restart_attempts: None` there would be one after the other, for ever."""

    def deploy(*_: Any) -> None:
        raise error

    work = SimpleNamespace(work="/work")
    parts = {"_attempts": SimpleNamespace(deploy=deploy), "_runtime": work, "deployment": None}
    action = do.Deploy(2, None)
    with pytest.raises(SparkEndedError) as raised:
        driver_with(session(REFUSED), **parts).deploy(action, None, 1)
    assert raised.value.__cause__ is error
    living = driver_with(session(), **parts)
    if of_a_session_that_lives is RuntimeError:
        with pytest.raises(RuntimeError, match="wings"):
            living.deploy(action, None, 1)
    else:
        event = living.deploy(action, None, 1)
        assert isinstance(event, on.DeployFailed) and event.unusable == isinstance(error, CorruptStateFile)
        assert event.may_pass != event.unusable


@pytest.mark.parametrize("kind", ["a file in its place", "full"])
def test_a_work_directory_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Any, kind: str) -> None:
    place = tmp_path / "work"
    work = WorkDirectory(place, tmp_path, "h")

    def deploy(*_: Any) -> None:
        if kind == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(place / "offsets"))
        place.touch()
        work.create(1, 1)

    driver = driver_with(
        session(), _attempts=SimpleNamespace(deploy=deploy), _runtime=SimpleNamespace(work=work), deployment=None
    )
    event = driver.deploy(do.Deploy(1, None), None, 1)
    assert isinstance(event, on.DeployFailed) and event.may_pass and not event.failure.repeats
    assert isinstance(event.failure.error, WorkDirectoryError)
    found = "Not a directory" if kind != "full" else "No space left on device"
    text = rf"queries in the work directory {place}, found: .*{found}.* choose another work_directory"
    assert re.search(text, event.failure.message)


def test_a_loop_that_fails_ends_its_work_also_if_spark_has_ended() -> None:
    """Uploads and writes must have ended before the pipeline is released."""
    ended: list[str] = []

    def stop(finished: Any) -> None:
        raise SparkEndedError("gone")

    driver = object.__new__(JobDriver)
    driver._attempt_driver = SimpleNamespace(deployment="some", stop=stop)  # type: ignore[assignment]
    driver._stop_work = lambda: ended.append("work")  # type: ignore[method-assign]
    with pytest.raises(SparkEndedError):
        driver.abandon()
    assert ended == ["work"]


def test_a_task_whose_error_was_in_the_java_process_that_has_ended_reports_its_end() -> None:
    """Spark reports its shutdown as an error of a job. py4j asks the JVM for the text, and the thread would end in silence."""

    @bounded_source
    def history(context: StageContext) -> Any: ...

    instance: Any = SimpleNamespace(stage=history, call=SimpleNamespace(context=SimpleNamespace(instance="0")))
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=1))  # nothing listens there
    java_exception = JavaObject("o7", gateway._gateway_client)
    error = Py4JJavaError("Job 3 was cancelled because SparkContext was shut down", java_exception)

    def shut_down(tag: str) -> None:
        raise error

    reports: list[Any] = []
    task = object.__new__(BatchTask)
    task.id = "history"  # type: ignore[assignment]
    task.job_tag = "tag"
    context = SimpleNamespace(addJobTag=shut_down)
    task.parts = SimpleNamespace(spark=SimpleNamespace(sparkContext=context), report=reports.append)  # type: ignore[assignment]
    task.stages = StageErrors([instance], files=Path("/work"))
    task.query = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
    task.operators = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    task.group_offsets = SimpleNamespace(close=lambda wait: None)  # type: ignore[assignment]
    task._done = False
    task._run()
    [raised] = reports
    assert isinstance(raised, TaskRaised) and isinstance(raised.error, StageFailedError)
    assert raised.error.__cause__ is error
    assert (
        "Stage 'history' (instance '0'): failed with Py4JJavaError, whose text cannot be read" in failure_of(raised.error).message
    )
