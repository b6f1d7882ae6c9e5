"""The context that a running stage receives: its interface only; the runtime implements it.

Must not know how or where state is stored: a user's stage may rely on these protocols and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import logging

    from pyspark.sql import SparkSession


class ListState(Protocol):
    """A list of JSON values, kept in every checkpoint.

    As `context.state.list` an instance gets its own items again on a restore; they are distributed evenly where the number
    of instances changes. As `context.state.union` every instance gets all the items of all instances on any restore. A
    checkpoint holds an item of a union once, with the instance that added it: after a restore `add` adds to an instance's
    own items, `update` and `clear` replace them, and the items of other instances do not change. Flink: operator `ListState`.
    """

    def __iter__(self) -> Iterator[Any]:
        """The items in the order in which they were added."""
        ...

    def add(self, value: Any) -> None:
        """Append one item."""
        ...

    def update(self, values: Iterable[Any]) -> None:
        """Replace all items."""
        ...

    def clear(self) -> None:
        """Remove all items."""
        ...


class BroadcastState(Protocol):
    """A mapping that is the same in every instance (text to JSON values). Flink: `BroadcastState`."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `key`, or `default`."""
        ...

    def put(self, key: str, value: Any) -> None:
        """Set the value under `key`."""
        ...

    def remove(self, key: str) -> None:
        """Remove `key` if the state has it."""
        ...

    def items(self) -> Iterable[tuple[str, Any]]:
        """All keys with their values."""
        ...


class OperatorStates(Protocol):
    """A stage's own state by name; the first use of a name creates it. Keyed state is Spark's own."""

    def list(self, name: str) -> ListState:
        """State whose items are distributed evenly on a restore."""
        ...

    def union(self, name: str) -> ListState:
        """State of which every instance gets all items on a restore."""
        ...

    def broadcast(self, name: str) -> BroadcastState:
        """State that is the same in every instance."""
        ...


@dataclass(frozen=True)
class StageContext:
    """What one instance of a stage needs while it runs.

    Args:
        spark: Spark session of the stage's DataFrames.
        stage: Name of the stage.
        instance: Name of this instance, one of the stage's `instances`.
        index: Number of this instance among them, from 0.
        parallelism: Number of the stage's instances.
        state: The stage's own list, union list and broadcast state.
        log: Logger whose lines Dagster shows with the run.
    """

    spark: SparkSession
    stage: str
    instance: str
    index: int
    parallelism: int
    state: OperatorStates
    log: logging.Logger
