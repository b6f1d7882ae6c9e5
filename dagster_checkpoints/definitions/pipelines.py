"""The pipelines of a code location. Each has a name of its own, which is its directory in storage.

That is checked while Dagster loads the code location, and again when a run starts, among the definitions of that run. Outside of
a load (a notebook, a test) pipelines of one name may be defined several times: only those in `Definitions` are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline

_registered: WeakKeyDictionary[object, tuple[Pipeline, Callable[[dg.AssetsDefinition], object]]] = WeakKeyDictionary()
"""Of every function that `@pipeline_assets` has decorated, the pipeline, and what refuses assets that were changed since, as
post-processing does. Dagster makes other ops of the function for other dependencies."""
_SHOWN = 5


class DuplicatePipelineError(DagsterCheckpointsError):
    """Two pipelines of one code location have the same name."""


@runtime_checkable
class RunsPipelines(Protocol):
    """The resource that runs pipelines, as far as a check of a code location asks it."""

    work_directory: str | None

    def spark_settings(self) -> dict[str, str]:
        """The settings of Spark that a run would have.

        Raises:
            SparkSettingError: Checkpoints cannot work with one of them.
        """


class _Load:
    """The assets that the current load of a code location has defined so far, by the name of their pipeline."""

    def __init__(self) -> None:
        self.context: DefinitionsLoadContext | None = None
        self.assets: dict[str, list[dg.AssetsDefinition]] = {}


_load = _Load()


def register(pipeline: Pipeline, assets: dg.AssetsDefinition, check: Callable[[dg.AssetsDefinition], object]) -> None:
    """Record the assets that `@pipeline_assets` made from a pipeline.

    Args:
        pipeline: The pipeline.
        assets: The assets.
        check: Refuses assets that were made of these, and with which no run of the pipeline begins.

    Raises:
        DuplicatePipelineError: Dagster is loading a code location, and another pipeline in it has the same name.
    """
    _registered[_function(assets)] = pipeline, check
    try:
        LoadableTargetOrigin.get()
    except dg.DagsterInvariantViolationError:  # no code location is being loaded
        return
    context = DefinitionsLoadContext.get()
    if _load.context is not context:
        _load.context, _load.assets = context, {}
    defined = _load.assets.setdefault(pipeline.name, [])
    check_names(pipeline, assets, defined)
    defined.append(assets)


def pipeline_of(assets: dg.AssetsDefinition) -> Pipeline | None:
    """The pipeline from which `@pipeline_assets` made the assets; None if they were made otherwise."""
    found = _registered.get(_function(assets)) if assets.is_executable else None
    return None if found is None else found[0]


def _function(assets: dg.AssetsDefinition) -> object:
    """The function that was decorated; of a graph, which has none, the graph."""
    return getattr(getattr(assets.node_def, "compute_fn", None), "decorated_fn", assets.node_def)


def pipelines_of(definitions: dg.Definitions) -> list[Pipeline]:
    """The pipelines whose stages are assets of a code location, each once, in the order of the assets.

    Args:
        definitions: The definitions of the code location.

    Raises:
        DuplicatePipelineError: Two pipelines have the same name.
        DagsterCheckpointsError: Assets were changed since `@pipeline_assets` has made them, so that no run begins.
    """
    pipelines: dict[int, Pipeline] = {}
    assets_definitions = [assets for assets in definitions.assets or () if isinstance(assets, dg.AssetsDefinition)]
    for number, assets in enumerate(assets_definitions):
        pipeline = pipeline_of(assets)
        if pipeline is not None:
            check_names(pipeline, assets, assets_definitions[:number])
            _registered[_function(assets)][1](assets)
            pipelines[id(pipeline)] = pipeline
    return list(pipelines.values())


def check_names(pipeline: Pipeline, assets: dg.AssetsDefinition, others: Iterable[dg.AssetsDefinition]) -> None:
    """Refuse another pipeline of the same name among `others`.

    Allowed are two sets of assets from the same pipeline, and the same assets defined twice by a file that Python imports twice.

    Args:
        pipeline: The pipeline.
        assets: The assets that `@pipeline_assets` made from it.
        others: Assets of any kind.

    Raises:
        DuplicatePipelineError: Another pipeline has the name; the text says where both are defined.
    """
    for other in others:
        second = pipeline_of(other)
        if second is None or second is pipeline or second.name != pipeline.name or set(other.keys) == set(assets.keys):
            continue
        raise DuplicatePipelineError(
            f"expected one pipeline called {pipeline.name!r} in a code location, found two: one with the assets "
            f"{_described(second, other)}; another with the assets {_described(pipeline, assets)}. A pipeline's name is its "
            "directory in the checkpoint storage, so they would restore each other's checkpoints. Give one of them another name: "
            'Pipeline("another_name", ...)'
        )


def _described(pipeline: Pipeline, assets: dg.AssetsDefinition) -> str:
    keys = sorted(key.to_user_string() for key in assets.keys)
    shown = ", ".join(keys[:_SHOWN]) + (", …" if len(keys) > _SHOWN else "")
    return f"{shown} (stage {pipeline.stages[0].name!r} at {pipeline.stages[0].location})"
