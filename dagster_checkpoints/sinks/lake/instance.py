"""One instance of a sink of a lake table: its current transaction, and the steps of a start.

Must not know the sink's settings as users write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.lake.fitting import FileFitting, PreparedFile, Target
from dagster_checkpoints.sinks.lake.ledger import LakeJobLedger, is_committed, owner_number, read_ledger
from dagster_checkpoints.sinks.lake.names import (
    InstanceNames,
    TransactionName,
    attempt_name,
    is_newer_owners,
    job_name,
    transactions_in,
)
from dagster_checkpoints.sinks.lake.new_start import check_continued_job, remove_earlier_jobs, remove_rows_of_earlier_jobs
from dagster_checkpoints.sinks.lake.table_log import DataFile, LakeChange, StagedTransaction, TableLog
from dagster_checkpoints.sinks.lake.timelines import Timelines
from dagster_checkpoints.sinks.lake.transactions import Transactions
from dagster_checkpoints.sinks.transactions import (
    AbortRest,
    CommitStep,
    ContinueFrom,
    Settle,
    TakeFence,
    begins_timeline,
    new_start,
    recovery,
)
from dagster_checkpoints.systems.errors import SinkError, SinkRowsRefused


class LakeInstance:
    """An open instance.

    Args:
        log: the table, which need not exist.
        context: the instance.
        fitting: fits the stage's files to the table.
        sink: the sink as errors name it.
    """

    def __init__(
        self,
        log: TableLog,
        context: SinkContext,
        fitting: FileFitting,
        sink: str,
    ) -> None:
        self.transactions = Transactions(log, context, fitting, sink)
        self._log = log
        self._context = context
        self._names = InstanceNames(context.pipeline, context.stage, context.index)
        self._job = job_name(context)
        self._attempt = attempt_name(context)
        self._fitting = fitting
        self._sink = sink
        self._target: Target | None = None
        self._ledger: LakeJobLedger | None = None
        self._batches: dict[int, list[DataFile]] = {}
        self._number = 0
        self._marked = False
        self._origin: int | None = None

    def take_fence(self) -> None:
        """Record this owner in the table's log: older owners are refused from now on. Raises SinkFenced."""
        if not self._log.exists or not self._context.epoch:
            return

        def plan() -> LakeChange | None:
            numbers = self.transactions.owner_numbers()
            taken = self._log.number(owner_number(self._context)) == self._context.epoch
            return None if taken else LakeChange(numbers=numbers)

        self._log.commit(plan)

    def write(self, files: Sequence[Path], batch_id: int, scratch: Path) -> None:
        """Put a batch into the current transaction; see ``LakeSink.write``."""
        stale = self._batches.pop(batch_id, ())  # the same batch, written a second time
        self._log.files.delete(file.path for file in stale)
        if not files:
            return
        target = self._fitted(files[0])
        prepared = [part for file in files for part in self._fitting.prepare(file, target, scratch)]
        self._check_nulls(prepared, target)
        if not prepared:
            return
        self._mark_attempt()
        folder = self._names.data(self._attempt, self._number)
        named = {f"{folder}/part-{batch_id:06d}-{number:04d}.parquet": part for number, part in enumerate(prepared)}
        self._batches[batch_id] = [
            DataFile(name, part.source.stat().st_size, part.rows, part.statistics, part.partition) for name, part in named.items()
        ]
        self._log.files.place_all({name: part.source for name, part in named.items()})

    def pre_commit(self, checkpoint_id: int) -> str | None:
        """Close the current transaction; see ``TwoPhaseCommitSink.pre_commit``."""
        if self._origin is not None and self._log.exists and begins_timeline(self._origin, checkpoint_id):
            self._ledger = self._timelines().begin_branch(self._read_ledger(), self._origin, checkpoint_id)
            self._origin = None
        files = [file for _, batch in sorted(self._batches.items()) for file in batch]
        if not files:
            return None
        assert self._target is not None
        ledger = self._ledger = self._ledger or self._read_ledger()
        since = ledger.since(checkpoint_id)
        name = TransactionName(self._names, self._job, checkpoint_id, since, self._attempt, self._number)
        target = self._target
        staged = StagedTransaction(target.table, target.schema, target.partition_by, tuple(files))
        text = self.transactions.pre_commit(name, staged)
        self._batches = {}
        self._number += 1
        return text

    def recover(self, committed: Sequence[str], restored: int | None) -> None:
        """The steps after a restore; see ``TwoPhaseCommitSink.recover``."""
        for text in committed:
            self.transactions.decode(text)
        if self._fitting.replacement.partitions and restored is None and self._log.exists:
            check_continued_job(self._log, self._context, self._sink)
        self._perform(recovery(committed, restored))

    def start_new(self, *, replace: bool) -> None:
        """The steps of a new start; see ``TwoPhaseCommitSink.start_new``.

        Args:
            replace: whether the rows of earlier jobs are removed.
        """
        self._perform(new_start())
        if not replace or not self._log.exists:
            return
        if self._fitting.replacement.key:
            remove_rows_of_earlier_jobs(self._log, self._context, self.transactions.owner_numbers, self._sink)
        else:
            remove_earlier_jobs(self._log, self._context, self._timelines())

    def close(self) -> None:
        """Delete the open transaction and copies."""
        self.transactions.drop_copies()
        files = [file.path for batch in self._batches.values() for file in batch]
        self._batches = {}
        with suppress(SinkError, OSError):  # a later start deletes what is left
            self._log.files.delete(files)
        self._log.close()

    def _perform(self, steps: Iterable[TakeFence | Settle | CommitStep[str] | AbortRest | ContinueFrom]) -> None:
        for step in steps:
            match step:
                case TakeFence():
                    self.take_fence()
                case Settle(restored):
                    self._settle(restored)
                case CommitStep(transaction):
                    self.transactions.commit(transaction)
                case AbortRest():
                    self._abort_rest()
                case ContinueFrom(restored):
                    self._ledger = None
                    self._origin = self._beginning() if restored is None else restored

    def _settle(self, restored: int) -> None:
        if not self._log.exists:
            return
        own = [name for name in self._existing() if name.job == self._job]
        if self._fitting.replacement.key:
            self._timelines().check_order(self._names, self._job, restored, own)
        else:
            self._timelines().settle(self._names, self._job, restored, own)

    def _beginning(self) -> int | None:
        """The origin of a job that continues from no checkpoint of this job: 0, the job's beginning.

        None if the instance has committed rows of this job already: a savepoint may have completed before a crash, after
        which the job begins a second time.
        """
        own = (name for name in self._existing() if name.job == self._job)
        return None if any(is_committed(name, self._log.number) for name in own) else 0

    def _abort_rest(self) -> None:
        existing = self._existing()
        self._delete_open_transactions(existing)
        self.transactions.abort(name for name in existing if not is_committed(name, self._log.number))
        done = [file for file in self._log.files.sizes(self._names.attempts) if self._has_ended(file.rpartition("/")[2])]
        self._log.files.delete(done)

    def _delete_open_transactions(self, existing: Sequence[TransactionName]) -> None:
        """Delete the data files of transactions that other attempts have not pre-committed.

        An attempt numbers its transactions, and only the last one can be open.
        """
        for file in self._log.files.sizes(self._names.attempts):
            attempt = file.rpartition("/")[2]
            if self._has_ended(attempt):
                closed = [name.number for name in existing if name.attempt == attempt]
                folder = self._names.data(attempt, max(closed, default=-1) + 1)
                self._log.files.delete(self._log.files.sizes(folder))

    def _has_ended(self, attempt: str) -> bool:
        return attempt != self._attempt and not is_newer_owners(attempt, self._context)

    def _existing(self) -> list[TransactionName]:
        """The instance's transactions whose files exist, of all jobs."""
        return transactions_in(self._log.files.sizes(self._names.transactions))

    def _fitted(self, file: Path) -> Target:
        target = self._fitting.fit(file, self.transactions.owner_numbers)
        if self._target is None:
            self._target = target
            self.take_fence()
        return self._target

    def _check_nulls(self, prepared: Sequence[PreparedFile], target: Target) -> None:
        for part in prepared:
            for column in sorted(target.required):
                found = sum(v is None for n, v in part.partition.items() if n == column) or part.nulls.get(
                    column, 0 if column in part.partition else 1
                )
                if found:
                    raise SinkRowsRefused(
                        f"{self._sink}: expected no nulls in column {column!r}, which belongs to the key, or which the table "
                        f"declares not null, found at least one in {part.rows} rows, or a file that does not count them. Filter "
                        "these rows or fill the column in the stage; or allow nulls in the table. An empty text in a partition "
                        "column may be null, too"
                    )

    def _mark_attempt(self) -> None:
        if not self._marked:
            self._log.files.put(f"{self._names.attempts}/{self._attempt}", b"{}\n")
            self._marked = True

    def _read_ledger(self) -> LakeJobLedger:
        return read_ledger(self._names, self._job, self._log.number)

    def _timelines(self) -> Timelines:
        return Timelines(self._log, self.transactions, self._sink)
