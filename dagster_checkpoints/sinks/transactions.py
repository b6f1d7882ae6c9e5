"""The transactions of a sink's instance: which are pending, and which a completed checkpoint commits.

Values only: the sinks of the runtime and of the simulator ask the same. Must not know files, rows or threads.
"""

from __future__ import annotations

from typing import Generic, TypeVar

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
