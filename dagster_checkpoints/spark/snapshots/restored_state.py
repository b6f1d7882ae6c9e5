"""The state that an attempt takes from the checkpoint or savepoint that it starts from: files, operator states, counts of rows.

It must not know the plans that use the state, nor tasks, nor how the checkpoint was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagster_checkpoints.pipeline import Chain, Pipeline
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.channels.channel_wiring import restored_segment
from dagster_checkpoints.state import (
    CheckpointMetadata,
    OperatorState,
    RestorePlan,
    StateFile,
    TaskSnapshot,
    redistribute_operator_states,
)
from dagster_checkpoints.storage import CheckpointStorage, SavepointDirectory


@dataclass(frozen=True)
class Restored:
    """The checkpoint or savepoint that an attempt starts from.

    Attributes:
        metadata: The decoded metadata.
        plan: The parts of the pipeline that start from it.
        location: The location of the checkpoint or savepoint.
        savepoint: The directory that holds the files; None for a checkpoint, whose files are in `shared/`.
    """

    metadata: CheckpointMetadata
    plan: RestorePlan
    location: str
    savepoint: SavepointDirectory | None = None


class RestoredState:
    """The state that one attempt starts with; each method fetches only the files that it returns.

    Args:
        pipeline: The pipeline that is started; its parallelism may differ from the checkpoint's.
        storage: The storage of the checkpoint's files; None if plans are only checked.
        restored: The checkpoint that the attempt starts from; None for a new start.
    """

    def __init__(self, pipeline: Pipeline, storage: CheckpointStorage | None, restored: Restored | None) -> None:
        self._pipeline = pipeline
        self._storage = storage
        self._restored = restored
        self._redistributed: dict[str, tuple[tuple[OperatorState, ...], ...]] = {}

    def operator_states(self, name: str, index: int) -> tuple[OperatorState, ...]:
        """The part of a stage's operator states that one of its instances starts with."""
        if self._restored is None or name in self._restored.plan.new_stages:
            return ()
        if name not in self._redistributed:
            parallelism = self._pipeline.stage(name).parallelism
            self._redistributed[name] = redistribute_operator_states(self._restored.metadata, name, parallelism)
        return self._redistributed[name][index]

    def fetch(self, files: Sequence[StateFile], target: Path) -> None:
        """Fetch files of the checkpoint or savepoint into a directory.

        Raises:
            StorageError: The files cannot be fetched, or are corrupt.
        """
        savepoint = self._restored.savepoint if self._restored else None
        if savepoint is not None:
            savepoint.fetch_state(files, target)
        elif files:
            assert self._storage is not None
            self._storage.fetch_state(files, target, checkpoint=self._restored.location if self._restored else "")

    def fetch_segments(self, files: Sequence[StateFile], folder: Path) -> Path:
        """Fetch the files of segments below a task's directory. Returns the directory that holds them."""
        target = folder / "restored"
        self.fetch(files, target)
        return target

    def transactions(self, chain: Chain, snapshot: TaskSnapshot | None, folder: Path) -> dict[int, dict[str, Path]]:
        """The fetched files of a savepoint's transactions, which may have been aborted since."""
        tail = snapshot.stages.get(chain.stages[-1]) if snapshot else None
        root = folder / "transactions"
        restored = {}
        for position, files in tail.transaction_files.items() if tail else ():
            self.fetch(files, root)
            restored[position] = {Path(file.path).name: root / file.path for file in files}
        return restored

    def tables(self, snapshot: TaskSnapshot | None, folder: Path) -> dict[str, list[SegmentFiles]]:
        """The segments of a task's static inputs that were collected before the checkpoint, by input."""
        tables: dict[str, list[SegmentFiles]] = {}
        for table in snapshot.static if snapshot else ():
            root = self.fetch_segments([f for segment in table.segments for f in segment.files], folder)
            tables[table.input] = [restored_segment(segment, root) for segment in table.segments]
        return tables


def rows_of_finished(metadata: CheckpointMetadata) -> dict[str, int]:
    """The number of rows that the finished tasks of each finished stage had emitted."""
    rows = {stage.name: stage.rows for stage in metadata.stages if stage.finished}
    for chain in metadata.chains:
        tail = chain.stages[-1]
        if tail in rows:
            rows[tail] -= sum(task.stages[tail].rows_out for task in chain.tasks.values())
    return rows


def late_rows_of_finished(metadata: CheckpointMetadata) -> dict[str, int]:
    """The number of late rows that the finished tasks of each stage had dropped."""
    rows = {stage.name: stage.late_rows for stage in metadata.stages}
    for chain in metadata.chains:
        for task in chain.tasks.values():
            for name, stage in task.stages.items():
                rows[name] -= stage.late_rows
    return rows
