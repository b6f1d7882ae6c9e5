"""The life of one instance of a sink, as steps: in which order its target is asked and changed, and what each answer means.

::

    open ── new_start  or  recover ── (begin ── …the target seals a transaction… ── commit)*

A target is one of two kinds. An *atomic* one changes rows and ledger together: it gets a plan, a pure function from the ledger to
a change, and performs the change in one transaction; after a conflict, or an unknown outcome, it asks the plan again. A *stepped*
one, a file system, changes them one after the other: the change is recorded first, then its rows move one commit at a time, each
as often as needed, then the ledger says that it is done. A change that was interrupted is completed before anything else.

Every change is asked of the newest ledger, and refused if that names a newer owner. File systems have no fenced rename: there the
owner is asked right before each move.

Pure: the steps yield :class:`Op`, the name of a target's method with its arguments; :func:`drive` calls it. Must not know files,
rows, threads or time. The simulator drives the same steps, with crashes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from dagster_checkpoints.sinks.branches import check_not_overwritten
from dagster_checkpoints.sinks.ledger import (
    Change,
    Commit,
    JobLedger,
    Ledger,
    Moves,
    SinkOwner,
    Staged,
    StagedName,
    Unfinished,
    parse_name,
)
from dagster_checkpoints.systems.errors import (
    SinkAheadOfStorage,
    SinkCannotTakeBack,
    SinkFenced,
    SinkTargetChanged,
    SinkTransactionConflict,
    SinkUnavailable,
)

T = TypeVar("T")

_TRIES = 20
_NO_MOVES = Moves()


class Op(NamedTuple):
    """A call of a target's method."""

    name: str
    args: tuple[Any, ...] = ()


Steps = Generator[Op, Any, T]
"""A generator that yields calls, is sent their answers, and returns the result of the procedure."""
Plan = Callable[[Ledger], Change | None]
"""A change that is planned from the newest ledger; None: nothing is left to do."""


def drive(steps: Steps[T], target: object) -> T:
    """Perform all steps on a target; an error of the target is raised at the step."""
    try:
        op = next(steps)
        while True:
            try:
                answer = getattr(target, op.name)(*op.args)
            except Exception as error:
                op = steps.throw(error)
            else:
                op = steps.send(answer)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


class LedgerChanged(Exception):
    """A stepped target's ledger is not as it was read last: it is read again."""


class SinkScope(msgspec.Struct, frozen=True):
    """The instance that a sink serves.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's uid.
        index: the instance's index.
        parallelism: number of instances of the stage.
        job: the job's name: its number, with the history that counts it.
        owner: the run that owns the pipeline.
        attempt: token of this execution of the instance; letters, digits, ``_``, ``-`` and ``.``.
        highest: highest checkpoint id that storage has recorded when this execution begins; None if it is not known.
        committed: what the instance had committed last in the restored checkpoint, if this job has committed it; None if nothing
            is known of that.
    """

    pipeline: str
    stage: str
    index: int
    parallelism: int
    job: str
    owner: SinkOwner
    attempt: str
    highest: int | None = None
    committed: Commit | None = None


