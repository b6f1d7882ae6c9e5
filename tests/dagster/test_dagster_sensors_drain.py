"""The drain sensor and its conditions: what must hold, for how long, and only for the current job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import Pipeline
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.errors import InvalidRequest
from dagster_checkpoints.execution.job_requests import BoundedSources
from dagster_checkpoints.plugin.sensors import conditions
from dagster_checkpoints.plugin.stage_assets import LIVE
from dagster_checkpoints.sensors import (
    DrainCondition,
    NotASourceError,
    all_of,
    any_of,
    assets_materialized,
    at_time,
    bounded_stages_finished,
    build_drain_sensor,
    build_end_of_input_sensor,
    build_suspend_sensor,
    live_lag_zero,
    marker_object,
    when,
)

Tick = Callable[..., Any]
Owner = Callable[..., Any]
BOUNDED = ("history", "copied")


class Ticking:
    """A sensor with several ticks: each tick has the cursor of the previous one."""

    def __init__(self, tick: Tick, sensor: dg.SensorDefinition, instance: dg.DagsterInstance) -> None:
        self._tick, self._sensor, self._instance = tick, sensor, instance
        self.cursor: str | None = None

    def __call__(self) -> str:
        """One tick. Returns its skip reason."""
        result = self._tick(self._sensor, self._instance, self.cursor)
        self.cursor = result.cursor
        return str(result.skip_message)


@pytest.fixture
def ticking(tick: Tick, meeting_pipeline: Pipeline) -> Any:
    """Creates a drain sensor with a condition, and lets it tick."""
    with dg.DagsterInstance.ephemeral() as instance:

        def make(condition: DrainCondition, bounded: BoundedSources = "cut") -> Ticking:
            sensor = build_drain_sensor(pipeline=meeting_pipeline, when=condition, bounded=bounded)
            made = Ticking(tick, sensor, instance)
            made.instance = instance  # type: ignore[attr-defined]
            return made

        yield make


def test_a_drain_after_the_backfill_has_finished_and_the_live_source_was_caught_up_twice(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    ticks = ticking(bounded_stages_finished() & live_lag_zero())
    assert "never run" in ticks()
    running = owner(meeting_pipeline)
    assert "has not yet reported" in ticks()

    running.report(finished=("history",))
    assert "1 of 2 bounded stages finished, not: copied" in ticks()
    running.report(finished=BOUNDED, behind=("live[right]",))
    assert "not caught up: live[right]" in ticks()

    running.report(finished=BOUNDED)
    assert "Condition met; confirming at the next tick" in ticks()
    assert "Condition met; confirming at the next tick" in ticks()  # the same report again is not a confirmation
    running.report(finished=BOUNDED, after=1)  # nor is one that may have been written at the same time
    assert "Condition met; confirming at the next tick" in ticks()
    running.report(finished=BOUNDED, behind=("live",))
    assert "not caught up: live[left], live[right]" in ticks()
    running.report(finished=BOUNDED)
    assert "Condition met; confirming at the next tick" in ticks()
    running.report(finished=BOUNDED)
    assert "Asked run run-1 to drain" in ticks()
    (request,) = running.serve()
    assert request.kind == "stop" and request.drain
    assert request.name == "meeting_drain"  # of the savepoint


@pytest.mark.parametrize("condition", [bounded_stages_finished() & live_lag_zero(), live_lag_zero()], ids=["both", "live alone"])
def test_without_periodic_checkpoints_a_drain_does_not_wait_for_stages_that_finish_with_the_job(
    condition: DrainCondition, tick: Tick, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """With `interval=None` no stage finishes before the drain: the sensor waited for it for ever."""
    with dg.DagsterInstance.ephemeral() as instance:
        ticks = Ticking(tick, build_drain_sensor(pipeline=meeting_pipeline, when=condition), instance)
        running = owner(meeting_pipeline)
        for _ in range(3):
            running.report(checkpoint_interval=None)
            assert "0 of 1 bounded sources read to their end" in ticks()
        running.report(ended=("history",))
        assert "0 of 2 bounded stages finished, not: history, copied" in ticks(), "their rows are committed first"
        for _ in range(2):
            running.report(ended=("history",), checkpoint_interval=None)
            text = ticks()
        assert "Asked run run-1 to drain" in text
        (request,) = running.serve()
        assert request.drain and request.bounded == "finish"


def test_by_default_nothing_is_drained_before_bounded_stages_have_finished(
    tick: Tick, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = build_drain_sensor(pipeline=meeting_pipeline, when=when(lambda at: True, says="hand"))
        ticks = Ticking(tick, sensor, instance)
        running = owner(meeting_pipeline)
        running.report(finished=("history",))
        assert ticks().endswith(", but bounded stages go on: 1 of 2 bounded stages finished, not: copied.")
        assert not running.serve()
        running.report(finished=BOUNDED)
        assert "Asked run run-1 to drain" in ticks()
        (request,) = running.serve()
        assert request.drain and request.bounded == "finish"


def test_a_suspend_when_the_feed_is_read(tick: Tick, owner: Owner, meeting_pipeline: Pipeline) -> None:
    sensor = build_suspend_sensor(pipeline=meeting_pipeline, when=bounded_stages_finished() & live_lag_zero())
    assert str(sensor.description).startswith("Suspends pipeline 'meeting' when all bounded stages have finished")
    running = owner(meeting_pipeline)
    with dg.DagsterInstance.ephemeral() as instance:
        ticks = Ticking(tick, sensor, instance)
        running.report(finished=BOUNDED, behind=("live",))
        assert "Not suspended: " in ticks()
        for expected in ("confirming at the next tick", "Asked run run-1 to suspend"):
            running.report(finished=BOUNDED)
            assert expected in ticks()
        assert "has not yet seen the request to suspend" in ticks()
        (request,) = running.serve()
        assert (request.kind, request.drain, request.name) == ("stop", False, "meeting_suspend")
        assert "Suspended with savepoint" in ticks()


def test_the_sensors_page_names_the_condition_and_the_ticks_log_the_result(
    coordinator: Callable[..., Any], owner: Owner, meeting_pipeline: Pipeline
) -> None:
    condition = bounded_stages_finished() & (live_lag_zero() | marker_object("drain-now") | when(lambda at: False, says="hand"))
    sensor = build_drain_sensor(pipeline=meeting_pipeline, when=condition)
    assert sensor.description == (
        "Drains pipeline 'meeting' when all bounded stages have finished and (all live sources have read all their input, in two "
        "consecutive ticks or the marker drain-now exists, written since its job began or hand holds)."
    )
    described = all_of(assets_materialized("a", ["b", "c"]), at_time(datetime(2026, 1, 1, tzinfo=UTC))).describe()
    assert described.startswith("a, b/c materialized since its job began and ") and "2026" in described

    running = owner(meeting_pipeline)
    running.report(finished=("history",), behind=("live[right]",))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(instance=instance, resources={"checkpoint_coordinator": coordinator()}) as context,
    ):
        context.log.addHandler(handler)
        reason = sensor.evaluate_tick(context).skip_message
    assert lines[0].startswith("Run run-1, job 1. Condition: all bounded stages have finished and (")
    for found in (
        "not met",
        "1 of 2 bounded stages finished, not: copied",
        "not caught up: live[right]",
        "no marker",
        "hand: no",
    ):
        assert found in lines[0]
    assert lines[1] == reason


def test_the_drain_is_requested_once_and_its_progress_is_reported(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(when(lambda at: True, says="always"))
    running = owner(meeting_pipeline)
    running.answers["stop"] = lambda request: None
    assert "Asked" in ticks() and len(running.serve()) == 1
    assert "has not yet seen" in ticks()
    running.report(stop={"request_id": "x", "drain": True, "state": "WAITING_FOR_SAVEPOINT"})
    assert ticks()
    running.answers["stop"] = lambda request: running.done(request, checkpoint_id=9, url="s3://there")
    running.serve()
    assert "Drained with savepoint 9" in ticks()
    running.end("FINISHED", ended_by="drain")
    assert "Drained with savepoint 9 (s3://there)" in ticks()
    assert "FINISHED by drain" in ticks()
    assert len(running.requests) == 1


def test_a_drain_that_fails_is_requested_three_times(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(when(lambda at: True))
    running = owner(meeting_pipeline)
    running.answers["stop"] = lambda request: running.failed(request, "IO_EXCEPTION", "disk full")
    reasons = ""
    for _ in range(8):
        reasons += ticks()
        running.serve()
    assert len({request.request_id for request in running.requests}) == 3
    assert "disk full" in reasons and "Given up after 3 attempts" in reasons

    running.end("FAILED")
    again = owner(meeting_pipeline, "run-2", resume=True)  # another run gets new attempts
    assert "Asked run run-2" in ticks()
    assert len(again.serve()) == 1


def test_a_drain_that_failed_while_the_daemon_was_down_is_requested_again(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """The owner deletes old requests and their answers; the sensor must not wait for the answer for ever."""
    ticks = ticking(when(lambda at: True))
    running = owner(meeting_pipeline)
    running.answers["stop"] = lambda request: running.failed(request, "IO_EXCEPTION", "disk full")
    assert "Asked" in ticks()
    running.serve()
    assert PipelineControl(running.storage, asked_by="test").box.sweep(0) == 1
    assert "its files have been deleted" in (reason := ticks()) and "Asked run run-1 to drain" in reason
    running.answers["stop"] = lambda request: running.done(request, checkpoint_id=9, url="s3://there")
    running.serve()
    assert "Drained with savepoint 9" in ticks()


def test_after_a_lost_cursor_the_same_request_is_sent(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(when(lambda at: True))
    running = owner(meeting_pipeline)
    running.answers["stop"] = lambda request: None
    for cursor in (None, "garbage", '{"version": 7}', "[]"):
        ticks.cursor = cursor
        assert "Asked" in ticks()
    running.serve()
    assert len(running.requests) == 1


def test_a_stop_of_another_requester_is_not_disturbed(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(when(lambda at: True))
    running = owner(meeting_pipeline)
    running.report(stop={"request_id": "by-hand", "drain": False, "state": "WAITING_FOR_SAVEPOINT"})
    assert "by-hand" in ticks()
    assert running.serve() == []


def test_materialized_assets_count_since_the_job_began(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(assets_materialized("a", ["b", "c"], "b/c"))
    instance = ticks.instance
    instance.report_runless_asset_event(dg.AssetMaterialization("a"))
    first = owner(meeting_pipeline)
    instance.report_runless_asset_event(dg.AssetMaterialization(["b", "c"]))
    instance.report_runless_asset_event(dg.AssetMaterialization("a", tags={LIVE: "true"}))  # a commit of a running stage
    text = ticks()
    assert "not materialized since" in text and text.endswith("began: a.")
    instance.report_runless_asset_event(dg.AssetMaterialization("a"))

    first.end("FAILED")  # before the tick
    resumed = owner(meeting_pipeline, "run-2", resume=True)
    assert "Asked run run-2" in ticks()  # it continues the job during which they were materialized
    resumed.serve()
    resumed.end("FINISHED", ended_by="drain")
    assert "Drained" in ticks()

    later = owner(meeting_pipeline, "run-3")
    assert "not materialized since" in ticks()  # an event that ended one job does not end the next
    assert later.serve() == []


def test_the_commits_of_a_stage_that_runs_for_months_are_read_by_one_tick_each(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick that reads all of them takes longer each day, until Dagster ends it."""
    ticks = ticking(assets_materialized("a"))
    owner(meeting_pipeline)
    fetch, read = ticks.instance.fetch_materializations, []

    def counted(*args: Any, **options: Any) -> Any:
        page = fetch(*args, **options)
        read.append(len(page.records))
        return page

    def read_in_a_tick(*, holds: bool = False) -> int:
        read.clear()
        assert ("Asked" in ticks()) is holds
        return sum(read)

    def commit(number: int) -> None:
        for _ in range(number):
            ticks.instance.report_runless_asset_event(dg.AssetMaterialization("a", tags={LIVE: "true"}))

    monkeypatch.setattr(ticks.instance, "fetch_materializations", counted)
    monkeypatch.setattr(conditions, "_AT_ONCE", 2)
    commit(5)
    assert [read_in_a_tick(), read_in_a_tick()] == [5, 5]  # so new that an older one may not be visible yet
    monkeypatch.setattr(conditions, "_VISIBLE_SECONDS", -60.0)
    assert [read_in_a_tick(), read_in_a_tick()] == [5, 0]
    commit(3)
    assert [read_in_a_tick(), read_in_a_tick()] == [3, 0]
    commit(1)
    ticks.instance.report_runless_asset_event(dg.AssetMaterialization("a"))
    commit(1)
    read_in_a_tick(holds=True)


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "its run died before"])
def test_a_stage_that_had_finished_before_counts_only_at_its_first_report(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline, reported: bool
) -> None:
    """A run that continues the other pipeline's job materializes its finished stages again, whenever that is."""
    ticks = ticking(assets_materialized("a"))

    def report(job: int, **metadata: Any) -> None:
        live = {LIVE: "true"} if metadata.pop("live", False) else None
        ticks.instance.report_runless_asset_event(dg.AssetMaterialization("a", metadata={"job": job, **metadata}, tags=live))

    report(1)
    report(2, live=True)
    if reported:
        report(2)
    owner(meeting_pipeline)
    report(2, finished_before_this_run=True)
    report(2, finished_before_this_run=True)
    assert ("not materialized since" in ticks()) is reported
    if reported:
        report(3, finished_before_this_run=True)
        assert "Asked" in ticks()


