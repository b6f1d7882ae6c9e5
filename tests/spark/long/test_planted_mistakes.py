"""`check_pipeline` finds mistakes that take long to find, leaves few rows of them, and finds nothing in sound pipelines."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, StageInput, stage
from dagster_checkpoints.testing import check_pipeline, replaced_pipeline
from tests.spark.planted_mistakes import (
    MISTAKES,
    NOWHERE,
    PAGE,
    SOUND,
    examples,
    found_mistake,
    hourly,
    pipeline,
    some_rows,
)


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if not mistake.quick])
def test_a_mistake_is_found_and_made_small(name: str, spark: SparkSession, tmp_path: Path) -> None:
    began = time.monotonic()
    error = found_mistake(name, spark, tmp_path)
    print(f"\n{name}: {time.monotonic() - began:.1f} s\n{error}")


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_pipeline(name: str, spark: SparkSession) -> None:
    sound = SOUND[name]
    began = time.monotonic()
    checked = check_pipeline(sound.make(), sound.rows(), spark=spark, histories=7, seed=1)
    print(f"\n{name}: {time.monotonic() - began:.1f} s, {checked}")
    assert checked.reference == sound.reference
    assert all(checked.rows.values())
    assert any(run.crashes for history in checked.histories for run in history.runs)
    others = any(run.instances for history in checked.histories for run in history.runs)
    assert others == (name == "one row of each key")


@pytest.mark.parametrize("name", ["test_dear_orders", "test_sums_do_not_depend_on_how_rows_come"])
def test_the_tests_on_its_page(name: str, spark: SparkSession) -> None:
    examples(PAGE)[name]()


def test_a_job_that_is_cancelled_too_late_does_not_read_its_rows_again(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaced_pipeline._AtFirstBatches, "_interrupt", lambda interrupt: None)
    checked = check_pipeline(pipeline(hourly), {"orders": some_rows()}, spark=spark, histories=4)
    assert [run.crashes for run in checked.histories[-1].runs] == [False, True, False]


def test_other_instances_that_a_restore_refuses_are_not_tried(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    """The two instances share their rows by no column, so that no other number of them can take over what they keep."""

    @stage(instances=("a", "b"))
    def once(orders: Any) -> Any:
        return orders.dropDuplicates(["shop", "at"])

    @stage(sink=ParquetSink(NOWHERE), inputs={"once": StageInput()})
    def sales(once: Any) -> Any:
        return once.groupBy(F.window("at", "1 hour"), "shop").agg(F.sum("price").alias("sum"))

    with caplog.at_level(logging.WARNING, "dagster_checkpoints"):
        checked = check_pipeline(
            pipeline(once, sales), {"orders": some_rows()}, spark=spark, histories=5, allow=["no column routes its rows"]
        )
    assert "other instances are not tried, since a restore refuses them" in caplog.text
    assert len(checked.histories) == 7 and not any(run.instances for history in checked.histories for run in history.runs)


def test_other_instances_are_tried_where_they_divide_a_query(spark: SparkSession) -> None:
    """With two instances the first stage has a query of its own, which begins with its part of the state of all stages' query."""

    @stage(inputs={"orders": StageInput(key="shop")})
    def once(orders: Any) -> Any:
        return orders.dropDuplicates(["shop", "at"])

    @stage(sink=ParquetSink(NOWHERE), inputs={"once": StageInput()})
    def sales(once: Any) -> Any:
        return once.groupBy(F.window("at", "1 hour"), "shop").agg(F.sum("price").alias("sum"))

    checked = check_pipeline(pipeline(once, sales), {"orders": some_rows()}, spark=spark, histories=5)
    assert [dict(run.instances) for run in checked.histories[-1].runs] == [{}, {"once": ("i0", "i1")}]
