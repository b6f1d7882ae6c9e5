"""The external system that sinks commit to. Survives every crash.

Behaves as a directory of committed rows: transactions are staged, committed under checkpoint, job and instance, and hidden when
the job goes back to an older checkpoint. `dagster_checkpoints.sinks` decides when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from dagster_checkpoints.sinks import transactions as step
from dagster_checkpoints.sinks.branches import Branches, settlement
from simulation.violations import check

Rows = tuple[int, ...]
Target = tuple[int, int, int]
"""(checkpoint, job, instance) under which rows are committed."""
Name = tuple[int, int]
"""(epoch of the owner, number) of a transaction."""


class TaskFailure(Exception):
    """An injected failure of a task, or a transaction that is lost or that a newer owner has: the task fails."""


class Transaction(NamedTuple):
    """A transaction as a checkpoint records it; `rows`: its rows, if it is recorded in a savepoint and not committed yet."""

    name: Name
    target: Target
    rows: Rows | None = None


class SinkSystem:
    """The rows that all instances of one stage have ever written."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.transactions = 0
        self.staged: dict[Name, tuple[int, Rows]] = {}
        """By transaction: the instance in whose staging area it is, and its rows."""
        self.visible: dict[Target, Rows] = {}
        self.hidden: dict[Target, Rows] = {}
        self.branches: dict[tuple[int, int], Branches] = defaultdict(Branches)
        """By job and instance."""
        self.fences: dict[int, int] = {}
        """By instance, the epoch of the newest owner that has opened its sink: older owners may not abort or hide rows."""

    def take_fence(self, instance: int, epoch: int) -> None:
        """Fence older owners off. Raises TaskFailure if a newer owner has done so."""
        if self.fences.get(instance, 0) > epoch:
            raise TaskFailure(f"stage {self.stage}: instance {instance} belongs to a newer owner")
        self.fences[instance] = epoch

    def settle(self, job: int, instance: int, restored: int) -> None:
        """Show exactly the rows on the timeline of the checkpoint that the job is restored from."""
        visible, hidden = ([t for t in rows if t[1:] == (job, instance)] for rows in (self.visible, self.hidden))
        moves = settlement(self.branches[job, instance], restored, visible, hidden, itemgetter(0))
        for target in moves.hide:
            self.hidden[target] = self.visible.pop(target)
        for target in moves.show:
            self.visible.setdefault(target, self.hidden.pop(target))

    def rows(self, lineage: Iterable[tuple[int, int | None]]) -> list[int]:
        """The visible rows of a lineage: (job, its last checkpoint that counts), None for all checkpoints."""
        found: list[int] = []
        for job, upto in lineage:
            # A savepoint contains rows that its job may have hidden since.
            targets = self.visible if upto is None else {**self.hidden, **self.visible}
            for (checkpoint, of_job, instance), rows in targets.items():
                if of_job == job and (upto is None or self.branches[job, instance].is_ancestor(checkpoint, upto)):
                    found += rows
        return found


