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
    """An instance that the pipeline does not have any more under its number, of a stage with a sink.

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


def instances_of_finished_ones(before: CheckpointMetadata, now: CheckpointMetadata) -> Iterator[RemovedInstance]:
    """The instances whose number an instance has now that had finished: it has no task, which would commit their transactions.

    Args:
        before: the checkpoint as it was taken.
        now: the checkpoint with the present instances.
    """
    stages = {stage.name: stage for stage in before.stages}
    for old, new in zip(before.chains, now.chains, strict=True):
        tail = stages[old.stages[-1]]
        parallelism = next(stage.parallelism for stage in now.stages if stage.name == tail.name)
        for index, task in old.tasks.items():
            if index < parallelism and index not in new.tasks:
                yield RemovedInstance(tail.name, index, tail.instances[index], parallelism, part_of(task, tail.name))


def with_most_instances(metadata: CheckpointMetadata, now: Mapping[str, int]) -> CheckpointMetadata:
    """The checkpoint, with the largest number of instances of stages that have fewer now."""
    most = {stage.name: max(stage.parallelism, stage.most_instances) for stage in metadata.stages}
    stages = [
        msgspec.structs.replace(stage, most_instances=most[stage.name] if most[stage.name] > now.get(stage.name, 0) else 0)
        for stage in metadata.stages
    ]
    return msgspec.structs.replace(metadata, stages=tuple(stages))
