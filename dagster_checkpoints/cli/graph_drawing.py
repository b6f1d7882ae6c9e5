"""Drawings of a pipeline's graph: text, Mermaid, SVG."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from dagster_checkpoints.cli.graph_model import GraphEdge, GraphStage, PipelineGraph, layers

if TYPE_CHECKING:
    from rich.text import Text

_FILL = {
    "": "#ffffff",
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
                lines.append(Text(f"      reads {', '.join(reads)}", style="dim"))
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


# SVG

_HEIGHT, _GAP_X, _GAP_Y, _INNER, _PADDING, _MARGIN = 48, 64, 28, 28, 12, 24
_CHARACTER = 7.4
_TITLE = 34


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float = _HEIGHT

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def as_svg(graph: PipelineGraph) -> str:
    """A complete SVG document; it loads no fonts or styles."""
    boxes, hulls, width, height = _lay_out(graph)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-sans-serif, system-ui, sans-serif">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 6}" font-size="15" font-weight="600" fill="{_TEXT}">{escape(graph.name)}'
        f'<tspan font-weight="400" fill="{_MUTED}">  {escape(graph.seen)}</tspan></text>',
        f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_MUTED}"/></marker></defs>',
    ]
    parts += [
        f'<rect x="{hull.x:.1f}" y="{hull.y:.1f}" width="{hull.width:.1f}" height="{hull.height:.1f}" rx="12" fill="#f9fafb" '
        f'stroke="{_LINE}" stroke-dasharray="4 4"/>'
        for hull in hulls
    ]
    parts += [_svg_edge(graph, edge, boxes[edge.source], boxes[edge.target]) for edge in graph.edges]
    parts += [_svg_stage(graph.stage(name), box) for name, box in boxes.items()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lay_out(graph: PipelineGraph) -> tuple[dict[str, _Box], list[_Box], float, float]:
    columns = layers(graph)
    boxes: dict[str, _Box] = {}
    hulls = []
    tall = [sum(_HEIGHT + 2 * _PADDING for _ in column) + _GAP_Y * (len(column) - 1) for column in columns]
    x, top = float(_MARGIN), _MARGIN + _TITLE
    for column, height in zip(columns, tall, strict=True):
        wide = max(_chain_width(graph, chain) for chain in column)
        y = top + (max(tall) - height) / 2
        for chain in column:
            at = x + _PADDING + (wide - _chain_width(graph, chain)) / 2
            start = at
            for name in chain:
                width = _width(graph.stage(name))
                boxes[name] = _Box(at, y + _PADDING, width)
                at += width + _INNER
            if len(chain) > 1:
                hulls.append(_Box(start - _PADDING, y, at - _INNER - start + 2 * _PADDING, _HEIGHT + 2 * _PADDING))
            y += _HEIGHT + 2 * _PADDING + _GAP_Y
        x += wide + 2 * _PADDING + _GAP_X
    title = 8.5 * len(f"{graph.name}  {graph.seen}") + 2 * _MARGIN
    return boxes, hulls, max(x - _GAP_X + _MARGIN, title), top + max(tall, default=0) + _MARGIN


def _width(stage: GraphStage) -> float:
    return max(_CHARACTER * len(stage.name) * 1.12, _CHARACTER * 0.86 * len(_caption(stage))) + 24


def _chain_width(graph: PipelineGraph, chain: tuple[str, ...]) -> float:
    return sum(_width(graph.stage(name)) for name in chain) + _INNER * (len(chain) - 1)


def _svg_stage(stage: GraphStage, box: _Box) -> str:
    stroke, thick = (_ROOT, 2.5) if stage.root else (_LINE, 1)
    color = _MUTED if stage.state == "finished" else _TEXT
    center, caption = box.x + box.width / 2, _caption(stage)
    lift = 3 if caption else -5
    text = (
        f'<text x="{center:.1f}" y="{box.middle - lift:.1f}" font-size="13" font-weight="600" text-anchor="middle" '
        f'fill="{color}">{escape(stage.name)}</text>'
    )
    if caption:
        text += (
            f'<text x="{center:.1f}" y="{box.middle + 14:.1f}" font-size="11" text-anchor="middle" fill="{_MUTED}">'
            f"{escape(caption)}</text>"
        )
    return (
        f'<g><rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height}" rx="8" '
        f'fill="{_FILL[stage.state]}" stroke="{stroke}" stroke-width="{thick}"/>{text}</g>'
    )


def _svg_edge(graph: PipelineGraph, edge: GraphEdge, source: _Box, target: _Box) -> str:
    bend = max((target.x - source.right) / 2, 18)
    path = (
        f"M{source.right:.1f} {source.middle:.1f} C{source.right + bend:.1f} {source.middle:.1f} "
        f"{target.x - bend:.1f} {target.middle:.1f} {target.x - 1:.1f} {target.middle:.1f}"
    )
    dashes = ' stroke-dasharray="5 4"' if edge.table else ""
    thick = 2.2 if _is_shuffle(graph, edge) else 1.4
    reading = "read as a table" if edge.table else edge.pattern or "read"
    title = f"<title>{escape(f'{edge.source} → {edge.target}: {reading}')}</title>"
    return (
        f'<path d="{path}" fill="none" stroke="{_MUTED}" stroke-width="{thick}"{dashes} marker-end="url(#arrow)">{title}</path>'
    )
