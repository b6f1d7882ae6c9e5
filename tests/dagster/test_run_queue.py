"""Dagster's run queue beside runs that do not end: the choice of Dagster's daemon, with the settings of docs/dagster.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import yaml  # type: ignore[import-untyped]
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.test_utils import instance_for_test
from dagster._core.utils import make_new_run_id
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

PAGE = Path(__file__).resolve().parents[2] / "docs/dagster.md"
REPOSITORY = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("anywhere"), "__repository__")
STARTED, QUEUED = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.QUEUED


def launched(settings: Mapping[str, Any], runs: list[tuple[str, dg.DagsterRunStatus, dict[str, str]]]) -> list[str]:
    """The jobs whose queued runs Dagster launches now, in its order."""
    with instance_for_test(overrides={"concurrency": dict(settings)}) as instance:
        for job_name, status, tags in runs:
            origin = REPOSITORY.get_job_origin(job_name)
            run_id = make_new_run_id()
            instance.add_run(dg.DagsterRun(job_name=job_name, run_id=run_id, status=status, tags=tags, remote_job_origin=origin))
        daemon = QueuedRunCoordinatorDaemon(interval_seconds=5)
        chosen = daemon._get_runs_to_dequeue(instance, instance.get_concurrency_config(), fixed_iteration_time=None)
        return [run.job_name for run in chosen]


def test_live_runs_hold_their_places_in_the_queue_whatever_the_priority() -> None:
    live = [(f"live_{number}", STARTED, {}) for number in range(2)]
    recovery = ("recovery", QUEUED, {"dagster/priority": "10"})
    assert launched({"runs": {"max_concurrent_runs": 2}}, [*live, recovery]) == []
    assert launched({"runs": {"max_concurrent_runs": 3}}, [*live, ("batch", QUEUED, {}), recovery]) == ["recovery"]


def test_with_the_settings_of_the_page_a_recovery_has_a_place_beside_all_batch_runs() -> None:
    (block,) = re.findall(r"^```yaml\n(concurrency:.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    settings = yaml.safe_load(block)["concurrency"]
    (limit,) = settings["runs"]["tag_concurrency_limits"]
    batch = [("batch", QUEUED, {limit["key"]: limit["value"]})] * (limit["limit"] + 5)
    places_for_live_runs = settings["runs"]["max_concurrent_runs"] - limit["limit"]
    live = [("live", STARTED, {})] * (places_for_live_runs - 1)
    assert launched(settings, [*live, *batch, ("recovery", QUEUED, {})]) == ["batch"] * limit["limit"] + ["recovery"]
