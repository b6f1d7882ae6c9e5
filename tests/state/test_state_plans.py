"""Whether a query's plan still fits its state: which changes of operators and sources are refused, and the error texts."""

from __future__ import annotations

import pytest

from dagster_checkpoints.state.errors import SourcesChanged, StatefulPlanChanged
from dagster_checkpoints.state.metadata import QuerySnapshot, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.plans import IN_STATE, check_divided_plans, check_sources, check_stateful_plans

WHERE = "checkpoint 7 of pipeline 'flights'"
FIVE, TEN = "aggregate by window(ts, 5 minutes), origin: count(1)", "aggregate by window(ts, 10 minutes), origin: count(1)"
DEDUP = "drop duplicates by flight"


def snapshot(
    operators: tuple[str, ...] | None = (), sources: tuple[str, ...] | None = None, *, query: bool = True
) -> TaskSnapshot:
    held = StageInstanceSnapshot(state_plan=operators)
    return TaskSnapshot({"hourly": held}, QuerySnapshot(4, sources=sources) if query else None)


def check(held: TaskSnapshot, *now: str) -> None:
    check_stateful_plans(held, {"hourly": now}, "JFK", {"hourly": "flights.py:12"}, WHERE)


@pytest.mark.parametrize(
    ("before", "now", "shown"),
    [
        ((FIVE,), (TEN,), f"In the checkpoint: {FIVE}\n  Now: {TEN}\n"),
        # Unchanged operators are not named.
        ((DEDUP, FIVE), (DEDUP, TEN), f"In the checkpoint: {FIVE}\n  Now: {TEN}\n"),
        ((DEDUP, FIVE), (FIVE,), f"In the checkpoint: {DEDUP} / {FIVE}\n  Now: {FIVE}\n"),
        ((FIVE,), (FIVE, "output mode update"), f"In the checkpoint: {FIVE}\n  Now: {FIVE} / output mode update\n"),
        ((), (FIVE,), f"In the checkpoint: no state\n  Now: {FIVE}\n"),
        ((FIVE,), (), f"In the checkpoint: {FIVE}\n  Now: no state\n"),
    ],
)
def test_other_stateful_operators(before: tuple[str, ...], now: tuple[str, ...], shown: str) -> None:
    with pytest.raises(StatefulPlanChanged) as error:
        check(snapshot(before), *now)
    assert str(error.value) == (
        f"Stage 'hourly' (instance 'JFK', flights.py:12) keeps other state than in {WHERE}.\n  {shown}Spark would continue with "
        "the old state under the new plan, and the rows of both would be in one output. Take the change back; or end the old "
        "pipeline with a drain, which emits and commits all that it holds, and begin with the new plan as a new start "
        "(restore_from: none); or take the risk with allow_changed_plan: true."
    )


BUFFER = "mutableAggBufferOffset 0, inputAggBufferOffset 0"


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (f"collect_list(v long, {BUFFER}), count(1)", f"collect_list(v long, {BUFFER}, ignoreNulls True), count(1)"),
        (f"collect_set(v long, {BUFFER})", f"collect_set(v long, {BUFFER}, ignoreNulls True)"),
        ("sum(null_if(if((v = 0), typed_null_literal(v), v)))", "sum(null_if(null_if_result((v = 0), v)))"),
        (
            "null_if(if((null_if(if((v = 0), typed_null_literal(v), v)) = pow(v, 2)), typed_null_literal(null_if(if((v = 0), "
            "typed_null_literal(v), v))), null_if(if((v = 0), typed_null_literal(v), v))))",
            "null_if(null_if_result((null_if(null_if_result((v = 0), v)) = pow(v, 2)), null_if(null_if_result((v = 0), v))))",
        ),
    ],
)
def test_expressions_that_a_later_version_of_spark_writes_in_other_words(earlier: str, later: str) -> None:
    before, now = (f"aggregate by k: {function}; watermark ts - 1 minutes" for function in (earlier, later))
    check(snapshot((before,)), now)
    check(snapshot((now,)), before)
    with pytest.raises(StatefulPlanChanged):
        check(snapshot((before,)), now.replace("by k", "by j"))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (f"collect_list(v long, {BUFFER})", f"collect_list(v long, {BUFFER}, ignoreNulls False)"),
        ("first(v long, ignoreNulls False)", "first(v long, ignoreNulls True)"),
        ("null_if(if((v = 0), typed_null_literal(v), v))", "null_if(null_if_result((v = 1), v))"),
        ("null_if_result((v = 0), v", "null_if_result((v = 1), v"),
    ],
)
def test_expressions_of_another_meaning(before: str, now: str) -> None:
    with pytest.raises(StatefulPlanChanged):
        check(snapshot((before,)), now)


