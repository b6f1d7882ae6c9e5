"""The world outside: where sinks commit to. Survives every crash.

What a directory of committed rows does: transactions are staged, committed under the name of checkpoint, job and instance, and
taken out of sight when the job goes back to an older checkpoint. When that happens is decided by `dagster_checkpoints.sinks`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from dagster_checkpoints.sinks.branches import Branches, settlement
from dagster_checkpoints.sinks.transactions import (
    AbortRest,
    Commit,
    ContinueFrom,
    PendingTransactions,
    Settle,
    TakeFence,
    begins_timeline,
    new_start,
    recovery,
    stages_for_newer_owner,
)
from simulation.violations import Violation, check

Rows = tuple[int, ...]
Target = tuple[int, int, int]
"""(checkpoint, job, instance) under which rows are visible."""


class SinkError(Exception):
    """A transaction is lost or in conflict; the task fails."""


class Transaction(NamedTuple):
    """The text that goes into a checkpoint."""

    name: str
    instance: int
    target: Target


class SinkSystem:
    """What one stage has written, all instances and all times."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.staged: dict[str, tuple[int, Rows]] = {}
        """By transaction: whose instance's staging area it is in, and its rows."""
        self.visible: dict[Target, Rows] = {}
        self.hidden: dict[Target, Rows] = {}
        self.branches: dict[tuple[int, int], Branches] = {}
        self.fences: dict[int, int] = {}
        """By instance, the newest owner that has opened its sink: an older one must not abort or take back any more."""

    def take_fence(self, instance: int, epoch: int) -> None:
        """From now on older owners are kept away. Raises SinkError if this is one."""
        if self.fences.get(instance, 0) > epoch:
            raise SinkError(f"stage {self.stage}: instance {instance} belongs to a newer owner")
        self.fences[instance] = epoch

    def commit(self, transaction: Transaction) -> None:
        name, _, target = transaction
        staged = self.staged.get(name)
        if target in self.visible:
            if staged is not None and staged[1] != self.visible[target]:
                raise Violation(f"stage {self.stage}: two transactions for {target}: {staged[1]} and {self.visible[target]}")
            self.staged.pop(name, None)
            return
        if staged is None:
            raise SinkError(f"stage {self.stage}: transaction {name} for {target} is lost")
        self.visible[target] = self.staged.pop(name)[1]

    def settle(self, job: int, instance: int, restored: int) -> None:
        """Show exactly what lies on the way to the checkpoint that the job is restored from."""
        branches = self.branches.get((job, instance), Branches())
        mine = (job, instance)
        visible, hidden = ([t for t in rows if t[1:] == mine] for rows in (self.visible, self.hidden))
        moves = settlement(branches, restored, visible, hidden, _checkpoint_of)
        for target in moves.hide:
            self.hidden[target] = self.visible.pop(target)
        for target in moves.show:
            rows = self.hidden.pop(target)
            self.visible.setdefault(target, rows)

    def rows(self, lineage: Iterable[tuple[int, int | None]]) -> list[int]:
        """Visible rows of a job and of those it has come from: (job, up to which checkpoint), None for all."""
        found: list[int] = []
        for job, upto in lineage:
            for (checkpoint, whose, instance), rows in self.visible.items():
                if whose == job and (upto is None or self._is_ancestor(job, instance, checkpoint, upto)):
                    found += rows
            if upto is not None:
                for target, rows in self.hidden.items():
                    again = target in self.visible  # a savepoint has brought them along
                    if target[1] == job and not again and self._is_ancestor(job, target[2], target[0], upto):
                        found += rows
        return found

    def _is_ancestor(self, job: int, instance: int, checkpoint: int, upto: int) -> bool:
        return self.branches.get((job, instance), Branches()).is_ancestor(checkpoint, upto)


def _checkpoint_of(target: Target) -> int:
    return target[0]


