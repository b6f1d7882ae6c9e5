"""Base of sinks that write rows to a lake table: the life of an instance.

Must not import Spark. Batches arrive as Parquet files that are already written; where the table's format allows it, they become
the table's data files as they are.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.sinks.base import AtNewStart, SinkCommit, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.sinks.lake.columns import SchemaEvolution
from dagster_checkpoints.sinks.lake.fitting import FileFitting
from dagster_checkpoints.sinks.lake.instance import LakeInstance
from dagster_checkpoints.sinks.lake.names import VALID_NAME
from dagster_checkpoints.sinks.lake.new_start import check_new_start
from dagster_checkpoints.sinks.lake.replacement import Replacement
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkNotOpen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class LakeSink(TwoPhaseCommitSink):
    """Commits a stage's rows to a lake table: one commit per instance and checkpoint.

    Args:
        at_new_start: what a new start does with rows that an earlier job of this stage has committed to the table.
        partition_by: the table's partition columns, in order; None: those that the table has, none for a new table.
        schema_evolution: what happens to differences between the stage's columns and the table's.
        key: name or names of the columns by which a row replaces an earlier one; None to add every row.
        overwrite_partitions: whether the rows of a job replace those of the partitions that they are in.

    Raises:
        ValueError: a setting has none of its values, or does not go with another one.
    """

    def __init__(
        self,
        at_new_start: AtNewStart,
        partition_by: str | Sequence[str] | None,
        schema_evolution: SchemaEvolution,
        key: str | Sequence[str] | None = None,
        overwrite_partitions: bool = False,
    ) -> None:
        for name, value, values in (
            ("at_new_start", at_new_start, get_args(AtNewStart)),
            ("schema_evolution", schema_evolution, get_args(SchemaEvolution)),
        ):
            if value not in values:
                raise ValueError(f"expected {type(self).__name__}({name}=...) to be one of {', '.join(values)}, found {value!r}")
        self.at_new_start: AtNewStart = at_new_start
        self.partition_by = _names(partition_by) or None
        self.schema_evolution: SchemaEvolution = schema_evolution
        self.key = _names(key)
        self.overwrite_partitions = overwrite_partitions
        _check_replacement(self)
        self._instance: LakeInstance | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: a copy in another instance or process is opened separately.
        return {**self.__dict__, "_instance": None}

    @property
    def supported_output_modes(self) -> frozenset[str]:  # type: ignore[override]
        """With a key also ``update`` and ``complete``, whose rows replace earlier ones."""
        return frozenset({"append", "update", "complete"} if self.key else {"append"})

    @property
    def bounded_only(self) -> bool:
        return self.overwrite_partitions

    @property
    def appends(self) -> bool:
        return not self.replacement

    @property
    def replacement(self) -> Replacement:
        """Which rows the stage's rows replace."""
        return Replacement(self.key, self.overwrite_partitions)

    @abstractmethod
    def _new_fitting(self) -> FileFitting:
        """Fits files to the table, which has not been read."""

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the table; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job of this stage has committed rows to the table.
            SinkPathInUse: the table holds rows of a job with the number that the new job will have.
            SinkColumnsMismatch: the table asks something of its writers that this sink does not do.
            SinkCannotTakeBack: with ``at_new_start="replace"`` and a key: another program may have rewritten the table's rows.
            InvalidSinkPath: the table's directory cannot be written.
            SinkUnavailable: the location cannot be read, or its file system is full.
        """
        self._check_names(context)
        self._try_directory(f"Stage {context.stage!r} of pipeline {context.pipeline!r}: {self}")
        fitting = self._new_fitting()
        with closing(fitting.log):
            if fitting.log.find():
                fitting.check_table()
                check_new_start(fitting.log, context, self.at_new_start, by_key=bool(self.key), sink=str(self))

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check that the table can be read, its directory be written, and that the stage's columns fit the table.

        Nothing is written to a location that is not a directory: there the run finds out.

        Raises:
            InvalidSinkPath: the directory cannot be written.
            SinkColumnsMismatch: the columns do not fit, or the table asks something of its writers that this sink does not do.
            SinkUnavailable: the location cannot be read, or is full.
        """
        self._check_names(context)
        self._try_directory(str(self))
        fitting = self._new_fitting()
        with closing(fitting.log):
            fitting.check_rows(rows)

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkFenced: a newer run of the pipeline writes to the table.
            SinkColumnsMismatch: the table asks something of its writers that this sink does not do.
        """
        self._check_names(context)
        fitting = self._new_fitting()
        if fitting.log.find():
            fitting.check_table()
        self._instance = LakeInstance(fitting.log, context, fitting, str(self))
        self._instance.take_fence()

    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        """Put the batch's files into the table's location, where readers of the table do not see them.

        Raises:
            SinkColumnsMismatch: the columns do not fit the table.
            SinkRowsRefused: a column that holds no nulls in the table has nulls.
        """
        instance = self._opened()
        paths = [_local(file) for file in files]
        with TemporaryDirectory(prefix="lake-sink-") as scratch:
            instance.write(paths, batch_id, Path(scratch))

    def pre_commit(self, checkpoint_id: int) -> str | None:
        return self._opened().pre_commit(checkpoint_id)

    def commit(self, transaction: str) -> SinkCommit:
        """Make the transaction's files part of the table in one commit, unless its log says that they were committed.

        Raises:
            SinkTransactionLost: files of the transaction have been deleted.
            SinkTargetChanged: the table was dropped, or created again.
            SinkColumnsMismatch: the table was changed so that the rows do not fit any more.
            SinkFenced: a newer run of the pipeline writes to the table, and the transaction is not committed.
            UnreadableSinkTransaction: the text is not a transaction of this kind of sink.
        """
        return self._opened().transactions.commit(transaction)

    def abort(self, transaction: str) -> None:
        transactions = self._opened().transactions
        transactions.abort([transactions.decode(transaction)[1]])

    def transaction_files(self, transaction: str) -> dict[str, Path]:
        return self._opened().transactions.savepoint_files(transaction)

    def restore_transaction(self, transaction: str, files: Mapping[str, Path]) -> None:
        """Put a savepoint's files into the table's location again, unless they are there.

        Raises:
            UnreadableSinkTransaction: the text is not a transaction of this kind of sink.
        """
        if files:
            self._opened().transactions.restore(transaction, files)

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        self._opened().recover(committed, restored)

    def start_new(self) -> None:
        self._opened().start_new(replace=self.at_new_start == "replace")

    def close(self) -> None:
        if self._instance is not None:
            self._instance.close()
        self._instance = None

    def _opened(self) -> LakeInstance:
        if self._instance is None:
            raise SinkNotOpen(f"{self}: expected open(context) before any other call, found that the sink is not open")
        return self._instance

    def _try_directory(self, sink: str) -> None:
        directory = local_path(self.uri) if self.uri is not None else None
        if directory is not None:
            try_directory(directory, sink)

    def _check_names(self, context: SinkContext) -> None:
        for what, name in (("pipeline", context.pipeline), ("stage", context.stage), ("attempt", context.attempt)):
            if name and not VALID_NAME.fullmatch(name):
                raise InvalidSinkPath(f"{self}: expected a name of the {what} that can be part of a file's name, found {name!r}")


def _names(columns: str | Sequence[str] | None) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns or ())


def _check_replacement(sink: LakeSink) -> None:
    """Refuse settings of ``key`` and ``overwrite_partitions`` that do not go together."""
    name = type(sink).__name__
    if len(set(sink.key)) != len(sink.key) or "" in sink.key:
        raise ValueError(f"expected {name}(key=...) to name different columns, found {list(sink.key)}")
    if not sink.overwrite_partitions:
        return
    if sink.key:
        raise ValueError(f"expected {name}(key=...) or {name}(overwrite_partitions=True), found both")
    if sink.partition_by is None:
        raise ValueError(f"expected the partition columns, {name}(partition_by=...), with overwrite_partitions=True, found none")
    if sink.at_new_start == "replace":
        raise ValueError(
            f"expected {name}(at_new_start='keep' or 'refuse') with overwrite_partitions=True, found 'replace', which removes "
            "all rows of earlier jobs. With 'keep' a new job replaces the partitions that it writes to"
        )


def _local(file: str) -> Path:
    return local_path(file) or Path(os.path.abspath(file))