def test_a_query_of_its_own_needs_the_same_number_of_operators() -> None:
    """A stage that joins its input with itself repeats the operators in front of it, which another query has now."""
    held, columns = snapshot((DEDUP, FIVE)), {"hourly": "flights.py:12"}
    check_divided_plans(held, {"hourly": (DEDUP, TEN)}, "JFK", columns, WHERE)  # the same operators, with columns of a channel
    check_divided_plans(snapshot((DEDUP, FIVE), query=False), {"hourly": (FIVE,)}, "JFK", columns, WHERE)
    for locations, place in ((columns, "flights.py:12"), ({}, "defined elsewhere")):
        with pytest.raises(
            StatefulPlanChanged, match=rf"'hourly' \(instance 'JFK', {place}\) shared a query with other stages in "
        ):
            check_divided_plans(held, {"new": (FIVE,), "hourly": (FIVE,)}, "JFK", locations, WHERE)


SUMS = "aggregate by origin: sum(delay long), sum(distance long)"


def in_state(functions: str) -> str:
    return f"{SUMS}{IN_STATE}functions {functions}"


@pytest.mark.parametrize("now", ["1", "2", "2, 1"])
def test_what_is_in_the_state_of_the_same_operators(now: str) -> None:
    held, columns = snapshot((DEDUP, in_state("1, 2"))), {"hourly": "flights.py:12"}
    check(held, DEDUP, in_state("1, 2"))
    check_divided_plans(held, {"hourly": (DEDUP, in_state("1, 2"))}, "JFK", columns, WHERE)
    with pytest.raises(StatefulPlanChanged) as error:
        check(held, DEDUP, in_state(now))
    assert (
        f"In the checkpoint: {SUMS}; in state: functions 1, 2\n  Now: {SUMS}; in state: functions {now}\n"
        "The operators are the same, but the columns that are selected behind them, and their order, decide what Spark keeps in "
        "their state (functions are numbered as they are declared).\nSpark would continue"
    ) in str(error.value)
    with pytest.raises(StatefulPlanChanged, match="keeps other columns in their state"):
        check_divided_plans(held, {"hourly": (DEDUP, in_state(now))}, "JFK", columns, WHERE)
    with pytest.raises(StatefulPlanChanged) as error:
        check(held, DEDUP, FIVE)
    assert "The operators are the same" not in str(error.value)


def test_what_is_in_the_state_is_compared_if_it_is_known() -> None:
    check(snapshot((SUMS,)), in_state("2"))
    check(snapshot((in_state("2"),)), SUMS)
    with pytest.raises(StatefulPlanChanged):
        check(snapshot((in_state("2"),)), FIVE)


def test_a_stage_without_a_function_of_its_own_is_defined_elsewhere() -> None:
    with pytest.raises(StatefulPlanChanged, match=r"^Stage 'hourly' \(instance 'JFK', defined elsewhere\) keeps other state"):
        check_stateful_plans(snapshot((FIVE,)), {"hourly": (TEN,)}, "JFK", {}, WHERE)


def test_unknown_operators_and_operators_without_state_are_not_compared() -> None:
    check(snapshot((FIVE,)), FIVE)
    check(snapshot(None), TEN)
    check(snapshot((FIVE,), query=False), TEN)
    check(TaskSnapshot(query=QuerySnapshot(4)), TEN)


A, B, C = "parquet /a", "parquet /b", "kafka subscribe flights"


def numbered(sources: tuple[str, ...]) -> str:
    return {0: "none", 1: "[0] {}", 2: "[0] {}, [1] {}"}[len(sources)].format(*sources)


@pytest.mark.parametrize(
    ("before", "now", "words", "allowed"),
    [
        ((A, B), (A,), "reads 1 streaming source, and in the checkpoint 2", False),
        ((A,), (A, B), "reads 2 streaming sources, and in the checkpoint 1", False),
        ((A,), (), "reads 0 streaming sources, and in the checkpoint 1", False),
        ((A, B), (B, A), "reads its sources in another order", True),
        ((A, B), (A, C), "reads other streaming sources", True),
    ],
)
def test_other_sources(before: tuple[str, ...], now: tuple[str, ...], words: str, allowed: bool) -> None:
    with pytest.raises(SourcesChanged) as error:
        check_sources(snapshot(sources=before), now, "live", "JFK", WHERE)
    risk = "; or take the risk with allow_changed_plan: true" if allowed else ""
    assert str(error.value) == (
        f"Stage 'live' (instance 'JFK') {words}.\n  In {WHERE}: {numbered(before)}\n  Now: {numbered(now)}\nSpark keeps the "
        "offsets of a query's sources by their number, so each would continue where another one had stopped. Take the change "
        "back; or end the old pipeline with a drain, which emits and commits all that it holds, and begin with the new plan as a "
        f"new start (restore_from: none){risk}. A source that is to be added or removed without a new start needs a stage of its "
        "own."
    )


