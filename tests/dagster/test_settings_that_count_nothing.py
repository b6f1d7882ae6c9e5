"""Settings of the resource, sensors, schedules, sinks and sources: a number that counts nothing is refused where it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import dagster as dg
import pytest

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    FileSink,
    KafkaSink,
    ParquetSink,
    Pipeline,
    SavepointConfig,
    SqlSink,
    pipeline_assets,
    savepoint_asset,
    unbounded_source,
)
from dagster_checkpoints.plugin.savepoints.retention import SavepointRetention
from dagster_checkpoints.sensors import (
    Backoff,
    build_drain_sensor,
    build_end_of_input_sensor,
    build_recovery_sensor,
    build_reroot_sensor,
    build_savepoint_schedule,
    live_lag_zero,
)
from dagster_checkpoints.sources.lake.positions import check_arguments


@unbounded_source(sink=ParquetSink("/nowhere"))
def live(context: Any) -> Any: ...


PIPELINE = Pipeline("counted", [live])


@pipeline_assets(pipeline=PIPELINE)
def counted_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource) -> Any: ...


SAVEPOINTS = savepoint_asset(pipeline=PIPELINE, assets=counted_assets)
NUMBERS = {
    name: field
    for name, field in CheckpointCoordinatorResource.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)} and field.annotation is not bool
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, True, False, -1])
def test_a_setting_of_the_resource_that_is_no_number_is_refused(name: str, value: object) -> None:
    """All of its numbers: those that this test does not know as well."""
    with pytest.raises(ValueError, match=name):
        CheckpointCoordinatorResource(**{name: value})


def test_these_are_the_numbers_of_the_resource() -> None:
    assert {
        "interval",
        "retained",
        "restart_attempts",
        "restart_interval",
        "sample_rows",
        "termination_timeout",
    } <= NUMBERS.keys()
    assert len(NUMBERS) >= 20


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"restart_strategy": "failure_rate", "restart_interval": 0}, "FailureRateRestart(interval=0.0)"),
        ({"restart_strategy": "failure_rate", "restart_interval": 3, "restart_delay": 1}, "max_failures * delay = 3.0 seconds"),
        ({"restart_strategy": "exponential_delay", "restart_interval": 0}, "ExponentialDelayRestart(reset_after=0.0)"),
        ({"restart_strategy": "exponential_delay", "restart_delay": 0}, "ExponentialDelayRestart(initial=0.0)"),
        ({"restart_strategy": "exponential_delay", "restart_delay": 61}, "restart_delay_maximum=60.0"),
        ({"restart_strategy": "exponential_delay", "restart_delay_maximum": 0.5}, "at least initial=1.0"),
        ({"restart_interval": 60}, "has no effect with restart_strategy='fixed_delay'"),
        ({"restart_delay_multiplier": 2}, "has no effect with restart_strategy='fixed_delay'"),
        ({"restart_delay_maximum": 90, "restart_strategy": "failure_rate"}, "has no effect with restart_strategy='failure_rate'"),
        ({"termination_timeout": 90}, "has no effect with savepoint_on_termination=False"),
        ({"interval": None, "initial_delay": 5}, "initial_delay is 5.0"),
        ({"interval": None, "min_pause": 5}, "min_pause is 5.0"),
    ],
)
def test_settings_of_the_resource_that_contradict_each_other(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as refused:
        CheckpointCoordinatorResource(**settings)
    assert named in str(refused.value)
    for name in settings.keys() - {"restart_strategy", "interval"}:
        assert name in str(refused.value)


def test_settings_that_another_one_does_not_use_may_have_their_defaults() -> None:
    CheckpointCoordinatorResource(restart_interval=3600.0, restart_delay_maximum=60.0, termination_timeout=60)
    CheckpointCoordinatorResource(restart_strategy="failure_rate", restart_attempts=0, restart_interval=1.0)
    CheckpointCoordinatorResource(interval=None, initial_delay=None, min_pause=0)


def _recovery(**settings: Any) -> object:
    return build_recovery_sensor(pipeline=PIPELINE, assets=counted_assets, **settings)


def _drain(**settings: Any) -> object:
    return build_drain_sensor(pipeline=PIPELINE, when=live_lag_zero(), **settings)


def _reroot(**settings: Any) -> object:
    return build_reroot_sensor(pipeline=PIPELINE, assets=counted_assets, **settings)


def _end(**settings: Any) -> object:
    return build_end_of_input_sensor(pipeline=PIPELINE, source="live", after="a", **settings)


def _schedule(**settings: Any) -> object:
    return build_savepoint_schedule(pipeline=PIPELINE, savepoints=SAVEPOINTS, cron_schedule="0 * * * *", **settings)


def _retention(**settings: Any) -> object:
    return SavepointRetention(made_by="a", prefix="b", **settings)


def _file_sink(**settings: Any) -> object:
    return FileSink("/nowhere", **settings)


def _kafka_sink(**settings: Any) -> object:
    return KafkaSink("topic", "broker:9092", staging=Path("/nowhere"), **settings)


def _sql_sink(**settings: Any) -> object:
    return SqlSink("sqlite:////nowhere.db", "rows", **settings)


def _lake(**settings: Any) -> object:
    return check_arguments("read_delta_table", changed_rows="refuse", **settings)


NO_SECONDS = [math.nan, math.inf, -math.inf, -1, True]
NO_COUNT = [math.nan, math.inf, 0, -1, True, 1.5]


@pytest.mark.parametrize(
    ("made", "name", "refused", "taken"),
    [
        (_recovery, "limit", NO_COUNT, 1),
        (_recovery, "reset_after", [*NO_SECONDS, 0], 0.5),
        (Backoff, "first", [*NO_SECONDS, 901], 0),
        (Backoff, "factor", [*NO_SECONDS, 0.5], 1),
        (Backoff, "longest", [*NO_SECONDS, 29], 30),
        *((sensor, "minimum_interval_seconds", NO_COUNT, 1) for sensor in (_recovery, _drain, _reroot, _end)),
        *((sensor, "deadline", [*NO_SECONDS, 0], 0.5) for sensor in (_drain, _reroot, _end, _schedule)),
        (_schedule, "keep", NO_COUNT, 1),
        (SavepointConfig, "deadline", [*NO_SECONDS, 0], 0.5),
        (_retention, "count", NO_COUNT, 1),
        (_retention, "max_age", [*NO_SECONDS, 0], 0.5),
        (_file_sink, "rows_per_file", NO_COUNT, 1),
        (_file_sink, "bytes_per_file", NO_COUNT, 1),
        (_kafka_sink, "retry_for", NO_SECONDS, 0),
        (_sql_sink, "retry_for", NO_SECONDS, 0),
        (_lake, "files_per_trigger", NO_COUNT, 1),
    ],
)
def test_a_number_that_counts_nothing_is_refused_by_name(
    made: Callable[..., object], name: str, refused: list[object], taken: object
) -> None:
    for value in refused:
        with pytest.raises(Exception, match=name) as found:
            made(**{name: value})
        said = ("expected", "greater than", "valid integer")  # ours, and pydantic's
        assert any(part in str(found.value) for part in said), f"{value!r}: {found.value!r}"
    made(**{name: taken})
