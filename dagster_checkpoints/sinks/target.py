"""What a destination of rows does for :class:`~dagster_checkpoints.sinks.target_sink.TargetSink`: the interface to implement.

A target stages rows where readers do not see them, and changes what they see in one of two ways. An *atomic* target performs a
change of rows and ledger in one transaction (:meth:`AtomicTarget.transact`). A *stepped* one moves rows, and stores the ledger,
one call after the other; each call can be repeated (:class:`SteppedTarget`). When these are called, and what follows from a crash
between any two calls, is decided by :mod:`engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_checkpoints.sinks.engine import Plan, SinkScope
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Moves, Staged

Guard = Callable[[Ledger], None]
"""Raises SinkFenced if a ledger names a newer owner."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch.

    Args:
        id: Spark's id: the same id in the same attempt is the same batch again, and replaces what was staged before.
        files: its rows, as Parquet files of this machine. They may be deleted after the call.
    """

    id: int
    files: Sequence[Path]


@dataclass(frozen=True)
class Sealed:
    """A transaction that is staged durably: number of rows, size in bytes and number of files, and what else publishing it
    needs, as JSON has it."""

    rows: int
    bytes: int | None = None
    files: int | None = None
    payload: Any = None


class SinkTarget(ABC):
    """One instance's destination. Before :meth:`open` only :meth:`jobs`, :meth:`foreign` and :meth:`close` are called."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it writes, as a transaction's text names it: a text of another place is refused. Never with credentials.

        Empty if a savepoint, which brings the rows, may be restored at another place.
        """

    @abstractmethod
    def jobs(self, scope: SinkScope) -> Sequence[str]:
        """The jobs that have committed rows there. Changes nothing. Raises SinkPathInUse for the place of another stage."""

    @abstractmethod
    def foreign(self) -> Sequence[str]:
        """Names of what is there that no job has written, and that a new start could not tell from its own rows; after `jobs`."""

    @abstractmethod
    def open(self, scope: SinkScope, guard: Guard) -> None:
        """Prepare for writing; claim the place for the stage.

        Args:
            scope: the instance.
            guard: is asked with the newest ledger before staged rows are added or discarded, in the same transaction if there is
                one.

        Raises:
            SinkPathInUse: the place belongs to another stage.
        """

    @abstractmethod
    def stage(self, name: str, batch: Batch) -> None:
        """Add a batch to a transaction, which need not exist yet; a batch of no files too, which may replace an earlier one."""

    @abstractmethod
    def seal(self, name: str, commit: Commit) -> Sealed | None:
        """Make a transaction durable, whose rows will be committed under `commit`; None if it has no rows."""

    @abstractmethod
    def staged(self) -> Sequence[str]:
        """The names of the instance's transactions that are not committed, of all attempts."""

    @abstractmethod
    def discard(self, names: Sequence[str]) -> None:
        """Delete staged transactions; one that does not exist is no error."""

    @abstractmethod
    def copies(self, staged: Staged) -> Mapping[str, Path]:
        """The files of a staged transaction, for a savepoint to copy; they stay as they are until the caller has copied them."""

    @abstractmethod
    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        """Stage a transaction again from the files of :meth:`copies`, unless it is staged. Idempotent."""

    @abstractmethod
    def read_ledger(self) -> Ledger:
        """The instance's newest ledger."""

    @abstractmethod
    def committed(self, job: str) -> Sequence[Commit]:
        """What the instance has committed in a job, also if its rows were taken back."""

    @abstractmethod
    def close(self) -> None:
        """Release what is open; an open transaction may be deleted."""


class AtomicTarget(SinkTarget):
    """A target that changes rows and ledger together."""

    @abstractmethod
    def transact(self, plan: Plan) -> str | None:
        """Perform a change in one transaction, planned from the newest ledger; again after a conflict or an unknown outcome.

        Returns:
            The table's version with the change; None if there was none, or without versions.

        Raises:
            SinkTransactionLost: rows to publish, or to show again, are not there any more.
            SinkCannotTakeBack: rows to hide cannot be told from others. Nothing was changed.
        """


class SteppedTarget(SinkTarget):
    """A target that changes rows and ledger one after the other. Each call can be repeated."""

    @abstractmethod
    def put_ledger(self, ledger: Ledger) -> None:
        """Replace the ledger durably, in one step.

        Raises:
            LedgerChanged: it is not as this target has read or put it last.
        """

    def unlisted(self, job: str) -> Sequence[Commit]:
        """Commits of the instance in a job of which there are rows, visible or taken back, and that :meth:`committed` does not
        name: what it goes by was deleted. Asked only if a restore has to move rows, so it may look at all there is."""
        return ()

    @abstractmethod
    def check_moves(self, moves: Moves) -> None:
        """Refuse what cannot be moved, before anything is. Raises SinkTransactionLost, SinkCannotTakeBack."""

    @abstractmethod
    def publish(self, staged: Staged) -> None:
        """Make a transaction's rows visible; those that are stay."""

    @abstractmethod
    def hide(self, commit: Commit) -> None:
        """Take a commit's rows back, without deleting them; those that were taken back stay so."""

    @abstractmethod
    def show(self, commit: Commit) -> None:
        """Make a commit's rows visible again; those that are stay."""

    @abstractmethod
    def other_jobs(self) -> Sequence[str]:
        """The jobs that have left anything there, of any instance, without the scope's own."""

    @abstractmethod
    def remove_jobs(self, jobs: Sequence[str]) -> None:
        """Delete the rows of these jobs, of every instance, with what says that they exist last."""
