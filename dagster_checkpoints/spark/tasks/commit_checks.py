"""The uncommitted rows of one task's sink: evaluates the checks over them, and takes a sample. It must not know the sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.pipeline import CheckEvaluation, CommitCheck
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.files.work_path import WorkPath

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SampleRow = Mapping[str, Any]
"""A row by its columns, as pyarrow gives it; a value that Python does not have is a text."""


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """What is known of the rows of a commit.

    Attributes:
        checks: The results of the checks; empty if there are none, or nothing was written.
        sample: Some of the rows.
    """

    checks: tuple[CheckEvaluation, ...] = ()
    sample: tuple[SampleRow, ...] = ()


class CommitChecks:
    """Holds the segments that a sink has not committed yet, so that checks can read them.

    Args:
        checks: The stage's checks.
        instance: Name of the stage's instance.
        sample_rows: Number of rows of a sample; 0 for none.
        read: The rows of files as a DataFrame.
    """

    def __init__(
        self,
        checks: Sequence[CommitCheck],
        instance: str,
        sample_rows: int,
        read: Callable[[Sequence[WorkPath]], DataFrame],
    ) -> None:
        self._checks = tuple(checks)
        self._instance = instance
        self._sample_rows = sample_rows
        self._read = read
        self._current: dict[int, SegmentFiles] = {}
        self._sample: tuple[SampleRow, ...] = ()
        self._waiting: dict[int, tuple[CheckedRows, list[SegmentFiles]]] = {}

    def add(self, segment: SegmentFiles, batch_id: int, files: Sequence[Path]) -> None:
        """A micro-batch was written to the sink; the same id again replaces it.

        Args:
            segment: The batch.
            batch_id: Spark's number of the batch.
            files: The batch's files on this machine.
        """
        if self._sample_rows and files:
            self._sample = _first_rows(files[0], self._sample_rows) or self._sample
        if not self._checks:
            return
        segment.hold()
        replaced = self._current.pop(batch_id, None)
        self._current[batch_id] = segment
        if replaced is not None:
            replaced.release()

    def evaluate(self, checkpoint_id: int, refused: tuple[CheckEvaluation, ...] = ()) -> tuple[CheckEvaluation, ...]:
        """Evaluate the checks over all rows that are not committed yet; none without rows.

        Args:
            checkpoint_id: The checkpoint or savepoint that is being taken.
            refused: Results for these rows that are known already.
        """
        current, self._current = list(self._current.values()), {}
        uncommitted = [segment for _, held in self._waiting.values() for segment in held] + current
        evaluations = refused
        self._waiting[checkpoint_id] = (CheckedRows(), current)
        if uncommitted:
            rows = self._read([file for segment in uncommitted for file in segment.files])
            evaluations += tuple(
                CheckEvaluation(check.name, self._instance, checkpoint_id, check.blocking, check(rows)) for check in self._checks
            )
        self._waiting[checkpoint_id] = (CheckedRows(evaluations, self._sample), current)
        return evaluations

    def committed(self, checkpoint_id: int) -> CheckedRows:
        """The sink has committed all rows up to a checkpoint. Returns what is known of them."""
        newest = CheckedRows()
        for covered in sorted(taken for taken in self._waiting if taken <= checkpoint_id):
            newest, held = self._waiting.pop(covered)
            for segment in held:
                segment.release()
        return newest

    def close(self) -> None:
        """Release all segments; once."""
        self.committed(max(self._waiting, default=0))
        for segment in self._current.values():
            segment.release()
        self._current.clear()


def _first_rows(file: Path, number: int) -> tuple[SampleRow, ...]:
    with pq.ParquetFile(file) as parquet:
        batch = next(parquet.iter_batches(batch_size=number), None)
    if batch is None:
        return ()
    columns = [_values(column) for column in batch.columns]
    return tuple(dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """Values for people: one that Python does not have, such as text that is not UTF-8 or a time after the year 9999, as text."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        if len(column) > 1:
            return [value for row in range(len(column)) for value in _values(column.slice(row, 1))]
        values = [" ".join(column.to_string().split()).removeprefix("[ ").removesuffix(" ]").strip('"')]
    return values
