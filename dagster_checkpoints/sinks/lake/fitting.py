"""How a stage's files become files of a table: tables are created, checked and given new columns.

Must not know transactions, checkpoints or a table format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from dagster_checkpoints.sinks.exact_values import check_values
from dagster_checkpoints.sinks.lake.columns import Column, SchemaEvolution, added, differences, unfit
from dagster_checkpoints.sinks.lake.keys import last_of_each_key
from dagster_checkpoints.sinks.lake.placement import Replacement
from dagster_checkpoints.sinks.lake.table_log import PreparedFile, TableLog, TableShape
from dagster_checkpoints.sinks.parquet_files import partitions, rows_in_microseconds
from dagster_checkpoints.systems.errors import SinkColumnsMismatch

_ADDING = 5


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a stage's files have to fit.

    Args:
        table: the table's id.
        schema: the stage's columns, as the format writes them.
        partition_by: the table's partition columns.
        required: the columns that hold no nulls: those that the table declares so, and the key's.
    """

    table: str
    schema: str
    partition_by: tuple[str, ...]
    required: frozenset[str]


class FileFitting:
    """Fits a stage's Parquet files to a table.

    Args:
        log: the table, which need not exist.
        partition_by: the partition columns; None: those that the table has, or none.
        evolution: what happens to differences between the stage's columns and the table's.
        sink: the sink as errors name it.
        replacement: which rows the stage's rows replace.
    """

    def __init__(
        self,
        log: TableLog,
        partition_by: Sequence[str] | None,
        evolution: SchemaEvolution,
        sink: str,
        replacement: Replacement,
    ) -> None:
        self.log = log
        self.replacement = replacement
        self._partition_by = partition_by
        self._evolution = evolution
        self._sink = sink

    def fit(self, file: Path, create: Callable[[str, Sequence[str]], None], check_owner: Callable[[], None]) -> Fitted:
        """Create the table if there is none, add new columns if they may be added, and check the stage's columns.

        Args:
            file: a Parquet file with the stage's columns.
            create: creates the table, with these columns as text and these partition columns.
            check_owner: raises if this owner must change nothing.

        Raises:
            SinkColumnsMismatch: the stage's columns do not fit, or the format has no such type.
        """
        stage = self._stage_columns(file)
        if not self.log.exists and not self.log.find():
            self._check_partitions(stage, self._partition_by or ())
            create(self.log.schema_of(stage), self._partition_by or ())
        self.check_table()
        for _ in range(_ADDING):
            shape = self._checked_shape(stage)
            new = added(shape.columns, stage)
            if not new:
                break
            check_owner()
            self.log.add_columns(new)
        else:
            raise self._mismatch([f"columns {[column.name for column in new]}: expected them after they were added"])
        self._check_partitions(stage, shape.partition_by)
        required = shape.required | set(self.replacement.key)
        return Fitted(shape.table, self.log.schema_of(stage), shape.partition_by, required)

    def check_rows(self, file: Path) -> None:
        """Check the stage's columns as `fit` does, and change nothing.

        Args:
            file: a Parquet file with the stage's columns.

        Raises:
            SinkColumnsMismatch: the stage's columns do not fit, or the format has no such type.
        """
        stage = self._stage_columns(file)
        partition_by = self._partition_by or ()
        if self.log.find():
            self.check_table()
            partition_by = self._checked_shape(stage).partition_by
        else:
            self.log.schema_of(stage)
        self._check_partitions(stage, partition_by)

    def check_table(self) -> None:
        """Check that this sink can write to the table, which exists, at all.

        Raises:
            SinkColumnsMismatch: the table has other partition columns, or asks something of its writers that this sink does not
                do.
        """
        self.log.check_table(replaces=bool(self.replacement))
        found, wanted = list(self.log.shape().partition_by), self._partition_by
        if wanted is not None and list(wanted) != found:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table with the partition columns {list(wanted)}, found {found}. Change partition_by, "
                "or leave it out to take the table's"
            )

    def prepare(self, file: Path, partition_by: Sequence[str], scratch: Path) -> Iterator[PreparedFile]:
        """The data files for the rows of a Parquet file: the file itself, or new ones.

        Args:
            file: the file.
            partition_by: the table's partition columns.
            scratch: directory for new files.
        """
        metadata, log = pq.read_metadata(file), self.log
        if not metadata.num_rows:
            return
        if not partition_by and log.takes(metadata):
            yield log.described(file, metadata, {})
            return
        rows = rows_in_microseconds(file, metadata)
        for batch in rows.select(list(partition_by)).to_batches():  # Python's types cannot hold each value
            check_values(batch, {}, (), self._sink)
        if partition_by and self.replacement.key:
            # The order of rows is lost between partitions: of several rows with one key only the last one is kept.
            rows = last_of_each_key(rows, self.replacement.key)
        for number, (values, part) in enumerate(partitions(rows, partition_by)):
            target = scratch / f"{file.name}-{number}"
            kept = part if log.format.partitions_in_files else part.drop_columns(list(partition_by))
            pq.write_table(kept, target, compression=log.format.compression)
            yield log.described(target, pq.read_metadata(target), log.partition_texts(values))

    def _checked_shape(self, stage: Sequence[Column]) -> TableShape:
        shape = self.log.shape()
        problems = differences(shape.columns, stage, shape.required, self._evolution)
        if problems:
            raise self._mismatch(problems)
        return shape

    def _stage_columns(self, file: Path) -> tuple[Column, ...]:
        """The columns of a file of the stage; a column of the key is among them, and can be one."""
        try:
            columns = self.log.columns_in(file)
        except Exception as error:  # libraries raise plain exceptions for types that they do not know
            found = str(error).partition("\n")[0]  # without the trace of calls
            raise SinkColumnsMismatch(
                f"{self._sink}: expected columns of types that {self.log.format.name} has, found in {file.name}: {found}. Cast "
                "the column to another type in the stage"
            ) from error
        problems = unfit(columns, self.replacement.key, "key", self.log.format.key_types)
        if problems:
            raise self._mismatch(problems)
        return columns

    def _check_partitions(self, stage: Sequence[Column], partition_by: Sequence[str]) -> None:
        problems = unfit(stage, partition_by, "partition", self.log.format.partition_types)
        if not self.log.format.partitions_in_files and stage and len(set(partition_by)) == len(stage):
            problems.append("expected at least one column that is not a partition column")
        if problems:
            raise self._mismatch(problems)

    def _mismatch(self, problems: Sequence[str]) -> SinkColumnsMismatch:
        return SinkColumnsMismatch(
            f"{self._sink}: the stage's columns do not fit the table: {'; '.join(problems)}. Change the stage or the table; "
            "schema_evolution='add' adds new columns to the table and lets the stage leave out columns that may be null"
        )
