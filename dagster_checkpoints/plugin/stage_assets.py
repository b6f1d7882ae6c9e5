"""Which Dagster asset stands for which stage of a pipeline.

Writes it into the assets' definitions and reads it back from there, so that a run needs no second list of names. It must
not know how a pipeline runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

import dagster as dg
from dagster_shared.check import CheckError

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.plugin.pipeline_names import check_names

PIPELINE = "dagster_checkpoints/pipeline"
REFUSED = "dagster_checkpoints/refused"
"""Tag of a run: the error with which it was refused, because the name belongs to another run or another pipeline. It is no run of
the pipeline, although it has the pipeline's tag."""
STAGE = "dagster_checkpoints/stage"
INSTANCES = "dagster_checkpoints/instances"
CHECKPOINTS_OF = "dagster_checkpoints/checkpoints_of"
"""In the metadata of an asset: its observations show the checkpoints of this pipeline."""
CHECKPOINTS_PREFIX = ("checkpoints",)
FINISHED_BEFORE = "finished_before_this_run"
"""In the metadata of a materialization: the stage had finished when the run began."""


class NotAPipelineAssetError(DagsterCheckpointsError):
    """A pipeline is to be run from something that `@pipeline_assets` of this pipeline did not make."""


def stage_specs(
    pipeline: Pipeline,
    *,
    key_prefix: Sequence[str] = (),
    group_name: str | None = None,
    deps: Mapping[str, Sequence[Any]] | None = None,
    tags: Mapping[str, str] | None = None,
) -> list[dg.AssetSpec]:
    """An asset per stage, in topological order, with the pipeline's edges as dependencies.

    Args:
        pipeline: Its stages become the assets.
        key_prefix: In front of each stage's name.
        group_name: Of all of them.
        deps: By a stage's name, assets outside the pipeline that it reads.
        tags: Of all of them.

    Raises:
        UnknownStageError: `deps` names a stage that the pipeline does not have.
    """
    outside = {pipeline.stage(name).name: tuple(assets) for name, assets in (deps or {}).items()}
    return [
        dg.AssetSpec(
            key=dg.AssetKey([*key_prefix, stage.name]),
            deps=[
                *(dg.AssetKey([*key_prefix, upstream]) for upstream in pipeline.upstream(stage.name)),
                *outside.get(stage.name, ()),
            ],
            description=cleandoc(stage.description) if stage.description else None,
            metadata=_metadata(pipeline, stage),
            group_name=group_name,
            skippable=True,  # a stage that has not finished when the run ends is not materialized
            tags=tags,
            kinds={"spark", "bounded" if pipeline.is_bounded(stage.name) else "unbounded"},
        )
        for stage in pipeline.stages
    ]


def instance_key(stage_key: dg.AssetKey) -> dg.AssetKey:
    """The asset whose partitions are the instances of the stage with this asset key."""
    return dg.AssetKey([*stage_key.path[:-1], f"{stage_key.path[-1]}_instances"])


def checkpoints_key(pipeline: str) -> dg.AssetKey:
    """The asset whose observations show the checkpoints of the pipeline with this name."""
    return dg.AssetKey([*CHECKPOINTS_PREFIX, pipeline])


