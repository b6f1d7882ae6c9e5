"""A live stage with a sink, as Dagster sees it while it runs: each commit is a materialization, and none of them is its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest
from pyspark.sql import SparkSession

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    pipeline_assets,
    stage,
    unbounded_source,
)
from dagster_checkpoints.plugin.stage_assets import reports_end
from dagster_checkpoints.spark.job.events import JobEvent, SinkCommitted

pytestmark = pytest.mark.usefixtures("spark")
SQUARES = dg.AssetKey("squares")


def test_each_commit_of_a_live_stage_is_a_materialization_over_a_crash_and_a_drain(
    spark: SparkSession,
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    materialize: Callable[..., dg.ExecuteInProcessResult],
) -> None:
    def drop(name: str, numbers: range, *instances: str) -> None:
        for instance in instances:
            new = tmp_path / instance / f".{name}"
            new.parent.mkdir(exist_ok=True)
            new.write_text("".join(json.dumps({"id": number, "at": "2026-01-01 00:00:00"}) + "\n" for number in numbers))
            new.rename(new.with_name(f"{name}.json"))

    @unbounded_source(watermark=("at", "1 hour"), instances=["left", "right"])
    def live(context):  # type: ignore[no-untyped-def]
        return context.spark.readStream.schema("id long, at timestamp").json(str(tmp_path / context.instance))

    @stage(instances=["left", "right"], sink=ParquetSink(tmp_path / "squares"))
    def squares(live):  # type: ignore[no-untyped-def]
        return live.selectExpr("id * id AS id", "at")

    pipeline = Pipeline("live_squares", [live, squares])
    seen: list[SinkCommitted] = []

    def on_event(event: JobEvent) -> None:
        if not isinstance(event, SinkCommitted):
            return
        seen.append(event)
        newest = instance.get_latest_materialization_event(SQUARES)
        if newest is None:
            if event.rows == 10:
                raise RuntimeError("the run breaks off here")
            return
        assert event.last or shown(newest and newest.asset_materialization)["checkpoint"] == event.checkpoint_id
        drop("second", range(5, 9), "left", "right")
        statuses.append(CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance)).get_status(SQUARES))
        if not requested:  # the run goes on
            requested.append(dg.evaluate_automation_conditions(defs, instance, cursor=before.cursor).total_requested)

    @pipeline_assets(pipeline=pipeline)
    def squares_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):  # type: ignore[no-untyped-def]
        yield from checkpoint_coordinator.run(
            pipeline, context=context, on_event=on_event, drain_when=lambda rows: rows.get("squares", 0) >= 18
        )

    @dg.asset(deps=[SQUARES], automation_condition=dg.AutomationCondition.eager())
    def report() -> None: ...

    @dg.asset_check(asset=SQUARES, automation_condition=dg.AutomationCondition.eager())
    def positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    requested: list[int] = []
    statuses: list[StaleStatus] = []
    settings = {"checkpoint_coordinator": coordinator()}
    defs = dg.Definitions(assets=[squares_op, report], asset_checks=[positive], resources=settings)
    graph = defs.resolve_asset_graph()
    drop("first", range(5), "left", "right")
    with dg.DagsterInstance.ephemeral() as instance:
        # The first run commits ten rows, and fails before Dagster has seen them. The restore has nothing new to commit.
        failed = materialize(squares_op, coordinator(interval=0.5, materialize_every=None), instance=instance)
        assert not failed.success and seen[-1].rows == 10
        seen.clear()
        before = dg.evaluate_automation_conditions(defs, instance)
        assert before.total_requested == 0
        materialize(squares_op, coordinator(interval=0.5, materialize_every=0.0), raise_on_error=True, instance=instance)

        records = instance.fetch_materializations(SQUARES, limit=100, ascending=True).records
        events = [record.asset_materialization for record in records]
        live_ones, end = events[:-1], events[-1]
        assert [reports_end(event) for event in events if event] == [False] * len(live_ones) + [True]
        latest = instance.get_latest_data_version_record(SQUARES)
        assert latest is not None and (latest.event_log_entry.tags or {})["dagster/data_version"] == "job-1"

    assert requested == [2], "the asset downstream, and the check"
    assert set(statuses) == {StaleStatus.FRESH}, "its source is materialized when it ends, and has nothing newer until then"
    assert (seen[0].commit, seen[0].rows) == (None, 10)
    first, final = shown(live_ones[0]), shown(end)
    assert first["committed_rows"] == first["dagster/row_count"] == 10
    assert sum(shown(event)["committed_rows"] for event in events if "committed_rows" in shown(event)) == 18
    counts = [shown(event)["dagster/row_count"] for event in live_ones]
    assert counts == sorted(counts)
    assert final["dagster/row_count"] == final["rows"] == spark.read.parquet(str(tmp_path / "squares")).count() == 18
    assert [(column.name, column.type) for column in first["dagster/column_schema"].columns] == [
        ("id", "bigint"),
        ("at", "timestamp"),
    ]
    assert (first["state"], first["job"], first["dagster/uri"]) == ("running", 1, (tmp_path / "squares").as_uri())
    assert first["lag_seconds"] > 0 and first["watermark"] > 0


def shown(event: dg.AssetMaterialization | None) -> dict[str, Any]:
    assert event is not None
    return {name: value.value for name, value in event.metadata.items()}
