"""The record of a pipeline's layout in a checkpoint: its chains with the snapshots of their tasks, and its stages.

Must not know: storage, Spark, the content of the tasks' snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import ChainMetadata, EnumeratorState, StageMetadata, TaskSnapshot
from dagster_checkpoints.state.views import PipelineView


def recorded_chains(chains: Sequence[Chain], snapshots: Mapping[TaskId, TaskSnapshot]) -> tuple[ChainMetadata, ...]:
    """The chains, with the snapshots of their unfinished tasks.

    Args:
        chains: all chains of the pipeline, those that have finished included.
        snapshots: by unfinished task, the snapshot that it has acknowledged.
    """
    return tuple(
        ChainMetadata(chain.name, chain.stages, {task.index: snapshots[task] for task in _tasks(chain) if task in snapshots})
        for chain in chains
    )


def recorded_stages(
    pipeline: PipelineView,
    chains: Sequence[Chain],
    finished: Collection[TaskId],
    ended_sources: Collection[str] = (),
    key_groups: Mapping[str, int] = MappingProxyType({}),
    enumerators: Mapping[str, EnumeratorState] = MappingProxyType({}),
    ending: Collection[tuple[str, str]] = (),
) -> tuple[StageMetadata, ...]:
    """The stages with their inputs, and which of their instances have finished.

    Args:
        pipeline: the pipeline that runs.
        chains: all its chains.
        finished: the tasks that had finished when the checkpoint was triggered.
        ended_sources: the fused sources that have ended in a task which has not finished, see `ended_sources`.
        key_groups: by stage whose rows are routed by key, its number of key groups.
        enumerators: by split source, its enumerator, see `recorded_enumerators`.
        ending: (stage, instance) of the sources that requests have ended.
    """
    indices = {name: tuple(t.index for t in _tasks(chain) if t in finished) for chain in chains for name in chain.stages}
    indices.update(dict.fromkeys(ended_sources, (0,)))  # a fused source has one instance
    inputs = recorded_inputs(pipeline)
    return tuple(
        StageMetadata(
            name=stage.name,
            parallelism=len(stage.instances),
            instances=tuple(stage.instances),
            finished=indices[stage.name],
            fully_finished=len(indices[stage.name]) == len(stage.instances),
            max_parallelism=key_groups.get(stage.name, stage.state_partitions or 0),
            inputs=inputs[stage.name],
            enumerator=enumerators.get(stage.name),
            state_partitions=stage.state_partitions or 0,
            ending=tuple(
                name for n, name in enumerate(stage.instances) if (stage.name, name) in ending and n not in indices[stage.name]
            ),
        )
        for stage in pipeline.stages
    )


def ended_sources(snapshots: Iterable[TaskSnapshot]) -> frozenset[str]:
    """The fused sources that have ended in these tasks: their stages have finished with the checkpoint."""
    return frozenset(name for snapshot in snapshots for name in snapshot.ended_sources)


def recorded_enumerators(
    taken: Mapping[str, EnumeratorState], snapshots: Mapping[TaskId, TaskSnapshot]
) -> dict[str, EnumeratorState]:
    """The enumerators of a checkpoint, by source.

    An enumerator's own state is that of the trigger. What its instances had read when the barrier came is in their snapshots: an
    assigned split that no snapshot holds was read to its end in front of the barrier.

    Args:
        taken: by source, its enumerator when the checkpoint was triggered.
        snapshots: by unfinished task, the snapshot that it has acknowledged.
    """
    held = {stage: {s for task, of in snapshots.items() if task.vertex == stage for s in of.splits} for stage in taken}
    return {
        stage: EnumeratorState(
            state.discovered,
            tuple(split for split in state.assigned if split in held[stage]),
            (*state.finished, *(split for split in state.assigned if split not in held[stage])),
            state.complete,
        )
        for stage, state in taken.items()
    }


def _tasks(chain: Chain) -> list[TaskId]:
    return [TaskId(chain.name, index) for index in range(len(chain.instances))]
