"""The world outside: where sinks commit to. Survives every crash.

What a directory of committed rows does: transactions are staged, committed under the name of checkpoint, job and instance, and
taken out of sight when the job goes back to an older checkpoint. When that happens is decided by `dagster_checkpoints.sinks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from dagster_checkpoints.sinks import transactions as step
from dagster_checkpoints.sinks.branches import Branches, settlement
from simulation.violations import check

Rows = tuple[int, ...]
Target = tuple[int, int, int]
"""(checkpoint, job, instance) under which rows are visible."""
Name = tuple[int, str, int, int]
"""(epoch of the owner, attempt, instance, number) of what is staged."""


class SinkError(Exception):
    """A transaction is lost or in conflict; the task fails."""


class Transaction(NamedTuple):
    """The text that goes into a checkpoint."""

    name: Name
    target: Target


class SinkSystem:
    """What one stage has written, all instances and all times."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.staged: dict[Name, tuple[int, Rows]] = {}
        """Whose instance's staging area each is in, and its rows."""
        self.visible: dict[Target, Rows] = {}
        self.hidden: dict[Target, Rows] = {}
        self.branches: dict[tuple[int, int], Branches] = defaultdict(Branches)
        """By job and instance."""
        self.fences: dict[int, int] = {}
        """By instance, the newest owner that has opened its sink: an older one must not abort or take back any more."""

    def take_fence(self, instance: int, epoch: int) -> None:
        """From now on older owners are kept away. Raises SinkError if this is one."""
        if self.fences.get(instance, 0) > epoch:
            raise SinkError(f"stage {self.stage}: instance {instance} belongs to a newer owner")
        self.fences[instance] = epoch

    def commit(self, transaction: Transaction) -> None:
        """Show its rows, unless it has done so before. Raises SinkError if it is neither staged nor committed."""
        name, target = transaction
        _, rows = self.staged.pop(name, (0, None))
        if rows is None and target not in self.visible:
            raise SinkError(f"stage {self.stage}: transaction {name} for {target} is lost")
        found = self.visible.setdefault(target, rows or ())
        check(rows is None or rows == found, "stage {}: two transactions for {}: {} and {}", self.stage, target, rows, found)

    def settle(self, job: int, instance: int, restored: int) -> None:
        """Show exactly what is on the way to the checkpoint that the job is restored from."""
        visible, hidden = ([t for t in rows if t[1:] == (job, instance)] for rows in (self.visible, self.hidden))
        moves = settlement(self.branches[job, instance], restored, visible, hidden, itemgetter(0))
        for target in moves.hide:
            self.hidden[target] = self.visible.pop(target)
        for target in moves.show:
            self.visible.setdefault(target, self.hidden.pop(target))

    def rows(self, lineage: Iterable[tuple[int, int | None]]) -> list[int]:
        """Visible rows of a job and of those it has come from: (job, up to which checkpoint), None for all."""
        found: list[int] = []
        for job, upto in lineage:
            # A savepoint has brought along what the job that it is of may have hidden since.
            targets = self.visible if upto is None else {**self.hidden, **self.visible}
            for (checkpoint, whose, instance), rows in targets.items():
                if whose == job and (upto is None or self.branches[job, instance].is_ancestor(checkpoint, upto)):
                    found += rows
        return found


