"""Runs in separate processes, terminated as Dagster's run launcher does it: by SIGINT to the run's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.plugin.stage_assets import reports_end
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage import CheckpointStorage, open_store

REPOSITORY = Path(__file__).resolve().parents[3]
LOCATION = Path(__file__).with_name("live_location.py")
SECONDS = 180.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("LIVE_ROOT", str(tmp_path / "data"))
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    (tmp_path / "data" / "input").mkdir(parents=True)
    return tmp_path


@contextmanager
def dagster_run(home: Path, job: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with (home / f"{job}.log").open("wb") as log:
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(LOCATION), "-j", job, *arguments]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def drop(home: Path, name: str, numbers: range) -> None:
    new = home / "data" / f".{name}"
    new.write_text("".join(json.dumps({"id": number}) + "\n" for number in numbers))
    new.rename(home / "data" / "input" / f"{name}.json")


def committed(home: Path, sink: str) -> list[int]:
    files = (home / "data" / sink).glob("checkpoint=*/*.parquet")
    return sorted(number for file in files for number in pq.ParquetFile(file).read().column("id").to_pylist())


def latest_run(instance: dg.DagsterInstance) -> dg.DagsterRun:
    return instance.get_runs(limit=1)[0]


@pytest.mark.parametrize("executor", ["in_process", "multiprocess"])
def test_a_terminated_run_is_canceled_and_continued(home: Path, executor: str) -> None:
    drop(home, "first", range(5))
    storage = CheckpointStorage(open_store(str(home / "checkpoints")), "live_numbers")

    def backfill_finished() -> bool:
        state = storage.read_state()
        if state is None or state.newest is None:
            return False
        try:
            metadata = decode(storage.read_metadata(state.newest.location), state.newest.location)
        except StorageError:  # a newer checkpoint has replaced it meanwhile
            return False
        return any(stage.name == "backfill" and stage.fully_finished for stage in metadata.stages)

    def shown(instance: dg.DagsterInstance) -> bool:
        """Whether Dagster has been told of the commits."""
        squares = instance.fetch_observations(dg.AssetKey(["squares"]), limit=1).records
        return bool(squares) and instance.get_latest_materialization_event(dg.AssetKey(["backfill"])) is not None

    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        dagster_run(home, f"everything_{executor}") as process,
    ):
        deadline = time.monotonic() + SECONDS
        while not (backfill_finished() and committed(home, "squares") == [0, 1, 4, 9, 16] and shown(instance)):
            assert process.poll() is None, (home / f"everything_{executor}.log").read_text()[-5000:]
            assert time.monotonic() < deadline, (home / f"everything_{executor}.log").read_text()[-5000:]
            time.sleep(0.2)
        instance.report_run_canceling(latest_run(instance))
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)

        assert latest_run(instance).status is dg.DagsterRunStatus.CANCELED
        state = storage.read_state()
        assert state is not None and state.lease is None and state.job.status == "CANCELED"
        assert state.newest is not None
        kept = state.newest.checkpoint_id
        # `live` and `squares` have not finished: only commits have materialized `squares`.
        assert instance.get_latest_materialization_event(dg.AssetKey(["backfill"])) is not None
        committed_by = instance.fetch_materializations(dg.AssetKey(["squares"]), limit=100).records
        assert not any(reports_end(record.asset_materialization) for record in committed_by if record.asset_materialization)
        assert instance.fetch_observations(dg.AssetKey(["squares"]), limit=1).records

        drop(home, "second", range(5, 10))
        (home / "data" / "drain").touch()
        with dagster_run(home, f"unfinished_{executor}") as process:  # the finished stage may be left out
            assert process.wait(SECONDS) == 0, (home / f"unfinished_{executor}.log").read_text()[-5000:]
        finished = latest_run(instance)
        assert finished.status is dg.DagsterRunStatus.SUCCESS
        log = (home / f"unfinished_{executor}.log").read_text()
        assert f"Continues from checkpoint {kept} (" in log
        squares = instance.get_latest_materialization_event(dg.AssetKey(["squares"]))
        assert squares is not None and squares.asset_materialization is not None
        assert squares.run_id == finished.run_id and reports_end(squares.asset_materialization)
    assert committed(home, "squares") == [number * number for number in range(10)]
    assert committed(home, "backfill") == list(range(5))
    state = storage.read_state()
    assert state is not None and state.job.status == "FINISHED" and state.job.job_id == 1
    storage.close()


def test_an_op_that_dagster_retries_continues_the_job_that_it_has_begun(home: Path) -> None:
    """Its process is killed, and the run's configuration asks for a new start: the job goes on, and is not begun again."""
    (home / "run.yaml").write_text("ops: {live_assets: {config: {restore_from: none}}}")
    drop(home, "first", range(5))
    storage = CheckpointStorage(open_store(str(home / "checkpoints")), "live_numbers")
    log = home / "retried.log"

    def until(look: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while not look():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.2)

    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        dagster_run(home, "retried", "-c", str(home / "run.yaml")) as process,
    ):
        until(lambda: committed(home, "squares") == [0, 1, 4, 9, 16], process)
        state = storage.read_state()
        assert state is not None and state.lease is not None and state.newest is not None
        os.kill(state.lease.owner.pid, signal.SIGKILL)
        drop(home, "second", range(5, 10))
        (home / "data" / "drain").touch()
        assert process.wait(SECONDS) == 0, log.read_text()[-5000:]
        run = latest_run(instance)
        retried = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_RESTARTED)
        assert run.status is dg.DagsterRunStatus.SUCCESS and len(retried) == 1
    assert f"Run {run.run_id}, which this run repeats, has begun job 1 there" in log.read_text()
    assert committed(home, "squares") == [number * number for number in range(10)]
    assert committed(home, "backfill") == list(range(5))
    state = storage.read_state()
    assert state is not None and state.job.status == "FINISHED" and state.job.job_id == 1
    storage.close()