def test_a_marker_counts_if_it_is_newer_than_the_job(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline, tmp_path: Path
) -> None:
    marker = tmp_path / "storage" / "meeting" / "drain-now"
    ticks = ticking(marker_object("drain-now"))
    first = owner(meeting_pipeline)
    assert "no marker drain-now" in ticks()
    marker.touch()
    assert "Asked" in ticks()
    first.serve()
    first.end("FINISHED", ended_by="drain")
    later = owner(meeting_pipeline, "run-2")
    assert "older than job 2" in ticks()
    assert later.serve() == []
    marker.write_text("again")
    assert "Asked" in ticks()


def test_a_marker_may_be_stored_anywhere_and_be_of_any_age(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "feed" / "_COMPLETE"
    elsewhere.parent.mkdir()
    elsewhere.touch()
    owner(meeting_pipeline)
    assert "older than job" in ticking(marker_object(str(elsewhere)))()
    assert "older than job" in ticking(marker_object(elsewhere.as_uri()))()
    assert "Asked" in ticking(marker_object(str(elsewhere), of_any_age=True))()


def test_a_marker_counts_without_waiting_for_the_confirmation_of_other_conditions(
    ticking: Any, owner: Owner, meeting_pipeline: Pipeline, tmp_path: Path
) -> None:
    """The feed is complete: only later reports of the sources count."""
    marker = tmp_path / "complete"
    ticks = ticking(all_of(marker_object(str(marker)), live_lag_zero()))
    running = owner(meeting_pipeline)
    running.report()
    assert "no marker" in ticks()
    running.report()  # caught up twice, but the marker did not exist
    marker.touch()
    assert "Condition met; confirming at the next tick" in ticks()
    running.report()
    assert "Asked" in ticks()


def test_a_time_counts_if_the_job_began_before_it(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    past, future = datetime.now(UTC), datetime.now(UTC) + timedelta(days=1)
    running = owner(meeting_pipeline)
    assert "had passed when job 1 began" in ticking(at_time(past))()
    assert "not yet" in ticking(at_time(future))()
    assert running.serve() == []
    assert "has come" in ticking(at_time(datetime.now(UTC)))()
    with pytest.raises(ValueError, match="time zone"):
        at_time(datetime(2026, 1, 1))


def test_any_of_several_conditions(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    hand = {"up": False}
    ticks = ticking(live_lag_zero() | when(lambda at: (hand["up"], "up" if hand["up"] else "down"), says="hand"))
    running = owner(meeting_pipeline)
    running.report(behind=("live",))
    text = ticks()
    assert "not caught up" in text and "hand: down" in text
    hand["up"] = True
    running.report()
    assert "Asked" in ticks()  # a condition that lasts needs no confirmation
    assert len(running.serve()) == 1


def test_another_alternative_that_holds_is_not_a_confirmation(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    hand = {"up": "left"}
    sides = [when(lambda at, side=side: hand["up"] == side, says=side, needs_confirmation=True) for side in ("left", "right")]
    ticks = ticking(any_of(*sides))
    running = owner(meeting_pipeline)
    for side in ("left", "right", "left"):
        hand["up"] = side
        running.report()
        assert "Condition met; confirming at the next tick" in ticks()
    running.report()
    assert "Asked" in ticks()


def test_reports_of_an_earlier_run_do_not_count(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(bounded_stages_finished())
    dead = owner(meeting_pipeline)
    dead.report(finished=BOUNDED)
    dead.release("FAILED")
    running = owner(meeting_pipeline, "run-2", resume=True)
    assert "has not yet reported" in ticks()
    running.report(finished=BOUNDED, phase="restarting")
    assert "Asked run run-2" in ticks()


def test_a_restarting_pipeline_has_not_caught_up(ticking: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ticking(live_lag_zero())
    running = owner(meeting_pipeline)
    running.report(phase="restarting")
    assert "the pipeline is restarting" in ticks()
    running.report(finished=("live",), behind=("live",))
    assert "Condition met; confirming at the next tick" in ticks()  # a source that has ended is not behind


@pytest.mark.parametrize("build", [build_drain_sensor, build_suspend_sensor])
def test_a_sensor_whose_name_cannot_be_that_of_its_savepoint_is_refused(
    build: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    """Dagster takes the name; the first request would have been refused."""
    with pytest.raises(InvalidRequest, match="beginning with a letter or digit, found '_night'"):
        build(pipeline=meeting_pipeline, when=live_lag_zero(), name="_night")


def test_conditions_that_would_hold_at_once_are_refused() -> None:
    for make in (all_of, any_of, assets_materialized):
        with pytest.raises(ValueError, match="at least one"):
            make()


# The end of one input


@pytest.fixture
def ending(tick: Tick, meeting_pipeline: Pipeline) -> Any:
    with dg.DagsterInstance.ephemeral() as instance:

        def make(**options: Any) -> Ticking:
            sensor = build_end_of_input_sensor(pipeline=meeting_pipeline, source="live", after="december", **options)
            made = Ticking(tick, sensor, instance)
            made.instance = instance  # type: ignore[attr-defined]
            return made

        yield make


def test_a_source_ends_when_its_asset_was_materialized(ending: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ending()
    running = owner(meeting_pipeline)
    assert "live continues" in ticks()
    ticks.instance.report_runless_asset_event(dg.AssetMaterialization("december"))
    assert "Asked run run-1 to end live" in ticks()
    assert "has not answered yet" in ticks()
    (request,) = running.serve()
    assert (request.kind, request.stage, request.instance) == ("end_source", "live", None)
    assert "was ended" in ticks()
    assert "has ended" in ticks()
    ticks.instance.report_runless_asset_event(dg.AssetMaterialization("december"))
    ticks()
    assert running.serve() == []


def test_only_the_named_instance_of_a_source_ends(ending: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ending(instance="left")
    running = owner(meeting_pipeline)
    ticks.instance.report_runless_asset_event(dg.AssetMaterialization("december"))
    assert "live[left]" in ticks()
    (request,) = running.serve()
    assert (request.stage, request.instance) == ("live", "left")


def ended_before_a_failure(ending: Any, owner: Owner, pipeline: Pipeline) -> Any:
    """The ticks of a sensor that has ended a source, whose run has failed before a checkpoint: the source is read on."""
    ticks = ending()
    first = owner(pipeline)
    ticks.instance.report_runless_asset_event(dg.AssetMaterialization("december"))
    assert "Asked" in ticks()
    first.serve()
    assert "was ended" in ticks()
    first.release("FAILED")
    return ticks


def test_a_run_after_a_crash_gets_the_request_again_unless_the_source_had_ended(
    ending: Any, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    ticks = ended_before_a_failure(ending, owner, meeting_pipeline)
    second = owner(meeting_pipeline, "run-2", resume=True)
    assert "Asked run run-2" in ticks()
    second.serve()
    second.release("FAILED")
    third = owner(meeting_pipeline, "run-3", resume=True)
    third.report(finished=("live",))
    assert "has ended" in ticks()
    assert third.serve() == []
    third.end("FINISHED")
    owner(meeting_pipeline, "run-4")
    assert "not materialized since" in ticks()  # a new job needs a new materialization of December


@pytest.mark.parametrize("between", [True, False])
def test_an_op_that_dagster_runs_again_in_the_same_run_gets_the_request_again(
    ending: Any, owner: Owner, meeting_pipeline: Pipeline, between: bool
) -> None:
    ticks = ended_before_a_failure(ending, owner, meeting_pipeline)
    if between:
        ticks()
    second = owner(meeting_pipeline, resume=True)
    assert "Asked run run-1 to end live" in ticks()
    assert [request.kind for request in second.serve()] == ["end_source"]
    assert "was ended" in ticks()


def test_a_failed_request_to_end_a_source_is_repeated(ending: Any, owner: Owner, meeting_pipeline: Pipeline) -> None:
    ticks = ending()
    running = owner(meeting_pipeline)
    running.answers["end_source"] = lambda request: running.failed(request, "CHECKPOINT_COORDINATOR_SUSPEND", "a stop")
    ticks.instance.report_runless_asset_event(dg.AssetMaterialization("december"))
    reasons = ""
    for _ in range(6):
        reasons += ticks()
        running.serve()
    assert len(running.requests) == 3 and "a stop" in reasons and "Given up" in reasons


@pytest.mark.parametrize("options", [{"source": "joined"}, {"source": "live", "instance": "middle"}])
def test_only_sources_can_be_ended(meeting_pipeline: Pipeline, options: dict[str, str]) -> None:
    with pytest.raises(NotASourceError, match=r"live \(left, right\)"):
        build_end_of_input_sensor(pipeline=meeting_pipeline, after="december", **options)
