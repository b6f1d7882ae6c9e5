"""Drawings of a pipeline's graph: text and Mermaid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_checkpoints.cli.graph_model import GraphEdge, GraphStage, PipelineGraph

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
