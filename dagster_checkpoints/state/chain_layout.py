"""What the stages of a recorded chain read, then and now: they run as one query again only if they read the same.

Must not know: storage, Spark, tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from dagster_checkpoints.pipeline import Pipeline, joining_obstacle, merging_stage
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.metadata import ChainMetadata, InputMetadata
from dagster_checkpoints.state.stages_between import ReplacedInput

Reads = Mapping[str, list[str]]
"""By stage, the stages that it reads; sources are not in it."""


def reads_of(checkpoint: FittedCheckpoint) -> Reads:
    """The stages that each stage of the pipeline that is to run reads."""
    return {name: [edge.source for edge in edges] for name, edges in checkpoint.edges_into.items()}


def recorded_reads(checkpoint: FittedCheckpoint, chain: ChainMetadata) -> Reads:
    """What the stages of a recorded chain read of each other: as recorded up to its merging stage, then each the one in front."""
    inputs = {name: [_recorded_name(each) for each in checkpoint.recorded[name].inputs or ()] for name in chain.stages}
    merging = merging_stage(chain.stages, inputs)
    first = chain.stages.index(merging) if merging else 0
    reads = {name: inputs[name] for name in chain.stages[: first + 1] if merging and inputs[name]}
    return {**reads, **{name: [upstream] for upstream, name in pairwise(chain.stages[first:])}}


def _recorded_name(read: InputMetadata) -> str:
    return read.before if isinstance(read, ReplacedInput) else read.stage


def readers(before: Reads) -> dict[str, str]:
    """By stage of a recorded chain, the stage of the chain that reads it."""
    return {upstream: name for name, read in before.items() for upstream in read}


def changed_input(reads: Reads, before: Reads) -> tuple[str, str] | None:
    """The first stage of a chain that does not read exactly what it read there, after one of the stages that it read."""
    return next(((read[0], name) for name, read in before.items() if sorted(reads.get(name, ())) != sorted(read)), None)


def changes_inside(checkpoint: FittedCheckpoint, before: Reads) -> Iterator[tuple[str, str]]:
    """The stages of a chain that cannot run in the query of those in front any more, each with the change in words.

    Args:
        checkpoint: the checkpoint, with the pipeline that is to run.
        before: what the stages of the chain read of each other, see `recorded_reads`.
    """
    pipeline = checkpoint.pipeline
    followed_by = readers(before)
    for edge in pipeline.edges:
        if edge.source in followed_by and edge.target != followed_by[edge.source]:
            what = "reads" if edge.target in checkpoint.recorded else "is new, and reads"
            yield followed_by[edge.source], f"{edge.target!r} {what} {edge.source!r}, whose rows do not leave that query"
    for name in before:
        obstacle = joining_obstacle(pipeline, name) if isinstance(pipeline, Pipeline) else None
        if obstacle is not None:
            yield name, obstacle
