"""The context that a running stage receives: its interface only; the runtime implements it.

Must not know how or where state is stored: a user's stage may rely on these protocols and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dagster_checkpoints.pipeline.errors import NoInputAssetError

if TYPE_CHECKING:
    import logging

    from pyspark.sql import SparkSession


class ListState(Protocol):
    """A list of values, kept in every checkpoint.

    As `context.state.list` an instance gets its own items again on a restore; they are distributed evenly where the number
    of instances changes. As `context.state.union` every instance gets all the items of all instances on any restore. A
    checkpoint holds an item of a union once, with the instance that added it: after a restore `add` adds to an instance's
    own items, `update` and `clear` replace them, and the items of other instances do not change. Flink: operator `ListState`.

    Two warnings of FLIP-147. Items of a list may come to another instance although the number of instances is the same, where
    some of them have finished: do not rely on the instance that added an item. And an item that is added after `finish` may come
    back to an instance that gets more records, when the job is restored from a checkpoint that was taken before the end.
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
    """A mapping from texts to values that is the same in every instance. Flink: `BroadcastState`."""

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
    """A stage's own state by name; the first use of a name creates it. Keyed state is Spark's own.

    Values are stored as JSON. With a `type`, such as a :class:`msgspec.Struct`, a dataclass, `datetime` or `Decimal`, values are
    of that type, also after a restore; each checkpoint checks that. Without one they are what JSON has. A field that is added to
    a struct needs a default.
    """

    def list(self, name: str, type: Any = Any) -> ListState:
        """State whose items are distributed evenly on a restore."""
        ...

    def union(self, name: str, type: Any = Any) -> ListState:
        """State of which every instance gets all items on a restore."""
        ...

    def broadcast(self, name: str, type: Any = Any) -> BroadcastState:
        """State that is the same in every instance; the type is that of its values."""
        ...


@dataclass(frozen=True, slots=True)
class InputAsset:
    """A Dagster asset outside of the pipeline that a stage reads: its newest materialization when the run began.

    Attributes:
        key: The asset's key; its parts are separated by `/`.
        run_id: Id of the run that materialized it; empty if the materialization was reported otherwise.
        materialized_at: The time of the materialization, seconds since the epoch.
        partition: The partition that was materialized; None without partitions.
        data_version: The data version; None if there is none.
        metadata: The metadata, as Python values.
    """

    key: str
    run_id: str
    materialized_at: float
    partition: str | None = None
    data_version: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
        assets: The assets that the stage reads by `deps=` of `pipeline_assets`, by key, as they were when the run began; without
            those that were never materialized. Empty where Dagster does not run the pipeline, as in `dagster-checkpoints check`.
    """

    spark: SparkSession
    stage: str
    instance: str
    index: int
    parallelism: int
    state: OperatorStates
    log: logging.Logger
    assets: Mapping[str, InputAsset] = field(default_factory=dict)

    def asset(self, key: str) -> InputAsset:
        """The newest materialization of an asset that the stage reads; see `assets`.

        Args:
            key: The asset's key; its parts are separated by `/`.

        Raises:
            NoInputAssetError: The asset is not among the stage's `deps`, or was never materialized.
        """
        if key not in self.assets:
            raise NoInputAssetError(
                f"Stage {self.stage!r}: expected a materialization of asset {key!r}, found materializations of "
                f"{', '.join(map(repr, sorted(self.assets))) or 'no asset'}. Name the asset in deps= of @pipeline_assets, under "
                "this stage's name, and materialize it before the pipeline's run. Where Dagster does not run the pipeline, as in "
                "`dagster-checkpoints check`, no asset is known: use context.assets.get(...) if the stage has a default"
            )
        return self.assets[key]
