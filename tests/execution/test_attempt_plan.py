"""The plan of an attempt: which tasks run, what they begin with, which sinks are settled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dagster_checkpoints.execution.attempt_plan import AttemptPlan, plan_attempt, separate_queries
from dagster_checkpoints.execution.fused_sources import FusedSource
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, StageKind, TaskId, Watermark
from dagster_checkpoints.state.fitted_checkpoint import KeyedStateShare, SettledInstance
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    FusedSourceSnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import RestorePlan


class Sink:
    """Never opened."""

    supported_output_modes = frozenset({"append"})


AT_5 = CheckpointMetadata("p", 5)
OF_B = SettledInstance("b", 2, "2", 3, StageInstanceSnapshot())


class Plain(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        return None


SOURCES = {True: StageKind.BOUNDED_SOURCE, False: StageKind.UNBOUNDED_SOURCE}
EVENT_TIME = Watermark("ts", "1 hour", 30)
ALL = StageInput(edge="all_to_all")


def source(name: str, bounded: bool, instances: int = 1, **settings: Any) -> Stage:
    return Plain(name, kind=SOURCES[bounded], instances=list(map(str, range(instances))), **settings)


def derived(name: str, instances: int = 1, sink: bool = True, partitions: int | None = None, **inputs: StageInput) -> Stage:
    names = list(map(str, range(instances)))
    own = {} if partitions is None else {"state_partitions": partitions}
    return Plain(name, inputs=inputs, instances=names, sink=Sink() if sink else None, **own)


def two_chains(sink: bool = True) -> Pipeline:
    """A source of two instances, a stage of two behind channels, and a source beside them."""
    last = [] if sink else [derived("c", b=ALL)]
    return Pipeline("p", [source("a", True, 2), derived("b", 2, sink, a=ALL), *last, source("live", False, sink=Sink())])


def fan_in() -> Pipeline:
    sources = [source("old", True, watermark=Watermark("ts", "1 hour")), source("live", False, watermark=EVENT_TIME)]
    return Pipeline("p", [*sources, derived("both", old=StageInput(), live=StageInput())])


def restored(**what: object) -> RestorePlan:
    defaults: dict[str, object] = {"metadata": AT_5, "chains": (("a",), ("b",), ("live",))}
    return RestorePlan(**(defaults | what))  # type: ignore[arg-type]


def names(plan: AttemptPlan) -> list[str]:
    return [str(task) for task in plan.tasks]


def test_a_new_start_runs_every_task_without_state() -> None:
    plan = plan_attempt(two_chains(), has_later=True, next_checkpoint_id=7)
    assert sorted(names(plan)) == ["a[0]", "a[1]", "b[0]", "b[1]", "live[0]"]
    assert [plan.tasks[TaskId(name, 0)].bounded for name in ("a", "b", "live")] == [True, False, False]
    assert all(task.snapshot is None and task.transactions is None and task.share is None for task in plan.tasks.values())
    assert all(task.take_back_after is None and not task.after_finish for task in plan.tasks.values())
    assert (plan.settled, plan.finished, plan.take_back_after, plan.next_checkpoint_id) == ({}, frozenset(), None, 7)
    assert [(str(source), str(source.task), source.bounded) for source in plan.sources] == [
        ("a[0]", "a[0]", True),
        ("a[1]", "a[1]", True),
        ("live[0]", "live[0]", False),
    ]
    order = [chain.name for chain in plan.chains]
    assert order.index("a") < order.index("b") and order == [vertex.name for vertex in plan.graph.vertices]


def test_a_refused_query_is_divided_at_a_new_start_and_kept_at_a_restore() -> None:
    assert [chain.stages for chain in plan_attempt(fan_in()).chains] == [("old", "live", "both")]
    assert len(plan_attempt(fan_in(), breaks={"both"}).chains) == 3
    recorded = restored(chains=(("old", "live", "both"),))
    assert len(plan_attempt(fan_in(), recorded, breaks={"both"}).chains) == 1


def test_a_task_begins_with_its_part_of_the_checkpoint() -> None:
    own = TaskSnapshot(stages={"b": StageInstanceSnapshot(transactions=("t1", "t2"))}, end_of_data="drain")
    share = KeyedStateShare(range(4), 8, "k", 0, {}, {})
    known = restored(
        tasks={TaskId("b", 0): own, TaskId("a", 1): TaskSnapshot()},
        finished=frozenset({TaskId("a", 0)}),
        shares={TaskId("b", 1): share},
        chains=(("a",), ("b",)),
        new_stages=("live",),
    )
    plan = plan_attempt(two_chains(), known, has_later=True)
    assert sorted(names(plan)) == ["a[1]", "b[0]", "b[1]", "live[0]"]
    b0, b1, live = (plan.tasks[TaskId(*of)] for of in (("b", 0), ("b", 1), ("live", 0)))
    assert (b0.snapshot, b0.after_finish, b0.transactions, b0.share, b0.take_back_after) == (own, True, ("t1", "t2"), None, 5)
    # Nothing of it is in the checkpoint: it has no transactions, and is no new start.
    assert (b1.snapshot, b1.after_finish, b1.transactions, b1.share) == (TaskSnapshot(), False, (), share)
    assert (live.snapshot, live.transactions) == (TaskSnapshot(), ())


def test_of_a_part_that_restarts_only_its_tasks_and_sinks_are_built() -> None:
    known = restored(removed=(OF_B,), finished=frozenset({TaskId("b", 1)}))
    plan = plan_attempt(two_chains(), known, vertices={"a"}, has_later=True)
    assert names(plan) == ["a[0]", "a[1]"] and plan.settled == {"a": ()}
    assert [chain.name for chain in plan.chains] == [chain.name for chain in plan_attempt(two_chains(), known).chains]
    assert plan.finished == {TaskId("b", 1)}
    assert plan_attempt(two_chains(), known, vertices={"b"}, has_later=True).settled["b"][-1] == OF_B


@pytest.mark.parametrize(("sink", "has_later", "finished", "gone", "texts"), list(itertools.product((True, False), repeat=5)))
def test_which_sinks_are_settled(sink: bool, has_later: bool, finished: bool, gone: bool, texts: bool) -> None:
    """Of instances that do not run: those that may show other rows, or have some to commit."""
    removed = SettledInstance("b", 1, "old", 3, StageInstanceSnapshot(transactions=("t",) if texts else ()))
    known = restored(
        finished=frozenset({TaskId("b", 0), TaskId("b", 1)} if finished else ()),
        removed=(removed,) if gone and sink else (),
        new_stages=() if sink else ("c",),
    )
    settled = plan_attempt(two_chains(sink), known, has_later=has_later).settled["b"]
    expected = [
        SettledInstance("b", index, str(index), 2, StageInstanceSnapshot())
        for index in (0, 1)
        if sink and has_later and finished and not (gone and index == 1)  # whose number another instance had
    ]
    assert list(settled) == expected + [removed] * (sink and gone and (has_later or texts))


@pytest.mark.parametrize("asked", [(), (("live", "0"),)])
@pytest.mark.parametrize("ended", [False, True])
def test_fused_sources_keep_what_the_checkpoint_says_of_them(ended: bool, asked: tuple[tuple[str, str], ...]) -> None:
    snapshot = TaskSnapshot(fused=(FusedSourceSnapshot("live", 1, ended, 3), FusedSourceSnapshot("old", 0, True, None)))
    known = restored(chains=(("old", "live", "both"),), tasks={TaskId("old", 0): snapshot})
    plan = plan_attempt(fan_in(), known, ended_sources=asked)
    live, old = snapshot.fused
    assert plan.tasks[TaskId("old", 0)].fused == (
        FusedSource("old", 0, True, True, None, old),
        FusedSource("live", 1, bool(asked), True, 30.0, live),
    )
    new = plan_attempt(fan_in(), ended_sources=asked).tasks[TaskId("old", 0)].fused
    assert [(source.bounded, source.restored) for source in new] == [(True, None), (bool(asked), None)]


def test_a_source_alone_ends_if_it_was_asked_to() -> None:
    plan = plan_attempt(two_chains(), ended_sources={("live", "0"), ("a", "elsewhere")})
    assert plan.tasks[TaskId("live", 0)].bounded and not plan.tasks[TaskId("b", 0)].bounded


def test_numbers_of_key_groups_are_kept() -> None:
    keyed = StageInput(key="k")
    pipeline = Pipeline("p", [source("a", False, 2), derived("b", 2, False, a=keyed), derived("c", 2, partitions=12, b=keyed)])
    new = plan_attempt(pipeline)
    assert new.recorded_key_groups == {"b": new.key_groups["b"], "c": 12} and new.key_groups.keys() == {"a", "b", "c"}
    metadata = CheckpointMetadata(
        "p", 5, stages=(StageMetadata("b", 2, ("0", "1"), most_instances=4), StageMetadata("c", 2, ("0", "1")))
    )
    known = restored(metadata=metadata, chains=(("a",), ("b",), ("c",)), max_parallelism={"b": 256})
    plan = plan_attempt(pipeline, known)
    assert (plan.recorded_key_groups, plan.most_instances) == ({"b": 256, "c": 12}, {"b": 4})


def test_separate_queries_that_a_new_start_would_join() -> None:
    apart = restored(chains=(("old",), ("live",), ("both",)))
    assert list(separate_queries(fan_in(), apart)) == [("old", "both"), ("live", "both")]
    assert list(separate_queries(fan_in(), apart, breaks={"both"})) == []
    assert list(separate_queries(fan_in(), restored(chains=(("old", "live", "both"),)))) == []
    # A source with state in front of the stage at which they meet cannot share its query.
    stateful = ChainMetadata("old", ("old",), {0: TaskSnapshot(stages={"old": StageInstanceSnapshot(state_plan=("dedup",))})})
    kept = restored(metadata=CheckpointMetadata("p", 5, chains=(stateful,)), chains=(("old",), ("live",), ("both",)))
    assert list(separate_queries(fan_in(), kept)) == []
