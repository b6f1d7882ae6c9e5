"""The Dagster assets of a pipeline's stages.

Writes the stage's name into the definition of its asset and reads it from the definition, so that a run needs no second list of
names. It must not know how a pipeline runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster_shared.check import CheckError

from dagster_checkpoints.definitions.pipelines import check_names
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.plugin.stage_translator import DagsterStageTranslator
from dagster_checkpoints.sinks import TwoPhaseCommitSink
from dagster_checkpoints.spark.errors import SelectionError

PIPELINE = "dagster_checkpoints/pipeline"
REFUSED = "dagster_checkpoints/refused"
"""Tag of a refused run, because another run owns the pipeline, another pipeline has its name, or the run has not all stages that
it needs: the name of the error. A refused run is not a run of the pipeline, although it has the pipeline's tag."""
STAGE = "dagster_checkpoints/stage"
INSTANCES = "dagster_checkpoints/instances"
CHECKPOINTS_OF = "dagster_checkpoints/checkpoints_of"
"""Key in the metadata of an asset whose observations show checkpoints: the name of the pipeline."""
CHECKPOINTS_PREFIX = ("checkpoints",)
FINISHED_BEFORE = "finished_before_this_run"
"""Key in the metadata of a materialization: True if the stage had finished before the run began."""


BOUNDED = "dagster_checkpoints/bounded"
"""Tag of a stage's asset: whether the stage ends by itself, "true" or "false"."""
LIVE = "dagster_checkpoints/live"
"""Tag of a materialization that a stage's sink has caused while the stage runs: it is not the stage's end."""


COMMITTED_ROWS = "dagster_checkpoints/committed_rows"
"""Tag of such a materialization: the number of rows that the stage had committed since the job began."""


class NotAPipelineAssetError(DagsterCheckpointsError):
    """A pipeline is run by an asset that `@pipeline_assets` did not make from this pipeline, or that yields no results."""


class NoStageSelectedError(DagsterCheckpointsError):
    """A run has selected checks of a pipeline's stages, and none of the stages."""


class PartitionedStageError(DagsterCheckpointsError):
    """The translator, or a later change of the asset, gives a stage's asset partitions."""


class DuplicateAssetKeyError(DagsterCheckpointsError):
    """Two stages of a pipeline have the same asset key, or one has that of the checkpoints or of a stage's instances."""


class StageDependencyError(DagsterCheckpointsError):
    """A stage's asset depends on a stage of the same pipeline that the stage does not read, directly or through others; or the
    dependencies are not lists of assets by stage."""


def stage_specs(
    pipeline: Pipeline,
    *,
    key_prefix: Sequence[str] = (),
    group_name: str | None = None,
    deps: Mapping[str, Sequence[Any]] | None = None,
    tags: Mapping[str, str] | None = None,
    translator: DagsterStageTranslator | None = None,
) -> list[dg.AssetSpec]:
    """An asset per stage, in topological order, with the pipeline's edges as dependencies.

    Args:
        pipeline: The pipeline whose stages become assets.
        key_prefix: Prefix of each asset's key, before the stage's name.
        group_name: Name of the assets' group.
        deps: Assets outside of the pipeline that stages read, by the stage's name.
        tags: Tags of every asset.
        translator: Says how a stage becomes an asset; default: :class:`DagsterStageTranslator`.

    Raises:
        UnknownStageError: `deps` names a stage that the pipeline does not have.
        DuplicateAssetKeyError: Two stages have the same key, or one has that of the checkpoints or of a stage's instances.
        StageDependencyError: `deps` or the translator names a stage of the pipeline for a stage that does not read it; or `deps`
            has no list of assets for each stage.
    """
    outside = _outside(pipeline, deps)
    translate = translator or DagsterStageTranslator()
    specs = {stage.name: _translated(translate, stage) for stage in pipeline.stages}
    keys = {name: spec.key.with_prefix(key_prefix) for name, spec in specs.items()}
    _check_keys(pipeline, keys, translate)
    made = []
    for stage in pipeline.stages:
        spec, bounded = specs[stage.name], "true" if pipeline.is_bounded(stage.name) else "false"
        upstream = [keys[name] for name in pipeline.upstream(stage.name)]
        made.append(
            spec.replace_attributes(
                key=keys[stage.name],
                deps=[*upstream, *outside.get(stage.name, ()), *spec.deps],
                metadata={**spec.metadata, **_metadata(pipeline, stage)},
                group_name=spec.group_name or group_name,
                skippable=True,  # a stage that has not finished when the run ends is not materialized
                tags={**(tags or {}), **_without_kinds(spec.tags), BOUNDED: bounded},
            )
        )
    _check_dependencies(pipeline, keys, made)
    return made


