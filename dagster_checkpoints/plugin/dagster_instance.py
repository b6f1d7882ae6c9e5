"""Which parts of a Dagster instance show that its processes need not share a machine.

Read from the instance's configuration alone: the packages of the parts need not be installed where it is read.
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
"""Dagster's own parts that keep a run and its storage on one machine."""
_BY_PARTS = "CompositeStorage"
_CONFIGURATION = "dagster.yaml"
_CONFIGURED = re.compile(r"^(run_launcher|storage|run_storage|event_log_storage|instance_class)\s*:", re.MULTILINE)


def shared_parts(instance: DagsterInstance) -> list[str]:
    """The parts of an instance for which its runs need not be on one machine; empty for a local or ephemeral instance.

    Args:
        instance: Dagster's, as a run, a sensor or a schedule has it.
    """
    if instance.is_ephemeral:
        return []
    with suppress(Exception):  # an instance that no other process can open has no reference
        return _shared_parts(instance.get_ref())
    return []


def shared_parts_below(home: str) -> list[str]:
    """Those of the instance that DAGSTER_HOME names; Dagster is imported only if its configuration names such parts.

    Args:
        home: The directory.

    Raises:
        ValueError: The configuration cannot be read.
    """
    path = Path(home).expanduser() / _CONFIGURATION
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not _CONFIGURED.search(text):
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
    if storage is not None and storage.class_name != _BY_PARTS:
        parts.append(("storage", storage))
    else:
        parts += [("run storage", ref.run_storage_data), ("event log storage", ref.event_storage_data)]
    return [f"{what} is {data.class_name} of {data.module_name}" for what, data in parts if data is not None and _foreign(data)]


def _foreign(data: ConfigurableClassData) -> bool:
    return data.class_name not in _LOCAL or data.module_name.partition(".")[0] != "dagster"
