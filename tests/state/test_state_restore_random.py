"""Restoring random pipelines, unchanged and changed, after random histories: which are accepted, and which tasks then run.

The pipeline runs as the protocol lets it (an instance finishes when everything it reads has), is checkpointed at any
moment, changed, restored, and runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dagster_checkpoints.pipeline import EdgePattern, StageInput, TaskId, pointwise_producers
from dagster_checkpoints.state.errors import (
    ChainLayoutChanged,
    InputRowsGone,
    InputsChanged,
    InstancesChanged,
    NonRestoredState,
    RestoreError,
    UnfinishedPredecessor,
)
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    EnumeratorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.restore import RestorePlan, validate_restore

ALL, PW = EdgePattern.ALL_TO_ALL, EdgePattern.POINTWISE


@dataclass(frozen=True)
class StageOf:
    name: str
    instances: tuple[str, ...]
    split_interval: float | None = None
    state_partitions: int | None = None

    @property
    def uid(self) -> str:
        return self.name

    @property
    def parallelism(self) -> int:
        return len(self.instances)


@dataclass(frozen=True)
class EdgeOf:
    source: str
    target: str
    pattern: EdgePattern
    input: StageInput = field(default_factory=StageInput)


@dataclass(frozen=True)
class PipelineOf:
    name: str
    stages: tuple[StageOf, ...] = ()
    edges: tuple[EdgeOf, ...] = ()

    def stage(self, name: str) -> StageOf:
        return next(stage for stage in self.stages if stage.name == name)

    def inputs(self, name: str) -> list[EdgeOf]:
        return [edge for edge in self.edges if edge.target == name]

    def with_stage(self, stage: StageOf, edges: list[EdgeOf]) -> PipelineOf:
        return replace(self, stages=(*self.stages, stage), edges=(*self.edges, *edges))

    def without(self, name: str) -> PipelineOf:
        return replace(
            self,
            stages=tuple(stage for stage in self.stages if stage.name != name),
            edges=tuple(edge for edge in self.edges if name not in (edge.source, edge.target)),
        )


@dataclass
class Run:
    """Which stages run together, and which of their instances have finished."""

    chains: list[tuple[str, ...]] = field(default_factory=list)
    finished: dict[str, set[int]] = field(default_factory=dict)


READS_OTHERWISE = (InputsChanged, ChainLayoutChanged)
"""What is expected where a stage reads others or in another way; which of the two it is, tables of single cases say."""


class Restores(RuleBasedStateMachine):
    @initialize(data=st.data(), stages=st.integers(1, 6))
    def begin(self, data: st.DataObject, stages: int) -> None:
        self.pipeline = PipelineOf("p")
        self.run = Run()
        self.names = 0
        self.checkpoint_id = 0
        self.ever_finished: set[str] = set()
        for _ in range(stages):
            self.add_stage(data)

    # Building and running

    def new_stage(self, data: st.DataObject, pipeline: PipelineOf, hidden: frozenset[str] = frozenset()) -> PipelineOf:
        """One stage more, which reads up to two others, none of them `hidden`."""
        self.names += 1
        name = f"s{self.names}"
        readable = [s.name for s in pipeline.stages if s.name not in hidden] or [""]
        upstream = data.draw(st.lists(st.sampled_from(readable), unique=True, max_size=2))
        edges = [EdgeOf(u, name, data.draw(st.sampled_from([ALL, PW, PW]))) for u in upstream if u]
        alike = pipeline.stage(edges[0].source).parallelism if edges and data.draw(st.integers(0, 3)) else None
        stage = StageOf(name, tuple(map(str, range(alike or data.draw(st.integers(1, 3))))), None if edges else 1.0)
        return pipeline.with_stage(stage, edges)

    def add_stage(self, data: st.DataObject) -> None:
        # Only the last stage of a chain emits rows out of the chain.
        self.pipeline = self.new_stage(data, self.pipeline, frozenset(name for c in self.run.chains for name in c[:-1]))
        stage = self.pipeline.stages[-1]
        inputs = self.pipeline.inputs(stage.name)
        self.run.finished[stage.name] = set()
        if len(inputs) == 1 and inputs[0].pattern is PW and self.pipeline.stage(inputs[0].source).instances == stage.instances:
            # It may run in its upstream's query, if that is the last of its chain.
            for i, chain in enumerate(self.run.chains):
                alone = sum(edge.source == chain[-1] for edge in self.pipeline.edges) == 1
                if chain[-1] == inputs[0].source and alone and data.draw(st.booleans()):
                    self.run.chains[i] = (*chain, stage.name)
                    return
        self.run.chains.append((stage.name,))

    @rule(data=st.data(), several=st.integers(1, 8))
    def instances_finish(self, data: st.DataObject, several: int) -> None:
        for _ in range(several):
            ready = [
                (chain, index)
                for chain in self.run.chains
                for index in range(self.pipeline.stage(chain[0]).parallelism)
                if index not in self.run.finished[chain[0]] and self.may_finish(chain, index)
            ]
            if ready:
                self.finish(*data.draw(st.sampled_from(ready)))

    def may_finish(self, chain: tuple[str, ...], index: int) -> bool:
        edges = self.inputs_of(chain)
        # The rule looks at stages, as Flink's does: a changed pipeline may lead a POINTWISE edge from an instance that runs to
        # one that had finished. Once the last one has finished behind such an edge the checkpoint does not fit its pipeline.
        finished = {*self.run.finished[chain[0]], index}
        fits = len(finished) < self.pipeline.stage(chain[0]).parallelism or all(
            self.has_ended(e, i) for e in edges for i in finished
        )
        return fits and all(self.has_ended(edge, index) for edge in edges)

    def finish(self, chain: tuple[str, ...], index: int) -> None:
        for name in chain:
            self.run.finished[name].add(index)
            if len(self.run.finished[name]) == self.pipeline.stage(name).parallelism:
                self.ever_finished.add(name)

    def inputs_of(self, chain: tuple[str, ...]) -> list[EdgeOf]:
        return [edge for name in chain for edge in self.pipeline.inputs(name) if edge.source not in chain]

    def has_ended(self, edge: EdgeOf, index: int) -> bool:
        source, target = self.pipeline.stage(edge.source), self.pipeline.stage(edge.target)
        everyone = range(source.parallelism)
        read = everyone if edge.pattern is ALL else pointwise_producers(source.parallelism, target.parallelism, index)
        return set(read) <= self.run.finished[edge.source]

    # Checkpoints

    def checkpoint(self) -> CheckpointMetadata:
        self.checkpoint_id += 1
        inputs = recorded_inputs(self.pipeline)
        stages = tuple(
            StageMetadata(
                stage.name,
                stage.parallelism,
                stage.instances,
                tuple(sorted(self.run.finished[stage.name])),
                len(self.run.finished[stage.name]) == stage.parallelism,
                enumerator=EnumeratorState(("split",)) if stage.split_interval is not None else None,
                inputs=inputs[stage.name],
            )
            for stage in self.pipeline.stages
        )
        chains = tuple(
            ChainMetadata(
                chain[0],
                chain,
                {
                    index: TaskSnapshot({name: StageInstanceSnapshot(rows_out=index) for name in chain})
                    for index in range(self.pipeline.stage(chain[0]).parallelism)
                    if index not in self.run.finished[chain[0]]
                },
            )
            for chain in self.run.chains
        )
        metadata = CheckpointMetadata("p", self.checkpoint_id, stages, chains)
        assert decode(encode(metadata), "x") == metadata
        return metadata

    @rule()
    def it_is_restored_as_it_was(self) -> None:
        metadata = self.checkpoint()
        plan = validate_restore(self.pipeline, metadata)
        assert (set(plan.chains) | set(plan.finished_chains)) == set(self.run.chains)
        assert plan.new_stages == () == plan.dropped == plan.changes
        unfinished = {TaskId(c.name, index): task for c in metadata.chains for index, task in c.tasks.items()}
        assert plan.tasks == unfinished
        self.check_plan(self.pipeline, metadata, plan)

    @rule(data=st.data(), allow=st.booleans())
    def it_is_changed_and_restored(self, data: st.DataObject, allow: bool) -> None:
        metadata = self.checkpoint()
        changed = self.changed(data)
        expected = self.expected_error(changed, metadata, allow)
        now = {stage.name: stage.instances for stage in changed.stages}
        rescaled = any(now.get(stage.name, stage.instances) != stage.instances for stage in metadata.stages)
        try:
            plan = validate_restore(changed, metadata, allow)
        except RestoreError as error:
            of_instances = (InstancesChanged, InputsChanged) if rescaled else ()
            otherwise = (*READS_OTHERWISE, InputRowsGone) if expected in READS_OTHERWISE else ()
            assert type(error) in (expected, *of_instances, *otherwise), str(error)
            return
        # Where only stages between two others have come or gone, state stays: `test_state_stages_between` has that rule's table.
        between = READS_OTHERWISE if any(line.startswith("other inputs: ") for line in plan.changes) else ()
        of_one = (InputsChanged,) if rescaled else ()  # one instance may read its inputs in another way
        assert expected in (None, *of_one, *between)
        self.check_plan(changed, metadata, plan)
        known = {stage.name: stage for stage in metadata.stages}
        of_finished = any(s.fully_finished and now.get(name, s.instances) != s.instances for name, s in known.items())
        before, after = ([chain for chain in of.chains if chain.tasks] for of in (metadata, plan.metadata))
        assert plan.changes or of_finished or after == before, "no rule rewrites in silence what still runs"
        self.pipeline = changed
        self.run.chains = [*plan.chains, *plan.finished_chains, *((name,) for name in plan.new_stages)]
        self.run.finished = {stage.name: set() for stage in changed.stages}
        for chain in self.run.chains:
            for name in chain:
                self.run.finished[name] = {task.index for task in plan.finished if task.vertex == chain[0]}

    def changed(self, data: st.DataObject) -> PipelineOf:
        pipeline = self.pipeline
        for _ in range(data.draw(st.integers(1, 2))):
            names = [stage.name for stage in pipeline.stages]
            what = data.draw(st.sampled_from(["edge", "edge", "edge", "pattern", "pattern", "remove", "instances", "add"]))
            if what == "add" and len(names) < 7:
                pipeline = self.new_stage(data, pipeline)
            elif what == "remove" and names:
                pipeline = pipeline.without(data.draw(st.sampled_from(names)))
            elif what == "edge" and len(names) > 1:
                finished = [i for i, name in enumerate(names) if i and self.run.finished.get(name)]
                late = data.draw(st.sampled_from(finished) if finished else st.integers(1, len(names) - 1))
                early = data.draw(st.integers(0, late - 1))
                pipeline = replace(
                    pipeline, edges=(*pipeline.edges, EdgeOf(names[early], names[late], data.draw(st.sampled_from([ALL, PW]))))
                )
            elif what == "pattern" and pipeline.edges:
                turned = data.draw(st.integers(0, len(pipeline.edges) - 1))
                edges = [
                    replace(e, pattern=PW if e.pattern is ALL else ALL) if i == turned else e
                    for i, e in enumerate(pipeline.edges)
                ]
                pipeline = replace(pipeline, edges=tuple(edges))
            elif what == "instances" and names:
                name = data.draw(st.sampled_from(names))
                instances = tuple(map(str, range(data.draw(st.integers(1, 4)))))
                stages = tuple(replace(stage, instances=instances) if stage.name == name else stage for stage in pipeline.stages)
                pipeline = replace(pipeline, stages=stages)
        return pipeline

    # The rules of PROTOCOL 8.1 in other words

    def expected_error(self, pipeline: PipelineOf, metadata: CheckpointMetadata, allow: bool) -> type[RestoreError] | None:
        recorded = {stage.name: stage for stage in metadata.stages}
        present = {stage.name for stage in pipeline.stages}

        def rank(name: str) -> int:
            """0 running, 1 partly finished, 2 fully finished."""
            stage = recorded.get(name)
            return 0 if stage is None or not stage.finished else 2 if stage.fully_finished else 1

        def needed(edge: EdgeOf) -> int:
            return 2 if rank(edge.target) == 1 and edge.pattern is ALL else rank(edge.target)

        if any(rank(edge.source) < needed(edge) for edge in pipeline.edges):
            return UnfinishedPredecessor
        gone = [stage for name, stage in recorded.items() if name not in present]
        if not allow and any(not stage.fully_finished or stage.enumerator for stage in gone):
            return NonRestoredState
        running = [stage for stage in recorded.values() if stage.name in present and not stage.fully_finished]
        for chain in self.run.chains:
            if rank(chain[0]) < 2 and set(chain) & present:
                left = [name for name in chain if name in present]
                reads = [[edge.source for edge in pipeline.inputs(name)] for name in left[1:]]
                if tuple(left) != chain[: len(left)] or reads != [[name] for name in left[:-1]]:
                    return ChainLayoutChanged
                # New readers divide the chain behind the stages that they read, but not where rows would go other ways.
                followed_by = dict(pairwise(left))
                readers = [e for e in pipeline.edges if e.source in followed_by and followed_by[e.source] != e.target]
                links = [e for e in pipeline.edges if followed_by.get(e.source) == e.target]
                divided_behind = {e.source for e in readers}
                if any(e.target in recorded for e in readers) or any(
                    e.source in divided_behind and e.pattern is ALL for e in links
                ):
                    return ChainLayoutChanged

        def read(by: PipelineOf, name: str) -> list[tuple[str, str]]:
            return sorted((edge.source, edge.pattern.name) for edge in by.inputs(name))

        if any(read(pipeline, stage.name) != read(self.pipeline, stage.name) for stage in running):
            return InputsChanged
        if any(e.target not in recorded and rank(e.source) for e in pipeline.edges):
            return InputRowsGone
        return None

    def check_plan(self, pipeline: PipelineOf, metadata: CheckpointMetadata, plan: RestorePlan) -> None:
        recorded = {stage.name: stage for stage in metadata.stages}
        assert plan.next_checkpoint_id == metadata.checkpoint_id + 1
        chains = [*plan.chains, *plan.finished_chains, *((name,) for name in plan.new_stages)]
        assert sorted(name for chain in chains for name in chain) == sorted(stage.name for stage in pipeline.stages)
        for chain in chains:
            assert len({pipeline.stage(name).instances for name in chain}) == 1
            tasks = {TaskId(chain[0], index) for index in range(pipeline.stage(chain[0]).parallelism)}
            held, finished = tasks & set(plan.tasks), tasks & plan.finished
            if chain[0] in plan.new_stages:
                assert not held and not finished, "it starts without state"
            else:
                assert held | finished == tasks and not held & finished, "each task is restored, or is not run again"
            if chain in plan.finished_chains:
                assert finished == tasks and plan.fully_finished >= set(chain)
            for name in chain:
                assert (name in plan.fully_finished) == (name in recorded and recorded[name].fully_finished)
        assert {task.vertex for task in plan.finished} <= {chain[0] for chain in chains}
        assert set(plan.dropped) == set(recorded) - {stage.name for stage in pipeline.stages}
        assert set(plan.enumerators) == {n for n, s in recorded.items() if s.enumerator and n not in plan.dropped}

    @invariant()
    def what_has_finished_stays_finished(self) -> None:
        if hasattr(self, "pipeline"):
            for stage in self.pipeline.stages:
                if stage.name in self.ever_finished:
                    assert len(self.run.finished[stage.name]) == stage.parallelism


TestRestores = Restores.TestCase
TestRestores.settings = settings(max_examples=300, stateful_step_count=15, deadline=None)
