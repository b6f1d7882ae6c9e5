"""All of Dagster, as a user runs it: runs launched and terminated, a savepoint materialized, a drain by the daemon, and an asset
downstream of a live stage that runs after its commits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import dagster as dg
import pytest
from dagster_graphql import DagsterGraphQLClient

from dagster_checkpoints.plugin.stage_assets import reports_end
from tests.dagster.processes.pipeline_of_numbers import PipelineOfNumbers

REPOSITORY = Path(__file__).resolve().parents[3]
LOCATION = Path(__file__).with_name("daemon_location.py")
SECONDS = 240.0
T = TypeVar("T")
SAVEPOINTS = dg.AssetKey(["savepoints", "daemon_numbers"])


class Dagster(PipelineOfNumbers):
    """Webserver, daemon and code server below one directory.

    Args:
        home: The directory.
        location: The file with the code location.
        pipeline: The name of its pipeline.
    """

    def __init__(self, home: Path, location: Path = LOCATION, pipeline: str = "daemon_numbers") -> None:
        (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        # Before any other process: two that create Dagster's tables at once break them (https://github.com/dagster-io/dagster/issues/27390).
        super().__init__(home, dg.DagsterInstance.from_config(str(home)), pipeline)
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {**os.environ, "DAGSTER_HOME": str(home), "LIVE_ROOT": str(self.root)}
        environment.pop("CHECKPOINT_STORAGE", None)
        self.log = home / "dagster.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dagster", "dev", "-f", str(location), "-h", "127.0.0.1", "-p", str(self.port)],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.client = DagsterGraphQLClient("127.0.0.1", port_number=self.port)

    def answers(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=5):
                return True
        except OSError:
            return False

    def until(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + SECONDS
        while True:
            found = look()
            if found:
                return found
            alive = self._process.poll() is None and not self.instance.get_runs(
                dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE])
            )
            assert alive and time.monotonic() < deadline, f"{what}: {self.log.read_text()[-6000:]}"
            time.sleep(0.3)

    def launch(self, job: str, **tags: str) -> str:
        return self.client.submit_job_execution(job, tags={key.replace("_", "/"): value for key, value in tags.items()})

    def ended(self, run_id: str) -> dg.DagsterRunStatus:
        def status() -> dg.DagsterRunStatus | None:
            run = self.instance.get_run_by_id(run_id)
            return run.status if run is not None and run.is_finished else None

        return self.until(status, f"run {run_id} ends")

    def savepoints(self) -> dict[str, dg.AssetMaterialization]:
        """The savepoints that Dagster shows, by partition."""
        records = self.instance.fetch_materializations(SAVEPOINTS, limit=20).records
        return {str(record.partition_key): record.asset_materialization for record in records if record.asset_materialization}

    def reported(self, rows: int, during: str) -> bool:
        """Whether the eager asset downstream of the live stage has read this number of rows, while a run goes on."""
        run = self.instance.get_run_by_id(during)
        if run is None or (run.status is not dg.DagsterRunStatus.STARTED and not run.is_finished):
            return False  # queued: the run before may have committed the rows
        assert run.status is dg.DagsterRunStatus.STARTED
        newest = self.instance.fetch_materializations(dg.AssetKey("report"), limit=1).records
        found = [record.asset_materialization.metadata["rows"].value for record in newest if record.asset_materialization]
        return found == [rows]

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.storage.close()
        self.instance.dispose()


@pytest.fixture
def bursts(tmp_path: Path) -> Iterator[Dagster]:
    started = Dagster(tmp_path, LOCATION.with_name("burst_location.py"), "daemon_bursts")
    try:
        yield started
    finally:
        started.stop()


def test_the_daemon_reads_a_feed_in_bursts_and_evaluates_its_health(bursts: Dagster) -> None:
    """Two runs of the schedule, one behind the other: the second continues from the first."""

    def finished() -> list[dg.DagsterRun]:
        return [run for run in bursts.instance.get_runs() if run.is_finished]

    for burst in range(2):
        bursts.drop(str(burst), range(5 * burst, 5 * burst + 5))
        squares = [number * number for number in range(5 * burst + 5)]
        bursts.until(lambda wanted=squares: bursts.committed("squares") == wanted, f"burst {burst} has committed its rows")
        bursts.until(lambda least=burst: len(finished()) > least, f"burst {burst} has ended")
    runs = finished()
    assert {(run.status, run.job_name) for run in runs} == {(dg.DagsterRunStatus.SUCCESS, "daemon_bursts_job")}
    assert {run.tags["dagster/schedule_name"] for run in runs} == {"daemon_bursts_bursts"}
    job = bursts.state().job
    assert (job.job_id, job.ended_by, job.stop_asked_by) in {(1, "suspend", "caught_up"), (1, "", "")}, "one job, perhaps running"
    healthy = dg.AssetCheckKey(dg.AssetKey(["checkpoints", "daemon_bursts"]), "healthy")

    def evaluated() -> bool:
        history = bursts.instance.event_log_storage.get_asset_check_execution_history(healthy, limit=5)
        return bool(history) and all(record.status.value == "SUCCEEDED" for record in history)

    bursts.until(evaluated, "the health sensor has evaluated the check")


@pytest.fixture
def dagster(tmp_path: Path) -> Iterator[Dagster]:
    started = Dagster(tmp_path)
    try:
        started.until(started.answers, "the webserver answers")
        yield started
    finally:
        started.stop()


def test_savepoint_termination_resume_and_drain_in_a_whole_dagster(dagster: Dagster) -> None:
    dagster.drop("first", range(5))
    first = dagster.launch("numbers")
    dagster.until(lambda: dagster.committed("squares") == [0, 1, 4, 9, 16], "the first rows are committed")
    dagster.until(lambda: dagster.reported(5, during=first), "an asset downstream has run after the commit of the live stage")
    dagster.until(lambda: dagster.instance.get_latest_materialization_event(dg.AssetKey("backfill")), "the backfill is finished")

    # The re-root sensor has read it, and shows where checkpoints begin now.
    def rooted_at_live() -> bool:
        seen = dagster.instance.fetch_observations(dg.AssetKey("live"), limit=50).records
        return any("roots" in record.asset_observation.metadata for record in seen if record.asset_observation is not None)

    dagster.until(rooted_at_live, "the re-root sensor reports the roots")

    # A savepoint of the running pipeline, by materializing its asset.
    dagster.instance.add_dynamic_partitions("savepoints_daemon_numbers", ["before-lunch"])
    taken = dagster.launch("take_savepoint", dagster_partition="before-lunch")
    assert dagster.ended(taken) is dg.DagsterRunStatus.SUCCESS
    assert list(dagster.savepoints()) == ["before-lunch"]
    evaluated = dagster.instance.get_records_for_run(taken, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION).records
    events = [record.event_log_entry.dagster_event for record in evaluated]
    assert [event.asset_check_evaluation_data.passed for event in events if event is not None] == [True]
    assert dagster.committed("squares") == [0, 1, 4, 9, 16], "a savepoint in flight commits nothing and stops nothing"

    # Terminated from the UI: the run takes a savepoint first.
    dagster.drop("second", range(5, 8))
    dagster.client.terminate_run(first)
    assert dagster.ended(first) is dg.DagsterRunStatus.CANCELED
    state = dagster.state()
    assert (state.job.status, state.job.ended_by, state.lease) == ("FINISHED", "suspend", None)
    assert state.newest is not None and state.newest.kind == "savepoint"
    assert len(dagster.savepoints()) == 2, "the savepoint of the termination is shown as well"
    squares = dagster.instance.get_latest_materialization_event(dg.AssetKey("squares"))
    assert squares is not None and squares.asset_materialization is not None
    assert not reports_end(squares.asset_materialization), "the stage has not finished"

    # The next run continues from it; the daemon's sensor drains that run.
    second = dagster.launch("numbers")
    dagster.until(lambda: len(dagster.committed("squares")) == 8, "the rows dropped meanwhile are committed")
    dagster.until(lambda: dagster.reported(8, during=second), "the asset downstream has run again")
    dagster.drop("third", range(8, 10))
    dagster.storage.store.put("daemon_numbers/drain-now", b"")
    assert dagster.ended(second) is dg.DagsterRunStatus.SUCCESS
    state = dagster.state()
    assert (state.job.status, state.job.ended_by, state.job.job_id) == ("FINISHED", "drain", 1)
    assert dagster.committed("squares") == [number * number for number in range(10)]
    assert dagster.committed("backfill") == list(range(5))
    assert len(dagster.savepoints()) == 3, "the drain's savepoint too"
    squares = dagster.instance.get_latest_materialization_event(dg.AssetKey("squares"))
    assert squares is not None and squares.asset_materialization is not None
    assert squares.run_id == second and reports_end(squares.asset_materialization)
