"""The limits of sources that share micro-batches, against a model of their costs: seconds of a batch, and of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.execution.source_limits import ALONE, MAX_GROWTH, SourceLimits, SourceRead

BOUND = 2.0


@dataclass
class Source:
    """A source of files, given by their rows, or of single rows.

    Attributes:
        files: the rows of its files, which are not read yet, in order.
        arrives: the rows that arrive in each second, each a file of its own.
        row: the seconds that a row takes.
        bytes: the bytes of a row; limits are in bytes.
    """

    files: list[int] = field(default_factory=list)
    arrives: int = 0
    row: float = 0.001
    bytes: int = 100

    def read(self, limit: int | None) -> SourceRead:
        """As many files as the limit allows, and at least one: as Spark's file source does."""
        rows = count = 0
        for size in self.files:
            if count and limit is not None and (rows + size) * self.bytes > limit:
                break
            rows, count = rows + size, count + 1
        del self.files[:count]
        return SourceRead(rows, rows * self.bytes)


@dataclass
class Query:
    """Runs batches over sources, under limits that follow their durations.

    Attributes:
        fixed: seconds of a batch without rows.
        live: the unbounded sources.
        own: sources with a limit of the user's, which is not changed.
        chance: if given, a batch takes half of its time up to twice its time.
    """

    sources: Mapping[str, Source]
    fixed: float = 0.3
    live: Sequence[str] = ()
    own: Mapping[str, int] = field(default_factory=dict)
    chance: Random | None = None
    seconds: list[float] = field(default_factory=list)
    had: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limits = SourceLimits(
            {name: 1 for name in self.sources if name not in self.own}, self.live, BOUND if self.live else BOUND / ALONE
        )

    def run(self, batches: int) -> Query:
        for _ in range(batches):
            read = {name: source.read({**self.limits.limits, **self.own}[name]) for name, source in self.sources.items()}
            read = {name: had for name, had in read.items() if had.rows}
            seconds = self.fixed + sum(had.rows * self.sources[name].row for name, had in read.items())
            seconds *= self.chance.uniform(0.5, 2.0) if self.chance is not None else 1.0
            self.seconds.append(seconds)
            self.had.append({name: had.rows for name, had in read.items()})
            self.limits.processed(seconds, read)
            for source in self.sources.values():
                source.files += repeat(1, int(source.arrives * seconds))
        return self


def backfill(files: int = 5000, rows: int = 20) -> Source:
    return Source([rows] * files)


