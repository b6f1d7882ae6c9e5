"""Whether a checkpoint is a consistent cut: on every edge, each row that was sent was read once, or is in flight."""

from __future__ import annotations

from dagster_checkpoints.execution.elements import EndOfData, Mark
from simulation.elements import describe, tally, total
from simulation.shapes import Shape, number_of
from simulation.storage import Metadata
from simulation.violations import Violation


def check_cut(shape: Shape, metadata: Metadata) -> None:
    """For each edge, compare the rows that were sent with those that were read or that the checkpoint holds in flight."""
    sent = total(ghost.sent for ghost in metadata.ghosts.values())
    found = total(ghost.read for ghost in metadata.ghosts.values())
    edge_of = {channel.name: channel.edge for channel in shape.channels}
    for state in metadata.states.values():
        waiting = [*state.output.items(), *((name, pinned.in_flight) for name, pinned in state.channels.items())]
        for name, elements in waiting:
            found[edge_of[name]] += tally([element[0] for element in elements if not isinstance(element, Mark)])
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
        read = pinned.snapshot.ended != "none" or EndOfData(True) in waiting
        if sent != read:
            raise Violation(f"checkpoint {metadata.pointer.checkpoint_id}, {channel.name}: end of data {sent=}, {read=}")


def written(metadata: Metadata, shape: Shape) -> dict[int, int]:
    """By stage with a sink, the tally of the rows that the checkpoint counts as written."""
    sinks = [(task.id, task.stages[-1]) for task in shape.tasks if shape.stages[task.stages[-1]].sink]
    return total({stage: metadata.ghosts[task].written} for task, stage in sinks)