def test_sources_that_are_not_known_are_not_compared() -> None:
    check_sources(snapshot(sources=(A, B)), (A, B), "live", "JFK", WHERE)
    check_sources(snapshot(sources=None), (A,), "live", "JFK", WHERE)
    check_sources(snapshot(query=False), (A,), "live", "JFK", WHERE)


# States of a processor


def processor(states: str, end: str = "", name: str = "Counter") -> str:
    return (
        f"transformWithState by k: {name} with {states}, output mode append, time mode eventtime{end}; watermark ts - 5 minutes"
    )


AVRO = ", encoded as avro"
SUM, LAST = (
    "value sum struct<n:bigint>",
    "map last struct<k:string> -> struct<at:timestamp,by:struct<a:int,b:string>>, kept 1000 ms",
)


@pytest.mark.parametrize(
    ("before", "now", "fits"),
    [
        # Whole states, with each encoding.
        (SUM, f"{LAST}, {SUM}", True),
        (f"{LAST}, {SUM}", SUM, True),
        (f"{LAST}, {SUM}", LAST, True),
        ("no state", SUM, True),
        (SUM, "no state", True),
        (SUM, "value total struct<n:bigint>", False),  # perhaps another name for the same state
        (SUM, "list sum struct<n:bigint>", False),
        (SUM, f"{SUM}, kept 1000 ms", False),
        (LAST, LAST.replace("1000", "2000"), False),
        (LAST, LAST.replace("k:string", "k:int"), False),
        (SUM, "value sum struct<n:bigint,m:int>", False),
        (SUM, "value sum of struct<n:bigint>", False),  # no text that can be read
        ("unknown", SUM, False),
        # Their fields, encoded as Avro.
        (SUM + AVRO, "value sum struct<n:bigint,m:int>" + AVRO, True),
        (SUM + AVRO, "value sum struct<n:bigint,m:int>", True),  # the query goes on with the encoding in which it has begun
        (SUM, "value sum struct<n:bigint,m:int>" + AVRO, False),
        (SUM, SUM + AVRO, True),
        ("value sum struct<n:bigint,m:int>" + AVRO, SUM + AVRO, True),
        ("value sum struct<n:bigint,m:int>" + AVRO, "value sum struct<m:int,n:bigint>" + AVRO, True),
        ("value sum struct<n:int>" + AVRO, SUM + AVRO, True),
        ("value sum struct<n:float>" + AVRO, "value sum struct<n:double>" + AVRO, True),
        (SUM + AVRO, "value sum struct<n:int>" + AVRO, False),
        (SUM + AVRO, "value sum struct<m:bigint>" + AVRO, False),
        (LAST + AVRO, LAST.replace(",by:struct<a:int,b:string>", "") + AVRO, True),
        (LAST + AVRO, LAST.replace("b:string", "c:string") + AVRO, False),
        (LAST + AVRO, LAST.replace("b:string", "b:string,c:int") + AVRO, False),
        (LAST + AVRO, LAST.replace("b:string", "c:int,b:string") + AVRO, False),
        ("value sum struct<by:struct<a:int,b:string>>" + AVRO, "value sum struct<by:struct<a:int,b:string>,n:int>" + AVRO, True),
        ("value sum struct<d:decimal(4,2),n:int>" + AVRO, "value sum struct<d:decimal(4,2),m:int,n:int>" + AVRO, True),
        ("value sum bigint" + AVRO, SUM + AVRO, False),
        (SUM + AVRO, "value sum bigint" + AVRO, False),
        ("value sum struct<n:int,n:int>" + AVRO, "value sum struct<n:int>" + AVRO, False),
    ],
)
def test_the_states_of_a_processor(before: str, now: str, fits: bool) -> None:
    texts = [processor(text.removesuffix(AVRO), AVRO if text.endswith(AVRO) else "") for text in (before, now)]
    held = snapshot((DEDUP, texts[0]))
    if fits:
        check(held, DEDUP, texts[1])
    else:
        with pytest.raises(StatefulPlanChanged, match="transformWithState by k"):
            check(held, DEDUP, texts[1])


@pytest.mark.parametrize(
    "now",
    [
        processor(f"{LAST}, {SUM}", name="Other"),
        processor(f"{LAST}, {SUM}").replace("by k", "by j"),
        processor(f"{LAST}, {SUM}").replace("append", "update"),
        processor(f"{LAST}, {SUM}").replace("eventtime", "none"),
        processor(f"{LAST}, {SUM}").replace("5 minutes", "6 minutes"),
        SUM,
    ],
)
def test_other_changes_with_a_processors_states_are_refused(now: str) -> None:
    with pytest.raises(StatefulPlanChanged):
        check(snapshot((processor(SUM),)), now)
