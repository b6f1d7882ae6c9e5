"""Where checkpoints are stored, if nobody says: one rule for the resource and for the command line.

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
    """Nothing says where checkpoints are stored."""


def storage_root(
    chosen: str | None = None,
    *,
    instance_directory: str | None = None,
    setting: str,
    environment: Mapping[str, str] | None = None,
    shared_parts: Callable[[], Sequence[str]] = tuple,
) -> str:
    """The root of the checkpoint storage: a URL or a path, as :func:`dagster_checkpoints.storage.open_store` takes it.

    The first of: what was chosen, the variable CHECKPOINT_STORAGE, the directory ``checkpoints`` below DAGSTER_HOME, that below
    the Dagster instance's own directory.

    Args:
        chosen: What a user has said; None or empty if nothing.
        instance_directory: Of a Dagster instance that is kept.
        setting: How `chosen` is said, for the error: ``--storage``.
        environment: Variables; the process's own by default.
        shared_parts: Which parts of the Dagster instance show that its runs need not be on one machine; then a directory of
            one machine is no default. Asked only if neither `chosen` nor the variable says anything.

    Raises:
        NoStorageError: None of them says anything, or only a directory that another run would not see.
    """
    variables = os.environ if environment is None else environment
    named = chosen or variables.get(STORAGE_VARIABLE)
    if named:
        return named
    home = variables.get("DAGSTER_HOME") or instance_directory
    if found := shared_parts():
        raise NoStorageError(
            "Nothing says where checkpoints are stored, and this Dagster instance does not keep its runs on one machine: "
            f"{' and '.join(f'its {part}' for part in found)}. Expected a storage that every run sees: the default, a directory "
            "in DAGSTER_HOME, would vanish with a run's container, and the next run would begin from nothing. Set "
            f"{STORAGE_VARIABLE} or {setting} to s3://bucket/prefix, or to file:///path on a file system that every machine "
            "mounts."
        )
    if home:
        return str(Path(home).absolute() / _DIRECTORY)
    raise NoStorageError(
        f"Nothing says where checkpoints are stored. Say it with {setting} (s3://bucket/prefix, file:///path or a path), or set "
        f"{STORAGE_VARIABLE} or DAGSTER_HOME."
    )