def instance_assets(assets: dg.AssetsDefinition) -> list[dg.AssetSpec]:
    """The external assets beside the stages: the instances of parallel stages, and the pipeline's checkpoints.

    A stage with several instances is one unpartitioned asset, since assets with different partitions cannot be materialized
    together. Its instances are the partitions of a second asset. What belongs to a checkpoint and not to a stage (duration,
    size, roots, location) is shown by the observations of one asset, `checkpoints/<pipeline>`.
    :meth:`CheckpointCoordinatorResource.run` reports the events of all of them, also where they are not defined; with these
    definitions Dagster shows what they are and where they stand in the graph.

    Args:
        assets: What :func:`pipeline_assets` made.

    Returns:
        An asset per stage that has more than one instance, called as the stage, with `_instances` behind; and the asset of
        the checkpoints.

    Examples:
        >>> defs = dg.Definitions(assets=[flights_assets, *instance_assets(flights_assets)])
    """
    specs = []
    pipelines: dict[str, list[dg.AssetSpec]] = {}
    for spec in assets.specs:
        if PIPELINE in spec.metadata:
            pipelines.setdefault(str(_value(spec.metadata[PIPELINE])), []).append(spec)
        instances = _value(spec.metadata.get(INSTANCES, [])) or []
        if len(instances) > 1:
            specs.append(
                dg.AssetSpec(
                    key=instance_key(spec.key),
                    deps=[spec.key],
                    description=f"The instances of stage {spec.key.path[-1]}: materialized when one has ended.",
                    group_name=spec.group_name,
                    kinds={"spark"},
                    partitions_def=dg.StaticPartitionsDefinition([str(name) for name in instances]),
                )
            )
    for pipeline, stages in pipelines.items():
        specs.append(
            dg.AssetSpec(
                key=checkpoints_key(pipeline),
                deps=[spec.key for spec in stages],
                description=f"The checkpoints of pipeline {pipeline}: an observation shows the newest one.",
                group_name=stages[0].group_name,
                metadata={CHECKPOINTS_OF: pipeline},
            )
        )
    return specs


def stage_keys(assets: dg.AssetsDefinition, pipeline: Pipeline) -> dict[str, dg.AssetKey]:
    """Asset key by stage; empty if `@pipeline_assets` did not make the assets for this pipeline."""
    return {
        str(_value(spec.metadata[STAGE])): spec.key
        for spec in assets.specs
        if _value(spec.metadata.get(PIPELINE)) == pipeline.name and STAGE in spec.metadata
    }


@dataclass(frozen=True)
class StageAssets:
    """The assets of the run that materializes a pipeline.

    Attributes:
        keys: Asset key by stage, for all stages whose assets the run knows.
        selected: The stages that the run is to materialize.
    """

    keys: Mapping[str, dg.AssetKey]
    selected: frozenset[str]

    @classmethod
    def of(cls, context: dg.AssetExecutionContext, pipeline: Pipeline) -> StageAssets:
        """Those of the asset function that runs.

        Raises:
            NotAPipelineAssetError: The function was not decorated with `@pipeline_assets` for this pipeline.
            DuplicatePipelineError: Another pipeline of the code location has the same name.
        """
        keys = stage_keys(context.assets_def, pipeline)
        chosen = context.selected_asset_keys
        selected = frozenset(stage for stage, key in keys.items() if key in chosen)
        if not selected or not selected <= {stage.name for stage in pipeline.stages}:
            raise NotAPipelineAssetError(
                f"Pipeline {pipeline.name!r} is run by {context.op_execution_context.op_def.name!r}, whose assets are "
                f"{sorted(key.to_user_string() for key in chosen)}; expected the stages of {pipeline.name!r}. Decorate the "
                "function with @pipeline_assets(pipeline=...) and pass the same pipeline to run()."
            )
        with suppress(CheckError):  # assets that were materialized without a code location
            check_names(pipeline, context.assets_def, set(context.repository_def.assets_defs_by_key.values()))
        return cls(keys, selected)


def _metadata(pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        PIPELINE: pipeline.name,
        STAGE: stage.name,
        INSTANCES: dg.MetadataValue.json(list(stage.instances)),
    }
    if stage.location.line:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.BetaWarning)
            here = dg.LocalFileCodeReference(file_path=stage.location.file, line_number=stage.location.line)
            metadata["dagster/code_references"] = dg.CodeReferencesMetadataValue(code_references=[here])
    if stage.sink is not None:
        metadata["sink"] = repr(stage.sink)
    if stage.watermark is not None:
        metadata["watermark"] = f"{stage.watermark.column}, {stage.watermark.lateness} late"
    return metadata


def _value(metadata: Any) -> Any:
    """Raw, as the decorator got it, or wrapped, as Dagster keeps it."""
    return metadata.value if isinstance(metadata, dg.MetadataValue) else metadata
