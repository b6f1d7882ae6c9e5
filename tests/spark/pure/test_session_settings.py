"""Settings of a session that code of a pipeline changes after the session was made. Without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.session.spark_session import (
    LEAST,
    REQUIRED,
    UNSET,
    SparkSettingError,
    build_session,
    check_session,
    session_config,
)


def session_with(**changed: str) -> Any:
    """A session with the plugin's settings, and changed ones."""
    settings = {**session_config({}), **{key.replace("__", "."): value for key, value in changed.items()}}
    return SimpleNamespace(version=pyspark.__version__, conf=SimpleNamespace(get=lambda key, default: settings.get(key, default)))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_session_with_another_value_of_a_required_setting_is_refused(key: str) -> None:
    check_session(session_with())
    check_session(session_with(**{key: REQUIRED[key].upper()}))
    with pytest.raises(
        SparkSettingError,
        match=rf"{key}=other in the session of the pipeline's queries.*need {key}={REQUIRED[key]}.*spark\.conf\.set",
    ):
        check_session(session_with(**{key: "other"}))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_required_setting_is_known_in_any_spelling(key: str) -> None:
    """RocksDB's count in any: `rocksDB.changelogCheckpointing` would replace that of the plugin."""
    spelt = key.replace("rocksdb", "rocksDB").replace("enabled", "Enabled").replace("sql", "SQL")
    with pytest.raises(SparkSettingError, match=rf"{spelt}=other: checkpoints need {key}={REQUIRED[key]}\. Remove"):
        session_config({spelt: "other"})
    settings = session_config({spelt: REQUIRED[key].upper()})
    assert [settings[name] for name in settings if name.lower() == key.lower()] == [REQUIRED[key]]


@pytest.mark.parametrize("key", LEAST)
def test_a_setting_below_its_least_value_is_refused(key: str) -> None:
    least, why = LEAST[key]
    session_config({key: least})
    check_session(session_with(**{key: f" {least + 1} "}))
    with pytest.raises(SparkSettingError, match=rf"{key}={least - 1}: expected at least {least}\. .*Remove"):
        session_config({key: least - 1})
    with pytest.raises(SparkSettingError, match=rf"{key}=few: expected at least {least}\. .*spark-defaults\.conf") as refused:
        check_session(session_with(**{key: "few"}))
    assert why in str(refused.value)


@pytest.mark.parametrize("key", UNSET)
def test_a_setting_that_must_not_be_there_is_refused(key: str) -> None:
    check_session(session_with(**{key: ""}))
    with pytest.raises(SparkSettingError, match=rf"{key}=5: expected that it is not set\. .*the resource's spark_config\.$"):
        session_config({key: 5})
    with pytest.raises(SparkSettingError, match=rf"{key}=5: .*spark-defaults\.conf"):
        check_session(session_with(**{key: "5"}))


@pytest.mark.parametrize("variable", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_a_process_of_spark_connect_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, functions such as `col` make columns of Spark Connect, and a missing package is named instead."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SparkSettingError, match=f"environment variable {variable} is set: .* Spark Connect is not supported"):
        build_session()


def test_days_of_the_julian_calendar_in_parquet_files_are_refused() -> None:
    """Spark knows by the file's metadata that it has rebased them; sinks, which read the files, do not."""
    session_config({"spark.sql.parquet.datetimeRebaseModeInWrite": "corrected"})
    with pytest.raises(SparkSettingError, match=r"datetimeRebaseModeInWrite=LEGACY.*Remove the setting"):
        session_config({"spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY"})


def test_a_setting_that_a_stages_function_changes_is_refused_before_its_query_starts() -> None:
    """`spark_config` refuses it, and each query takes the session's settings when it starts."""
    deployment = SimpleNamespace(tasks={}, plan=SimpleNamespace(graph=None, sources=()), finished=frozenset())
    driver = object.__new__(AttemptDriver)
    driver._spark = session_with(spark__sql__streaming__multipleWatermarkPolicy="max")
    driver._attempts = SimpleNamespace(deploy=lambda *_: deployment)  # type: ignore[assignment]
    driver._runtime = SimpleNamespace(pipeline=SimpleNamespace(stages=()))  # type: ignore[assignment]
    driver.deployment = None
    with pytest.raises(SparkSettingError, match="multipleWatermarkPolicy=max"):
        driver.deploy(do.Deploy(1, None), None, 1)
    assert driver.deployment is deployment, "its stages are open: the end of the job closes them"


def test_the_settings_that_the_promise_depends_on() -> None:
    """By name: the tests above cannot notice one that has been taken out of the tables."""
    assert {
        key.removeprefix("spark.").removeprefix("sql.").removeprefix("streaming.") for key in (*REQUIRED, *LEAST, *UNSET)
    } == {
        *("stateStore.rocksdb.changelogCheckpointing.enabled", "stateStore.checkpointFormatVersion", "offsetLog.formatVersion"),
        *("queryEvolution.enableSourceEvolution", "multipleWatermarkPolicy", "noDataMicroBatches.enabled", "exchange.reuse"),
        *("parquet.outputTimestampType", "parquet.datetimeRebaseModeInWrite", "stopTimeout", "scheduler.mode", "api.mode"),
        *("stateStore.rocksdb.trackTotalNumberOfRows", "unsupportedOperationCheck", "statefulOperator.checkCorrectness.enabled"),
        *("stateStore.stateSchemaCheck", "stateStore.formatValidation.enabled", "stateStore.commitValidation.enabled"),
        *("statefulOperator.allowMultiple", "useStreamlineAggregator", "stateStore.skipNullsForStreamStreamJoins.enabled"),
        *("optimizer.pruneFiltersCanPruneStreamingSubplan", "optimizeOneRowPlan.enabled", "legacy.sessionInitWithConfigDefaults"),
        *("minBatchesToRetain", "numRecentProgressUpdates", "internal.stateStore.partitions", "disabledV2MicroBatchReaders"),
    }
