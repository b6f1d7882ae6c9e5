"""What must come out of a pipeline, computed from its source records alone, stage by stage, without time or tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simulation.elements import EDGES, FLUSHED_TS, WINDOW, Row, mix, source_row
from simulation.operators import totals_row, window_row
from simulation.shapes import Shape

Positions = Mapping[int, Iterable[tuple[int, int]]]
"""By source stage: (split, how many of its records were read)."""


def expected_rows(shape: Shape, positions: Positions) -> list[list[Row]]:
    """The rows that each stage emits once everything read has been processed and every source has ended."""
    rows: list[list[Row]] = []
    edge = 0
    for number, spec in enumerate(shape.stages):
        if spec.is_source:
            rows.append([source_row(number, s, p) for s, end in positions.get(number, ()) for p in range(end)])
            continue
        streams: list[tuple[int, list[Row]]] = []
        tables: dict[int, int] = {}
        for i in spec.inputs:
            edge += 1
            if i.static:
                tables[edge] = sum(uid for uid, _, _ in rows[i.source])
            else:
                streams.append((edge, rows[i.source]))
        table = mix(*(tables[e] for e in sorted(tables))) if tables else None
        rows.append(_emitted(number, spec.kind, streams, table))
    return rows


def _emitted(number: int, kind: str, streams: list[tuple[int, list[Row]]], table: int | None) -> list[Row]:
    taken = []
    for edge, rows in streams:
        for uid, ts, key in rows:
            name = uid * EDGES + edge
            taken.append((name if table is None else mix(name, table), ts, key))
    if kind == "window":
        windows: dict[tuple[int, int], tuple[int, int]] = {}
        for uid, ts, key in taken:
            count, total = windows.get((ts // WINDOW, key), (0, 0))
            windows[ts // WINDOW, key] = (count + 1, total + uid)
        return [window_row(number, window, key, *found) for (window, key), found in windows.items()]
    if kind == "totals":
        totals: dict[int, tuple[int, int]] = {}
        for uid, _, key in taken:
            count, total = totals.get(key, (0, 0))
            totals[key] = (count + 1, total + uid)
        return taken + [totals_row(number, key, *found) for key, found in totals.items()]
    if kind == "buffer":
        return [(uid, FLUSHED_TS, key) for uid, _, key in taken]
    return taken
