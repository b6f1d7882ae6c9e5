"""The check of a pipeline's health, and the sensor that evaluates it: red by itself, and green again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    HealthThresholds,
    Pipeline,
    build_health_sensor,
    build_pipeline_defs,
    health_check,
)
from dagster_checkpoints.control.status import CompletedCheckpointStatus
from dagster_checkpoints.plugin.sensors.health import REPEAT_SECONDS
from dagster_checkpoints.plugin.stage_assets import checkpoints_key

Tick = Callable[..., Any]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def checkpoint(seconds_ago: float) -> CompletedCheckpointStatus:
    at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    return CompletedCheckpointStatus(checkpoint_id=7, location="c", completed_at=at)


def test_the_asset_turns_red_and_green_again(
    instance: dg.DagsterInstance, tick: Tick, owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    sensor = build_health_sensor(pipeline=meeting_pipeline)
    assert tick(sensor, instance).skip_message == "The pipeline has never been run."
    running = owner(meeting_pipeline)
    results, cursor = [], None
    for age in (10, 10, 400, 400, 10):
        running.report(checkpoint_interval=60.0, last_checkpoint=checkpoint(age))
        results.append(tick(sensor, instance, cursor))
        cursor = results[-1].cursor
    reported = [list(result.asset_events) for result in results]
    assert [len(events) for events in reported] == [1, 0, 1, 0, 1], "what has not changed is not recorded again"
    green, red, again = (events[0] for events in reported if events)
    assert (green.asset_key, green.check_name, green.passed) == (checkpoints_key("meeting"), "healthy", True)
    assert (red.passed, red.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "completed 400 s ago; expected one every 60 s" in red.description
    assert [record.data["rule"] for record in red.metadata["problems"].records] == ["checkpoint_intervals"]
    assert again.passed and again.description == "The pipeline runs, and is healthy."
    running.end("FAILED")
    failed = tick(sensor, instance, cursor)
    assert not failed.asset_events[0].passed and "FAILED" in failed.asset_events[0].description


def evaluated_by_hand(
    check: dg.AssetChecksDefinition, coordinator: CheckpointCoordinatorResource, instance: dg.DagsterInstance
) -> dg.AssetCheckEvaluation:
    job = dg.Definitions(
        assets=[dg.AssetSpec(checkpoints_key("meeting"))],
        asset_checks=[check],
        jobs=[dg.define_asset_job("look", selection=dg.AssetSelection.checks(check))],
        resources={"checkpoint_coordinator": coordinator},
    ).resolve_job_def("look")
    (evaluated,) = job.execute_in_process(instance=instance).get_asset_check_evaluations()
    return evaluated


def test_the_asset_turns_red_if_the_state_is_lost(
    instance: dg.DagsterInstance,
    tick: Tick,
    owner: Callable[..., Any],
    meeting_pipeline: Pipeline,
    coordinator: Callable[..., CheckpointCoordinatorResource],
) -> None:
    """It was green: by hand as a pipeline that has never been run, by the sensor as it had been before."""
    sensor = build_health_sensor(pipeline=meeting_pipeline)
    running = owner(meeting_pipeline)
    running.report()
    running.take_savepoint(3, "kept")
    running.end("FINISHED", ended_by="suspend")
    before = tick(sensor, instance)
    assert before.asset_events[0].passed
    running.storage.store.delete([running.storage.layout.state])
    lost = tick(sensor, instance, before.cursor)
    (event,) = lost.asset_events
    assert not event.passed and event.severity == dg.AssetCheckSeverity.ERROR
    assert "state.json" in event.description and "-kept-" in event.description
    assert not tick(sensor, instance, lost.cursor).asset_events
    by_hand = evaluated_by_hand(health_check(pipeline=meeting_pipeline), coordinator(), instance)
    assert (by_hand.passed, by_hand.description) == (False, event.description)


def test_an_evaluation_is_repeated_once_an_hour(
    instance: dg.DagsterInstance, tick: Tick, owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    sensor = build_health_sensor(pipeline=meeting_pipeline)
    owner(meeting_pipeline).report()
    first = tick(sensor, instance)
    long_ago = datetime.now(UTC).timestamp() - REPEAT_SECONDS - 1
    earlier = json.dumps({**json.loads(first.cursor), "reported_at": long_ago})
    assert not tick(sensor, instance, first.cursor).asset_events
    assert len(tick(sensor, instance, earlier).asset_events) == 1


def test_the_sensors_evaluation_is_that_of_the_defined_check(
    instance: dg.DagsterInstance,
    tick: Tick,
    owner: Callable[..., Any],
    meeting_pipeline: Pipeline,
    coordinator: Callable[..., CheckpointCoordinatorResource],
) -> None:
    """The check by hand looks once, at the same asset and under the same name."""
    owner(meeting_pipeline).report(checkpoint_interval=60.0, last_checkpoint=checkpoint(20))
    strict = HealthThresholds(checkpoint_intervals=0.1)
    defs = build_pipeline_defs(meeting_pipeline, coordinator=coordinator(), health=strict)
    dg.Definitions.validate_loadable(defs)
    (event,) = tick(defs.get_repository_def().get_sensor_def("meeting_health"), instance).asset_events
    assert event.asset_check_key in defs.resolve_asset_graph().asset_check_keys
    evaluated = evaluated_by_hand(health_check(pipeline=meeting_pipeline, thresholds=strict), coordinator(), instance)
    assert (
        (evaluated.asset_check_key, evaluated.passed) == (event.asset_check_key, event.passed) == (event.asset_check_key, False)
    )


def test_without_health(meeting_pipeline: Pipeline, coordinator: Callable[..., CheckpointCoordinatorResource]) -> None:
    defs = build_pipeline_defs(meeting_pipeline, coordinator=coordinator(), health=False)
    assert all(key.name != "healthy" for key in defs.resolve_asset_graph().asset_check_keys)