class TaskSink:
    """One instance's sink in one attempt."""

    __slots__ = ("_attempt", "_epoch", "_instance", "_job", "_number", "_origins", "_parallelism", "_pending", "_system", "rows")

    def __init__(self, system: SinkSystem, job: int, instance: int, parallelism: int, attempt: str, epoch: int) -> None:
        self._system = system
        self._job = job
        self._instance = instance
        self._parallelism = parallelism
        self._attempt = attempt
        self._epoch = epoch
        self._pending = PendingTransactions[Transaction]()
        self._origins: dict[tuple[int, int], int] = {}
        """By job and instance, from where it goes on; until its first checkpoint since."""
        self._number = 0
        self.rows: list[int] = []

    def open(
        self,
        transactions: Iterable[Transaction] | None,
        take_back_after: int | None,
        held: Mapping[str, Rows],
        others: Sequence[Transaction],
    ) -> Generator[None]:
        """Commit what the checkpoint holds, abort all else. Stops between a check and what relies on it.

        Args:
            held: the rows that a savepoint has brought along.
            others: transactions that other instances commit, after a change of their number.
        """
        system = self._system
        system.take_fence(self._instance, self._epoch)
        yield
        steps: Sequence[TakeFence | Settle | Commit[Transaction] | AbortRest | ContinueFrom] = new_start()
        if transactions is not None:
            transactions = list(transactions)
            for transaction in transactions:
                if transaction.name in held and transaction.target not in system.visible:
                    system.staged[transaction.name] = (self._instance, held[transaction.name])
            steps = recovery(transactions, take_back_after)
        for step in steps:
            match step:
                case TakeFence():
                    # No stop in front of taking back: no file system renames under a fence, so an owner that is paused for a
                    # whole lease just there hides what newer owners have committed (`sinks.fence`).
                    system.take_fence(self._instance, self._epoch)
                case Settle(restored):
                    for job, instance in self._mine():
                        system.settle(job, instance, restored)
                case Commit(transaction):
                    self._commit(transaction)
                case AbortRest():
                    yield
                    self._abort_rest(others)
                case ContinueFrom(restored):
                    self._goes_on_from(restored, others)

    def pre_commit(self, checkpoint_id: int) -> tuple[Transaction, ...]:
        """Close the current transaction. Returns all that are not committed yet."""
        for mine, origin in list(self._origins.items()):
            if begins_timeline(origin, checkpoint_id):
                self._system.take_fence(self._instance, self._epoch)
                branches = self._system.branches.get(mine, Branches())
                self._system.branches[mine] = branches.begun(origin, checkpoint_id)
                del self._origins[mine]
        if self.rows:
            self._number += 1
            name = f"e{self._epoch}-{self._attempt}.{self._instance}.{self._number}"
            self._system.staged[name] = (self._instance, tuple(self.rows))
            self.rows = []
            self._pending.add(checkpoint_id, Transaction(name, self._instance, (checkpoint_id, self._job, self._instance)))
        return self._pending.all

    def pin(self) -> dict[str, Rows]:
        """For a savepoint: the rows of all that is not committed yet."""
        return {t.name: self._system.staged[t.name][1] for t in self._pending.all if t.name in self._system.staged}

    def commit_up_to(self, checkpoint_id: int | None) -> None:
        while (transaction := self._pending.first_up_to(checkpoint_id)) is not None:
            self._commit(transaction)
            self._pending.committed()

    @property
    def pending(self) -> int:
        return len(self._pending.all)

    def close(self) -> None:
        self.rows = []

    def _commit(self, transaction: Transaction) -> None:
        try:
            self._system.commit(transaction)
        except SinkError as error:
            # Of what a checkpoint holds nothing may be lost while its owner is the newest.
            check(self._system.fences[self._instance] > self._epoch, error)
            raise

    def _goes_on_from(self, restored: int | None, others: Sequence[Transaction]) -> None:
        """From a checkpoint of its own that later ones were taken back for, or from the job's beginning: 0."""
        for mine in self._mine():
            targets = (*self._system.visible, *(transaction.target for transaction in others))
            anything = any(target[1:] == mine for target in targets)
            if restored is not None or not anything:
                self._origins[mine] = restored or 0

    def _abort_rest(self, others: Sequence[Transaction]) -> None:
        kept = {transaction.name for transaction in others}
        for name, (instance, _) in list(self._system.staged.items()):
            mine = instance == self._instance or (self._instance == 0 and instance >= self._parallelism)
            if mine and name not in kept and not self._is_newer(name):
                del self._system.staged[name]

    def _is_newer(self, name: str) -> bool:
        """Whether a newer owner has staged it."""
        return stages_for_newer_owner(self._epoch, int(name[1 : name.index("-")]))

    @property
    def newer_staged(self) -> bool:
        """Whether a newer owner has staged something here."""
        return any(self._is_newer(name) for name in self._system.staged)

    def _mine(self) -> list[tuple[int, int]]:
        """This instance, and for the first one those that are no more, after a change of parallelism."""
        mine = [(self._job, self._instance)]
        if self._instance == 0:
            gone = {
                t[2] for t in (*self._system.visible, *self._system.hidden) if t[1] == self._job and t[2] >= self._parallelism
            }
            mine += [(self._job, instance) for instance in sorted(gone)]
        return mine
