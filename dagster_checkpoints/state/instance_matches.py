"""Which instances of a pipeline are which ones of a checkpoint.

Instances of sources, and of stages that read one instance of these each, are matched by **name**. Instances of other stages share
state and rows, so that with other numbers of instances none of them is one of the old ones. Must not know: storage, Spark, state.

Source: PROTOCOL 8.3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dagster_checkpoints.pipeline import EdgePattern
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.views import EdgeView


@dataclass(frozen=True, slots=True)
class InstanceMatch:
    """Which present instances of a stage are which ones of the checkpoint.

    Attributes:
        before: number of its instances in the checkpoint.
        origins: by present instance, the old one that it is; None for one that is none of them.
        shares_rows: whether the instances share rows and state, so that none of them is an old one.
        any_sender: whether each present instance may send what any old one would have sent.
    """

    before: int
    origins: tuple[int | None, ...]
    shares_rows: bool = False
    any_sender: bool = False

    @property
    def now(self) -> int:
        """The number of present instances."""
        return len(self.origins)

    def present(self, old: int) -> int | None:
        """The present instance that sends on the channels of an old one; None if there is none."""
        if self.shares_rows:
            return old if old < self.now else None
        return self.origins.index(old) if old in self.origins else None


class InstanceMatches:
    """The matches of all stages of a pipeline.

    Args:
        checkpoint: the checkpoint, with the pipeline that is to run.
        changed: the stages that run and whose instances have changed.
    """

    def __init__(self, checkpoint: FittedCheckpoint, changed: Collection[str]) -> None:
        self._recorded = checkpoint.recorded
        self._changed = changed
        self._now = checkpoint.instances
        self._heads = {name: chain.stages[0] for chain in checkpoint.metadata.chains for name in chain.stages}
        self._reads = checkpoint.edges_into

    def by_name(self, stage: str) -> bool:
        """Whether the instances of a stage are matched by name: those of a source, and of a stage that reads one of them each."""
        reads = self._reads.get(self._heads[stage], ())
        streams = [edge for edge in reads if edge.input.mode == "stream"]
        return not reads or (bool(streams) and all(self._one_to_one(edge) and self.by_name(edge.source) for edge in streams))

    def _one_to_one(self, edge: EdgeView) -> bool:
        source, target = (self._recorded.get(name) for name in (edge.source, edge.target))
        same = self._now[edge.source] == self._now[edge.target]
        return (
            edge.pattern is EdgePattern.POINTWISE
            and same
            and source is not None
            and target is not None
            and source.instances == target.instances
        )

    def origins(self, stage: str) -> tuple[int | None, ...]:
        """By present instance of a stage that is matched by name, its index in the checkpoint; None for a new one."""
        before = self._recorded[stage].instances
        return tuple(before.index(name) if name in before else None for name in self._now[stage])

    def of(self, stage: str) -> InstanceMatch:
        """The match of a stage."""
        known = self._recorded.get(stage)
        if known is None:
            return InstanceMatch(0, (None,) * len(self._now[stage]))
        if stage in self._changed and not self.by_name(stage):
            return InstanceMatch(len(known.instances), (None,) * len(self._now[stage]), shares_rows=True, any_sender=True)
        shared = stage in self._changed and known.enumerator is not None
        return InstanceMatch(len(known.instances), self.origins(stage), any_sender=shared)