@dataclass(slots=True, eq=False)
class TaskSink:
    """One instance's sink in one attempt.

    Attributes:
        epoch: of the owner.
        transactions: what the checkpoint holds for this instance; None at a new start.
        take_back_after: the checkpoint, if later ones were completed.
        held: the rows of transactions, which a savepoint has brought along.
        others: transactions that the checkpoint holds for any instance.
        rows: of the current transaction.
        pending: the transactions that are not committed.
        origins: by job and instance, the checkpoint that it continues from; until its first checkpoint since.
    """

    system: SinkSystem
    job: int
    instance: int
    parallelism: int
    attempt: str
    epoch: int
    transactions: Sequence[Transaction] | None
    take_back_after: int | None
    held: Mapping[Name, Rows]
    others: Sequence[Transaction]
    rows: list[int] = field(default_factory=list)
    pending: step.PendingTransactions[Transaction] = field(default_factory=step.PendingTransactions)
    origins: dict[tuple[int, int], int] = field(default_factory=dict)
    number: int = 0

    def open(self) -> Generator[None]:
        """Commit what the checkpoint holds, abort all else. Stops between a check and what relies on it."""
        system = self.system
        system.take_fence(self.instance, self.epoch)
        yield
        steps: Sequence[Any] = step.new_start()
        if self.transactions is not None:
            for name, target in self.transactions:
                if name in self.held and target not in system.visible:
                    system.staged[name] = (self.instance, self.held[name])
            steps = step.recovery(self.transactions, self.take_back_after)
        for due in steps:
            match due:
                case step.TakeFence():
                    # No stop in front of taking back: no file system renames under a fence, so an owner that is paused for a
                    # whole lease just there hides what newer owners have committed (`sinks.fence`).
                    system.take_fence(self.instance, self.epoch)
                case step.Settle(restored):
                    for mine in self._mine():
                        system.settle(*mine, restored)
                case step.Commit(transaction):
                    self._commit(transaction)
                case step.AbortRest():
                    yield
                    self._abort_rest()
                case step.ContinueFrom(restored):
                    self._continue_from(restored)

    def pre_commit(self, checkpoint_id: int) -> tuple[Transaction, ...]:
        """Close the current transaction. Returns all that are not committed yet."""
        system = self.system
        for mine, origin in list(self.origins.items()):
            if step.begins_timeline(origin, checkpoint_id):
                system.take_fence(self.instance, self.epoch)
                system.branches[mine] = system.branches[mine].begun(origin, checkpoint_id)
                del self.origins[mine]
        if self.rows:
            self.number += 1
            name = (self.epoch, self.attempt, self.instance, self.number)
            system.staged[name] = (self.instance, tuple(self.rows))
            self.rows = []
            self.pending.add(checkpoint_id, Transaction(name, (checkpoint_id, self.job, self.instance)))
        return self.pending.all

    def pin(self) -> dict[Name, Rows]:
        """For a savepoint: the rows of all that is not committed yet."""
        return {t.name: self.system.staged[t.name][1] for t in self.pending.all if t.name in self.system.staged}

    def commit_up_to(self, checkpoint_id: int | None) -> None:
        while (transaction := self.pending.first_up_to(checkpoint_id)) is not None:
            self._commit(transaction)
            self.pending.committed()

    def _commit(self, transaction: Transaction) -> None:
        try:
            self.system.commit(transaction)
        except SinkError as error:
            # Of what a checkpoint holds nothing may be lost while its owner is the newest.
            check(self.system.fences[self.instance] > self.epoch, str(error))
            raise

    def _continue_from(self, restored: int | None) -> None:
        """From a checkpoint of its own that later ones were taken back for, or from the job's beginning: 0."""
        targets = [*self.system.visible, *(transaction.target for transaction in self.others)]
        for mine in self._mine():
            if restored is not None or all(target[1:] != mine for target in targets):
                self.origins[mine] = restored or 0

    def _abort_rest(self) -> None:
        kept = {transaction.name for transaction in self.others}
        for name, (instance, _) in list(self.system.staged.items()):
            mine = instance == self.instance or (self.instance == 0 and instance >= self.parallelism)
            if mine and name not in kept and not step.stages_for_newer_owner(self.epoch, name[0]):
                del self.system.staged[name]

    @property
    def newer_staged(self) -> bool:
        """Whether a newer owner has staged something here."""
        return any(step.stages_for_newer_owner(self.epoch, name[0]) for name in self.system.staged)

    def _mine(self) -> list[tuple[int, int]]:
        """This instance, and for the first one those that are no more, after a change of parallelism."""
        gone: set[int] = set()
        if self.instance == 0:
            targets = (*self.system.visible, *self.system.hidden)
            gone = {instance for _, job, instance in targets if job == self.job and instance >= self.parallelism}
        return [(self.job, instance) for instance in (self.instance, *sorted(gone))]
