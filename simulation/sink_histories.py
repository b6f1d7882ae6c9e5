"""Histories of one instance's sink: checkpoints, restores of any of them, take-overs, new jobs, and a stop at any step.

Whole pipelines (`world`) rarely go back more than once; here nearly every world does. `python -m simulation.sink_histories`
searches for a given time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import msgspec

from dagster_checkpoints.execution import state_changes
from dagster_checkpoints.execution.pipeline_state import UNKNOWN_ORIGIN, CheckpointPointer, PipelineState
from dagster_checkpoints.sinks.ledger import Commit, Ledger, Staged
from dagster_checkpoints.systems.errors import SinkCannotTakeBack
from simulation.injection import Fault, injected
from simulation.sinks import SinkSystem, TaskFailure, TaskSink
from simulation.storage import LONG_AGO
from simulation.violations import Violation, check

_STEPS = 40
_CALLS = 12
_KEYS = 4
"""A stop comes before this number of calls of the target."""


class Point(msgspec.Struct, frozen=True, eq=False):
    """A completed checkpoint: its id and job, its transactions, what was committed last, and the rows of a table with it."""

    checkpoint: int
    job: int
    transactions: tuple[Staged, ...]
    committed: Commit | None
    rows: tuple[int, ...]
    is_savepoint: bool

    @property
    def pointer(self) -> CheckpointPointer:
        return CheckpointPointer(
            checkpoint_id=self.checkpoint,
            location=f"{self.job}/{self.checkpoint}",
            kind="savepoint" if self.is_savepoint else "checkpoint",
            epoch=1,
            job_id=self.job,
            completed_at=LONG_AGO,
        )


class Run:
    """An attempt of a job: its sink, and what it has taken since.

    Attributes:
        rows: the rows on the way from the job's beginning.
        taken: checkpoints that are not completed.
        last_id: the largest id that it has given.
    """

    def __init__(self, sink: TaskSink, job: int, rows: tuple[int, ...]) -> None:
        self.sink = sink
        self.job = job
        self.rows = list(rows)
        self.taken: list[Point] = []
        self.last_id = 0


class Refused(Exception):
    """A checkpoint cannot be restored: in a table of newest rows by key, rows on its way may have been replaced."""


class History:
    """One table, and the jobs that have written to it. In some of them a row replaces the row with its key.

    As in a source that is read again, the key of a row follows from its position in the job's input.

    Args:
        seed: decides everything.

    Attributes:
        state: what storage says of the jobs, by the shipped rules.
        points: the completed checkpoints that can be restored, oldest first.
        highest_id: the largest id that the present run does not give to a checkpoint.
        older: runs whose owner was replaced, and that do not know it.
        paused: likewise, in the middle of opening their sink.
        written_by: by row, the job that has written it.
        positions: by row, the number of rows in front of it.
        copies: backups of the table, the first one empty.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.system = SinkSystem(0, stepped=bool(seed % 2), by_key=seed % 5 == 0)
        self.positions: list[int] = []
        self.written_by: list[int] = []
        self.points: list[Point] = []
        self.state = PipelineState(pipeline="simulated", epoch=0, token="")
        self.highest_id = 0
        self.job = 0
        self.epoch = 1
        self.copies = [self.system.copy()]
        self.older: list[Run] = []
        self.paused: list[Generator[None]] = []
        self.counts = Counter[str]()
        self.run: Run = None  # type: ignore[assignment]
        self.run = self._begin(None, new_job=True)

    def step(self) -> None:
        """Take a random step."""
        chance, run = self.chance, self.run
        kinds = ("checkpoint", "complete", "crash", "go back", "older acts", "new job", "copy", "older table", "record deleted")
        what = chance.choices(kinds, (8, 8, 2, 2, 2, 0.6, 0.5, 1.5, 0.4))[0]
        self.counts[what] += 1
        if what == "checkpoint":
            self._take(run)
        elif what == "complete" and run.taken:
            self._complete(run)
        elif what == "crash":
            self.run = self._restored(self._newest())
        elif what == "go back" and (points := self._restorable()):
            self.run = self._restored(chance.choice(points))
        elif what == "older acts" and self.paused and chance.random() < 0.5:
            self._wakes_up(self.paused.pop())
        elif what == "older acts" and self.older:
            self._older_acts(chance.choice(self.older))
        elif what == "copy":
            self.copies = [*self.copies[:1], *self.copies[1:][-2:], self.system.copy()]
        elif what == "older table":
            self._exchange_table()
        elif what == "record deleted" and self.system.stepped and not self.system.by_key:
            self._delete_record()
        elif what == "new job":
            self.run = self._begin(None if chance.random() < 0.7 else self._newest(), new_job=True)

    def _take(self, run: Run) -> None:
        """Write rows, or none, and take a checkpoint or a savepoint."""
        for _ in range(self.chance.choice((0, 1, 2, 3))):
            run.rows.append(self._row(run))
        number = run.last_id = max(run.last_id, self.highest_id) + 1
        is_savepoint = self.chance.random() < 0.4
        with self._restarting():
            transactions = run.sink.pre_commit(number, is_savepoint)
            run.taken.append(Point(number, run.job, transactions, run.sink.committed, tuple(run.rows), is_savepoint))
        self._check()

    def _row(self, run: Run) -> int:
        """Write a row, which no run has written before."""
        row = len(self.written_by)
        self.written_by.append(run.job)
        self.positions.append(len(run.rows))
        if self.system.by_key:
            self.system.keys[row] = len(run.rows) % _KEYS
        run.sink.rows.append(row)
        return row

    def _complete(self, run: Run) -> None:
        """A checkpoint completes or is aborted; then the sink commits, and may be stopped in the middle."""
        point = run.taken.pop(0)
        if self.chance.random() < 0.2:
            return
        self.state = state_changes.completed(self.state, point.pointer)
        self.points = [each for each in self.points if each.is_savepoint or each.pointer in self.state.retained] + [point]
        self.highest_id = point.checkpoint
        run.sink.stop_after = self._stop()
        with self._restarting():
            run.sink.commit_up_to(point.checkpoint)
            if not run.taken:  # otherwise its sink may show more
                self._check_shows(run, point)
        self._check()

    def _exchange_table(self) -> None:
        """An older copy of the table is put in its place, while the run lives or before a restore; then the table is put back.

        Either the run or the restore is refused, or nothing is missing. It cannot be known of a table to which nothing was
        committed on the way to the checkpoint, and if an earlier checkpoint was restored since the copy was made.
        """
        newest, chance = self.system.copy(), self.chance
        self.system.put_back(chance.choice(self.copies))
        self.system.is_copy = True
        before, now = ((table.ledgers.get(0) or Ledger()).job(str(self.job)) for table in (self.system, newest))
        went_on = (before.branches, before.shown) == (now.branches, now.shown)
        own = [point for point in self._restorable() if point.job == self.job]
        with suppress(TaskFailure):
            if chance.random() < 0.5 and own:
                run, point = self._restored_there(chance.choice(own))
                is_known = point.committed is not None
            else:
                is_known = self.run.sink.committed is not None
                run, number = self.run, max(self.run.last_id, self.highest_id) + 1
                run.rows.append(self._row(run))
                staged = run.sink.pre_commit(number)
                run.sink.commit_up_to(None)
                point = Point(number, run.job, staged, None, tuple(run.rows), False)
            if is_known and went_on:
                self._check_shows(run, point)
                self.counts["nothing was missing"] += 1
        self.system.put_back(newest)
        self.system.is_copy = False
        self.run = self._restored(self._newest())

    def _delete_record(self) -> None:
        """The record of a commit is deleted before a restore, then the table is put back: a restore that needs it is refused."""
        commits = sorted(each for each in (*self.system.visible, *self.system.hidden) if each.job == str(self.job))
        own = [point for point in self._restorable() if point.job == self.job]
        if not commits or not own:
            return
        complete = self.system.copy()
        deleted, point = self.chance.choice(commits), self.chance.choice(own)
        ledger = complete.ledgers[0].job(deleted.job)
        is_moved = ledger.sees(deleted.checkpoint) != ledger.branches.is_ancestor(deleted.checkpoint, point.checkpoint)
        self.system.unlisted = {deleted}
        try:
            run, _ = self._restored_there(point)
            self._check_shows(run, point)
            self.counts["no record was needed"] += 1
        except TaskFailure as error:
            refused = isinstance(error.__cause__, SinkCannotTakeBack)
            check(is_moved and refused, "checkpoint {} cannot be restored without the record of {}: {}", point, deleted, error)
            self.counts["no record"] += 1
        self.system.unlisted = set()
        self.system.put_back(complete)
        self.run = self._restored(self._newest())

    def _restored_there(self, point: Point) -> tuple[Run, Point]:
        after = point.checkpoint if self.state.highest_checkpoint_id > point.checkpoint else None
        scope = self.system.new_attempt(self.job, 0, 1, self.epoch + 1, self.state.highest_checkpoint_id, point.committed)
        sink = TaskSink(self.system, scope, point.transactions, after)
        for _ in sink.open():
            pass
        return Run(sink, self.job, point.rows), point

    def _older_acts(self, run: Run) -> None:
        """A run whose owner was replaced takes a checkpoint, or commits one that had completed: it changes nothing."""
        with self._changing_nothing():
            if self.chance.random() < 0.5:
                self._row(run)
                run.sink.pre_commit(max(run.last_id, self.highest_id) + 1)
            run.sink.commit_up_to(None)

    def _pause(self, sink: TaskSink) -> None:
        """A run is suspended while it opens its sink, in front of one of its calls, and its owner is replaced."""
        steps = sink.open()
        with suppress(TaskFailure):  # the checkpoint is refused
            for _ in range(self.chance.randrange(_CALLS)):
                next(steps, None)
                self._check()
            self.paused.append(steps)

    def _wakes_up(self, steps: Generator[None]) -> None:
        """A run that was suspended goes on, although its owner was replaced."""
        self.counts["woken up"] += 1
        with self._changing_nothing():
            for _ in steps:
                pass

    @contextmanager
    def _changing_nothing(self) -> Iterator[None]:
        """A context in which an owner acts that was replaced."""
        before = (dict(self.system.visible), dict(self.system.hidden), dict(self.system.ledgers))
        with suppress(TaskFailure):
            yield
        after = (self.system.visible, self.system.hidden, self.system.ledgers)
        check(before == after, "an older owner has changed {} to {}", before, after)

    def _restored(self, point: Point | None) -> Run:
        """Restore a checkpoint; the newest one if this one is refused."""
        before = self.state
        try:
            return self._begin(point)
        except Refused:
            self.counts["refused"] += 1
            self.state = before
            return self._begin(self._newest())

    def _begin(self, point: Point | None, new_job: bool = False) -> Run:
        """Begin a job, or restore a checkpoint; by another owner or not; again, until it is not stopped in the middle."""
        chance = self.chance
        self.job += new_job or (point is not None and point.job != self.job)
        replace = point is None and chance.random() < 0.5
        own = point is not None and point.job == self.job
        self.highest_id = self.state.highest_checkpoint_id if own else 0 if point is None else point.checkpoint
        pointer = None if point is None else point.pointer
        self.state = state_changes.begun(
            self.state,
            resume=not new_job and (own or point is None),
            restored=pointer,
            at=LONG_AGO,
            named=True,
            origin=UNKNOWN_ORIGIN,
            instances={},
        )
        later = point is not None and self.state.highest_checkpoint_id > point.checkpoint
        while True:
            if self.run is not None and chance.random() < 0.5:
                self.older.append(self.run)
                self.older = self.older[-2:]
                self.epoch += 1
            texts = None if point is None else point.transactions
            after = point.checkpoint if point is not None and own and later else None
            committed = point.committed if point is not None else None
            scope = self.system.new_attempt(self.job, 0, 1, self.epoch, self.state.highest_checkpoint_id, committed)
            sink = TaskSink(self.system, scope, texts, after, replace)
            run = Run(sink, self.job, point.rows if point is not None else ())
            if chance.random() < 0.15:
                self._pause(sink)
                self.epoch += 1
            elif self._opened(sink):
                break
        if self.paused and chance.random() < 0.5:
            self._wakes_up(self.paused.pop())
        # The transactions of other checkpoints, which are not savepoints, are discarded; the rows of other jobs may be.
        self.points = [
            each for each in self.points if (each.is_savepoint and not replace) or each is point or (own and each.job == self.job)
        ]
        if point is not None and own:
            self._check_shows(run, point)
        elif replace:
            check(all(commit.job == str(self.job) for commit in self.system.visible), "rows of an earlier job are left")
        check(not sink.staged_by_others(), "left over: {}", self.system.staged)
        return run

    def _opened(self, sink: TaskSink) -> bool:
        """Open a sink, or stop at one of its calls, or in the middle of it."""
        sink.stop_after = self._stop()
        try:
            for _ in sink.open():
                self._check()
        except TaskFailure as error:
            if self.system.by_key and isinstance(error.__cause__, SinkCannotTakeBack):
                raise Refused from error
            check(sink.stop_after is not None and sink.stop_after < 0, "a sink cannot be opened: {}", error)
            self.counts["stopped while opening"] += 1
            return False
        sink.stop_after = None
        self._check()
        return True

    def _stop(self) -> int | None:
        """The number of calls after which a sink stops; None: it does not."""
        return self.chance.randrange(_CALLS) if self.chance.random() < 0.3 else None

    def _newest(self) -> Point | None:
        newest = self.state.newest
        return next((point for point in self.points if newest is not None and point.pointer == newest), None)

    def _restorable(self) -> list[Point]:
        """The points that a user can restore: sinks may have discarded the transactions of a checkpoint that was passed over."""
        newest = self.state.newest.checkpoint_id if self.state.newest is not None else 0
        lost = [any(map(self.system.has_lost, point.transactions)) for point in self.points]
        return [p for p, gone in zip(self.points, lost, strict=True) if p.is_savepoint or p.checkpoint <= newest or not gone]

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """A context after which a run that has failed in it is started again."""
        try:
            yield
        except TaskFailure:
            self.counts["stopped while committing"] += 1
            points: list[Point | None] = [*self._restorable()] or [None]
            newest = self.chance.random() < 0.6
            self.run = self._restored(self._newest() if newest else self.chance.choice(points))

    # Invariants

    def _check(self) -> None:
        """Readers see exactly what the ledger says; in a folder, but for a change that has begun."""
        ledger = self.system.ledgers.get(0) or Ledger()
        if ledger.unfinished is not None:
            return
        for rows, wanted in ((self.system.visible, True), (self.system.hidden, False)):
            for commit in rows:
                job = ledger.job(commit.job)
                check(job.is_committed(commit.checkpoint), "{} is not in the ledger {}", commit, ledger)
                seen = self.system.by_key or job.sees(commit.checkpoint)
                check(seen == wanted, "{} is visible: {}; the ledger is {}", commit, wanted, ledger)
        check(not ledger.job(str(self.job)).again, "a job's own rows need no exception: {}", ledger)

    def _check_shows(self, run: Run, point: Point) -> None:
        """Readers see exactly the rows of a checkpoint, among those of its job; by key also rows that it will write again."""
        if self.system.by_key:
            for key, row in {self.system.keys[row]: row for row in point.rows}.items():
                newest = self.system.table.get(key)
                again = newest is not None and self.positions[newest] >= len(point.rows)
                right = newest == row or again or self.written_by[row] != run.job
                check(right, "checkpoint {} has {} for key {}, readers see {}", point.checkpoint, row, key, newest)
            return
        found = sorted(row for commit, rows in self.system.visible.items() if commit.job == str(run.job) for row in rows)
        mine = sorted(row for row in point.rows if self.written_by[row] == run.job)
        check(found == mine, "checkpoint {} has the rows {}, readers see {}", point.checkpoint, mine, found)


def simulate(seed: int) -> tuple[Violation | None, Counter[str]]:
    """Run one history. Returns the invariant that it has broken, if any, and what happened."""
    history: History | None = None
    try:
        history = History(seed)
        for _ in range(_STEPS):
            history.step()
    except Violation as broken:
        return broken, history.counts if history is not None else Counter()
    return None, history.counts


def find(fault: Fault, worlds: int) -> int | None:
    """The first history, of this number, that breaks an invariant while the fault is in the code."""
    with injected(fault):
        return next((seed for seed in range(worlds) if _breaks(seed)), None)


def _breaks(seed: int) -> bool:
    try:
        return simulate(seed)[0] is not None
    except (KeyError, RecursionError):
        return True


def main() -> None:
    """Search for a given time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    until, counts = time.monotonic() + chosen.seconds, Counter[str]()
    for seed in count(chosen.seed):
        if time.monotonic() > until:
            break
        broken, happened = simulate(seed)
        counts.update(happened)
        if broken is not None:
            raise SystemExit(f"seed {seed}: {broken}")
    print(f"{seed - chosen.seed:,} histories, from seed {chosen.seed}: {dict(counts)}")


if __name__ == "__main__":
    main()
