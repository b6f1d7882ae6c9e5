"""Whether a checkpoint fits a pipeline, and what then starts from where.

All rules are checked before anything starts (PROTOCOL 8.1). Must not know: storage, Spark, tasks.

Source: FLIP-147; Flink's VertexFinishedStateChecker and StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dagster_checkpoints.pipeline import EdgePattern, TaskId
from dagster_checkpoints.state.errors import (
    ChainLayoutChanged,
    InstancesChanged,
    NonRestoredState,
    PartlyFinishedUnionState,
    UnfinishedPredecessor,
)
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata, StageMetadata, TaskSnapshot


class StageView(Protocol):
    """What is asked of a stage."""

    @property
    def name(self) -> str: ...
    @property
    def instances(self) -> tuple[str, ...]: ...


class EdgeView(Protocol):
    """What is asked of an edge between two stages."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def pattern(self) -> EdgePattern: ...


class PipelineView(Protocol):
    """What is asked of a pipeline; `dagster_checkpoints.pipeline.Pipeline` is one."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> Sequence[StageView]: ...
    @property
    def edges(self) -> Sequence[EdgeView]: ...


@dataclass(frozen=True)
class RestorePlan:
    """What a restore starts, and from what.

    Attributes:
        checkpoint_id: restored from; the next one is `next_checkpoint_id`.
        chains: the recorded layout, in order, without chains that have fully finished or are gone: build
            these again.
        finished_chains: the recorded layout of chains that have fully finished; they stay in the execution
            graph, so that the next checkpoint records them again.
        new_stages: stages that the checkpoint does not know; they start empty, in chains of the caller's
            making.
        fully_finished: stages that are not run again; consumers see their channels as ended.
        finished: tasks (of recorded chains) that are not run again, those of fully finished chains included.
        after_finish: tasks that had finished their operators and wait for the final checkpoint.
        tasks: what each unfinished task is restored from.
        dropped: stages whose state is left behind because `allow_non_restored_state` is set.
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

    @property
    def next_checkpoint_id(self) -> int:
        return self.checkpoint_id + 1


def validate_restore(pipeline: PipelineView, metadata: CheckpointMetadata, allow_non_restored_state: bool = False) -> RestorePlan:
    """Check that the checkpoint fits the pipeline and say what to start from it.

    Args:
        pipeline: what is to run.
        metadata: the checkpoint.
        allow_non_restored_state: leave state behind that no stage claims.

    Raises:
        UnfinishedPredecessor: a finished stage would get new input.
        NonRestoredState: state belongs to a stage that is gone.
        InstancesChanged: a stage has other instances than in the checkpoint.
        ChainLayoutChanged: a recorded chain cannot be built again.
    """
    recorded = {stage.name: stage for stage in metadata.stages}
    where = f"checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r}"
    _check_finished(pipeline, recorded, where)
    dropped = _unclaimed(pipeline, metadata, allow_non_restored_state, where)
    _check_instances(pipeline, recorded, where)
    chains = [chain for chain in metadata.chains if not set(chain.stages) <= set(dropped)]
    for chain in chains:
        _check_layout(pipeline, recorded, chain, where)
    present = {stage.name for stage in pipeline.stages}
    tasks = {TaskId(c.name, i): task for c in chains for i, task in sorted(c.tasks.items())}
    return RestorePlan(
        checkpoint_id=metadata.checkpoint_id,
        chains=tuple(c.stages for c in chains if not recorded[c.stages[0]].fully_finished),
        finished_chains=tuple(c.stages for c in chains if recorded[c.stages[0]].fully_finished and set(c.stages) <= present),
        new_stages=tuple(stage.name for stage in pipeline.stages if stage.name not in recorded),
        fully_finished=frozenset(s.name for s in metadata.stages if s.fully_finished and s.name in present),
        finished=frozenset(TaskId(c.name, i) for c in chains for i in recorded[c.stages[0]].finished if c.stages[0] in present),
        after_finish=frozenset(task for task, snapshot in tasks.items() if snapshot.end_of_data == "drain"),
        tasks=tasks,
        dropped=dropped,
    )


