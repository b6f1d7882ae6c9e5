"""`list`: what there is in storage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.exits import NothingThere
from dagster_checkpoints.cli.finding import found
from dagster_checkpoints.cli.output import (
    NOTHING,
    age_in_words,
    aligned,
    bytes_in_words,
    moment_in_words,
    write,
    write_json,
)
from dagster_checkpoints.cli.status_view import next_start
from dagster_checkpoints.cli.where import Where, pipelines, storage_options
from dagster_checkpoints.state import StateError, decode
from dagster_checkpoints.storage import (
    CheckpointStorage,
    PipelineState,
    StorageError,
    StorageUnavailable,
    describe_end,
)
from dagster_checkpoints.storage.pipeline_state import describe_owner
from dagster_checkpoints.verification import file_sizes

if TYPE_CHECKING:
    from rich.console import RenderableType

_AT_ONCE = 8


@dataclass(frozen=True)
class Entry:
    """A checkpoint or savepoint in the list.

    Attributes:
        completed_at: of a savepoint that no `state.json` names: when its metadata was written.
        next_start: the next run begins from it, unless it is told otherwise.
    """

    checkpoint_id: int
    kind: str
    location: str
    url: str
    completed_at: datetime
    next_start: bool
    details: dict[str, Any]


@click.command("list")
@click.option("--long", "-l", "detailed", is_flag=True, help="Read each one's metadata: size, files, what has finished.")
@storage_options
def list_command(where: Where, detailed: bool) -> None:
    """Checkpoints and savepoints in storage, newest first; of all pipelines there unless --pipeline names one.

    The one marked with * is what the pipeline's next run begins from by default. A job that has ended by itself, or was
    drained, is followed by a new start.
    """
    store = where.store()
    names = [where.pipeline] if where.pipeline is not None else pipelines(store)
    shown, parts = [], []
    for name in names:
        with where.storage_of(store, name) as storage:
            state = storage.read_state()
            if state is None and where.pipeline is not None and not storage.list_savepoints():
                where.state(storage)
            entries = _entries(storage, state, detailed)
            shown.append(_as_json(storage, state, entries))
            parts += _as_text(storage, state, entries, detailed)
    if where.as_json:
        write_json({"storage": store.url, "pipelines": shown})
    elif not names:
        raise NothingThere(f"expected the state of a pipeline in {store.url}, found none. Is it the right --storage?")
    else:
        write(*parts)


def _entries(storage: CheckpointStorage, state: PipelineState | None, detailed: bool) -> list[Entry]:
    start = next_start(state)
    entries = {}
    for pointer in state.retained if state else ():
        url = found(storage, pointer).url
        entries[pointer.location] = Entry(
            pointer.checkpoint_id, pointer.kind, pointer.location, url, pointer.completed_at, pointer.location == start, {}
        )
    for one in storage.list_savepoints():
        if one.location not in entries:
            entries[one.location] = Entry(
                one.checkpoint_id, "savepoint", one.location, one.url, one.modified, one.location == start, {}
            )
    newest_first = sorted(entries.values(), key=lambda entry: (entry.checkpoint_id, entry.completed_at), reverse=True)
    if not detailed:
        return newest_first
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        read = list(pool.map(lambda entry: _read(storage, entry), newest_first))
    return [replace(entry, details=_details(entry, data)) for entry, data in zip(newest_first, read, strict=True)]


def _read(storage: CheckpointStorage, entry: Entry) -> bytes | StorageError:
    try:
        return storage.read_metadata(entry.location)
    except StorageUnavailable:
        raise
    except StorageError as error:
        return error


def _details(entry: Entry, data: bytes | StorageError) -> dict[str, Any]:
    if isinstance(data, StorageError):
        return {"problem": str(data)}
    try:
        metadata = decode(data, entry.url)
    except StateError as error:
        return {"problem": str(error)}
    sizes = file_sizes(metadata)
    return {
        "bytes": sum(sizes.values()),
        "files": len(sizes),
        "stages": len(metadata.stages),
        "finished_stages": [stage.name for stage in metadata.stages if stage.fully_finished],
        "job_id": metadata.job_id,
        "run_id": metadata.run_id,
        "triggered_at": datetime.fromtimestamp(metadata.triggered_at, UTC),
        "spark_version": metadata.spark_version,
    }


def _as_json(storage: CheckpointStorage, state: PipelineState | None, entries: list[Entry]) -> dict[str, Any]:
    return {
        "pipeline": storage.pipeline,
        "url": storage.url,
        "owner": state.lease.owner if state and state.lease else None,
        "job": state.job if state else None,
        "entries": [
            {
                "id": entry.checkpoint_id,
                "kind": entry.kind,
                "location": entry.location,
                "url": entry.url,
                "completed_at": entry.completed_at,
                "next_start": entry.next_start,
                **entry.details,
            }
            for entry in entries
        ],
    }


def _as_text(
    storage: CheckpointStorage, state: PipelineState | None, entries: list[Entry], detailed: bool
) -> list[RenderableType]:
    from rich.text import Text

    about = describe_owner(state) if state and state.lease else describe_end(state)
    title = Text.assemble((storage.pipeline, "bold"), f"  {storage.url}\n", (about[:1].upper() + about[1:], "dim"))
    if not entries:
        return [title, Text("No checkpoints, no savepoints.\n")]
    more = ("size", "files", "finished") if detailed else ()
    columns = ("", "id", "completed (UTC)", "age", *more, "location")
    rows = [
        [
            "*" if entry.next_start else "",
            str(entry.checkpoint_id),
            moment_in_words(entry.completed_at),
            age_in_words(entry.completed_at),
            *(_detail_cells(entry.details) if detailed else ()),
            entry.location,
        ]
        for entry in entries
    ]
    starts = [number for number, entry in enumerate(entries) if entry.next_start]
    return [title, aligned(columns, rows, right=("id", "size", "files"), bold=starts), Text("")]


def _detail_cells(details: dict[str, Any]) -> list[str]:
    if "problem" in details:
        return ["unreadable", NOTHING, NOTHING]
    return [
        bytes_in_words(details["bytes"]),
        str(details["files"]),
        f"{len(details['finished_stages'])} of {details['stages']}",
    ]
