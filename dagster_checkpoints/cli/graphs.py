"""`graph`: a drawing of the pipeline from its code, from the running pipeline or from a checkpoint.

The forms are text and Mermaid.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.graph_model import (
    GraphEdge,
    GraphStage,
    PipelineGraph,
    combine,
    graph_of_checkpoint,
    graph_of_code,
    graph_of_status,
)
from dagster_checkpoints.cli.loading import code_options, load_pipeline
from dagster_checkpoints.cli.locate import LOCATION_HELP, locate, located
from dagster_checkpoints.cli.output import write, write_json
from dagster_checkpoints.cli.status_view import current
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options
from dagster_checkpoints.control.status import PipelineStatus, read_status
from dagster_checkpoints.errors import StorageError, StorageUnavailable
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.root import NoStorageError

if TYPE_CHECKING:
    from rich.text import Text


_FILL = {
    "running": "#ecfdf5",
    "partly finished": "#fef9c3",
    "at end of data": "#fef3c7",
    "finished": "#e5e7eb",
}
_TEXT, _MUTED, _LINE, _ROOT = "#111827", "#6b7280", "#9ca3af", "#16a34a"


# Text


def as_text(graph: PipelineGraph) -> Text:
    """One or two lines per stage, chain by chain."""
    from rich.text import Text

    width = max((len(_counted(stage)) for stage in graph.stages), default=0)
    lines = [Text.assemble((graph.name, "bold"), f"  {graph.seen}")]
    for chain in graph.chains:
        for position, name in enumerate(chain):
            stage = graph.stage(name)
            facts = [stage.kind if stage.kind != "stage" else "", "root" if stage.root else "", stage.state]
            facts += [f"to {stage.sink}" if stage.sink else "", "in the same query" if position else ""]
            text = f"{'  └ ' if position else '  '}{_counted(stage).ljust(width)}  {', '.join(fact for fact in facts if fact)}"
            style = "dim" if stage.state == "finished" else "bold" if stage.root else ""
            lines.append(Text(text.rstrip(), style=style))
            reads = [edge.source + (" (table)" if edge.table else "") for edge in graph.reads(name) if edge.source not in chain]
            if reads:
                why = f"; in a query of its own, since {stage.apart}" if stage.apart else ""
                lines.append(Text(f"      reads {', '.join(reads)}{why}", style="dim"))
    return Text("\n").join(lines)


def _counted(stage: GraphStage) -> str:
    return stage.name if stage.instances == 1 else f"{stage.name} x{stage.instances}"


# Mermaid


def as_mermaid(graph: PipelineGraph) -> str:
    """A flowchart, for Markdown that renders Mermaid."""
    number = {stage.name: f"s{index}" for index, stage in enumerate(graph.stages)}
    lines = ["flowchart LR"]
    for index, chain in enumerate(graph.chains):
        nodes = [f'{number[name]}["{_mermaid_label(graph.stage(name))}"]' for name in chain]
        if len(nodes) == 1:
            lines.append(f"  {nodes[0]}")
        else:
            lines += [f'  subgraph c{index}["one query"]', *(f"    {node}" for node in nodes), "  end"]
    for edge in graph.edges:
        arrow = "-. table .->" if edge.table else "== all to all ==>" if _is_shuffle(graph, edge) else "-->"
        lines.append(f"  {number[edge.source]} {arrow} {number[edge.target]}")
    styles = [
        ("running", f"fill:{_FILL['running']},stroke:{_LINE},color:{_TEXT}", [s for s in graph.stages if s.state == "running"]),
        ("partly", f"fill:{_FILL['partly finished']},color:{_TEXT}", [s for s in graph.stages if s.state == "partly finished"]),
        ("ended", f"fill:{_FILL['at end of data']},color:{_TEXT}", [s for s in graph.stages if s.state == "at end of data"]),
        ("finished", f"fill:{_FILL['finished']},color:{_MUTED}", [s for s in graph.stages if s.state == "finished"]),
        ("root", f"stroke:{_ROOT},stroke-width:3px", [s for s in graph.stages if s.root]),
    ]
    for name, style, stages in styles:
        if stages:
            lines += [f"  classDef {name} {style}", f"  class {','.join(number[stage.name] for stage in stages)} {name}"]
    return "\n".join(lines) + "\n"


def _mermaid_label(stage: GraphStage) -> str:
    return "<br/>".join(text.replace('"', "&quot;") for text in (stage.name, _caption(stage)) if text)


def _caption(stage: GraphStage) -> str:
    """The text below the name of a stage: kind, instances, state, root, sink."""
    count = f"{stage.instances} instances" if stage.instances > 1 else ""
    root = "root" if stage.root else ""
    sink = f"to {stage.sink}" if stage.sink else ""
    return ", ".join(text for text in (stage.kind if stage.kind != "stage" else "", count, stage.state, root, sink) if text)


def _is_shuffle(graph: PipelineGraph, edge: GraphEdge) -> bool:
    alone = graph.stage(edge.source).instances == graph.stage(edge.target).instances == 1
    return edge.pattern == "all to all" and not alone


_FORMS = {"": "text", ".txt": "text", ".mmd": "mermaid", ".mermaid": "mermaid"}
"""The format of a drawing by the ending of its file's name."""