def _outside(pipeline: Pipeline, deps: object) -> dict[str, Sequence[Any]]:
    """The assets outside of the pipeline, by stage; a text would be taken for a list of its characters."""
    found = {} if deps is None else deps
    if not isinstance(found, Mapping):
        raise StageDependencyError(
            f"pipeline {pipeline.name!r}: expected deps= by the name of the stage that reads the assets, such as "
            f'{{{pipeline.stages[0].name!r}: ["raw_files"]}}, found {deps!r}'
        )
    for name, assets in found.items():
        if type(assets) not in (list, tuple, set, frozenset):  # a key and a spec are tuples themselves
            raise StageDependencyError(
                f"pipeline {pipeline.name!r}: expected a list of assets in deps= of stage {name!r}, found {assets!r}"
            )
    return {pipeline.stage(name).name: tuple(assets) for name, assets in found.items()}


def _check_dependencies(pipeline: Pipeline, keys: Mapping[str, dg.AssetKey], specs: Iterable[dg.AssetSpec]) -> None:
    """Refuse dependencies within the pipeline that it does not have.

    Dagster requires a stage's end after the ends of those it depends on, and fails the run otherwise; stages end in the
    pipeline's order.
    """
    stages = {key: name for name, key in keys.items()}
    for spec in specs:
        name = stages[spec.key]
        for dep in spec.deps:
            other = stages.get(dep.asset_key)
            if other is not None and other not in _read_by(pipeline, name):
                raise StageDependencyError(
                    f"expected assets outside of pipeline {pipeline.name!r} as further dependencies of stage {name!r}, found its "
                    f"stage {other!r} ({dep.asset_key.to_user_string()}), which {name!r} does not read. Make it an input of the "
                    "stage, or leave it out of deps=, the translator's get_asset_spec and post-processing"
                )


def _read_by(pipeline: Pipeline, stage: str) -> set[str]:
    """The stages that a stage reads, directly or through others."""
    return {name for up in pipeline.upstream(stage) for name in (up, *_read_by(pipeline, up))}


def _translated(translator: DagsterStageTranslator, stage: Stage) -> dg.AssetSpec:
    spec = translator.get_asset_spec(stage)
    _check_unpartitioned(stage.name, spec, f"from get_asset_spec of {type(translator).__name__}")
    return spec


def _check_unpartitioned(stage: str, spec: dg.AssetSpec, source: str) -> None:
    """Refuse a stage with partitions: the run of each partition would read all rows again."""
    if spec.partitions_def is not None:
        raise PartitionedStageError(
            f"expected an asset without partitions for stage {stage!r}, found partitions_def={spec.partitions_def!r} {source}: "
            "one run materializes all stages of a pipeline, and has none. The instances of a stage are partitions of an asset "
            "of their own, see instance_assets"
        )


