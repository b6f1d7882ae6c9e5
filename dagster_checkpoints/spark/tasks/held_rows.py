"""Rows that wait for the id of the checkpoint that will be the first to hold them, which becomes one of their columns.

It must not know the sink that takes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.channels.segments import write_segment
from dagster_checkpoints.spark.files.work_path import WorkPath

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class HeldRows:
    """The rows of one task's sink since its last snapshot; meant for few rows.

    Args:
        folder: The directory for the rows with their column.
        column: The column for the id, a BIGINT, which the rows have.
        read: The rows of files as a DataFrame.
    """

    def __init__(self, folder: WorkPath, column: str, read: Callable[[Sequence[WorkPath]], DataFrame]) -> None:
        self._folder = folder
        self._column = column
        self._read = read
        self._held: dict[int, SegmentFiles] = {}
        self._number = itertools.count()

    def add(self, segment: SegmentFiles, batch_id: int) -> None:
        """Hold a micro-batch; the same id again replaces it."""
        segment.hold()
        replaced = self._held.pop(batch_id, None)
        self._held[batch_id] = segment
        if replaced is not None:
            replaced.release()

    def take(self, checkpoint_id: int) -> tuple[SegmentFiles, int] | None:
        """All held rows as one micro-batch, with the id of the checkpoint or savepoint; None if there are none.

        Returns:
            The micro-batch, held for the caller, and the number of the newest one in it.
        """
        if not self._held:
            return None
        rows = self._read([file for segment in self._held.values() for file in segment.files])
        numbered = rows.withColumn(self._column, F.lit(checkpoint_id).cast("bigint"))
        segment = write_segment(numbered, self._folder / f"{next(self._number):06d}")
        assert segment is not None
        segment.hold()
        newest = max(self._held)
        self.close()
        return segment, newest

    def close(self) -> None:
        """Release all that is held."""
        for segment in self._held.values():
            segment.release()
        self._held.clear()
