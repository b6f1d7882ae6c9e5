"""What a two-phase-commit sink is: the contract between the runtime and whoever writes a sink.

Must not know Spark beyond the type of a batch, nor how checkpoints are made. In spirit Flink's
``TwoPhaseCommitSinkFunction`` and Sink V2.

The life of a sink's instance::

    (check_new_start ──>) open ── recover(transactions of the checkpoint)  or  start_new ──>
        (write* ── pre_commit(42) ──> the text goes into checkpoint 42 ── it completes ──> commit(text))*
    ──> close

A pre-committed transaction must survive the death of the process and of the machine, and must commit from its
text alone, in another process, any number of times. If checkpoint 42 is aborted its transaction stays
pre-committed and is committed with the next checkpoint that completes.

A savepoint outlives all that: when it is restored, its transactions may have been aborted long ago, because the job
went on from an older checkpoint. So it also takes the files behind them along (``transaction_files``), and its
restore hands them back before ``recover`` (``restore_transaction``). A sink whose transactions are not files leaves
both as they are: its transactions must then stay committable for as long as savepoints are kept.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AtNewStart = Literal["refuse", "keep", "replace"]
"""What a new start, not a resumption, does about rows that an earlier job has committed to a sink: ``refuse``, the run does not
start; ``keep``, they stay beside the new job's; ``replace``, they are removed when the new job begins. A sink that offers the
choice calls its setting ``at_new_start`` and refuses in :meth:`TwoPhaseCommitSink.check_new_start`."""


@dataclass(frozen=True)
class SinkContext:
    """Which instance a sink serves.

    Args:
        pipeline: its name.
        stage: its name.
        instance: the instance's name.
        index: the instance's index among ``parallelism``.
        parallelism: number of instances of the stage.
        job_id: differs between two new starts of the pipeline; the same after a restore, unless it was from a savepoint
            that is not this job's own.
        attempt: differs between any two executions of the instance, restarts included.
        history: of the pipeline's checkpoint storage: job numbers of another one say nothing about this one's. Letters and
            digits; empty if there is none.
        epoch: of the run that owns the pipeline, larger than that of every earlier one of this history. An owner that was
            suspended for a whole lease may still act when a newer one does: a sink that aborts or takes back should refuse to
            do so for an older epoch than it has seen. 0 if there are no owners.
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


class TwoPhaseCommitSink(ABC):
    """Base of sinks whose rows become visible exactly once, when the checkpoint that holds them completes.

    The object that a stage is given is configuration: picklable, its constructor touches nothing outside.
    Each instance works with a copy of its own, see :meth:`new_instance`. The methods of one instance are
    called one after another, though not always by the same thread.
    """

    supported_output_modes: ClassVar[frozenset[str]] = frozenset({"append"})
    """Spark output modes whose batches this sink understands."""

    @property
    def location(self) -> str | None:
        """Where the sink writes, as text by which the definition of a pipeline finds two sinks in one place.

        The same text for the same place, however the user wrote it; parts are separated by ``/``, and a place whose parts begin
        with all of another's is inside that one. None if it is not known.
        """
        return None

    def new_instance(self) -> Self:
        """A sink of its own for one instance of the stage."""
        return copy.deepcopy(self)

    def check_new_start(self, context: SinkContext) -> None:  # noqa: B027 - optional
        """Before a new start: refuse it if the sink's target holds what the new job must not meet.

        Called on the configured sink (not on an instance's copy), once for each instance of the stage, before Spark starts and
        before anything of the job is written; not for a run that restores a checkpoint or savepoint, nor for the restarts of a
        job that has begun. It must change nothing.

        Args:
            context: of the instance; ``job_id`` is the number that the new job is going to have, ``attempt`` is empty.

        Raises:
            SinkError: the new job must not write there. The text says what was found, where, and what the choices are.
        """

    @abstractmethod
    def open(self, context: SinkContext) -> None:
        """Prepare for writing; the first call to an instance's copy."""

    @abstractmethod
    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Take a micro-batch into the current transaction.

        Args:
            batch: the rows; evaluating it reads ``files``, never the query again.
            files: the same rows as Parquet files already written. They stay as they are but may be deleted
                after the
                call: link or copy them.
            batch_id: Spark's. The same id in the same attempt means the same batch again, replacing what was
                written.
        """

    @abstractmethod
    def pre_commit(self, checkpoint_id: int) -> str | None:
        """Close the current transaction durably; what is written next belongs to another one.

        Called in the synchronous part of a snapshot: be quick.

        Returns:
            Text for the checkpoint from which the transaction can be committed or aborted, None if nothing
            was written.
        """

    @abstractmethod
    def commit(self, transaction: str) -> None:
        """Make a pre-committed transaction visible. Idempotent: it is called again after a crash.

        Raises:
            SinkTransactionLost: it is neither pre-committed nor committed.
        """

    @abstractmethod
    def abort(self, transaction: str) -> None:
        """Throw a pre-committed transaction away. Idempotent."""

    def transaction_files(self, transaction: str) -> Mapping[str, Path]:
        """The files of a pre-committed transaction that is not committed yet, for a savepoint to take along.

        Called in the synchronous part of a snapshot, soon after ``pre_commit``. The files must stay as they are until the
        call returns and its caller has linked or copied them.

        Returns:
            By name (of letters, digits, ``_``, ``-``, ``.``; the same whenever it is asked): where the file lies on this
            machine. Empty if there are none, or the transaction is committed already.
        """
        return {}

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:  # noqa: B027 - optional
        """Before ``recover`` from a savepoint: bring a transaction back that is neither pre-committed nor committed any more.

        Otherwise do nothing. Idempotent, and safe against a crash at any moment.

        Args:
            transaction: one of those that ``recover`` will be given.
            files: what ``transaction_files`` said when the savepoint was taken. They may be deleted after the call: link or
                copy them.

        Raises:
            SinkTransactionConflict: where it is committed to lies something else.
        """

    @abstractmethod
    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        """After a restore: commit what the checkpoint holds, then abort what else was left behind.

        A restore is never a new start, also if the job has another id than the one that took the savepoint.

        Args:
            committed: the transactions that the checkpoint holds.
            restored: the id of the checkpoint or savepoint, if the job had it itself: a sink that can takes back what
                later checkpoints of the job committed, since those rows will come again.
        """

    @abstractmethod
    def start_new(self) -> None:
        """At a new start, not a restore: abort what was left behind, and treat rows of earlier jobs as configured.

        Called again for the same job when it crashes before its first checkpoint; what the job itself has
        committed stays.
        """

    @abstractmethod
    def close(self) -> None:
        """Release resources. What is pre-committed stays; what is not yet may be thrown away. Idempotent."""
