"""The events from a pipeline's launch to its first checkpoint, on the real runtime."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import functions as F

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    StageInput,
    bounded_source,
    instance_assets,
    pipeline_assets,
    stage,
    unbounded_source,
)

pytestmark = pytest.mark.usefixtures("spark")
SECONDS = 120.0
AN_HOUR = 3600.0


@pytest.fixture
def prices(tmp_path: Path) -> Pipeline:
    """A live feed that is joined with a small table, and counted."""
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "first.json").write_text('{"id": 1}\n{"id": 2}\n')

    @bounded_source
    def names(context):
        return context.spark.range(5).withColumn("name", F.lit("x"))

    @unbounded_source(watermark=("seen", "1 hour"))
    def live(context):
        frame = context.spark.readStream.schema("id long").json(str(tmp_path / "live"))
        return frame.withColumn("seen", F.timestamp_seconds("id"))

    @stage(inputs={"names": StageInput(mode="static")}, sink=ParquetSink(tmp_path / "named"))
    def named(live, names):
        return live.join(names, "id")

    return Pipeline("prices", [names, live, named])


def test_each_step_is_logged_and_observations_begin_before_the_first_checkpoint(
    tmp_path: Path, coordinator: Callable[..., CheckpointCoordinatorResource], prices: Pipeline
) -> None:
    until = time.monotonic() + SECONDS
    observed: list[dict[str, Any]] = []

    @pipeline_assets(pipeline=prices)
    def prices_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
        def seen(rows: Any) -> bool:
            records = context.instance.fetch_observations(dg.AssetKey("named"), limit=1).records
            observed[:] = [
                {name: value.value for name, value in record.asset_observation.metadata.items()}
                for record in records
                if record.asset_observation is not None
            ]
            return any(shown.get("rows") for shown in observed) or time.monotonic() > until

        yield from checkpoint_coordinator.run(prices, context=context, drain_when=seen)

    settings = coordinator(interval=AN_HOUR)  # no periodic checkpoint happens in this test
    with dg.DagsterInstance.ephemeral() as instance:
        ran = dg.materialize([prices_op], resources={"checkpoint_coordinator": settings}, instance=instance)
        records = instance.all_logs(ran.run_id)
        checkpoints = instance.fetch_observations(dg.AssetKey(["checkpoints", "prices"]), limit=10).records
    assert [(shown["rows"], shown["state"]) for shown in observed] == [(2, "running")], (
        "reported before any checkpoint had completed"
    )
    assert checkpoints[0].asset_observation is not None
    report = Path(str(checkpoints[0].asset_observation.metadata["report"].value))
    assert report.is_file() and "<title>prices · checkpoints</title>" in report.read_text(encoding="utf-8")

    lines = [entry.user_message for entry in records if not entry.is_dagster_event]
    expected = [
        f"This run owns pipeline 'prices' in file://{settings.storage}/prices (epoch 1)",
        "A new start: no checkpoint is restored.",
        "Spark is starting.",
        "Spark 4",
        "Building the plans of 3 stages: names, live, named.",
        "Job 1, attempt 1: plans built in ",
        "Checkpoint 1 completed in ",
    ]
    assert [line for line in lines if line.startswith(tuple(expected))] == [
        next(line for line in lines if line.startswith(begin)) for begin in expected
    ], "each once, in this order"

    def position(begin: str) -> int:
        return next(number for number, line in enumerate(lines) if line.startswith(begin))

    assert "3 queries will start: names; live; named; the first checkpoint is due 3600 s after that." in lines[position("Job 1")]
    started = position("Job 1")
    completed = position("Checkpoint 1 completed")
    starts = [line.split(":")[1].split(",")[0].strip() for line in lines[started:completed] if " has started: " in line]
    assert sorted(starts) == ["live", "named", "names"]
    assert [line.split(" ")[1] for line in lines[started:completed] if line.startswith("Query ") and " of 3 " in line] == [
        "1",
        "2",
        "3",
    ]
    waits = position("Query named waits until its static inputs have been read: names.")
    for stage_name, rows in (("names", 5), ("live", 2), ("named", 2)):
        first = position(f"First rows of query {stage_name}: {rows} rows from {stage_name} in ")
        assert started < first < completed
        assert stage_name != "named" or waits < first
    assert len(checkpoints) == 1, "one asset shows the facts of the checkpoint"


def test_the_checkpoints_are_an_asset_behind_the_stages(
    numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    assets = assets_of(numbers_pipeline, key_prefix="demo", group_name="small")
    defs = dg.Definitions(
        assets=[assets, *instance_assets(assets)], resources={"checkpoint_coordinator": CheckpointCoordinatorResource()}
    )
    node = defs.resolve_asset_graph().get(dg.AssetKey(["checkpoints", "numbers"]))
    assert node.is_external and node.group_name == "small"
    assert node.parent_keys == {dg.AssetKey(["demo", "total"])}, "the stages that no other stage reads"
    assert "checkpoints of pipeline numbers" in str(node.description)
