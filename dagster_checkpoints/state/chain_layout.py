"""Whether the stages of a recorded chain can run as one query again: state belongs to the plan of that query.

Must not know: storage, Spark, tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from dagster_checkpoints.pipeline import Pipeline, joining_obstacle, merging_stage
from dagster_checkpoints.state.errors import ChainLayoutChanged
from dagster_checkpoints.state.metadata import ChainMetadata, InputMetadata, StageMetadata
from dagster_checkpoints.state.stages_between import ReplacedInput
from dagster_checkpoints.state.views import PipelineView

Reads = Mapping[str, list[str]]
"""By stage, the stages that it reads; sources are not in it."""


def reads_of(pipeline: PipelineView) -> Reads:
    """The stages that each stage of the pipeline reads."""
    reads: dict[str, list[str]] = {}
    for edge in pipeline.edges:
        reads.setdefault(edge.target, []).append(edge.source)
    return reads


def check_layout(
    pipeline: PipelineView,
    reads: Reads,
    chain: ChainMetadata,
    recorded: Mapping[str, StageMetadata],
    obstacle: str | None,
    where: str,
) -> None:
    """Check that a recorded chain can run as one query.

    Args:
        pipeline: the pipeline that is to run.
        reads: what its stages read.
        chain: the chain; `divided_chains` has divided it where that is possible.
        recorded: the stages of the checkpoint, by name.
        obstacle: why the chain cannot be divided, if its state does not allow it.
        where: the checkpoint, for the error.

    Raises:
        ChainLayoutChanged: names the stages of the chain, the change, and the remedy.
    """
    layout = " -> ".join(chain.stages)
    missing = missing_stages(pipeline, chain)
    if missing:
        because = f" ({obstacle})" if obstacle else ""
        raise ChainLayoutChanged(
            f"In {where} the stages {layout} run as one Spark query, whose state belongs to all of them; {_names(missing)} "
            f"is no longer in the pipeline{because}. Put it back, or start without this checkpoint. (allow_non_restored_state "
            "can only leave whole chains behind, and the last stages of a chain.)"
        )
    before = recorded_reads(chain, recorded)
    changed = changed_input(reads, before)
    if changed is not None:
        upstream, name = changed
        raise ChainLayoutChanged(
            f"In {where} the stages {layout} run as one Spark query, in which {name!r} reads {upstream!r} and nothing else; "
            f"now {name!r} reads {_names(reads.get(name, ())) or 'nothing'}. Spark's state belongs to the plan of that query. "
            "Restore the stages' order, or start without this checkpoint."
        )
    for _, change in changes_inside(pipeline, before, recorded):
        raise ChainLayoutChanged(
            f"In {where} the stages {layout} run as one Spark query; now {change}. The query's state cannot be divided for that: "
            f"{obstacle or 'a stage would read other rows'}. Take the change back, or start the pipeline without this checkpoint "
            "(restore_from: none). With Pipeline(..., chaining=False) from that start on, each stage has a query of its own."
        )


def missing_stages(pipeline: PipelineView, chain: ChainMetadata) -> list[str]:
    """The stages of a chain that the pipeline does not have."""
    present = {stage.name for stage in pipeline.stages}
    return [name for name in chain.stages if name not in present]


def recorded_reads(chain: ChainMetadata, recorded: Mapping[str, StageMetadata]) -> Reads:
    """What the stages of a recorded chain read of each other: as recorded up to its merging stage, then each the one in front."""
    inputs = {name: [_recorded_name(each) for each in recorded[name].inputs or ()] for name in chain.stages}
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


def changes_inside(pipeline: PipelineView, before: Reads, recorded: Mapping[str, StageMetadata]) -> Iterator[tuple[str, str]]:
    """The stages of a chain that cannot run in the query of those in front any more, each with the change in words.

    Args:
        pipeline: the pipeline that is to run.
        before: what the stages of the chain read of each other, see `recorded_reads`.
        recorded: the stages of the checkpoint, by name.
    """
    followed_by = readers(before)
    for edge in pipeline.edges:
        if edge.source in followed_by and edge.target != followed_by[edge.source]:
            what = "reads" if edge.target in recorded else "is new, and reads"
            yield followed_by[edge.source], f"{edge.target!r} {what} {edge.source!r}, whose rows do not leave that query"
    for name in before:
        obstacle = joining_obstacle(pipeline, name) if isinstance(pipeline, Pipeline) else None
        if obstacle is not None:
            yield name, obstacle


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
