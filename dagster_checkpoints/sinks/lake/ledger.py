"""The ledger of a sink's instance in a lake table's metadata: numbers by name, changed together with rows, in one commit.

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
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/again               number of other checkpoints whose rows readers see
    dagster-checkpoints/<pipeline>/<stage>/0/job-1.h1/again-0             likewise: such a checkpoint

Two commits that record the same name conflict, and the later one is planned again: so the numbers are compared and set in one
step. The name of the transaction that was committed last is not recorded.

Values only; must not know the table or the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dagster_checkpoints.sinks.branches import Branch, Branches
from dagster_checkpoints.sinks.lake.names import InstanceNames, TransactionName, owner_epoch
from dagster_checkpoints.sinks.ledger import JobLedger, Ledger, SinkOwner

_NEWEST = -1

Numbers = Callable[[str], int | None]
"""Reads the log's number of a name; None if none was recorded."""


class LakeLedger(Ledger, frozen=True):
    """The ledger of an instance; that of a job is read when it is asked for, from the table as it was read last.

    Args:
        read: reads the ledger of a job that no change has replaced.
    """

    read: Callable[[str], JobLedger] = lambda job: JobLedger()

    def job(self, job: str) -> JobLedger:
        return self.jobs[job] if job in self.jobs else self.read(job)


def read_ledger(instance: InstanceNames, history: str, numbers: Numbers) -> LakeLedger:
    """The ledger of an instance, with its newest owner of a history."""
    owner = SinkOwner(numbers(owner_number(instance, history)) or 0, history)
    return LakeLedger(owner=owner, read=lambda job: read_job(instance, job, numbers))


def read_job(instance: InstanceNames, job: str, numbers: Numbers) -> JobLedger:
    """What an instance has committed in a job."""
    name = _job(instance, job)

    def all_of(what: str) -> range:
        return range(numbers(f"{name}/{what}") or 0)

    def pair(what: str, first: str, second: str) -> tuple[int, int]:
        return numbers(f"{name}/{what}/{first}") or 0, numbers(f"{name}/{what}/{second}") or 0

    branches = Branches(tuple(Branch(*pair(f"branch-{at}", "restored", "first")) for at in all_of("branches")))
    newest = {first: numbers(f"{name}/since-{first}") for first in (0, *(branch.first for branch in branches.branches))}
    visible = numbers(f"{name}/visible")
    return JobLedger(
        branches,
        {first: checkpoint for first, checkpoint in newest.items() if checkpoint is not None},
        stretches=tuple(pair(f"stretch-{at}", "since", "first") for at in all_of("stretches")),
        shown=None if visible == _NEWEST else visible,
        again=tuple(numbers(f"{name}/again-{at}") or 0 for at in all_of("again")),
    )


def owner_number(instance: InstanceNames, history: str) -> str:
    """The name of the number that is the epoch of the instance's newest owner in a history."""
    return f"{_instance(instance)}/owner{f'@{history}' if history else ''}"


def changed_numbers(instance: InstanceNames, job: str, before: JobLedger, after: JobLedger) -> dict[str, int]:
    """The numbers to record when an instance's ledger of a job changes."""
    name = _job(instance, job)
    numbers: dict[str, int] = {}
    for since, checkpoint in after.newest.items():
        if before.newest.get(since) != checkpoint:
            numbers[f"{name}/since-{since}"] = checkpoint
    if after.branches != before.branches:
        numbers[f"{name}/branches"] = len(after.branches.branches)
        for at, branch in enumerate(after.branches.branches):
            numbers |= {f"{name}/branch-{at}/restored": branch.restored, f"{name}/branch-{at}/first": branch.first}
    if after.stretches != before.stretches:
        numbers[f"{name}/stretches"] = len(after.stretches)
        for at, (since, first) in enumerate(after.stretches):
            if before.stretches[at : at + 1] != ((since, first),):
                numbers |= {f"{name}/stretch-{at}/since": since, f"{name}/stretch-{at}/first": first}
    if after.shown != before.shown:
        numbers[f"{name}/visible"] = _NEWEST if after.shown is None else after.shown
    if after.again != before.again:
        numbers[f"{name}/again"] = len(after.again)
        numbers |= {f"{name}/again-{at}": checkpoint for at, checkpoint in enumerate(after.again)}
    return numbers


def is_committed(transaction: TransactionName, numbers: Numbers) -> bool:
    """Whether a transaction has been committed at some time, also if its rows were taken back since."""
    newest = numbers(f"{_job(transaction.instance, transaction.job)}/since-{transaction.since}")
    return newest is not None and newest >= transaction.checkpoint_id


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


def _job(instance: InstanceNames, job: str) -> str:
    return f"{_instance(instance)}/job-{job}"


def _instance(instance: InstanceNames) -> str:
    return f"dagster-checkpoints/{instance.pipeline}/{instance.stage}/{instance.index}"
