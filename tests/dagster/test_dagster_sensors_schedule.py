"""The schedule of savepoints: its requests, their names, and skipped ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from dagster_checkpoints import (
    Pipeline,
    build_burst_schedule,
    build_run_schedule,
    build_savepoint_schedule,
    pipeline_assets,
    savepoint_asset,
)
from dagster_checkpoints.errors import InvalidRequest, InvalidStorageUrl, StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import Origin
from dagster_checkpoints.plugin.sensors import run_schedule
from dagster_checkpoints.plugin.stage_assets import PIPELINE, NotAPipelineAssetError
from dagster_checkpoints.storage import CheckpointStorage

AT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
KEY = "periodic-20260504T030201Z"


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance with a directory: a schedule opens the instance by its reference."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as made:
        yield made


@pytest.fixture
def savepoints(meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> dg.AssetsDefinition:
    return savepoint_asset(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline))


@pytest.fixture
def evaluate(coordinator: Callable[..., Any], meeting_pipeline: Pipeline, savepoints: dg.AssetsDefinition) -> Callable[..., Any]:
    def tick(instance: dg.DagsterInstance, **options: Any) -> Any:
        settings = {"cron_schedule": "0 * * * *", **options}
        schedule = build_savepoint_schedule(pipeline=meeting_pipeline, savepoints=savepoints, **settings)
        defs = dg.Definitions(assets=[savepoints], schedules=[schedule], resources={"checkpoint_coordinator": coordinator()})
        dg.Definitions.validate_loadable(defs)
        context = dg.build_schedule_context(
            instance=instance,
            scheduled_execution_time=AT.astimezone(),
            repository_def=defs.get_repository_def(),
            resources={"checkpoint_coordinator": coordinator()},
        )
        with context as entered:
            return defs.resolve_schedule_def("meeting_savepoints").evaluate_tick(entered)

    return tick


def test_a_tick_requests_a_named_savepoint_of_the_running_pipeline(
    instance: dg.DagsterInstance, evaluate: Callable[..., Any], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    owner(meeting_pipeline)
    result = evaluate(instance, keep=5, keep_for=timedelta(days=2), path="/backup", deadline=60.0)
    (request,) = result.run_requests
    assert request.partition_key == KEY
    assert request.tags["dagster/partition"] == KEY
    assert instance.has_dynamic_partition("savepoints_meeting", KEY)
    config = request.run_config["ops"]["savepoints__meeting"]["config"]
    assert config["stop"] == "none" and config["path"] == "/backup" and config["deadline"] == 60.0
    assert config["retention"] == {
        "made_by": "meeting_savepoints",
        "prefix": "periodic-",
        "count": 5,
        "max_age": 172_800.0,
    }


def test_a_tick_without_a_running_pipeline_is_skipped_and_leaves_nothing(
    instance: dg.DagsterInstance, evaluate: Callable[..., Any], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    assert "never run" in evaluate(instance).skip_message
    owner(meeting_pipeline).end("FINISHED", ended_by="suspend")
    result = evaluate(instance)
    assert not result.run_requests and "FINISHED by suspend" in result.skip_message
    stopping = owner(meeting_pipeline, "run-2")
    stopping.report(stop={"request_id": "drain-1", "drain": True, "state": "WAITING_FOR_SAVEPOINT"})
    assert "drain-1" in evaluate(instance).skip_message
    assert instance.get_dynamic_partitions("savepoints_meeting") == []


def test_a_tick_is_skipped_while_the_run_of_an_earlier_one_is_in_the_queue(
    instance: dg.DagsterInstance, evaluate: Callable[..., Any], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    """If the pipeline's run holds the only place, each tick would add a run, and all of them would fail after its end."""
    owner(meeting_pipeline)
    created(instance, "run-0", dg.DagsterRunStatus.QUEUED, tags={PIPELINE: "meeting"})
    assert evaluate(instance).run_requests
    instance.delete_dynamic_partition("savepoints_meeting", KEY)
    created(instance, "run-2", dg.DagsterRunStatus.QUEUED, job="meeting_savepoints_job")
    result = evaluate(instance)
    assert not result.run_requests and "Run run-2" in result.skip_message and "QUEUED" in result.skip_message
    assert instance.get_dynamic_partitions("savepoints_meeting") == []
    instance.delete_run("run-2")
    created(instance, "run-3", dg.DagsterRunStatus.STARTED, job="meeting_savepoints_job")
    assert evaluate(instance).run_requests


