"""The asynchronous part of a snapshot: stores a pinned snapshot, then acknowledges it.

Runs on a thread pool while the tasks continue. It must not touch a task or its query.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, TaskStatistics
from dagster_checkpoints.coordination.events import Acknowledged, Declined
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.elements import EndOfData, EndOfPartition, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.task_events import PinnedChannel
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.spark.channels.channel_log import LoggedElement, Records, SegmentFiles
from dagster_checkpoints.spark.query.error_text import text_of_error
from dagster_checkpoints.spark.snapshots.pinned_queries import SharedPin, sources_of
from dagster_checkpoints.state.metadata import (
    ChannelElement,
    ChannelSnapshot,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StateFile,
    StaticTableSnapshot,
    TaskSnapshot,
    in_flight_files,
)
from dagster_checkpoints.storage.state_files import LocalSource, StateSource, StoredFile


@dataclass(frozen=True)
class PinnedSnapshot:
    """The snapshot that a task pinned: nothing in it changes any more, and its files stay until :meth:`release`.

    Attributes:
        task: The part that needs no upload.
        query: The pinned checkpoint directory, which it holds, and its description without files; None without a query.
        channels: The input channels, with their in-flight elements.
        static: The segments of each static input that is ready.
        transactions: For a savepoint, the files of the sink's uncommitted transactions, by position and name.
        folder: The directory of this machine that only this snapshot uses.
    """

    task: TaskSnapshot
    folder: Path
    query: tuple[SharedPin, QuerySnapshot] | None = None
    channels: tuple[PinnedChannel, ...] = ()
    static: Mapping[str, tuple[SegmentFiles, ...]] = field(default_factory=dict)
    transactions: Mapping[int, Mapping[str, Path]] = field(default_factory=dict)

    def segments(self) -> Iterable[SegmentFiles]:
        for channel in self.channels:
            yield from (element.segment for element in channel.in_flight if isinstance(element, Records))
        for segments in self.static.values():
            yield from segments

    def hold(self) -> None:
        for segment in self.segments():
            segment.hold()

    def with_captured(self, captured: Mapping[str, Sequence[LoggedElement]]) -> PinnedSnapshot:
        """The snapshot with more elements in flight, whose files stay as well.

        Args:
            captured: By channel, the elements behind those in the snapshot.
        """
        if not captured:
            return self
        for elements in captured.values():
            for element in elements:
                if isinstance(element, Records):
                    element.segment.hold()
        channels = tuple(
            replace(channel, in_flight=(*channel.in_flight, *captured.get(channel.snapshot.channel, ())))
            for channel in self.channels
        )
        return dataclasses.replace(self, channels=channels)

    def release(self, *, failed: bool = False) -> None:
        """Let the files go.

        Args:
            failed: Whether they could not be stored.
        """
        for segment in self.segments():
            segment.release()
        if self.query is not None:
            self.query[0].release(failed=failed)
        shutil.rmtree(self.folder, ignore_errors=True)


Upload = Callable[[CheckpointBarrier, Mapping[str, StateSource]], Mapping[str, StoredFile]]
"""Stores files for a checkpoint in the shared directory, or for a savepoint in its own directory."""


class SnapshotUploader:
    """Stores pinned snapshots and reports the outcome.

    Args:
        upload: Stores the files.
        pool: The threads that store, so that tasks continue at the same time.
        report: Receives `Acknowledged` or `Declined`.
    """

    def __init__(self, upload: Upload, pool: Executor, report: Callable[[Acknowledged | Declined], None]) -> None:
        self._store_files = upload
        self._pool = pool
        self._report = report

    def submit(self, task: TaskId, barrier: CheckpointBarrier, pinned: PinnedSnapshot, statistics: TaskStatistics) -> None:
        """Store a pinned snapshot in the background, and release it after that."""
        self._pool.submit(self._upload, task, barrier, pinned, statistics)

    def _upload(self, task: TaskId, barrier: CheckpointBarrier, pinned: PinnedSnapshot, statistics: TaskStatistics) -> None:
        started = time.monotonic()
        checkpoint_id = barrier.checkpoint_id
        is_stored = False
        try:
            snapshot, stored = self._store(barrier, pinned)
        except StorageError as error:
            self._report(Declined(task, checkpoint_id, FailureReason.IO_EXCEPTION, str(error)))
        except Exception as error:
            self._report(Declined(task, checkpoint_id, FailureReason.CHECKPOINT_ASYNC_EXCEPTION, text_of_error(error)))
        else:
            measured = replace(
                statistics,
                async_seconds=time.monotonic() - started,
                new_bytes=_bytes_of(file for file in stored if file.uploaded),
                total_bytes=_bytes_of(stored),
                in_flight_bytes=_bytes_of(in_flight_files(snapshot)),
            )
            is_stored = True
            self._report(Acknowledged(task, checkpoint_id, snapshot, measured))
        finally:
            pinned.release(failed=not is_stored)

    def _store(self, barrier: CheckpointBarrier, pinned: PinnedSnapshot) -> tuple[TaskSnapshot, Collection[StoredFile]]:
        query_files = pinned.query[0].files() if pinned.query is not None else {}
        sources = {f"query/{path}": source for path, source in query_files.items()}
        sources.update(sources_of(pinned.segments(), pinned.folder / "segments"))
        for position, named in pinned.transactions.items():
            sources.update({f"transactions/{position}/{name}": LocalSource(file) for name, file in named.items()})
        stored = self._store_files(barrier, sources)

        def state_file(name: str, path: str) -> StateFile:
            return StateFile(path, stored[name].sha256, stored[name].size, stored[name].stored_by)

        def segment_of(segment: SegmentFiles) -> Segment:
            # The name contains the hash of the bytes: the same segment restored twice is the same file.
            files = tuple(state_file(str(file), f"segments/{stored[str(file)].sha256}.parquet") for file in segment.files)
            return Segment(files=files, rows=segment.rows)

        query = None
        if pinned.query is not None:
            files = tuple(state_file(f"query/{path}", path) for path in query_files)
            query = msgspec.structs.replace(pinned.query[1], files=files)
        channels = tuple(
            _with_in_flight(channel.snapshot, _elements(channel.in_flight, segment_of)) for channel in pinned.channels
        )
        static = tuple(
            StaticTableSnapshot(input=name, segments=tuple(segment_of(segment) for segment in segments))
            for name, segments in pinned.static.items()
        )
        transaction_files = {
            position: tuple(state_file(f"transactions/{position}/{name}", f"{position}/{name}") for name in sorted(named))
            for position, named in pinned.transactions.items()
        }
        task = pinned.task
        stages = _with_transaction_files(task.stages, transaction_files)
        snapshot = msgspec.structs.replace(task, stages=stages, query=query, channels=channels, static=static)
        return snapshot, stored.values()


def _bytes_of(files: Iterable[StoredFile | StateFile]) -> int:
    """The size of the files, in bytes. Files with equal content count once: they are stored once."""
    return sum({file.sha256: file.size for file in files}.values())


def _with_transaction_files(
    stages: Mapping[str, StageInstanceSnapshot], files: Mapping[int, tuple[StateFile, ...]]
) -> dict[str, StageInstanceSnapshot]:
    """Add the files of transactions to the chain's last stage: only that stage has a sink."""
    snapshots = dict(stages)
    if files:
        tail = list(snapshots)[-1]
        snapshots[tail] = msgspec.structs.replace(snapshots[tail], transaction_files=dict(files))
    return snapshots


def _with_in_flight(channel: ChannelSnapshot, elements: Sequence[ChannelElement]) -> ChannelSnapshot:
    return msgspec.structs.replace(channel, in_flight=tuple(elements))


def _elements(elements: Iterable[LoggedElement], segment_of: Callable[[SegmentFiles], Segment]) -> list[ChannelElement]:
    """The elements as a checkpoint stores them. Barriers among them belong to earlier checkpoints, and are left out."""
    stored: list[ChannelElement] = []
    for element in elements:
        if isinstance(element, Records):
            stored.append(segment_of(element.segment))
        elif isinstance(element, WatermarkAt | WatermarkStatus | EndOfData | EndOfPartition):
            stored.append(element)
    return stored
