"""Which planned operators may take the state of which: the rule, without Spark. `spark/test_planned_state` has the programs."""

from __future__ import annotations

import msgspec
import pytest

from dagster_checkpoints.state.errors import StatefulPlanChanged
from dagster_checkpoints.state.metadata import (
    FusedSourceSnapshot,
    PlannedInput,
    PlannedOperator,
    QuerySnapshot,
    StageInstanceSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.plans import (
    PlannedDifference,
    check_divided_plans,
    check_stateful_plans,
    difference,
    layout_difference,
)

A, B, C, D = "where a", "where b", "where c", "where d"


def group(*steps: str, keys: str = "k", values: str = "sum(v)", pushed: tuple[str, ...] = ()) -> PlannedOperator:
    origins = tuple(values.split(", "))
    fed = PlannedInput(tuple("Sum" for _ in origins), origins, steps)
    return PlannedOperator("aggregate", tuple(keys), pushed=pushed, sides=(fed,))


def side(*steps: str, columns: str = "k: string, v: bigint", origins: str = "k, v") -> PlannedInput:
    return PlannedInput(tuple(columns.split(", ")), tuple(origins.split(", ")), steps)


def join(left: PlannedInput, right: PlannedInput, kind: str = "inner", bounds: tuple[str, ...] = ()) -> PlannedOperator:
    return PlannedOperator(f"{kind} join of streams", ("left.k = right.k",), bounds, sides=(left, right))


def snapshot(*planned: PlannedOperator, known: bool = True) -> TaskSnapshot:
    held = StageInstanceSnapshot(state_plan=("declared",), planned=planned if known else None)
    return TaskSnapshot({"hourly": held}, QuerySnapshot(4))


Operators = tuple[PlannedOperator, ...]
ONE_SHAPE, SIDES = "operators of one shape", "tells the sides of its join apart"
CHANGES: list[tuple[Operators, Operators, str | None]] = [
    ((group(A),), (group(B, C),), None),
    ((group(A),), (group(A), group(A)), "another number of stateful operators"),
    ((group(keys="kv"),), (group(keys="vk"),), "another key for its state, or the same in another order"),
    ((group(),), (join(side(), side()),), "plans another operator"),
    ((group(pushed=(A,)),), (group(),), "a condition that the query has behind an operator in front of it"),
    # Values
    ((group(values="sum(v), sum(w)"),), (group(values="sum(w), sum(v)"),), "have exchanged their names"),
    ((group(values="sum(v), sum(w)"),), (group(values="sum((v * 2)), sum(v)"),), "have exchanged their names"),
    ((group(values="sum(v), sum(w)"),), (group(values="sum((v * 2)), sum((w * 2))"),), None),
    ((group(values="sum(v), sum(w)"),), (group(values="sum(w), sum(w)"),), None),
    ((group(values="sum(v), sum(w)"),), (group(values="sum(v)"),), "keeps other values"),
    # Operators of one shape
    ((group(A), group(B)), (group(B), group(A)), ONE_SHAPE),
    ((group(A), group(B)), (group(C), group(D)), ONE_SHAPE),
    ((group(A), group(B)), (group(A), group(C)), None),
    ((group(A), group(B)), (group(B), group(B)), None),
    ((group(A), group(A)), (group(B), group(C)), None),
    ((group(A), group(B)), (group(C), group(C)), None),
    ((group(A, C), group(B, C)), (group(A, D), group(B, D)), None),
    ((group(A), group(B)), (group(A, C), group(B, D)), None),  # each keeps what only it has
    ((group(A, C), group(B, D)), (group(A, D), group(B, C)), ONE_SHAPE),
    ((group(A), group(B), group(C)), (group(B), group(C), group(A)), ONE_SHAPE),
    ((group(A), group(B, keys="v")), (group(C), group(D, keys="v")), None),
    ((group(values="sum(v)"), group(values="sum(w)")), (group(values="sum(w)"), group(values="sum(v)")), ONE_SHAPE),
    # Joins
    ((join(side(A), side(B)),), (join(side(B), side(A)),), SIDES),
    ((join(side(A), side(B)),), (join(side(A), side(C)),), None),
    ((join(side(A), side(B)),), (join(side(C), side(D)),), SIDES),
    ((join(side("rows of 1", A), side("rows of 2", B)),), (join(side("rows of 1", C), side("rows of 2", D)),), None),
    ((join(side(A), side(B, columns="k: string")),), (join(side(C), side(D, columns="k: string")),), None),
    ((join(side(A), side(B, columns="j: string, w: bigint")),), (join(side(C), side(D, columns="j: string, w: bigint")),), SIDES),
    ((join(side(), side()),), (join(side(columns="v: bigint, k: string"), side()),), "keeps other values"),
    ((join(side(), side()),), (join(side(origins="v, k"), side()),), "have exchanged their names"),
    ((join(side(), side()),), (join(side(), side(), "leftouter"),), "plans another operator"),
    ((join(side(), side(), bounds=(A,)),), (join(side(), side(), bounds=(B,)),), "times that its join keeps rows"),
    ((join(side(A), side()), join(side(B), side())), (join(side(B), side()), join(side(A), side())), ONE_SHAPE),
]


@pytest.mark.parametrize(("before", "now", "said"), CHANGES)
def test_which_operators_may_take_which_state(before: Operators, now: Operators, said: str | None) -> None:
    def check(held: TaskSnapshot, present: Operators | None) -> None:
        planned = {"hourly": present} if present is not None else None
        check_stateful_plans(held, {"hourly": ("declared",)}, "JFK", {"hourly": "flights.py:12"}, "checkpoint 7", planned)

    check(snapshot(*before), before)
    check(snapshot(known=False), now)  # of an earlier release
    check(snapshot(*before), None)
    if said is None:
        check(snapshot(*before), now)
        return
    with pytest.raises(StatefulPlanChanged) as error:
        check(snapshot(*before), now)
    text = str(error.value)
    assert text.startswith("Stage 'hourly' (instance 'JFK', flights.py:12) keeps other state than in checkpoint 7.\n  In the ")
    assert "\nThe stage declares the same, but " in text and said in text and text.endswith("allow_changed_plan: true.")


def test_the_error_shows_what_tells_operators_apart() -> None:
    held = snapshot(group(A, C), group(B, C))
    with pytest.raises(StatefulPlanChanged) as error:
        check_stateful_plans(held, {"hourly": ("declared",)}, "JFK", {}, "checkpoint 7", {"hourly": (group(B, C), group(A, C))})
    assert "\n  In the checkpoint: [1] where a, [2] where b\n  Now: [1] where b, [2] where a\n" in str(error.value)


OTHER_JOIN = join(side(columns="v: bigint, k: string"), PlannedInput())
BY_K, JOINED = "aggregate by k", "inner join of streams by left.k = right.k"
PUSHED = (
    "Spark applies a condition that the query has behind an operator in front of it, so that its state holds only the rows that "
    "met the condition"
)
NUMBER = "Spark plans another number of stateful operators for it"
SHOWN: list[tuple[Operators, Operators, PlannedDifference]] = [
    ((group(A),), (group(A), join(side(), side())), PlannedDifference(NUMBER, BY_K, f"{BY_K}, {JOINED}")),
    ((), (group(A),), PlannedDifference(NUMBER, "none", BY_K)),
    (
        (group(keys=""),),
        (join(side(), side()),),
        PlannedDifference("Spark plans another operator", "aggregate by nothing", JOINED),
    ),
    (
        (group(keys="kv"),),
        (group(keys="vk"),),
        PlannedDifference(
            "Spark plans another key for its state, or the same in another order", "aggregate by k, v", "aggregate by v, k"
        ),
    ),
    (
        (join(side(), side(), bounds=("t < 2", "t > 1")),),
        (join(side(), side()),),
        PlannedDifference("the times that its join keeps rows are others", "t < 2, t > 1", "none"),
    ),
    ((group(pushed=("v > 1", "k = 2")),), (group(),), PlannedDifference(PUSHED, "where v > 1 AND k = 2", "none")),
    ((group(),), (group(pushed=("v > 1",)),), PlannedDifference(PUSHED, "none", "where v > 1")),
    (
        (join(side(), side()),),
        (OTHER_JOIN,),
        PlannedDifference(
            "Spark keeps other values in its state, or in another order",
            f"{JOINED}: k: string, v: bigint and k: string, v: bigint",
            f"{JOINED}: v: bigint, k: string and nothing",
        ),
    ),
    (
        (group(values="sum(v), sum(w)"),),
        (group(values="sum(w), sum(v)"),),
        PlannedDifference(
            "columns in front of an operator have exchanged their names, and its values their places",
            "sum(v), sum(w)",
            "sum(w), sum(v)",
        ),
    ),
    (
        (join(side(A, C), side(B, C)),),
        (join(side(B, C), side(A, C)),),
        PlannedDifference(
            "only what stands in front of them tells the sides of its join apart, and that has changed for both: each might "
            "continue with the rows of the other one",
            "[1] where a, [2] where b",
            "[1] where b, [2] where a",
        ),
    ),
    (
        (group(A, D), group(), join(side(A), side()), join(side(), side(B))),
        (group(B), group(A), join(side(A), side()), join(side(), side(B))),
        PlannedDifference(
            "it has operators of one shape, which only what stands in front of them tells apart, and that has changed for more "
            "than one: each might continue with the state of another one",
            "[1] where a and where d, [2] nothing of its own",
            "[1] where b, [2] where a",
        ),
    ),
    (
        (join(side(A), side()), join(side(), side(B))),
        (join(side(B), side()), join(side(), side(A))),
        PlannedDifference(
            "it has operators of one shape, which only what stands in front of them tells apart, and that has changed for more "
            "than one: each might continue with the state of another one",
            "[1] left side where a, [2] right side where b",
            "[1] left side where b, [2] right side where a",
        ),
    ),
]


@pytest.mark.parametrize(("before", "now", "shown"), SHOWN)
def test_what_a_difference_says(before: Operators, now: Operators, shown: PlannedDifference) -> None:
    assert difference(before, now) == shown


@pytest.mark.parametrize(
    ("before", "now", "shown"),
    [
        ((group(pushed=("v > 1",)),), (OTHER_JOIN,), ("Spark plans another operator", f"{BY_K} where v > 1", JOINED)),
        ((group(),), (group(keys="kv"),), ("Spark plans another number of keys", BY_K, "aggregate by k, v")),
        (
            (group(),),
            (group(pushed=("v > 1", "k = 2")),),
            ("Spark applies other conditions in front of an operator", BY_K, f"{BY_K} where v > 1 AND k = 2"),
        ),
        ((group(), OTHER_JOIN), (group(),), ("Spark plans another number of operators", f"{BY_K}, {JOINED}", BY_K)),
        ((group(),), (group(), OTHER_JOIN), ("Spark plans another number of operators", BY_K, f"{BY_K}, {JOINED}")),
    ],
)
def test_what_a_difference_of_the_layout_says(before: Operators, now: Operators, shown: tuple[str, str, str]) -> None:
    assert layout_difference(before, now) == PlannedDifference(*shown)


def test_columns_are_not_traced_through_a_fused_source_that_has_ended() -> None:
    held = msgspec.structs.replace(snapshot(group(A, keys="k")), fused=(FusedSourceSnapshot("live", 0, ended=True),))

    def check(now: PlannedOperator) -> None:
        check_stateful_plans(held, {"hourly": ("declared",)}, "JFK", {}, "checkpoint 7", {"hourly": (now,)})

    check(group(B, keys="v"))
    with pytest.raises(StatefulPlanChanged, match="another number of keys"):
        check(group(A, keys="kv"))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((group(keys="w"),), None),  # the columns of a channel have other names
        ((group(keys="kv"),), "another number of keys"),
        ((group(pushed=(A,)),), "other conditions in front of an operator"),
        ((join(side(), side()),), "another operator"),
        ((), "another number of operators"),
    ],
)
def test_a_query_that_is_divided_keeps_the_layout_of_its_state(now: Operators, said: str | None) -> None:
    def check() -> None:
        check_divided_plans(snapshot(group()), {"hourly": ("declared",)}, "JFK", {}, "checkpoint 7", {"hourly": now})

    if said is None:
        check()
        return
    with pytest.raises(
        StatefulPlanChanged, match=rf"shared a query with other stages[\s\S]*Spark \w+ {said}[\s\S]*cannot be divided"
    ):
        check()