@pytest.mark.parametrize("fixed", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("rows", [1, 20, 400])
def test_batches_begin_with_one_file_and_come_to_the_bound_without_exceeding_it(fixed: float, rows: int) -> None:
    query = Query({"history": backfill(200_000 // rows, rows)}, fixed).run(12)
    assert query.had[0] == {"history": rows}
    assert all(seconds <= BOUND for seconds in query.seconds)
    assert all(seconds >= 0.6 * BOUND for seconds in query.seconds[7:])


def test_a_file_that_takes_longer_than_the_bound_is_a_batch_of_its_own() -> None:
    """Except for one with two files: whether the others were long because of their rows is not known without it."""
    query = Query({"history": backfill(20, rows=5000)}).run(19)
    assert [had["history"] for had in query.had] == [5000] * 3 + [10_000] + [5000] * 15


def test_a_slower_program_shrinks_its_batches_at_once_and_a_hiccup_is_made_good() -> None:
    history = backfill(100_000)
    query = Query({"history": history}).run(12)
    history.row *= 20
    query.run(1)
    assert query.seconds[-1] > 10 * BOUND
    query.run(3)
    assert max(query.seconds[-3:]) <= 1.1 * BOUND
    query.fixed = 60.0  # the machine stood still
    query.run(1)
    query.fixed = 0.3
    assert max(query.run(4).seconds[-4:]) <= BOUND and query.seconds[-1] >= 0.75 * BOUND


@pytest.mark.parametrize("fixed", [3.0, 30.0])
def test_the_bound_gives_way_if_batches_with_few_rows_take_half_of_it(fixed: float) -> None:
    """Otherwise a batch would be one file, and take nearly as long."""
    query = Query({"history": backfill(1_000_000)}, fixed).run(30)
    assert all(1.5 * fixed <= seconds <= 2.5 * fixed for seconds in query.seconds[-10:])


def test_a_time_without_rows_that_grows_beyond_the_bound_is_noticed() -> None:
    query = Query({"history": backfill(1_000_000)}).run(12)
    query.fixed = 6.0
    query.run(40)
    assert sum(had["history"] for had in query.had[-10:]) >= 10 * 0.5 * query.fixed / 0.001


def test_two_backfills_share_a_batch_by_the_size_of_their_files_and_the_one_that_is_left_takes_all() -> None:
    query = Query({"large": backfill(1000, rows=60), "small": backfill(400, rows=20)}).run(12)
    assert all(seconds <= BOUND for seconds in query.seconds)
    assert query.had[-1]["large"] == pytest.approx(3 * query.had[-1]["small"], rel=0.2)
    query.run(30)
    assert "small" not in query.had[-1] and query.seconds[-1] >= 0.75 * BOUND


@pytest.mark.parametrize("arrives", [10, 300])
def test_a_feed_is_read_as_it_arrives_beside_a_backfill(arrives: int) -> None:
    live = Source(arrives=arrives)
    query = Query({"history": backfill(100_000), "live": live}, live=["live"]).run(40)
    assert all(seconds <= 1.2 * BOUND for seconds in query.seconds)
    assert all(had["history"] >= 20 for had in query.had)
    assert len(live.files) <= 2 * arrives * BOUND  # no more waits than arrives in two batches


def test_a_feed_that_is_far_behind_comes_first_and_leaves_the_backfill_an_eighth() -> None:
    query = Query({"history": backfill(100_000), "live": Source([10] * 100_000)}, live=["live"]).run(20)
    assert all(seconds <= 1.1 * BOUND for seconds in query.seconds)
    for had in query.had[-5:]:
        assert 0.05 <= had["history"] / had["live"] <= 0.2


def test_a_backfill_shrinks_beside_a_feed_with_a_limit_of_its_own() -> None:
    query = Query({"history": backfill(100_000), "live": Source([10] * 100_000)}, live=["live"], own={"live": 100_000}).run(20)
    assert {had["live"] for had in query.had} == {1000}
    assert all(0.75 * BOUND <= seconds <= 1.1 * BOUND for seconds in query.seconds[-5:])


def test_a_limit_that_is_not_reached_does_not_grow() -> None:
    """A feed with one short file in each batch, and then a thousand of them."""
    live = Source(arrives=0)
    query = Query({"live": live}, live=["live"])
    for _ in range(50):
        live.files.append(20)
        query.run(1)
    live.files += [20] * 1000
    assert query.run(1).had[-1]["live"] <= 20 * 2 * MAX_GROWTH
    assert max(query.run(20).seconds) <= BOUND


@pytest.mark.parametrize("fixed", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(50))
def test_on_a_busy_machine_most_batches_are_near_the_bound(seed: int, fixed: float) -> None:
    query = Query({"history": backfill(20_000), "live": Source(arrives=5)}, fixed, ["live"], chance=Random(seed)).run(40)
    assert 0.4 * BOUND <= median(query.seconds[8:]) <= 1.3 * BOUND
    assert max(query.seconds) <= 2 * 4 * BOUND  # a wrong estimate, after a batch in half and before one in twice its time


SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=60)


@given(
    st.dictionaries(st.sampled_from("abc"), SIZES, min_size=1),
    st.sets(st.sampled_from("abc")),
    st.floats(0.001, 10.0),
    st.floats(0.00001, 0.01),
)
def test_whatever_files_cost(files: Mapping[str, list[int]], live: set[str], fixed: float, row: float) -> None:
    """No limit is below 1, every source ends, and after a long batch of one source its limit allows twice as much at most."""
    query = Query({name: Source(list(sizes), row=row) for name, sizes in files.items()}, fixed, [*live])
    while any(source.files for source in query.sources.values()):
        before = dict(query.limits.limits)
        query.run(1)
        assert set(query.limits.limits) == set(files)
        for name, limit in query.limits.limits.items():
            amount = 100 * query.had[-1].get(name, 0)
            assert 1 <= limit <= max(before[name], MAX_GROWTH * amount)
            if query.seconds[-1] > max(BOUND, 4 * fixed) and list(query.had[-1]) == [name] and 2 * amount >= before[name]:
                assert limit <= 2 * amount
    assert sum(sum(had.values()) for had in query.had) == sum(map(sum, files.values()))