class SinkLife:
    """One instance in one attempt.

    Args:
        scope: the instance.
        sink: the sink as errors name it.
        stepped: whether the target changes rows and ledger one after the other.
        by_key: whether rows replace earlier ones: then a restore takes nothing back, since the job writes the rows again.
    """

    def __init__(self, scope: SinkScope, sink: str, *, stepped: bool, by_key: bool) -> None:
        self._scope = scope
        self._sink = sink
        self._stepped = stepped
        self._by_key = by_key
        self._number = 0
        self._highest = scope.highest
        """As that of the scope; None once the instance is open, since it may commit later checkpoints itself."""
        self._committed = scope.committed
        """What the ledger names in any case."""
        self._is_recorded = False
        """Whether the ledger of a stepped target has named the instance's owner. What an atomic one says is perhaps not recorded
        yet: its table may be created later, by another instance."""
        self.origin: int | None = None
        """The checkpoint that the job continues from, until its next checkpoint; 0: its beginning."""

    def next_name(self) -> str:
        """The name of the next transaction."""
        self._number += 1
        return StagedName(self._scope.owner, self._scope.attempt, self._number - 1).text

    # A start

    def open(self) -> Steps[None]:
        """Refuse older owners from now on, and complete a change that was interrupted.

        Raises:
            SinkFenced: a newer owner has opened the instance.
            SinkAheadOfStorage: the job has committed a checkpoint that storage does not know.
            SinkTargetChanged: the ledger does not name what the restored checkpoint knows as committed.
        """
        yield from self._change(self._plan_fence)
        self._highest = None

    def new_start(self, *, replace: bool) -> Steps[None]:
        """At the beginning of a job: discard what is staged, and remove the rows of other jobs if asked to.

        Args:
            replace: whether the rows of other jobs are removed.
        """
        yield from self.open()
        yield from self._discard_rest()
        self.origin = yield from self._beginning()
        if replace:
            yield from self._change(self._plan_alone)

    def recover(self, transactions: Sequence[Staged], restored: int | None) -> Steps[None]:
        """After a restore: show the rows of the checkpoint, commit its transactions, discard the others.

        Args:
            transactions: the transactions that the checkpoint holds, oldest first.
            restored: id of the checkpoint or savepoint if this job took it; None otherwise.

        Raises:
            SinkCannotTakeBack: rows on the way may have been replaced by key.
        """
        yield from self.open()
        if restored is not None:
            yield from self._settle(restored)
        for staged in transactions:
            yield from self.commit(staged)
        yield from self._discard_rest()
        self.origin = (yield from self._beginning()) if restored is None else restored

    def _settle(self, restored: int) -> Steps[None]:
        found: Sequence[Commit] = yield Op("committed", (self._scope.job,))
        if self._stepped and not self._by_key:
            yield from self._check_listed(restored)

        def plan(ledger: Ledger) -> Change | None:
            self.check_owner(ledger)
            job = ledger.job(self._scope.job)
            committed = [commit for commit in found if job.is_committed(commit.checkpoint)]
            if self._by_key:
                order = job.in_order(commit.checkpoint for commit in committed)
                check_not_overwritten(job.branches, restored, order, self._sink)
                return None
            self._check_recorded(found, job, restored)
            on_the_way = {commit for commit in committed if job.branches.is_ancestor(commit.checkpoint, restored)}
            seen = {commit for commit in committed if job.sees(commit.checkpoint)}
            moves = Moves(hide=tuple(sorted(seen - on_the_way)), show=tuple(sorted(on_the_way - seen)))
            if not moves and job.sees(restored):
                return None
            return self._changed(ledger, self._scope.job, job.showing(restored), moves)

        yield from self._change(plan)

    def _check_listed(self, restored: int) -> Steps[None]:
        """Refuse a restore that would have to move rows that the target does not find: what it goes by was deleted."""
        ledger: Ledger = yield Op("read_ledger")
        job = ledger.job(self._scope.job)

        def is_moved(checkpoint: int) -> bool:
            return job.sees(checkpoint) != job.branches.is_ancestor(checkpoint, restored)

        if not any(map(is_moved, (restored, *job.ends))):
            return
        unlisted: Sequence[Commit] = yield Op("unlisted", (self._scope.job,))
        moved = [commit.checkpoint for commit in unlisted if is_moved(commit.checkpoint)]
        if moved:
            newest = max(moved)
            way_out = (
                f"or delete the files that have checkpoint {newest} in their names: the job writes their rows again; or restore "
                f"checkpoint {newest} or a later one"
                if job.sees(newest)
                else "or restore another checkpoint or savepoint"
            )
            raise SinkCannotTakeBack(
                f"{self._sink}: expected a record of each commit of instance {self._scope.index} whose rows are to be taken "
                f"back, or shown again, found rows of checkpoint {newest}, and no record that names their files: it was deleted. "
                f"Nothing was changed. Put the record back; {way_out}"
            )

    def _check_recorded(self, found: Sequence[Commit], job: JobLedger, restored: int) -> None:
        """Refuse a restore that would leave the rows of later commits, since the ledger does not know them: they come again."""
        unknown = [commit.checkpoint for commit in found if not job.is_committed(commit.checkpoint)]
        later = [checkpoint for checkpoint in unknown if not job.branches.is_ancestor(checkpoint, restored)]
        if later:
            raise SinkCannotTakeBack(
                f"{self._sink}: expected that the record of instance {self._scope.index} names what was committed after "
                f"checkpoint {restored}, found rows of checkpoint {max(later)} that it does not name: the record was deleted, or "
                f"is an older copy. Nothing was changed. Put it back; or restore checkpoint {max(later)} or a later one; or move "
                "the rows of later checkpoints away, and the records of their commits: the job writes them again"
            )

    def _beginning(self) -> Steps[int | None]:
        """The origin of a job that continues from no checkpoint of its own: 0, its beginning.

        None if readers see rows of the job: a savepoint may have completed before a crash, after which the job begins again.
        """
        found: Sequence[Commit] = yield Op("committed", (self._scope.job,))
        ledger: Ledger = yield Op("read_ledger")
        self.check_owner(ledger)
        job = ledger.job(self._scope.job)
        return None if any(job.is_committed(c.checkpoint) and job.sees(c.checkpoint) for c in found) else 0

    def _discard_rest(self) -> Steps[None]:
        names: Sequence[str] = yield Op("staged")
        rest = [name for name in names if self._may_discard(name)]
        if rest:
            self.check_owner((yield Op("read_ledger")))
            yield Op("discard", (rest,))

    def _may_discard(self, name: str) -> bool:
        found = parse_name(name)
        if found is None:
            return True
        own = (found.owner, found.attempt) == (self._scope.owner, self._scope.attempt)
        return not own and not self._scope.owner.is_replaced_by(found.owner)

    # Transactions

    def begin(self, checkpoint_id: int, *, with_rows: bool = False) -> Steps[None]:
        """Before a transaction is sealed for a checkpoint: record the first one after a restore.

        Args:
            checkpoint_id: the checkpoint.
            with_rows: whether there are rows. They may have been staged at another place than the instance has opened: then no
                checkpoint must name them.

        Raises:
            SinkFenced, SinkTargetChanged: the checkpoint fails.
        """
        origin = self.origin
        if origin is not None and checkpoint_id > origin:

            def plan(ledger: Ledger) -> Change | None:
                self.check_owner(ledger)
                before = ledger.job(self._scope.job)
                after = before.begun(origin, checkpoint_id)
                return None if after == before else self._changed(ledger, self._scope.job, after)

            yield from self._change(plan)
            self.origin = None
        elif with_rows and self._stepped:
            self.check_owner((yield Op("read_ledger")))

    def commit(self, staged: Staged) -> Steps[str | None]:
        """Make a transaction's rows visible, unless they are.

        Returns:
            The target's version with them, as it names it; None if nothing was to be done, or the target has no versions.

        Raises:
            SinkTransactionConflict: another transaction was committed for the checkpoint.
        """

        def plan(ledger: Ledger) -> Change | None:
            self.check_owner(ledger)
            commit = staged.commit
            job = ledger.job(commit.job)
            if not job.is_committed(commit.checkpoint):
                after = job.committed(commit.checkpoint, staged.name)
                if not (self._by_key or job.sees(commit.checkpoint)):
                    after = after.showing_also(commit.checkpoint)
                return self._changed(ledger, commit.job, after, Moves(publish=(staged,)))
            self._check_same(job, staged)
            if self._by_key or job.sees(commit.checkpoint):
                return None
            return self._changed(ledger, commit.job, job.showing_also(commit.checkpoint), Moves(show=(commit,)))

        version = yield from self._change(plan)
        self._committed = staged.commit
        return version

    def abort(self, staged: Staged) -> Steps[None]:
        """Discard a transaction, unless it is committed."""
        if not (yield from self.is_committed(staged)):
            yield Op("discard", ([staged.name],))

    def is_committed(self, staged: Staged) -> Steps[bool]:
        """Whether a transaction is committed. Raises SinkFenced, SinkTransactionConflict."""
        ledger: Ledger = yield Op("read_ledger")
        self.check_owner(ledger)
        job = ledger.job(staged.commit.job)
        if not job.is_committed(staged.commit.checkpoint):
            unfinished = ledger.unfinished
            return unfinished is not None and any(each.name == staged.name for each in unfinished.moves.publish)
        self._check_same(job, staged)
        return True

    # Changes

    def _change(self, plan: Plan) -> Steps[str | None]:
        if not self._stepped:
            return (yield Op("transact", (plan,)))  # type: ignore[no-any-return]
        for _ in range(_TRIES):
            try:
                ledger: Ledger = yield Op("read_ledger")
                if ledger.unfinished is not None:
                    yield from self._finish(ledger, ledger.unfinished)
                    continue
                change = plan(ledger)
                if change is None:
                    return None
                if change.alone:
                    yield from self._remove_other_jobs(ledger)
                if not change.moves:
                    yield Op("put_ledger", (change.ledger,))
                    return None
                yield Op("check_moves", (change.moves,))
                unfinished = Unfinished(change.job, change.moves, change.ledger.job(change.job))
                begun = msgspec.structs.replace(ledger, unfinished=unfinished)
                yield Op("put_ledger", (begun,))
                yield from self._finish(begun, unfinished)
                return None
            except LedgerChanged:
                continue
        raise SinkUnavailable(
            f"{self._sink}: expected that the record of instance {self._scope.index} stays as it was read, found it changed by "
            f"another run {_TRIES} times. Another attempt may succeed"
        )

    def _remove_other_jobs(self, ledger: Ledger) -> Steps[None]:
        """Remove the rows of the other jobs that are there now: never those of a job that a newer owner begins meanwhile."""
        others: Sequence[str] = yield Op("other_jobs")
        if (yield Op("read_ledger")) != ledger:
            raise LedgerChanged
        yield Op("remove_jobs", (others,))

    def _finish(self, ledger: Ledger, unfinished: Unfinished) -> Steps[None]:
        """Complete a change that was recorded: each move changes nothing where it was made before."""
        self.check_owner(ledger)
        self._check_not_ahead(ledger)
        owner = self._owner(ledger)
        if ledger.owner != owner:  # a change of an earlier owner
            ledger = msgspec.structs.replace(ledger, owner=owner)
            yield Op("put_ledger", (ledger,))
        moves = unfinished.moves
        for number, (name, each) in enumerate(
            [
                *(("hide", commit) for commit in moves.hide),
                *(("show", commit) for commit in moves.show),
                *(("publish", staged) for staged in moves.publish),
            ]
        ):
            if number:
                ledger = yield Op("read_ledger")
                self.check_owner(ledger)
                if ledger.unfinished != unfinished:
                    raise LedgerChanged
            yield Op(name, (each,))
        done = msgspec.structs.replace(ledger.with_job(unfinished.job, unfinished.after), unfinished=None)
        yield Op("put_ledger", (done,))

    def _plan_fence(self, ledger: Ledger) -> Change | None:
        self.check_owner(ledger)
        self._check_not_ahead(ledger)
        same = ledger.owner == self._owner(ledger)
        return None if same else self._changed(ledger, self._scope.job, None)

    def _plan_alone(self, ledger: Ledger) -> Change | None:
        self.check_owner(ledger)
        job = self._scope.job
        alone = msgspec.structs.replace(ledger, jobs={name: found for name, found in ledger.jobs.items() if name == job})
        return msgspec.structs.replace(self._changed(alone, job, None), alone=True)

    def _changed(self, ledger: Ledger, job: str, after: JobLedger | None, moves: Moves = _NO_MOVES) -> Change:
        new = ledger if after is None else ledger.with_job(job, after)
        return Change(msgspec.structs.replace(new, owner=self._owner(ledger)), job, moves)

    def _owner(self, ledger: Ledger) -> SinkOwner:
        """The owner to record: a run without owners leaves the one that is there."""
        return self._scope.owner if self._scope.owner.epoch else ledger.owner

    def check_owner(self, ledger: Ledger) -> None:
        """Refuse to act behind a newer owner, or on another target than the one that the instance has opened and written to."""
        if self._scope.owner.is_replaced_by(ledger.owner):
            raise SinkFenced(
                f"{self._sink}: expected no newer run than this one (epoch {self._scope.owner.epoch}) to write to this sink, "
                f"found recorded for instance {self._scope.index} that a run of epoch {ledger.owner.epoch} does: that run has "
                "taken the pipeline over while this run was suspended or cut off; or the checkpoint storage is an older copy "
                "than the sink. This run stops and changes nothing"
            )
        known = self._committed
        if known is not None and not ledger.job(known.job).is_committed(known.checkpoint):
            newest = max(ledger.job(known.job).newest.values(), default=None)
            found = "none of that job" if newest is None else f"none after checkpoint {newest}"
            raise self._other_target(f"the rows of job {known.job} up to checkpoint {known.checkpoint} are committed", found)
        if ledger.owner == self._scope.owner:
            self._is_recorded = self._stepped
        elif self._is_recorded:
            found = f"a run of epoch {ledger.owner.epoch}" if ledger.owner.epoch else "no run"
            raise self._other_target(f"the run of epoch {self._scope.owner.epoch}, this one, writes there", found)

    def _other_target(self, expected: str, found: str) -> SinkTargetChanged:
        return SinkTargetChanged(
            f"{self._sink}: expected recorded for instance {self._scope.index} that {expected}, found {found}. The sink's place "
            "is empty, or an older copy: was it moved, deleted, unmounted, emptied, dropped and created again, or restored from "
            "a backup? Rows that were committed are missing there, and no run writes them again. No rows were changed. Put back "
            "what was there; or restore a checkpoint or savepoint that is not newer than what is there; or begin a new job "
            "(restore_from: none)"
        )

    def _check_not_ahead(self, ledger: Ledger) -> None:
        """Refuse a storage that is older than the ledger: the job would use ids of commits again, and lose their rows."""
        job, unfinished = self._scope.job, ledger.unfinished
        begun = unfinished.after.newest.values() if unfinished is not None and unfinished.job == job else ()
        newest = max((*ledger.job(job).newest.values(), *begun), default=0)
        if self._highest is not None and newest > self._highest:
            raise SinkAheadOfStorage(
                f"{self._sink}: expected that instance {self._scope.index} has committed no checkpoint of job {job} after "
                f"{self._highest}, the highest id in the checkpoint storage, found that it has committed checkpoint {newest}: "
                "the storage is an older copy than the sink. Was it restored from a backup? The job would use these ids again, "
                "and its rows would be taken for rows that are committed. Nothing was changed. Put the newest storage back; or "
                "the sink's data as it was at the time of the backup; or, with every run stopped, set in state.json "
                f"highest_checkpoint_id to at least {newest} and epoch to at least {ledger.owner.epoch}: the next run then "
                "takes back the rows of later checkpoints, and writes them again; or begin a new job (restore_from: none)"
            )

    def _check_same(self, job: JobLedger, staged: Staged) -> None:
        checkpoint, name = job.latest
        if checkpoint == staged.commit.checkpoint and name != staged.name:
            raise SinkTransactionConflict(
                f"{self._sink}: expected no other transaction for checkpoint {checkpoint} of job {staged.commit.job}, instance "
                f"{staged.commit.index}, found that {name!r} was committed for it, not {staged.name!r}. Nothing was changed. Was "
                "the checkpoint storage emptied or exchanged? Begin a new job, or give the sink another place"
            )
