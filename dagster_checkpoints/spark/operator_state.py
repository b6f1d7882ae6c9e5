"""A stage's own list, union list and broadcast state, kept in the driver and written into every checkpoint.

Values are whatever JSON can hold. Keyed state is not here: it is Spark's.

Source: Flink's `OperatorStateStore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from dagster_checkpoints.state import OperatorState

ListKind = Literal["list", "union"]


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
    """All operator state of one instance of one stage, by kind and name."""

    def __init__(self, restored: Iterable[OperatorState] = ()) -> None:
        self._lists: dict[tuple[ListKind, str], ListValues] = {}
        self._broadcasts: dict[str, BroadcastValues] = {}
        for state in restored:
            items = [msgspec.json.decode(item) for item in state.items]
            if state.kind == "broadcast":
                target = self.broadcast(state.name)
                for key, value in items:
                    target.put(key, value)
            else:
                self._list(state.kind, state.name).update(items)

    def list(self, name: str) -> ListValues:
        return self._list("list", name)

    def union(self, name: str) -> ListValues:
        return self._list("union", name)

    def broadcast(self, name: str) -> BroadcastValues:
        return self._broadcasts.setdefault(name, BroadcastValues())

    def snapshot(self) -> tuple[OperatorState, ...]:
        """The state as a checkpoint holds it.

        Raises:
            TypeError: A value that JSON cannot hold.
        """
        lists = [
            OperatorState(name=name, kind=kind, items=tuple(msgspec.json.encode(item) for item in values))
            for (kind, name), values in sorted(self._lists.items())
        ]
        broadcasts = [
            OperatorState(name=name, kind="broadcast", items=tuple(msgspec.json.encode(item) for item in values.items()))
            for name, values in sorted(self._broadcasts.items())
        ]
        return (*lists, *broadcasts)

    def _list(self, kind: ListKind, name: str) -> ListValues:
        return self._lists.setdefault((kind, name), ListValues())
