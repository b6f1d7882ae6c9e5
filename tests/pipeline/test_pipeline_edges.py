"""POINTWISE edges: the arithmetic of PROTOCOL section 1."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.pipeline import pointwise_consumers, pointwise_producers

COUNTS = st.integers(1, 200)


@pytest.mark.parametrize(
    ("s", "t", "reads", "feeds"),
    [
        (3, 5, [[0], [0], [1], [1], [2]], [[0, 1], [2, 3], [4]]),
        (5, 3, [[0], [1, 2], [3, 4]], [[0], [1], [1], [2], [2]]),
        (4, 4, [[0], [1], [2], [3]], [[0], [1], [2], [3]]),
        (1, 3, [[0], [0], [0]], [[0, 1, 2]]),
        (3, 1, [[0, 1, 2]], [[0], [0], [0]]),
        (2, 4, [[0], [0], [1], [1]], [[0, 1], [2, 3]]),
        (4, 2, [[0, 1], [2, 3]], [[0], [0], [1], [1]]),
        (1, 1, [[0]], [[0]]),
    ],
)
def test_who_reads_whom(s: int, t: int, reads: list[list[int]], feeds: list[list[int]]) -> None:
    assert [list(pointwise_producers(s, t, i)) for i in range(t)] == reads
    assert [list(pointwise_consumers(s, t, q)) for q in range(s)] == feeds


@given(COUNTS, COUNTS)
def test_producers_and_consumers_are_each_others_inverse(s: int, t: int) -> None:
    read = {(q, i) for i in range(t) for q in pointwise_producers(s, t, i)}
    fed = {(q, i) for q in range(s) for i in pointwise_consumers(s, t, q)}
    assert read == fed
    assert {q for q, _ in read} == set(range(s)), "every producer is read"
    assert {i for _, i in read} == set(range(t)), "every consumer is fed"


@given(COUNTS, COUNTS)
def test_neighbours_are_contiguous_and_evenly_spread(s: int, t: int) -> None:
    reads = [pointwise_producers(s, t, i) for i in range(t)]
    assert all(one.start <= other.start and one.stop <= other.stop for one, other in pairwise(reads))
    sizes = {len(pointwise_consumers(s, t, q)) for q in range(s)} if s < t else {len(read) for read in reads}
    assert max(sizes) - min(sizes) <= 1


@given(COUNTS, COUNTS)
def test_the_ranges_are_those_of_the_protocol(s: int, t: int) -> None:
    if s >= t:
        assert all(pointwise_producers(s, t, i) == range(i * s // t, (i + 1) * s // t) for i in range(t))
    else:
        ceil = [(q * t + s - 1) // s for q in range(s + 1)]
        assert all(pointwise_consumers(s, t, q) == range(ceil[q], ceil[q + 1]) for q in range(s))


@pytest.mark.parametrize("number", [-1, 3])
def test_an_instance_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(IndexError, match=f"no consumer {number}"):
        pointwise_producers(5, 3, number)
    with pytest.raises(IndexError, match=f"no producer {number}"):
        pointwise_consumers(3, 5, number)
