"""The order of a sink instance's transactions: which are pending, what a completed checkpoint commits, and what a start does.

Values only: the sinks of the runtime and of the simulator perform the same steps. Must not know files, rows or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
"""A transaction, as the checkpoint holds it."""


class PendingTransactions(Generic[T]):
    """The transactions of one instance that are pre-committed and not yet committed, oldest first."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, T]] = []

    @property
    def all(self) -> tuple[T, ...]:
        """What the next checkpoint holds."""
        return tuple(transaction for _, transaction in self._pending)

    def add(self, checkpoint_id: int, transaction: T) -> None:
        """A transaction was pre-committed for this checkpoint."""
        self._pending.append((checkpoint_id, transaction))

    def first_up_to(self, checkpoint_id: int | None) -> T | None:
        """The next transaction to commit: the oldest one of this checkpoint or an earlier one, or of any checkpoint (None).

        A transaction whose checkpoint was aborted is committed with the next one that completes.

        Returns:
            The transaction; None if none is left.
        """
        if not self._pending or (checkpoint_id is not None and self._pending[0][0] > checkpoint_id):
            return None
        return self._pending[0][1]

    def committed(self) -> None:
        """The oldest transaction is committed."""
        del self._pending[0]


@dataclass(frozen=True, slots=True)
class TakeFence:
    """Keep older owners away from here on; an owner that is older than the newest one stops."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Show exactly the rows on the way to the checkpoint `restored`, which the job had itself."""

    restored: int


@dataclass(frozen=True, slots=True)
class Commit(Generic[T]):
    """Commit a transaction that the checkpoint holds."""

    transaction: T


@dataclass(frozen=True, slots=True)
class AbortRest:
    """Abort what is staged and belongs to no transaction that is committed; a newer owner's stays."""


@dataclass(frozen=True, slots=True)
class GoOnFrom:
    """The job goes on from its checkpoint `restored`; None: from no checkpoint of its own."""

    restored: int | None


def new_start() -> tuple[TakeFence | AbortRest | GoOnFrom, ...]:
    """What an instance does at a new start of the job, in this order."""
    return TakeFence(), AbortRest(), GoOnFrom(None)


def recovery(committed: Sequence[T], restored: int | None) -> tuple[TakeFence | Settle | Commit[T] | AbortRest | GoOnFrom, ...]:
    """What an instance does after a restore, in this order.

    The fence comes first, since no file system renames under one. What the checkpoint holds is committed before the rest is
    aborted.

    Args:
        committed: the transactions that the checkpoint holds, oldest first.
        restored: the id of the checkpoint or savepoint if the job had it itself; None otherwise.
    """
    settle = () if restored is None else (Settle(restored),)
    return TakeFence(), *settle, *map(Commit, committed), AbortRest(), GoOnFrom(restored)


def begins_timeline(origin: int | None, checkpoint_id: int) -> bool:
    """Whether this checkpoint is the first one since the job went on from `origin`, which is written down before it.

    Args:
        origin: the checkpoint that the job went on from (0: its beginning) until its first checkpoint since; None after it.
        checkpoint_id: the checkpoint that is being taken.
    """
    return origin is not None and checkpoint_id > origin


def stages_for_newer_owner(epoch: int, staged_by: int) -> bool:
    """Whether what an owner of epoch `staged_by` has staged must not be aborted by an owner of this epoch."""
    return staged_by > epoch
