"""Histories of `check_pipeline`: no row is lost, repeated or late in them, and what is left of a failing one is small."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.testing.histories import Feed, History, Run, in_order, on_time, random_history, shrink, simpler

Engine = Literal["batch", "stream"]
times = st.lists(st.none() | st.integers(-5_000_000, 50_000_000), max_size=30).map(
    lambda found: tuple(sorted(found, key=lambda time: (time is None, time or 0)))
)
feed = st.builds(
    Feed,
    times=times,
    lateness_ms=st.sampled_from([None, 0, 1, 700, 20_000]),
    bounded=st.booleans(),
    keeps_order=st.booleans(),
)
feeds = st.dictionaries(st.sampled_from(["a[0]", "a[1]", "b[0]"]), feed, min_size=1)
histories = st.builds(
    lambda feeds, seed, engine, runs, crash, others: (
        feeds,
        random_history(feeds, random.Random(seed), engine=engine, runs=runs, crash=crash, instances=others),
    ),
    feeds,
    st.integers(0, 1_000_000),
    st.sampled_from(["batch", "stream"]),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([{}, {"sums": ("i0", "i1")}]),
)


def committed(history: History) -> Counter[tuple[str, int]]:
    return Counter(
        (name, row)
        for run in history.runs
        if not run.crashes
        for name, batches in run.batches.items()
        for batch in batches
        for row in batch
    )


def crashes_before(history: History) -> bool:
    """Whether each run that is cancelled reads the rows of the run behind it, in one micro-batch for each instance."""
    pairs = list(zip(history.runs, history.runs[1:], strict=False))
    crashes = [(run, behind) for run, behind in pairs if run.crashes]
    return not history.runs[-1].crashes and all(
        History((run,)).rows == History((behind,)).rows and all(len(batches) <= 1 for batches in run.batches.values())
        for run, behind in crashes
    )


@given(histories)
def test_every_row_is_read_once_by_the_runs_that_commit(made: tuple[dict[str, Feed], History]) -> None:
    feeds, history = made
    assert committed(history) == Counter((name, row) for name, feed in feeds.items() for row in range(len(feed.times)))
    assert crashes_before(history)


@given(histories)
def test_no_row_is_behind_sparks_watermark(made: tuple[dict[str, Feed], History]) -> None:
    feeds, history = made
    assert on_time(history, feeds)
    for name, feed in feeds.items():
        if history.engine == "batch" or feed.lateness_ms is None or feed.keeps_order:
            continue
        watermark = None  # in milliseconds; moves behind each micro-batch
        for batch in (batch for run in history.runs if not run.crashes for batch in run.batches.get(name, ())):
            known = [time for row in batch if (time := feed.times[row]) is not None]
            assert watermark is None or all(time > watermark * 1000 for time in known)
            newest = max((time // 1000 for time in known), default=None)
            if newest is not None:
                watermark = max(newest - feed.lateness_ms, watermark if watermark is not None else newest - feed.lateness_ms)


def test_a_late_row_is_noticed() -> None:
    feeds = {"a[0]": Feed((0, 1_000_000, 5_000_000), lateness_ms=2000)}
    assert on_time(History((Run({"a[0]": ((0, 1), (2,))}),)), feeds)
    assert not on_time(History((Run({"a[0]": ((2,), (1,), (0,))}),)), feeds)
    assert not on_time(History((Run({"a[0]": ((2,),)}), Run({"a[0]": ((0, 1),)}))), feeds)  # the watermark outlives a run


@given(histories)
def test_rows_of_bounded_sources_are_there_at_the_first_run(made: tuple[dict[str, Feed], History]) -> None:
    feeds, history = made
    late = [run for run in history.runs[1:] if not history.runs[history.runs.index(run) - 1].crashes]
    assert not [name for run in late for name in run.batches if feeds[name].bounded]


@given(feeds, st.integers(0, 1000))
def test_a_seed_gives_the_same_history(feeds: dict[str, Feed], seed: int) -> None:
    one, other = (random_history(feeds, random.Random(seed), runs=3, crash=True) for _ in range(2))
    assert one == other


@given(histories)
def test_what_a_history_has_beside_its_rows_can_be_taken_away(made: tuple[dict[str, Feed], History]) -> None:
    _, history = made
    rows = committed(history)
    for name, take_away in simpler(history):
        smaller = take_away(history)
        assert name not in dict(simpler(smaller)), name
        assert committed(smaller) == rows and crashes_before(smaller)
    while left := list(simpler(history)):
        history = left[0][1](history)
    assert list(history.described())


@given(histories, st.data())
def test_shrinking_ends_with_a_failing_history_of_the_rows_that_matter(
    made: tuple[dict[str, Feed], History], data: st.DataObject
) -> None:
    _, history = made
    rows = history.rows
    if not rows:
        return
    wanted = set(data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3, unique=True)))
    tried = []

    def fails(smaller: History) -> bool:
        assert crashes_before(smaller)
        tried.append(smaller)
        return wanted <= set(smaller.rows)

    found = shrink(history, fails, attempts=10_000)
    assert set(found.rows) == wanted
    assert not list(simpler(found))


@pytest.mark.parametrize("attempts", [0, 1, 5])
def test_shrinking_stops_in_time(attempts: int) -> None:
    history = random_history({"a[0]": Feed(tuple(range(30)))}, random.Random(1), runs=3, crash=True)
    tried = []
    shrink(history, lambda smaller: bool(tried.append(smaller)) or True, attempts)
    assert len(tried) == attempts


def test_what_a_failure_needs_stays() -> None:
    """It fails where row 20 comes before row 3, in another run."""
    feeds = {"a[0]": Feed((None,) * 30)}
    history = replace(random_history(feeds, random.Random(3), runs=3, crash=True), time_zone="Asia/Tokyo")

    def run_of(each: History, row: int) -> int | None:
        committing = [run for run in each.runs if not run.crashes]
        return next((index for index, run in enumerate(committing) if ("a[0]", row) in History((run,)).rows), None)

    def fails(each: History) -> bool:
        first, second = run_of(each, one), run_of(each, other)
        return first is not None and second is not None and first < second

    pairs = [
        (one, other) for one in range(30) for other in range(one) if (run_of(history, one) or 0) < (run_of(history, other) or 0)
    ]
    one, other = pairs[0]
    found = shrink(history, fails, attempts=10_000)
    assert set(found.rows) == {("a[0]", one), ("a[0]", other)}
    assert [name for name, _ in simpler(found)] == ["restore", "order"]


def test_a_history_in_words() -> None:
    runs = (
        Run({"a[0]": ((0, 2), (1,)), "b[0]": ((5,),)}),
        Run({"a[0]": ((3,),)}, crashes=True, instances={"sums": ("i0", "i1")}),
        Run({"a[0]": ((3,),)}),
    )
    assert list(History(runs, time_zone="Asia/Tokyo").described()) == [
        "time zone Asia/Tokyo",
        "run 1: micro-batches of rows a[0]: 0, 2 | 1; b[0]: 5; suspended",
        "run 2, sums has 2 instances: micro-batches of rows a[0]: 3; cancelled before it commits",
        "run 3: micro-batches of rows a[0]: 3; sources end",
    ]
    assert list(in_order({"a[0]": Feed((None, None))}, "batch").described()) == ["as a batch, partitions of rows a[0]: 0, 1"]
