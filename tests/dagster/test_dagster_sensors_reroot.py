"""The re-root sensor: it reads the end of every stage, also of several between two ticks, and sends one request for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import Pipeline
from dagster_checkpoints.plugin.stage_assets import FINISHED_BEFORE, LIVE, NotAPipelineAssetError
from dagster_checkpoints.sensors import build_reroot_sensor

Tick = Callable[..., Any]
RUN = "3f0e7c1a-0000-4000-8000-000000000001"


@pytest.fixture
def sensor(meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> dg.SensorDefinition:
    return build_reroot_sensor(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline))


def finish(instance: dg.DagsterInstance, stage: str, run_id: str = RUN, **metadata: Any) -> None:
    """Write the materialization of a stage by a run into Dagster's event log."""
    report(instance, dg.AssetMaterialization(stage, metadata=metadata), run_id)


def report(instance: dg.DagsterInstance, materialization: dg.AssetMaterialization, run_id: str = RUN) -> None:
    event = dg.DagsterEvent(
        event_type_value="ASSET_MATERIALIZATION", job_name="job", event_specific_data=_materialized(materialization)
    )
    instance.report_dagster_event(event, run_id=run_id)


def _materialized(materialization: dg.AssetMaterialization) -> Any:
    from dagster._core.events import StepMaterializationData

    return StepMaterializationData(materialization=materialization)


def test_two_stages_finish_between_ticks(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    running.answers["checkpoint"] = lambda request: running.done(
        request, checkpoint_id=7, location="checkpoints/chk-7-1", details={"roots": ["live"]}
    )
    with dg.DagsterInstance.ephemeral() as instance:
        first = tick(sensor, instance)
        assert "No stage" in first.skip_message

        finish(instance, "history")
        finish(instance, "copied")
        second = tick(sensor, instance, first.cursor)
        assert "history" in second.skip_message and "copied" in second.skip_message
        (request,) = running.serve()
        assert request.kind == "checkpoint" and request.asked_by == "sensor meeting_reroot"
        assert not second.asset_events

        third = tick(sensor, instance, second.cursor)
        (observation,) = third.asset_events
        assert observation.asset_key == dg.AssetKey("live")
        assert observation.metadata["roots"].value == "live"
        assert observation.metadata["checkpoint"].value == 7
        assert set(observation.metadata["finished"].value.split(", ")) == {"history", "copied"}
        assert "began at live" in third.skip_message

        fourth = tick(sensor, instance, third.cursor)
        assert not fourth.asset_events and not running.serve()


def test_a_tick_that_is_repeated_asks_for_the_same_checkpoint(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    with dg.DagsterInstance.ephemeral() as instance:
        before = tick(sensor, instance).cursor
        finish(instance, "history")
        tick(sensor, instance, before)
        tick(sensor, instance, before)  # its cursor was not saved
        assert len(running.serve()) == 1
        tick(sensor, instance, before)  # nor this time, and the request is answered already
        assert running.serve() == []


@pytest.mark.parametrize("cursor", [None, "garbage", '{"version": 99}', '{"version": 1, "seen": [3]}'])
def test_a_lost_cursor_costs_at_most_one_checkpoint(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline, cursor: str | None
) -> None:
    running = owner(meeting_pipeline, RUN)
    with dg.DagsterInstance.ephemeral() as instance:
        finish(instance, "history")
        result = tick(sensor, instance, cursor)
        assert "Asked" in result.skip_message
        assert len(running.serve()) == 1
        again = tick(sensor, instance, cursor)
        assert again.cursor == result.cursor
        assert running.serve() == []


def test_stages_that_finished_in_other_runs_change_no_root(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    with dg.DagsterInstance.ephemeral() as instance:
        finish(instance, "history", run_id="another-run")
        finish(instance, "copied", **{FINISHED_BEFORE: True})
        result = tick(sensor, instance)
        assert "No stage" in result.skip_message
        assert running.serve() == []
        # A user reports a materialization by hand, later: it does not hide the run's own.
        finish(instance, "history")
        instance.report_runless_asset_event(dg.AssetMaterialization("history"))
        tick(sensor, instance, result.cursor)
        assert len(running.serve()) == 1


def test_the_commits_of_a_running_stage_change_no_root_and_do_not_hide_its_end(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(60):  # more than a tick reads
            report(instance, dg.AssetMaterialization("joined", tags={LIVE: "true"}))
        first = tick(sensor, instance)
        assert "No stage" in first.skip_message
        assert running.serve() == []
        report(instance, dg.AssetMaterialization("joined", tags={LIVE: "true"}))
        finish(instance, "joined")
        assert "since joined finished" in tick(sensor, instance, first.cursor).skip_message
        assert len(running.serve()) == 1


def test_a_checkpoint_that_fails_is_requested_again_a_limited_number_of_times(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    running.answers["checkpoint"] = lambda request: running.failed(request, "CHECKPOINT_DECLINED_TASK_CLOSING", "just ended")
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = tick(sensor, instance).cursor
        finish(instance, "history")
        asked = []
        for _ in range(8):
            result = tick(sensor, instance, cursor)
            cursor = result.cursor
            asked += running.serve()
        assert len(asked) == len({request.request_id for request in asked}) == 5
        assert "No stage" in result.skip_message

        finish(instance, "copied")  # the end of another stage leads to a new request
        running.answers.clear()
        cursor = tick(sensor, instance, cursor).cursor
        assert len(running.serve()) == 1
        assert "Checkpoint" in tick(sensor, instance, cursor).skip_message


def test_an_event_during_the_wait_for_an_answer_is_not_lost(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    running.report(roots=("live", "joined"))
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = tick(sensor, instance).cursor
        finish(instance, "history")
        cursor = tick(sensor, instance, cursor).cursor
        finish(instance, "copied")  # the pipeline has not read its requests yet
        result = tick(sensor, instance, cursor)
        assert "Waiting" in result.skip_message and "Asked" in result.skip_message
        assert len(running.serve()) == 2
        result = tick(sensor, instance, result.cursor)
        # Without roots in the answer, the roots of the pipeline's status.
        assert sorted(event.asset_key.path[-1] for event in result.asset_events) == ["joined", "joined", "live", "live"]


def test_the_end_of_the_run_ends_the_waiting(
    owner: Callable[..., Any], tick: Tick, sensor: dg.SensorDefinition, meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline, RUN)
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = tick(sensor, instance).cursor
        finish(instance, "history")
        cursor = tick(sensor, instance, cursor).cursor
        running.end("FINISHED", ended_by="end_of_data")
        result = tick(sensor, instance, cursor)
        assert "not running" in result.skip_message and "FINISHED by end of data" in result.skip_message
        assert "without the requested checkpoint" in result.skip_message
        assert "without the checkpoint" not in tick(sensor, instance, result.cursor).skip_message


def test_a_pipeline_that_never_ran_is_reported(tick: Tick, sensor: dg.SensorDefinition) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert "never run" in tick(sensor, instance).skip_message


def test_the_assets_must_be_the_pipelines(
    meeting_pipeline: Pipeline, numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    with pytest.raises(NotAPipelineAssetError, match="'meeting'"):
        build_reroot_sensor(pipeline=meeting_pipeline, assets=assets_of(numbers_pipeline))
