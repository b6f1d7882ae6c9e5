"""The root of the checkpoint storage: one rule for the resource and for the command line.

Must not import Dagster: the command line starts without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dagster_checkpoints.errors import DagsterCheckpointsError

STORAGE_VARIABLE = "CHECKPOINT_STORAGE"
_DIRECTORY = "checkpoints"


class NoStorageError(DagsterCheckpointsError):
    """No setting names the storage of the checkpoints."""


def storage_root(
    chosen: str | None = None,
    *,
    instance_directory: str | None = None,
    setting: str,
    environment: Mapping[str, str] | None = None,
    shared_parts: Callable[[], Sequence[str]] = tuple,
) -> str:
    """The root of the checkpoint storage: a URL or a path, as :func:`dagster_checkpoints.storage.open_store` takes it.

    The first of: `chosen`, the variable CHECKPOINT_STORAGE, the directory ``checkpoints`` in DAGSTER_HOME, the directory
    ``checkpoints`` in the Dagster instance's directory.

    Args:
        chosen: The root that the user has set; None or empty if the user has set none.
        instance_directory: Directory of a persistent Dagster instance; None without one.
        setting: Name of the setting that sets `chosen`, for the error: ``--storage``.
        environment: Environment variables; those of the process by default.
        shared_parts: Returns the parts of the Dagster instance that allow its runs on several machines; if there are any, a
            directory of one machine is not used. Called only if neither `chosen` nor the variable is set.

    Raises:
        NoStorageError: None of them is set, or only a directory that a run on another machine would not see.
    """
    variables = os.environ if environment is None else environment
    named = chosen or variables.get(STORAGE_VARIABLE)
    if named:
        return named
    home = variables.get("DAGSTER_HOME") or instance_directory
    if parts := shared_parts():
        raise NoStorageError(
            "No setting names the storage of the checkpoints, and this Dagster instance does not keep its runs on one machine: "
            f"{' and '.join(f'its {part}' for part in parts)}. Expected a storage that every run sees: the default, a directory "
            "in DAGSTER_HOME, would vanish with a run's container, and the next run would begin from nothing. Set "
            f"{STORAGE_VARIABLE} or {setting} to s3://bucket/prefix, or to file:///path on a file system that every machine "
            "mounts."
        )
    if home:
        return str(Path(home).absolute() / _DIRECTORY)
    raise NoStorageError(
        f"No setting names the storage of the checkpoints. Set {setting} (s3://bucket/prefix, file:///path or a path), or "
        f"{STORAGE_VARIABLE} or DAGSTER_HOME."
    )
