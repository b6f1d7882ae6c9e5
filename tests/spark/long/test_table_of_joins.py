"""Every join of two streams, in every layout, whatever arrives in which micro-batch: its rows are those of the batch result."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.stream_programs.jobs import job_rows
from bench.stream_programs.program import Distinct, Join, Program, Several, Windows
from bench.stream_programs.queries import Refused, query_rows
from bench.stream_programs.random_programs import random_case
from bench.stream_programs.search import run_case
from tests.spark.joins_of_streams import ARRIVALS, BY_KEY, JOINS, ONCE, A, B, case_of, check

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


def sides(of: Program, other: Program) -> list[tuple[Program, bool]]:
    """Sides of a join, and whether they have rows that come when event time has passed them."""
    windows = Windows(of, "10 minutes", by_key=True, session=False, kept=True)
    return [
        (of, False),
        (Distinct(of, True), False),
        (windows, True),
        (Distinct(windows, False), True),
        (Join(of, other, "left", "key and range"), True),
    ]


@pytest.mark.parametrize("arrival", ["alternating", "both sides in one batch"])
def test_a_semi_join_is_exact_or_refused(spark: Any, tmp_path: Path, arrival: str) -> None:
    exact: list[Program] = []
    refused: list[Program] = []
    for ((left, passed), (right, passed_too)), on in product(
        product(sides(A, B), sides(B, A)), ("key and times", "key and range")
    ):
        (refused if passed and passed_too else exact).append(Join(left, right, "left_semi", on))

    def found(program: Program, name: str) -> None:
        (tmp_path / name).mkdir()
        case = case_of(program, ARRIVALS[arrival], "channels", channels=2)
        check(spark, case, tmp_path / name, query_rows(spark, case, tmp_path / name, "channels"))

    for number, program in enumerate(refused):
        with pytest.raises(Refused, match=r"left semi join .* both sides"):
            found(program, f"refused-{number}")
    for number in range(0, len(exact), 8):
        found(Several(tuple(exact[number : number + 8])), f"exact-{number}")


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
