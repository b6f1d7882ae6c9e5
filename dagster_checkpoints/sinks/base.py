"""The two-phase-commit sink: the contract between the runtime and the author of a sink.

Must not know Spark beyond the type of a batch, nor how checkpoints are made. Modelled on Flink's
``TwoPhaseCommitSinkFunction`` and Sink V2.

The life cycle of a sink's instance::

    (check_new_start ──>) open ── recover(transactions of the checkpoint)  or  start_new ──>
        (write* ── pre_commit(42) ──> the text goes into checkpoint 42 ── it completes ──> commit(text))*
    ──> finish ── pre_commit(43) ──> the final checkpoint ── it completes ──> commit(text) ──> close

Only an instance that has reached the end of its data calls ``finish``; a suspended one ends after ``pre_commit`` and ``commit``.

A pre-committed transaction must survive the loss of the process and of the machine. Its text alone must be enough to commit
it, in another process, any number of times. If checkpoint 42 is aborted, its transaction stays pre-committed and is committed
with the next checkpoint that completes.

A savepoint may be restored long after its transactions were aborted, because the job was restored from an older checkpoint in
between. So a savepoint also stores copies of the transactions' files (``transaction_files``), and a restore passes them to the
sink before ``recover`` (``restore_transaction``). A sink whose transactions are not files overrides neither method: its
transactions must then stay committable for as long as savepoints are kept.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AtNewStart = Literal["refuse", "keep", "replace"]
"""What a new start, not a resumption, does with rows that an earlier job has committed to a sink. ``refuse``: the run does not
start; ``keep``: the rows stay beside the new job's rows; ``replace``: the rows are removed when the new job begins. A sink that
offers the choice calls its setting ``at_new_start`` and refuses in :meth:`TwoPhaseCommitSink.check_new_start`."""


@dataclass(frozen=True)
class SinkContext:
    """The stage's instance that a sink serves.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's uid, by default its name: rows and ledgers stay those of a stage that gets another name.
        instance: the instance's name.
        index: the instance's index, from 0 to ``parallelism`` - 1.
        parallelism: number of instances of the stage.
        job_id: the job's number. Each new start of the pipeline gets another number; a restore keeps the number, except the
            restore of a savepoint of another job.
        attempt: unique token of this execution of the instance; each restart gets another one.
        history: random id of the pipeline's checkpoint storage: job numbers and epochs of two histories cannot be compared.
            Letters and digits; empty if the storage has none.
        epoch: fencing epoch of the run that owns the pipeline, larger than those of all earlier owners in this history. An owner
            that was suspended for longer than its lease may still act beside a newer owner: a sink should refuse to abort or
            hide rows for an older epoch than the newest that it has seen. 0 if the pipeline has no owners.
        highest_checkpoint_id: highest id that the checkpoint storage has recorded when this execution begins, over all jobs; None
            if it is not known. If this job has committed a later one, the storage is an older copy than the sink's target: a
            sink should refuse to open, since the job will use the ids of these commits again.
        committed: the transaction that this sink, at this location, had committed last when the restored checkpoint was taken;
            None if it had committed none, or that is not known. If the target does not know it, the target was emptied, or is an
            older copy than the checkpoint: a sink should refuse to open, since rows are missing that no run writes again.
        found_no_job: whether a new job begins because the checkpoint storage knows none, and not because the run asks for a new
            start. If the target has rows of a job, the storage is not the one that it was: a sink should refuse the new start.
    """

    pipeline: str
    stage: str
    instance: str
    index: int
    parallelism: int
    job_id: int
    attempt: str
    history: str = ""
    epoch: int = 0
    highest_checkpoint_id: int | None = None
    committed: str | None = None
    found_no_job: bool = False


@dataclass(frozen=True, slots=True)
class SinkCommit:
    """What one commit has made visible; None for what the sink does not know.

    Args:
        rows: number of rows.
        bytes: size of the files, in bytes.
        files: number of files.
        version: the table's version after the commit, as the table's format names it.
    """

    rows: int | None = None
    bytes: int | None = None
    files: int | None = None
    version: str | None = None


def merged(commits: Iterable[SinkCommit]) -> SinkCommit:
    """One commit that has made visible what all of them have: of several transactions, instances or checkpoints.

    Args:
        commits: the commits, oldest first; at least one.

    Returns:
        Rows, bytes and files are summed; each is None if one of the commits does not know it. The version is the last known one.
    """
    total, *more = commits
    for commit in more:
        total = SinkCommit(
            rows=_sum(total.rows, commit.rows),
            bytes=_sum(total.bytes, commit.bytes),
            files=_sum(total.files, commit.files),
            version=commit.version if commit.version is not None else total.version,
        )
    return total


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


class TwoPhaseCommitSink(ABC):
    """Base of sinks whose rows become visible exactly once, when the checkpoint that holds them completes.

    The object that a stage is declared with is configuration: it is picklable, and its constructor does no input or output.
    Each instance of the stage works with a separate copy, see :meth:`new_instance`. The methods of one instance are
    called one after another, though not always by the same thread.
    """

    supported_output_modes: ClassVar[frozenset[str]] = frozenset({"append"})
    """Spark output modes whose batches this sink can write."""

    @property
    def location(self) -> str | None:
        """The place that the sink writes to, as text: the definition of a pipeline refuses two sinks with one location.

        The same text for the same place, however the user wrote it. Parts are separated by ``/``; a location that begins with
        all parts of another one is inside that one. None if the sink does not know its location.
        """
        return None

    @property
    def uri(self) -> str | None:
        """The URI or the path by which readers find the data, without credentials; None if there is none."""
        return None

    @property
    def table_name(self) -> str | None:
        """The table's full name, as readers write it (``schema.table``); None if the data is not a named table."""
        return None

    @property
    def bounded_only(self) -> bool:
        """Whether only a bounded stage can have this sink: the definition of a pipeline refuses it at an unbounded one."""
        return False

    @property
    def appends(self) -> bool:
        """Whether each row of the stage stays a row of the table, so that the table holds as many rows as were committed.

        False for a sink that replaces rows, by key or by partition.
        """
        return True

    def new_instance(self) -> Self:
        """A separate copy of the sink for one instance of the stage."""
        return copy.deepcopy(self)

    def check_new_start(self, context: SinkContext) -> None:  # noqa: B027 - optional
        """Refuse a new start if the sink's target holds data that the new job must not be mixed with.

        Called on the configured sink (not on an instance's copy), once for each instance of the stage, before Spark starts and
        before the job writes. Not called for a run that restores a checkpoint or savepoint, nor for the restarts of a
        job that has begun. It must change nothing.

        Args:
            context: the instance; ``job_id`` is the number that the new job will have, ``attempt`` is empty.

        Raises:
            SinkError: the new job must not write to the target. The text says what was found, where, and what the choices are.
        """

    def check_target(self, context: SinkContext, rows: Path) -> None:  # noqa: B027 - optional
        """Refuse a target that cannot take the stage's rows, as far as that can be known without a run.

        Called by ``dagster-checkpoints check`` on the configured sink (not on an instance's copy), once for each stage. It tries
        to write where that leaves nothing behind that a reader sees, and compares the columns. A sink that refuses something
        when it is opened, or with the first rows, refuses it here as well if it can.

        Args:
            context: the stage's first instance; ``job_id`` is 0, ``attempt`` and ``history`` are empty: no job is known.
            rows: a Parquet file without rows that has the stage's columns, as Spark writes them.

        Raises:
            SinkError: the sink could not write the rows. An error with ``repeats = False`` says that it could not be found out,
                for example because a server does not answer: ``check`` then warns.
        """

    @abstractmethod
    def open(self, context: SinkContext) -> None:
        """Prepare for writing; the first call to an instance's copy."""

    @abstractmethod
    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Add a micro-batch to the current transaction.

        Args:
            batch: the rows; evaluating the DataFrame reads ``files`` and does not run the query again.
            files: the same rows as Parquet files that are already written. Their content does not change, but they may be
                deleted after the call: link or copy them.
            batch_id: Spark's id of the micro-batch. The same id in the same attempt is the same batch again: it replaces
                the rows written before.
        """

    @abstractmethod
    def pre_commit(self, checkpoint_id: int) -> str | None:
        """Close the current transaction durably; later batches belong to the next transaction.

        Called in the synchronous part of a snapshot: it must be quick.

        Returns:
            Text that the checkpoint stores and from which the transaction can be committed or aborted; None if no
            batch was written.
        """

    def finish(self) -> None:  # noqa: B027 - optional
        """The instance has reached the end of its data: no batch follows. Called before the last ``pre_commit``.

        Write what the sink has held back to the current transaction: the final checkpoint commits it. A suspended instance is
        not finished. After a restore of an earlier checkpoint an instance finishes again.

        Source: FLIP-147, "Finishing sinks".
        """

    @abstractmethod
    def commit(self, transaction: str) -> SinkCommit | None:
        """Make a pre-committed transaction visible. Idempotent: it is called again after a crash.

        Returns:
            What has become visible, as far as the transaction's text and the target tell it, also when the transaction was
            committed before; None if the sink does not report it.

        Raises:
            SinkTransactionLost: the transaction is neither pre-committed nor committed.
        """

    @abstractmethod
    def abort(self, transaction: str) -> None:
        """Delete a pre-committed transaction. Idempotent."""

    def transaction_files(self, transaction: str) -> Mapping[str, Path]:
        """The files of a pre-committed transaction that is not committed yet, for a savepoint to copy.

        Called in the synchronous part of a snapshot, soon after ``pre_commit``. The files must stay as they are until the
        call returns and its caller has linked or copied them.

        Returns:
            Path of each file on this machine, by name (letters, digits, ``_``, ``-``, ``.``; the same names at every call).
            Empty if the transaction has no files or is committed already.
        """
        return {}

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:  # noqa: B027 - optional
        """Make a savepoint's transaction pre-committed again, if it is neither pre-committed nor committed any more.

        Called after ``open`` and before ``recover``. Does nothing if the transaction is pre-committed or committed. Idempotent,
        and safe against a crash at any moment.

        Args:
            transaction: one of the transactions that ``recover`` will get.
            files: the files that ``transaction_files`` returned when the savepoint was taken. They may be deleted after the
                call: link or copy them.

        Raises:
            SinkTransactionConflict: the transaction's target holds other rows.
        """

    @abstractmethod
    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        """After a restore: commit the checkpoint's transactions, then abort all other pre-committed transactions.

        A restore is never a new start, even if another job took the savepoint.

        Args:
            committed: the transactions that the checkpoint holds.
            restored: id of the checkpoint or savepoint if this job took it; None otherwise. The job will write again the
                rows that its later checkpoints committed: a sink that can hides those rows.
        """

    @abstractmethod
    def start_new(self) -> None:
        """At a new start, not a restore: abort old pre-committed transactions, and treat rows of earlier jobs as configured.

        Called again for the same job if it crashes before its first checkpoint; rows that the job itself has
        committed stay.
        """

    @abstractmethod
    def close(self) -> None:
        """Release resources. Pre-committed transactions stay; an open transaction may be deleted. Idempotent."""
