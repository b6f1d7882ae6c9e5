"""The data version of a running stage's rows, and of what they were made from: so Dagster decides that an asset is "Unsynced".

Dagster writes these tags by itself only for what an op returns at its end. Source: Dagster's documentation, "Asset versioning and
caching".
"""

from __future__ import annotations

import dagster as dg

_DATA_VERSION = "dagster/data_version"
_USER_PROVIDED = "dagster/data_version_is_user_provided"
_CODE_VERSION = "dagster/code_version"
_INPUT_VERSION = "dagster/input_data_version"
_INPUT_EVENT = "dagster/input_event_pointer"
_NO_VERSION, _NO_EVENT = "INITIAL", "NULL"
"""What Dagster writes of an input that has never been materialized: a source without a sink, while it runs."""


def version_tags(context: dg.AssetExecutionContext, key: dg.AssetKey, version: str) -> dict[str, str]:
    """The tags of a materialization that the op logs while it runs.

    Args:
        context: The op's context.
        key: The asset that is materialized.
        version: Its data version.
    """
    code = context.assets_def.code_versions_by_key.get(key) or context.run.run_id  # as Dagster does
    tags = {_DATA_VERSION: version, _USER_PROVIDED: "true", _CODE_VERSION: code}
    for parent in context.assets_def.asset_deps[key]:
        newest = _newest(context.instance, parent, external=parent not in context.assets_def.keys)
        read = ((newest.event_log_entry.tags or {}) if newest else {}).get(_DATA_VERSION, _NO_VERSION)
        name = parent.to_user_string()
        tags |= {f"{_INPUT_VERSION}/{name}": read, f"{_INPUT_EVENT}/{name}": str(newest.storage_id) if newest else _NO_EVENT}
    return tags


def _newest(instance: dg.DagsterInstance, key: dg.AssetKey, *, external: bool) -> dg.EventLogRecord | None:
    """The newest materialization of an asset; of an external one without any the newest observation."""
    for fetch in (instance.fetch_materializations, instance.fetch_observations)[: 1 + external]:
        for record in fetch(key, limit=1).records:
            return record
    return None
