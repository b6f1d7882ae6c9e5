"""Checks of a live stage's commits, as Dagster sees them while it runs; no reader sees rows that a blocking check refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    CommitCheckResult,
    ParquetSink,
    Pipeline,
    Quarantine,
    bounded_source,
    commit_check,
    pipeline_assets,
    stage,
    unbounded_source,
)
from dagster_checkpoints.control.status import read_status
from dagster_checkpoints.spark.job.events import CommitRefused, JobEvent, SinkCommitted
from dagster_checkpoints.storage import CheckpointStorage, open_store

pytestmark = pytest.mark.usefixtures("spark")
SALES = dg.AssetKey("sales")
POSITIVE, SMALL = dg.AssetCheckKey(SALES, "positive"), dg.AssetCheckKey(SALES, "small")


def test_rows_are_checked_before_they_are_committed(
    spark: SparkSession,
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    materialize: Callable[..., dg.ExecuteInProcessResult],
) -> None:
    incoming, table, allowed = tmp_path / "incoming", tmp_path / "sales", tmp_path / "allowed"
    incoming.mkdir()

    def drop(name: str, *amounts: int) -> None:
        new = incoming / f".{name}"
        new.write_text("".join(json.dumps({"amount": amount}) + "\n" for amount in amounts))
        new.rename(incoming / f"{name}.json")

    def visible() -> list[int]:
        return sorted(row.amount for row in spark.read.schema("amount long").parquet(str(table)).collect())

    @commit_check(blocking=True)
    def positive(rows: DataFrame) -> CommitCheckResult:
        """Amounts are above zero."""
        wrong = rows.filter("amount <= 0").count()
        return CommitCheckResult(wrong == 0 or allowed.exists(), f"{wrong} of {rows.count()} are not", {"wrong": wrong})

    def small(rows: DataFrame) -> bool:
        return rows.filter("amount > 1000").isEmpty()

    @unbounded_source(sink=ParquetSink(table, at_new_start="keep"), checks=[positive, small])
    def sales(context):  # type: ignore[no-untyped-def]
        return context.spark.readStream.schema("amount long").json(str(incoming))

    pipeline = Pipeline("checked_sales", [sales])
    commits: list[SinkCommitted] = []
    refusals: list[CommitRefused] = []
    committed = [1, 2000]

    def on_event(event: JobEvent) -> None:
        if isinstance(event, SinkCommitted):
            commits.append(event)
            drop("second", -3, 5)
        if isinstance(event, CommitRefused):
            refusals.append(event)
            if not allowed.exists():  # a later refusal may be reported after the commit
                assert visible() == committed, "no reader sees rows that a blocking check has refused"
            if len(refusals) == 2:
                allowed.touch()

    @pipeline_assets(pipeline=pipeline)
    def sales_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):  # type: ignore[no-untyped-def]
        drain = lambda rows: len(commits) > 1  # noqa: E731
        yield from checkpoint_coordinator.run(pipeline, context=context, on_event=on_event, drain_when=drain)

    specs = {spec.key: spec for spec in sales_op.check_specs}
    assert (specs[POSITIVE].blocking, specs[SMALL].blocking) == (True, False)
    assert specs[POSITIVE].description == "Amounts are above zero."

    drop("first", 1, 2000)
    settings = {"interval": 0.5, "materialize_every": 0.0, "sample_rows": 1}
    with dg.DagsterInstance.ephemeral() as instance:
        patient = coordinator(**settings, tolerable_failed_checkpoints=100)
        result = materialize(sales_op, patient, raise_on_error=True, instance=instance)
        evaluations = [event for event in result.all_events if event.event_type_value == "ASSET_CHECK_EVALUATION"]
        shown = [event.asset_check_evaluation_data for event in evaluations]
        statuses = instance.event_log_storage.get_latest_asset_check_execution_by_key([POSITIVE, SMALL])

        committed = [-3, 1, 5, 2000]
        assert visible() == committed
        of_positive = [one for one in shown if one.asset_check_key == POSITIVE]
        assert [one.passed for one in of_positive[:2]] == [True, False] and of_positive[-1].passed
        assert of_positive[1].description == "1 of 2 are not" and of_positive[1].metadata["wrong"].value == 1
        assert of_positive[1].severity == dg.AssetCheckSeverity.ERROR
        of_small = [one for one in shown if one.asset_check_key == SMALL]
        assert not of_small[0].passed and of_small[0].severity == dg.AssetCheckSeverity.WARN
        assert {key: record.status.value for key, record in statuses.items()} == {POSITIVE: "SUCCEEDED", SMALL: "SUCCEEDED"}
        first = instance.fetch_materializations(SALES, limit=100, ascending=True).records[0].asset_materialization
        assert first is not None and sample(first) in ([{"amount": 1}], [{"amount": 2000}])

        # The next job reads all files again. Its last checkpoint is declined, too: the run fails, and says why.
        commits.clear()
        allowed.unlink()
        drop("third", -9)
        failed = materialize(
            sales_op, coordinator(**settings, tolerable_failed_checkpoints=0, restart_attempts=0), instance=instance
        )
        assert not failed.success
        text = str(failed.failure_data_for_node("sales_op").error)  # type: ignore[union-attr]
        assert "do not pass blocking checks (positive: 2 of 5 are not)" in text
        newest = instance.event_log_storage.get_latest_asset_check_execution_by_key([POSITIVE])[POSITIVE]
        assert newest.status.value == "FAILED"
    assert visible() == committed


def sample(materialization: dg.AssetMaterialization) -> list[dict[str, Any]]:
    value = materialization.metadata["sample"]
    assert isinstance(value, dg.TableMetadataValue)
    return [dict(record.data) for record in value.records]


def test_refused_rows_have_an_asset_and_their_number_is_a_check(
    tmp_path: Path,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    materialize: Callable[..., dg.ExecuteInProcessResult],
) -> None:
    quarantine = Quarantine({"is_even": "id % 2 = 0"}, sink=ParquetSink(tmp_path / "odd"), most_share=0.8)

    @bounded_source(sink=ParquetSink(tmp_path / "even"), quarantine=quarantine, instances=["left", "right"])
    def numbers(context):  # type: ignore[no-untyped-def]
        return context.spark.range(5)

    @stage(sink=ParquetSink(tmp_path / "total"))
    def total(numbers):  # type: ignore[no-untyped-def]
        return numbers

    pipeline = Pipeline("checked_numbers", [numbers, total])

    @pipeline_assets(pipeline=pipeline, key_prefix="shop")
    def numbers_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):  # type: ignore[no-untyped-def]
        yield from checkpoint_coordinator.run(pipeline, context=context)

    counted = dg.AssetCheckKey(dg.AssetKey(["shop", "numbers"]), "quarantine")
    odd, even = dg.AssetKey(["shop", "numbers_refused"]), dg.AssetKey(["shop", "numbers"])
    assert [(spec.key, spec.blocking) for spec in numbers_op.check_specs] == [(counted, True)]
    assert {key: {dep.asset_key for dep in spec.deps} for key, spec in numbers_op.specs_by_key.items()}[odd] == {even}
    with dg.DagsterInstance.ephemeral() as instance:
        materialize(numbers_op, coordinator(), raise_on_error=True, instance=instance)
        shown = {key: instance.get_latest_materialization_event(key) for key in (odd, even)}
        rows = {key: event.asset_materialization.metadata["rows"].value for key, event in shown.items()}  # type: ignore[union-attr]
        assert rows == {odd: 4, even: 6}
        record = instance.event_log_storage.get_latest_asset_check_execution_by_key([counted])[counted]
        assert record.status.value == "SUCCEEDED"
        found = record.event.dagster_event.asset_check_evaluation_data.metadata  # type: ignore[union-attr]
        assert {label: value.value for label, value in found.items() if "rows" in label} == {
            f"{instance}: {label}": number
            for instance in ("left", "right")
            for label, number in (("refused_rows", 2), ("rows", 5))
        }
    status = read_status(CheckpointStorage(open_store(str(tmp_path / "storage")), pipeline.name))
    assert status is not None
    assert {each.name: each.rows for each in status.stages} == {"numbers": 6, "numbers_refused": 4, "total": 6}
