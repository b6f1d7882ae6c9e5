"""A small pipeline and its coordinator: real Spark, real storage, a handful of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    pipeline_assets,
    stage,
)

SPARK = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture
def coordinator(tmp_path: Path) -> Callable[..., CheckpointCoordinatorResource]:
    """A coordinator whose files are all below the test's directory; settings may be given."""

    def make(**settings: Any) -> CheckpointCoordinatorResource:
        defaults: dict[str, Any] = {
            "storage": str(tmp_path / "storage"),
            "work_directory": str(tmp_path / "work"),
            "restart_attempts": 0,
            "lease_seconds": 5.0,
            "spark_config": SPARK,
        }
        return CheckpointCoordinatorResource(**{**defaults, **settings})

    return make


@pytest.fixture
def numbers_pipeline(tmp_path: Path) -> Pipeline:
    """numbers (two instances, five rows each) -> doubled -> total, with a sink."""

    @bounded_source(instances=["left", "right"])
    def numbers(context):
        """Numbers from zero."""
        return context.spark.range(5)

    @stage(instances=["left", "right"])
    def doubled(numbers):
        return numbers.selectExpr("id * 2 AS id")

    @stage(sink=ParquetSink(tmp_path / "total", mode="overwrite"))
    def total(doubled):
        return doubled

    return Pipeline("numbers", [total, doubled, numbers])


@pytest.fixture
def assets_of() -> Callable[[Pipeline], dg.AssetsDefinition]:
    """The assets of a pipeline, as a user declares them."""

    def make(pipeline: Pipeline, **options: Any) -> dg.AssetsDefinition:
        @pipeline_assets(pipeline=pipeline, **options)
        def pipeline_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
            yield from checkpoint_coordinator.run(pipeline, context=context)

        return pipeline_op

    return make


@pytest.fixture
def materialize() -> Callable[..., dg.ExecuteInProcessResult]:
    """Materializes assets with a coordinator; a failure is in the result."""

    def run(assets: dg.AssetsDefinition, coordinator: CheckpointCoordinatorResource, **options: Any) -> dg.ExecuteInProcessResult:
        resources = {"checkpoint_coordinator": coordinator}
        return dg.materialize([assets], resources=resources, raise_on_error=False, **options)

    return run


@pytest.fixture
def failure_of() -> Callable[[dg.ExecuteInProcessResult], Any]:
    """The failure's text and metadata, as the UI shows them."""

    def find(result: dg.ExecuteInProcessResult) -> Any:
        assert not result.success
        (failed,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
        data = failed.step_failure_data.user_failure_data
        assert data is not None, failed.step_failure_data.error
        return data

    return find
