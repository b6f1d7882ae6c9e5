"""The gate between a task and its query's sources: what Spark is told in each round, and when it is kept waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.spark.query import query_gate
from dagster_checkpoints.spark.query.query_gate import GateView, QueryGate

SECONDS = 60.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> QueryGate:
    monkeypatch.setattr(query_gate, "IDLE_SECONDS", SECONDS)
    made = QueryGate({"a": 1, "b": 0})
    made.begin()
    return made


@contextmanager
def asking(gate: QueryGate, source: object) -> Iterator[list[GateView]]:
    """Ask on another thread, as Spark does. The block is entered when the gate keeps the thread waiting."""
    answers: list[GateView] = []
    thread = threading.Thread(target=lambda: answers.append(gate.look(source)))
    thread.start()
    until(lambda: gate.idle)
    assert not answers
    yield answers
    thread.join(SECONDS)
    assert len(answers) == 1


def until(condition: Any) -> None:
    waited = threading.Event()
    for _ in range(int(SECONDS * 100)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("the condition did not become true")


def test_all_sources_of_a_round_get_the_same_view(gate: QueryGate) -> None:
    assert gate.look("records") == GateView({"a": 1, "b": 0})
    gate.open_to({"a": 4}, 7)
    assert gate.look("watermark") == GateView({"a": 1, "b": 0}), "this round began before"
    assert gate.look("watermark") == GateView({"a": 4, "b": 0}, 7), "the second question begins a round"
    gate.open_to({"b": 2}, None)
    assert gate.look("records") == GateView({"a": 4, "b": 0}, 7)
    assert gate.look("records") == GateView({"a": 4, "b": 2}, 7), "None leaves the watermark as it is"


@given(st.lists(st.sampled_from(["ask", "open"]), max_size=20), st.permutations(["r1", "r2", "w"]))
def test_a_watermark_never_comes_without_the_records_in_front_of_it(steps: list[str], order: list[str]) -> None:
    """Whatever the order in which Spark asks, and wherever the gate opens in between."""
    gate, opened, asked, round_of = QueryGate({"a": 0}), 0, 0, {}
    for step in steps:
        if step == "open":
            opened += 1
            gate.open_to({"a": opened}, 100 * opened)  # the watermark 100 n is behind n elements
            gate.batch_ran()  # or a round without news would wait
        else:
            source = order[asked % 3]
            view = gate.look(source)
            round_of.setdefault(asked // 3, []).append(view)
            asked += 1
            gate.batch_ran()
            assert view.watermark is None or view.positions["a"] * 100 == view.watermark
    assert all(len(set(map(repr, views))) == 1 for views in round_of.values())


def test_a_query_without_news_waits_until_the_gate_opens(gate: QueryGate) -> None:
    gate.look("records"), gate.look("watermark")
    with asking(gate, "records") as answers:
        gate.open_to({"a": 2}, None)
    assert answers == [GateView({"a": 2, "b": 0})]
    assert gate.look("watermark") == answers[0], "only the first source of a round waits"
    with asking(gate, "records"):
        gate.open_to({"a": 2}, None)  # nothing new
        assert gate.idle
        gate.open_to({}, 5)


def test_after_a_batch_spark_may_have_more_to_do(gate: QueryGate) -> None:
    gate.look("records")
    gate.batch_ran()
    assert not gate.idle
    assert gate.look("records") == GateView({"a": 1, "b": 0}), "such as a batch for an advanced watermark"
    with asking(gate, "records"):
        gate.close()


def test_a_stop_ends_the_wait_and_a_new_start_begins_a_round(gate: QueryGate) -> None:
    assert not gate.asked
    gate.look("records")
    assert gate.asked
    with asking(gate, "records"):
        gate.close()
    assert not gate.idle
    assert gate.look("records") == GateView({"a": 1, "b": 0}), "a closed gate keeps no source waiting"
    gate.error = ValueError("of the last start")
    gate.begin()
    assert not gate.asked and gate.error is None


def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_gate, "IDLE_SECONDS", 0.01)
    gate = QueryGate({"a": 1})
    assert [gate.look("records") for _ in range(3)] == [GateView({"a": 1})] * 3
