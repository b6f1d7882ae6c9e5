"""States of `context.state` with a type: values come back as that type, and what does not fit is refused by name."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.spark.errors import OperatorStateError
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore


class Split(msgspec.Struct):
    path: str
    read_to: int = 0


class OlderSplit(msgspec.Struct):
    path: str


@dataclass
class Limit:
    most: Decimal
    since: dt.date


def restored(store: OperatorStateStore) -> OperatorStateStore:
    return OperatorStateStore(store.snapshot())


def test_values_come_back_as_their_type() -> None:
    store = OperatorStateStore()
    store.list("splits", Split).update([Split("a", 3), Split("b")])
    store.union("seen", dt.datetime).add(dt.datetime(2026, 1, 2, tzinfo=dt.UTC))
    store.broadcast("limits", Limit).put("shop", Limit(Decimal("1.50"), dt.date(2026, 1, 1)))
    again = restored(store)
    assert list(again.list("splits", Split)) == [Split("a", 3), Split("b")]
    assert list(again.union("seen", dt.datetime)) == [dt.datetime(2026, 1, 2, tzinfo=dt.UTC)]
    assert dict(again.broadcast("limits", Limit).items()) == {"shop": Limit(Decimal("1.50"), dt.date(2026, 1, 1))}
    assert again.snapshot() == store.snapshot()
    assert [dict(each) for each in restored(store).list("splits")] == [{"path": "a", "read_to": 3}, {"path": "b", "read_to": 0}]


def test_a_type_may_get_fields_with_defaults() -> None:
    store = OperatorStateStore()
    store.list("splits", OlderSplit).add(OlderSplit("a"))
    assert list(restored(store).list("splits", Split)) == [Split("a", 0)]


def test_state_that_a_stage_does_not_use_stays() -> None:
    store = OperatorStateStore()
    store.list("splits", Split).add(Split("a"))
    store.union("seen").add(1)
    store.broadcast("limits").put("a", 2)
    again = OperatorStateStore(store.snapshot(), own=())
    again.list("other").add(1)
    kept = {(state.kind, state.name): state.items for state in again.snapshot()}
    assert kept == {
        ("list", "splits"): (b'{"path":"a","read_to":0}',),
        ("list", "other"): (b"1",),
        ("union", "seen"): (),  # the item is another instance's
        ("broadcast", "limits"): (b'["a",2]',),
    }


def test_values_of_another_type_are_refused() -> None:
    store = OperatorStateStore()
    store.list("splits", Split).add({"file": "a"})
    said = r"context.state.list\('splits'\): expected values of .*Split.*, found \{\"file\":\"a\"\} \(.*`path`"
    with pytest.raises(OperatorStateError, match=said):
        store.snapshot()
    untyped: Any = OperatorStateStore()
    untyped.broadcast("limits").put("shop", "much")
    with pytest.raises(OperatorStateError, match=r"context.state.broadcast\('limits'\): expected values of .*Limit"):
        restored(untyped).broadcast("limits", Limit)


def test_a_state_has_one_type() -> None:
    store = OperatorStateStore()
    splits = store.list("splits", Split)
    assert store.list("splits") is splits is store.list("splits", Split)
    with pytest.raises(
        OperatorStateError, match=r"context.state.list\('splits'\) has values of .*Split.*, as at its first use; found"
    ):
        store.list("splits", OlderSplit)
    assert store.union("splits", OlderSplit) is not splits
