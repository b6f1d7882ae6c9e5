"""Whether a checkpoint fits a pipeline, and the plan of the restore: the rules of a restore, in their order.

All rules are applied before any task starts (PROTOCOL 8.1). Must not know: storage, Spark, tasks.

Source: FLIP-147; Flink's VertexFinishedStateChecker and StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.divided_chains import (
    ChainPart,
    changed_input,
    changes_inside,
    check_layouts,
    divided,
    reads_of,
    recorded_reads,
)
from dagster_checkpoints.state.errors import PartlyFinishedUnionState
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint, KeyedStateShare, SettledInstance, quoted
from dagster_checkpoints.state.inputs import check_inputs
from dagster_checkpoints.state.key_groups import check_state_partitions, with_key_groups
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata, EnumeratorState, TaskSnapshot
from dagster_checkpoints.state.rescaled_checkpoint import with_instances
from dagster_checkpoints.state.stage_changes import (
    check_finished_stages,
    check_new_stages,
    check_removed_stages,
    check_sinks,
    check_split_sources,
    with_ended_sources,
)
from dagster_checkpoints.state.stage_names import with_names
from dagster_checkpoints.state.stages_between import with_stages_between
from dagster_checkpoints.state.views import PipelineView

Rule = Callable[[FittedCheckpoint], FittedCheckpoint | None]
"""A rule of a restore. It returns the checkpoint as it has rewritten it, with a line that says what has changed; None if it has
nothing to change. It raises a `RestoreError` for what it refuses."""

LAYOUT_RULES: tuple[Rule, ...] = (with_names, with_stages_between, divided)
"""The rules that make the checkpoint one of the stages, and of the queries, that the pipeline has now. They refuse nothing."""

RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    check_finished_stages,
    check_removed_stages,
    check_sinks,
    check_state_partitions,
    with_ended_sources,
    with_instances,
    with_key_groups,
    check_layouts,
    check_inputs,
    check_split_sources,
    check_new_stages,
)
"""All rules, in order: those in front of `with_instances` read the checkpoint as it was taken, those behind it the one that the
present instances would have taken."""


@dataclass(frozen=True)
class RestorePlan:
    """The plan of a restore: the chains and tasks to start, and their states.

    Attributes:
        metadata: the checkpoint, in the names, queries and instances that the pipeline has now, which the other attributes
            describe. The query of a task in `shares` names the files of the old query that it continues.
        chains: the recorded chains to build again, in order, without those that have fully finished or that the pipeline does
            not have any more.
        finished_chains: chains that have fully finished; they stay in the execution graph, so that the next
            checkpoint records them again. These are the recorded chains, or their single stages if the pipeline has
            changed them: no task runs in them, so their layout has no effect.
        new_stages: stages that the checkpoint does not hold; they start without state, in chains that the caller builds.
        fully_finished: stages that are not run again; consumers see their channels as ended.
        finished: tasks that are not run again, those of `finished_chains` included.
        after_finish: tasks that had finished their operators and wait for the final checkpoint.
        tasks: by unfinished task, the snapshot that it is restored from.
        dropped: recorded stages that the pipeline does not have; their state is not restored.
        enumerators: by stage, the state of the enumerator of a source's splits.
        max_parallelism: by stage that runs, its number of key groups: the recorded one, which never changes. The next
            checkpoint has to record it again.
        divided: by chain that is a part of a recorded chain, the stages of the recorded one.
        shares: by task, the keyed state with which it begins, if its instances share that of others.
        removed: the instances that are gone, and those whose number an instance has now that had finished.
        changes: what becomes of the state where the pipeline has changed: a line for each rule that changed something.
        ending: (stage, instance) of the sources that requests had ended before the checkpoint: they end again.
    """

    metadata: CheckpointMetadata
    chains: tuple[tuple[str, ...], ...] = ()
    finished_chains: tuple[tuple[str, ...], ...] = ()
    new_stages: tuple[str, ...] = ()
    fully_finished: frozenset[str] = frozenset()
    finished: frozenset[TaskId] = frozenset()
    after_finish: frozenset[TaskId] = frozenset()
    tasks: Mapping[TaskId, TaskSnapshot] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    enumerators: Mapping[str, EnumeratorState] = field(default_factory=dict)
    max_parallelism: Mapping[str, int] = field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shares: Mapping[TaskId, KeyedStateShare] = field(default_factory=dict)
    removed: tuple[SettledInstance, ...] = ()
    changes: tuple[str, ...] = ()
    ending: frozenset[tuple[str, str]] = frozenset()

    @property
    def checkpoint_id(self) -> int:
        """Id of the restored checkpoint."""
        return self.metadata.checkpoint_id

    @property
    def next_checkpoint_id(self) -> int:
        return self.checkpoint_id + 1


def fitted(pipeline: PipelineView, metadata: CheckpointMetadata) -> CheckpointMetadata:
    """The stored checkpoint with the names of the pipeline's stages, and with chains divided where the pipeline needs it.

    Args:
        pipeline: the pipeline that is to run.
        metadata: the metadata as stored.
    """
    return _applied(LAYOUT_RULES, FittedCheckpoint(pipeline, metadata)).metadata


def validate_restore(
    pipeline: PipelineView,
    metadata: CheckpointMetadata,
    allow_non_restored_state: bool = False,
    *,
    max_parallelism: Mapping[str, int] = MappingProxyType({}),
) -> RestorePlan:
    """Check that the checkpoint fits the pipeline and plan the restore.

    Args:
        pipeline: the pipeline that is to run.
        metadata: the metadata of the checkpoint as stored.
        allow_non_restored_state: whether state of stages and sinks that the pipeline does not have is dropped instead of refused.
        max_parallelism: by stage, the value that the user has set; other stages take the recorded value, or the default.

    Raises:
        UnfinishedPredecessor: a finished stage would get new input.
        NonRestoredState: the checkpoint holds state of a stage that the pipeline does not have.
        SinkRemoved: a stage has no sink any more, and the checkpoint holds rows for it.
        InstancesChanged: a stage has other instances than in the checkpoint, and they cannot get what belongs to them.
        ChainLayoutChanged: a recorded chain cannot be built again, or another stage reads rows that do not leave it.
        InputsChanged: a stage reads other stages, or reads them in another way.
        InputRowsGone: a new stage reads rows that were emitted before the checkpoint.
        InvalidMaxParallelism: a maximum parallelism is set that is out of range.
        MaxParallelismChanged: another one is set than the checkpoint was taken with.
        StatePartitionsChanged: a stage has another number of state partitions than the checkpoint was taken with.
        ParallelismTooHigh: a stage has more instances than key groups.
        SourcesChanged: a source is read in splits, and was not, or the other way round.
    """
    checkpoint = _applied(RULES, FittedCheckpoint(pipeline, metadata, allow_non_restored_state, max_parallelism))
    metadata, recorded, instances = checkpoint.metadata, checkpoint.recorded, checkpoint.instances
    running, finished_chains = checkpoint.running, tuple(_finished_chains(checkpoint))
    finished = {TaskId(c.name, i) for c in running for i in recorded[c.stages[-1]].finished}
    finished |= {TaskId(stages[0], i) for stages in finished_chains for i in range(len(instances[stages[0]]))}
    tasks = {TaskId(c.name, i): task for c in running for i, task in sorted(c.tasks.items())}
    present = [stage for stage in metadata.stages if stage.name in instances]
    return RestorePlan(
        metadata=metadata,
        chains=tuple(c.stages for c in running),
        finished_chains=finished_chains,
        new_stages=checkpoint.new_stages,
        fully_finished=frozenset(stage.name for stage in present if stage.fully_finished),
        finished=frozenset(finished),
        after_finish=frozenset(task for task, snapshot in tasks.items() if snapshot.end_of_data == "drain"),
        tasks=tasks,
        dropped=checkpoint.removed_stages,
        enumerators={stage.name: stage.enumerator for stage in present if stage.enumerator is not None},
        max_parallelism=checkpoint.max_parallelism,
        divided={c.name: c.whole for c in running if isinstance(c, ChainPart)},
        shares=checkpoint.shares,
        removed=checkpoint.removed,
        changes=checkpoint.changes,
        ending=checkpoint.ending,
    )


def _applied(rules: Iterable[Rule], checkpoint: FittedCheckpoint) -> FittedCheckpoint:
    for rule in rules:
        checkpoint = rule(checkpoint) or checkpoint
    return checkpoint


def _finished_chains(checkpoint: FittedCheckpoint) -> Iterator[tuple[str, ...]]:
    """The recorded chains that have finished, or their single stages where the pipeline has changed them."""
    reads = reads_of(checkpoint)
    for chain in filter(checkpoint.has_finished, checkpoint.metadata.chains):
        present = [name for name in chain.stages if name in checkpoint.instances]
        alike = len(present) == len(chain.stages) and len({checkpoint.instances[name] for name in present}) == 1
        before = recorded_reads(checkpoint, chain)
        whole = alike and changed_input(reads, before) is None and not any(changes_inside(checkpoint, before))
        yield from [chain.stages] if whole else [(name,) for name in present]


def check_union_states(metadata: CheckpointMetadata) -> None:
    """Refuse a checkpoint in which some instances of a stage with union list state have finished, or would finish by it.

    A union state is complete only with the parts of all instances, and the parts of finished instances are not stored any more.
    Nor may a checkpoint let some instances finish while others run: every later one would have to be refused. To be called
    before the metadata is written; the checkpoint is then declined. An instance that finishes with a savepoint is restored from
    it, too.

    Raises:
        PartlyFinishedUnionState: names the stage, the state and the finished instances.
    """
    recorded = {stage.name: stage for stage in metadata.stages}
    for chain in metadata.chains:
        leaving = {index for index, task in chain.tasks.items() if task.end_of_data == "drain"}
        for name, union in _union_states(chain).items():
            stage = recorded[name]
            gone = sorted({*stage.finished, *leaving} if metadata.kind == "checkpoint" else stage.finished)
            if (stage.finished and not stage.fully_finished) or 0 < len(gone) < stage.parallelism:
                ended = quoted(stage.instances[index] for index in gone)
                raise PartlyFinishedUnionState(
                    f"Stage {name!r} has the union list state {union!r}, and its instances {ended} have finished while "
                    f"others run. What they held is part of the union, so checkpoint {metadata.checkpoint_id} is declined; the "
                    "next one after all instances have finished can complete. Use list or broadcast state if a part suffices."
                )


def _union_states(chain: ChainMetadata) -> dict[str, str]:
    """By stage, the name of one of its union list states."""
    return {
        name: state.name
        for task in chain.tasks.values()
        for name, snapshot in task.stages.items()
        for state in snapshot.operator_states
        if state.kind == "union"
    }
