"""Metadata and tags that several of Dagster's events have in common: addresses, event time, data versions.

Dagster writes the tags of data versions by itself only for what an op returns at its end. Source: Dagster's documentation, "Asset
versioning and caching".
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import dagster as dg

from dagster_checkpoints.control.status import watermark_moment
from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.pipeline import Pipeline


def address_metadata(url: str) -> dg.MetadataValue:
    """An address in storage: a path of the machine, which can be copied, or the URL of an object, which is a link.

    A browser does not open a link to a file from a page of Dagster, so the URL of a file is shown as its path.

    Args:
        url: URL of a file, a directory or an object.
    """
    path = local_path(url)
    return dg.MetadataValue.url(url) if path is None else dg.MetadataValue.path(str(path))


def event_time_metadata(pipeline: Pipeline, stage: str, watermark_ms: int | None, wall: Callable[[], datetime]) -> dict[str, Any]:
    """The watermark, and the lag of an unbounded stage; empty without a watermark, and at the end of event time.

    Args:
        pipeline: The stage's pipeline.
        stage: The stage's name.
        watermark_ms: Its output watermark, epoch ms; None if there is none.
        wall: Wall clock, against which the lag is measured.
    """
    watermark = watermark_moment(watermark_ms) if watermark_ms is not None else None
    if watermark is None:
        return {}
    shown: dict[str, Any] = {"watermark": dg.MetadataValue.timestamp(watermark)}
    if not pipeline.is_bounded(stage):  # a backfill has no meaningful lag
        shown["lag_seconds"] = round((wall() - watermark).total_seconds())
    return shown


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
