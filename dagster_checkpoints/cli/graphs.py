"""`graph`: a drawing of the pipeline, as its code says, as it runs, or as a checkpoint has it."""

from __future__ import annotations

from pathlib import Path

import click

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.graph_drawing import as_mermaid, as_svg, as_text
from dagster_checkpoints.cli.graph_model import PipelineGraph, combined, of_checkpoint, of_code, of_status
from dagster_checkpoints.cli.loading import code_options, load_pipeline
from dagster_checkpoints.cli.locate import WHAT, Found, finding, found
from dagster_checkpoints.cli.output import write, write_json
from dagster_checkpoints.cli.status_view import current
from dagster_checkpoints.cli.storage_options import Where, storage_options
from dagster_checkpoints.control import read_status
from dagster_checkpoints.plugin.storage_root import NoStorageError
from dagster_checkpoints.state import StateError
from dagster_checkpoints.storage import CheckpointStorage, StorageError, StorageUnavailable


@click.command(epilog=WHAT)
@click.argument("location", required=False)
@code_options
@click.option("--code", "only_code", is_flag=True, help="Only what the code says; storage is not asked.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "svg"]),
    help="Default: as the output file's name says (.svg, .mmd), else text.",
)
@click.option("--output", "-o", metavar="FILE", help="Write it to this file.")
@storage_options
def graph(
    where: Where,
    location: str | None,
    module: str | None,
    file: str | None,
    attribute: str | None,
    only_code: bool,
    form: str | None,
    output: str | None,
) -> None:
    """The pipeline's stages: who reads whom, which share a query, what has finished, and the roots, where a checkpoint starts.

    Of the running pipeline, else of its newest checkpoint, or of the one at LOCATION. With -m or -f the code says what storage
    does not know: kinds of stages, sinks, and all edges; without it they are those that the newest checkpoint has recorded.
    """
    pipeline = load_pipeline(module, file, attribute, where.pipeline)
    if pipeline is None and only_code:
        raise UsageProblem("--code needs the code: say where it is with -m or -f")
    code = of_code(pipeline) if pipeline is not None else None
    seen = None if only_code else _seen(where, location, code)
    if code is not None:
        drawn = combined(code, seen) if seen is not None else code
    elif seen is not None:
        drawn = seen
    else:
        raise NothingThere("expected a pipeline that runs or has a checkpoint, found neither. Name its code with -m or -f")
    _write(where, drawn, form or _form(output), output)


def _seen(where: Where, location: str | None, code: PipelineGraph | None) -> PipelineGraph | None:
    """The graph in storage; None if there is none, and the code alone is to be drawn."""
    if location is not None:
        with finding(where, location) as named:
            return of_checkpoint(named.read())
    try:
        with where.open() as storage:
            return _of_storage(where, storage)
    except (NothingThere, NoStorageError):
        if code is None:
            raise
        return None


def _of_storage(where: Where, storage: CheckpointStorage) -> PipelineGraph | None:
    state = where.state(storage)
    told = current(state, read_status(storage))
    recorded = _recorded(found(storage, state.newest)) if state.newest is not None else None
    if told is None or not told.stages:
        return recorded
    return combined(recorded, of_status(told)) if recorded is not None else of_status(told)


def _recorded(checkpoint: Found) -> PipelineGraph | None:
    try:
        return of_checkpoint(checkpoint.read())
    except StorageUnavailable:
        raise
    except (StateError, StorageError):  # a running pipeline may have replaced it this moment
        return None


def _form(output: str | None) -> str:
    endings = {".svg": "svg", ".mmd": "mermaid", ".mermaid": "mermaid"}
    return endings.get(Path(output).suffix.lower(), "text") if output else "text"


def _write(where: Where, drawn: PipelineGraph, form: str, output: str | None) -> None:
    if where.as_json:
        write_json(drawn)
        return
    if form == "text":
        if output is None:
            write(as_text(drawn))
            return
        text = as_text(drawn).plain + "\n"
    else:
        text = as_svg(drawn) if form == "svg" else as_mermaid(drawn)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageProblem(f"{output} cannot be written: {error}") from error
    click.echo(f"Wrote {output}", err=True)
