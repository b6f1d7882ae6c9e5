"""Checks the literal settings of a resource when it is defined, and reads the variables among its Spark settings when it runs.

The value of a `dg.EnvVar` is not known at the definition: the same rules check it when the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster._config.field_utils import is_dagster_env_var
from dagster_spark.utils import flatten_dict

from dagster_checkpoints.files.urls import validate_root
from dagster_checkpoints.spark.session.spark_session import SparkSettingError, session_config
from dagster_checkpoints.spark.session.work_directory import check_work_directory_named, parse_work_directory


def check_definition(storage: str | None, work_directory: str | None, spark: Mapping[str, Any]) -> None:
    """Refuse settings that no run can start with.

    Args:
        storage: Root of the checkpoint storage; None if the environment names it.
        work_directory: URL or path of the work directory; None for the default.
        spark: Settings of the Spark session, nested or flat.

    Raises:
        InvalidStorageUrl: `storage` has an unsupported URL scheme, or is empty, as a variable may be: a run would begin from
            nothing in the default storage.
        WorkDirectoryError: `work_directory` has an unsupported URL scheme, or is missing although Spark's master needs it.
        SparkSettingError: Checkpoints do not work with a Spark setting.
    """
    if storage is not None and _literal(storage):
        validate_root(storage)
    if work_directory is not None and _literal(work_directory):
        parse_work_directory(work_directory)
    settings = session_config({name: value for name, value in flat_settings(spark).items() if _literal(value)})
    check_work_directory_named(settings["spark.master"], named=work_directory is not None)


def run_settings(spark: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the Spark session by their full names, with the values of environment variables.

    Dagster replaces the variables of settings that it knows by name; of these it knows none.

    Args:
        spark: Settings of the Spark session, nested or flat.

    Raises:
        SparkSettingError: An environment variable is not set.
    """
    settings = flat_settings(spark)
    for name, value in settings.items():
        if _literal(value):
            continue
        settings[name] = value.get_value()
        if settings[name] is None:
            raise SparkSettingError(
                f"Spark configuration {name}: expected its value in the environment variable {value.env_var_name}, found that it "
                "is not set. Set it for the process of the run."
            )
    return settings


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a Spark session by their full names; of an environment variable the `dg.EnvVar`.

    Args:
        settings: The settings, nested or flat.
    """
    return dict(flatten_dict(_with_variables(settings)))


def _literal(value: Any) -> bool:
    return not is_dagster_env_var(value)


def _with_variables(value: Any) -> Any:
    """A setting, or several, with `dg.EnvVar` where Dagster's configuration has a mapping in its place."""
    if not isinstance(value, Mapping):
        return value
    return dg.EnvVar(value["env"]) if set(value) == {"env"} else {name: _with_variables(each) for name, each in value.items()}
