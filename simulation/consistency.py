"""The rows of a pipeline: those that follow from its sources, and whether a checkpoint accounts for each row that was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

import msgspec

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import EndOfData
from simulation.channels import Row, describe, is_refused, mix, source_row, tally, total
from simulation.operators import operator
from simulation.shapes import Shape, StageSpec, name_of, number_of
from simulation.storage import Metadata
from simulation.violations import Violation

Positions = Mapping[int, Iterable[tuple[int, int]]]
"""By source stage: (split, how many of its records were read)."""


def expected_rows(shape: Shape, positions: Positions) -> list[list[Row]]:
    """The rows that each stage passes on once everything read has been processed and every source has ended; no refused ones.

    Computed from the source records alone, stage by stage, without time or tasks.
    """
    rows: list[list[Row]] = []
    refused: dict[int, list[Row]] = {}
    refusing = {edge.source for edge in shape.pipeline.edges if edge.refused}
    edges = count(1)
    for number, spec in enumerate(shape.stages):
        if spec.is_source:
            emitted = [source_row(number, s, p) for s, end in positions.get(number, ()) for p in range(end)]
        else:
            read = refused if spec.kind == "refused" else rows
            emitted = _emitted(number, spec, [(next(edges), i.static, read[i.source]) for i in spec.inputs])
        if name_of(number) in refusing:
            refused[number] = [row for row in emitted if is_refused(row[0])]
            emitted = [row for row in emitted if not is_refused(row[0])]
        rows.append(emitted)
    return rows


def _emitted(number: int, spec: StageSpec, inputs: list[tuple[int, bool, list[Row]]]) -> list[Row]:
    """The rows of a stage with one instance that gets all rows of its tables first, then all others in one possible order."""
    emitted: list[Row] = []
    alone = operator(number, msgspec.structs.replace(spec, instances=1), 0)
    alone.forward = lambda uid, ts, key: emitted.append((uid, ts, key))
    tables = [sum(uid for uid, _, _ in rows) for _, static, rows in inputs if static]
    alone.table = mix(*tables)
    for edge, static, rows in inputs:
        for uid, ts, key in () if static else rows:
            alone.take(uid, ts, key, edge)
    alone.advance(MAX_WATERMARK_MS)
    alone.finish()
    return emitted


def check_cut(shape: Shape, metadata: Metadata) -> None:
    """The checkpoint is a consistent cut: on every edge, each row that was sent was read once, or is in flight.

    No refused row is in flight: the checkpoint that commits the rows beside it commits it, too.
    """
    sent = total(ghost.sent for ghost in metadata.ghosts.values())
    found = total(ghost.read for ghost in metadata.ghosts.values())
    edge_of = {channel.name: channel.edge for channel in shape.channels}
    refused = {channel.name for channel in shape.channels if channel.refused}
    for state in metadata.states.values():
        waiting = [*state.output.items(), *[(name, pinned.in_flight) for name, pinned in state.channels.items()]]
        for name, elements in waiting:
            in_flight = tally([element[0] for element in elements if type(element) is tuple])
            if in_flight and name in refused:
                raise Violation(f"checkpoint {metadata.pointer.checkpoint_id}, {name}: {describe(in_flight)} refused, in flight")
            found[edge_of[name]] += in_flight
    for edge in sent.keys() | found.keys():
        reads = shape.pipeline.edges[edge - 1]
        expected = sent[edge] * (shape.stages[number_of(reads.target)].instances if reads.input.mode == "static" else 1)
        if found[edge] != expected:
            what = f"checkpoint {metadata.pointer.checkpoint_id}, edge from {reads.source} to {reads.target}"
            raise Violation(f"{what}: sent {describe(expected)}, read or in flight {describe(found[edge])}")


def check_ends(shape: Shape, metadata: Metadata) -> None:
    """On every channel the end of data was both sent and received (read or in flight), or neither."""
    for channel in shape.channels:
        producer, consumer = channel.producer, channel.consumer
        if consumer not in metadata.states:
            continue
        sender, pinned = metadata.states.get(producer), metadata.states[consumer].channels[channel.name]
        waiting = [*pinned.in_flight, *(sender.output.get(channel.name, ()) if sender is not None else ())]
        sent = producer in metadata.finished or (sender is not None and sender.after_finish)
        # A task behind its end of data has received the end of each channel; after a restore with other instances it comes again.
        read = pinned.snapshot.ended != "none" or EndOfData(True) in waiting or metadata.states[consumer].after_finish
        if sent != read:
            raise Violation(f"checkpoint {metadata.pointer.checkpoint_id}, {channel.name}: end of data {sent=}, {read=}")


def written(metadata: Metadata, shape: Shape) -> dict[int, int]:
    """By stage with a sink, the tally of the rows that the checkpoint counts as written."""
    sinks = [(task.id, task.stages[-1]) for task in shape.tasks if shape.stages[task.stages[-1]].sink]
    return total({stage: metadata.ghosts[task].written} for task, stage in sinks)
