"""Every join of two streams, in every layout, whatever arrives in which micro-batch: its rows are those of the batch result."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.stream_programs.jobs import job_rows
from bench.stream_programs.program import Several
from bench.stream_programs.queries import query_rows
from bench.stream_programs.random_programs import random_case
from bench.stream_programs.search import run_case
from tests.spark.joins_of_streams import ARRIVALS, BY_KEY, JOINS, ONCE, case_of, check

pytestmark = pytest.mark.usefixtures("settings_of_the_session")


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_every_join_behind_channels(spark: Any, tmp_path: Path, arrival: str) -> None:
    """All joins at once in one query, whose micro-batches have rows of both inputs or of one."""
    case = case_of(Several(tuple(JOINS.values())), ARRIVALS[arrival], "channels", channels=2)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "channels"))


@pytest.mark.parametrize(("join", "arrival"), list(product(ONCE, ARRIVALS)))
def test_a_join_of_fused_sources_one_of_which_ends(spark: Any, tmp_path: Path, join: str, arrival: str) -> None:
    """After the second micro-batch the query starts again, and an empty stream stands in for an input that has ended."""
    case = case_of(ONCE[join], ARRIVALS[arrival], "fused", restarts=frozenset({1}), ends_early=True)
    check(spark, case, tmp_path, query_rows(spark, case, tmp_path, "fused"))


@pytest.mark.parametrize("join", BY_KEY)
def test_a_join_in_a_job_of_two_instances(spark: Any, tmp_path: Path, join: str) -> None:
    case = case_of(BY_KEY[join], ARRIVALS["alternating"], "job: two instances of each stage")
    check(spark, case, tmp_path, job_rows(spark, case, tmp_path))


def test_random_programs_in_whole_jobs_too_are_equal_to_their_batch_results(spark: Any, chance: Any) -> None:
    first = chance.randrange(10**9)
    for seed in range(first, first + 12):
        case = random_case(seed)
        outcome = run_case(spark, case)
        assert not outcome.wrong, f"{outcome.kind}: {outcome.text}\n{case}"
