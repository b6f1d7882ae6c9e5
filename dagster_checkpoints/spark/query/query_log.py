"""Reads and writes the logs in a Spark query's checkpoint directory: `offsets/` and `commits/`.

The file format is Spark's (`HDFSMetadataLog`): a version line, for offsets a line of metadata, then a line per
source. Must not know stages, channels or the coordinator.

Source: Spark's `OffsetSeqLog` and `CommitLog`; https://spark.apache.org/docs/latest/streaming/
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, remove_tree

_FIRST_SOURCE = 2
"""Number of the line of the first stream in an entry of the offset log."""
STATE_CODEC = "spark.sql.streaming.stateStore.compression.codec"
STATE_PARTITIONS = "spark.sql.shuffle.partitions"
_NO_OFFSET = "-"
"""The line of a stream that has no offset yet."""


@dataclass(frozen=True)
class PlannedBatch:
    """One entry of the offset log: a batch id, the watermark it runs under (epoch ms) and each source's end offset."""

    batch_id: int
    watermark_ms: int
    sources: tuple[Any, ...]

    @property
    def offsets(self) -> str:
        """The end offsets as JSON, for display; a source that has none yet is left out."""
        return ", ".join(json.dumps(source, separators=(",", ":")) for source in self.sources if source is not None)


