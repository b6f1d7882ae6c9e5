"""The recovery sensor: the runs that it restarts, their start point, the number of attempts, and the runs that it ignores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.execution.plan.objects import StepFailureData
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.utils import make_new_run_id

from dagster_checkpoints import Pipeline
from dagster_checkpoints.plugin.runs import ATTEMPT, RECOVERS
from dagster_checkpoints.plugin.sensors import pipeline_sensor
from dagster_checkpoints.plugin.sensors.pipeline_runs import OwnerAction, owner_action
from dagster_checkpoints.plugin.stage_assets import PIPELINE, REFUSED, NotAPipelineAssetError
from dagster_checkpoints.sensors import Backoff, build_recovery_sensor

Tick = Callable[..., Any]
Owner = Callable[..., Any]
Make = Callable[..., dg.SensorDefinition]
OP = "pipeline_op"
AT_ONCE = Backoff(first=0.0, longest=0.0)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def assets(meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> dg.AssetsDefinition:
    return assets_of(meeting_pipeline)


@pytest.fixture
def job(assets: dg.AssetsDefinition) -> Any:
    return dg.define_asset_job("nightly", selection=dg.AssetSelection.assets(assets))


@pytest.fixture
def make(meeting_pipeline: Pipeline, assets: dg.AssetsDefinition, job: Any) -> Make:
    def build(**options: Any) -> dg.SensorDefinition:
        settings = {"jobs": [job], "backoff": AT_ONCE, **options}
        return build_recovery_sensor(pipeline=meeting_pipeline, assets=assets, **settings)

    return build


def new_run(
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.FAILURE,
    *,
    job_name: str = "nightly",
    config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    seconds: float = 5.0,
    selection: list[str] | None = None,
    steps: list[str] | None = None,
    parent: str | None = None,
    location: str = "",
) -> str:
    """A run in Dagster's storage that has just ended, after this number of seconds."""
    run = dg.DagsterRun(
        job_name=job_name,
        run_id=make_new_run_id(),
        run_config=dict(config or {}),
        tags=dict(tags or {}),
        status=dg.DagsterRunStatus.NOT_STARTED,
        asset_selection=frozenset(dg.AssetKey(name) for name in selection) if selection else None,
        step_keys_to_execute=steps,
        parent_run_id=parent,
        root_run_id=parent,
        remote_job_origin=job_in(location, job_name) if location else None,
    )
    instance.add_run(run)
    ended = {dg.DagsterRunStatus.FAILURE: DagsterEventType.RUN_FAILURE, dg.DagsterRunStatus.SUCCESS: DagsterEventType.RUN_SUCCESS}
    moments = {DagsterEventType.RUN_START: time.time() - seconds}
    if status in ended:
        moments[ended[status]] = time.time()
    elif status is dg.DagsterRunStatus.CANCELED:
        moments[DagsterEventType.RUN_CANCELED] = time.time()
    for kind, moment in moments.items():
        event = DagsterEvent(event_type_value=kind.value, job_name=job_name)
        instance.report_dagster_event(event, run_id=run.run_id, timestamp=moment)
    found = instance.get_run_by_id(run.run_id)
    assert found is not None and found.status is status
    return run.run_id


def job_in(location: str, job_name: str) -> RemoteJobOrigin:
    return RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), "__repository__"), job_name)


def restore_from(request: dg.RunRequest) -> str | None:
    value = request.run_config.get("ops", {}).get(OP, {}).get("config", {}).get("restore_from")
    return str(value) if value is not None else None


