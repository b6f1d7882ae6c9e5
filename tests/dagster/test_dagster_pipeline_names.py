"""One pipeline per name in a code location: refused when Dagster loads it, and when a run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin, enter_loadable_target_origin_load_context

from dagster_checkpoints import ParquetSink, Pipeline, bounded_source, pipeline_assets
from dagster_checkpoints.definitions.pipelines import DuplicatePipelineError, pipelines_of

REPOSITORY = Path(__file__).resolve().parents[2]
AssetsOf = Callable[..., dg.AssetsDefinition]
CODE = """
import dagster as dg
from dagster_checkpoints import CheckpointCoordinatorResource, ParquetSink, Pipeline, bounded_source, pipeline_assets


def tenant(name, pipeline_name):
    @bounded_source(sink=ParquetSink(f"/nowhere/{name}"))
    def events(context): ...

    pipeline = Pipeline(pipeline_name, [events])

    @pipeline_assets(pipeline=pipeline, name=f"{name}_assets", key_prefix=name)
    def assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
        yield from checkpoint_coordinator.run(pipeline, context=context)

    return assets


first = tenant("acme", "etl")
defs = dg.Definitions(
    assets=[first, tenant("initech", SECOND)],
    jobs=[dg.define_asset_job("only_first", selection=dg.AssetSelection.assets(first))],
    resources={"checkpoint_coordinator": CheckpointCoordinatorResource()},
    executor=dg.in_process_executor,
)
"""


@pytest.mark.parametrize(("second", "refused"), [("etl", True), ("etl_initech", False)])
def test_a_code_location_with_two_pipelines_of_one_name_does_not_load(tmp_path: Path, second: str, refused: bool) -> None:
    file = tmp_path / "location.py"
    file.write_text(CODE.replace("SECOND", repr(second)))
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-f", str(file)]
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) is refused, output
    if refused:
        assert "expected one pipeline called 'etl' in a code location, found two" in output
        assert "acme/events" in output and "initech/events" in output and "location.py" in output


def source(folder: Path, name: str) -> Any:
    @bounded_source(name=name, sink=ParquetSink(folder / name))
    def any_source(context):  # type: ignore[no-untyped-def]
        return context.spark.range(5)

    return any_source


@pytest.fixture
def loading() -> Iterator[None]:
    """The state in which a code server imports the user's code."""
    context = DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)
    with (
        DefinitionsLoadContext.scoped(context),
        enter_loadable_target_origin_load_context(LoadableTargetOrigin(python_file="x.py")),
    ):
        yield


@pytest.mark.usefixtures("loading")
def test_the_same_pipeline_defined_or_loaded_again_is_not_refused(tmp_path: Path, assets_of: AssetsOf) -> None:
    one = Pipeline("etl", [source(tmp_path, "events")])
    assets_of(one)
    assets_of(one, key_prefix="copy")  # one pipeline, shown by two assets
    with DefinitionsLoadContext.scoped(DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)):
        assets_of(Pipeline("etl", [source(tmp_path, "renamed")]))  # the code location is loaded again, and has changed
        assets_of(Pipeline("etl", [source(tmp_path, "renamed")]))  # the file was imported twice
        with pytest.raises(DuplicatePipelineError, match="another with the assets events"):
            assets_of(Pipeline("etl", [source(tmp_path, "events")]))


def test_a_run_refuses_a_second_pipeline_of_one_name(tmp_path: Path) -> None:
    """A run's process builds the code location again, without a code server; and the command line's `check` has none."""
    file = tmp_path / "location.py"
    file.write_text(CODE.replace("SECOND", "'etl'"))
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(file), "-j", "only_first"]
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "RUN_FAILURE" in output
    assert "expected one pipeline called 'etl' in a code location, found two" in output
    namespace: dict[str, Any] = {"__name__": "location"}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    with pytest.raises(DuplicatePipelineError):
        pipelines_of(namespace["defs"])


def test_a_pipeline_is_found_whatever_post_processing_has_changed(tmp_path: Path) -> None:
    """For other dependencies Dagster makes another op: the command line's `check` did not know its pipeline any more."""

    def run(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from ()

    pipelines = [Pipeline(name, [source(tmp_path, f"{name}_events")]) for name in ("one", "other")]
    assets = [pipeline_assets(pipeline=pipeline, name=pipeline.name)(run) for pipeline in pipelines]
    changed = [each.map_asset_specs(lambda spec: spec.replace_attributes(deps=["raw"])) for each in assets]
    assert pipelines_of(dg.Definitions(assets=changed)) == pipelines
