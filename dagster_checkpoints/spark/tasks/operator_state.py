"""A stage's list, union list and broadcast state, kept in the driver and written into every checkpoint.

Values are anything that JSON can hold. Spark keeps keyed state, not this module.

Source: Flink's `OperatorStateStore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from dagster_checkpoints.state import OperatorState


class ListValues:
    """State that is a list of items."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._items))

    def add(self, value: Any) -> None:
        self._items.append(value)

    def update(self, values: Iterable[Any]) -> None:
        self._items = list(values)

    def clear(self) -> None:
        self._items = []


class UnionValues(ListValues):
    """State that is a list of items; after a restore each instance sees the items of all instances.

    A checkpoint holds each item once, from the instance that added it, or that was restored with it as its own item. If every
    instance wrote all items that it sees, each restore would multiply the items by the number of instances.

    Args:
        seen: The items of all instances.
        own: The items among them that belong to this instance.
    """

    def __init__(self, seen: Iterable[Any] = (), own: Iterable[Any] = ()) -> None:
        super().__init__()
        self._items = list(seen)
        self.own = list(own)

    def add(self, value: Any) -> None:
        super().add(value)
        self.own.append(value)

    def update(self, values: Iterable[Any]) -> None:
        super().update(values)
        self.own = list(self._items)

    def clear(self) -> None:
        super().clear()
        self.own = []


class BroadcastValues:
    """State that is a mapping, the same in every instance."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def remove(self, key: str) -> None:
        self._values.pop(key, None)

    def items(self) -> Iterable[tuple[str, Any]]:
        return list(self._values.items())


class OperatorStateStore:
    """All operator state of one instance of one stage, by kind and name.

    Args:
        restored: The states that the instance starts with, as redistributed over the instances.
        own: The states that the instance itself wrote into the checkpoint: they show which items of a union are its own; default:
            all items.
    """

    def __init__(self, restored: Sequence[OperatorState] = (), own: Sequence[OperatorState] | None = None) -> None:
        self._lists: dict[str, ListValues] = {}
        self._unions: dict[str, UnionValues] = {}
        self._broadcasts: dict[str, BroadcastValues] = {}
        own_items = {state.name: _values(state) for state in (restored if own is None else own) if state.kind == "union"}
        for state in restored:
            if state.kind == "broadcast":
                target = self.broadcast(state.name)
                for key, value in _values(state):
                    target.put(key, value)
            elif state.kind == "union":
                self._unions[state.name] = UnionValues(_values(state), own_items.get(state.name, ()))
            else:
                self.list(state.name).update(_values(state))

    def list(self, name: str) -> ListValues:
        return self._lists.setdefault(name, ListValues())

    def union(self, name: str) -> UnionValues:
        return self._unions.setdefault(name, UnionValues())

    def broadcast(self, name: str) -> BroadcastValues:
        return self._broadcasts.setdefault(name, BroadcastValues())

    def snapshot(self) -> tuple[OperatorState, ...]:
        """The state as a checkpoint holds it.

        Raises:
            TypeError: JSON cannot hold a value.
        """
        return (
            *(_state(name, "list", values) for name, values in sorted(self._lists.items())),
            *(_state(name, "union", values.own) for name, values in sorted(self._unions.items())),
            *(_state(name, "broadcast", values.items()) for name, values in sorted(self._broadcasts.items())),
        )


def _values(state: OperatorState) -> tuple[Any, ...]:
    return tuple(msgspec.json.decode(item) for item in state.items)


def _state(name: str, kind: Literal["list", "union", "broadcast"], values: Iterable[Any]) -> OperatorState:
    return OperatorState(name=name, kind=kind, items=tuple(msgspec.json.encode(value) for value in values))
