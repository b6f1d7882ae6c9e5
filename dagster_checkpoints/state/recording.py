"""The record of a pipeline's layout in a checkpoint: its chains with the snapshots of their tasks, and its stages.

Must not know: storage, Spark, the content of the tasks' snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import ChainMetadata, StageMetadata, TaskSnapshot
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


def recorded_stages(pipeline: PipelineView, chains: Sequence[Chain], finished: Collection[TaskId]) -> tuple[StageMetadata, ...]:
    """The stages with their inputs, and which of their instances have finished.

    Args:
        pipeline: the pipeline that runs.
        chains: all its chains.
        finished: the tasks that had finished when the checkpoint was triggered.
    """
    indices = {name: tuple(t.index for t in _tasks(chain) if t in finished) for chain in chains for name in chain.stages}
    inputs = recorded_inputs(pipeline)
    return tuple(
        StageMetadata(
            name=stage.name,
            parallelism=len(stage.instances),
            instances=tuple(stage.instances),
            finished=indices[stage.name],
            fully_finished=len(indices[stage.name]) == len(stage.instances),
            inputs=inputs[stage.name],
        )
        for stage in pipeline.stages
    )


def _tasks(chain: Chain) -> list[TaskId]:
    return [TaskId(chain.name, index) for index in range(len(chain.instances))]
