"""The external systems that sinks commit to. They survive every crash.

Of two kinds, as the targets of shipped sinks: a table, which changes rows and ledger in one transaction, and a folder, which
changes them one after the other. `dagster_checkpoints.sinks.engine` decides what is changed, and when.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import msgspec

from dagster_checkpoints.sinks.engine import LedgerChanged, Op, Plan, SinkLife, SinkScope, Steps
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Moves, SinkOwner, Staged, parse_name
from dagster_checkpoints.sinks.transactions import PendingTransactions
from dagster_checkpoints.systems.errors import SinkError, SinkTransactionLost
from simulation.violations import check

Rows = tuple[int, ...]
_BEHIND_ALL = 1 << 40
_AT_ONCE = frozenset({"check_moves", "discard", "hide", "publish", "remove_jobs", "show"})
"""Calls that may stand right behind the check that they rely on, one behind each check: a process that is paused in between for
longer than its lease can do harm in a file system, which renames under no fence."""


class TaskFailure(Exception):
    """An injected failure of a task, or a transaction that is lost or that a newer owner has: the task fails."""


class SinkSystem:
    """The rows that all instances of one stage have ever written.

    Args:
        stage: the stage's number.
        stepped: whether it is a folder.
        by_key: whether a row replaces the row with its key.

    Attributes:
        staged: by transaction, the instance that has staged it, and its rows.
        visible: by commit, the rows that readers see.
        hidden: likewise, rows that were taken back.
        ledgers: by instance.
        attempts: number of instances that were ever opened.
        keys: the key of each row, if rows replace others.
        table: by key, the row that was published last.
        is_copy: whether it is an older copy, which may lack transactions that a checkpoint holds.
        unlisted: commits of which a folder has rows, and no record.
    """

    def __init__(self, stage: int, stepped: bool, by_key: bool = False) -> None:
        self.stage = stage
        self.stepped = stepped
        self.by_key = by_key
        self.keys: dict[int, int] = {}
        self.table: dict[int, int] = {}
        self.staged: dict[str, tuple[int, Rows]] = {}
        self.visible: dict[Commit, Rows] = {}
        self.hidden: dict[Commit, Rows] = {}
        self.ledgers: dict[int, Ledger] = {}
        self.attempts = 0
        self.is_copy = False
        self.unlisted: set[Commit] = set()

    def rows(self, lineage: Iterable[tuple[int, int | None]]) -> list[int]:
        """The visible rows of a lineage: (job, its last checkpoint that counts), None for all checkpoints."""
        found: list[int] = []
        for job, upto in lineage:
            # A savepoint contains rows that its job may have hidden since.
            commits = self.visible if upto is None else {**self.hidden, **self.visible}
            for commit, rows in commits.items():
                if commit.job == str(job) and (upto is None or self._branches(commit).is_ancestor(commit.checkpoint, upto)):
                    found += rows
        return found

    def has_lost(self, staged: Staged) -> bool:
        """Whether a transaction is neither staged nor committed."""
        return staged.name not in self.staged and staged.commit not in self.visible and staged.commit not in self.hidden

    def new_attempt(
        self,
        job: int,
        index: int,
        parallelism: int,
        epoch: int,
        highest: int | None = None,
        committed: Commit | None = None,
    ) -> SinkScope:
        """What the next attempt of an instance is.

        Args:
            job: the job.
            index: the instance.
            parallelism: number of instances.
            epoch: the owner's epoch.
            highest: highest checkpoint id that storage has recorded; None if it is not known.
            committed: what the instance had committed last in the restored checkpoint.
        """
        self.attempts += 1
        owner, attempt = SinkOwner(epoch), f"a{self.attempts}"
        own = committed if committed is not None and committed.job == str(job) else None
        return SinkScope("", str(self.stage), index, parallelism, str(job), owner, attempt, highest, own)

    def copy(self) -> SinkSystem:
        """A backup, as of now."""
        made = SinkSystem(self.stage, self.stepped, self.by_key)
        made.put_back(self)
        return made  # without the keys, which belong to the rows and not to the table

    def put_back(self, backup: SinkSystem) -> None:
        """Become what a backup holds."""
        for name in ("table", "staged", "visible", "hidden", "ledgers"):
            setattr(self, name, dict(getattr(backup, name)))

    def _branches(self, commit: Commit) -> Any:
        return self.ledgers[commit.index].job(commit.job).branches


class Target:
    """One instance's part of a system, as the engine calls it; `job` is the job that it serves.

    Attributes:
        torn: whether the next move of rows stops in the middle.
    """

    def __init__(self, system: SinkSystem, index: int, job: str) -> None:
        self.system = system
        self.index = index
        self.job = job
        self.torn = False
        self._known: Ledger | None = None

    def read_ledger(self) -> Ledger:
        self._known = self.system.ledgers.get(self.index) or Ledger()
        return self._known

    def committed(self, job: str) -> list[Commit]:
        return self._of({*self.system.visible, *self.system.hidden} - self.system.unlisted, job)

    def unlisted(self, job: str) -> list[Commit]:
        return self._of({*self.system.visible, *self.system.hidden} & self.system.unlisted, job)

    def _of(self, commits: Iterable[Commit], job: str) -> list[Commit]:
        return sorted(commit for commit in commits if (commit.job, commit.index) == (job, self.index))

    def staged(self) -> list[str]:
        return [name for name, (index, _) in self.system.staged.items() if index == self.index]

    def discard(self, names: Sequence[str]) -> None:
        for name in names:
            self.system.staged.pop(name, None)

    def stage(self, name: str, rows: Rows) -> None:
        self.system.staged[name] = (self.index, rows)

    def other_jobs(self) -> list[str]:
        return sorted({commit.job for commit in (*self.system.visible, *self.system.hidden)} - {self.job})

    def remove_jobs(self, jobs: Sequence[str]) -> None:
        for rows in (self.system.visible, self.system.hidden):
            for commit in [commit for commit in rows if commit.job in jobs]:
                gone = {*rows.pop(commit)}
                self.system.table = {key: row for key, row in self.system.table.items() if row not in gone}

    # A table

    def transact(self, plan: Plan) -> None:
        change = plan(self.read_ledger())
        if change is not None:
            if change.alone:
                self.remove_jobs(self.other_jobs())
            moves = change.moves
            for commit in moves.hide:
                self.hide(commit)
            for commit in moves.show:
                self.show(commit)
            for staged in moves.publish:
                check(staged.commit not in self.system.visible, "stage {}: {} twice", self.system.stage, staged.commit)
                self.publish(staged)
            self.system.ledgers[self.index] = change.ledger

    # A folder

    def put_ledger(self, ledger: Ledger) -> None:
        if self._known != (self.system.ledgers.get(self.index) or Ledger()):
            raise LedgerChanged
        self.system.ledgers[self.index] = self._known = ledger

    def check_moves(self, moves: Moves) -> None:
        for commit in (*moves.hide, *moves.show):
            check(commit in self.system.visible or commit in self.system.hidden, "stage {}: no {}", self.system.stage, commit)

    def hide(self, commit: Commit) -> None:
        self._move(self.system.visible, self.system.hidden, commit)

    def show(self, commit: Commit) -> None:
        self._move(self.system.hidden, self.system.visible, commit)

    def publish(self, staged: Staged) -> None:
        """Make rows visible, those that are not."""
        system, commit = self.system, staged.commit
        index, rows = system.staged.pop(staged.name, (self.index, ()))
        seen = system.visible.get(commit, ())
        found = len(rows) + len(seen)
        if system.is_copy and found != staged.rows:
            raise SinkTransactionLost(f"{staged} is not there")
        check(found == staged.rows, "stage {}: {} has {} rows, {} were found", system.stage, staged, staged.rows, found)
        first, rest = self._halves(rows)
        system.visible[commit] = (*seen, *first)
        system.table |= {system.keys[row]: row for row in first if row in system.keys}
        if rest:
            system.staged[staged.name] = (index, rest)
            raise TaskFailure("half of the rows are published")

    def _move(self, source: dict[Commit, Rows], into: dict[Commit, Rows], commit: Commit) -> None:
        first, rest = self._halves(source.pop(commit, ()))
        if first:
            into[commit] = (*into.get(commit, ()), *first)
        if rest:
            source[commit] = rest
            raise TaskFailure("half of the rows are moved")

    def _halves(self, rows: Rows) -> tuple[Rows, Rows]:
        torn, self.torn = self.torn and self.system.stepped, False
        return (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if torn else (rows, ())


class TaskSink:
    """One instance's sink in one attempt.

    Args:
        system: the stage's rows.
        scope: what the attempt is.
        transactions: the transactions that the checkpoint holds for this instance; None at a new start.
        take_back_after: the restored checkpoint, if later ones were completed.
        replace: whether a new start removes the rows of other jobs.

    Attributes:
        rows: the rows of the current transaction.
        pending: the transactions that are not committed.
        stop_after: the number of calls of the target after which the task fails, in the middle of a move if it is one.
        committed: what it has committed last; None if nothing is known of that.
        behind_all: the id of a commit without a checkpoint, at the end of a task where none are taken after tasks have finished.
    """

    def __init__(
        self,
        system: SinkSystem,
        scope: SinkScope,
        transactions: Sequence[Staged] | None,
        take_back_after: int | None,
        replace: bool = False,
    ) -> None:
        self.system = system
        self.instance = scope.index
        self.rows: list[int] = []
        self.pending = PendingTransactions[Staged]()
        self.committed = scope.committed
        self._transactions = transactions
        self._take_back_after = take_back_after
        self._replace = replace
        self._scope = scope
        self.behind_all = _BEHIND_ALL + system.attempts
        self._life = SinkLife(self._scope, f"stage {system.stage}", stepped=system.stepped, by_key=system.by_key)
        self._target = Target(system, scope.index, scope.job)
        self.stop_after: int | None = None

    def open(self) -> Generator[None]:
        """Commit the checkpoint's transactions, abort all others. Stops between a check and the step that relies on it."""
        life = self._life
        yield from self._performed(life.open())
        if self._transactions is None:
            yield from self._performed(life.new_start(replace=self._replace))
            return
        for staged in self._transactions:
            rows = staged.payload
            if rows is not None and not (yield from self._performed(life.is_committed(staged))):
                self._target.stage(staged.name, tuple(rows))
        yield from self._performed(life.recover(self._transactions, self._take_back_after))
        if self._transactions:
            self.committed = self._transactions[-1].commit

    def settle(self, next_checkpoint_id: int) -> Generator[None]:
        """Show exactly the rows of the restored checkpoint: the instance does not run."""
        yield from self.open()
        if self._take_back_after is not None:
            yield from self._performed(self._life.begin(next_checkpoint_id))

    def pre_commit(self, checkpoint_id: int, with_rows: bool = False) -> tuple[Staged, ...]:
        """Close the current transaction. Returns all transactions that are not committed yet, `with_rows` for a savepoint."""
        self._at_once(self._life.begin(checkpoint_id, with_rows=bool(self.rows)))
        if self.rows:
            name = self._life.next_name()
            self._target.stage(name, tuple(self.rows))
            commit = Commit(self._scope.job, self.instance, checkpoint_id)
            self.pending.add(checkpoint_id, Staged(name, commit, len(self.rows)))
            self.rows = []
        staged = self.system.staged
        return tuple([_with_rows(t, staged[t.name][1]) if with_rows and t.name in staged else t for t in self.pending.all])

    def commit_up_to(self, checkpoint_id: int | None) -> None:
        """Commit the transactions of a checkpoint and of earlier ones; None: of all."""
        while (transaction := self.pending.first_up_to(checkpoint_id)) is not None:
            self._at_once(self._life.commit(transaction))
            self.pending.committed()
            self.committed = transaction.commit

    @property
    def newer_staged(self) -> bool:
        """Whether a newer owner has staged a transaction."""
        found = (parse_name(name) for name in self.system.staged)
        return any(name is not None and self._scope.owner.is_replaced_by(name.owner) for name in found)

    def staged_by_others(self) -> list[str]:
        """The staged transactions that are neither its own nor a newer owner's."""
        found = {name: parse_name(name) for name in self.system.staged}
        own = {name for name, parsed in found.items() if parsed is not None and parsed.attempt == self._scope.attempt}
        return sorted(
            name
            for name, parsed in found.items()
            if name not in own and parsed is not None and not self._scope.owner.is_replaced_by(parsed.owner)
        )

    def _at_once(self, steps: Steps[Any]) -> None:
        for _ in self._performed(steps):
            pass

    def _performed(self, steps: Steps[Any]) -> Generator[None, None, Any]:
        """Perform steps; stops in front of each, except where it relies on the one before."""
        answer: Any = None
        error: LedgerChanged | None = None
        checked = False
        while True:
            try:
                op: Op = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as ended:
                return ended.value
            except SinkError as failed:
                raise TaskFailure(str(failed)) from failed
            if not (checked and op.name in _AT_ONCE):
                yield
            checked = op.name not in _AT_ONCE
            if self.stop_after is not None:
                self.stop_after -= 1
                self._target.torn = self.stop_after < 0
            answer, error = None, None
            try:
                answer = getattr(self._target, op.name)(*op.args)
            except LedgerChanged as changed:
                error = changed
            except SinkError as failed:  # of a plan
                raise TaskFailure(str(failed)) from failed
            if self.stop_after is not None and self.stop_after < 0:
                raise TaskFailure("the task is stopped")


def _with_rows(staged: Staged, rows: Rows) -> Staged:
    return msgspec.structs.replace(staged, payload=rows)
