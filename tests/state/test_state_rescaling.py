"""A pipeline is rescaled repeatedly: no state is lost or held twice, through the metadata.

Two chains: in `a -> b` instances finish one by one; `c` has union list state, which a checkpoint holds whole or not at all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagster_checkpoints.pipeline import EdgePattern, StageInput, TaskId
from dagster_checkpoints.state.errors import InstancesChanged, MaxParallelismChanged, ParallelismTooHigh, PartlyFinishedUnionState
from dagster_checkpoints.state.key_groups import key_groups_of
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.rescaled_instances import redistribute_operator_states
from dagster_checkpoints.state.restore import check_union_states, validate_restore

CHAINS = {"a": ("a", "b"), "c": ("c",)}
LISTS = {"a": ("x",), "b": ("x", "y"), "c": ("z",)}
GROUPS = 6
KEYED = "b"

Items = dict[tuple[str, str], list[bytes]]
"""By stage and name."""


@dataclass
class Instance:
    """A task: the state of its stages, which does not count once it has finished."""

    lists: Items = field(default_factory=dict)
    union: list[bytes] = field(default_factory=list)
    keys: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOf:
    name: str
    instances: tuple[str, ...]
    split_interval: float | None = None
    state_partitions: int | None = None

    @property
    def uid(self) -> str:
        return self.name


@dataclass(frozen=True)
class EdgeOf:
    source: str
    target: str
    pattern: EdgePattern
    input: StageInput = field(default_factory=StageInput)


@dataclass(frozen=True)
class PipelineOf:
    stages: tuple[StageOf, ...]
    edges: tuple[EdgeOf, ...] = (EdgeOf("a", "b", EdgePattern.POINTWISE),)
    name: str = "p"


def names(parallelism: int) -> tuple[str, ...]:
    return tuple(map(str, range(parallelism)))


def items_of(states: tuple[OperatorState, ...], kind: str) -> dict[str, list[bytes]]:
    return {state.name: list(state.items) for state in states if state.kind == kind}


class Rescalings(RuleBasedStateMachine):
    @initialize(a=st.integers(1, GROUPS), c=st.integers(1, 4))
    def start(self, a: int, c: int) -> None:
        self.tasks: dict[str, list[Instance | None]] = {"a": [Instance() for _ in range(a)], "c": [Instance() for _ in range(c)]}
        """By chain; None for an instance that has finished."""
        self.broadcast = b""
        self.live: Counter[tuple[str, str, bytes]] = Counter()
        """The items of all lists and unions that unfinished instances hold."""
        self.keys: dict[int, bytes] = {}
        self.made = 0

    def new(self) -> bytes:
        self.made += 1
        return str(self.made).encode()

    # Running

    @rule(data=st.data(), stage=st.sampled_from("abc"), several=st.integers(1, 7))
    def a_list_grows(self, data: st.DataObject, stage: str, several: int) -> None:
        running = [task for task in self.tasks["c" if stage == "c" else "a"] if task is not None]
        if running:
            task, name = data.draw(st.sampled_from(running)), data.draw(st.sampled_from(LISTS[stage]))
            for _ in range(several):
                item = self.new()
                task.lists.setdefault((stage, name), []).append(item)
                self.live[stage, name, item] += 1

    @rule(data=st.data())
    def a_union_grows(self, data: st.DataObject) -> None:
        running = [task for task in self.tasks["c"] if task is not None]
        if running:
            item = self.new()
            data.draw(st.sampled_from(running)).union.append(item)
            self.live["c", "u", item] += 1

    @rule()
    def every_instance_gets_a_broadcast(self) -> None:
        self.broadcast = self.new()

    @rule(group=st.integers(0, GROUPS - 1))
    def a_key_changes(self, group: int) -> None:
        for index, task in enumerate(self.tasks["a"]):
            if task is not None and group in key_groups_of(index, len(self.tasks["a"]), GROUPS):
                task.keys[group] = self.keys[group] = self.new()

    @rule(data=st.data(), chain=st.sampled_from("aac"))
    def an_instance_finishes(self, data: st.DataObject, chain: str) -> None:
        running = [index for index, task in enumerate(self.tasks[chain]) if task is not None]
        if running:
            self.finish(chain, data.draw(st.sampled_from(running)))

    @rule()
    def all_instances_with_a_union_finish(self) -> None:
        for index in range(len(self.tasks["c"])):
            self.finish("c", index)

    def finish(self, chain: str, index: int) -> None:
        task = self.tasks[chain][index]
        if task is not None:
            self.live -= Counter((*of, item) for of, items in task.lists.items() for item in items)
            self.live -= Counter(("c", "u", item) for item in task.union)
            self.keys = {group: key for group, key in self.keys.items() if group not in task.keys}
            self.tasks[chain][index] = None

    # Checkpoints

    def snapshot(self, stage: str, task: Instance) -> StageInstanceSnapshot:
        states = [OperatorState(name, "list", tuple(items)) for (of, name), items in task.lists.items() if of == stage]
        if stage == "a":
            states.append(OperatorState("rates", "broadcast", (self.broadcast,)))
        if stage == "c":
            states.append(OperatorState("u", "union", tuple(task.union)))
        return StageInstanceSnapshot(operator_states=tuple(states))

    def checkpoint(self) -> CheckpointMetadata:
        stages, chains = [], []
        for chain, members in CHAINS.items():
            tasks = self.tasks[chain]
            finished = tuple(index for index, task in enumerate(tasks) if task is None)
            stages += [
                StageMetadata(
                    name,
                    len(tasks),
                    names(len(tasks)),
                    finished,
                    len(finished) == len(tasks),
                    max_parallelism=GROUPS if name == KEYED else 0,
                )
                for name in members
            ]
            held = {
                index: TaskSnapshot({name: self.snapshot(name, task) for name in members})
                for index, task in enumerate(tasks)
                if task is not None
            }
            chains.append(ChainMetadata(chain, members, held))
        metadata = CheckpointMetadata("p", 1, tuple(stages), tuple(chains))
        read = decode(encode(metadata), "x")
        assert read == metadata
        return read

    @property
    def union_is_whole(self) -> bool:
        finished = [task is None for task in self.tasks["c"]]
        return all(finished) or not any(finished)

    @precondition(lambda self: not self.union_is_whole)
    @rule()
    def part_of_a_union_is_no_checkpoint(self) -> None:
        with pytest.raises(PartlyFinishedUnionState, match="'c'"):
            check_union_states(self.checkpoint())

    # Restores

    @precondition(lambda self: self.union_is_whole)
    @rule(data=st.data())
    def it_is_restored(self, data: st.DataObject) -> None:
        metadata = self.checkpoint()
        check_union_states(metadata)
        wanted = {chain: data.draw(st.integers(1, 8) | st.just(len(tasks)), chain) for chain, tasks in self.tasks.items()}
        self.check_plan(metadata, wanted)
        over = all(task is None for task in self.tasks["a"])
        if wanted["a"] > GROUPS and not over:
            with pytest.raises(ParallelismTooHigh, match="'b' has"):
                redistribute_operator_states(metadata, "b", wanted["a"])
            wanted["a"] = GROUPS
        for chain, members in CHAINS.items():
            self.rescale(metadata, chain, members, wanted[chain])

    def check_plan(self, metadata: CheckpointMetadata, wanted: dict[str, int]) -> None:
        """The finished instances are those of the checkpoint, by name; none that runs may be left out."""
        pipeline = PipelineOf(tuple(StageOf(name, names(wanted[chain])) for chain in CHAINS for name in CHAINS[chain]))
        over = {chain for chain, tasks in self.tasks.items() if all(task is None for task in tasks)}
        running = {(chain, index) for chain in CHAINS for index, task in enumerate(self.tasks[chain]) if task is not None}
        if any(index >= wanted[chain] for chain, index in running):
            with pytest.raises(InstancesChanged, match="end-source"):
                validate_restore(pipeline, metadata)
            return
        if wanted["a"] > GROUPS and "a" not in over:
            with pytest.raises(ParallelismTooHigh, match="'b' has"):
                validate_restore(pipeline, metadata)
            return
        plan = validate_restore(pipeline, metadata)
        assert plan.fully_finished == {name for chain in over for name in CHAINS[chain]}
        assert plan.finished == {
            TaskId(chain, index)
            for chain in CHAINS
            for index in range(wanted[chain])
            if chain in over or (index < len(self.tasks[chain]) and self.tasks[chain][index] is None)
        }
        assert plan.max_parallelism.get(KEYED) == (None if "a" in over else GROUPS)
        if "a" not in over:
            with pytest.raises(MaxParallelismChanged):
                validate_restore(pipeline, metadata, max_parallelism={KEYED: GROUPS + 1})

    def rescale(self, metadata: CheckpointMetadata, chain: str, members: tuple[str, ...], parallelism: int) -> None:
        before = self.tasks[chain]
        if all(task is None for task in before):
            self.tasks[chain] = [None] * parallelism
            return
        same = parallelism == len(before)
        after: list[Instance | None] = [None if same and before[index] is None else Instance() for index in range(parallelism)]
        for stage in members:
            given = redistribute_operator_states(metadata, stage, parallelism)
            assert len(given) == parallelism
            self.check_sizes(stage, given, same)
            for index, (task, states) in enumerate(zip(after, given, strict=True)):
                if stage == "a":
                    assert items_of(states, "broadcast") == {"rates": [self.broadcast]}
                if task is None:
                    assert not any(items_of(states, "list").values()), "no instance would read it"
                    continue
                task.lists.update({(stage, name): items for name, items in items_of(states, "list").items()})
                if stage == "c":
                    union = items_of(states, "union")["u"]
                    assert Counter(("c", "u", item) for item in union) == self.of("c", "u"), "everything to everyone"
                    # Each instance takes over its share, as a reader of offsets does.
                    task.union = union[index::parallelism]
        if KEYED in members:
            held = {group: key for task in before if task is not None for group, key in task.keys.items()}
            for index, task in enumerate(after):
                if task is not None:
                    task.keys = {group: held[group] for group in key_groups_of(index, parallelism, GROUPS) if group in held}
        if same:
            assert [task and {of: items for of, items in task.lists.items() if items} for task in after] == [
                task and {of: items for of, items in task.lists.items() if items} for task in before
            ], "each keeps its own"
        self.tasks[chain] = after

    def of(self, stage: str, name: str) -> Counter[tuple[str, str, bytes]]:
        return Counter({key: count for key, count in self.live.items() if key[:2] == (stage, name)})

    def check_sizes(self, stage: str, given: tuple[tuple[OperatorState, ...], ...], same: bool) -> None:
        lists = [items_of(states, "list") for states in given]
        for name in LISTS[stage]:
            assert Counter((stage, name, item) for held in lists for item in held.get(name, [])) == self.of(stage, name)
        if not same:
            each = [[len(held.get(name, [])) for held in lists] for name in LISTS[stage]]
            for sizes in [*each, [sum(map(len, held.values())) for held in lists]]:
                assert max(sizes) - min(sizes) <= 1, "of each state, and of all together"

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        running = [task for tasks in self.tasks.values() for task in tasks if task is not None]
        held = Counter((*of, item) for task in running for of, items in task.lists.items() for item in items)
        held += Counter(("c", "u", item) for task in running for item in task.union)
        assert held == self.live
        keys = [pair for task in running for pair in task.keys.items()]
        assert len(keys) == len(dict(keys)) and dict(keys) == self.keys


TestRescalings = Rescalings.TestCase
TestRescalings.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
