"""What is wrong with a resource's settings can be known where it is defined, as far as they are literal.

The value of a `dg.EnvVar` is not known then: it is checked when the run starts, by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from dagster_checkpoints.spark.session.spark_session import session_config
from dagster_checkpoints.spark.session.work_directory import check_work_directory_named, parse_work_directory
from dagster_checkpoints.storage.urls import validate_root


def check_definition(storage: str | None, work_directory: str | None, spark: Mapping[str, Any]) -> None:
    """Refuse settings that no run can start with.

    Args:
        storage: Root of the checkpoints; None or empty if the environment says where it is.
        work_directory: As the user has named it.
        spark: Settings of the Spark session, nested or flat.

    Raises:
        InvalidStorageUrl: `storage` is a URL of a kind that is not supported.
        WorkDirectoryError: So is `work_directory`, or it is missing although Spark's master needs it.
        SparkSettingError: A Spark setting with which checkpoints do not work.
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
    """The literal settings, by their whole names."""
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.") if set(value) != {"env"} else []
        elif _literal(value):
            found.append((f"{prefix}{key}", value))
    return found
