"""The expected rows of a pipeline, computed from its source records alone, stage by stage, without time or tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

from dagster_checkpoints.coordination import MAX_WATERMARK_MS
from simulation.elements import Row, mix, source_row
from simulation.operators import operator
from simulation.shapes import Shape, StageSpec

Positions = Mapping[int, Iterable[tuple[int, int]]]
"""By source stage: (split, how many of its records were read)."""


def expected_rows(shape: Shape, positions: Positions) -> list[list[Row]]:
    """The rows that each stage emits once everything read has been processed and every source has ended."""
    rows: list[list[Row]] = []
    edges = count(1)
    for number, spec in enumerate(shape.stages):
        if spec.is_source:
            rows.append([source_row(number, s, p) for s, end in positions.get(number, ()) for p in range(end)])
        else:
            rows.append(_emitted(number, spec, [(next(edges), i.static, rows[i.source]) for i in spec.inputs]))
    return rows


def _emitted(number: int, spec: StageSpec, inputs: list[tuple[int, bool, list[Row]]]) -> list[Row]:
    """The rows of a stage with one instance that gets all rows of its tables first, then all others in one possible order."""
    emitted: list[Row] = []
    alone = operator(number, replace(spec, instances=1), 0)
    alone.forward = lambda uid, ts, key: emitted.append((uid, ts, key))
    tables = [sum(uid for uid, _, _ in rows) for _, static, rows in inputs if static]
    alone.table = mix(*tables)
    for edge, static, rows in inputs:
        for uid, ts, key in () if static else rows:
            alone.take(uid, ts, key, edge)
    alone.advance(MAX_WATERMARK_MS)
    alone.finish()
    return emitted
