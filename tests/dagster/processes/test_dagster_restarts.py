"""Dagster's services beside a run of a live pipeline: killed and started again, with changed code; its queue, and its retries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster_graphql import DagsterGraphQLClientError, ReloadRepositoryLocationStatus

from dagster_checkpoints.plugin.runs import RECOVERS
from tests.dagster.processes.dagster_services import Services

LOCATION = Path(__file__).with_name("restart_location.py")
LIMIT = 20
"""Seconds of a run, by Dagster's settings: longer than the op of a busy machine needs to begin, when it takes the limit away."""
MONITORED = f"""
telemetry:
  enabled: false
run_monitoring:
  enabled: true
  poll_interval_seconds: 1
  max_runtime_seconds: {LIMIT}
"""
QUEUED = """
telemetry:
  enabled: false
concurrency:
  runs:
    max_concurrent_runs: 1
run_retries:
  enabled: true
  max_retries: 1
"""


@pytest.fixture
def services(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Services]:
    code_server, settings = getattr(request, "param", ("api grpc", MONITORED))
    started = Services(tmp_path, LOCATION, "restarts", code_server, settings)
    try:
        started.start_all()
        yield started
    finally:
        started.close()


def test_a_live_run_outlives_dagsters_services_and_keeps_its_code(services: Services) -> None:
    services.drop("first", range(5))
    first = services.launch()
    services.until(lambda: services.committed() == [0, 1, 4, 9, 16], "the first rows are committed")

    for service in ("webserver", "daemon", "code server"):
        services.kill(service)
        services.completes_a_checkpoint(f"a checkpoint without the {service}")
        if service == "code server":
            services.location.write_text(LOCATION.read_text().replace("id * id AS", "-id AS"))
        services.start(service)
    services.until(services.answers, "the webserver answers again")
    restarted = max(time.time(), services.began(first) + LIMIT + 1)
    services.until(lambda: services.monitored(restarted), "the daemon has looked at the runs again, after the limit")
    services.drop("second", range(5, 8))
    services.until(lambda: len(services.committed()) == 8, "the rows dropped meanwhile are committed")
    assert services.committed() == [number * number for number in range(8)], "the run keeps the code that it began with"
    assert services.status(first) is dg.DagsterRunStatus.STARTED
    assert len(services.instance.get_runs()) == 1, "no sensor has started another run"

    services.suspend()
    services.until(lambda: services.status(first) is dg.DagsterRunStatus.SUCCESS, "the suspended run ends")
    assert services.state().lease is None

    services.drop("third", range(8, 10))
    second = services.launch()
    squares_then_negatives = sorted([*(number * number for number in range(8)), -8, -9])
    services.until(lambda: services.committed() == squares_then_negatives, "the next run has the new code")

    # Its code server was restarted since: Dagster cannot reach the process any more, a request in storage does.
    services.kill("code server")
    services.start("code server")
    services.until(services.code_server_answers, "the code server answers again")
    with pytest.raises(DagsterGraphQLClientError, match="TerminateRunFailure"):
        services.client.terminate_run(second)
    assert services.status(second) is dg.DagsterRunStatus.CANCELING
    services.completes_a_checkpoint("a checkpoint after the termination that failed")
    services.suspend()
    services.until(lambda: services.ended(second), "the second run ends")
    assert services.status(second) is dg.DagsterRunStatus.SUCCESS
    assert services.state().job.job_id == 1, "the second run has continued the job of the first"

    # A worker that dies after its code server was replaced: nothing in Dagster notices it, the recovery sensor does.
    third = services.launch()
    services.drop("fourth", [10])
    services.until(lambda: -10 in services.committed(), "the third run goes on")
    services.kill("code server")
    services.start("code server")
    services.until(services.code_server_answers, "the code server answers once more")
    services.kill_worker()
    services.until(lambda: services.status(third) is dg.DagsterRunStatus.FAILURE, "the dead run is marked as failed")
    services.drop("fifth", [11])
    services.until(lambda: -11 in services.committed(), "its recovery goes on")
    assert services.committed() == sorted([*(number * number for number in range(8)), -8, -9, -10, -11])
    last, *_ = runs = services.instance.get_runs()
    (recovered,) = [
        run for run in runs if run.tags.get(RECOVERS) == third
    ]  # which may itself fail, on a machine that is too busy
    assert recovered.job_name == "restarts_recovery_job"
    services.suspend()
    services.until(lambda: services.ended(last.run_id), "the recovered run ends")


@pytest.mark.parametrize("services", [("code-server start", MONITORED)], indirect=True)
def test_a_location_that_is_reloaded_with_changed_code_leaves_the_run_alone(services: Services) -> None:
    """The old code server lives as long as its run: Dagster can still terminate that."""
    services.drop("first", range(5))
    first = services.launch()
    services.until(lambda: services.committed() == [0, 1, 4, 9, 16], "the first rows are committed")

    services.location.write_text(LOCATION.read_text().replace("id * id AS", "-id AS"))
    reloaded = services.client.reload_repository_location("live")
    assert reloaded.status is ReloadRepositoryLocationStatus.SUCCESS, reloaded.message
    services.completes_a_checkpoint("a checkpoint after the reload")
    services.drop("second", range(5, 8))
    services.until(lambda: len(services.committed()) == 8, "the rows dropped meanwhile are committed")
    assert services.committed() == [number * number for number in range(8)], "the run keeps the code that it began with"
    assert services.status(first) is dg.DagsterRunStatus.STARTED

    services.client.terminate_run(first)
    services.until(lambda: services.ended(first), "the terminated run ends")
    assert services.status(first) is dg.DagsterRunStatus.CANCELED
    services.drop("third", range(8, 10))
    second = services.launch()
    squares_then_negatives = sorted([*(number * number for number in range(8)), -8, -9])
    services.until(lambda: services.committed() == squares_then_negatives, "the next run has the new code")
    services.client.terminate_run(second)
    services.until(lambda: services.ended(second), "the second run ends")
    assert services.state().job.job_id == 1, "the second run has continued the job of the first"


@pytest.mark.parametrize("services", [("api grpc", QUEUED)], indirect=True)
def test_a_live_run_holds_its_place_in_the_queue_and_is_retried_by_dagster(services: Services) -> None:
    services.drop("first", range(5))
    live = services.launch()
    services.until(lambda: services.committed() == [0, 1, 4, 9, 16], "the first rows are committed")
    batch = services.client.submit_job_execution("nightly_job")
    services.completes_a_checkpoint("a checkpoint beside the queued run")
    assert services.status(batch) is dg.DagsterRunStatus.QUEUED

    services.kill_worker()
    services.until(lambda: services.status(live) is dg.DagsterRunStatus.FAILURE, "Dagster notices that the worker has died")
    services.drop("second", range(5, 8))
    services.until(lambda: len(services.committed()) == 8, "the rows dropped meanwhile are committed")
    (retry,) = (run for run in services.instance.get_runs() if run.run_id not in (live, batch))
    assert retry.parent_run_id == live and RECOVERS not in retry.tags, "Dagster retries it; the recovery sensor waits"
    # The place was free before the retry was in the queue: the batch job, which waited, was first.
    assert (services.status(retry.run_id), services.status(batch)) == (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.SUCCESS)

    services.suspend()
    services.until(lambda: services.status(retry.run_id) is dg.DagsterRunStatus.SUCCESS, "the retry succeeds")
    assert services.committed() == [number * number for number in range(8)]
    assert services.state().job.job_id == 1
    assert [run.run_id for run in services.instance.get_runs(dg.RunsFilter(job_name="restarts_job"))] == [retry.run_id, live]
