"""The plan of an attempt, as a value: which tasks run, what each of them begins with, and which sinks are settled before.

It is computed before anything is built, from the pipeline, the plan of the restore and what the job knows; the deployment and the
simulator perform it. What only Spark knows is an argument: the stages at which it has refused a common query. It must not know
files, schemas, queries, nor how a task is made.

Source: Flink's ExecutionGraph and StateAssignmentOperation; PROTOCOL sections 1, 5 and 8.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Set

import msgspec

from dagster_checkpoints.execution.fused_sources import FusedSource
from dagster_checkpoints.execution.job_requests import SourceInstance
from dagster_checkpoints.pipeline import (
    Chain,
    ExecutionGraph,
    Pipeline,
    Stage,
    StageKind,
    TaskId,
    build_chains,
    execution_graph,
    fused_in,
    merging_in,
)
from dagster_checkpoints.state.fitted_checkpoint import KeyedStateShare, SettledInstance
from dagster_checkpoints.state.key_groups import default_max_parallelism
from dagster_checkpoints.state.metadata import CheckpointMetadata, LastCommit, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.restore import RestorePlan


class TaskPlan(msgspec.Struct, frozen=True):
    """What one task begins with.

    Attributes:
        id: the task.
        chain: the chain of which it runs an instance.
        snapshot: its part of the restored checkpoint, without content if the checkpoint holds nothing of it; None at a new start.
        share: the keyed state that it gets from other instances; None if it continues its own, or has none.
        bounded: whether the one source at its head ends by itself, or was asked to end before a restart.
        fused: its fused sources, in the order of the chain, those that have ended included. Of one that the checkpoint does not
            hold, only Spark's plan knows the position.
        take_back_after: the restored checkpoint, if its sink may show rows of other ones; see `SinkLife.recover`.
    """

    id: TaskId
    chain: Chain
    snapshot: TaskSnapshot | None = None
    share: KeyedStateShare | None = None
    bounded: bool = False
    fused: tuple[FusedSource, ...] = ()
    take_back_after: int | None = None

    @property
    def after_finish(self) -> bool:
        """Whether it had finished its data: it starts no query, and waits for its final checkpoint."""
        return self.snapshot is not None and self.snapshot.end_of_data == "drain"

    @property
    def transactions(self) -> tuple[str, ...] | None:
        """The transactions that its sink commits before it starts; None at a new start."""
        if self.snapshot is None:
            return None
        tail = self._tail
        return tail.transactions if tail is not None else ()

    @property
    def committed(self) -> LastCommit | None:
        """What its sink had committed last in the restored checkpoint; None if nothing is known of that."""
        tail = self._tail
        return tail.committed if tail is not None else None

    @property
    def _tail(self) -> StageInstanceSnapshot | None:
        return self.snapshot.stages.get(self.chain.stages[-1]) if self.snapshot is not None else None


class AttemptPlan(msgspec.Struct, frozen=True):
    """The plan.

    Attributes:
        graph: the execution graph.
        chains: the chains, producers before consumers; also those that have finished, and those that go on meanwhile.
        built: those of the chains whose tasks are built.
        sources: the instances of all sources.
        finished: the tasks that had finished in the restored checkpoint. They do not run again.
        tasks: the tasks that are built, producers before consumers.
        settled: by chain that is built, the instances of its last stage that do not run and whose sinks may show other rows than
            those of the restored checkpoint: before tasks start, they are made to show exactly these.
        take_back_after: the restored checkpoint, if later ones were completed; None otherwise.
        next_checkpoint_id: an id above those of all checkpoints that were completed, and at most that of the next one.
        key_groups: by stage, its number of key groups.
        recorded_key_groups: the same of the stages whose rows are routed by key: checkpoints have to record it.
        most_instances: by stage that has had more instances than it has now, their largest number.
    """

    graph: ExecutionGraph
    chains: tuple[Chain, ...]
    built: tuple[Chain, ...] = ()
    sources: tuple[SourceInstance, ...] = ()
    finished: frozenset[TaskId] = frozenset()
    tasks: Mapping[TaskId, TaskPlan] = {}
    settled: Mapping[str, tuple[SettledInstance, ...]] = {}
    take_back_after: int | None = None
    next_checkpoint_id: int = 1
    key_groups: Mapping[str, int] = {}
    recorded_key_groups: Mapping[str, int] = {}
    most_instances: Mapping[str, int] = {}


def plan_attempt(
    pipeline: Pipeline,
    restored: RestorePlan | None = None,
    *,
    breaks: Collection[str] = (),
    vertices: Set[str] | None = None,
    ended_sources: Collection[tuple[str, str]] = (),
    has_later: bool = False,
    next_checkpoint_id: int = 1,
) -> AttemptPlan:
    """Plan an attempt, or the part of one that restarts.

    Args:
        pipeline: the pipeline that runs.
        restored: the plan of the restore; None for a new start.
        breaks: the stages at which Spark has refused a common query with those in front. A restore needs the recorded queries.
        vertices: the chains whose tasks are built, while those of the others go on; None for all.
        ended_sources: (stage, instance) of the sources that a request has ended before a restart: they read the input that is
            available, and end.
        has_later: whether sinks may show other rows than those of the restored checkpoint, see `OwnershipSteps.has_later`.
        next_checkpoint_id: see `OwnershipSteps.first_id_after`.
    """
    chains = build_chains(pipeline, frozenset(breaks)) if restored is None else _recorded_chains(pipeline, restored)
    graph = execution_graph(pipeline, chains)
    order = {vertex.name: position for position, vertex in enumerate(graph.vertices)}
    chains = tuple(sorted(chains, key=lambda chain: order[chain.name]))
    built = tuple(chain for chain in chains if vertices is None or chain.name in vertices)
    take_back_after = restored.checkpoint_id if restored is not None and has_later else None
    finished = restored.finished if restored is not None else frozenset()
    known = restored.max_parallelism if restored is not None else {}
    key_groups = {
        s.name: known.get(s.name) or s.state_partitions or default_max_parallelism(s.parallelism) for s in pipeline.stages
    }
    return AttemptPlan(
        graph=graph,
        chains=chains,
        built=built,
        sources=tuple(_sources(pipeline, chains)),
        finished=finished,
        tasks={
            task: _task(pipeline, chain, task, restored, ended_sources, take_back_after)
            for chain in built
            for index in range(len(chain.instances))
            if (task := TaskId(chain.name, index)) not in finished
        },
        settled={chain.name: tuple(_settled(pipeline, chain, restored, take_back_after)) for chain in built} if restored else {},
        take_back_after=take_back_after,
        next_checkpoint_id=next_checkpoint_id,
        key_groups=key_groups,
        recorded_key_groups={edge.target: key_groups[edge.target] for edge in pipeline.edges if edge.input.key is not None},
        most_instances={s.name: s.most_instances for s in restored.metadata.stages if s.most_instances} if restored else {},
    )


def _recorded_chains(pipeline: Pipeline, restored: RestorePlan) -> tuple[Chain, ...]:
    """The chains of the checkpoint, whose queries hold the state; a new stage has one of its own."""
    layout = [*restored.chains, *restored.finished_chains, *((name,) for name in restored.new_stages)]
    return tuple(Chain(stages[0], stages, pipeline.stage(stages[0]).instances) for stages in layout)


def _sources(pipeline: Pipeline, chains: Iterable[Chain]) -> Iterator[SourceInstance]:
    chain_of = {name: chain.name for chain in chains for name in chain.stages}
    for stage in pipeline.stages:
        for index, instance in enumerate(stage.instances if stage.kind.is_source else ()):
            task = TaskId(chain_of[stage.name], index)
            yield SourceInstance(stage.name, instance, task, bounded=stage.kind is StageKind.BOUNDED_SOURCE)


def _task(
    pipeline: Pipeline,
    chain: Chain,
    task: TaskId,
    restored: RestorePlan | None,
    ended_sources: Collection[tuple[str, str]],
    take_back_after: int | None,
) -> TaskPlan:
    def ends(stage: Stage) -> bool:
        return stage.kind is StageKind.BOUNDED_SOURCE or (stage.name, stage.instances[task.index]) in ended_sources

    head, snapshot = pipeline.stage(chain.stages[0]), None if restored is None else restored.tasks.get(task, TaskSnapshot())
    known = {source.source: source for source in snapshot.fused} if snapshot is not None else {}
    fused = [
        FusedSource(
            name=stage.name,
            position=known[stage.name].position if stage.name in known else 0,
            bounded=ends(stage),
            event_time=stage.watermark is not None,
            idle_after=stage.watermark.idle_after if stage.watermark is not None else None,
            restored=known.get(stage.name),
        )
        for stage in map(pipeline.stage, fused_in(pipeline, chain.stages))
    ]
    return TaskPlan(
        id=task,
        chain=chain,
        snapshot=snapshot,
        share=restored.shares.get(task) if restored is not None else None,
        bounded=head.kind.is_source and ends(head),
        fused=tuple(fused),
        take_back_after=take_back_after,
    )


def _settled(pipeline: Pipeline, chain: Chain, restored: RestorePlan, take_back_after: int | None) -> Iterator[SettledInstance]:
    """The instances of a chain's last stage that do not run, and whose sinks may have to change: those that have finished, if
    other rows than the checkpoint's may be seen, and those that are gone, also if their transactions are to be committed."""
    stage = pipeline.stage(chain.stages[-1])
    if stage.sink is None:
        return
    gone = {each.index: each for each in restored.removed if each.stage == stage.name}
    for index, instance in enumerate(chain.instances if take_back_after is not None else ()):
        if TaskId(chain.name, index) in restored.finished and index not in gone:
            yield SettledInstance(stage.name, index, instance, len(chain.instances), StageInstanceSnapshot())
    yield from (each for each in gone.values() if take_back_after is not None or each.snapshot.transactions)