def test_the_tick_is_skipped_while_storage_cannot_be_reached(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, evaluate: Callable[..., Any]
) -> None:
    def unreachable(self: CheckpointStorage) -> None:
        raise StorageUnavailable("the bucket is on the moon.")

    monkeypatch.setattr(CheckpointStorage, "read_state", unreachable)
    assert "on the moon" in evaluate(instance).skip_message


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep_for": timedelta(0)}])
def test_a_retention_that_keeps_nothing_is_refused(
    meeting_pipeline: Pipeline, savepoints: dg.AssetsDefinition, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="keep"):
        build_savepoint_schedule(pipeline=meeting_pipeline, savepoints=savepoints, cron_schedule="@daily", **options)


@pytest.mark.parametrize("options", [{"prefix": "hourly/"}, {"prefix": "_"}, {"prefix": "p" * 120}, {"path": "savepoints"}])
def test_a_schedule_whose_runs_would_all_be_refused_is_refused(
    meeting_pipeline: Pipeline, savepoints: dg.AssetsDefinition, options: dict[str, Any]
) -> None:
    with pytest.raises((InvalidRequest, InvalidStorageUrl), match=next(iter(options.values()))[:9]):
        build_savepoint_schedule(pipeline=meeting_pipeline, savepoints=savepoints, cron_schedule="@daily", **options)


# Runs


@pytest.fixture
def run_tick(
    coordinator: Callable[..., Any], meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> Callable[[dg.DagsterInstance], Any]:
    def tick(instance: dg.DagsterInstance) -> Any:
        assets = assets_of(meeting_pipeline)
        job = dg.define_asset_job("meetings", selection=[assets])
        schedule = build_run_schedule(pipeline=meeting_pipeline, job=job, cron_schedule="0 * * * *")
        defs = dg.Definitions(
            assets=[assets], jobs=[job], schedules=[schedule], resources={"checkpoint_coordinator": coordinator()}
        )
        context = dg.build_schedule_context(
            instance=instance, repository_def=defs.get_repository_def(), resources={"checkpoint_coordinator": coordinator()}
        )
        with context as entered:
            return defs.resolve_schedule_def("meeting_runs").evaluate_tick(entered)

    return tick


def test_a_burst_schedule_launches_runs_that_read_what_is_there(
    instance: dg.DagsterInstance,
    coordinator: Callable[..., Any],
    meeting_pipeline: Pipeline,
    owner: Callable[..., Any],
    assets_of: Callable[..., dg.AssetsDefinition],
) -> None:
    assets = assets_of(meeting_pipeline)
    job = dg.define_asset_job("meetings", selection=[assets])
    schedule = build_burst_schedule(pipeline=meeting_pipeline, assets=assets, job=job, cron_schedule="0 * * * *")
    resources = {"checkpoint_coordinator": coordinator()}
    defs = dg.Definitions(assets=[assets], jobs=[job], schedules=[schedule], resources=resources)

    def tick() -> Any:
        with dg.build_schedule_context(
            instance=instance, repository_def=defs.get_repository_def(), resources=resources
        ) as context:
            return defs.resolve_schedule_def("meeting_bursts").evaluate_tick(context)

    (request,) = tick().run_requests
    assert request.run_config == {"ops": {assets.node_def.name: {"config": {"until": "caught_up"}}}}
    assert dg.validate_run_config(defs.resolve_job_def("meetings"), request.run_config)
    owner(meeting_pipeline)
    assert tick().skip_message == "Run run-1 runs the pipeline."


class Mine(dg.Config):
    colour: str = "red"


def test_a_burst_schedule_refuses_assets_that_cannot_be_run_in_bursts(meeting_pipeline: Pipeline) -> None:
    @pipeline_assets(pipeline=meeting_pipeline)
    def mine(context, config: Mine): ...

    job = dg.define_asset_job("meetings", selection=[mine])
    with pytest.raises(NotAPipelineAssetError, match="the configuration of 'mine' has the setting 'until'"):
        build_burst_schedule(pipeline=meeting_pipeline, assets=mine, job=job, cron_schedule="0 * * * *")


def created(
    instance: dg.DagsterInstance,
    run_id: str,
    status: dg.DagsterRunStatus,
    job: str = "meetings",
    location: str = "the location",
    tags: Mapping[str, str] | None = None,
) -> None:
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), "__repository__")
    origin = RemoteJobOrigin(repository, job)  # Dagster asks for it in a queued run
    instance.add_run(dg.DagsterRun(job_name=job, run_id=run_id, status=status, remote_job_origin=origin, tags=dict(tags or {})))


