"""A checkpoint as if it had been taken with other instances: who gets which state and transactions, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from dagster_checkpoints.pipeline import Pipeline, StageInput, TaskId, bounded_source, stage, unbounded_source
from dagster_checkpoints.state.errors import InstancesChanged, ParallelismTooHigh
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    OperatorState,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StaticTableSnapshot,
    TaskSnapshot,
    WatermarkAt,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.rescaled_checkpoint import with_instances
from dagster_checkpoints.state.restore import validate_restore

SINK: Any = object()


def pipeline(feeds: str = "abc", keyed: str = "pq", **how: Any) -> Pipeline:
    @unbounded_source(watermark=("ts", "1 minute"), instances=list(feeds), sink=SINK)
    def live(context: Any) -> None: ...

    @stage(inputs={"live": StageInput(**(how or {"key": "k"}))}, instances=list(keyed), sink=SINK)
    def counted(live: Any) -> None: ...

    return Pipeline("p", [live, counted])


def snapshot(name: str, of: str, channels: Sequence[ChannelSnapshot] = (), *, batch: int = 7, **fields: Any) -> TaskSnapshot:
    """The snapshot of one instance, whose parts say whose they were."""
    own = StageInstanceSnapshot(
        (OperatorState("l", "list", (of.encode(),)), OperatorState("u", "union", (of.encode(),))),
        (f"transaction {of}",),
        10,
        state_plan=("count by k",) if name == "counted" else (),
    )
    return TaskSnapshot({name: fields.pop("own", own)}, QuerySnapshot(batch, sources=(of,)), tuple(channels), **fields)


def channel(sender: int, reader: int, watermark: int | None, **fields: Any) -> ChannelSnapshot:
    return ChannelSnapshot(f"live[{sender}]->counted[{reader}]", 5, watermark, **fields)


def checkpoint(
    of: Pipeline, finished: tuple[int, ...] = (), readers: dict[int, TaskSnapshot] | None = None, **fields: Any
) -> CheckpointMetadata:
    inputs = recorded_inputs(of)
    live, counted = of.stages
    stages = (
        StageMetadata("live", live.parallelism, live.instances, finished, inputs=inputs["live"]),
        StageMetadata("counted", counted.parallelism, counted.instances, inputs=inputs["counted"], **fields),
    )
    sources = {i: snapshot("live", name) for i, name in enumerate(live.instances) if i not in finished}
    if readers is None:
        every = range(counted.parallelism)
        readers = {
            i: snapshot(
                "counted",
                counted.instances[i],
                [channel(s, i, 100 * s) for s in range(live.parallelism)],
                valve_watermark=50 - i,
            )
            for i in every
        }
    metadata = CheckpointMetadata(
        "p", 3, stages, (ChainMetadata("live", ("live",), sources), ChainMetadata("counted", ("counted",), readers))
    )
    assert decode(encode(metadata), "x") == metadata
    return metadata


def tasks(rescaled: FittedCheckpoint, stage: str) -> dict[int, TaskSnapshot]:
    return next(chain.tasks for chain in rescaled.metadata.chains if chain.name == stage)


def items(task: TaskSnapshot, stage: str, kind: str) -> list[str]:
    return [item.decode() for state in task.stages[stage].operator_states if state.kind == kind for item in state.items]


def test_the_same_instances_keep_everything() -> None:
    metadata = checkpoint(pipeline())
    same = FittedCheckpoint(pipeline(), metadata)
    assert with_instances(same) == dataclasses.replace(same, taken=metadata)


def test_feeds_keep_what_belongs_to_their_names_and_sinks_what_belongs_to_their_numbers() -> None:
    rescaled = with_instances(FittedCheckpoint(pipeline("dca"), checkpoint(pipeline(), finished=(1,))))
    live = tasks(rescaled, "live")
    assert {i: task.query and task.query.sources for i, task in live.items()} == {0: None, 1: ("c",), 2: ("a",)}
    assert [items(live[i], "live", "list") for i in range(3)] == [[], ["c"], ["a"]]
    assert [live[i].stages["live"].transactions for i in range(3)] == [("transaction a",), (), ("transaction c",)]
    known = [{c.channel: (c.position, c.watermark) for c in task.channels} for task in tasks(rescaled, "counted").values()]
    assert known[0] == {
        "live[0]->counted[0]": (5, None),
        "live[1]->counted[0]": (5, 200),
        "live[2]->counted[0]": (5, 0),
    }, "positions are those of the query's offsets, event time is that of the sender"
    assert [task.query for task in tasks(rescaled, "counted").values()] == [QuerySnapshot(7, sources=(of,)) for of in "pq"]
    assert not rescaled.removed and not rescaled.shares


def test_a_feed_that_has_finished_stays_finished_under_its_new_number() -> None:
    plan = validate_restore(pipeline("xcb"), checkpoint(pipeline(), finished=(0, 1)))
    assert plan.finished == {TaskId("live", 2)} and TaskId("live", 1) in plan.tasks
    gone = [(gone.stage, gone.index, gone.name, gone.snapshot.transactions) for gone in plan.removed]
    assert gone == [("live", 2, "c", ("transaction c",))], "no task commits what number 2 has pre-committed"


@pytest.mark.parametrize(("before", "now"), [("pq", "pqrs"), ("pqrs", "pq"), ("p", "pqr"), ("pqr", "p"), ("pq", "pqr")])
def test_each_key_group_has_one_owner_and_each_item_one_place(before: str, now: str) -> None:
    rescaled = with_instances(FittedCheckpoint(pipeline(keyed=now), checkpoint(pipeline(keyed=before))))
    counted, shares = tasks(rescaled, "counted"), [rescaled.shares[TaskId("counted", i)] for i in range(len(now))]
    assert [group for share in shares for group in share.groups] == list(range(128))
    for share in shares:
        assert set(share.groups) <= {group for old in share.queries for group in share.held[old]}
        assert all(set(share.held[old]) & set(share.groups) for old in share.queries), (
            "each query that is read holds groups of the share"
        )
        assert share.logs == len(before) - 1, "event time continues from the earliest"
    assert sorted(i for task in counted.values() for i in items(task, "counted", "list")) == list(before)
    assert sorted(i for task in counted.values() for i in items(task, "counted", "union")) == list(before)
    assert sum(task.stages["counted"].rows_out for task in counted.values()) == 10 * len(before)
    assert {task.valve_watermark for task in counted.values()} == {51 - len(before)}
    committed = [t for task in counted.values() for t in task.stages["counted"].transactions]
    committed += [t for gone in rescaled.removed for t in gone.snapshot.transactions]
    assert committed == [f"transaction {name}" for name in before]
    of_counted = rescaled.metadata.stages[1]
    assert (of_counted.max_parallelism, of_counted.most_instances) == (128, len(before) if len(before) > len(now) else 0)
    back = with_instances(FittedCheckpoint(pipeline(keyed=before), rescaled.metadata))
    assert [gone.index for gone in back.removed] == list(range(len(before), len(now))), "sinks of a later checkpoint"
    assert back.metadata.stages[1].max_parallelism == 128


def test_the_sinks_of_all_instances_that_there_ever_were_are_settled() -> None:
    rescaled = with_instances(FittedCheckpoint(pipeline(), checkpoint(pipeline(), most_instances=4)))
    assert [(gone.stage, gone.index, gone.snapshot.transactions) for gone in rescaled.removed] == [
        ("counted", 2, ()),
        ("counted", 3, ()),
    ]
    assert rescaled.metadata.stages[1].most_instances == 4


def joining(feeds: str) -> Pipeline:
    @unbounded_source(instances=list(feeds), sink=SINK)
    def live(context: Any) -> None: ...

    @bounded_source
    def names(context: Any) -> None: ...

    @stage(inputs={"names": StageInput(mode="static")}, instances=list(feeds), sink=SINK)
    def joined(live: Any, names: Any) -> None: ...

    return Pipeline("p", [live, names, joined])


TABLE = StaticTableSnapshot("names", (Segment((), 2),))


def checkpoint_of_joining(static: tuple[StaticTableSnapshot, ...] | None) -> CheckpointMetadata:
    """A checkpoint after the end of the static input, with these tables in each instance; None: all instances have ended."""
    of, running = joining("ab"), static is not None
    finished = {"names": (0,), "live": () if running else (0, 1), "joined": () if running else (0, 1)}
    stages = tuple(
        StageMetadata(each.name, each.parallelism, each.instances, finished[each.name], inputs=recorded_inputs(of)[each.name])
        for each in of.stages
    )
    ended = [ChannelSnapshot(f"names[0]->joined[{index}]", 3, ended="drain") for index in range(2)]
    live, joined = (
        {i: snapshot(stage, name, channels[i], static=tables) for i, name in enumerate("ab")} if running else {}
        for stage, channels, tables in (("live", ((), ()), ()), ("joined", [(each,) for each in ended], static or ()))
    )
    chains = (
        ChainMetadata("live", ("live",), live),
        ChainMetadata("names", ("names",), {}),
        ChainMetadata("joined", ("joined",), joined),
    )
    return CheckpointMetadata("p", 3, stages, chains)


def test_a_new_instance_begins_with_the_static_inputs_of_the_others() -> None:
    joined = tasks(with_instances(FittedCheckpoint(joining("bca"), checkpoint_of_joining((TABLE,)))), "joined")
    assert [joined[index].query is None for index in range(3)] == [False, True, False]
    assert [joined[index].static for index in range(3)] == [(TABLE,)] * 3
    assert [{c.ended for c in joined[index].channels if c.channel.startswith("names")} for index in range(3)] == [{"drain"}] * 3


@pytest.mark.parametrize("static", [None, ()], ids=["all have finished", "all wait for their final checkpoint"])
def test_a_new_instance_whose_static_input_no_instance_keeps_is_refused(static: tuple[StaticTableSnapshot, ...] | None) -> None:
    with pytest.raises(
        InstancesChanged, match=r"'joined' has the new instance 'c', which needs all rows of its static input 'names'"
    ):
        validate_restore(joining("abc"), checkpoint_of_joining(static))
    validate_restore(joining("ba"), checkpoint_of_joining(static))


def test_a_new_instance_of_a_static_input_whose_reader_has_ended_is_refused() -> None:
    def of(names: str) -> Pipeline:
        @bounded_source(instances=list(names))
        def names_of(context: Any) -> None: ...

        @stage(inputs={"names_of": StageInput(mode="static")}, sink=SINK)
        def joined(names_of: Any) -> None: ...

        return Pipeline("p", [names_of, joined])

    inputs = recorded_inputs(of("a"))
    stages = tuple(StageMetadata(each.name, 1, each.instances, inputs=inputs[each.name]) for each in of("a").stages)
    waiting = {name: {0: TaskSnapshot({name: StageInstanceSnapshot()}, end_of_data="drain")} for name in ("names_of", "joined")}
    before = CheckpointMetadata("p", 3, stages, tuple(ChainMetadata(name, (name,), tasks) for name, tasks in waiting.items()))
    validate_restore(of("a"), before)
    with pytest.raises(
        InstancesChanged, match=r"Instance 1 of 'names_of' would send its rows to joined\[0\], which has finished"
    ):
        validate_restore(of("ab"), before)


def test_a_stage_without_state_in_spark_begins_a_new_query() -> None:
    plain = {i: snapshot("counted", "x", own=StageInstanceSnapshot(state_plan=())) for i in range(2)}
    metadata = checkpoint(pipeline(edge="all_to_all"), readers=plain)
    rescaled = with_instances(FittedCheckpoint(pipeline(keyed="pqr", edge="all_to_all"), metadata))
    assert [task.query for task in tasks(rescaled, "counted").values()] == [None] * 3 and not rescaled.shares


def test_one_instance_may_become_several_with_a_key() -> None:
    plan = validate_restore(pipeline(keyed="pq"), checkpoint(pipeline(keyed="p", edge="all_to_all")))
    assert {share.key for share in plan.shares.values()} == {"k"}


UNRECORDED = {i: snapshot("counted", "x", own=StageInstanceSnapshot()) for i in range(2)}


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (pipeline("ab"), checkpoint(pipeline()), "'live' has no instance 'c' any more"),
        (pipeline(keyed="pqr"), checkpoint(pipeline(), readers=UNRECORDED), "does not say whether it keeps state"),
        (pipeline(keyed="pqr", edge="all_to_all"), checkpoint(pipeline(edge="all_to_all")), "no column decides"),
        (pipeline("abcdefgh", edge="pointwise"), checkpoint(pipeline("abcd", edge="pointwise")), "POINTWISE, would get the rows"),
    ],
)
def test_what_cannot_be_rescaled(now: Pipeline, before: CheckpointMetadata, text: str) -> None:
    with pytest.raises(InstancesChanged, match=text):
        validate_restore(now, before)


def test_more_instances_than_key_groups() -> None:
    with pytest.raises(ParallelismTooHigh, match="'counted' has 5 instances and a maximum parallelism of 4"):
        validate_restore(pipeline(keyed="pqrst"), checkpoint(pipeline(), max_parallelism=4))


def test_an_instance_that_waits_behind_its_end_of_data_knows_the_ends_of_its_channels() -> None:
    """At-least-once would decline each checkpoint as one whose barrier came in front of the end."""
    ended = channel(0, 0, 900, ended="drain", in_flight=(WatermarkAt(950),))
    readers = {0: snapshot("counted", "a", [ended], end_of_data="drain"), 1: snapshot("counted", "b", [channel(1, 1, 70)])}
    metadata = checkpoint(pipeline("ab", "ab", edge="pointwise"), readers=readers)
    live = {**metadata.chains[0].tasks, 0: replace(metadata.chains[0].tasks[0], end_of_data="drain")}
    metadata = replace(metadata, chains=(replace(metadata.chains[0], tasks=live), metadata.chains[1]))
    counted = tasks(with_instances(FittedCheckpoint(pipeline("ba", "ba", edge="pointwise"), metadata)), "counted")
    assert counted[1].channels == (ChannelSnapshot("live[1]->counted[1]", 0, 900, ended="drain"),)
    assert [(c.channel, c.watermark, c.ended) for c in counted[0].channels] == [("live[0]->counted[0]", 70, "none")]
