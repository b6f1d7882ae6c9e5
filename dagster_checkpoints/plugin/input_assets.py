"""The assets outside of a pipeline that its stages read (`deps=`): their newest materializations, for the stages' contexts.

It must not know how stages are run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import dagster as dg

from dagster_checkpoints.pipeline import InputAsset
from dagster_checkpoints.plugin.stage_assets import StageAssets

_DATA_VERSION = "dagster/data_version"


def input_assets(context: dg.AssetExecutionContext, assets: StageAssets) -> dict[str, dict[str, InputAsset]]:
    """The newest materialization of each asset that a stage reads, by stage and asset key; without those never materialized.

    Args:
        context: The context of the op that runs the pipeline.
        assets: The assets of the pipeline's stages.
    """
    own = set(assets.keys.values())
    outside = {
        stage: [dep.asset_key for dep in context.assets_def.get_asset_spec(key).deps if dep.asset_key not in own]
        for stage, key in assets.keys.items()
    }
    newest = _newest(context.instance, {key for keys in outside.values() for key in keys})
    found = {stage: {newest[key].key: newest[key] for key in keys if key in newest} for stage, keys in outside.items()}
    return {stage: known for stage, known in found.items() if known}


def _newest(instance: dg.DagsterInstance, keys: Iterable[dg.AssetKey]) -> Mapping[dg.AssetKey, InputAsset]:
    newest = {}
    for key in keys:
        entry = instance.get_latest_materialization_event(key)
        if entry is None or entry.asset_materialization is None:
            continue
        materialization = entry.asset_materialization
        newest[key] = InputAsset(
            key=key.to_user_string(),
            run_id=entry.run_id,
            materialized_at=entry.timestamp,
            partition=materialization.partition,
            data_version=(materialization.tags or {}).get(_DATA_VERSION),
            metadata={name: value.value for name, value in materialization.metadata.items()},
        )
    return newest