def test_a_run_is_started_where_none_is_alive(
    instance: dg.DagsterInstance, run_tick: Callable[..., Any], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    assert len(run_tick(instance).run_requests) == 1, "the pipeline was never run"
    owner(meeting_pipeline)  # its run is not known to this instance
    assert run_tick(instance).skip_message == "Run run-1 runs the pipeline."
    created(instance, "run-1", dg.DagsterRunStatus.FAILURE, job="another")
    assert len(run_tick(instance).run_requests) == 1, "its process was killed: the lease is still there"


def test_a_lease_of_a_run_that_dagster_does_not_know_counts_until_it_ends(
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    run_tick: Callable[..., Any],
    owner: Callable[..., Any],
    meeting_pipeline: Pipeline,
) -> None:
    """The run was killed, and deleted in Dagster: its lease stays in storage."""
    owner(meeting_pipeline, lease_seconds=60.0)
    assert run_tick(instance).skip_message == "Run run-1 runs the pipeline."
    after = datetime.now(UTC) + timedelta(seconds=61)
    monkeypatch.setattr(run_schedule, "datetime", SimpleNamespace(now=lambda zone: after.astimezone(zone)))
    assert len(run_tick(instance).run_requests) == 1


def test_the_run_of_a_recovery_that_waits_is_alive_and_that_of_another_code_location_is_not(
    instance: dg.DagsterInstance, run_tick: Callable[..., Any], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    owner(meeting_pipeline, origin=Origin(code_location="the location")).end("FAILED")
    created(instance, "elsewhere", dg.DagsterRunStatus.STARTED, location="staging", tags={PIPELINE: "meeting"})
    assert len(run_tick(instance).run_requests) == 1
    created(instance, "recovery", dg.DagsterRunStatus.QUEUED, "meeting_recovery_job", tags={PIPELINE: "meeting"})
    assert run_tick(instance).skip_message == "Run recovery of meeting_recovery_job is QUEUED."


@pytest.mark.parametrize(
    ("status", "alive"), [(status, status.value not in ("SUCCESS", "FAILURE", "CANCELED")) for status in dg.DagsterRunStatus]
)
def test_a_run_of_the_job_that_waits_or_ends_is_alive(
    instance: dg.DagsterInstance, run_tick: Callable[..., Any], status: dg.DagsterRunStatus, alive: bool
) -> None:
    created(instance, "a-run", status)
    result = run_tick(instance)
    assert (result.skip_message == f"Run a-run of meetings is {status.value}.") is alive
    assert len(result.run_requests or ()) == (0 if alive else 1)
