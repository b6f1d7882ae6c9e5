"""Channels between tasks: an ordered log of elements per channel.

A channel leads from one instance of a stage to one instance of a stage downstream. Its elements are segments (Parquet
files that hold records), watermarks, barriers and the marks of its end; `position` counts them from the first one of the
job, so a restored channel continues the count of the checkpoint. The log is in the driver's memory; the segments' files are in
the work directory.
It must not know Spark queries, nor the protocol's decisions.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from dagster_checkpoints.execution.elements import Mark
from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.spark.files.work_path import WorkPath, remove_if_empty, remove_tree, size_of


@dataclass(frozen=True)
class SegmentFolder:
    """The directory of one segment.

    A run of months has millions of micro-batches: if a directory stayed of each, they would fill the file system.

    Attributes:
        path: The directory.
        parent: The directory around those of several segments that were written together; None without.
    """

    path: WorkPath
    parent: WorkPath | None = None

    def remove(self) -> None:
        """Remove the directory, and its parent if it was the last one there; what cannot be removed stays."""
        remove_tree(self.path)
        if self.parent is not None:
            remove_if_empty(self.parent)


class SegmentFiles:
    """Parquet files of one segment, shared by all channels that carry it; deleted when the last holder releases it.

    Args:
        files: The files.
        rows: The number of rows in them.
        sizes: The size of each file in bytes.
        folder: The directory that holds nothing but these files, and what Spark has written beside them: it is deleted as well;
            None if it holds other files.

    Attributes:
        size: The size of all files in bytes.
    """

    def __init__(
        self, files: tuple[WorkPath, ...], rows: int, sizes: tuple[int, ...], folder: SegmentFolder | None = None
    ) -> None:
        self.files = files
        self.rows = rows
        self.sizes = sizes
        self.size = sum(sizes)
        self._folder = folder
        self._holders = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if not last:
            return
        if self._folder is not None:
            self._folder.remove()
            return
        for file in self.files:
            with suppress(OSError):  # what stays is removed with the attempt's directory
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
        base: The position of the first element.
        on_append: Called after each append; None if the consumer reads without it.
    """

    id: ChannelId
    base: int = 0
    on_append: Callable[[], None] | None = None
    _elements: deque[LoggedElement] = field(default_factory=deque)
    _first: int = field(init=False)
    _behind_released: int = field(init=False)  # the position behind the last records that were released
    _queued: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._first = self._behind_released = self.base

    def append(self, element: LoggedElement) -> None:
        """Append one element, then call `on_append`."""
        if isinstance(element, Records):
            element.segment.hold()
        with self._changed:
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

    def behind_records(self, position: int) -> int:
        """The position behind the last records in front of `position`; `base` if there are none."""
        with self._changed:
            while position > self._first:
                if isinstance(self._elements[position - 1 - self._first], Records):
                    return position
                position -= 1
            return self._behind_released

    def behind_marks(self, position: int, limit: int) -> int:
        """The position of the first records from `position` on, and at most `limit`: what is in front of it needs no reading."""
        with self._changed:
            position = max(position, self._first)
            while position < limit and not isinstance(self._elements[position - self._first], Records):
                position += 1
            return position

    def files(self, first: int, last: int) -> list[WorkPath]:
        """The Parquet files of the records from position `first` up to, not including, position `last`."""
        with self._changed:
            elements = [self._elements[i - self._first] for i in range(max(first, self._first), last)]
        return [file for element in elements if isinstance(element, Records) for file in element.segment.files]

    def release_before(self, position: int) -> None:
        """Remove the elements before `position`, which the consumer has read, and release their files."""
        released: list[SegmentFiles] = []
        with self._changed:
            while self._first < position and self._elements:
                element = self._elements.popleft()
                self._first += 1
                if isinstance(element, Records):
                    self._queued -= element.segment.size
                    self._behind_released = self._first
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


def segment_of(files: Iterable[WorkPath], rows: int, folder: SegmentFolder | None = None) -> SegmentFiles:
    paths = tuple(files)
    return SegmentFiles(paths, rows, tuple(size_of(file) for file in paths), folder)
