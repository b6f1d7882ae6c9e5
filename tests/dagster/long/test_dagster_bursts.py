"""Bursts in Dagster: a job whose runs read what is there, suspend, and go on from one another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    build_pipeline_defs,
    stage,
    unbounded_source,
)


def test_runs_in_bursts_go_on_from_one_another_and_leave_one_savepoint(
    tmp_path: Path, coordinator: Callable[..., CheckpointCoordinatorResource]
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()

    @unbounded_source
    def source(context: Any) -> Any:
        return context.spark.readStream.schema("id long").parquet(str(orders))

    @stage(sink=ParquetSink(tmp_path / "copies"))
    def copies(source: Any) -> Any:
        return source

    pipeline = Pipeline("shop", [source, copies])
    defs = build_pipeline_defs(pipeline, coordinator=coordinator(interval=None), burst_schedule="0 * * * *")
    job = defs.resolve_job_def("shop_job")
    config = {"ops": {"shop_assets": {"config": {"until": "caught_up"}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        for burst in range(3):
            if burst < 2:  # the last one finds nothing new
                pq.write_table(pa.table({"id": range(5 * burst, 5 * burst + 5)}), orders / f"{burst}.parquet")
            done = job.execute_in_process(run_config=config, instance=instance)
            run = instance.get_run_by_id(done.run_id)
            assert run is not None and "dagster/max_runtime" not in run.tags
            table = pq.read_table(tmp_path / "copies", columns=["id"])
            assert sorted(table["id"].to_pylist()) == list(range(min(5 * burst + 5, 10)))
            materialized = [e.asset_key.to_user_string() for e in done.get_asset_materialization_events() if e.asset_key]
            assert materialized == (["copies"] if burst < 2 else []), "downstream assets see that there are new rows"
            assert instance.get_dynamic_partitions("savepoints_shop") == []
            lines = [entry.user_message for entry in instance.all_logs(done.run_id)]
            assert any("all sources have read what was there; the next run deletes it" in line for line in lines)
    savepoints = list((tmp_path / "storage" / "shop" / "savepoints").iterdir())
    assert len(savepoints) == 1, savepoints
