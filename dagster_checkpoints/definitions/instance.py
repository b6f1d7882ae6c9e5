"""Finds the parts of a Dagster instance that show that its runs may be on different machines.

Reads the instance's configuration only: the packages of the parts need not be installed in the reading process.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import DagsterInstance
    from dagster._core.instance.ref import InstanceRef
    from dagster._serdes import ConfigurableClassData

_LOCAL = frozenset(
    {
        "DefaultRunLauncher",
        "SyncInMemoryRunLauncher",
        "DagsterSqliteStorage",
        "SqliteRunStorage",
        "InMemoryRunStorage",
        "SqliteEventLogStorage",
        "ConsolidatedSqliteEventLogStorage",
        "InMemoryEventLogStorage",
    }
)
"""The parts of Dagster that keep a run and its storage on one machine."""
_COMPOSITE_STORAGE = "CompositeStorage"
_CONFIGURATION = "dagster.yaml"
_PART_SETTINGS = re.compile(r"^(run_launcher|storage|run_storage|event_log_storage|instance_class)\s*:", re.MULTILINE)


def shared_parts(instance: DagsterInstance) -> list[str]:
    """The parts of an instance that allow its runs on several machines; empty for a local or ephemeral instance.

    Args:
        instance: The Dagster instance of a run, a sensor or a schedule.
    """
    if instance.is_ephemeral:
        return []
    with suppress(Exception):  # an instance that no other process can open has no reference
        return _shared_parts(instance.get_ref())
    return []


def shared_parts_below(home: str) -> list[str]:
    """As :func:`shared_parts`, of the instance in a directory. Imports Dagster only if the configuration sets such a part.

    Args:
        home: The directory that DAGSTER_HOME names.

    Raises:
        ValueError: The configuration cannot be read.
    """
    path = Path(home).expanduser() / _CONFIGURATION
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not _PART_SETTINGS.search(text):
        return []
    from dagster._core.instance.ref import InstanceRef

    try:
        return _shared_parts(InstanceRef.from_dir(str(path.parent)))
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _shared_parts(ref: InstanceRef) -> list[str]:
    storage = ref.storage_data
    parts: list[tuple[str, ConfigurableClassData | None]] = [
        ("instance class", ref.custom_instance_class_data),
        ("run launcher", ref.run_launcher_data),
    ]
    if storage is not None and storage.class_name != _COMPOSITE_STORAGE:
        parts.append(("storage", storage))
    else:
        parts += [("run storage", ref.run_storage_data), ("event log storage", ref.event_storage_data)]
    return [
        f"{part} is {data.class_name} of {data.module_name}" for part, data in parts if data is not None and _may_be_shared(data)
    ]


def _may_be_shared(data: ConfigurableClassData) -> bool:
    return data.class_name not in _LOCAL or data.module_name.partition(".")[0] != "dagster"
