"""A checkpoint on its way to the pipeline that is to run: the value that each rule of a restore takes and may rewrite.

Must not know: the rules, storage, Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dagster_checkpoints.pipeline import Stage, TaskId
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
)
from dagster_checkpoints.state.views import EdgeView, PipelineView


@dataclass(frozen=True, slots=True)
class KeyedStateShare:
    """The keyed state with which an instance of a rescaled stage begins.

    Attributes:
        groups: the key groups that the instance owns.
        number: the number of all key groups.
        key: the column of the inputs by which rows were routed to the instances, or are now.
        logs: the old instance whose query the instance continues.
        queries: by old instance that held some of these groups, its query.
        held: by old instance, the key groups that it owned.
        whole_partitions: whether each key group is a state partition, so that state can be moved by partition, not row by row.
    """

    groups: range
    number: int
    key: str
    logs: int
    queries: Mapping[int, QuerySnapshot]
    held: Mapping[int, range]
    whole_partitions: bool = False


@dataclass(frozen=True, slots=True)
class SettledInstance:
    """An instance of a stage with a sink that does not run, or that the pipeline does not have any more under its number: before
    tasks start, its sink is made to show exactly the rows of the checkpoint.

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


@dataclass(frozen=True)
class FittedCheckpoint:
    """A checkpoint, as the rules of a restore have rewritten it so far for the pipeline that is to run.

    Attributes:
        pipeline: the pipeline that is to run.
        metadata: the checkpoint; at first as stored. The query of a task in `shares` names the files of the old query that it
            continues.
        allow_non_restored_state: whether state of stages and sinks that the pipeline does not have is left behind, not refused.
        max_parallelism: by stage, the number of key groups that the user has set; behind the rule `with_key_groups` that of each
            stage which runs.
        changes: by rule that changed something, a line that says what.
        taken: the checkpoint with the instances that it was taken with; None before the rule that gives it the present ones.
        shares: by task, the keyed state with which it begins, if its instances share that of others.
        removed: the instances that are gone, and those whose number an instance has now that had finished.
        ending: (stage, instance) of the sources that requests had ended: they end again.
    """

    pipeline: PipelineView
    metadata: CheckpointMetadata
    allow_non_restored_state: bool = False
    max_parallelism: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    taken: CheckpointMetadata | None = None
    shares: Mapping[TaskId, KeyedStateShare] = field(default_factory=dict)
    removed: tuple[SettledInstance, ...] = ()
    ending: frozenset[tuple[str, str]] = frozenset()

    def changed(self, rule: str, what: Iterable[str], metadata: CheckpointMetadata | None = None) -> FittedCheckpoint:
        """The value that a rule returns which has changed something, with the line that says so.

        Args:
            rule: the name of the change, with which the line begins.
            what: what has changed, in words; without any there is no line.
            metadata: the checkpoint now; None if it is the same.
        """
        said = "; ".join(what)
        return replace(self, metadata=metadata or self.metadata, changes=(*self.changes, *([f"{rule}: {said}."] if said else [])))

    @property
    def where(self) -> str:
        """The checkpoint, for the text of errors."""
        return f"checkpoint {self.metadata.checkpoint_id} of pipeline {self.metadata.pipeline!r}"

    @cached_property
    def recorded(self) -> Mapping[str, StageMetadata]:
        """The stages of the checkpoint, by name."""
        return {stage.name: stage for stage in self.metadata.stages}

    @cached_property
    def instances(self) -> Mapping[str, tuple[str, ...]]:
        """By stage of the pipeline, the names of its instances."""
        return {stage.name: stage.instances for stage in self.pipeline.stages}

    @cached_property
    def uids(self) -> Mapping[str, str]:
        """By stage of the pipeline, its uid."""
        return {stage.name: stage.uid for stage in self.pipeline.stages}

    @cached_property
    def edges_into(self) -> Mapping[str, list[EdgeView]]:
        """By stage of the pipeline that reads others, its inputs."""
        found: dict[str, list[EdgeView]] = {}
        for edge in self.pipeline.edges:
            found.setdefault(edge.target, []).append(edge)
        return found

    @cached_property
    def stages_of_refused_rows(self) -> frozenset[str]:
        """The stages of the pipeline that commit the rows which a quarantine refuses."""
        return frozenset(each.name for each in self.pipeline.stages if isinstance(each, Stage) and each.takes_refused_rows)

    @property
    def new_stages(self) -> tuple[str, ...]:
        """The stages that the checkpoint does not hold."""
        return tuple(name for name in self.instances if name not in self.recorded)

    @property
    def removed_stages(self) -> tuple[str, ...]:
        """The recorded stages that the pipeline does not have."""
        return tuple(name for name in self.recorded if name not in self.instances)

    @property
    def running(self) -> list[ChainMetadata]:
        """The recorded chains of which a stage is to run again, or would be if the pipeline had it."""
        return [c for c in self.metadata.chains if not self.has_finished(c) and not set(c.stages) <= set(self.removed_stages)]

    def has_finished(self, chain: ChainMetadata) -> bool:
        """Whether all stages of a recorded chain have fully finished."""
        return all(self.recorded[name].fully_finished for name in chain.stages)


def quoted(names: Iterable[str]) -> str:
    """Names as a text for people."""
    return ", ".join(map(repr, names))
