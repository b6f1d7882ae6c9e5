"""`show`: a checkpoint or savepoint by stage and instance, or the running pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.contents import InstanceContent, StageContent, contents, source_offsets
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
from dagster_checkpoints.execution.pipeline_state import PipelineState
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.locating import StoredCheckpoint
from dagster_checkpoints.storage.verification import file_sizes

if TYPE_CHECKING:
    from rich.console import RenderableType


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
