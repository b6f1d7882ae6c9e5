"""Whether a checkpoint is a consistent cut: over every edge exactly what was sent was read, or is in flight."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dagster_checkpoints.execution.elements import Mark
from simulation.shapes import Shape
from simulation.storage import Metadata
from simulation.violations import check

Pair = list[int]


def check_cut(shape: Shape, metadata: Metadata) -> None:
    """Compare what all tasks had sent over each edge with what all had read, or the checkpoint holds in flight."""
    sent: dict[int, Pair] = defaultdict(lambda: [0, 0])
    read: dict[int, Pair] = defaultdict(lambda: [0, 0])
    in_flight: dict[int, Pair] = defaultdict(lambda: [0, 0])
    for ghost in metadata.ghosts.values():
        for edge, (count, total) in ghost.sent.items():
            sent[edge][0] += count
            sent[edge][1] += total
        for edge, (count, total) in ghost.read.items():
            read[edge][0] += count
            read[edge][1] += total
    edge_of = {channel.name: channel.edge for channel in shape.channels}
    for state in metadata.states.values():
        for name, pinned in state.channels.items():
            _add(in_flight[edge_of[name]], pinned.in_flight)
        for name, elements in state.output.items():
            _add(in_flight[edge_of[name]], elements)
    for edge in sent.keys() | read.keys():
        _, target, static = shape.edges[edge - 1]
        times = shape.stages[target].instances if static else 1
        there = [sent[edge][0] * times, sent[edge][1] * times]
        found = [read[edge][0] + in_flight[edge][0], read[edge][1] + in_flight[edge][1]]
        what = f"checkpoint {metadata.checkpoint_id}, edge {shape.edges[edge - 1]}"
        check(there == found, f"{what}: sent {there}, read {read[edge]}, in flight {in_flight[edge]}")


def _add(pair: Pair, elements: Any) -> None:
    for element in elements:
        if not isinstance(element, Mark):
            pair[0] += 1
            pair[1] += element[0]


def written(metadata: Metadata, shape: Shape) -> dict[int, tuple[int, int]]:
    """By stage with a sink: how many rows the checkpoint counts as written, and their sum."""
    found: dict[int, Pair] = {n: [0, 0] for n, spec in enumerate(shape.stages) if spec.sink}
    tail_of = {task.id: task.stages[-1] for task in shape.tasks}
    for task, ghost in metadata.ghosts.items():
        tail = tail_of[task]
        if tail in found:
            found[tail][0] += ghost.written[0]
            found[tail][1] += ghost.written[1]
    return {stage: (count, total) for stage, (count, total) in found.items()}
