"""The common parts of all sensors: the time limit of storage, ids of requests, cursors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints import CheckpointCoordinatorResource, Pipeline
from dagster_checkpoints.errors import CorruptPipelineState, StorageUnavailable
from dagster_checkpoints.plugin import time_limits
from dagster_checkpoints.plugin.sensors.pipeline_sensor import Cursor, read_cursor, request_id, write_cursor
from dagster_checkpoints.plugin.time_limits import TimeLimit, TimeLimitExceeded
from dagster_checkpoints.sensors import build_drain_sensor, build_end_of_input_sensor, build_reroot_sensor, when
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.layout import validate_request_id


class Memory(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    seen: tuple[int, ...] = ()


@given(st.text())
def test_a_cursor_of_any_text_is_read_or_replaced_by_an_empty_one(text: str) -> None:
    assert isinstance(read_cursor(text, Memory), Memory)


def test_a_cursor_is_written_with_its_version_and_read_back() -> None:
    assert '"version":1' in write_cursor(Memory())
    assert read_cursor(write_cursor(Memory(seen=(3, 4))), Memory) == Memory(seen=(3, 4))


@given(st.lists(st.text(min_size=1), min_size=1), st.lists(st.text(min_size=1), min_size=1))
def test_ids_of_requests_are_valid_and_distinct(one: list[str], other: list[str]) -> None:
    ids = [request_id("sensor", *parts) for parts in (one, other)]
    for made in ids:
        validate_request_id(made)
        validate_request_id(request_id(*one))  # a sensor's name may begin with "_"
    if "-".join(one) != "-".join(other):
        assert ids[0] != ids[1]
    assert ids[0] == request_id("sensor", *one)


def test_a_call_that_exceeds_the_time_limit_is_abandoned() -> None:
    over = threading.Event()
    limit = TimeLimit(0.05, "storage")
    with pytest.raises(TimeLimitExceeded, match="storage"):
        limit.do(lambda: over.wait(60.0))
    over.set()


def test_no_further_call_is_begun_while_many_have_had_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory on a file system that does not answer holds a thread of the code server for each tick."""
    monkeypatch.setattr(time_limits, "MOST_UNANSWERED", 3)
    answered, begun = threading.Event(), []

    def hang() -> None:
        begun.append(threading.current_thread())
        answered.wait(60)

    for _ in range(8):
        with pytest.raises(TimeLimitExceeded):
            TimeLimit(0.01, "a slow system").do(hang)
    with pytest.raises(TimeLimitExceeded, match="3 earlier calls of this process have had no answer yet"):
        TimeLimit(0.01, "a slow system").do(hang)
    assert len(begun) == 3
    assert TimeLimit(60.0, "another system").do(lambda: 3) == 3
    answered.set()
    for thread in begun:
        thread.join(60)
    assert TimeLimit(60.0, "a slow system").do(lambda: 3) == 3


def test_an_error_comes_through_a_time_limit() -> None:
    assert TimeLimit(60.0, "storage").do(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        TimeLimit(60.0, "storage").do(lambda: 1 // 0)


@pytest.fixture
def sensors(meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> list[dg.SensorDefinition]:
    return [
        build_reroot_sensor(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline)),
        build_drain_sensor(pipeline=meeting_pipeline, when=when(lambda at: True)),
        build_end_of_input_sensor(pipeline=meeting_pipeline, source="live", after="december"),
    ]


def test_while_storage_cannot_be_reached_the_tick_is_skipped_and_the_cursor_kept(
    monkeypatch: pytest.MonkeyPatch, tick: Callable[..., Any], sensors: list[dg.SensorDefinition]
) -> None:
    def unreachable(self: CheckpointStorage) -> None:
        raise StorageUnavailable("the bucket is on the moon")

    monkeypatch.setattr(CheckpointStorage, "read_state", unreachable)
    with dg.DagsterInstance.ephemeral() as instance:
        for sensor in sensors:
            result = tick(sensor, instance, "the cursor")
            assert "on the moon. The next tick" in result.skip_message
            assert result.cursor == "the cursor"


def test_a_permanent_error_fails_the_tick(
    tick: Callable[..., Any], sensors: list[dg.SensorDefinition], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline)
    running.storage.store.put("meeting/state.json", b"not JSON")
    with dg.DagsterInstance.ephemeral() as instance:
        for sensor in sensors:
            with pytest.raises(CorruptPipelineState):
                tick(sensor, instance)


def test_a_status_that_cannot_be_read_is_none(
    tick: Callable[..., Any], sensors: list[dg.SensorDefinition], owner: Callable[..., Any], meeting_pipeline: Pipeline
) -> None:
    running = owner(meeting_pipeline)
    running.storage.store.put("meeting/status.json", b"not JSON")
    with dg.DagsterInstance.ephemeral() as instance:
        for sensor in sensors:
            assert tick(sensor, instance).skip_message


def test_sensors_need_the_coordinator_and_are_off_until_switched_on(sensors: list[dg.SensorDefinition]) -> None:
    for sensor in sensors:
        assert sensor.required_resource_keys == {"checkpoint_coordinator"}
        assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
        assert sensor.minimum_interval_seconds == 30


def test_a_sensor_uses_the_same_storage_as_a_run(tmp_path: Any, meeting_pipeline: Pipeline) -> None:
    resource = CheckpointCoordinatorResource(storage=str(tmp_path / "somewhere"))
    with dg.DagsterInstance.ephemeral() as instance:
        control = resource.control(meeting_pipeline, instance=instance, asked_by="me")
        assert control.url.endswith("/somewhere/meeting")
        assert control.state() is None
