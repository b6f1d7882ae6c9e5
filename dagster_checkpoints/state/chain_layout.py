"""Whether the stages of a recorded chain can run as one query again: state belongs to the plan of that query.

Must not know: storage, Spark, tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dagster_checkpoints.pipeline import Pipeline, chain_obstacle, fused_sources, fusing_obstacle, links
from dagster_checkpoints.state.errors import ChainLayoutChanged
from dagster_checkpoints.state.metadata import ChainMetadata, StageMetadata
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
    changed = changed_input(reads, chain)
    if changed is not None:
        upstream, name = changed
        raise ChainLayoutChanged(
            f"In {where} the stages {layout} run as one Spark query, in which {name!r} reads {upstream!r} and nothing else; "
            f"now {name!r} reads {_names(reads.get(name, ())) or 'nothing'}. Spark's state belongs to the plan of that query. "
            "Restore the stages' order, or start without this checkpoint."
        )
    for _, change in changes_inside(pipeline, reads, chain, recorded):
        fused = fused_in_chain(reads, chain)
        sources = f"the sources {_names(fused)} share one query with their reader" if fused else "a stage would read other rows"
        raise ChainLayoutChanged(
            f"In {where} the stages {layout} run as one Spark query; now {change}. The query's state cannot be divided for that: "
            f"{obstacle or sources}. Take the change back, or start the pipeline without this checkpoint (restore_from: none). "
            "With Pipeline(..., chaining=False) from that start on, each stage has a query of its own."
        )


def missing_stages(pipeline: PipelineView, chain: ChainMetadata) -> list[str]:
    """The stages of a chain that the pipeline does not have."""
    present = {stage.name for stage in pipeline.stages}
    return [name for name in chain.stages if name not in present]


def changed_input(reads: Reads, chain: ChainMetadata) -> tuple[str, str] | None:
    """The first stage of the chain that does not read only its predecessor any more, after that predecessor; None without one.

    The predecessors of a stage behind fused sources are all of these.
    """
    pairs = links(chain.stages, fused_in_chain(reads, chain))
    read = {name: sorted(upstream for upstream, reader in pairs if reader == name) for _, name in pairs}
    return next(((upstream, name) for upstream, name in pairs if sorted(reads.get(name, ())) != read[name]), None)


def changes_inside(
    pipeline: PipelineView, reads: Reads, chain: ChainMetadata, recorded: Mapping[str, StageMetadata]
) -> Iterator[tuple[str, str]]:
    """The stages of a chain that cannot run in the query of their predecessor any more, each with the change in words."""
    fused = fused_in_chain(reads, chain)
    pairs = links(chain.stages, fused)
    followed_by = dict(pairs)
    for edge in pipeline.edges:
        if edge.source in followed_by and edge.target != followed_by[edge.source]:
            what = "reads" if edge.target in recorded else "is new, and reads"
            yield followed_by[edge.source], f"{edge.target!r} {what} {edge.source!r}, whose rows do not leave that query"
    for name in dict.fromkeys(followed_by.values()):
        obstacle_of = fusing_obstacle if chain.stages.index(name) == len(fused) else chain_obstacle
        obstacle = obstacle_of(pipeline, name) if isinstance(pipeline, Pipeline) else None
        if obstacle is not None:
            yield name, obstacle


def fused_in_chain(reads: Reads, chain: ChainMetadata) -> tuple[str, ...]:
    """The fused sources with which a recorded chain begins."""
    return fused_sources(chain.stages, lambda name: name not in reads)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
