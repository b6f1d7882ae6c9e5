"""Pipelines materialized by Dagster in process, with real resources: assets, metadata, and rows that moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    Stage,
    bounded_source,
    pipeline_assets,
)
from dagster_checkpoints.plugin.run_config import PipelineRunConfig
from dagster_checkpoints.plugin.stage_assets import REFUSED, instance_assets
from dagster_checkpoints.spark.job.events import JobEvent, JobRestarting

pytestmark = pytest.mark.usefixtures("spark")


def ids(spark: SparkSession, path: Path) -> list[int]:
    return sorted(row.id for row in spark.read.parquet(str(path)).collect())


def test_a_finished_pipeline_is_materialized_and_a_second_run_is_a_new_start(
    spark: SparkSession,
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    numbers_pipeline: Pipeline,
    assets_of: Callable[..., dg.AssetsDefinition],
    materialize: Callable[..., dg.ExecuteInProcessResult],
) -> None:
    assets = assets_of(numbers_pipeline, key_prefix="demo", group_name="small")
    with dg.DagsterInstance.ephemeral() as instance:
        first = materialize(assets, coordinator(), raise_on_error=True, instance=instance)
        made = [m for m in first.get_asset_materialization_events() if m.materialization.partition is None]
        assert [e.asset_key.path for e in made] == [["demo", "numbers"], ["demo", "doubled"], ["demo", "total"]]
        total = made[-1].materialization.metadata
        assert total["rows"].value == 10
        assert total["job"].value == 1
        assert total["path"].value == str(tmp_path / "total")
        assert ids(spark, tmp_path / "total") == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]

        instances = dg.AssetKey(["demo", "numbers_instances"])
        assert instance.get_materialized_partitions(instances) == {"left", "right"}
        observed = instance.fetch_observations(dg.AssetKey(["demo", "total"]), limit=1).records[0].asset_observation
        assert observed is not None and observed.metadata["state"].value == "finished"

        second = materialize(assets, coordinator(), raise_on_error=True, instance=instance)
        last = second.get_asset_materialization_events()[-1].materialization
        assert last.metadata["job"].value == 2
    assert ids(spark, tmp_path / "total") == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]


def test_a_stage_that_raises_fails_the_run_and_names_the_users_line(
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    assets_of: Callable[..., dg.AssetsDefinition],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    failure_of: Callable[[dg.ExecuteInProcessResult], Any],
) -> None:
    @bounded_source
    def numbers(context):
        return context.spark.range(5)

    class Broken(Stage):
        def transform(self, context, numbers):
            return numbers

        def process_batch(self, batch, batch_id):
            raise ValueError("no such number")  # the user's own line

    pipeline = Pipeline("broken_numbers", [numbers, Broken("broken", sink=ParquetSink(tmp_path / "out"))])
    result = materialize(assets_of(pipeline), coordinator(restart_attempts=1, restart_delay=0.0))
    failure = failure_of(result)
    assert "Stage 'broken' (instance '0')" in failure.description
    assert "no such number" in failure.description
    assert f"{Path(__file__).name}:" in failure.description
    assert "restarted 1 times" in failure.description
    assert failure.metadata["stage"].value == "broken"


@pytest.mark.parametrize(
    ("settings", "failures", "delays", "gives_up"),
    [
        (
            {"restart_strategy": "exponential_delay", "restart_delay_multiplier": 3.0, "restart_delay_maximum": 0.5},
            3,
            [0.1, pytest.approx(0.3), 0.5],
            "",
        ),
        ({"restart_strategy": "exponential_delay", "restart_attempts": None}, 1, [0.1], ""),
        ({"restart_strategy": "failure_rate", "restart_attempts": 1}, 2, [0.1], "2 failures within 3600.0 s (failure rate, "),
        ({"restart_strategy": "failure_rate", "restart_attempts": 1, "restart_interval": 0.2}, 2, [0.1, 0.1], ""),
        ({"restart_strategy": "failure_rate", "restart_attempts": 0}, 1, [], "the restart strategy is none"),
    ],
)
def test_restart_strategies(
    spark: SparkSession,
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    failure_of: Callable[[dg.ExecuteInProcessResult], Any],
    settings: dict[str, Any],
    failures: int,
    delays: list[float],
    gives_up: str,
) -> None:
    """A stage fails a given number of times; several checkpoints at a time give the same rows as one."""
    left = [OSError("the disk is away")] * failures
    events: list[JobEvent] = []

    @bounded_source
    def numbers(context):
        return context.spark.range(5)

    class Fragile(Stage):
        def transform(self, context, numbers):
            return numbers

        def process_batch(self, batch, batch_id):
            if left:
                raise left.pop()
            return batch

    pipeline = Pipeline("fragile_numbers", [numbers, Fragile("fragile", sink=ParquetSink(tmp_path / "out"))])

    @pipeline_assets(pipeline=pipeline)
    def fragile_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
        yield from checkpoint_coordinator.run(pipeline, context=context, on_event=events.append)

    made = coordinator(
        **{"restart_attempts": 3, "restart_delay": 0.1, "max_concurrent": 2, "initial_delay": 0.0, "interval": 0.5, **settings}
    )
    result = materialize(fragile_assets, made)
    assert [event.delay for event in events if isinstance(event, JobRestarting)] == delays
    if gives_up:
        assert gives_up in failure_of(result).description
    else:
        assert result.success
        assert ids(spark, tmp_path / "out") == [0, 1, 2, 3, 4]


def test_an_unfinished_stage_must_be_selected(
    coordinator: Callable[..., CheckpointCoordinatorResource],
    numbers_pipeline: Pipeline,
    assets_of: Callable[..., dg.AssetsDefinition],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    failure_of: Callable[[dg.ExecuteInProcessResult], Any],
) -> None:
    """The run is not one of the pipeline, so that the recovery sensor does not repeat it in place of one that failed before."""
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(assets_of(numbers_pipeline), coordinator(), selection=["total"], instance=instance)
        failure, run = failure_of(result), instance.get_run_by_id(result.run_id)
    assert "'numbers', 'doubled' were not selected" in failure.description
    assert "A backfill or an automation condition may have launched only some" in failure.description
    assert failure.metadata["error"].value == "SelectionError"
    assert run is not None and run.tags[REFUSED] == "SelectionError"


def test_a_source_reads_the_metadata_of_the_asset_that_it_depends_on(
    spark: SparkSession,
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    assets_of: Callable[..., dg.AssetsDefinition],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    failure_of: Callable[[dg.ExecuteInProcessResult], Any],
) -> None:
    @dg.asset(key=["raw", "table"])
    def table():
        return dg.MaterializeResult(metadata={"last": 7}, data_version=dg.DataVersion("v1"))

    @bounded_source(sink=ParquetSink(tmp_path / "out"))
    def numbers(context):
        found = context.asset("raw/table")
        assert (found.data_version, found.run_id) == ("v1", made.run_id) and found.materialized_at > 0
        return context.spark.range(found.metadata["last"])

    assets = assets_of(Pipeline("dependent_numbers", [numbers]), deps={"numbers": [table]})
    (spec,) = assets.specs
    assert [dep.asset_key for dep in spec.deps] == [table.key]
    with dg.DagsterInstance.ephemeral() as instance:
        failure = failure_of(materialize(assets, coordinator(), instance=instance))
        assert "expected a materialization of asset 'raw/table', found materializations of no asset" in failure.description
        dg.materialize([table], instance=instance)
        made = dg.materialize([table], instance=instance)
        materialize(assets, coordinator(), raise_on_error=True, instance=instance)
    assert ids(spark, tmp_path / "out") == [0, 1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_does_not_exist_cannot_be_restored(
    coordinator: Callable[..., CheckpointCoordinatorResource],
    numbers_pipeline: Pipeline,
    assets_of: Callable[..., dg.AssetsDefinition],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    failure_of: Callable[[dg.ExecuteInProcessResult], Any],
) -> None:
    config = dg.RunConfig(ops={"pipeline_op": PipelineRunConfig(restore_from="42")})
    failure = failure_of(materialize(assets_of(numbers_pipeline), coordinator(), run_config=config))
    assert "'42'" in failure.description


def test_asset_metadata_describes_the_stages(numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> None:
    assets = assets_of(numbers_pipeline, group_name="small", deps={"numbers": ["outside"]})
    specs = {spec.key.path[-1]: spec for spec in assets.specs}
    assert set(specs) == {"numbers", "doubled", "total"}
    assert all(spec.skippable and spec.partitions_def is None and spec.group_name == "small" for spec in specs.values())
    assert {dep.asset_key.path[-1] for dep in specs["total"].deps} == {"doubled"}
    assert {dep.asset_key.path[-1] for dep in specs["numbers"].deps} == {"outside"}
    assert (specs["numbers"].kinds, specs["total"].kinds) == ({"spark"}, {"spark", "parquet"})
    assert specs["numbers"].tags["dagster_checkpoints/bounded"] == "true"
    assert specs["numbers"].description == "Numbers from zero."
    assert "ParquetSink" in specs["total"].metadata["sink"]
    (reference,) = specs["total"].metadata["dagster/code_references"].code_references
    assert Path(reference.file_path).name == "conftest.py" and reference.line_number > 1

    beside = {tuple(spec.key.path): spec for spec in instance_assets(assets)}
    assert set(beside) == {("numbers_instances",), ("doubled_instances",), ("checkpoints", "numbers")}
    assert beside["checkpoints", "numbers"].kinds == {"checkpoint"}
    partitions = beside["numbers_instances",].partitions_def
    assert partitions is not None and partitions.get_partition_keys() == ["left", "right"]
    dg.Definitions.validate_loadable(
        dg.Definitions(
            assets=[assets, *instance_assets(assets)],
            resources={"checkpoint_coordinator": CheckpointCoordinatorResource()},
        )
    )
