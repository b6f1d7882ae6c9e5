"""A sink whose life :mod:`engine` drives, on a :mod:`target`: settings of every sink, texts of transactions, new starts.

Must not import Spark, nor know a kind of target.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from msgspec.structs import replace

from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.sinks.base import AtNewStart, SinkCommit, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.sinks.engine import SinkLife, SinkScope, drive
from dagster_checkpoints.sinks.ledger import Commit, SinkOwner, Staged, commit_in, decode_texts, encode_text
from dagster_checkpoints.sinks.target import Batch, SinkTarget, SteppedTarget
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkHoldsEarlierRows, SinkNotOpen, SinkPathInUse, few

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class _Opened:
    """An open instance: its target, its life, and the transaction that batches are written to."""

    def __init__(self, target: SinkTarget, life: SinkLife, scope: SinkScope) -> None:
        self.target = target
        self.life = life
        self.scope = scope
        self.current: str | None = None


class TargetSink(TwoPhaseCommitSink):
    """Commits rows to a target.

    Args:
        at_new_start: what a new start, not a resumption, does with rows that an earlier job has committed.

    Raises:
        ValueError: ``at_new_start`` has none of its values.
    """

    kind: ClassVar[str]
    """The kind of the sink in the text of a transaction."""
    noun: ClassVar[str]
    """What it writes to, in errors: ``table``."""

    def __init__(self, at_new_start: AtNewStart) -> None:
        if at_new_start not in get_args(AtNewStart):
            raise ValueError(
                f"expected {type(self).__name__}(at_new_start='refuse', 'keep' or 'replace'), found {at_new_start!r}"
            )
        self.at_new_start: AtNewStart = at_new_start
        self._instance: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: a copy in another instance or process is opened separately.
        return {**self.__dict__, "_instance": None}

    @property
    def replaces_jobs(self) -> bool:
        """Whether a new start can remove the rows of earlier jobs."""
        return True

    @property
    def replaces_by_key(self) -> bool:
        """Whether a row replaces an earlier one with its key."""
        return False

    @property
    def supported_output_modes(self) -> frozenset[str]:  # type: ignore[override]
        """With a key also ``update`` and ``complete``, whose rows replace earlier ones."""
        return frozenset({"append", "update", "complete"} if self.replaces_by_key else {"append"})

    @property
    def appends(self) -> bool:
        return not self.replaces_by_key

    @abstractmethod
    def new_target(self) -> SinkTarget:
        """The target, which is not open."""

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the target; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job has committed rows. Or the storage knows no job.
            SinkPathInUse: the target belongs to another stage or pipeline; or holds rows of a job with the number that the new
                job will have; or, not with ``keep``, rows that cannot be told from the sink's.
            SinkUnavailable: the target does not answer.
        """
        scope = scope_of(context)
        where = f"{self}: stage {context.stage!r} of pipeline {context.pipeline!r}"
        with closing(self.new_target()) as target:
            jobs = sorted(target.jobs(scope))
            if scope.job in jobs:
                raise SinkPathInUse(
                    f"{where}: this run begins job {context.job_id}, and expected no rows of a job of that number in the "
                    f"{self.noun}, found some. The checkpoint storage counts its jobs from 1 again: was it emptied or exchanged? "
                    f"Rows of two jobs with one number cannot be distinguished: give the sink another {self.noun}"
                )
            if jobs and self.at_new_start == "refuse":
                shown = ", ".join(job.removesuffix(f".{context.history}") for job in jobs)
                choices = "'keep' or 'replace'" if self.replaces_jobs else "'keep'"
                replace = "'replace' removes them when the new job begins. " if self.replaces_jobs else ""
                raise SinkHoldsEarlierRows(
                    f"{where}: this run is a new start, and expected no rows of an earlier job in the {self.noun}, found rows "
                    f"that job {shown} has committed. Nothing was started. {type(self).__name__}(at_new_start=...) "
                    "says what a new start does with them: 'refuse' (the default) stops the run; 'keep' leaves them and adds "
                    "the new job's rows, so input that both jobs read gives its rows twice, unless rows replace others by key. "
                    f"{replace}Choose {choices}, or another {self.noun}; or continue the "
                    "earlier job from one of its savepoints or checkpoints (restore_from), which is not a new start"
                )
            if jobs and context.found_no_job:
                what = "replaced" if self.at_new_start == "replace" else "kept, beside the same rows of the new job"
                raise SinkHoldsEarlierRows(
                    f"{where}: the checkpoint storage knows no job of this pipeline, so this run would begin from nothing, and "
                    f"expected no rows of a job in the {self.noun}, found some. With at_new_start={self.at_new_start!r} they "
                    f"would be {what}. Nothing was started. Is the storage another one than before, or was its file system not "
                    "mounted? Put it back to continue the job. To begin again, launch the run with restore_from: 'none'"
                )
            foreign = () if self.at_new_start == "keep" else target.foreign()
            if foreign:
                raise SinkPathInUse(
                    f"{where}: expected a {self.noun} that is empty, or holds only rows that the sink has committed and can tell "
                    f"from others, found other ones ({few(foreign)}). The sink never removes rows that it has not written. Give "
                    f"it a separate {self.noun}, or move these away; if they belong there, choose at_new_start='keep'"
                )

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkPathInUse: the target belongs to another stage or pipeline.
            SinkFenced: a newer run of the pipeline writes to it.
            SinkAheadOfStorage: the checkpoint storage is an older copy than the target.
            SinkTargetChanged: the target is an older copy than the restored checkpoint, or empty.
            SinkUnavailable: the target does not answer.
        """
        self.close()
        target, scope = self.new_target(), scope_of(context)
        if context.committed is not None:
            scope = replace(scope, committed=commit_in(context.committed, self.kind, scope.index, scope.job))
        life = SinkLife(scope, str(self), stepped=isinstance(target, SteppedTarget), by_key=self.replaces_by_key)
        try:
            target.open(scope, life.check_owner)
            drive(life.open(), target)
        except BaseException:
            target.close()
            raise
        self._instance = _Opened(target, life, scope)

    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Stage a micro-batch, where readers do not see it.

        Raises:
            SinkColumnsMismatch: the target does not fit the rows.
            SinkRowsRefused: the target cannot hold a value.
            ReservedSinkColumn: the rows have a column with a name that the sink uses.
            SinkTargetChanged: the target was dropped or changed.
            SinkFenced: a newer run of the pipeline writes to it.
            SinkUnavailable: the target does not answer, or has no space.
        """
        one = self._opened()
        if files and one.current is None:
            one.current = one.life.next_name()
        if one.current is not None:
            paths = [local_path(file) or Path(os.path.abspath(file)) for file in files]
            one.target.stage(one.current, Batch(batch_id, paths))

    def pre_commit(self, checkpoint_id: int) -> str | None:
        one = self._opened()
        drive(one.life.begin(checkpoint_id, with_rows=one.current is not None), one.target)
        name, one.current = one.current, None
        commit = Commit(one.scope.job, one.scope.index, checkpoint_id)
        sealed = None if name is None else one.target.seal(name, commit)
        if name is None or sealed is None:
            return None
        staged = Staged(name, commit, sealed.rows, sealed.bytes, sealed.files, sealed.payload)
        return encode_text(self.kind, one.target.place, staged)

    def commit(self, transaction: str) -> SinkCommit:
        """Make a transaction's rows visible, where readers see them; does nothing if they are.

        Raises:
            SinkTransactionLost: the transaction is neither staged nor committed.
            SinkTransactionConflict: another transaction was committed for its checkpoint.
            UnreadableSinkTransaction: the text is not a transaction of this kind of sink, for this target and instance.
            SinkFenced: a newer run of the pipeline writes to the target.
            SinkRowsRefused: the target does not accept a row.
            SinkTargetChanged: the target was dropped or changed.
            SinkUnavailable: the target does not answer, or has no space.
        """
        one = self._opened()
        (staged,) = self._decoded(one, [transaction])
        version = drive(one.life.commit(staged), one.target)
        return SinkCommit(staged.rows, staged.bytes, staged.files, version)

    def abort(self, transaction: str) -> None:
        one = self._opened()
        (staged,) = self._decoded(one, [transaction])
        drive(one.life.abort(staged), one.target)

    def transaction_files(self, transaction: str) -> Mapping[str, Path]:
        one = self._opened()
        (staged,) = self._decoded(one, [transaction])
        return {} if drive(one.life.is_committed(staged), one.target) else one.target.copies(staged)

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:
        """Stage a transaction again from a savepoint's files, unless it is staged or committed.

        Raises:
            SinkTransactionConflict: another transaction was committed for its checkpoint.
            UnreadableSinkTransaction: the text is not a transaction of this kind of sink, for this target and instance.
        """
        one = self._opened()
        (staged,) = self._decoded(one, [transaction])
        if files and not drive(one.life.is_committed(staged), one.target):
            one.target.restage(staged, files)

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        one = self._opened()
        drive(one.life.recover(self._decoded(one, committed), restored), one.target)

    def start_new(self) -> None:
        one = self._opened()
        drive(one.life.new_start(replace=self.at_new_start == "replace"), one.target)

    def close(self) -> None:
        one, self._instance = self._instance, None
        if one is not None:
            one.target.close()

    def _check_names(self, context: SinkContext) -> None:
        """Refuse names that cannot be a part of a file's name, for a target whose files have them."""
        for what, name in (("pipeline", context.pipeline), ("stage", context.stage), ("attempt", context.attempt)):
            if name and not _NAME.fullmatch(name):
                raise InvalidSinkPath(f"{self}: expected a name of the {what} that can be part of a file's name, found {name!r}")

    def _opened(self) -> _Opened:
        if self._instance is None:
            raise SinkNotOpen(f"{self}: expected open(context) before any other call, found that the sink is not open")
        return self._instance

    def _decoded(self, one: _Opened, texts: Sequence[str]) -> list[Staged]:
        return decode_texts(texts, self.kind, one.target.place, one.scope.index, str(self))


def scope_of(context: SinkContext) -> SinkScope:
    """The instance that a context describes; its job has the name that ledgers use."""
    job = f"{context.job_id}.{context.history}" if context.history else str(context.job_id)
    owner = SinkOwner(context.epoch, context.history)
    return SinkScope(
        context.pipeline,
        context.stage,
        context.index,
        context.parallelism,
        job,
        owner,
        context.attempt,
        context.highest_checkpoint_id,
    )
