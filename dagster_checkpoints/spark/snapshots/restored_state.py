"""The state that an attempt takes from the checkpoint or savepoint that it starts from: files, operator states, counts of rows.

It must not know the plans that use the state, nor tasks, nor how the checkpoint was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dagster_checkpoints.pipeline import Chain, Pipeline, TaskId
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.channels.channel_wiring import restored_segment
from dagster_checkpoints.spark.files.server_copies import is_large_enough, server_copy_target
from dagster_checkpoints.spark.files.work_path import WorkFolder, WorkPath, place
from dagster_checkpoints.spark.query.query_log import STATE_CODEC, QueryLog
from dagster_checkpoints.spark.query.routed_keys import RoutedKey
from dagster_checkpoints.spark.snapshots.moved_partitions import MovedPartitions, are_moved_whole, moved_partitions
from dagster_checkpoints.spark.snapshots.moved_state import MovedState, StateMove
from dagster_checkpoints.spark.snapshots.query_files import is_state_of_version
from dagster_checkpoints.spark.snapshots.query_snapshots import relocate, write_empty_versions
from dagster_checkpoints.spark.snapshots.rewritten_state import StateOfBatch
from dagster_checkpoints.state.divided_chains import QueryOfStreams
from dagster_checkpoints.state.fitted_checkpoint import KeyedStateShare
from dagster_checkpoints.state.metadata import (
    CheckpointMetadata,
    OperatorState,
    QuerySnapshot,
    StageInstanceSnapshot,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_instances import redistribute_operator_states
from dagster_checkpoints.state.restore import RestorePlan
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.savepoints import SavepointDirectory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Restored:
    """The checkpoint or savepoint that an attempt starts from.

    Attributes:
        plan: The parts of the pipeline that start from it.
        location: The location of the checkpoint or savepoint.
        savepoint: The directory that holds the files; None for a checkpoint, whose files are in `shared/`.
    """

    plan: RestorePlan
    location: str
    savepoint: SavepointDirectory | None = None

    @property
    def metadata(self) -> CheckpointMetadata:
        """The checkpoint, as if the pipeline that is started had taken it."""
        return self.plan.metadata


class RestoredState:
    """The state that one attempt starts with; each method fetches only the files that it returns.

    Args:
        pipeline: The pipeline that is started; its parallelism may differ from the checkpoint's.
        storage: The storage of the checkpoint's files; None if plans are only checked.
        restored: The checkpoint that the attempt starts from; None for a new start.
        state_partitions: The number of state partitions that each instance gets, unless its stage has a number of its own
            (`state_partitions`); None if it keeps that of the checkpoint.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        storage: CheckpointStorage | None,
        restored: Restored | None,
        state_partitions: int | None = None,
    ) -> None:
        self._state_partitions = state_partitions
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

    def _copy(self, files: Sequence[StateFile], folder: WorkPath) -> set[StateFile]:
        """Let the server copy the large files into the work directory, where it can. Returns those that it has copied."""
        target, large = server_copy_target(folder), [file for file in files if is_large_enough(file.size)]
        if target is None or not large or self._restored is None:
            return set()
        if self._restored.savepoint is not None:
            left = self._restored.savepoint.copy_state(large, target)
        else:
            assert self._storage is not None
            left = self._storage.copy_state(large, target, checkpoint=self._restored.location)
        return set(large) - set(left)

    def fetch_query(
        self,
        query: QuerySnapshot,
        folder: WorkFolder,
        forgotten: Sequence[int] = (),
        streams: int = 0,
        partitions: int | None = None,
    ) -> None:
        """Fetch the files of a task's query into the query's checkpoint directory.

        Args:
            query: The query.
            folder: The task's directory.
            forgotten: The positions of the streams whose offsets it forgets, see `restored_plans.forgotten_sources`.
            streams: The number of streams of its plan.
            partitions: The number of its state partitions, if it has changed; None for that of its log.
        """
        files = query.files
        target = folder / "checkpoint"
        copied = self._copy([file for file in files if is_state_of_version(file.path)], target.work)
        self.fetch([file for file in files if file not in copied], target.scratch)
        log = QueryLog(target.scratch)
        if isinstance(query, QueryOfStreams):
            log.keep_streams(query.streams)
        for position in forgotten:
            log.forget_source(position)
        if query.sources == ():
            log.begin_sources(streams)
        if partitions is not None:
            log.set_state_partitions(partitions)
        relocate(target.scratch, target.work, partitions)
        place(target.scratch, target.work)

    def share(self, task: TaskId) -> KeyedStateShare | None:
        """The keyed state that a task gets from other instances; None if it continues its own."""
        return self._restored.plan.shares.get(task) if self._restored is not None else None

    def whole_partitions(self, chain: Chain) -> list[MovedPartitions | None] | None:
        """By instance of a chain, its query if it gets whole state partitions; None for an instance that begins without state.

        Returns:
            None if the state of the chain is not moved by whole partitions.

        Raises:
            InstancesChanged: The state is not in RocksDB.
        """
        shares = [self.share(TaskId(chain.name, index)) for index in range(len(chain.instances))]
        if not any(share is not None and share.whole_partitions for share in shares):
            return None
        where = self.where(chain)
        moved = [
            None if share is None else moved_partitions(share, self._continued(TaskId(chain.name, index)), where)
            for index, share in enumerate(shares)
        ]
        return moved if are_moved_whole([each for each in moved if each is not None]) else None

    def fetch_partitions(self, spark: SparkSession, moved: MovedPartitions, folder: WorkFolder, streams: int) -> None:
        """Fetch the state partitions of an instance, and the logs and descriptions of the query that it continues.

        Args:
            spark: The session, which writes the versions without a change.
            moved: The instance's query.
            folder: The task's directory.
            streams: See :meth:`fetch_query`.
        """
        target = folder / "checkpoint"
        self.fetch_query(moved.query, folder, streams=streams, partitions=moved.partitions)
        QueryLog(target.work).become_another_query()
        if moved.empty_versions:
            codec = QueryLog(target.work).configuration(moved.query.batch_id)[STATE_CODEC]
            write_empty_versions(spark, [target.scratch / path for path in moved.empty_versions], codec)
            place(target.scratch, target.work)

    def fetch_move(self, chain: Chain, key: RoutedKey, attempt: WorkFolder, streams: int) -> StateMove:
        """Fetch what the instances of a chain need whose keyed state moves; see :func:`moved_state.move_state`.

        Args:
            chain: The chain.
            key: The column by which rows are routed.
            attempt: The attempt's directory, for copies of the old instances' directories.
            streams: See :meth:`fetch_query`.
        """
        tasks = [TaskId(chain.name, index) for index in range(len(chain.instances))]
        sharing = [(task, share) for task in tasks if (share := self.share(task)) is not None]  # the others begin without state
        shares = [share for _, share in sharing]
        partitions = len(shares[0].groups) if shares[0].whole_partitions else self._state_partitions
        query = self._continued(sharing[0][0])
        folder = attempt / "rescaled" / chain.name
        self._fetch_logs(query, folder / "moved", partitions, streams)
        held = {old: query for share in shares for old, query in share.queries.items()}
        for old, of_old in held.items():
            self.fetch_query(of_old, folder / str(old), streams=streams)
        return StateMove(
            where=self.where(chain),
            shares=shares,
            instances=len(tasks),
            key=key,
            old={old: _state_in(folder / str(old), of_old) for old, of_old in held.items()},
            target=_state_in(folder / "moved", query),
        )

    def place_moved(self, task: TaskId, moved: MovedState, folder: WorkFolder, streams: int) -> QuerySnapshot:
        """Make the checkpoint directory of an instance from the query that it continues and the state that it gets.

        Returns that query.

        Args:
            task: The instance.
            moved: The state of all instances of its chain.
            folder: The task's directory.
            streams: See :meth:`fetch_query`.
        """
        query = self._continued(task)
        self._fetch_logs(query, folder, moved.partitions, streams)
        moved.take(task.index, (folder / "checkpoint").work)
        return query

    def _fetch_logs(self, query: QuerySnapshot, folder: WorkFolder, partitions: int | None, streams: int) -> None:
        """Fetch the logs and descriptions of a query, without its state, as those of another query."""
        self.fetch_query(_without_state(query), folder, streams=streams, partitions=partitions)
        QueryLog((folder / "checkpoint").work).become_another_query()

    def fetch_repartition(
        self, chain: Chain, query: QuerySnapshot, before: WorkFolder, folder: WorkFolder, forgotten: Sequence[int], streams: int
    ) -> tuple[StateOfBatch, StateOfBatch] | None:
        """If a query is to get another number of state partitions: fetch its state as it is, and its logs for the new number.

        Args:
            chain: Its chain.
            query: The query.
            before: A new directory, for the state as it is.
            folder: The task's directory, which gets the logs.
            forgotten: See :meth:`fetch_query`.
            streams: See :meth:`fetch_query`.

        Returns:
            The state as it is, and the one that is to be written; None if the number stays.
        """
        number = self._state_partitions
        has_own = any(self._pipeline.stage(name).state_partitions for name in chain.stages)
        if number is None or has_own or not any(is_state_of_version(file.path) for file in query.files):
            return None
        settings = [file for file in query.files if file.path == f"offsets/{query.batch_id}"]
        self.fetch(settings, before.scratch / "settings")
        if StateOfBatch(before.scratch / "settings", query.batch_id).partitions == number:
            return None
        self.fetch_query(query, before)
        self.fetch_query(_without_state(query), folder, forgotten, streams, number)
        return _state_in(before, query), _state_in(folder, query)

    def where(self, chain: Chain) -> str:
        """The stage and the checkpoint, for the text of errors."""
        return f"Stage {chain.name!r}, {self._restored.location if self._restored is not None else 'no checkpoint'}"

    def _continued(self, task: TaskId) -> QuerySnapshot:
        """The old query that an instance with moved state continues."""
        assert self._restored is not None
        query = self._restored.plan.tasks[task].query
        assert query is not None
        return query

    def fetch_segments(self, files: Sequence[StateFile], folder: WorkFolder) -> WorkPath:
        """Fetch the files of segments below a task's directory. Returns the directory that holds them."""
        target = folder / "restored"
        copied = self._copy(files, target.work)
        self.fetch([file for file in files if file not in copied], target.scratch)
        place(target.scratch, target.work)
        return target.work

    def transactions(self, chain: Chain, snapshot: TaskSnapshot | None, folder: WorkFolder) -> dict[int, dict[str, Path]]:
        """The fetched files of a savepoint's transactions, which may have been aborted since."""
        return self.transaction_files(snapshot.stages.get(chain.stages[-1]) if snapshot else None, folder)

    def transaction_files(self, tail: StageInstanceSnapshot | None, folder: WorkFolder) -> dict[int, dict[str, Path]]:
        """The same for one instance of a stage."""
        root = folder.scratch / "transactions"
        restored = {}
        for position, files in tail.transaction_files.items() if tail else ():
            self.fetch(files, root)
            restored[position] = {Path(file.path).name: root / file.path for file in files}
        return restored

    def tables(self, snapshot: TaskSnapshot | None, folder: WorkFolder) -> dict[str, list[SegmentFiles]]:
        """The segments of a task's static inputs that were collected before the checkpoint, by input."""
        tables: dict[str, list[SegmentFiles]] = {}
        for table in snapshot.static if snapshot else ():
            root = self.fetch_segments([f for segment in table.segments for f in segment.files], folder)
            tables[table.input] = [restored_segment(segment, root) for segment in table.segments]
        return tables


def _state_in(folder: WorkFolder, query: QuerySnapshot) -> StateOfBatch:
    return StateOfBatch((folder / "checkpoint").work, query.batch_id)


def _without_state(query: QuerySnapshot) -> QuerySnapshot:
    return msgspec.structs.replace(query, files=tuple(file for file in query.files if not is_state_of_version(file.path)))


def late_rows_of_finished(metadata: CheckpointMetadata) -> dict[str, int]:
    """The number of late rows that the finished tasks of each stage had dropped."""
    rows = {stage.name: stage.late_rows for stage in metadata.stages}
    for chain in metadata.chains:
        for task in chain.tasks.values():
            for name, stage in task.stages.items():
                rows[name] -= stage.late_rows
    return rows
