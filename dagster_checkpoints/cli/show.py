"""`show`: a checkpoint or savepoint by stage and instance, or the running pipeline.

Of a checkpoint's contents the numbers are shown, per stage and instance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from dagster_checkpoints.cli.locate import LOCATION_HELP, located
from dagster_checkpoints.cli.output import (
    NOTHING,
    bytes_in_words,
    count_of,
    facts,
    moment_in_words,
    row,
    seconds_in_words,
    table,
    watermark_in_words,
    write,
    write_json,
)
from dagster_checkpoints.cli.status_view import next_start, status_as_json, status_as_text
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options
from dagster_checkpoints.control.status import read_status
from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.pipeline_state import PipelineState
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
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.locating import StoredCheckpoint
from dagster_checkpoints.storage.verification import file_sizes

if TYPE_CHECKING:
    from rich.console import RenderableType


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


@click.command(epilog=LOCATION_HELP)
@click.argument("location", required=False)
@click.option("--offsets/--no-offsets", default=True, help="Show how far the input was read: one small file per source is read.")
@storage_options
def show(options: StorageOptions, location: str | None, offsets: bool) -> None:
    """A checkpoint or savepoint in detail; without LOCATION, the progress of the running pipeline, or how it ended.

    For each stage and instance: whether it runs or has finished, rows, bytes of state, watermark, and how far its input was read.
    """
    if location is None:
        with options.open() as storage:
            _show_pipeline(options, storage)
        return
    with located(options, location) as stored:
        metadata = stored.read()
        stages = contents(metadata, source_offsets(stored, metadata) if offsets else {})
        state = stored.storage.read_state()
        if options.as_json:
            write_json(_as_json(stored, metadata, stages, state))
        else:
            write(*_as_text(stored, metadata, stages, state, offsets))


def _show_pipeline(options: StorageOptions, storage: CheckpointStorage) -> None:
    state, status = options.state(storage), read_status(storage)
    if options.as_json:
        write_json(status_as_json(state, status))
    else:
        write(*status_as_text(state, status))


def _as_json(
    stored: StoredCheckpoint, metadata: CheckpointMetadata, stages: tuple[StageContent, ...], state: PipelineState | None
) -> dict[str, Any]:
    sizes = file_sizes(metadata)
    return {
        "id": metadata.checkpoint_id,
        "kind": metadata.kind,
        "location": stored.location,
        "url": stored.url,
        "pipeline": metadata.pipeline,
        "job_id": metadata.job_id,
        "run_id": metadata.run_id,
        "epoch": metadata.epoch,
        "triggered_at": metadata.triggered_at,
        "completed_at": metadata.completed_at,
        "bytes": sum(sizes.values()),
        "files": len(sizes),
        "spark_version": metadata.spark_version,
        "format_version": metadata.version,
        "next_start": next_start(state) == stored.location,
        "statistics": metadata.statistics,
        "chains": [chain.stages for chain in metadata.chains],
        "stages": stages,
    }


def _as_text(
    stored: StoredCheckpoint,
    metadata: CheckpointMetadata,
    stages: tuple[StageContent, ...],
    state: PipelineState | None,
    offsets: bool,
) -> list[RenderableType]:
    from rich.text import Text

    sizes = file_sizes(metadata)
    new = metadata.statistics.get("new_bytes")
    fields = facts(
        ("location", stored.location),
        ("url", stored.url if stored.url != stored.location else ""),
        ("pipeline", metadata.pipeline),
        ("job", f"{metadata.job_id}, run {metadata.run_id}" if metadata.run_id else metadata.job_id),
        (
            "completed",
            f"{moment_in_words(metadata.completed_at)} UTC, "
            f"{seconds_in_words(metadata.completed_at - metadata.triggered_at)} after its trigger",
        ),
        (
            "size",
            f"{bytes_in_words(sum(sizes.values()))} in {count_of(len(sizes), 'file')}"
            + (f", {bytes_in_words(new)} of it new" if new is not None else ""),
        ),
        ("written by", f"Spark {metadata.spark_version or 'of an unknown version'}, format {metadata.version}"),
        ("late rows", ", ".join(f"{stage.name} {stage.late_rows:,}" for stage in stages if stage.late_rows)),
        ("to commit", _to_commit(stages)),
        ("next run", "begins from this one by default" if next_start(state) == stored.location else ""),
    )
    title = Text(f"{metadata.kind.capitalize()} {metadata.checkpoint_id} of {metadata.pipeline}", style="bold")
    return [title, fields, Text(""), _stages(stages, offsets)]


def _to_commit(stages: tuple[StageContent, ...]) -> str:
    pending = ((f"{stage.name}[{each.name}]", each.transactions_pending) for stage in stages for each in stage.instances)
    return ", ".join(f"{name}: {count_of(number, 'transaction')}" for name, number in pending if number)


def _stages(stages: tuple[StageContent, ...], offsets: bool) -> RenderableType:
    columns = ["stage", "instance", "state", "rows", "size", "watermark", *["read so far"] * offsets]
    stage_table = table(*columns, right=("rows", "size"), keep=("stage", "instance"))
    for stage in stages:
        if stage.finished:
            stage_table.add_row(*row(stage.name, _instances(stage), "finished", _rows(stage.rows), style="dim"))
            continue
        for number, instance in enumerate(stage.instances):
            cells = _cells(instance)[: len(columns) - 1]
            stage_table.add_row(*row("" if number else stage.name, *cells, style="dim" if instance.state == "finished" else ""))
    return stage_table


def _instances(stage: StageContent) -> str:
    return stage.instances[0].name if len(stage.instances) == 1 else f"all {len(stage.instances)}"


def _cells(instance: InstanceContent) -> list[str]:
    if instance.state == "finished":
        return [instance.name, "finished"]
    size = NOTHING if instance.shared_with else bytes_in_words(instance.total.bytes)
    read = f"in the query of {instance.shared_with}" if instance.shared_with else instance.offsets
    return [instance.name, instance.state, _rows(instance.rows), size, watermark_in_words(instance.watermark_ms), read]


def _rows(rows: int | None) -> str:
    return f"{rows:,}" if rows is not None else NOTHING