def test_a_failed_run_is_restarted_by_its_job(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    config = {"ops": {OP: {"config": {"restore_from": "latest", "allow_non_restored_state": True}}}}
    failed = new_run(instance, config=config, tags={"team": "flights", "dagster/solid_selection": "x"})
    owner(meeting_pipeline, failed).end("FAILED")
    (request,) = tick(make(), instance).run_requests
    assert request.run_key == failed
    assert request.job_name == "nightly"
    assert request.run_config == config
    assert request.tags["team"] == "flights" and "dagster/solid_selection" not in request.tags
    assert request.tags[RECOVERS] == failed and request.tags[ATTEMPT] == "1"
    # The run key is the same with any cursor, and Dagster launches no second run for it.
    assert tick(make(), instance, "garbage").run_requests[0].run_key == failed


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.STARTED])
def test_only_a_newest_run_that_has_failed_is_restarted(
    make: Make, tick: Tick, instance: dg.DagsterInstance, status: dg.DagsterRunStatus
) -> None:
    assert "never been run" in tick(make(), instance).skip_message
    new_run(instance)
    newest = new_run(instance, status)  # a failure that another run has followed does not count
    result = tick(make(), instance)
    assert not result.run_requests
    assert newest in result.skip_message and status.value in result.skip_message


def test_a_run_of_the_buttons_is_known_by_its_tag(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    new_run(instance, job_name="__ASSET_JOB")  # of another asset
    assert "never been run" in tick(make(), instance).skip_message
    config = {"ops": {OP: {"config": {"restore_from": "none"}}, "another": {"config": {}}}, "execution": {"config": {}}}
    failed = new_run(
        instance, job_name="__ASSET_JOB", tags={PIPELINE: "meeting"}, config=config, selection=["live", "joined", "stranger"]
    )
    sensor = make()
    (request,) = tick(sensor, instance).run_requests
    assert request.job_name == "meeting_recovery_job"
    stages = ["copied", "history", "joined", "live"]  # the code may have got more of them since the run was launched
    assert request.asset_selection == [dg.AssetKey(stage) for stage in stages]
    assert request.run_config == {"ops": {OP: {"config": {"restore_from": "none"}}}}
    assert request.run_key == failed


def test_every_run_of_a_pipeline_gets_the_tag(
    monkeypatch: pytest.MonkeyPatch,
    assets: dg.AssetsDefinition,
    coordinator: Callable[..., Any],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    instance: dg.DagsterInstance,
) -> None:
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    result = materialize(assets, coordinator(storage=None), instance=instance)  # it fails at once
    run = instance.get_run_by_id(result.run_id)
    assert run is not None and not result.success
    assert run.tags[PIPELINE] == "meeting"


def test_back_off_and_limit(make: Make, tick: Tick, instance: dg.DagsterInstance) -> None:
    patient = make(backoff=Backoff(first=3600.0, longest=3600.0))
    new_run(instance)
    result = tick(patient, instance)
    assert not result.run_requests and "Attempt 1 of 3 is due at" in result.skip_message

    sensor = make(limit=2)
    for attempt in (1, 2):
        (request,) = tick(sensor, instance).run_requests
        assert request.tags[ATTEMPT] == str(attempt)
        new_run(instance, tags=request.tags)
    result = tick(sensor, instance)
    assert not result.run_requests and "Given up after 2 attempts" in result.skip_message


def test_a_long_run_resets_the_number_of_attempts(make: Make, tick: Tick, instance: dg.DagsterInstance) -> None:
    new_run(instance, tags={ATTEMPT: "2"}, seconds=120.0)
    assert "Given up" in tick(make(limit=2), instance).skip_message
    (request,) = tick(make(limit=2, reset_after=60.0), instance).run_requests
    assert request.tags[ATTEMPT] == "1"


def test_a_person_who_launches_the_last_attempt_again_gets_all_attempts(
    make: Make, tick: Tick, instance: dg.DagsterInstance
) -> None:
    """Dagster copies the tags of a run to its re-executions and to its own retries; only the latter have a number."""
    last = new_run(instance, tags={ATTEMPT: "2", RECOVERS: "the first"})
    sensor = make(limit=2)
    assert "Given up" in tick(sensor, instance).skip_message
    new_run(instance, tags={ATTEMPT: "2", RECOVERS: "the first", "dagster/retry_number": "1"}, parent=last)
    assert "Given up" in tick(sensor, instance).skip_message
    new_run(instance, tags={ATTEMPT: "2", RECOVERS: "the first"}, parent=last)
    (request,) = tick(sensor, instance).run_requests
    assert request.tags[ATTEMPT] == "1"


def test_the_copied_tag_of_a_refused_run_says_nothing_of_its_re_execution(
    make: Make, tick: Tick, instance: dg.DagsterInstance
) -> None:
    failed = new_run(instance, tags={PIPELINE: "meeting"})
    tags = {PIPELINE: "meeting", REFUSED: "PipelineOwned"}
    refused = new_run(instance, tags=tags)
    assert [request.run_key for request in tick(make(), instance).run_requests] == [failed]
    again = new_run(instance, dg.DagsterRunStatus.STARTED, tags=tags, parent=refused)
    assert f"The newest run, {again}, is STARTED" in tick(make(), instance).skip_message
    recovery = new_run(instance, tags={**tags, RECOVERS: failed, ATTEMPT: "1"})
    (request,) = tick(make(), instance).run_requests
    assert request.run_key == recovery and REFUSED not in request.tags


def test_a_refused_run_is_not_restarted_although_it_was_the_last_to_own_the_pipeline(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """One stage alone was materialized before the pipeline ever ran: only the owner knows that the others have not finished."""
    refused = new_run(instance, tags={PIPELINE: "meeting", REFUSED: "SelectionError"}, selection=["joined"])
    owner(meeting_pipeline, refused).end("FAILED")
    result = tick(make(), instance)
    assert not result.run_requests and "never been run" not in result.skip_message and refused in result.skip_message
    again = new_run(instance, tags={PIPELINE: "meeting"})
    assert [request.run_key for request in tick(make(), instance).run_requests] == [again]


@pytest.mark.parametrize(
    ("left_out", "included"),
    [
        ({"steps": ["downstream"]}, {"steps": ["downstream", OP]}),
        ({"selection": ["downstream"]}, {"selection": ["downstream", "live"]}),
    ],
    ids=["re-executed from a failure", "a selection"],
)
def test_a_run_of_the_job_that_leaves_the_pipeline_out_is_not_restarted(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    left_out: dict[str, Any],
    included: dict[str, Any],
) -> None:
    """The job has other assets, too: one of them fails again after the pipeline has finished."""
    done = new_run(instance, dg.DagsterRunStatus.SUCCESS, tags={PIPELINE: "meeting"})
    owner(meeting_pipeline, done).end("FINISHED", ended_by="end_of_data")
    new_run(instance, tags={PIPELINE: "meeting"}, parent=done, **left_out)
    assert f"The newest run, {done}, is SUCCESS" in tick(make(), instance).skip_message
    failed = new_run(instance, tags={PIPELINE: "meeting"}, parent=done, **included)
    assert [request.run_key for request in tick(make(), instance).run_requests] == [failed]


def _tick_in(sensor: dg.SensorDefinition, coordinator: Callable[..., Any], instance: dg.DagsterInstance, location: str) -> Any:
    with dg.build_sensor_context(instance=instance, resources={"checkpoint_coordinator": coordinator()}) as context:
        context._code_location_origin = RegisteredCodeLocationOrigin(location)
        return sensor.evaluate_tick(context)


def test_the_owner_in_another_code_location_is_restarted_there(
    make: Make, coordinator: Callable[..., Any], instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """Staging and production share the default storage: staging's code would continue production's job."""
    failed = new_run(instance, tags={PIPELINE: "meeting"}, location="production")
    owner(meeting_pipeline, failed).end("FAILED")
    tick_in = partial(_tick_in, make(), coordinator, instance)
    assert f"Run {failed}, which ran the pipeline last, failed. It is of code location 'production'" in str(tick_in("staging"))
    assert [request.run_key for request in tick_in("production").run_requests] == [failed]


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED])
@pytest.mark.parametrize("ours", [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE])
def test_runs_of_another_code_location_are_those_of_another_pipeline(
    make: Make,
    coordinator: Callable[..., Any],
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    ours: dg.DagsterRunStatus,
    status: dg.DagsterRunStatus,
) -> None:
    """Staging and production in one Dagster instance, with storages of their own: the names are the same."""
    tags, tick_in = {PIPELINE: "meeting"}, partial(_tick_in, make(), coordinator, instance)
    here = new_run(instance, ours, tags=tags, location="production")
    owner(meeting_pipeline, here).end("FAILED" if ours is dg.DagsterRunStatus.FAILURE else "FINISHED", ended_by="suspend")
    new_run(instance, status, tags=tags, location="staging")
    result = tick_in("production")
    if ours is dg.DagsterRunStatus.FAILURE:
        assert [request.run_key for request in result.run_requests] == [here]
    else:
        assert f"The newest run, {here}, is SUCCESS" in result.skip_message
    here = new_run(instance, tags=tags, location="production")  # it failed before it owned the pipeline
    assert [request.run_key for request in tick_in("production").run_requests] == [here]


@pytest.mark.parametrize(
    ("ended", "by", "restarts"),
    [("FINISHED", "suspend", False), ("FINISHED", "drain", False), ("CANCELED", "", False), ("FAILED", "", True)],
)
def test_the_end_of_a_run_that_was_deleted_counts(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    ended: Any,
    by: Any,
    restarts: bool,
) -> None:
    """Old runs are deleted by their age: the newest that is left has failed, and another one has followed it."""
    failed = new_run(instance)
    deleted = new_run(instance, dg.DagsterRunStatus.SUCCESS)
    owner(meeting_pipeline, deleted).end(ended, ended_by=by)
    instance.delete_run(deleted)
    result = tick(make(), instance)
    assert [request.run_key for request in result.run_requests or ()] == ([failed] if restarts else [])
    assert restarts or f"Run {deleted} has run the pipeline last, and is not in Dagster any more" in result.skip_message


@pytest.mark.parametrize("alive", [True, False])
def test_the_only_run_was_deleted(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline, alive: bool
) -> None:
    """The sensor said that the pipeline had never been run, and nothing said why it was not restarted."""
    deleted = new_run(instance, dg.DagsterRunStatus.STARTED)
    running = owner(meeting_pipeline, deleted)
    if not alive:
        running.end("FAILED")
    instance.delete_run(deleted)
    result = tick(make(), instance)
    assert result.skip_message.startswith(f"Run {deleted} has run the pipeline last, and is not in Dagster any more")
    assert result.skip_message.endswith("Launch the pipeline if it should run.")


def test_back_off_grows_up_to_its_longest() -> None:
    backoff = Backoff(first=10.0, factor=3.0, longest=60.0)
    assert [backoff.seconds(attempts) for attempts in (0, 1, 2, 5000)] == [10.0, 30.0, 60.0, 60.0]
    with pytest.raises(ValueError, match="factor"):
        Backoff(factor=0.5)


def test_a_named_checkpoint_is_restored_again_until_the_run_has_completed_a_checkpoint(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    config = {"ops": {OP: {"config": {"restore_from": "savepoints/savepoint-3-x"}}}}
    failed = new_run(instance, config=config)
    running = owner(meeting_pipeline, failed)
    running.report()
    running.release("FAILED")
    assert restore_from(tick(make(), instance).run_requests[0]) == "savepoints/savepoint-3-x"

    failed = new_run(instance, config=config)
    running = owner(meeting_pipeline, failed, resume=True)
    running.report()
    running.checkpoint(4)
    running.release("FAILED")
    assert restore_from(tick(make(), instance).run_requests[0]) == "latest"

    # The checkpoint is of an earlier run: this run failed before it owned the pipeline.
    new_run(instance, config=config)
    assert restore_from(tick(make(), instance).run_requests[0]) == "savepoints/savepoint-3-x"


def test_a_job_that_had_finished_is_not_restarted(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """The pipeline was drained, and Dagster failed after that: a restart would be a new start."""
    failed = new_run(instance)
    running = owner(meeting_pipeline, failed)
    running.report()
    running.end("FINISHED", ended_by="drain")
    result = tick(make(), instance)
    assert not result.run_requests and "had finished before" in result.skip_message
    # The next run failed earlier: the finished job was another run's.
    new_run(instance)
    assert tick(make(), instance).run_requests


def test_a_suspend_on_request_is_not_undone(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """The run failed after the suspend: in the user's code, or because it was evicted while it ended."""
    failed = new_run(instance)
    owner(meeting_pipeline, failed).end("FINISHED", ended_by="suspend", stop_asked_by="request")
    result = tick(make(), instance)
    assert not result.run_requests and "A request had suspended its job" in result.skip_message

    burst = new_run(instance)
    owner(meeting_pipeline, burst, resume=True).end("FINISHED", ended_by="suspend", stop_asked_by="caught_up")
    result = tick(make(), instance)
    assert not result.run_requests and "Its job had caught up, and was suspended" in result.skip_message

    failed = new_run(instance)
    owner(meeting_pipeline, failed, resume=True).end("FINISHED", ended_by="suspend", stop_asked_by="termination")
    assert tick(make(), instance).run_requests[0].run_key == failed
    # Terminated by a user of Dagster: the same savepoint, and no restart.
    canceled = new_run(instance, dg.DagsterRunStatus.CANCELED)
    owner(meeting_pipeline, canceled, resume=True).end("FINISHED", ended_by="suspend", stop_asked_by="termination")
    assert "CANCELED" in tick(make(), instance).skip_message


def test_a_run_that_failed_while_the_owner_continued_is_not_restarted(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    """The owner is restarted, although another run of the job, or a refused one, is newer."""
    first = new_run(instance, dg.DagsterRunStatus.STARTED)
    running = owner(meeting_pipeline, first, lease_seconds=0.3)
    new_run(instance)  # it failed before it tried to acquire the pipeline
    refused = new_run(instance, tags={PIPELINE: "meeting", REFUSED: "PipelineOwned"})
    sensor = make()
    result = tick(sensor, instance)
    assert not result.run_requests and f"The newest run, {first}, is STARTED" in result.skip_message

    run = instance.get_run_by_id(first)
    assert run is not None
    instance.report_run_failed(run)
    running.stop()
    deadline, cursor = time.monotonic() + 30.0, None
    while not (result := tick(sensor, instance, cursor)).run_requests:
        assert time.monotonic() < deadline
        cursor = result.cursor
        time.sleep(0.05)
    assert result.run_requests[0].run_key == first != refused

    # The recovery run was refused by an owner that Dagster considered dead: the next attempt follows the recovery run.
    again = new_run(instance, tags={**result.run_requests[0].tags, REFUSED: "PipelineOwned"})
    cursor = None
    while not (result := tick(sensor, instance, cursor)).run_requests:
        assert time.monotonic() < deadline
        cursor = result.cursor
        time.sleep(0.05)
    assert result.run_requests[0].run_key == again and result.run_requests[0].tags[ATTEMPT] == "2"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of sensors, seconds after the first call: a lease ends without a wait, also if a tick is slow."""
    began: list[datetime] = []

    def forward(seconds: float) -> None:
        began.append(datetime.now(UTC))
        moment = began[0] + timedelta(seconds=seconds)
        monkeypatch.setattr(pipeline_sensor, "datetime", SimpleNamespace(now=lambda zone: moment.astimezone(zone)))

    return forward


def test_a_run_that_is_still_alive_is_not_restarted(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    later: Callable[[float], None],
) -> None:
    failed = new_run(instance)
    running = owner(meeting_pipeline, failed, lease_seconds=60.0)
    sensor = make()
    cursor = None
    for _ in range(3):  # it renews its lease, so it is alive
        running.ownership.renew()
        result = tick(sensor, instance, cursor)
        assert not result.run_requests and "lease" in result.skip_message
        cursor = result.cursor
    later(61.0)  # and it has not renewed the lease since
    assert tick(sensor, instance, cursor).run_requests[0].run_key == failed


def test_a_run_that_dagster_takes_for_alive_and_that_has_died_is_marked_as_failed_and_restarted(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    later: Callable[[float], None],
) -> None:
    started = new_run(instance, dg.DagsterRunStatus.STARTED)
    running = owner(meeting_pipeline, started, lease_seconds=60.0)

    def status() -> dg.DagsterRunStatus:
        found = instance.get_run_by_id(started)
        assert found is not None
        return found.status

    sensor, never = make(dead_after=100.0), make(dead_after=None)
    cursor = None
    for seconds in (0.0, 90.0, 180.0):  # it renews its lease, so it is alive, however long the ticks are apart
        later(seconds)
        running.ownership.renew()
        result = tick(sensor, instance, cursor)
        assert not result.run_requests and "is STARTED" in result.skip_message
        cursor = result.cursor
    later(270.0)
    cursor = tick(sensor, instance, cursor).cursor
    assert status() is dg.DagsterRunStatus.STARTED, "90 s without a renewal"
    later(281.0)
    assert "is STARTED" in tick(never, instance, cursor).skip_message
    result = tick(sensor, instance, cursor)
    assert not result.run_requests
    assert "was STARTED. The run has not renewed its lease on the pipeline for 101 s: its process has died" in result.skip_message
    assert status() is dg.DagsterRunStatus.FAILURE
    (request,) = tick(sensor, instance, result.cursor).run_requests
    assert request.run_key == started


def test_a_run_on_a_machine_that_slept_is_not_marked_as_failed(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    later: Callable[[float], None],
) -> None:
    """The machine of the run and of Dagster's daemon was suspended: the lease was not renewed, and no tick looked at it."""
    started = new_run(instance, dg.DagsterRunStatus.STARTED)
    owner(meeting_pipeline, started, lease_seconds=60.0)
    sensor, cursor = make(dead_after=100.0), None
    for seconds, status in ((0.0, "STARTED"), (8000.0, "STARTED"), (8090.0, "STARTED"), (8101.0, "FAILURE")):
        later(seconds)
        result = tick(sensor, instance, cursor)
        cursor = result.cursor
        run = instance.get_run_by_id(started)
        assert run is not None and run.status.value == status, f"{seconds} s"


@pytest.mark.parametrize(
    ("ended", "op_end", "found"),
    [
        ("CANCELED", None, True),
        ("FAILED", None, True),
        ("FAILED", DagsterEventType.STEP_FAILURE, False),  # other ops of the run go on
        ("CANCELED", DagsterEventType.STEP_FAILURE, False),
        ("FINISHED", None, False),  # the op, or another one, does something after the pipeline
    ],
)
def test_a_run_whose_end_could_not_be_written_is_marked_as_failed_and_restarted(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    later: Callable[[float], None],
    ended: str,
    op_end: DagsterEventType | None,
    found: bool,
) -> None:
    """Dagster's storage was away when the run ended: it has released the pipeline, and Dagster takes it for STARTED for ever."""
    started = new_run(instance, dg.DagsterRunStatus.STARTED)
    owner(meeting_pipeline, started, lease_seconds=60.0).end(ended)
    if op_end is not None:
        event = DagsterEvent(
            event_type_value=op_end.value,
            job_name="nightly",
            step_key=f"graph.{OP}",
            event_specific_data=StepFailureData(error=None, user_failure_data=None),
        )
        instance.report_dagster_event(event, run_id=started)
    sensor = make(dead_after=100.0)
    later(0.0)
    first = tick(sensor, instance)
    assert not first.run_requests and "is STARTED" in first.skip_message
    later(90.0)
    second = tick(sensor, instance, first.cursor)
    assert "is STARTED" in second.skip_message
    later(101.0)
    third = tick(sensor, instance, second.cursor)
    run = instance.get_run_by_id(started)
    assert run is not None and (run.status is dg.DagsterRunStatus.FAILURE) == found
    assert ("has given up the pipeline, and has not written the end of its op" in third.skip_message) == found
    later(200.0)
    requests = tick(sensor, instance, third.cursor).run_requests or []
    assert [request.run_key for request in requests] == ([started] if found else [])


def test_a_run_that_does_not_own_the_pipeline_is_not_marked_as_failed(
    make: Make, tick: Tick, instance: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline, later: Callable[[float], None]
) -> None:
    owner(meeting_pipeline, "another-run", lease_seconds=60.0)  # of another Dagster instance
    started = new_run(instance, dg.DagsterRunStatus.STARTED)  # it waits for the lease, or begins
    sensor = make(dead_after=10.0)
    cursor = tick(sensor, instance).cursor
    later(1000.0)
    assert "is STARTED" in tick(sensor, instance, cursor).skip_message
    found = instance.get_run_by_id(started)
    assert found is not None and found.status is dg.DagsterRunStatus.STARTED


STARTED, QUEUED = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.QUEUED
FAILURE, CANCELED, SUCCESS = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.SUCCESS


def test_what_a_dead_owner_holds_is_freed_for_the_run_that_waits_behind_it() -> None:
    """Every status of the owner and of the newest run, with and without a lease that may still be renewed."""
    not_left = {
        (STARTED, True): OwnerAction.WATCH,
        (STARTED, False): OwnerAction.WATCH,
        (FAILURE, False): OwnerAction.FREE_POOLS,
        (CANCELED, False): OwnerAction.FREE_POOLS,
    }
    for owner_status, newest, renews in product(dg.DagsterRunStatus, dg.DagsterRunStatus, (True, False)):
        waits = newest not in (SUCCESS, FAILURE, CANCELED)
        expected = not_left.get((owner_status, renews), OwnerAction.LEAVE) if waits else OwnerAction.LEAVE
        assert owner_action(owner_status, newest, renews=renews) is expected, f"{owner_status}, {newest}, renews: {renews}"


def new_waiting_run(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> str:
    if status is STARTED:
        return new_run(instance, STARTED)
    origin = job_in("here", "nightly")
    run = dg.DagsterRun(job_name="nightly", run_id=make_new_run_id(), status=status, remote_job_origin=origin)
    instance.add_run(run)
    return run.run_id


@pytest.fixture
def in_sqlite(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance whose storage has pools, with one slot in the pool `feeds`."""
    from dagster._core.test_utils import instance_for_test

    with instance_for_test(temp_dir=str(tmp_path)) as made:
        made.event_log_storage.set_concurrency_slots("feeds", 1)
        yield made


def holders(instance: dg.DagsterInstance) -> set[str]:
    return {slot.run_id for slot in instance.event_log_storage.get_concurrency_info("feeds").claimed_slots}


@pytest.mark.parametrize("waiting", [QUEUED, STARTED])
@pytest.mark.parametrize("owner_status", [STARTED, FAILURE, CANCELED])
def test_a_run_that_waits_behind_a_dead_owner_follows_it(
    make: Make,
    tick: Tick,
    in_sqlite: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    later: Callable[[float], None],
    owner_status: dg.DagsterRunStatus,
    waiting: dg.DagsterRunStatus,
) -> None:
    instance = in_sqlite
    dead = new_run(instance, owner_status)
    running = owner(meeting_pipeline, dead, lease_seconds=60.0)
    instance.event_log_storage.claim_concurrency_slot("feeds", dead, "pipeline_op")
    behind = new_waiting_run(instance, waiting)
    sensor, cursor = make(dead_after=100.0), None

    def look(seconds: float) -> str:
        nonlocal cursor
        later(seconds)
        result = tick(sensor, instance, cursor)
        cursor = result.cursor
        assert not result.run_requests, "the run that waits continues the job"
        assert behind in result.skip_message and dead in result.skip_message
        return str(result.skip_message)

    def status() -> dg.DagsterRunStatus:
        run = instance.get_run_by_id(dead)
        assert run is not None
        return run.status

    for seconds in (0.0, 90.0):  # it renews its lease, so it is alive
        running.ownership.renew()
        look(seconds)
        assert status() is owner_status and holders(instance) == {dead}
    look(140.0)
    assert status() is owner_status and holders(instance) == {dead}, "50 s without a renewal"
    text = look(191.0)
    if owner_status is STARTED:
        assert "The run has not renewed its lease on the pipeline for 101 s" in text and f"Run {behind}" in text
        assert status() is FAILURE
        text = look(221.0)
    assert "Its slots in pools are given back" in text and holders(instance) == set()
    found = instance.get_run_by_id(behind)
    assert found is not None and found.status is waiting


def test_a_run_that_waits_behind_an_owner_that_has_released_the_pipeline_gets_its_slot_at_once(
    make: Make, tick: Tick, in_sqlite: dg.DagsterInstance, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    failed = new_run(in_sqlite)
    owner(meeting_pipeline, failed).end("FAILED")
    in_sqlite.event_log_storage.claim_concurrency_slot("feeds", failed, "pipeline_op")
    new_waiting_run(in_sqlite, STARTED)
    assert not tick(make(), in_sqlite).run_requests
    assert holders(in_sqlite) == set()


def test_a_pipeline_that_another_run_owns_is_not_restarted(
    make: Make,
    tick: Tick,
    instance: dg.DagsterInstance,
    owner: Owner,
    meeting_pipeline: Pipeline,
    later: Callable[[float], None],
) -> None:
    failed = new_run(instance)
    other = owner(meeting_pipeline, "another-run", lease_seconds=60.0)  # of another Dagster instance
    sensor, cursor = make(), None
    for _ in range(3):
        other.ownership.renew()
        result = tick(sensor, instance, cursor)
        assert not result.run_requests
        assert failed in result.skip_message and "another-run owns the pipeline" in result.skip_message
        cursor = result.cursor
    later(61.0)  # it has died, and this Dagster instance cannot detect that
    assert tick(sensor, instance, cursor).run_requests[0].run_key == failed


def test_the_recovery_sensor_is_part_of_valid_definitions(make: Make, assets: dg.AssetsDefinition, job: Any) -> None:
    class Anything(dg.ConfigurableResource):
        pass

    sensor = make()
    defs = dg.Definitions(assets=[assets], jobs=[job], sensors=[sensor], resources={"checkpoint_coordinator": Anything()})
    dg.Definitions.validate_loadable(defs)
    assert defs.resolve_sensor_def("meeting_recovery").default_status is dg.DefaultSensorStatus.STOPPED
    assert {"nightly", "meeting_recovery_job"} <= {each.name for each in defs.resolve_all_job_defs()}


def test_the_assets_must_be_the_pipelines(
    meeting_pipeline: Pipeline, numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    with pytest.raises(NotAPipelineAssetError, match="'meeting'"):
        build_recovery_sensor(pipeline=meeting_pipeline, assets=assets_of(numbers_pipeline))


@pytest.fixture
def retrying() -> Iterator[dg.DagsterInstance]:
    from dagster._core.test_utils import instance_for_test

    with instance_for_test(overrides={"run_retries": {"enabled": True, "max_retries": 1}}) as made:
        yield made


def test_a_run_that_dagster_retries_is_not_restarted_as_well(
    make: Make, tick: Tick, retrying: dg.DagsterInstance, later: Callable[[float], None]
) -> None:
    failed = new_run(retrying)
    result = tick(make(), retrying)
    assert not result.run_requests and "going to retry" in result.skip_message
    # Dagster never began the retry: for example, the job has another name now.
    later(700)
    assert [request.run_key for request in tick(make(), retrying).run_requests] == [failed]
    later(0)
    # The retry goes on. It has the tag of a refused run: otherwise the sensor would find it as the newest run anyhow.
    retry = new_run(retrying, dg.DagsterRunStatus.STARTED, tags={REFUSED: "owned", "dagster/max_retries": "0"})
    retrying.add_run_tags(failed, {"dagster/auto_retry_run_id": retry})
    result = tick(make(), retrying)
    assert not result.run_requests and f"The newest run, {retry}, is STARTED" in result.skip_message
    # The retry was refused, and Dagster gives up: the sensor restarts the run that failed.
    run = retrying.get_run_by_id(retry)
    assert run is not None
    retrying.report_run_failed(run)
    assert [request.run_key for request in tick(make(), retrying).run_requests] == [failed]


def test_a_tag_of_a_retry_has_no_effect_if_dagster_retries_nothing(make: Make, tick: Tick, instance: dg.DagsterInstance) -> None:
    failed = new_run(instance, tags={"dagster/will_retry": "true"})
    assert [request.run_key for request in tick(make(), instance).run_requests] == [failed]