@click.command(epilog=LOCATION_HELP)
@click.argument("location", required=False)
@code_options
@click.option("--code", "only_code", is_flag=True, help="Draw the code alone; no storage is read.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid"]),
    help="Default: the format of the output file's name (.mmd, .txt), else text.",
)
@click.option("--output", "-o", metavar="FILE", help="Write the drawing to this file.")
@storage_options
def graph(
    options: StorageOptions,
    location: str | None,
    module: str | None,
    file: str | None,
    attribute: str | None,
    only_code: bool,
    form: str | None,
    output: str | None,
) -> None:
    """Draw the pipeline: stages, edges, shared queries, finished stages, and the roots, where a checkpoint starts.

    Draws LOCATION; by default the running pipeline, else 'latest'. With -m or -f the code adds what storage does not contain:
    kinds of stages, sinks, and all edges; without it the edges are those that the newest checkpoint recorded.
    """
    form = form or _form(output)
    pipeline = load_pipeline(module, file, attribute, options.pipeline)
    if pipeline is None and only_code:
        raise UsageProblem("--code needs the code: name it with -m or -f")
    code = graph_of_code(pipeline) if pipeline is not None else None
    stored = None if only_code else _stored_graph(options, location, pipeline)
    if code is not None:
        drawn = combine(code, stored) if stored is not None else code
    elif stored is not None:
        drawn = stored
    else:
        raise NothingThere(
            "expected a pipeline that runs or has a checkpoint, found neither. Name its code with -m or -f, or a LOCATION"
        )
    _write(options, drawn, form, output)


def _stored_graph(options: StorageOptions, location: str | None, pipeline: Pipeline | None) -> PipelineGraph | None:
    """The graph in storage; None if storage has none and the code is drawn alone."""
    if location is not None:
        with located(options, location) as checkpoint:
            return graph_of_checkpoint(checkpoint.read(), pipeline, _names(read_status(checkpoint.storage)))
    try:
        with options.open() as storage:
            return _graph_of_storage(options, storage, pipeline)
    except (NothingThere, NoStorageError):
        if pipeline is None:
            raise
        return None


def _graph_of_storage(options: StorageOptions, storage: CheckpointStorage, pipeline: Pipeline | None) -> PipelineGraph | None:
    state, latest = options.state(storage), read_status(storage)
    status = current(state, latest)
    running = graph_of_status(status, pipeline) if status is not None and status.stages else None
    if running is not None and status is not None and all(stage.inputs is not None for stage in status.stages):
        return running  # the newest checkpoint may be of an older version of the code
    try:
        recorded = graph_of_checkpoint(locate(storage, "latest").read(), pipeline, _names(latest))
    except (StateError, StorageError) as error:  # the running pipeline may just have deleted it
        if isinstance(error, StorageUnavailable) or (running is None and pipeline is None):
            raise
        recorded = None
    except NothingThere:
        recorded = None
    return combine(recorded, running) if recorded is not None and running is not None else running or recorded


def _names(status: PipelineStatus | None) -> dict[str, str]:
    """By uid, the names that the stages had in the pipeline's latest run."""
    return {stage.uid: stage.name for stage in status.stages if stage.uid} if status is not None else {}


def _form(output: str | None) -> str:
    ending = Path(output).suffix.lower() if output else ""
    form = _FORMS.get(ending)
    if form is None:
        raise UsageProblem(f"expected a file that ends in .mmd (Mermaid) or .txt (text), or --format, found {output}")
    return form


def _write(options: StorageOptions, drawn: PipelineGraph, form: str, output: str | None) -> None:
    if output is not None:
        try:
            Path(output).write_text(as_text(drawn).plain + "\n" if form == "text" else as_mermaid(drawn), encoding="utf-8")
        except OSError as error:
            raise UsageProblem(f"{output} cannot be written: {error}") from error
        click.echo(f"Wrote {output}", err=True)
    if options.as_json:
        write_json(drawn)
    elif output is None and form == "text":
        write(as_text(drawn))
    elif output is None:
        click.echo(as_mermaid(drawn), nl=False)
