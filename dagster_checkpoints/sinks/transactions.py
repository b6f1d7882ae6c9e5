"""The transactions of a sink's instance: which are pending, which a completed checkpoint commits, and the steps of a start.

Values only: the sinks of the runtime and of the simulator perform the same steps. Must not know files, rows or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")
"""A transaction, as the checkpoint holds it."""


class PendingTransactions(Generic[T]):
    """The transactions of one instance that are pre-committed and not yet committed, oldest first."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, T]] = []

    @property
    def all(self) -> tuple[T, ...]:
        """The transactions that the next checkpoint holds."""
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


class TakeFence(msgspec.Struct, frozen=True):
    """Refuse older owners from now on; an owner that is older than the newest one stops."""


class Settle(msgspec.Struct, frozen=True):
    """Show exactly the rows on the way to the checkpoint `restored`, which this job took."""

    restored: int


class CommitStep(msgspec.Struct, Generic[T], frozen=True):
    """Commit a transaction that the checkpoint holds."""

    transaction: T


class AbortRest(msgspec.Struct, frozen=True):
    """Abort every staged transaction that was not committed; those of a newer owner stay."""


class ContinueFrom(msgspec.Struct, frozen=True):
    """The job continues from its checkpoint `restored`; None: from a checkpoint of another job, or from none."""

    restored: int | None


def new_start() -> tuple[TakeFence | AbortRest | ContinueFrom, ...]:
    """The steps of an instance at a new start of the job, in order."""
    return TakeFence(), AbortRest(), ContinueFrom(None)


def recovery(
    committed: Sequence[T], restored: int | None
) -> tuple[TakeFence | Settle | CommitStep[T] | AbortRest | ContinueFrom, ...]:
    """The steps of an instance after a restore, in order.

    The fence comes first, since file systems have no fenced rename. The checkpoint's transactions are committed before the
    others are aborted.

    Args:
        committed: the transactions that the checkpoint holds, oldest first.
        restored: id of the checkpoint or savepoint if this job took it; None otherwise.
    """
    settle = () if restored is None else (Settle(restored),)
    return TakeFence(), *settle, *map(CommitStep, committed), AbortRest(), ContinueFrom(restored)


def begins_timeline(origin: int | None, checkpoint_id: int) -> bool:
    """Whether this checkpoint is the first one after the job continued from `origin`: then `origin` is recorded before it.

    Args:
        origin: id of the checkpoint that the job continued from (0: its beginning); None after the first checkpoint since then.
        checkpoint_id: id of the checkpoint that is being taken.
    """
    return origin is not None and checkpoint_id > origin


def stages_for_newer_owner(epoch: int, staged_by: int) -> bool:
    """Whether an owner of this epoch must not abort transactions that an owner of epoch `staged_by` has staged."""
    return staged_by > epoch
