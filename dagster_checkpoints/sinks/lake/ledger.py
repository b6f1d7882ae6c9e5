"""What a lake table's metadata records about the sink's instances: numbers by name, changed together with rows, in one commit.

Where the numbers are stored is the format's: see the modules that implement ``TableLog``. The sink uses them as a small table::

    dagster-checkpoints/<pipeline>/<stage>/0/owner@h1                     epoch of the newest owner
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/since-0             newest committed checkpoint of that branch
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/stretches           number of recorded stretches
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/stretch-0/since     likewise: the branch whose checkpoints were committed
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/stretch-0/first     likewise: the first of these checkpoints
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/branches            number of recorded branches (see sinks/branches.py)
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/branch-0/restored   likewise: the checkpoint that the branch begins at
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/branch-0/first      likewise: its first checkpoint
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/visible             the checkpoint whose rows readers see; -1: the newest

Two commits that record the same name conflict, and the later one is planned again: so the numbers are compared and set in one
step. A transaction is committed if and only if its branch has recorded its checkpoint or a later one: on one branch an instance
commits in the order of ids. A branch gets its own number since a savepoint with smaller ids may be restored later. A stretch is
a sequence of commits on one branch: the stretches tell the order of all commits, which matters where rows replace others.

Values only; must not know the table or the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.branches import Branch, Branches
from dagster_checkpoints.sinks.lake.names import InstanceNames, TransactionName, owner_epoch

_NEWEST = -1
_AFTER_ALL = 2**62

Numbers = Callable[[str], int | None]
"""Reads the log's number of a name; None if none was recorded."""


def owner_number(context: SinkContext) -> str:
    """The name of the number that is the epoch of the instance's newest owner."""
    history = f"@{context.history}" if context.history else ""
    return f"{_instance(InstanceNames(context.pipeline, context.stage, context.index))}/owner{history}"


@dataclass(frozen=True, slots=True)
class LakeJobLedger:
    """What the log says about one instance of one job.

    Args:
        instance: the instance.
        job: the job's name.
        branches: the job's branches.
        visible: id of the checkpoint whose rows a restore has made visible, until the job's next checkpoint; None: readers see
            the rows of the newest branch.
    """

    instance: InstanceNames
    job: str
    branches: Branches
    visible: int | None

    def since(self, checkpoint_id: int) -> int:
        """The first checkpoint of the branch that a new checkpoint is on; 0 for the first branch."""
        return self.branches.branch_of(checkpoint_id)

    def sees(self, checkpoint_id: int) -> bool:
        """Whether readers see the rows that this checkpoint has committed."""
        return self.branches.is_ancestor(checkpoint_id, _AFTER_ALL if self.visible is None else self.visible)

    def showing(self, restored: int) -> dict[str, int]:
        """The numbers to record when the rows on the way to this checkpoint are made visible; 0: none of the job's rows."""
        return {f"{_job(self.instance, self.job)}/visible": restored}

    def begun(self, restored: int, first: int) -> tuple[LakeJobLedger, dict[str, int]]:
        """The ledger after the job's first checkpoint after a restore, and the numbers to record; none if nothing changes.

        Args:
            restored: id of the restored checkpoint or savepoint; 0 for the job's beginning.
            first: id of the job's next checkpoint.
        """
        branches = self.branches.begun(restored, first)
        name = _job(self.instance, self.job)
        numbers: dict[str, int] = {}
        if branches != self.branches:
            numbers[f"{name}/branches"] = len(branches.branches)
            for position, branch in enumerate(branches.branches):
                numbers[f"{name}/branch-{position}/restored"] = branch.restored
                numbers[f"{name}/branch-{position}/first"] = branch.first
        if self.visible is not None:
            numbers[f"{name}/visible"] = _NEWEST
        return LakeJobLedger(self.instance, self.job, branches, None), numbers


def read_ledger(instance: InstanceNames, job: str, numbers: Numbers) -> LakeJobLedger:
    """Read the numbers of one instance of one job."""
    name = _job(instance, job)
    branches = tuple(
        Branch(numbers(f"{name}/branch-{position}/restored") or 0, numbers(f"{name}/branch-{position}/first") or 0)
        for position in range(numbers(f"{name}/branches") or 0)
    )
    visible = numbers(f"{name}/visible")
    return LakeJobLedger(instance, job, Branches(branches), None if visible in (None, _NEWEST) else visible)


def is_committed(transaction: TransactionName, numbers: Numbers) -> bool:
    """Whether a transaction has been committed at some time, also if its rows were taken back since."""
    return (numbers(_since(transaction)) or 0) >= transaction.checkpoint_id


def newest(transaction: TransactionName) -> dict[str, int]:
    """The number that says that a transaction is committed."""
    return {_since(transaction): transaction.checkpoint_id}


def committing(transaction: TransactionName, numbers: Numbers) -> dict[str, int]:
    """The numbers to record with a transaction's rows."""
    job = _job(transaction.instance, transaction.job)
    count = numbers(f"{job}/stretches") or 0
    if count and numbers(f"{job}/stretch-{count - 1}/since") == transaction.since:
        return newest(transaction)
    begun = {
        f"{job}/stretches": count + 1,
        f"{job}/stretch-{count}/since": transaction.since,
        f"{job}/stretch-{count}/first": transaction.checkpoint_id,
    }
    return {**newest(transaction), **begun}


def commit_order(instance: InstanceNames, job: str, committed: Iterable[TransactionName], numbers: Numbers) -> list[int]:
    """The ids of the checkpoints that an instance of a job has committed, in the order of their commits.

    Args:
        instance: the instance.
        job: the job's name.
        committed: its committed transactions.
        numbers: reads the log's numbers.
    """
    name = _job(instance, job)
    stretches = [
        (numbers(f"{name}/stretch-{number}/since"), numbers(f"{name}/stretch-{number}/first") or 0)
        for number in range(numbers(f"{name}/stretches") or 0)
    ]

    def stretch(one: TransactionName) -> int:
        """The last stretch of the branch that began at or before the checkpoint; -1: before stretches were recorded."""
        found = (at for at, (since, first) in enumerate(stretches) if since == one.since and first <= one.checkpoint_id)
        return max(found, default=-1)

    return [one.checkpoint_id for one in sorted(committed, key=lambda one: (stretch(one), one.checkpoint_id))]


def committed_of(transactions: Iterable[TransactionName], numbers: Numbers) -> list[TransactionName]:
    """The committed ones among transactions of any instances and jobs, oldest first.

    A checkpoint's id is used a second time if no checkpoint with this or a later id completed: then only the newest owner's
    transaction can have been committed.
    """
    newest: dict[tuple[InstanceNames, str, int, int], TransactionName] = {}
    for one in transactions:
        key = (one.instance, one.job, one.since, one.checkpoint_id)
        other = newest.get(key)
        if other is None or owner_epoch(other.attempt) <= owner_epoch(one.attempt):
            newest[key] = one
    return sorted((one for one in newest.values() if is_committed(one, numbers)), key=lambda one: one.checkpoint_id)


def describe(numbers: Mapping[str, int]) -> dict[str, str]:
    """Numbers as text, for the information that a commit carries for people."""
    return {name: str(number) for name, number in numbers.items()}


def _since(transaction: TransactionName) -> str:
    return f"{_job(transaction.instance, transaction.job)}/since-{transaction.since}"


def _job(instance: InstanceNames, job: str) -> str:
    return f"{_instance(instance)}/job-{job}"


def _instance(instance: InstanceNames) -> str:
    return f"dagster-checkpoints/{instance.pipeline}/{instance.stage}/{instance.index}"
