"""Settings of a session that code of a pipeline changes after the session was made. Without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.spark.job.attempt_driver import AttemptDriver
from dagster_checkpoints.spark.session.spark_session import REQUIRED, SparkSettingError, check_session, session_config


def session_with(**changed: str) -> Any:
    """A session with the plugin's settings, and changed ones."""
    settings = {**session_config({}), **{key.replace("__", "."): value for key, value in changed.items()}}
    return SimpleNamespace(version=pyspark.__version__, conf=SimpleNamespace(get=lambda key, default: settings.get(key, default)))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_session_with_another_value_of_a_required_setting_is_refused(key: str) -> None:
    check_session(session_with())
    check_session(session_with(**{key: REQUIRED[key].upper()}))
    with pytest.raises(
        SparkSettingError, match=rf"{key}=other in the job's session.*need {key}={REQUIRED[key]}.*spark\.conf\.set"
    ):
        check_session(session_with(**{key: "other"}))


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
