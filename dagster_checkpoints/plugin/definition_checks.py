"""Checks the literal settings of a resource when it is defined.

The value of a `dg.EnvVar` is not known at that time: the same rules check it when the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from dagster_checkpoints.files.urls import validate_root
from dagster_checkpoints.spark.session.spark_session import session_config
from dagster_checkpoints.spark.session.work_directory import check_work_directory_named, parse_work_directory


def check_definition(storage: str | None, work_directory: str | None, spark: Mapping[str, Any]) -> None:
    """Refuse settings that no run can start with.

    Args:
        storage: Root of the checkpoint storage; None or empty if the environment names it.
        work_directory: URL or path of the work directory; None for the default.
        spark: Settings of the Spark session, nested or flat.

    Raises:
        InvalidStorageUrl: `storage` has an unsupported URL scheme.
        WorkDirectoryError: `work_directory` has an unsupported URL scheme, or is missing although Spark's master needs it.
        SparkSettingError: Checkpoints do not work with a Spark setting.
    """
    if storage and _literal(storage):
        validate_root(storage)
    if work_directory is not None and _literal(work_directory):
        parse_work_directory(work_directory)
    settings = session_config(dict(_flat(spark)))
    check_work_directory_named(settings["spark.master"], named=work_directory is not None)


def _literal(value: Any) -> bool:
    return not isinstance(value, dg.EnvVar)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The literal settings, by their full names."""
    literals = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            literals += _flat(value, f"{prefix}{key}.") if set(value) != {"env"} else []
        elif _literal(value):
            literals.append((f"{prefix}{key}", value))
    return literals
