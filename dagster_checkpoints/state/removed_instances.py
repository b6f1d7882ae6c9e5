"""The instances that a pipeline does not have any more: the transactions and rows of their sinks belong to the job all the same.

Sinks know instances by their index. Must not know: storage, sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from dagster_checkpoints.state.metadata import CheckpointMetadata, StageInstanceSnapshot, StageMetadata
from dagster_checkpoints.state.rescaled_instances import part_of
from dagster_checkpoints.state.views import PipelineView


@dataclass(frozen=True, slots=True)
class RemovedInstance:
    """An instance that the pipeline does not have any more, of a stage with a sink.

    Attributes:
        stage: name of the stage.
        index: its index, by which its sink is known.
        name: its name.
        parallelism: the number of instances that the stage had.
        snapshot: its part of the checkpoint, whose transactions have to be committed.
    """

    stage: str
    index: int
    name: str
    parallelism: int
    snapshot: StageInstanceSnapshot


def removed_instances(
    pipeline: PipelineView, metadata: CheckpointMetadata, recorded: Mapping[str, StageMetadata]
) -> Iterator[RemovedInstance]:
    """The instances beyond the number that a stage has now: sinks know instances by their index."""
    now = {stage.name: len(stage.instances) for stage in pipeline.stages}
    for chain in metadata.chains:
        tail = recorded[chain.stages[-1]]
        most = max(tail.parallelism, tail.most_instances)
        for index in range(now.get(tail.name, most), most):
            task = chain.tasks.get(index)
            snapshot = part_of(task, tail.name)
            name = tail.instances[index] if index < tail.parallelism else str(index)
            yield RemovedInstance(tail.name, index, name, most, snapshot)


def with_most_instances(metadata: CheckpointMetadata, now: Mapping[str, int]) -> CheckpointMetadata:
    """The checkpoint, with the largest number of instances of stages that have fewer now."""
    most = {stage.name: max(stage.parallelism, stage.most_instances) for stage in metadata.stages}
    stages = [
        msgspec.structs.replace(stage, most_instances=most[stage.name] if most[stage.name] > now.get(stage.name, 0) else 0)
        for stage in metadata.stages
    ]
    return msgspec.structs.replace(metadata, stages=tuple(stages))
