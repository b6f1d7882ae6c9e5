"""`@pipeline_assets`: the stages of a pipeline as Dagster assets.

A thin `multi_asset`. What runs the pipeline is :class:`dagster_checkpoints.CheckpointCoordinatorResource`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import dagster as dg

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.pipeline_names import check_names, pipeline_of, register
from dagster_checkpoints.plugin.run_config import run_config_schema
from dagster_checkpoints.plugin.stage_assets import stage_specs


def pipeline_assets(
    *,
    pipeline: Pipeline,
    name: str | None = None,
    key_prefix: str | Sequence[str] | None = None,
    group_name: str | None = None,
    deps: Mapping[str, Sequence[Any]] | None = None,
    tags: Mapping[str, str] | None = None,
    op_tags: Mapping[str, Any] | None = None,
    pool: str | None = None,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make a Dagster asset of every stage of a pipeline; one run executes them together.

    The decorated function yields what :meth:`CheckpointCoordinatorResource.run` yields. Its op takes the run configuration
    :class:`dagster_checkpoints.plugin.run_config.PipelineRunConfig` (what to restore from), in the launchpad as well, unless the
    function has a parameter `config` of its own; that may be a subclass of it. A subset of the stages may be selected if all
    others have finished. There is no retry policy: restarting is the coordinator's work.

    Args:
        pipeline: Its stages become assets of the same names, which depend on each other as the stages do.
        name: Of the op; by default the function's.
        key_prefix: In front of each asset's key.
        group_name: The assets' group.
        deps: By a stage's name, other assets that it reads, as in `deps=` of :func:`dagster.asset`.
        tags: Of the assets.
        op_tags: Of the op.
        pool: The op's concurrency pool.

    Returns:
        A decorator that returns an :class:`dagster.AssetsDefinition`.

    Raises:
        UnknownStageError: `deps` names a stage that the pipeline does not have.
        DuplicatePipelineError: Another pipeline of the code location that Dagster is loading has the same name.

    Examples:
        >>> @pipeline_assets(pipeline=flights, group_name="flights")
        ... def flights_assets(
        ...     context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource
        ... ):
        ...     yield from checkpoint_coordinator.run(flights, context=context)
    """
    prefix = [key_prefix] if isinstance(key_prefix, str) else list(key_prefix or ())
    specs = stage_specs(pipeline, key_prefix=prefix, group_name=group_name, deps=deps, tags=tags)

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        _evaluate_annotations(function)
        has_config = "config" in inspect.signature(function).parameters
        assets = dg.multi_asset(
            name=name,
            specs=specs,
            can_subset=True,
            op_tags=op_tags,
            pool=pool,
            config_schema=None if has_config else run_config_schema(),
        )(function)
        register(pipeline, assets)
        return assets

    return decorate


def pipelines_of(definitions: dg.Definitions) -> list[Pipeline]:
    """The pipelines whose stages are assets of a code location, each once, in the order of the assets.

    Args:
        definitions: The code location's.

    Raises:
        DuplicatePipelineError: Two of them have the same name.
    """
    found: dict[int, Pipeline] = {}
    everything = [assets for assets in definitions.assets or () if isinstance(assets, dg.AssetsDefinition)]
    for number, assets in enumerate(everything):
        pipeline = pipeline_of(assets)
        if pipeline is not None:
            check_names(pipeline, assets, everything[:number])
            found[id(pipeline)] = pipeline
    return list(found.values())


def _evaluate_annotations(function: Callable[..., Any]) -> None:
    """Dagster refuses a context or resource whose type is a string, as `from __future__ import annotations` makes it."""
    with suppress(NameError, AttributeError, SyntaxError):  # then Dagster says what it does not understand
        function.__annotations__ = inspect.get_annotations(function, eval_str=True)