def _check_finished(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], where: str) -> None:
    patterns: dict[tuple[str, str], EdgePattern] = {}
    for edge in pipeline.edges:
        # ALL_TO_ALL asks more: it wins where both join a pair.
        if edge.pattern is EdgePattern.ALL_TO_ALL or (edge.source, edge.target) not in patterns:
            patterns[edge.source, edge.target] = edge.pattern
    for (source, target), pattern in patterns.items():
        stage = recorded.get(target)
        if stage is None or not (stage.finished or stage.fully_finished):
            continue
        upstream = recorded.get(source)
        fully = upstream is not None and upstream.fully_finished
        partly = upstream is not None and bool(upstream.finished)
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
    return (
        f"Stage {stage.name!r} is {state} in {where}, so its predecessor {source!r} over {pattern.name} "
        "must be "
        f"{expected}; but {source!r} {found}. Its records would reach nobody. Take {source!r} out of the "
        "inputs of "
        f"{stage.name!r}, give {stage.name!r} another name so that it starts anew, or start the pipeline "
        "without this "
        "checkpoint."
    )


def _unclaimed(pipeline: PipelineView, metadata: CheckpointMetadata, allowed: bool, where: str) -> tuple[str, ...]:
    present = {stage.name for stage in pipeline.stages}
    gone = tuple(s.name for s in metadata.stages if s.name not in present)
    with_state = tuple(s.name for s in metadata.stages if s.name not in present and not s.fully_finished)
    if with_state and not allowed:
        raise NonRestoredState(
            f"{where[0].upper()}{where[1:]} holds state of {_names(with_state)}, which the pipeline "
            f"{pipeline.name!r} does not have (it has {_names(present)}). Put the stage back under that "
            "name, or set "
            "allow_non_restored_state to leave its state behind."
        )
    return gone


def _check_instances(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], where: str) -> None:
    for stage in pipeline.stages:
        known = recorded.get(stage.name)
        if known is None or known.fully_finished or known.instances == tuple(stage.instances):
            continue
        raise InstancesChanged(
            f"Stage {stage.name!r} has the instances {_names(stage.instances)}; in {where} it has "
            f"{_names(known.instances)}. State cannot be redistributed yet: give the stage the same "
            "instances in "
            "the same order, or start the pipeline without this checkpoint."
        )


def _check_layout(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], chain: ChainMetadata, where: str) -> None:
    if all(recorded[name].fully_finished for name in chain.stages if name in recorded):
        return
    layout = " -> ".join(chain.stages)
    present = {stage.name for stage in pipeline.stages}
    missing = [name for name in chain.stages if name not in present]
    if missing:
        raise ChainLayoutChanged(
            f"In {where} the stages {layout} run as one Spark query, whose state belongs to all of them; "
            f"{_names(missing)} is no longer in the pipeline. Put it back, or start without this checkpoint. "
            "(allow_non_restored_state can only leave whole chains behind.)"
        )
    inputs: dict[str, list[str]] = {}
    for edge in pipeline.edges:
        inputs.setdefault(edge.target, []).append(edge.source)
    for upstream, name in zip(chain.stages, chain.stages[1:], strict=False):
        if inputs.get(name) != [upstream]:
            raise ChainLayoutChanged(
                f"In {where} the stages {layout} run as one Spark query, in which {name!r} reads "
                f"{upstream!r} and "
                f"nothing else; now {name!r} reads {_names(inputs.get(name, [])) or 'nothing'}. Spark's "
                "state belongs "
                "to the plan of that query. Restore the stages' order, or start without this checkpoint."
            )


def check_union_states(metadata: CheckpointMetadata) -> None:
    """Refuse a checkpoint in which a stage with union list state is finished in part.

    A union state means something only as a whole, and what finished instances held is gone. To be called
    before the metadata is written; the checkpoint is then declined.

    Raises:
        PartlyFinishedUnionState: names the stage, the state and the finished instances.
    """
    partly = {s.name: s.finished for s in metadata.stages if s.finished and not s.fully_finished}
    for chain in metadata.chains:
        for task in chain.tasks.values():
            for name, snapshot in task.stages.items():
                union = [state.name for state in snapshot.operator_states if state.kind == "union"]
                if union and name in partly:
                    raise PartlyFinishedUnionState(
                        f"Stage {name!r} has the union list state {union[0]!r}, and its instances "
                        f"{_list(partly[name])} have finished while others run. What they held is part of "
                        "the "
                        f"union, so checkpoint {metadata.checkpoint_id} is declined; the next one after all "
                        "instances have finished can complete. Use list or broadcast state if a part "
                        "suffices."
                    )


def _list(indices: Iterable[int]) -> str:
    return ", ".join(str(index) for index in indices)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