class QueryLog:
    """The logs of the query whose checkpoint directory is `path`. Cheap to call often: positions are cached."""

    def __init__(self, path: WorkPath) -> None:
        self.path = path
        self._commits = path / "commits"
        self._offsets = path / "offsets"
        self._last_committed: int | None = None
        self._processed: int | None = None

    def processed(self, batch_id: int) -> None:
        """Note that the query has processed a batch, which Spark commits next."""
        self._processed = batch_id

    def last_committed(self) -> int:
        """The id of the newest committed batch, -1 if none.

        Batches commit in order, each after it was processed, so that only the next one is looked for, and only after that.
        """
        if self._last_committed is None:
            self._last_committed = _largest(self._commits)
        last = self._last_committed
        processed = last if self._processed is None else self._processed
        while last < processed and self.is_committed(last + 1):
            last += 1
        self._last_committed = last  # in one step: several threads ask
        return last

    @property
    def awaits_commit(self) -> bool:
        """Whether a batch was processed that Spark has not committed yet."""
        return self._processed is not None and self.last_committed() < self._processed

    def is_committed(self, batch_id: int) -> bool:
        return (self._commits / str(batch_id)).exists()

    def has_planned(self, batch_id: int) -> bool:
        return (self._offsets / str(batch_id)).exists()

    def planned(self, batch_id: int) -> PlannedBatch:
        """The offset log's entry for `batch_id`. Raises FileNotFoundError if there is none."""
        lines = (self._offsets / str(batch_id)).read_text(encoding="utf-8").split("\n")
        metadata = json.loads(lines[1])
        sources = tuple(None if line == _NO_OFFSET else json.loads(line) for line in lines[_FIRST_SOURCE:] if line)
        return PlannedBatch(batch_id, int(metadata["batchWatermarkMs"]), sources)

    def moved(self, batch_id: int) -> tuple[bool, ...]:
        """By stream of the query, whether a planned batch has rows of it. Raises FileNotFoundError as :meth:`planned` does."""
        now = self.planned(batch_id).sources
        before = self.planned(batch_id - 1).sources if batch_id > 0 else (None,) * len(now)
        return tuple(after != known for after, known in zip(now, before, strict=True))

    def become_another_query(self) -> None:
        """Give the query another id: Spark stops a query if another one starts under its id."""
        (self.path / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}), encoding="utf-8")
        (self.path / ".metadata.crc").unlink(missing_ok=True)

    def configuration(self, batch_id: int) -> Mapping[str, str]:
        """The settings of Spark that the query keeps, such as its number of state partitions, as of a batch."""
        lines = (self._offsets / str(batch_id)).read_text(encoding="utf-8").split("\n")
        return dict(json.loads(lines[1])["conf"])

    def set_state_partitions(self, count: int) -> None:
        """Give the query another number of state partitions, in which its state is already; the query is stopped.

        Args:
            count: The number, which Spark takes from the last batch and not from the session.
        """
        for entry in self._entries():
            lines = entry.read_text(encoding="utf-8").split("\n")
            metadata = json.loads(lines[1])
            metadata["conf"][STATE_PARTITIONS] = str(count)
            self._replace(entry, [lines[0], json.dumps(metadata), *lines[2:]])

    def next_watermark(self, batch_id: int) -> int:
        """The watermark (epoch ms) that the committed batch records for the next batch."""
        lines = (self._commits / str(batch_id)).read_text(encoding="utf-8").split("\n")
        return int(json.loads(lines[1]).get("nextBatchWatermarkMs", 0))

    def plan_batch(self, batch_id: int, watermark_ms: int) -> None:
        """Plan batch `batch_id` without new input under a given watermark; the query runs exactly this batch at its next start.

        The entry is that of the previous batch, with another watermark. A planned, uncommitted batch with this id is replaced:
        it has not run.
        """
        lines = (self._offsets / str(batch_id - 1)).read_text(encoding="utf-8").split("\n")
        lines[1] = json.dumps({**json.loads(lines[1]), "batchWatermarkMs": watermark_ms})
        # No query runs, and a crash leaves the directory to nothing: an attempt restores into a new one.
        (self._offsets / str(batch_id)).write_text("\n".join(lines), encoding="utf-8")
        (self._offsets / f".{batch_id}.crc").unlink(missing_ok=True)

    def plan_due_watermark(self, *, always: bool = False) -> None:
        """Before a restored query starts: plan a batch for its own watermark, if that has advanced.

        The committed batch may record a later watermark for the next batch than it ran under. Without new input no batch would
        run under it, so the windows that are due get an extra batch, which the query runs first.

        Args:
            always: Plan the batch also if the watermark has not advanced. Spark runs no batch for a watermark that advances
                later, nor for timers of processing time, before the query has run one since its start.
        """
        batch_id = self.last_committed()
        if batch_id < 0:
            return
        due, ran_under = self.next_watermark(batch_id), self.planned(batch_id).watermark_ms
        if always or due > ran_under:
            self.plan_batch(batch_id + 1, max(due, ran_under))

    def newest_planned(self) -> int:
        """The id of the newest batch that was planned, committed or not; -1 if there is none."""
        return _largest(self._offsets)

    def all_planned(self) -> tuple[int, ...]:
        """The ids of all batches of the offset log, sorted: Spark keeps some of those before the last one."""
        return _numbers(self._offsets)

    def all_committed(self) -> tuple[int, ...]:
        """The ids of all batches of the commit log, sorted."""
        return _numbers(self._commits)

    def versions(self, planned: int, committed: int) -> tuple[str, ...]:
        """The versions of the logs' entries, as written: "v1".

        Args:
            planned: A planned batch; -1 for none.
            committed: A committed batch; -1 for none.
        """
        entries = [log / str(number) for log, number in ((self._offsets, planned), (self._commits, committed)) if number >= 0]
        return tuple(entry.read_text(encoding="utf-8").partition("\n")[0] for entry in entries)

    def commit(self, batch_id: int) -> None:
        """Record that a planned batch was committed, whose rows are in the output and whose state is stored.

        The watermark of the next batch is that of this one: what Spark had measured is lost with the process that ran the batch.
        Spark itself goes on so, where a sink skips a batch that it holds.
        """
        watermark_ms = self.planned(batch_id).watermark_ms
        self._commits.mkdir(parents=True, exist_ok=True)
        text = f"v1\n{json.dumps({'nextBatchWatermarkMs': watermark_ms}, separators=(',', ':'))}"
        (self._commits / str(batch_id)).write_text(text, encoding="utf-8")

    def forget_source(self, position: int) -> None:
        """Forget how far the query has read one of its streams, which gets no rows any more; the query is stopped.

        Args:
            position: The position of the stream among the streams of the query, from 0.
        """
        self._replace_offset(position, _NO_OFFSET)
        remove_tree(self.path / "sources" / str(position))

    def begin_sources(self, count: int) -> None:
        """Make it another query, whose streams have not been read yet, and which runs the next batch; the query is stopped.

        Args:
            count: The number of these streams.
        """
        self.become_another_query()
        for entry in self._entries():
            lines = entry.read_text(encoding="utf-8").split("\n")
            self._replace(entry, [*lines[:_FIRST_SOURCE], *[_NO_OFFSET] * count])

    def keep_streams(self, positions: Sequence[int]) -> None:
        """Make it another query, which reads only some of the streams, from the same offsets on; the query is stopped.

        Args:
            positions: The positions of these streams among those of the query, in order.
        """
        self.become_another_query()
        for entry in self._entries():
            lines = entry.read_text(encoding="utf-8").split("\n")
            self._replace(entry, [*lines[:_FIRST_SOURCE], *(lines[_FIRST_SOURCE + position] for position in positions)])

    def move_source(self, position: int, offset: str) -> None:
        """Record that all batches have read one of the streams up to another offset; the query is stopped.

        All, because Spark asks a source at its start for the rows between the last two batches.

        Args:
            position: The position of the stream among the streams of the query, from 0.
            offset: The offset as JSON.
        """
        self._replace_offset(position, offset)

    def _replace_offset(self, position: int, text: str) -> None:
        for entry in self._entries():
            lines = entry.read_text(encoding="utf-8").split("\n")
            lines[_FIRST_SOURCE + position] = text
            self._replace(entry, lines)

    def _entries(self) -> list[WorkPath]:
        return [entry for entry in entries_of(self._offsets) if entry.name.isdigit()]

    def _replace(self, entry: WorkPath, lines: Sequence[str]) -> None:
        entry.write_text("\n".join(lines), encoding="utf-8")
        (self._offsets / f".{entry.name}.crc").unlink(missing_ok=True)

    def holds_state(self) -> bool:
        """Whether the query's checkpoint directory holds operator state; known also before the first batch of an attempt."""
        return bool(entries_of(self.path / "state"))

    def forget_planned_after(self, batch_id: int) -> None:
        """Remove the entries of batches later than `batch_id`, which were planned but never committed."""
        for entry in entries_of(self._offsets):
            if entry.name.isdigit() and int(entry.name) > batch_id:
                entry.unlink()
                (self._offsets / f".{entry.name}.crc").unlink(missing_ok=True)


def channel_positions(batch: PlannedBatch) -> Mapping[str, int]:
    """The end positions of all channels in a batch, from the offsets of its channel sources.

    A stage that uses an input twice has two sources with one gate, which may have read it at different times: a channel is
    consumed only up to the position that both have read.
    """
    positions: dict[str, int] = {}
    for source in batch.sources:
        if isinstance(source, dict) and "attempt" not in source and "logOffset" not in source:
            for channel, position in source.items():
                if "->" in channel:
                    positions[channel] = min(position, positions.get(channel, position))
    return positions


def _numbers(folder: WorkPath) -> tuple[int, ...]:
    return tuple(sorted(int(entry.name) for entry in entries_of(folder) if entry.name.isdigit()))


def _largest(folder: WorkPath) -> int:
    return max(_numbers(folder), default=-1)
