"""One pipeline per name in a code location: the name is the pipeline's directory in storage.

Found out while Dagster loads the code location, and again when a run starts, among the definitions that the run sees. Outside
of a load (a notebook, a test) a pipeline may be defined as often as one likes: what counts is what is put into `Definitions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline

_pipelines: WeakKeyDictionary[object, Pipeline] = WeakKeyDictionary()
"""The pipeline of every op that `@pipeline_assets` has made."""
_SHOWN = 5


class DuplicatePipelineError(DagsterCheckpointsError):
    """Two pipelines of one code location have the same name."""


class _Load:
    """What the load of a code location that is under way has defined so far: assets by the name of their pipeline."""

    def __init__(self) -> None:
        self.context: DefinitionsLoadContext | None = None
        self.assets: dict[str, list[dg.AssetsDefinition]] = {}


_load = _Load()


def register(pipeline: Pipeline, assets: dg.AssetsDefinition) -> None:
    """Note what `@pipeline_assets` has made of a pipeline.

    Raises:
        DuplicatePipelineError: Dagster is loading a code location, and another pipeline in it has the same name.
    """
    _pipelines[assets.node_def] = pipeline
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
    """The pipeline whose stages the assets are; None if `@pipeline_assets` did not make them."""
    return _pipelines.get(assets.node_def) if assets.is_executable else None


def check_names(pipeline: Pipeline, assets: dg.AssetsDefinition, others: Iterable[dg.AssetsDefinition]) -> None:
    """Refuse another pipeline of the same name among `others`.

    The same pipeline may have two sets of assets, and a file that Python imports twice defines the same assets twice; neither
    is another pipeline.

    Args:
        pipeline: The pipeline.
        assets: What `@pipeline_assets` made of it.
        others: Assets of any kind.

    Raises:
        DuplicatePipelineError: Says where both are defined.
    """
    for other in others:
        found = pipeline_of(other)
        if found is None or found is pipeline or found.name != pipeline.name or set(other.keys) == set(assets.keys):
            continue
        raise DuplicatePipelineError(
            f"expected one pipeline called {pipeline.name!r} in a code location, found two: one with the assets "
            f"{_described(found, other)}; another with the assets {_described(pipeline, assets)}. A pipeline's name is its "
            "directory in the checkpoint storage, so they would restore each other's checkpoints. Give one of them another name: "
            'Pipeline("another_name", ...)'
        )


def _described(pipeline: Pipeline, assets: dg.AssetsDefinition) -> str:
    keys = sorted(key.to_user_string() for key in assets.keys)
    shown = ", ".join(keys[:_SHOWN]) + (", …" if len(keys) > _SHOWN else "")
    return f"{shown} (stage {pipeline.stages[0].name!r} at {pipeline.stages[0].location})"
