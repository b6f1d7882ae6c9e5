"""The contents of a checkpoint per stage and instance, as numbers for display."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.state.metadata import (
    CheckpointMetadata,
    QuerySnapshot,
    Segment,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    task_files,
)
from dagster_checkpoints.state.row_counts import rows_in_snapshot, rows_of_stage
from dagster_checkpoints.storage.locating import StoredCheckpoint

InstanceState = Literal["running", "at end of data", "finished"]


@dataclass(frozen=True)
class Amount:
    """Number and bytes of distinct files."""

    bytes: int
    files: int


@dataclass(frozen=True)
class InstanceContent:
    """One instance of a stage in a checkpoint.

    Attributes:
        state: state of the instance when the checkpoint was taken.
        rows: number of rows emitted so far; None if it is not known.
        shared_with: first stage of the chain that has not finished, whose query holds this stage's state; "" if this is that
            stage.
        total, query, in_flight, tables, transactions: state files: all of them; of the Spark query's state; of records on their
            way to the instance; of its static inputs; of rows that its sink has not committed yet.
        transactions_pending: number of transactions that its sink has not committed yet.
        watermark_ms: output watermark, milliseconds since 1970.
        offsets: how far its input has been read: positions of its channels, or the offsets of the source's Spark query.
    """

    name: str
    index: int
    state: InstanceState
    rows: int | None = None
    shared_with: str = ""
    total: Amount = Amount(0, 0)
    query: Amount = Amount(0, 0)
    in_flight: Amount = Amount(0, 0)
    tables: Amount = Amount(0, 0)
    transactions: Amount = Amount(0, 0)
    transactions_pending: int = 0
    watermark_ms: int | None = None
    offsets: str = ""


@dataclass(frozen=True)
class StageContent:
    """One stage in a checkpoint; its numbers of emitted and of late rows include those of finished instances."""

    name: str
    finished: bool
    rows: int | None
    instances: tuple[InstanceContent, ...]
    late_rows: int = 0


def contents(metadata: CheckpointMetadata, offsets: dict[tuple[str, int], str]) -> tuple[StageContent, ...]:
    """The content of every stage, in topological order.

    Args:
        metadata: metadata of the checkpoint.
        offsets: offsets by chain and index, see :func:`source_offsets`.
    """
    chain_of = {stage: chain for chain in metadata.chains for stage in chain.stages}
    stages = []
    for stage in metadata.stages:
        chain = chain_of.get(stage.name)
        instances = []
        for index, name in enumerate(stage.instances):
            task = chain.tasks.get(index) if chain else None
            if chain is None or task is None or index in stage.finished or stage.fully_finished:
                instances.append(InstanceContent(name, index, "finished" if _finished(stage, index) else "running"))
            else:
                read = offsets.get((chain.name, index), "")
                instances.append(_instance(name, index, stage.name, chain.stages, task, read))
        stages.append(
            StageContent(stage.name, stage.fully_finished, rows_of_stage(metadata, stage), tuple(instances), stage.late_rows)
        )
    return tuple(stages)


def source_offsets(stored: StoredCheckpoint, metadata: CheckpointMetadata) -> dict[tuple[str, int], str]:
    """The offsets up to which the sources have read, by chain and index. Fetches one small file for each source.

    Files that cannot be read are left out: `verify` checks whether the checkpoint is complete.
    """
    queries: dict[tuple[str, int], tuple[QuerySnapshot, StateFile]] = {}
    for chain in metadata.chains:
        for index, task in chain.tasks.items():
            file = _offsets_file(task.query) if task.query and not task.channels else None
            if task.query is not None and file is not None:
                queries[chain.name, index] = (task.query, file)
    read = {}
    with tempfile.TemporaryDirectory(prefix="offsets-") as folder:
        for number, (key, (query, file)) in enumerate(queries.items()):
            try:
                stored.fetch([msgspec.structs.replace(file, path=f"{number}/{file.path}")], Path(folder))
                read[key] = QueryLog(Path(folder, str(number))).planned(query.batch_id).offsets
            except (StorageError, StateError, OSError, ValueError, LookupError):
                continue
    return read


def _finished(stage: StageMetadata, index: int) -> bool:
    return stage.fully_finished or index in stage.finished


def _instance(name: str, index: int, stage: str, chain: tuple[str, ...], task: TaskSnapshot, offsets: str) -> InstanceContent:
    state: InstanceState = "at end of data" if task.end_of_data != "none" else "running"
    own = task.stages.get(stage)
    rows = rows_in_snapshot(task, stage) if own is not None else None
    pending = len(own.transactions) if own is not None else 0
    transactions = _amount(f for files in own.transaction_files.values() for f in files) if own is not None else Amount(0, 0)
    watermark = task.watermark if stage == chain[-1] else None
    holder = next(name for name in chain if name not in task.ended_sources)
    if stage != holder:
        return InstanceContent(
            name,
            index,
            state,
            rows,
            holder,
            transactions_pending=pending,
            transactions=transactions,
            watermark_ms=watermark,
        )
    in_flight = (f for c in task.channels for e in c.in_flight if isinstance(e, Segment) for f in e.files)
    positions = ", ".join(f"{c.channel.partition('->')[0]}: {c.position}" for c in task.channels)
    return InstanceContent(
        name,
        index,
        state,
        rows,
        total=_amount(task_files(task)),
        query=_amount(task.query.files if task.query else ()),
        in_flight=_amount(in_flight),
        tables=_amount(f for table in task.static for segment in table.segments for f in segment.files),
        transactions=transactions,
        transactions_pending=pending,
        watermark_ms=watermark,
        offsets=positions or offsets,
    )


def _amount(files: Iterable[StateFile]) -> Amount:
    sizes = {file.sha256: file.size for file in files}
    return Amount(sum(sizes.values()), len(sizes))


def _offsets_file(query: QuerySnapshot) -> StateFile | None:
    return next((file for file in query.files if file.path == f"offsets/{query.batch_id}"), None)
