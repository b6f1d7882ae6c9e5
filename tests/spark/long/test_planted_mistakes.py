"""`check_pipeline` finds mistakes that show in a job only, leaves few rows of them, and finds nothing in sound pipelines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_checkpoints.testing import check_pipeline
from tests.spark.planted_mistakes import MISTAKES, PAGE, SOUND, examples, found_mistake


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
