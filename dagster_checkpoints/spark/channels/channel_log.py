"""Channels between tasks: an ordered log of elements per channel, and the gate that limits which records a query reads.

A channel leads from one instance of a stage to one instance of a stage downstream. Its elements are segments (Parquet
files that hold records), watermarks, barriers and the marks of its end; `position` counts them from the first one of the
job, so a restored channel continues the count of the checkpoint. Every element is a line of the log file, which the
streaming source in Spark's workers reads; the task itself reads the elements from memory.
It must not know Spark queries, nor the protocol's decisions.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dagster_checkpoints.execution.elements import (
    BarrierMark,
    CancelMark,
    EndOfData,
    EndOfPartition,
    Mark,
    WatermarkAt,
    WatermarkStatus,
)
from dagster_checkpoints.pipeline import ChannelId


class SegmentFiles:
    """Parquet files of one segment, shared by all channels that carry it; deleted when the last holder releases it.

    Args:
        files: The files.
        rows: The number of rows in them.
        size: Their size in bytes.
    """

    def __init__(self, files: tuple[Path, ...], rows: int, size: int) -> None:
        self.files = files
        self.rows = rows
        self.size = size
        self._holders = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            for file in self.files:
                file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Records:
    """A segment of records."""

    segment: SegmentFiles


LoggedElement = Records | Mark


@dataclass
class Channel:
    """The log of one channel. The producer's thread appends, the consumer's thread reads.

    Attributes:
        id: The channel's id.
        path: The log file.
        base: The position of the first element.
        on_append: Called after each append; None if the consumer reads without it.
    """

    id: ChannelId
    path: Path
    base: int = 0
    on_append: Callable[[], None] | None = None
    _elements: deque[LoggedElement] = field(default_factory=deque)
    _first: int = field(init=False)
    _queued: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._first = self.base
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self.path, "ab", buffering=0)  # noqa: SIM115 - held for the channel's life, see close()

    def append(self, element: LoggedElement) -> None:
        """Append one element to the log file, then call `on_append`."""
        if isinstance(element, Records):
            element.segment.hold()
        with self._changed:
            self._log.write(json.dumps(_line(element)).encode() + b"\n")
            self._elements.append(element)
            if isinstance(element, Records):
                self._queued += element.segment.size
        if self.on_append is not None:
            self.on_append()

    def elements_from(self, position: int) -> list[LoggedElement]:
        """The elements from `position` on."""
        with self._changed:
            start = position - self._first
            return [self._elements[i] for i in range(start, len(self._elements))]

    def release_before(self, position: int) -> None:
        """Remove the elements before `position`, which the consumer has read, and release their files."""
        released: list[SegmentFiles] = []
        with self._changed:
            while self._first < position and self._elements:
                element = self._elements.popleft()
                self._first += 1
                if isinstance(element, Records):
                    self._queued -= element.segment.size
                    released.append(element.segment)
            self._changed.notify_all()
        for segment in released:
            segment.release()

    def wait_below(self, limit: int, timeout: float) -> bool:
        """Back-pressure: wait until less than `limit` bytes are queued, at most `timeout` seconds. Returns whether this is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._queued < limit, timeout)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._log.close()


class Gate:
    """The positions up to which Spark may read a stage input's channels, and the watermark; one file, replaced atomically.

    Args:
        path: The file.
        positions: The first positions, by channel.
    """

    def __init__(self, path: Path, positions: Mapping[str, int]) -> None:
        self.path = path
        self.positions = dict(positions)
        self.watermark: int | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self.publish()

    def publish(self) -> None:
        scratch = self.path.with_suffix(".next")
        scratch.write_text(json.dumps({"positions": self.positions, "watermark": self.watermark}), encoding="utf-8")
        os.replace(scratch, self.path)


def _line(element: LoggedElement) -> dict[str, object]:
    match element:
        case Records(segment):
            return {"files": [str(file) for file in segment.files], "rows": segment.rows}
        case WatermarkAt(ms):
            return {"watermark": ms}
        case WatermarkStatus(idle):
            return {"idle": idle}
        case BarrierMark(barrier):
            return {"barrier": barrier.checkpoint_id}
        case CancelMark(checkpoint_id):
            return {"cancel": checkpoint_id}
        case EndOfData(drain):
            return {"end_of_data": {"drain": drain}}
        case EndOfPartition():
            return {"end_of_partition": True}
        case _:
            raise TypeError(f"{element!r} is not an element of a channel")


def segment_of(files: Iterable[Path], rows: int) -> SegmentFiles:
    paths = tuple(files)
    return SegmentFiles(paths, rows, sum(file.stat().st_size for file in paths))
