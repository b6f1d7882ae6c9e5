"""The benchmark runs, compares its results, and reports which targets hold; its numbers are not tested."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench import __main__ as bench_main
from bench import (
    checkpoints,
    computation,
    coordination,
    measures,
    planning,
    processes,
    savepoints,
    simulation_rate,
    throughput,
    variants,
)
from bench.environment import BenchFailed, Environment
from dagster_checkpoints.spark.snapshots.query_snapshots import prune
from simulation.faults import FAULTS
from simulation.injection import injected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_four_variants_give_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    environment = Environment(4_000, 1, tmp_path / "cache", tmp_path)
    environment.__dict__["spark"] = spark
    rows = computation.generate(spark, environment.cache, environment.rows, 2)
    expected = computation.result(spark, variants.one_query(environment, rows).output)
    assert len(expected) > 1_000
    for variant in (variants.three_queries, variants.chained, variants.unchained):
        throughput.compare(variant.__name__, computation.result(spark, variant(environment, rows).output), expected)
    with pytest.raises(BenchFailed, match="found"):
        throughput.compare("one row less", expected[1:], expected)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "measures.json"
    assert bench_main.main(["--only", "plan", "--json", str(file), "--cache", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert planning.PART in printed and "targets hold" in printed
    assert len(json.loads(file.read_text())) == len(planning.SIZES) + 1


def test_the_coordinators_checkpoints_complete_for_every_task() -> None:
    tasks, coordinator = coordination.running(vertices=3, instances=4)
    took = coordination.checkpoint(tasks, coordinator, 1)
    assert 0 < took.acknowledging < took.total
    assert [c.checkpoint_id for c in coordinator.completed] == [1]
    coordination.checkpoint(tasks, coordinator, 2)
    with pytest.raises(BenchFailed, match="not complete"):
        coordination.checkpoint(tasks[1:], coordinator, 3)


def test_simulated_pipelines_are_counted_and_what_breaks_one_is_an_error() -> None:
    assert simulation_rate.pipelines_per_second(0.3) > 0
    fault = next(fault for fault in FAULTS if fault.name == "no final checkpoint")
    with injected(fault), pytest.raises(BenchFailed, match="found by seed"):
        simulation_rate.pipelines_per_second(60.0)


def test_savepoints_of_a_state_are_taken_and_drained(spark: SparkSession, tmp_path: Path) -> None:
    environment = Environment(4_000, 2, tmp_path / "cache", tmp_path)
    environment.__dict__["spark"] = spark
    took = savepoints.by_state(environment, 300)
    assert len(took.savepoints) == len(took.copies) == 2
    assert took.bytes > 300 * savepoints.VALUE_BYTES, "the values are in the savepoint"


def test_a_missed_target_is_shown_as_missed() -> None:
    text = measures.table([measures.at_least("P", "slow", 0.5, "", 0.9), measures.below("P", "small", 1, "MB", 2)])
    assert "MISSED" in text and "holds" in text and "1 of 2 targets hold" in text


def test_the_made_up_state_directory_is_one_that_snapshots_accept(tmp_path: Path) -> None:
    batch = checkpoints.state_directory(tmp_path / "checkpoint", 400)
    checkpoints.pin_seconds(tmp_path / "checkpoint", batch, tmp_path / "pinned")
    state = [file for file in prune(tmp_path / "pinned", batch) if file.parts[0] == "state"]
    assert len(state) == 400


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_memory_and_processor_time_of_this_process_are_seen() -> None:
    assert os.getpid() in processes.tree(os.getpid())
    assert processes.pss_mb(os.getpid()) > 1
    assert processes.cpu_seconds(os.getpid()) > 0
