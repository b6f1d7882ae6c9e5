"""Key groups: which instance owns which, and how many there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.state.errors import InvalidMaxParallelism, MaxParallelismChanged, ParallelismTooHigh
from dagster_checkpoints.state.key_groups import (
    HIGHEST_MAX_PARALLELISM,
    chosen_max_parallelism,
    default_max_parallelism,
    key_groups_of,
    owner_of,
    partition_of,
)


@pytest.mark.parametrize(
    ("parallelism", "groups", "ranges"),
    [
        (1, 128, [(0, 127)]),
        (2, 128, [(0, 63), (64, 127)]),
        (3, 128, [(0, 42), (43, 85), (86, 127)]),
        (3, 10, [(0, 3), (4, 6), (7, 9)]),
        (4, 10, [(0, 2), (3, 4), (5, 7), (8, 9)]),
        (5, 5, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]),
    ],
)
def test_the_ranges_of_the_instances(parallelism: int, groups: int, ranges: list[tuple[int, int]]) -> None:
    found = [key_groups_of(i, parallelism, groups) for i in range(parallelism)]
    assert [(r[0], r[-1]) for r in found] == ranges


@given(st.data())
def test_every_group_has_one_owner(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 2000))
    parallelism = data.draw(st.integers(1, groups))
    ranges = [key_groups_of(i, parallelism, groups) for i in range(parallelism)]
    assert [group for r in ranges for group in r] == list(range(groups))
    assert all(owner_of(group, parallelism, groups) == i for i, r in enumerate(ranges) for group in r)
    sizes = [len(r) for r in ranges]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@given(st.data())
def test_key_groups_are_state_partitions_where_the_instances_share_them_evenly(data: st.DataObject) -> None:
    """Spark puts a key with hash h into partition h mod P of an instance; Python's % is its pmod."""
    parallelism, each = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    groups, hashed = parallelism * each, data.draw(st.integers(-(2**31), 2**31 - 1))
    group = hashed % groups
    own = key_groups_of(owner_of(group, parallelism, groups), parallelism, groups)
    assert len(own) == each and own.start % each == 0
    assert own[hashed % each] == group and partition_of(group, parallelism, groups) == hashed % each


@pytest.mark.parametrize(
    ("parallelism", "groups"),
    [
        (1, 128),
        (2, 128),
        (85, 128),
        (86, 256),
        (170, 256),
        (171, 256),
        (172, 512),
        (10_922, 16_384),
        (10_923, 16_384),
        (10_924, 32_768),
        (21_846, 32_768),
        (32_768, 32_768),
        (100_000, 32_768),
    ],
)
def test_the_default_leaves_room_to_grow(parallelism: int, groups: int) -> None:
    assert default_max_parallelism(parallelism) == groups


@pytest.mark.parametrize(
    ("parallelism", "chosen", "recorded", "groups"),
    [
        (4, None, 0, 128),
        (200, None, 0, 512),
        (4, 7, 0, 7),
        (4, 1000, 0, 1000),
        # The checkpoint fixes the number: it overrides a derived one; the same one is no change.
        (4, None, 7, 7),
        (4, None, 32_768, 32_768),
        (200, None, 200, 200),
        (4, 7, 7, 7),
        (HIGHEST_MAX_PARALLELISM, HIGHEST_MAX_PARALLELISM, 0, HIGHEST_MAX_PARALLELISM),
        (1, 1, 0, 1),
    ],
)
def test_how_many_groups_a_stage_runs_with(parallelism: int, chosen: int | None, recorded: int, groups: int) -> None:
    assert chosen_max_parallelism("s", parallelism, chosen, recorded) == groups


@pytest.mark.parametrize(
    ("parallelism", "chosen", "recorded", "error", "words"),
    [
        (8, None, 7, ParallelismTooHigh, "'s' has 8 instances and a maximum parallelism of 7.*Start without this checkpoint"),
        (8, 7, 0, ParallelismTooHigh, "Set a higher one, or give the stage at most 7 instances"),
        (40_000, None, 0, ParallelismTooHigh, "Split the stage, or give the stage at most 32768"),
        (4, 256, 128, MaxParallelismChanged, "max_parallelism=256.*taken with 128.*Set max_parallelism=128"),
        (4, 0, 0, InvalidMaxParallelism, "max_parallelism=0; expected 1 to 32768"),
        (4, 32_769, 0, InvalidMaxParallelism, "max_parallelism=32769"),
        (4, -1, 128, InvalidMaxParallelism, "max_parallelism=-1"),
    ],
)
def test_invalid_numbers_are_refused(
    parallelism: int, chosen: int | None, recorded: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        chosen_max_parallelism("s", parallelism, chosen, recorded)
