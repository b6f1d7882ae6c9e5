"""State that moves between instances: as rows, and against its definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.state.errors import ParallelismTooHigh, UnknownStage
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_instances import (
    redistribute_broadcasts,
    redistribute_lists,
    redistribute_operator_states,
    redistribute_unions,
)


def held(row: str) -> list[dict[str, Sequence[str]] | None]:
    """Reads ``x=abc,y=d | fin | -``: three instances; the first holds the list x of a, b, c and the list y of d."""
    return [
        None if text.strip() == "fin" else dict(state.split("=") for state in text.strip().split(",") if "=" in state)
        for text in row.split("|")
    ]


def shown(instances: Sequence[dict[str, list[str]]]) -> str:
    return " | ".join(",".join(f"{name}={''.join(items)}" for name, items in states.items()) or "-" for states in instances)


@pytest.mark.parametrize(
    ("before", "parallelism", "after"),
    [
        # In order, evenly; the first ones get the remainder.
        ("x=abcdef", 3, "x=ab | x=cd | x=ef"),
        ("x=abcde", 2, "x=abc | x=de"),
        ("x=ab | x=cd | x=e", 2, "x=abc | x=de"),
        ("x=a | x=b", 3, "x=a | x=b | x="),
        ("x=ab | x=cd", 1, "x=abcd"),
        # The next state continues where the remainder of the last one ended.
        ("x=abcd,y=efgh", 3, "x=ab,y=h | x=c,y=ef | x=d,y=g"),
        ("x=a,y=b,z=c,w=d", 3, "x=a,y=,z=,w=d | x=,y=b,z=,w= | x=,y=,z=c,w="),
        ("x=ab,y=cd,z=ef", 3, "x=a,y=d,z= | x=b,y=,z=e | x=,y=c,z=f"),
        ("x=abc,y=d", 3, "x=a,y=d | x=b,y= | x=c,y="),
        # The states in the order in which they first appear.
        ("x=ab | y=cd,x=e", 4, "x=a,y=d | x=b,y= | x=e,y= | x=,y=c"),
        # As many instances as before: each keeps its own.
        ("x=abc | x= | y=d", 3, "x=abc | x= | y=d"),
        # Finished instances contribute nothing.
        ("x=ab | fin | x=cd", 2, "x=ab | x=cd"),
        ("x=ab | fin", 2, "x=ab | -"),
        ("fin | fin", 3, "- | - | -"),
        ("-", 2, "- | -"),
        ("x=", 2, "x= | x="),
    ],
)
def test_lists(before: str, parallelism: int, after: str) -> None:
    assert shown(redistribute_lists(held(before), parallelism)) == after


@pytest.mark.parametrize(
    ("before", "parallelism", "after"),
    [
        ("x=ab | x=c", 3, "x=abc | x=abc | x=abc"),
        # Also without a change of the number of instances.
        ("x=ab | x=c", 2, "x=abc | x=abc"),
        ("x=ab | y=c,x=d", 1, "x=abd,y=c"),
        ("x=a | fin | x=b", 2, "x=ab | x=ab"),
        ("-", 2, "- | -"),
    ],
)
def test_unions(before: str, parallelism: int, after: str) -> None:
    assert shown(redistribute_unions(held(before), parallelism)) == after


@pytest.mark.parametrize(
    ("before", "parallelism", "after"),
    [
        ("x=ab", 3, "x=ab | x=ab | x=ab"),
        ("x=a | x=b", 1, "x=a"),
        # An instance's own copy first, else that of any other.
        ("x=a | x=b", 3, "x=a | x=b | x=a"),
        ("fin | x=b", 2, "x=b | x=b"),
        ("fin | x=b | x=c", 1, "x=b"),
        ("x=a | y=b", 2, "x=a,y=b | x=a,y=b"),
        ("fin | fin", 2, "- | -"),
    ],
)
def test_broadcasts(before: str, parallelism: int, after: str) -> None:
    found = redistribute_broadcasts([None if s is None else dict(s) for s in held(before)], parallelism)
    assert shown([{name: list(copy) for name, copy in states.items()} for states in found]) == after


def test_instances_do_not_share_mutable_state() -> None:
    first, second = redistribute_unions([{"x": [1]}], 2)
    first["x"].append(2)
    assert second == {"x": [1]}


# Against the definition

instances = st.lists(
    st.none() | st.dictionaries(st.sampled_from("xyz"), st.lists(st.integers(), max_size=8), max_size=3), min_size=1, max_size=6
)
parallelisms = st.integers(1, 8)


def all_items(states: Sequence[dict[str, list[int]] | None], name: str) -> list[int]:
    return [item for state in states for item in (state or {}).get(name, [])]


@given(instances, parallelisms)
def test_no_item_of_a_list_is_lost_or_duplicated(before: list[dict[str, list[int]] | None], parallelism: int) -> None:
    after = redistribute_lists(before, parallelism)
    assert len(after) == parallelism
    for name in "xyz":
        assert Counter(all_items(after, name)) == Counter(all_items(before, name))
    if parallelism != len(before):
        for name in {name for states in before for name in states or {}}:
            sizes = [len(states[name]) for states in after]
            assert max(sizes) - min(sizes) <= 1, "of each state"
        totals = [sum(map(len, states.values())) for states in after]
        assert max(totals) - min(totals) <= 1, "and of all together"


@given(instances, parallelisms)
def test_the_items_of_a_list_stay_neighbours(before: list[dict[str, list[int]] | None], parallelism: int) -> None:
    """Read cyclically from some instance on, the items keep their order."""
    after = redistribute_lists(before, parallelism)
    for name in "xyz":
        turns = [all_items([*after[start:], *after[:start]], name) for start in range(parallelism)]
        assert all_items(before, name) in turns


@given(instances, parallelisms)
def test_every_instance_gets_the_whole_union(before: list[dict[str, list[int]] | None], parallelism: int) -> None:
    for states in redistribute_unions(before, parallelism):
        assert all(states.get(name, []) == all_items(before, name) for name in "xyz")


@given(st.dictionaries(st.sampled_from("xyz"), st.integers()), st.lists(st.booleans(), min_size=1, max_size=6), parallelisms)
def test_any_running_instance_serves_all_with_a_broadcast(value: dict[str, int], finished: list[bool], parallelism: int) -> None:
    after = redistribute_broadcasts([None if over else value for over in finished], parallelism)
    assert after == [{} if all(finished) else value] * parallelism


# Of a checkpoint


def state(kind: str, name: str, items: str) -> OperatorState:
    return OperatorState(name, kind, tuple(item.encode() for item in items))  # type: ignore[arg-type]


def checkpoint(max_parallelism: int = 0) -> CheckpointMetadata:
    """A chain of the stages a and b with three instances, of which the second has finished; c has finished."""
    held = {
        0: (state("list", "x", "abc"), state("union", "x", "u"), state("broadcast", "rates", "r")),
        2: (state("list", "x", "de"), state("broadcast", "rates", "r"), state("union", "x", "v")),
    }
    return CheckpointMetadata(
        "p",
        7,
        stages=(
            StageMetadata("a", 3, ("0", "1", "2"), (1,)),
            StageMetadata("b", 3, ("0", "1", "2"), (1,), max_parallelism=max_parallelism),
            StageMetadata("c", 2, ("0", "1"), (0, 1), True),
            StageMetadata("d", 2, ("0", "1")),
        ),
        chains=(
            ChainMetadata(
                "a",
                ("a", "b"),
                {
                    index: TaskSnapshot(
                        {"a": StageInstanceSnapshot((state("list", "of a", "z"),)), "b": StageInstanceSnapshot(states)}
                    )
                    for index, states in held.items()
                },
            ),
            ChainMetadata("c", ("c",)),
            ChainMetadata("d", ("d",), {0: TaskSnapshot(end_of_data="drain")}),
        ),
    )


def test_a_stage_with_other_instances() -> None:
    rest = (state("union", "x", "uv"), state("broadcast", "rates", "r"))
    assert redistribute_operator_states(checkpoint(), "b", 2) == (
        (state("list", "x", "abc"), *rest),
        (state("list", "x", "de"), *rest),
    )
    assert redistribute_operator_states(checkpoint(), "b", 6) == tuple(
        (state("list", "x", items), *rest) for items in ["a", "b", "c", "d", "e", ""]
    )


def test_a_stage_with_as_many_instances_as_before() -> None:
    rest = (state("union", "x", "uv"), state("broadcast", "rates", "r"))
    # The second has finished and is not run again; its share does not matter.
    first, _, third = redistribute_operator_states(checkpoint(), "b", 3)
    assert first == (state("list", "x", "abc"), *rest)
    assert third == (state("list", "x", "de"), *rest)


@pytest.mark.parametrize("stage", ["c", "d"])
def test_a_stage_that_has_finished_or_holds_nothing(stage: str) -> None:
    assert redistribute_operator_states(checkpoint(), stage, 3) == ((), (), ())


def test_a_stage_that_the_checkpoint_does_not_hold() -> None:
    with pytest.raises(UnknownStage, match="no stage 'e', but 'a', 'b', 'c', 'd'"):
        redistribute_operator_states(checkpoint(), "e", 3)
    with pytest.raises(UnknownStage, match="but none at all"):
        redistribute_operator_states(CheckpointMetadata("p", 1), "e", 3)


def test_more_instances_than_the_checkpoint_has_key_groups() -> None:
    assert len(redistribute_operator_states(checkpoint(max_parallelism=4), "b", 4)) == 4
    with pytest.raises(ParallelismTooHigh, match="'b' has 5 instances and a maximum parallelism of 4"):
        redistribute_operator_states(checkpoint(max_parallelism=4), "b", 5)