# A restore beside a new start


def separate_queries(pipeline: Pipeline, restored: RestorePlan, breaks: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """The stages that keep separate queries, as in the checkpoint, and share one in a new start, as far as is known.

    Args:
        pipeline: the pipeline that runs.
        restored: the plan of the restore.
        breaks: see :func:`plan_attempt`.

    Returns:
        Pairs of a stage and one of its inputs.
    """
    new = {name: chain.name for chain in _chains_with_state(pipeline, restored.metadata, breaks) for name in chain.stages}
    for head, *_ in restored.chains:
        for upstream in pipeline.upstream(head):
            if new[upstream] == new[head]:
                yield upstream, head


def _chains_with_state(pipeline: Pipeline, metadata: CheckpointMetadata, breaks: Collection[str]) -> tuple[Chain, ...]:
    """The chains of a new start, if the stages that keep state in the checkpoint still do."""
    tasks = [task for chain in metadata.chains for task in chain.tasks.values()]
    stateful = {name for task in tasks for name, snapshot in task.stages.items() if snapshot.operators}
    apart = frozenset(breaks)
    while True:
        chains = build_chains(pipeline, apart)
        refused = {
            meeting
            for chain in chains
            if (meeting := merging_in(pipeline, chain.stages))
            and stateful.intersection(itertools.takewhile(lambda name: name != meeting, chain.stages))
        }
        if not refused:
            return chains
        apart |= refused
