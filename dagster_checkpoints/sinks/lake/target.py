"""The target of sinks of lake tables: rows and ledger change together, in one commit of the table's log.

::

    stage      files go below the table's location, where its metadata does not name them
    seal       a file names them: the transaction
    transact   ONE commit: files become part of the table or leave it, and the ledger's numbers are recorded

A table that does not exist is created for the first rows; what the ledger says until then is recorded with it. Must not import
Spark, nor know a table format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dagster_checkpoints.sinks.engine import Plan, SinkScope
from dagster_checkpoints.sinks.lake.columns import Column, added, differences
from dagster_checkpoints.sinks.lake.fitting import FileFitting, Fitted
from dagster_checkpoints.sinks.lake.ledger import (
    changed_numbers,
    committed_of,
    describe,
    is_committed,
    owner_number,
    read_job,
    read_ledger,
)
from dagster_checkpoints.sinks.lake.names import (
    InstanceNames,
    TransactionName,
    attempt_and_number,
    origin_of,
    original_name,
    staged_name,
    transactions_in,
)
from dagster_checkpoints.sinks.lake.placement import (
    JobPartitions,
    ReplacedPartitions,
    RowPlacement,
    RowVisibility,
    files_of_other_jobs,
    transactions_of,
    visible_rows,
)
from dagster_checkpoints.sinks.lake.replaced_rows import ReplacedRows
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, DataFile, LakeChange, PreparedFile, StagedTransaction
from dagster_checkpoints.sinks.lake.transactions import TransactionFiles
from dagster_checkpoints.sinks.ledger import Change, Commit, Ledger, Staged, StagedName
from dagster_checkpoints.sinks.parquet_files import null_count
from dagster_checkpoints.sinks.target import AtomicTarget, Batch, Guard, Sealed
from dagster_checkpoints.sinks.temporary_folder import TemporaryFolder, temporary_folder
from dagster_checkpoints.systems.errors import (
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkError,
    SinkRowsRefused,
    SinkTargetChanged,
    SinkTransactionLost,
    few,
)


class LakeTarget(AtomicTarget):
    """A lake table, for one instance.

    Args:
        fitting: fits the stage's files to the table, which has not been read.
        sink: the sink as errors name it.
    """

    def __init__(self, fitting: FileFitting, sink: str) -> None:
        self._log = fitting.log
        self._fitting = fitting
        self._sink = sink
        self._files = TransactionFiles(fitting.log, sink)
        self._by_key = bool(fitting.replacement.key)
        self._open: dict[str, dict[int, list[DataFile]]] = {}
        self._earlier_jobs: list[str] = []
        self._waiting: Ledger | None = None  # of a table that does not exist
        self._fitted: Fitted | None = None
        self._marked = False
        self._copies: TemporaryFolder | None = None

    @property
    def place(self) -> str:
        return ""

    # Before a run

    def jobs(self, scope: SinkScope) -> list[str]:
        """The jobs of the stage with rows that readers see; other stages and programs may write to the table."""
        self._scope = scope
        self._earlier_jobs = []
        if self._log.find():
            self._fitting.check_table()
            self._earlier_jobs = sorted({job for _, job in visible_rows(self._log, scope, by_key=self._by_key)})
        return self._earlier_jobs

    def foreign(self) -> list[str]:
        """In a table where rows replace others by key, files that may hold rows of an earlier job besides those of others."""
        if not (self._by_key and self._earlier_jobs):
            return []
        _, others = files_of_other_jobs(self._log, self._scope)
        if not others:
            return []
        return [f"{few(others)}: of another program, or rewritten by one ({self._log.format.rewriting})"]

    def check_continued(self) -> None:
        """Check that a job that continues a savepoint of another job finds none of its rows, where rows replace partitions.

        Raises:
            SinkCannotTakeBack: it finds some.
        """
        if not self._exists():
            return
        self._log.refresh()
        jobs = {job for _, job in visible_rows(self._log, self._scope, by_key=False)} - {self._scope.job}
        if jobs:
            raise SinkCannotTakeBack(
                f"{self._sink}: job {self._scope.job} continues from a savepoint of another job, and its rows replace those of "
                f"their partitions; expected no rows of stage {self._scope.stage!r} in the table, found rows of job "
                f"{', '.join(sorted(jobs))}: the savepoint does not say which of them belong to it. Give the sink another table; "
                "or begin a new job that writes all rows again"
            )

    # A run

    def open(self, scope: SinkScope, guard: Guard) -> None:
        self._scope, self._guard = scope, guard
        self._names = InstanceNames(scope.pipeline, scope.stage, scope.index)
        self._attempt, _ = attempt_and_number(StagedName(scope.owner, scope.attempt, 0).text, scope.job)
        self._partitions = JobPartitions(self._log, scope, self._files.data_files)
        found = self._log.find()
        self._check_job_table(found)
        if found:
            self._fitting.check_table()

    def close(self) -> None:
        """Delete the open transactions and the copies."""
        self._drop_copies()
        files = [file.path for batches in self._open.values() for batch in batches.values() for file in batch]
        self._open = {}
        with suppress(SinkError, OSError):  # a later start deletes what is left
            self._log.files.delete(files)
        self._log.close()

    def read_ledger(self) -> Ledger:
        if self._exists():
            self._log.refresh()
        return self._ledger()

    def committed(self, job: str) -> list[Commit]:
        self._check_recorded(lambda file: origin_of(file, self._scope.pipeline, self._scope.stage) == job)
        return [Commit(job, name.instance.index, name.checkpoint_id) for name in self._committed(job)]

    # Staged rows

    def stage(self, name: str, batch: Batch) -> None:
        """Put the batch's files into the table's location; its table is created, and gets new columns, if necessary."""
        batches = self._open.setdefault(name, {})
        self._log.files.delete(file.path for file in batches.pop(batch.id, ()))  # the same batch, written a second time
        if not batch.files:
            return
        with temporary_folder() as scratch:
            fitted = self._fitting.fit(batch.files[0], self._create, lambda: self._guard(self._ledger()))
            self._exists()
            self._fitted = fitted = self._fitted or fitted
            prepared = [part for file in batch.files for part in self._fitting.prepare(file, fitted.partition_by, scratch)]
            self._check_nulls(prepared, fitted)
            if not prepared:
                return
            self._mark_attempt()
            folder = self._names.data(*attempt_and_number(name, self._scope.job))
            named = {f"{folder}/part-{batch.id:06d}-{number:04d}.parquet": part for number, part in enumerate(prepared)}
            batches[batch.id] = [
                DataFile(path, part.source.stat().st_size, part.rows, part.statistics, part.partition)
                for path, part in named.items()
            ]
            self._log.files.place_all({path: part.source for path, part in named.items()})

    def seal(self, name: str, commit: Commit) -> Sealed | None:
        files = [file for _, batch in sorted(self._open.pop(name, {}).items()) for file in batch]
        if not files:
            return None
        assert self._fitted is not None
        staged = StagedTransaction(self._fitted.table, self._fitted.schema, self._fitted.partition_by, tuple(files))
        self._files.put(self._transaction(name, commit), staged)
        return Sealed(sum(file.rows for file in files), sum(file.size for file in files), len(files))

    def staged(self) -> list[str]:
        """Also open transactions of other attempts: an attempt numbers its transactions, and only the last one can be open."""
        existing = self._existing()
        sealed = [name.staged for name in existing if not is_committed(name, self._log.number)]
        return [*sealed, *self._left_open(existing)]

    def discard(self, names: Sequence[str]) -> None:
        existing = self._existing()
        self._check_not_committed([each for each in existing if each.staged in names and each.attempt != self._attempt])
        left_open = {name: file for name, file in self._left_open(existing).items() if name in names}
        folders = [self._names.data(file.rpartition("/")[2], int(name.rpartition("-")[2])) for name, file in left_open.items()]
        self._check_recorded(lambda file: self._names.transaction_data(file) in folders)
        for folder in folders:
            self._check_owner()  # right before each deletion: an object store has no fenced deletion
            self._log.files.delete(self._log.files.sizes(folder))
        for sealed in existing:
            if sealed.staged in names:
                self._check_owner()
                if not is_committed(sealed, self._log.number):
                    self._files.delete(sealed)
        self._log.files.delete(left_open.values())

    def copies(self, staged: Staged) -> dict[str, Path]:
        self._drop_copies()
        self._copies = TemporaryFolder()
        return self._files.saved(self._transaction(staged.name, staged.commit), self._copies.path)

    def restage(self, staged: Staged, files: Mapping[str, Path]) -> None:
        content = self._files.from_savepoint(files)
        if not self._exists():
            self._create(content.schema, content.partition_by)
        self._files.restore(self._transaction(staged.name, staged.commit), content, files)

    # Changes

    def transact(self, plan: Plan) -> str | None:
        if not self._exists():
            change = plan(self._ledger())
            if change is None:
                return None
            if not change.moves.publish:
                self._waiting = change.ledger
                return None
            first = change.moves.publish[0]
            content = self._files.complete(self._transaction(first.name, first.commit))
            self._create(content.schema, content.partition_by)
        placed: dict[str, RowPlacement] = {}
        version = self._log.commit(lambda: self._planned(plan, placed))
        for placement in placed.values():
            placement.committed()
        return None if version is None else str(version)

    def _planned(self, plan: Plan, placed: dict[str, RowPlacement]) -> LakeChange | None:
        """The commit for a change, from the table as it was read last.

        Args:
            plan: the change.
            placed: the placements of the transactions that are published, by name; new ones are added.
        """
        before = self._ledger()
        change = plan(before)
        if change is None:
            return None
        numbers = self._numbers(before, change)
        add: list[DataFile] = []
        remove: list[DataFile | ActiveFile] = []
        if change.alone:
            files, more = self._other_jobs(change.job)
            remove += files
            numbers |= more
        if change.moves.hide or change.moves.show:
            moved = self._moved(change)
            add += moved.add
            remove += moved.remove
        for staged in change.moves.publish:
            if staged.name not in placed:
                placed[staged.name] = self._placement(self._transaction(staged.name, staged.commit))
            files_of = placed[staged.name].plan()
            add += files_of.add
            remove += files_of.remove
        if not add and not remove and self._recorded(numbers):
            return None
        replaces = bool(change.moves.publish) and bool(self._fitting.replacement)
        read_rows = replaces or (change.alone and self._by_key)
        return LakeChange(add, remove, numbers, self._described(change, numbers), read_rows)

    def _numbers(self, before: Ledger, change: Change) -> dict[str, int]:
        """The numbers to record. The owner is among them always, so that a commit of an older owner conflicts."""
        owner = self._scope.owner
        numbers = {owner_number(self._names, owner.history): owner.epoch} if owner.epoch else {}
        if change.job in change.ledger.jobs:
            numbers |= changed_numbers(self._names, change.job, before.job(change.job), change.ledger.jobs[change.job])
        return numbers

    def _other_jobs(self, job: str) -> tuple[list[DataFile | ActiveFile], dict[str, int]]:
        """The files with rows of all other jobs, and the numbers to record with their removal.

        The owner is recorded for all their instances, also those that have only staged rows: otherwise one of theirs might
        commit behind it.
        """
        owner = self._scope.owner
        others = {of: names for of, names in visible_rows(self._log, self._scope, by_key=self._by_key).items() if of[1] != job}
        numbers: dict[str, int] = {}
        if owner.epoch:
            of_others = {name.instance for name in transactions_of(self._log, self._scope) if name.job != job}
            numbers |= {owner_number(instance, owner.history): owner.epoch for instance in of_others}
        for instance, other in others:
            ledger = read_job(instance, other, self._log.number)
            numbers |= changed_numbers(instance, other, ledger, ledger.showing(0))
        if not others:
            return [], numbers
        if not self._by_key:
            visibility = RowVisibility(self._log, self._files, self._sink)
            names = [name for names in others.values() for name in names]
            return list(visibility.hidden(names, "for this new start with at_new_start='replace'")), numbers
        files, foreign = files_of_other_jobs(self._log, self._scope)
        if foreign:
            raise SinkCannotTakeBack(
                f"{self._sink}: this run is a new start with at_new_start='replace', and expected a table with rows of stage "
                f"{self._scope.stage!r} only, found {len(foreign)} files that another program has written ({few(foreign)}): they "
                f"may hold rows of earlier jobs, if that program has rewritten the table ({self._log.format.rewriting}), or rows "
                "of its own. Nothing was changed. "
                "Choose at_new_start='keep', which replaces rows by key; or delete the rows yourself; or write to another table"
            )
        return list(files), numbers

    def _moved(self, change: Change) -> LakeChange:
        committed = self._committed(change.job)

        def of(commits: Sequence[Commit]) -> list[TransactionName]:
            wanted = {commit.checkpoint for commit in commits}
            return [name for name in committed if name.checkpoint_id in wanted]

        why = f"to restore checkpoint {change.ledger.job(change.job).shown}"
        show = of(change.moves.show)
        for name in show:
            self._check_table(self._files.content(name), again=True)
        visibility = RowVisibility(self._log, self._files, self._sink)
        hidden = visibility.hidden(of(change.moves.hide), why)  # refuses, where `shown` copies files
        return LakeChange(visibility.shown(show), hidden)

    def _placement(self, name: TransactionName) -> RowPlacement:
        content = self._files.complete(name)
        self._check_table(content)
        if name.attempt != self._attempt:
            self._check_not_in_table({name: content})
        replacement = self._fitting.replacement
        if replacement.key:
            return ReplacedRows(self._log, self._scope, self._sink, name, content.files, replacement.key)
        if replacement.partitions:
            return ReplacedPartitions(content.files, self._log, self._partitions)
        return RowPlacement(content.files)

    def _check_not_committed(self, sealed: Sequence[TransactionName]) -> None:
        """Check that no row of transactions of earlier attempts, which are to be discarded, is in the table."""
        contents: dict[TransactionName, StagedTransaction] = {}
        for name in sealed:
            with suppress(SinkTransactionLost):  # what it holds was discarded, or is not known
                if not is_committed(name, self._log.number):
                    contents[name] = self._files.content(name)
        if contents:
            self._check_not_in_table(contents)

    def _check_recorded(self, concerns: Callable[[str], bool]) -> None:
        """Check that transactions name the instance's files in the table: others look like files of a transaction that is open.

        Args:
            concerns: whether a file is among those that are checked.

        Raises:
            SinkTransactionLost: no transaction names some of them.
        """
        if not self._exists():
            return
        recorded = {None, *(name.data for name in self._existing())}
        of = self._names.transaction_data
        lost = sorted(file for file in self._log.active_files() if of(file) not in recorded and concerns(file))
        if lost:
            raise SinkTransactionLost(
                f"{self._sink}: expected a file in {self._names.transactions} for each transaction whose rows are in the table, "
                f"found none for {len(lost)} data files of the table ({few(lost)}): another program has deleted it. Nothing was "
                "changed. Restore that folder from a backup; or begin a new job"
            )

    def _check_not_in_table(self, sealed: Mapping[TransactionName, StagedTransaction]) -> None:
        """Check transactions of earlier attempts of which the table's numbers do not say that they are committed."""
        active = set(map(original_name, self._log.active_files()))
        for name, content in sealed.items():
            there = [file.path for file in content.files if file.path in active]
            if there:
                numbers = self._log.format.numbers
                raise SinkTargetChanged(
                    f"{self._sink}: expected no rows of checkpoint {name.checkpoint_id} in the table, since its {numbers} do not "
                    f"say that they were committed, found {len(there)} of their files there ({few(there)}): another program has "
                    f"removed the {numbers} whose names begin with dagster-checkpoints/. Nothing was changed. Record them again, "
                    "as an earlier version of the table has them; or begin a new job"
                )

    def _described(self, change: Change, numbers: Mapping[str, int]) -> dict[str, str]:
        """A change, for people."""
        scope = self._scope
        of = {"pipeline": scope.pipeline, "stage": scope.stage, "instance": str(scope.index), "job": change.job}
        committed = [str(staged.commit.checkpoint) for staged in change.moves.publish]
        checkpoint = {"checkpoint": ", ".join(committed)} if committed else {}
        return {**of, **checkpoint, "epoch": str(scope.owner.epoch), **describe(numbers)}

    def _check_table(self, staged: StagedTransaction, *, again: bool = False) -> None:
        """Whether the table is still the one that the files were made for.

        Args:
            staged: the files.
            again: whether they were in the table before: its columns may be wider since.
        """
        shape = self._log.shape()
        if staged.table and shape.table != staged.table:
            raise SinkTargetChanged(
                f"{self._sink}: expected the table with id {staged.table}, found one with id {shape.table}: it was dropped and "
                "created again after the rows were written. Restore the table, or begin a new job that writes all rows again"
            )
        types = {column.name: column.type for column in shape.columns}
        stage = [
            Column(column.name, types[column.name]) if self._log.holds(types.get(column.name), column.type) else column
            for column in self._log.columns_of(staged.schema)
        ]
        problems = [] if again else differences(shape.columns, stage, shape.required, "add")
        problems += [
            f"column {column.name!r}: expected a column of the table, found that it was dropped"
            for column in added(shape.columns, stage)
        ]
        if shape.partition_by != staged.partition_by:
            problems.append(f"expected partition columns {list(staged.partition_by)}, found {list(shape.partition_by)}")
        if problems:
            raise SinkColumnsMismatch(
                f"{self._sink}: the table was changed after the rows of this transaction were written: {'; '.join(problems)}. "
                "Undo the change and start the run again"
            )

    def _check_job_table(self, exists: bool) -> None:
        """Whether the table is the one that the job has written to: it may have been dropped between two runs.

        A table that another program has replaced in its log keeps the numbers, and what is committed is known.
        """
        of_job = [name for name in self._existing() if name.job == self._scope.job]
        newest = max(of_job, key=lambda name: name.checkpoint_id, default=None)
        if newest is None or is_committed(newest, self._log.number):
            return
        with suppress(SinkTransactionLost):  # its file may not be needed any more
            wanted, found = self._files.content(newest).table, self._log.shape().table if exists else ""
            if wanted and found != wanted:
                raise SinkTargetChanged(
                    f"{self._sink}: expected the table with id {wanted}, to which job {self._scope.job} has written rows up to "
                    f"checkpoint {newest.checkpoint_id}, found {f'one with id {found}' if found else 'none'}: it was dropped. "
                    "Restore the table; or begin a new job that writes all rows again; or, to go on without the rows of earlier "
                    f"checkpoints, delete {self._names.transactions}/{newest.job} below the table's location"
                )

    # The table, and what is recorded before there is one

    def _ledger(self) -> Ledger:
        history = self._scope.owner.history
        return self._waiting or read_ledger(self._names, history, self._log.number)

    def _exists(self) -> bool:
        """Whether there is a table; what the ledger said before there was one is recorded in it."""
        if not self._log.exists and not self._log.find():
            return False
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            try:
                self._log.commit(lambda: self._earlier(waiting))
            except BaseException:
                self._waiting = waiting
                raise
        return True

    def _earlier(self, waiting: Ledger) -> LakeChange | None:
        """The commit for what the ledger said before there was a table."""
        self._guard(self._ledger())
        numbers = self._numbers_of(waiting)
        return None if self._recorded(numbers) else LakeChange(numbers=numbers, note=describe(numbers))

    def _recorded(self, numbers: Mapping[str, int]) -> bool:
        return all(self._log.number(name) == number for name, number in numbers.items())

    def _numbers_of(self, waiting: Ledger) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for job in waiting.jobs or (self._scope.job,):
            numbers |= self._numbers(Ledger(), Change(waiting, job))
        return numbers

    def _create(self, schema: str, partition_by: Sequence[str]) -> None:
        """Create the table, unless there is one by now, with what the ledger says so far."""
        self._log.create(schema, partition_by, self._numbers_of(self._ledger()))
        self._exists()

    def _check_owner(self) -> None:
        self._guard(self.read_ledger())

    # Names

    def _transaction(self, name: str, commit: Commit) -> TransactionName:
        since = self._ledger().job(commit.job).branches.branch_of(commit.checkpoint)
        return TransactionName(self._names, commit.job, commit.checkpoint, since, *attempt_and_number(name, commit.job))

    def _existing(self) -> list[TransactionName]:
        """The instance's transactions whose files exist, of all jobs."""
        return transactions_in(self._log.files.sizes(self._names.transactions))

    def _committed(self, job: str) -> list[TransactionName]:
        return committed_of((name for name in self._existing() if name.job == job), self._log.number)

    def _left_open(self, existing: Sequence[TransactionName]) -> dict[str, str]:
        """The marker of each other attempt, by the name of its transaction that may be open."""
        found = {}
        for marker in self._log.files.sizes(self._names.attempts):
            attempt = marker.rpartition("/")[2]
            if attempt != self._attempt:
                number = max((name.number for name in existing if name.attempt == attempt), default=-1) + 1
                found[staged_name(attempt, number)] = marker
        return found

    def _mark_attempt(self) -> None:
        if not self._marked:
            self._log.files.put(f"{self._names.attempts}/{self._attempt}", b"{}\n")
            self._marked = True

    def _drop_copies(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _check_nulls(self, prepared: Sequence[PreparedFile], fitted: Fitted) -> None:
        for part in prepared:
            for column in sorted(fitted.required):
                if part.partition[column] is None if column in part.partition else _nulls(part, column):
                    raise SinkRowsRefused(
                        f"{self._sink}: expected no nulls in column {column!r}, which belongs to the key, or which the table "
                        f"declares not null, found at least one in {part.rows} rows. Filter these rows or fill the column in the "
                        "stage; or allow nulls in the table. An empty text in a partition column may be null, too"
                    )


def _nulls(part: PreparedFile, column: str) -> int:
    """The number of a column's nulls; footers have none for long values, and metadata of tables for the first columns only."""
    return part.nulls[column] if column in part.nulls else null_count(part.source, column)
