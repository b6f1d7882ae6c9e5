"""`@pipeline_assets`: the stages of a pipeline as Dagster assets.

A thin `multi_asset`. :class:`dagster_checkpoints.CheckpointCoordinatorResource` runs the pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import dagster as dg

from dagster_checkpoints.definitions.pipelines import register
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.commit_checks import check_specs
from dagster_checkpoints.plugin.run_config import run_config_schema
from dagster_checkpoints.plugin.stage_assets import NotAPipelineAssetError, check_assets, stage_specs
from dagster_checkpoints.plugin.stage_translator import DagsterStageTranslator


def pipeline_assets(
    *,
    pipeline: Pipeline,
    name: str | None = None,
    key_prefix: str | Sequence[str] | None = None,
    group_name: str | None = None,
    deps: Mapping[str, Sequence[Any]] | None = None,
    tags: Mapping[str, str] | None = None,
    translator: DagsterStageTranslator | None = None,
    op_tags: Mapping[str, Any] | None = None,
    pool: str | None = None,
    required_resource_keys: Set[str] | None = None,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make every stage of a pipeline a Dagster asset; one run executes all of them together.

    The decorated function yields the results of :meth:`CheckpointCoordinatorResource.run`. Its op takes the run configuration
    :class:`dagster_checkpoints.plugin.run_config.PipelineRunConfig` (the checkpoint to restore), in the launchpad as well, unless
    the function has its own parameter `config`; its type may be a subclass of PipelineRunConfig. A subset of the stages may be
    selected if all other stages have finished. The op has no retry policy: the coordinator restarts the pipeline.

    Args:
        pipeline: The pipeline whose stages become assets of the same names, with the same dependencies.
        name: Name of the op; by default the name of the function.
        key_prefix: Prefix of each asset's key.
        group_name: Name of the assets' group.
        deps: Assets outside of the pipeline that stages read, by the stage's name; values as `deps=` of :func:`dagster.asset`.
        tags: Tags of the assets.
        translator: Says how each stage becomes an asset: key, group, owners, code version, automation condition, freshness.
        op_tags: Tags of the op.
        pool: Concurrency pool of the op.
        required_resource_keys: Keys of resources that the function reads from `context.resources`.

    Returns:
        A decorator that returns an :class:`dagster.AssetsDefinition`.

    Raises:
        UnknownStageError: `deps` names a stage that the pipeline does not have.
        DuplicateAssetKeyError: Two stages have the same key, or one has that of the checkpoints or of a stage's instances.
        StageDependencyError: `deps` or the translator names a stage of the pipeline for a stage that does not read it; or `deps`
            has no list of assets for each stage.
        DuplicatePipelineError: Another pipeline of the code location that Dagster is loading has the same name.

    Examples:
        >>> @pipeline_assets(pipeline=flights, group_name="flights")
        ... def flights_assets(
        ...     context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource
        ... ):
        ...     yield from checkpoint_coordinator.run(flights, context=context)
    """
    prefix = [key_prefix] if isinstance(key_prefix, str) else list(key_prefix or ())
    specs = stage_specs(pipeline, key_prefix=prefix, group_name=group_name, deps=deps, tags=tags, translator=translator)
    checks = check_specs(pipeline, {stage.name: spec.key for stage, spec in zip(pipeline.stages, specs, strict=True)})

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        _evaluate_annotations(function)
        has_config = "config" in inspect.signature(function).parameters
        assets = dg.multi_asset(
            name=name,
            specs=specs,
            check_specs=checks,
            can_subset=True,
            op_tags=op_tags,
            pool=pool,
            required_resource_keys=None if required_resource_keys is None else set(required_resource_keys),
            config_schema=None if has_config else run_config_schema(),
        )(_with_results(function, pipeline))
        register(pipeline, assets, partial(check_assets, pipeline=pipeline))
        return assets

    return decorate


def _with_results(function: Callable[..., Any], pipeline: Pipeline) -> Callable[..., Any]:
    """A function that does the same, and fails if it returns nothing.

    Dagster takes nothing for the success of a single asset, although `run()` has done nothing before it is iterated. A pipeline
    is found by this function, which no other one has, also where the user has decorated one function for several.
    """
    if any(kind(function) for kind in (inspect.isasyncgenfunction, inspect.iscoroutinefunction)):
        return function
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def yielded(*args: Any, **kwargs: Any) -> Any:
            return (yield from function(*args, **kwargs))

        return yielded

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        if results is None:
            raise NotAPipelineAssetError(
                f"expected that function {function.__name__!r} yields the results of run() of pipeline {pipeline.name!r}, found "
                "that it returns none: a run whose results are not read does nothing. Write `yield from` in front of it"
            )
        return results

    return checked


def _evaluate_annotations(function: Callable[..., Any]) -> None:
    """Evaluate annotations that are strings (`from __future__ import annotations`), which Dagster refuses for a context."""
    with suppress(NameError, AttributeError, SyntaxError):  # Dagster then reports the type that it does not understand
        function.__annotations__ = inspect.get_annotations(function, eval_str=True)
