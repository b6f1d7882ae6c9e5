"""A stage's list, union list and broadcast state, kept in the driver and written into every checkpoint.

Values are written as JSON. A state that is used with a type has values of that type: a msgspec struct, a dataclass, a date, or
anything else that msgspec reads from JSON. Without one they are what JSON has. Spark keeps keyed state, not this module.

Source: Flink's `OperatorStateStore`.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dagster_checkpoints.spark.errors import OperatorStateError
from dagster_checkpoints.state.metadata import OperatorState

StateKind = Literal["list", "union", "broadcast"]


class ListValues:
    """State that is a list of items."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = list(items)

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
        super().__init__(seen)
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

    def __init__(self, items: Iterable[tuple[str, Any]] = ()) -> None:
        self._values = dict(items)

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

    A state that the stage does not use stays as it was restored, and is in every checkpoint.

    Args:
        restored: The states that the instance starts with, as redistributed over the instances.
        own: The states that the instance itself wrote into the checkpoint: they show which items of a union are its own; default:
            all items.
    """

    def __init__(self, restored: Sequence[OperatorState] = (), own: Sequence[OperatorState] | None = None) -> None:
        self._restored = {(state.kind, state.name): state.items for state in restored}
        written = restored if own is None else own
        self._own_items = {state.name: state.items for state in written if state.kind == "union"}
        self._lists: dict[str, ListValues] = {}
        self._unions: dict[str, UnionValues] = {}
        self._broadcasts: dict[str, BroadcastValues] = {}
        self._types: dict[tuple[StateKind, str], Any] = {}

    def list(self, name: str, type: Any = Any) -> ListValues:
        if self._is_new("list", name, type):
            self._lists[name] = ListValues(self._values("list", name))
        return self._lists[name]

    def union(self, name: str, type: Any = Any) -> UnionValues:
        if self._is_new("union", name, type):
            own = self._decoded("union", name, self._own_items.get(name, ()))
            self._unions[name] = UnionValues(self._values("union", name), own)
        return self._unions[name]

    def broadcast(self, name: str, type: Any = Any) -> BroadcastValues:
        if self._is_new("broadcast", name, type):
            self._broadcasts[name] = BroadcastValues(self._values("broadcast", name))
        return self._broadcasts[name]

    def snapshot(self) -> tuple[OperatorState, ...]:
        """The state as a checkpoint holds it.

        Raises:
            TypeError: JSON cannot hold a value.
            OperatorStateError: A value is not of its state's type, so that a restore could not read it.
        """
        lists = {name: self._encoded("list", name, values) for name, values in self._lists.items()}
        unions = {name: self._encoded("union", name, values.own) for name, values in self._unions.items()}
        broadcasts = {name: self._encoded("broadcast", name, values.items()) for name, values in self._broadcasts.items()}
        kinds: tuple[tuple[StateKind, Mapping[str, tuple[bytes, ...]]], ...] = (
            ("list", self._unused("list") | lists),
            ("union", {**self._unused("union"), **self._own_unused(), **unions}),
            ("broadcast", self._unused("broadcast") | broadcasts),
        )
        return tuple(OperatorState(name, kind, items) for kind, states in kinds for name, items in sorted(states.items()))

    def _is_new(self, kind: StateKind, name: str, type: Any) -> bool:
        known = self._types.setdefault((kind, name), type)
        if known != type and type is not Any:
            raise OperatorStateError(f"context.state.{kind}({name!r}) has values of {known}, as at its first use; found {type}.")
        used: dict[StateKind, Collection[str]] = {"list": self._lists, "union": self._unions, "broadcast": self._broadcasts}
        return name not in used[kind]

    def _values(self, kind: StateKind, name: str) -> tuple[Any, ...]:
        return self._decoded(kind, name, self._restored.get((kind, name), ()))

    def _decoded(self, kind: StateKind, name: str, items: Iterable[bytes]) -> tuple[Any, ...]:
        value_type = self._types[kind, name]
        decoder = msgspec.json.Decoder(types.GenericAlias(tuple, (str, value_type)) if kind == "broadcast" else value_type)
        values = []
        for item in items:
            try:
                values.append(decoder.decode(item))
            except msgspec.ValidationError as error:
                raise OperatorStateError(
                    f"context.state.{kind}({name!r}): expected values of {value_type}, found {item.decode()} ({error}). Give the "
                    "type fields with defaults for what is new, read the old type and convert it, or use another name."
                ) from error
        return tuple(values)

    def _encoded(self, kind: StateKind, name: str, values: Iterable[Any]) -> tuple[bytes, ...]:
        items = tuple(msgspec.json.encode(value) for value in values)
        if self._types[kind, name] is not Any:
            self._decoded(kind, name, items)
        return items

    def _unused(self, kind: StateKind) -> dict[str, tuple[bytes, ...]]:
        return {name: items for (of, name), items in self._restored.items() if of == kind and (of, name) not in self._types}

    def _own_unused(self) -> dict[str, tuple[bytes, ...]]:
        return {name: self._own_items.get(name, ()) for name in self._unused("union")}