@dataclass(slots=True, eq=False)
class TaskSink:
    """One instance's sink in one attempt.

    Attributes:
        epoch: the owner's epoch.
        transactions: the transactions that the checkpoint holds for this instance; None at a new start.
        take_back_after: the restored checkpoint, if later ones were completed.
        others: the transactions that the checkpoint holds for any instance.
        settles: for the first instance that runs, those that had finished, whose sinks it settles; None for others.
        rows: the rows of the current transaction.
        pending: the transactions that are not committed.
        origins: by job and instance, the checkpoint that it continues from, until its next checkpoint.
    """

    system: SinkSystem
    job: int
    instance: int
    parallelism: int
    epoch: int
    transactions: Sequence[Transaction] | None
    take_back_after: int | None
    others: Sequence[Transaction]
    settles: frozenset[int] | None = None
    rows: list[int] = field(default_factory=list)
    pending: step.PendingTransactions[Transaction] = field(default_factory=step.PendingTransactions)
    origins: dict[tuple[int, int], int] = field(default_factory=dict)

    def open(self) -> Generator[None]:
        """Commit the checkpoint's transactions, abort all others. Stops between a check and the step that relies on it."""
        system = self.system
        system.take_fence(self.instance, self.epoch)
        yield
        steps: Sequence[Any] = step.new_start()
        if self.transactions is not None:
            for name, target, rows in self.transactions:
                if rows is not None and target not in system.visible:
                    system.staged[name] = (self.instance, rows)
            steps = step.recovery(self.transactions, self.take_back_after)
        for due in steps:
            match due:
                case step.TakeFence():
                    # No stop between fence and hiding: an owner paused there for a whole lease would hide rows that newer
                    # owners have committed, because no file system renames under a fence (`sinks/parquet/fence.py`).
                    system.take_fence(self.instance, self.epoch)
                case step.Settle(restored):
                    for mine in self._own_instances():
                        system.settle(*mine, restored)
                case step.Commit(transaction):
                    self._commit(transaction)
                case step.AbortRest():
                    yield
                    self._abort_rest()
                case step.ContinueFrom(restored):
                    self._continue_from(restored)

    def pre_commit(self, checkpoint_id: int, with_rows: bool = False) -> tuple[Transaction, ...]:
        """Close the current transaction. Returns all transactions that are not committed yet, `with_rows` for a savepoint."""
        system = self.system
        for mine, origin in list(self.origins.items()):
            if step.begins_timeline(origin, checkpoint_id):
                system.take_fence(self.instance, self.epoch)
                system.branches[mine] = system.branches[mine].begun(origin, checkpoint_id)
                del self.origins[mine]
        if self.rows:
            system.transactions += 1
            name = (self.epoch, system.transactions)
            system.staged[name] = (self.instance, tuple(self.rows))
            self.rows = []
            self.pending.add(checkpoint_id, Transaction(name, (checkpoint_id, self.job, self.instance)))
        pending, staged = self.pending.all, system.staged
        return tuple([t._replace(rows=staged[t.name][1]) if t.name in staged else t for t in pending]) if with_rows else pending

    def commit_up_to(self, checkpoint_id: int | None) -> None:
        while (transaction := self.pending.first_up_to(checkpoint_id)) is not None:
            self._commit(transaction)
            self.pending.committed()

    def _commit(self, transaction: Transaction) -> None:
        """Make its rows visible, unless they were before. Raises TaskFailure if it is neither staged nor committed."""
        system, (name, target, _) = self.system, transaction
        _, rows = system.staged.pop(name, (0, None))
        if rows is None and target not in system.visible:
            lost = f"stage {system.stage}: transaction {name} for {target} is lost"
            check(system.fences[self.instance] > self.epoch, lost)  # allowed only if there is a newer owner
            raise TaskFailure(lost)
        found = system.visible.setdefault(target, rows or ())
        check(rows is None or rows == found, "stage {}: two transactions for {}: {} and {}", system.stage, target, rows, found)

    def _continue_from(self, restored: int | None) -> None:
        """Set the origins: the restored checkpoint, if later ones were taken back; 0 at the beginning of the job."""
        targets = [*self.system.visible, *(transaction.target for transaction in self.others)]
        for mine in self._own_instances():
            if restored is not None or all(target[1:] != mine for target in targets):
                self.origins[mine] = restored or 0

    def _abort_rest(self) -> None:
        kept = {transaction.name for transaction in self.others}
        for name, (instance, _) in list(self.system.staged.items()):
            if self._owns(instance) and name not in kept and not step.stages_for_newer_owner(self.epoch, name[0]):
                del self.system.staged[name]

    @property
    def newer_staged(self) -> bool:
        """Whether a newer owner has staged a transaction."""
        return any(step.stages_for_newer_owner(self.epoch, name[0]) for name in self.system.staged)

    def _own_instances(self) -> list[tuple[int, int]]:
        """This instance; for the first that runs also those that had finished, or no longer exist."""
        targets = (*self.system.visible, *self.system.hidden)
        own = {instance for _, job, instance in targets if job == self.job and self._owns(instance)}
        return [(self.job, instance) for instance in sorted({self.instance, *own})]

    def _owns(self, instance: int) -> bool:
        if instance == self.instance or self.settles is None:
            return instance == self.instance
        return instance in self.settles or instance >= self.parallelism
