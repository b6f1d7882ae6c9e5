"""Stages that were put between two others, or taken out from between them, since the checkpoint.

A stage then reads another stage than it did. Its state still fits if the rows reach its instances as before: over the same
pattern and by the same key, and the stages between keep the rows of an instance together where the pattern does. And nothing may
be on its way: such records have passed the old stages, or have still to pass those that are gone. Must not know: storage, Spark,
tasks.

Source: Flink restores state by `uid` of an operator, whatever stands in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata, InputMetadata, StageMetadata


class ReplacedInput(InputMetadata, frozen=True):
    """An input as it is now, in place of the recorded one; in memory only.

    Attributes:
        before: the stage that was read.
        origin: the stage that both ways come from.
        between: the stages between it and the reader now, in order.
    """

    before: str = ""
    origin: str = ""
    between: tuple[str, ...] = ()


def with_stages_between(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """The checkpoint as if its stages had read what they read now, where only stages between them have come or gone; a rule."""
    metadata, changes = checkpoint.metadata, _Changes(checkpoint)
    stages = tuple(changes.stage(stage) for stage in metadata.stages)
    if stages == metadata.stages:
        return None
    replaced = {stage.name: replaced_inputs(stage) for stage in stages}
    chains = tuple(_without_old_channels(chain, replaced, checkpoint.uids) for chain in metadata.chains)
    read = (
        f"{name!r} keeps its state, and reads {each.stage!r} in place of {each.before!r}"
        for name, inputs in replaced.items()
        for each in inputs.values()
    )
    return checkpoint.changed("other inputs", read, msgspec.structs.replace(metadata, stages=stages, chains=chains))


def replaced_inputs(stage: StageMetadata) -> dict[str, ReplacedInput]:
    """The inputs of a stage in front of which stages have come or gone, by the stage that it reads now."""
    return {each.stage: each for each in stage.inputs or () if isinstance(each, ReplacedInput)}


def with_stages_now(stages: Sequence[str], metadata: CheckpointMetadata) -> tuple[str, ...]:
    """Recorded stages that follow each other, with those that have come between them."""
    replaced = {stage.name: replaced_inputs(stage) for stage in metadata.stages}
    found: list[str] = []
    for name in stages:
        found += [new for each in replaced[name].values() if each.origin in stages for new in each.between]
        found.append(name)
    return tuple(found)


class _Changes:
    """The inputs of stages that are not those of the checkpoint."""

    def __init__(self, checkpoint: FittedCheckpoint) -> None:
        self._recorded = checkpoint.recorded
        self._read = {stage.name: stage.inputs or () for stage in checkpoint.metadata.stages}
        self._now = recorded_inputs(checkpoint.pipeline)
        self._instances = checkpoint.instances
        self._uids = checkpoint.uids
        self._waiting = {
            (ChannelId.parse(saved.channel).producer, chain.name)
            for chain in checkpoint.metadata.chains
            for task in chain.tasks.values()
            for saved in task.channels
            if saved.in_flight
        }
        """The uid of a producer, and the name of a stage on whose channels from it elements are in flight."""

    def stage(self, stage: StageMetadata) -> StageMetadata:
        """The stage with its present inputs in place of the recorded ones."""
        if stage.inputs is None or stage.fully_finished or self._instances.get(stage.name) != stage.instances:
            return stage
        left = [each for each in self._now[stage.name] if each not in stage.inputs]
        inputs = []
        for known in stage.inputs:
            found = [] if known in self._now[stage.name] else [self._replaced(stage, known, each) for each in left]
            fitting = [each for each in found if each is not None]
            inputs.append(fitting[0] if len(fitting) == 1 else known)
            left = [each for each in left if each.stage != inputs[-1].stage]
        return msgspec.structs.replace(stage, inputs=tuple(inputs))

    def _replaced(self, reader: StageMetadata, before: InputMetadata, now: InputMetadata) -> ReplacedInput | None:
        """The present input in place of a recorded one; None if more than stages between two others have come or gone."""
        if before.mode != "stream" or msgspec.structs.replace(now, stage=before.stage) != before:
            return None
        new = _way(now, self._now, lambda name: name not in self._recorded)
        old = _way(before, self._read, lambda name: name not in self._instances)
        if not new or not old or new[-1].stage != old[-1].stage or self._waits(reader.name, old):
            return None
        fits = before.pattern == "all_to_all" or reader.parallelism == 1
        if not fits:
            links = (*new, *old)
            fits = all(each.pattern == "pointwise" and self._parallelism(each.stage) == reader.parallelism for each in links)
        between = tuple(each.stage for each in reversed(new[:-1]))
        origin = new[-1].stage
        return ReplacedInput(now.stage, now.mode, now.pattern, now.key, before.stage, origin, between) if fits else None

    def _waits(self, reader: str, way: Sequence[InputMetadata]) -> bool:
        """Whether elements are in flight on channels that are gone."""
        readers = (reader, *(each.stage for each in way))
        return any(
            (self._uids.get(each.stage, each.stage), name) in self._waiting for each, name in zip(way, readers, strict=False)
        )

    def _parallelism(self, stage: str) -> int:
        return len(self._instances[stage] if stage in self._instances else self._recorded[stage].instances)


def _way(
    last: InputMetadata, inputs: Mapping[str, Sequence[InputMetadata]], between: Callable[[str], bool]
) -> list[InputMetadata]:
    """The inputs on the way back from a reader, up to the first stage that is not between; empty if the ways are several."""
    way = [last]
    while between(way[-1].stage):
        streams = [each for each in inputs[way[-1].stage] if each.mode == "stream"]
        if len(streams) != 1:
            return []
        way += streams
    return way


def _without_old_channels(
    chain: ChainMetadata, replaced: Mapping[str, Mapping[str, ReplacedInput]], uids: Mapping[str, str]
) -> ChainMetadata:
    """The chain without what its tasks know of channels from stages that they do not read any more."""
    gone = {uids.get(each.before, each.before) for each in replaced[chain.stages[0]].values()}
    if not gone:
        return chain
    tasks = {
        index: msgspec.structs.replace(
            task, channels=tuple(saved for saved in task.channels if ChannelId.parse(saved.channel).producer not in gone)
        )
        for index, task in chain.tasks.items()
    }
    return msgspec.structs.replace(chain, tasks=tasks)
