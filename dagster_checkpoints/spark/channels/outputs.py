"""A task's output: the channels to its consumers, and the sink of its last stage.

A micro-batch is evaluated once, into a segment; consumers and sink share the segment's files.
It must not know queries, gates or the life cycle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import Quarantine
from dagster_checkpoints.spark.channels.channel_log import Channel, LoggedElement, Records, SegmentFiles
from dagster_checkpoints.spark.channels.segments import Split, part_of_file, write_parts, write_segment
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.query.quarantined_rows import not_met, with_reasons
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BACKPRESSURE_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class OutputEdge:
    """The channels from this task to the instances of one consumer.

    Attributes:
        consumer: The consuming stage.
        channels: The channels.
        split: The distribution of rows among the channels; None if each channel gets all rows.
        static: Whether the consumer reads them as a static input.
        refused: Whether they carry the rows that the stage's quarantine refuses.
    """

    consumer: str
    channels: tuple[Channel, ...]
    split: Split | None
    static: bool
    refused: bool = False


@dataclass(frozen=True)
class _Written:
    """A micro-batch that was written and is not emitted yet.

    Attributes:
        passed: The rows of the stage; None if there are none.
        refused: Those that its quarantine refuses; None if there are none.
        divided: By consumer and index of its instance, the rows of the edges on which each channel gets a part of them.
    """

    passed: SegmentFiles | None
    refused: SegmentFiles | None
    divided: dict[str, dict[int, SegmentFiles]]


class TaskOutput:
    """Writes a task's micro-batches and emits them.

    Args:
        folder: The directory of the segments.
        edges: The output edges, one per consumer.
        to_sink: Receives every whole segment before the channels do; None without a sink.
        max_queued_bytes: Size of the unread segments of a channel, in bytes, from which the task waits for its consumer; static
            inputs have no limit.
        quarantine: The stage's conditions on its rows; None without.

    Attributes:
        rows: The number of rows emitted, without refused ones.
        refused: The number of rows refused.
    """

    def __init__(
        self,
        folder: WorkPath,
        edges: Sequence[OutputEdge],
        to_sink: Callable[[SegmentFiles, int], None] | None,
        max_queued_bytes: int,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.rows = 0
        self.refused = 0
        self._quarantine = quarantine
        self._folder = folder
        self._edges = tuple(edges)
        self._to_sink = to_sink
        self._max_queued_bytes = max_queued_bytes
        self._number = itertools.count()

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(channel for edge in self._edges for channel in edge.channels)

    def write(
        self,
        batch: DataFrame,
        batch_id: int,
        process: Callable[[SegmentFiles], DataFrame | None] | None = None,
        observe: Callable[[Iterable[SegmentFiles]], None] | None = None,
    ) -> int:
        """Evaluate a micro-batch and emit it at once, see :meth:`evaluate`. Returns the number of rows emitted."""
        return self.evaluate(batch, process, observe)(batch_id)

    def evaluate(
        self,
        batch: DataFrame,
        process: Callable[[SegmentFiles], DataFrame | None] | None = None,
        observe: Callable[[Iterable[SegmentFiles]], None] | None = None,
    ) -> Callable[[int], int]:
        """Evaluate a micro-batch; consumers and sink see nothing of it before it is emitted.

        Args:
            batch: The micro-batch.
            process: The stage's `process_batch`: takes the written batch, and returns the rows to emit instead; None to emit
                nothing. It is called when the batch is emitted: the stage may keep what a snapshot holds.
            observe: Takes the files of the batch, before it is processed or emitted.

        Returns:
            Emits the batch, once. Takes Spark's number of the micro-batch, or the first free number for the rows that `finish`
            returned; returns the number of rows emitted.
        """
        alone = len(self._edges) == 1 and self._to_sink is None and process is None and self._quarantine is None
        only = self._edges[0] if alone else None
        if only is not None and only.split is not None:
            parts = write_parts(batch, self._next_folder(), only.split.column())
            if observe is not None:
                observe(parts.values())
            return lambda batch_id: self._emit_split(only, parts)
        if process is not None:
            segment = write_segment(batch, self._next_folder())
            if observe is not None and segment is not None:
                observe((segment,))
            return lambda batch_id: self._process_and_emit(segment, process, batch_id)
        written = self._write(batch)
        if observe is not None and written.passed is not None:
            observe((written.passed,))
        return lambda batch_id: self._emit(written, batch_id)

    def _process_and_emit(
        self, segment: SegmentFiles | None, process: Callable[[SegmentFiles], DataFrame | None], batch_id: int
    ) -> int:
        whole = segment or SegmentFiles((), 0, ())
        whole.hold()
        processed = process(whole)
        written = None if processed is None else self._write(processed)
        whole.release()
        return 0 if written is None else self._emit(written, batch_id)

    def _write(self, rows: DataFrame) -> _Written:
        if self._quarantine is None:
            passed, refused = write_segment(rows, self._next_folder()), None
        else:
            parts = write_parts(rows, self._next_folder(), not_met(self._quarantine, rows))
            passed = parts.pop(0, None)
            files = [file for part in parts.values() for file in part.files]
            refused = (
                write_segment(with_reasons(self._quarantine, rows, files, part_of_file()), self._next_folder()) if files else None
            )
            for part in parts.values():
                part.hold()
                part.release()
        splits = {edge.consumer: edge.split for edge in self._edges if edge.split is not None} if passed is not None else {}
        whole = table_dataframe(rows.sparkSession, rows.schema, passed.files) if splits and passed is not None else rows
        divided = {name: write_parts(whole, self._next_folder(), split.column()) for name, split in splits.items()}
        return _Written(passed, refused, divided)

    def _emit(self, written: _Written, batch_id: int) -> int:
        passed = written.passed
        if written.refused is not None:
            self.refused += written.refused.rows
            self._append(written.refused, [edge for edge in self._edges if edge.refused])
        if passed is None:
            return 0
        self.rows += passed.rows
        passed.hold()
        if self._to_sink is not None:
            self._to_sink(passed, batch_id)
        for edge in self._edges:
            if edge.split is not None:
                self._distribute(edge, written.divided[edge.consumer])
        self._append(passed, [edge for edge in self._edges if edge.split is None and not edge.refused])
        passed.release()
        return passed.rows

    @staticmethod
    def _append(segment: SegmentFiles, edges: Iterable[OutputEdge]) -> None:
        segment.hold()
        for edge in edges:
            for channel in edge.channels:
                channel.append(Records(segment))
        segment.release()

    def _emit_split(self, edge: OutputEdge, parts: dict[int, SegmentFiles]) -> int:
        rows = sum(part.rows for part in parts.values())
        self.rows += rows
        self._distribute(edge, parts)
        return rows

    @staticmethod
    def _distribute(edge: OutputEdge, parts: dict[int, SegmentFiles]) -> None:
        for index, part in parts.items():
            edge.channels[index].append(Records(part))

    def append(self, element: LoggedElement) -> None:
        """Append a mark to every channel."""
        for channel in self.channels:
            channel.append(element)

    @property
    def is_held_back(self) -> bool:
        """Whether a consumer has too many unread bytes."""
        return not all(c.wait_below(self._max_queued_bytes, 0) for e in self._edges if not e.static for c in e.channels)

    def wait_for_consumers(self, give_up: Callable[[], bool]) -> None:
        """Back-pressure: wait while a consumer has too many unread bytes. No lock is held, so a barrier can pass."""
        for edge in self._edges:
            for channel in () if edge.static else edge.channels:
                while not give_up() and not channel.wait_below(self._max_queued_bytes, BACKPRESSURE_POLL_SECONDS):
                    pass

    def _next_folder(self) -> WorkPath:
        return self._folder / f"{next(self._number):06d}"
