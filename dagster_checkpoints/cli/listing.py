"""`list`: the checkpoints and savepoints in storage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.cli.locate import from_pointer
from dagster_checkpoints.cli.output import (
    NOTHING,
    age_in_words,
    aligned,
    bytes_in_words,
    moment_in_words,
    write,
    write_json,
)
from dagster_checkpoints.cli.status_view import next_start, sign_in_words
from dagster_checkpoints.cli.storage_options import StorageOptions, no_pipeline, pipelines, storage_options
from dagster_checkpoints.control.last_sign import last_sign
from dagster_checkpoints.errors import CorruptPipelineState, StorageError, StorageUnavailable, UnknownPipelineStateVersion
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end, describe_owner
from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.verification import file_sizes

if TYPE_CHECKING:
    from rich.console import RenderableType

_AT_ONCE = 8


@dataclass(frozen=True)
class Entry:
    """A checkpoint or savepoint in the list.

    Attributes:
        job_id: id of the job that it belongs to; None if its metadata cannot be read.
        completed_at: time of completion by the clock of the run that made it; if its metadata cannot be read, the time when the
            metadata was written.
        next_start: whether the next run begins from it by default.
    """

    checkpoint_id: int
    kind: str
    location: str
    url: str
    job_id: int | None
    completed_at: datetime
    next_start: bool
    details: dict[str, Any]


@click.command("list")
@click.option("--long", "-l", "detailed", is_flag=True, help="Read the metadata of each: size, files, finished stages.")
@storage_options
def list_command(options: StorageOptions, detailed: bool) -> None:
    """Checkpoints and savepoints in storage, newest first; of all pipelines in it, unless --pipeline names one.

    Newest by time: the ids of a new start's job count from 1 again. The pipeline's next run begins from the one marked with * by
    default. After a job that has ended by itself, or was drained, the next run is a new start. Of a pipeline whose state cannot
    be read the savepoints are listed, and the exit code is 1.
    """
    store = options.store()
    names = [options.pipeline] if options.pipeline is not None else pipelines(store)
    documents, parts, damaged = [], [], False
    for name in names:
        with options.storage_of(store, name) as storage:
            try:
                state, unreadable = storage.read_state(), ""
            except (CorruptPipelineState, UnknownPipelineStateVersion) as error:
                if options.pipeline is not None:
                    raise
                state, unreadable = None, str(error)
                damaged = True
            if state is None and options.pipeline is not None and not storage.list_savepoints():
                options.state(storage)
            entries = _entries(storage, state, detailed)
            problem = unreadable or storage.describe_unlisted(state)
            documents.append(_as_json(storage, state, entries, problem))
            parts += _as_text(storage, state, entries, detailed, problem)
    if options.as_json:
        write_json({"storage": store.url, "pipelines": documents})
    elif not names:
        raise no_pipeline(store)
    else:
        write(*parts)
    if damaged:
        click.get_current_context().exit(int(Exit.FAILED))


def _entries(storage: CheckpointStorage, state: PipelineState | None, detailed: bool) -> list[Entry]:
    start = next_start(state)
    entries = {}
    savepoints = storage.list_savepoints()
    pointers = list(state.retained) if state else []
    if state and state.newest and start and not any(start == savepoint.location for savepoint in savepoints):
        pointers.insert(0, state.newest)  # it may be a savepoint of the user's in another directory
    for pointer in pointers:
        url, completed_at = from_pointer(storage, pointer).url, pointer.completed_at
        is_start = pointer.location == start
        entries[pointer.location] = Entry(
            pointer.checkpoint_id, pointer.kind, pointer.location, url, pointer.job_id, completed_at, is_start, {}
        )
    unlisted = [savepoint for savepoint in savepoints if savepoint.location not in entries]
    for savepoint in unlisted:  # state.json does not name it: its job and time are in its metadata
        location = savepoint.location
        entries[location] = Entry(
            savepoint.checkpoint_id, "savepoint", location, savepoint.url, None, savepoint.modified, location == start, {}
        )
    to_read = list(entries.values()) if detailed else [entries[savepoint.location] for savepoint in unlisted]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        read = dict(zip((entry.location for entry in to_read), pool.map(partial(_read, storage), to_read), strict=True))
    complete = [_with_metadata(entry, read.get(entry.location), detailed) for entry in entries.values()]
    return sorted(complete, key=lambda entry: (entry.completed_at, entry.checkpoint_id), reverse=True)


def _read(storage: CheckpointStorage, entry: Entry) -> CheckpointMetadata | StorageError | StateError:
    try:
        return decode(storage.read_metadata(entry.location), entry.url)
    except StorageUnavailable:
        raise
    except (StorageError, StateError) as error:
        return error


def _with_metadata(entry: Entry, read: CheckpointMetadata | StorageError | StateError | None, detailed: bool) -> Entry:
    if read is None:
        return entry
    if not isinstance(read, CheckpointMetadata):
        return replace(entry, details={"problem": str(read)} if detailed else {})
    details = _details(read) if detailed else {}
    if entry.job_id is not None:
        return replace(entry, details=details)
    job_id = int(read.job_id) if read.job_id.isdecimal() else None
    return replace(entry, job_id=job_id, completed_at=datetime.fromtimestamp(read.completed_at, UTC), details=details)


def _details(metadata: CheckpointMetadata) -> dict[str, Any]:
    sizes = file_sizes(metadata)
    return {
        "bytes": sum(sizes.values()),
        "files": len(sizes),
        "stages": len(metadata.stages),
        "finished_stages": [stage.name for stage in metadata.stages if stage.fully_finished],
        "run_id": metadata.run_id,
        "triggered_at": datetime.fromtimestamp(metadata.triggered_at, UTC),
        "spark_version": metadata.spark_version,
    }


def _as_json(storage: CheckpointStorage, state: PipelineState | None, entries: list[Entry], problem: str) -> dict[str, Any]:
    return {
        "pipeline": storage.pipeline,
        "url": storage.url,
        "owner": state.lease.owner if state and state.lease else None,
        "job": state.job if state else None,
        "problem": problem or None,
        "entries": [
            {
                "id": entry.checkpoint_id,
                "kind": entry.kind,
                "location": entry.location,
                "url": entry.url,
                "job_id": entry.job_id,
                "completed_at": entry.completed_at,
                "next_start": entry.next_start,
                **entry.details,
            }
            for entry in entries
        ],
    }


def _as_text(
    storage: CheckpointStorage, state: PipelineState | None, entries: list[Entry], detailed: bool, problem: str
) -> list[RenderableType]:
    from rich.text import Text

    sign = last_sign(state, None, datetime.now(UTC)) if state else None
    if state is not None and sign is not None:
        summary = f"{sign_in_words(sign)}; {describe_owner(state)}" if sign.dead else describe_owner(state)
    else:
        summary = problem or describe_end(state)
    title = Text.assemble((storage.pipeline, "bold"), f"  {storage.url}\n", (summary[:1].upper() + summary[1:], "dim"))
    if not entries:
        return [title, Text("No checkpoints, no savepoints.\n")]
    detail_columns = ("size", "files", "finished") if detailed else ()
    columns = ("", "id", "job", "completed (UTC)", "age", *detail_columns, "location")
    rows = [
        [
            "*" if entry.next_start else "",
            str(entry.checkpoint_id),
            str(entry.job_id) if entry.job_id is not None else NOTHING,
            moment_in_words(entry.completed_at),
            age_in_words(entry.completed_at),
            *(_detail_cells(entry.details) if detailed else ()),
            entry.location,
        ]
        for entry in entries
    ]
    starts = [number for number, entry in enumerate(entries) if entry.next_start]
    return [title, aligned(columns, rows, right=("id", "job", "size", "files"), bold=starts), Text("")]


def _detail_cells(details: dict[str, Any]) -> list[str]:
    if "problem" in details:
        return ["unreadable", NOTHING, NOTHING]
    return [
        bytes_in_words(details["bytes"]),
        str(details["files"]),
        f"{len(details['finished_stages'])} of {details['stages']}",
    ]
