"""Whether a checkpoint fits a pipeline, and the plan of the restore.

All rules are checked before any task starts (PROTOCOL 8.1). Must not know: storage, Spark, tasks.

Source: FLIP-147; Flink's VertexFinishedStateChecker and StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from dagster_checkpoints.pipeline import EdgePattern, TaskId
from dagster_checkpoints.state.chain_layout import Reads, changed_input, changes_inside, check_layout, reads_of, recorded_reads
from dagster_checkpoints.state.divided_chains import ChainPart, divided, division_obstacle
from dagster_checkpoints.state.errors import (
    NonRestoredState,
    PartlyFinishedUnionState,
    UnfinishedPredecessor,
)
from dagster_checkpoints.state.inputs import check_inputs, check_new_stages, check_sinks
from dagster_checkpoints.state.key_groups import check_state_partitions_kept, chosen_max_parallelism
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    EnumeratorState,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.recording import sources_to_end
from dagster_checkpoints.state.rescaled_checkpoint import RescaledCheckpoint, rescale
from dagster_checkpoints.state.split_sources import check_split_sources
from dagster_checkpoints.state.stage_names import with_names
from dagster_checkpoints.state.stages_between import replaced_inputs, with_stages_between
from dagster_checkpoints.state.views import PipelineView


@dataclass(frozen=True)
class RestorePlan:
    """The plan of a restore: the chains and tasks to start, and their states.

    Attributes:
        checkpoint_id: id of the restored checkpoint; the next one is `next_checkpoint_id`.
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
        dropped: recorded stages that the pipeline does not have; their state is not restored, because
            `allow_non_restored_state` is set.
        enumerators: by stage, the state of the enumerator of a source's splits.
        max_parallelism: by stage that runs, its number of key groups: the recorded one, which never changes. The next
            checkpoint has to record it again.
        divided: by chain that is a part of a recorded chain, the stages of the recorded one.
        rescaled: the checkpoint for the instances that the pipeline has now, which the other attributes describe.
        ending: (stage, instance) of the sources that requests had ended before the checkpoint: they end again.
    """

    checkpoint_id: int
    chains: tuple[tuple[str, ...], ...]
    finished_chains: tuple[tuple[str, ...], ...]
    new_stages: tuple[str, ...]
    fully_finished: frozenset[str]
    finished: frozenset[TaskId]
    after_finish: frozenset[TaskId]
    tasks: Mapping[TaskId, TaskSnapshot]
    dropped: tuple[str, ...] = ()
    enumerators: Mapping[str, EnumeratorState] = field(default_factory=dict)
    max_parallelism: Mapping[str, int] = field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rescaled: RescaledCheckpoint | None = None
    ending: frozenset[tuple[str, str]] = frozenset()

    @property
    def next_checkpoint_id(self) -> int:
        return self.checkpoint_id + 1

    @property
    def changes(self) -> tuple[str, ...]:
        """In words, what becomes of the state where the pipeline has changed; empty if it has not."""
        found = []
        for whole in dict.fromkeys(self.divided.values()):
            parts = [" -> ".join(chain) for chain in self.chains if self.divided.get(chain[0]) == whole]
            found.append(f"The query of {' -> '.join(whole)} is divided, with its state, into {' and '.join(parts)}.")
        for stage in self.rescaled.metadata.stages if self.rescaled is not None else ():
            for each in replaced_inputs(stage).values():
                found.append(f"{stage.name!r} keeps its state, and reads {each.stage!r} in place of {each.before!r}.")
        if self.new_stages:
            begin = "begins" if len(self.new_stages) == 1 else "begin"
            found.append(f"The checkpoint has no state of {_names(self.new_stages)}, which {begin} without it.")
        if self.dropped:
            found.append(f"The state of {_names(self.dropped)} is left behind.")
        for name, instance in sorted(self.ending):
            found.append(f"{name!r} ({instance}) was asked to end before the checkpoint: it reads what is there, and ends.")
        return tuple(found)


def fitted(pipeline: PipelineView, metadata: CheckpointMetadata) -> CheckpointMetadata:
    """The stored checkpoint as the pipeline would have it: with the names of its stages, and chains divided where it needs that.

    Args:
        pipeline: the pipeline that is to run.
        metadata: the metadata as stored.
    """
    return divided(with_stages_between(with_names(metadata, pipeline), pipeline), pipeline)


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
        metadata: the metadata of the checkpoint, `fitted` to the pipeline.
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
    recorded = {stage.name: stage for stage in metadata.stages}
    where = f"checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r}"
    _check_finished(pipeline, recorded, _ended(metadata, recorded), where)
    dropped = _unclaimed(pipeline, metadata, allow_non_restored_state, where)
    if not allow_non_restored_state:
        check_sinks(pipeline, metadata, where)
    check_state_partitions_kept(pipeline.stages, recorded, where)
    taken, stages_then = metadata, recorded
    rescaled = rescale(pipeline, metadata)
    metadata = rescaled.metadata
    recorded = {stage.name: stage for stage in metadata.stages}
    key_groups = _key_groups(pipeline, recorded, max_parallelism)
    running = [c for c in metadata.chains if not set(c.stages) <= set(dropped) and not _has_finished(c, recorded)]
    reads = reads_of(pipeline)
    for chain in running:
        check_layout(pipeline, reads, chain, recorded, division_obstacle(chain), where)
    check_inputs(pipeline, recorded, where)
    check_split_sources(pipeline, recorded, where)
    check_new_stages(pipeline, taken, stages_then, where)  # a stage with other instances has none that has finished
    finished_chains = _finished_chains(pipeline, reads, metadata, recorded)
    instances = {stage.name: len(stage.instances) for stage in pipeline.stages}
    finished = {TaskId(c.name, i) for c in running for i in recorded[c.stages[-1]].finished}
    finished |= {TaskId(stages[0], i) for stages in finished_chains for i in range(instances[stages[0]])}
    tasks = {TaskId(c.name, i): task for c in running for i, task in sorted(c.tasks.items())}
    return RestorePlan(
        checkpoint_id=metadata.checkpoint_id,
        chains=tuple(c.stages for c in running),
        finished_chains=finished_chains,
        new_stages=tuple(name for name in instances if name not in recorded),
        fully_finished=frozenset(s.name for s in metadata.stages if s.fully_finished and s.name in instances),
        finished=frozenset(finished),
        after_finish=frozenset(task for task, snapshot in tasks.items() if snapshot.end_of_data == "drain"),
        tasks=tasks,
        dropped=dropped,
        enumerators=_enumerators(metadata, instances),
        divided={c.name: c.whole for c in running if isinstance(c, ChainPart)},
        max_parallelism=key_groups,
        rescaled=rescaled,
        ending=sources_to_end(pipeline, taken.stages),
    )


def _enumerators(metadata: CheckpointMetadata, instances: Mapping[str, int]) -> dict[str, EnumeratorState]:
    return {s.name: s.enumerator for s in metadata.stages if s.enumerator is not None and s.name in instances}


def _has_finished(chain: ChainMetadata, recorded: Mapping[str, StageMetadata]) -> bool:
    return all(recorded[name].fully_finished for name in chain.stages)


def _finished_chains(
    pipeline: PipelineView, reads: Reads, metadata: CheckpointMetadata, recorded: Mapping[str, StageMetadata]
) -> tuple[tuple[str, ...], ...]:
    instances = {stage.name: stage.instances for stage in pipeline.stages}
    found: list[tuple[str, ...]] = []
    for chain in metadata.chains:
        if _has_finished(chain, recorded):
            present = [name for name in chain.stages if name in instances]
            alike = len(present) == len(chain.stages) and len({instances[name] for name in present}) == 1
            before = recorded_reads(chain, recorded)
            whole = alike and changed_input(reads, before) is None and not any(changes_inside(pipeline, before, recorded))
            found += [chain.stages] if whole else [(name,) for name in present]
    return tuple(found)


def _ended(metadata: CheckpointMetadata, recorded: Mapping[str, StageMetadata]) -> dict[str, int]:
    """By stage, the number of instances that emit no more rows: they have finished, or wait after their end of data."""
    ended = {name: len(stage.finished) for name, stage in recorded.items()}
    for chain in metadata.chains:
        waiting = sum(task.end_of_data == "drain" for task in chain.tasks.values())
        for name in chain.stages:
            ended[name] += waiting
    return ended


def _check_finished(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], ended: Mapping[str, int], where: str) -> None:
    patterns: dict[tuple[str, str], EdgePattern] = {}
    for edge in pipeline.edges:
        # If two edges connect the same stages, the stricter rule of ALL_TO_ALL applies.
        if edge.pattern is EdgePattern.ALL_TO_ALL or (edge.source, edge.target) not in patterns:
            patterns[edge.source, edge.target] = edge.pattern
    for (source, target), pattern in patterns.items():
        stage = recorded.get(target)
        if stage is None or not (stage.finished or stage.fully_finished):
            continue
        upstream = recorded.get(source)
        fully = upstream is not None and (upstream.fully_finished or ended[source] >= upstream.parallelism)
        partly = upstream is not None and ended[source] > 0
        if fully or (partly and not stage.fully_finished and pattern is EdgePattern.POINTWISE):
            continue
        raise UnfinishedPredecessor(_finished_message(stage, source, upstream, pattern, where))


def _finished_message(stage: StageMetadata, source: str, upstream: StageMetadata | None, pattern: EdgePattern, where: str) -> str:
    state = "fully finished" if stage.fully_finished else f"partly finished (instances {_list(stage.finished)})"
    needs_all = stage.fully_finished or pattern is EdgePattern.ALL_TO_ALL
    expected = "fully finished" if needs_all else "at least partly finished"
    if upstream is None:
        found = "is not in the checkpoint, so it would run from its beginning"
    elif upstream.finished:
        found = f"is only partly finished (instances {_list(upstream.finished)})"
    else:
        found = "is still running"
    renamed = f"If {source!r} was renamed, write its former name as its uid. Otherwise take" if upstream is None else "Take"
    return (
        f"Stage {stage.name!r} is {state} in {where}, so its predecessor {source!r} over {pattern.name} must be {expected}; "
        f"but {source!r} {found}. Its records would not be read. {renamed} {source!r} out of the inputs of {stage.name!r}, "
        f"give {stage.name!r} another name so that it starts without state, or start the pipeline without this checkpoint."
    )


def _unclaimed(pipeline: PipelineView, metadata: CheckpointMetadata, allowed: bool, where: str) -> tuple[str, ...]:
    present = {stage.name for stage in pipeline.stages}
    gone = tuple(s.name for s in metadata.stages if s.name not in present)
    # A fully finished stage has no state, except for its enumerator.
    with_state = tuple(
        s.name for s in metadata.stages if s.name not in present and (not s.fully_finished or s.enumerator is not None)
    )
    if with_state and not allowed:
        raise NonRestoredState(_unclaimed_message(pipeline, metadata, with_state, where))
    return gone


def _unclaimed_message(pipeline: PipelineView, metadata: CheckpointMetadata, unclaimed: Sequence[str], where: str) -> str:
    """The text for state without a stage: after a rename the uid keeps it; in another pipeline's checkpoint nothing is to do."""
    present, recorded = {stage.name for stage in pipeline.stages}, {stage.name for stage in metadata.stages}
    new = sorted(present - recorded)
    uids = [name.removeprefix("uid ") for name in unclaimed]
    found = (
        f"{where[0].upper()}{where[1:]} holds state of {_names(unclaimed)}, which the pipeline {pipeline.name!r} does not have "
        f"(it has {_names(sorted(present))}). "
    )
    renamed = (
        f"write uid={uids[0]!r} at {new[0]!r}"
        if len(new) == len(uids) == 1
        else f"write the former name of each renamed stage as its uid ({' or '.join(f'uid={uid!r}' for uid in uids)}"
        + (f"; new here: {_names(new)})" if new else ")")
    )
    if not present & recorded:
        return found + (
            "It has no stage of this pipeline: it is probably of another pipeline of the same name, whose state must not be "
            "given up. Give this pipeline another name or another storage. If it is the same pipeline, and all of its stages "
            f"were renamed, keep their state: {renamed}."
        )
    kept = f"If a stage was renamed, {renamed}: it then keeps its state. " if new else ""
    back = "Otherwise put it back under that name" if new else "Put the stage back under that name"
    return found + (
        f"{kept}{back}; or, if it was removed on purpose, set allow_non_restored_state, which loses its state for ever."
    )


def _key_groups(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], chosen: Mapping[str, int]) -> Mapping[str, int]:
    """By stage that runs, its number of key groups. A fully finished stage has no keyed state, so its number may change."""
    finished = {name for name, stage in recorded.items() if stage.fully_finished}
    fixed = {stage.name: 0 for stage in pipeline.stages} | {name: stage.max_parallelism for name, stage in recorded.items()}
    chosen = {**chosen, **{stage.name: stage.state_partitions for stage in pipeline.stages if stage.state_partitions}}
    return {
        stage.name: chosen_max_parallelism(stage.name, len(stage.instances), chosen.get(stage.name), fixed[stage.name])
        for stage in pipeline.stages
        if stage.name not in finished
    }


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
                ended = _names(stage.instances[index] for index in gone)
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


def _list(indices: Iterable[int]) -> str:
    return ", ".join(str(index) for index in indices)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