def _without_kinds(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags, without those that stand for the asset's kinds, which `replace_attributes` keeps by itself."""
    return {name: value for name, value in tags.items() if not name.startswith("dagster/kind/")}


def _check_keys(pipeline: Pipeline, keys: Mapping[str, dg.AssetKey], translator: DagsterStageTranslator) -> None:
    """Refuse two stages with one key, and a stage with the key of an asset whose events a run reports beside the stages."""
    parallel = [(instance_key(keys[s.name]), f"the instances of stage {s.name!r}") for s in pipeline.stages if s.parallelism > 1]
    named = [(key, repr(stage)) for stage, key in keys.items()]
    known: dict[dg.AssetKey, str] = {}
    for key, what in [*named, *parallel, (checkpoints_key(pipeline.name), f"the checkpoints of pipeline {pipeline.name!r}")]:
        if (other := known.setdefault(key, what)) != what:
            raise DuplicateAssetKeyError(
                f"expected an asset key for each stage, found {key.to_user_string()!r} for both {other} and {what}. Change "
                f"get_asset_key of {type(translator).__name__}, the stage's name or key_prefix"
            )


def reports_end(materialization: dg.AssetMaterialization) -> bool:
    """Whether a materialization reports that its asset is complete. False for the commits of a running stage.

    Args:
        materialization: The materialization of any asset, of this or another pipeline, or of none.
    """
    return LIVE not in (materialization.tags or {})


def table_metadata(sink: TwoPhaseCommitSink | None) -> dict[str, Any]:
    """What a sink says of its table, by Dagster's own names; empty without a sink."""
    named = {"dagster/uri": sink.uri, "dagster/table_name": sink.table_name} if sink is not None else {}
    return {name: value for name, value in named.items() if value is not None}


def instance_key(stage_key: dg.AssetKey) -> dg.AssetKey:
    """The asset whose partitions are the instances of the stage with this asset key."""
    return dg.AssetKey([*stage_key.path[:-1], f"{stage_key.path[-1]}_instances"])


def checkpoints_key(pipeline: str) -> dg.AssetKey:
    """The asset whose observations show the checkpoints of the pipeline with this name."""
    return dg.AssetKey([*CHECKPOINTS_PREFIX, pipeline])


def instance_assets(assets: dg.AssetsDefinition) -> list[dg.AssetSpec]:
    """The external assets of a pipeline: the instances of parallel stages, and the pipeline's checkpoints.

    A stage with several instances is one unpartitioned asset, because assets with different partitions cannot be materialized
    together. Its instances are the partitions of a second asset. The observations of one asset, `checkpoints/<pipeline>`, show
    the checkpoints: duration, size, roots, location. In the lineage it follows the stages that no other stage reads.
    :meth:`CheckpointCoordinatorResource.run` reports the events of these assets, also if they are not defined; with these
    definitions Dagster shows their descriptions and their place in the graph.

    Args:
        assets: The assets that :func:`pipeline_assets` made.

    Returns:
        An asset per stage that has more than one instance, with the stage's name and the suffix `_instances`; and the asset of
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
                deps=last_stages(stages),  # an edge from each stage would hide the others
                description=f"The checkpoints of pipeline {pipeline}: an observation shows the newest one.",
                group_name=stages[0].group_name,
                metadata={CHECKPOINTS_OF: pipeline},
                kinds={"checkpoint"},  # the graph shows the last part of a key only: pipeline, savepoints and this look alike
            )
        )
    return specs


def stage_keys(assets: dg.AssetsDefinition, pipeline: Pipeline) -> dict[str, dg.AssetKey]:
    """Asset keys by stage.

    Raises:
        NotAPipelineAssetError: `@pipeline_assets` did not make the assets from this pipeline.
        PartitionedStageError: The assets have got partitions since.
    """
    keys = _keys_of_stages(assets, pipeline)
    for stage, key in keys.items():
        _check_unpartitioned(stage, assets.get_asset_spec(key), "that map_asset_specs or post-processing has added")
    if not keys:
        raise NotAPipelineAssetError(
            f"expected the assets that @pipeline_assets(pipeline=...) made of pipeline {pipeline.name!r}, found "
            f"{sorted(key.to_user_string() for key in assets.keys)}"
        )
    return keys


def check_assets(assets: dg.AssetsDefinition, pipeline: Pipeline) -> None:
    """Refuse what map_asset_specs or post-processing has made of a pipeline's assets, if no run begins with it.

    Raises:
        NotAPipelineAssetError, PartitionedStageError: See :func:`stage_keys`.
        StageDependencyError: A stage's asset has got a dependency within the pipeline that the pipeline does not have.
    """
    keys = stage_keys(assets, pipeline)
    _check_dependencies(pipeline, keys, map(assets.get_asset_spec, keys.values()))


def _keys_of_stages(assets: dg.AssetsDefinition, pipeline: Pipeline) -> dict[str, dg.AssetKey]:
    return {
        str(_value(spec.metadata[STAGE])): spec.key
        for spec in assets.specs
        if _value(spec.metadata.get(PIPELINE)) == pipeline.name and STAGE in spec.metadata
    }


def last_stages(stages: Iterable[dg.AssetSpec]) -> list[dg.AssetKey]:
    """The keys of a pipeline's stages that no other of its stages reads.

    Args:
        stages: The assets of one pipeline.
    """
    stages = [spec for spec in stages if STAGE in spec.metadata]
    read = {dep.asset_key for spec in stages for dep in spec.deps}
    return [spec.key for spec in stages if spec.key not in read]


def takes_run_config(assets: dg.AssetsDefinition, setting: str) -> bool:
    """Whether the configuration of the assets' op has a setting of :class:`PipelineRunConfig`."""
    schema = assets.op.config_schema.config_type
    return setting in (getattr(schema, "fields", None) or {})


def run_selection(pipeline: Pipeline, assets: dg.AssetsDefinition) -> dg.AssetSelection:
    """What a job that runs the pipeline selects.

    All stages; and of the asset checks, if a stage is unbounded, the pipeline's own alone: a check of another op would wait in
    the run for the end of that stage.
    """
    selection = dg.AssetSelection.assets(*stage_keys(assets, pipeline).values())
    if pipeline.bounded:
        return selection
    stages = selection.without_checks()
    return stages | dg.AssetSelection.checks(*assets.check_keys) if assets.check_keys else stages


@dataclass(frozen=True)
class StageAssets:
    """The assets of the run that materializes a pipeline.

    Attributes:
        keys: Asset keys by stage, for all stages whose assets the run knows.
        selected: Names of the stages that the run is to materialize.
    """

    keys: Mapping[str, dg.AssetKey]
    selected: frozenset[str]

    @classmethod
    def of(cls, context: dg.AssetExecutionContext, pipeline: Pipeline) -> StageAssets:
        """The assets of the asset function that runs.

        Raises:
            NoStageSelectedError: The run has selected none of the stages, but checks of their commits.
            NotAPipelineAssetError: The function was not decorated with `@pipeline_assets` for this pipeline.
            StageDependencyError: A stage's asset has got a dependency within the pipeline since that the pipeline does not have.
            PartitionedStageError: The stages' assets have got partitions since.
            DuplicatePipelineError: Another pipeline of the code location has the same name.
            SelectionError: Dagster has divided the stages among several steps of the job.
        """
        checks = context.selected_asset_check_keys
        if checks and not context.selected_asset_keys:
            raise NoStageSelectedError(
                f"expected that a run of pipeline {pipeline.name!r} materializes its stages, found that it has selected checks "
                f"alone: {', '.join(sorted(key.to_user_string() for key in checks))}. The rows of a commit are checked while the "
                "pipeline runs, before readers see them. Launch the job of the pipeline instead, unless it runs already"
            )
        keys = stage_keys(context.assets_def, pipeline)
        chosen = context.selected_asset_keys
        selected = frozenset(stage for stage, key in keys.items() if key in chosen)
        if not selected or not selected <= {stage.name for stage in pipeline.stages}:
            raise NotAPipelineAssetError(
                f"Pipeline {pipeline.name!r} is run by {context.op_execution_context.op_def.name!r}, whose assets are "
                f"{sorted(key.to_user_string() for key in chosen)}; expected the stages of {pipeline.name!r}. Decorate the "
                "function with @pipeline_assets(pipeline=...) and pass the same pipeline to run()."
            )
        _check_dependencies(pipeline, keys, map(context.assets_def.get_asset_spec, keys.values()))
        with suppress(CheckError):  # assets that were materialized without a code location
            check_names(pipeline, context.assets_def, set(context.repository_def.assets_defs_by_key.values()))
        _check_undivided(context, pipeline)
        return cls(keys, selected)


def _check_undivided(context: dg.AssetExecutionContext, pipeline: Pipeline) -> None:
    """Refuse a job that runs the stages in several steps.

    Dagster divides an op of several assets where an asset of another op reads one of them, and another one depends on that. It
    may then divide other ops of the same job, too.
    """
    layer, own = context.job_def.asset_layer, set[dg.AssetKey]()
    steps: dict[str, list[str]] = {}
    for data in layer.data:
        keys = {name: key for name, key in _keys_of_stages(data.assets_def, pipeline).items() if key in data.assets_def.keys}
        own |= set(keys.values())
        steps |= {str(data.node_handle): sorted(keys)} if keys else {}
    if len(steps) < 2:
        return
    ancestors = {key: layer.asset_graph.get_ancestor_asset_keys(key) for key in layer.selected_asset_keys}
    before_stages = {each for key in own for each in ancestors[key]} - own
    between = sorted(key.to_user_string() for key in before_stages if key in ancestors and ancestors[key] & own)
    shared = "; ".join(f"{step} has {', '.join(map(repr, names))}" for step, names in sorted(steps.items()))
    reason = (
        "Other assets of the job depend on each other so that it had to. Launch the pipeline's job, which has its stages alone"
    )
    if between:
        reason = (
            f"Assets of the job are between the stages, which one reads and another depends on: {', '.join(between)}. Leave them "
            "out of the job, or out of deps="
        )
    raise SelectionError(
        f"Pipeline {pipeline.name!r}: expected all its stages in one step of job {context.job_def.name!r}, found that Dagster "
        f"has divided them: {shared}. All stages of a pipeline run at the same time, because checkpoints span them. {reason}."
    )


def _metadata(pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        PIPELINE: pipeline.name,
        STAGE: stage.name,
        INSTANCES: dg.MetadataValue.json(list(stage.instances)),
    }
    if stage.location.line:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.BetaWarning)
            reference = dg.LocalFileCodeReference(file_path=stage.location.file, line_number=stage.location.line)
            metadata["dagster/code_references"] = dg.CodeReferencesMetadataValue(code_references=[reference])
    if stage.sink is not None:
        metadata["sink"] = repr(stage.sink)
        metadata |= table_metadata(stage.sink)
    if stage.watermark is not None:
        metadata["watermark"] = f"{stage.watermark.column}, {stage.watermark.lateness} late"
    return metadata


def _value(metadata: Any) -> Any:
    """The raw value of metadata, which Dagster may have wrapped."""
    return metadata.value if isinstance(metadata, dg.MetadataValue) else metadata
