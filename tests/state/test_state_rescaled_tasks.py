"""A restore with other numbers of instances: when it is refused, and what a task still knows of its channels and event time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dagster_checkpoints.pipeline import ChannelId, TaskId
from dagster_checkpoints.state import (
    ChannelSnapshot,
    InstancesChanged,
    RestorePlan,
    TaskSnapshot,
    WatermarkAt,
    check_rescaling,
    known_channel,
    least_watermark,
    rescaled_stages,
)
from dagster_checkpoints.state.metadata import ChannelEnd


@dataclass(frozen=True)
class StageOf:
    name: str
    instances: tuple[str, ...]


A, B = TaskId("a", 0), TaskId("b", 0)
PLAN = RestorePlan(
    checkpoint_id=7,
    chains=(("a",), ("b",)),
    finished_chains=(),
    new_stages=(),
    fully_finished=frozenset(),
    finished=frozenset(),
    after_finish=frozenset(),
    tasks={A: TaskSnapshot(), B: TaskSnapshot(channels=(ChannelSnapshot("a[0]->b[0]", 4),))},
)
IN_FLIGHT = TaskSnapshot(
    channels=(
        ChannelSnapshot("a[1]->b[0]", 4, in_flight=(WatermarkAt(1),)),
        ChannelSnapshot("a[0]->b[0]", 4, in_flight=(WatermarkAt(1),)),
        ChannelSnapshot("a[2]->b[0]", 4),
    )
)


def test_stages_with_other_instances_are_rescaled_and_those_that_come_or_go_are_not() -> None:
    before = [StageOf("a", ("0",)), StageOf("b", ("0", "1")), StageOf("gone", ("0",)), StageOf("c", ("x", "y"))]
    after = [StageOf("a", ("0",)), StageOf("b", ("0",)), StageOf("new", ("0", "1")), StageOf("c", ("y", "x"))]
    assert rescaled_stages(before, after) == {"b", "c"}, "the same instances in another order are other ones"
    assert rescaled_stages(before, before) == frozenset()


def test_a_checkpoint_of_running_tasks_without_elements_in_flight_can_be_rescaled() -> None:
    check_rescaling(PLAN, {"a", "b"})


def test_elements_in_flight_refuse_other_instances() -> None:
    plan = replace(PLAN, tasks={A: TaskSnapshot(), B: IN_FLIGHT})
    with pytest.raises(InstancesChanged) as refused:
        check_rescaling(plan, {"z", "y"})
    assert str(refused.value) == (
        "The instances of 'y', 'z' have changed, but checkpoint 7 holds elements in flight on a[0]->b[0], a[1]->b[0]. These "
        "belong to the instances that it was taken with: give the stages the same instances in the same order, or restore "
        "another checkpoint."
    )
    check_rescaling(plan, ())


@pytest.mark.parametrize("where", ["finished", "after_finish"])
def test_an_instance_that_has_ended_refuses_other_instances_of_its_own_chain(where: str) -> None:
    plan = replace(PLAN, **{where: frozenset({B, A})})
    with pytest.raises(InstancesChanged, match=r"'b' have changed, but checkpoint 7 holds instances that have ended: b\[0\]\. "):
        check_rescaling(plan, {"b"})
    with pytest.raises(InstancesChanged, match=r"ended: a\[0\], b\[0\]\. "):
        check_rescaling(plan, {"b", "a"})
    check_rescaling(plan, {"c"})
    check_rescaling(plan, ())


def held(ended: ChannelEnd, channel: str = "a[1]->b[0]") -> dict[str, ChannelSnapshot]:
    return {channel: ChannelSnapshot(channel, 9, watermark=50, idle=True, ended=ended)}


CHANNEL = ChannelId("a", 1, "b", 0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("ended", ["none", "drain", "suspend", "partition"])
def test_between_stages_that_keep_their_instances_the_end_of_a_channel_is_known_and_nothing_else(
    ended: ChannelEnd, static: bool
) -> None:
    assert known_channel(CHANNEL, static, [held(ended), {}], {"c"}) == ChannelSnapshot("a[1]->b[0]", 0, ended=ended)


def test_a_task_that_keeps_its_instances_knows_its_own_channels_only() -> None:
    second = ChannelId("a", 1, "b", 1)
    assert known_channel(second, True, [held("drain"), held("none", "a[1]->b[1]")], {"c"}) == ChannelSnapshot("a[1]->b[1]", 0)
    assert known_channel(second, True, [held("drain"), {}], {"c"}) is None


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rescaled", [{"a"}, {"a", "b"}])
def test_nothing_is_known_of_a_channel_from_a_rescaled_stage(rescaled: set[str], static: bool) -> None:
    assert known_channel(CHANNEL, static, [held("drain")], rescaled) is None


@pytest.mark.parametrize("ended", ["drain", "partition"])
def test_a_new_instance_knows_the_end_of_a_static_input_that_an_old_one_knew(ended: ChannelEnd) -> None:
    fourth = ChannelId("a", 1, "b", 3)
    known = [{}, held("none", "a[0]->b[1]") | held(ended, "a[1]->b[1]"), held("none", "a[1]->b[2]")]
    assert known_channel(fourth, True, known, {"b"}) == ChannelSnapshot("a[1]->b[3]", 0, ended="drain")
    assert known_channel(ChannelId("a", 0, "b", 3), True, known, {"b"}) is None, "another producer's end"
    assert known_channel(fourth, False, known, {"b"}) is None, "a stream is sent its end again"


@pytest.mark.parametrize("ended", ["none", "suspend"])
def test_a_static_input_that_had_not_ended_is_new_to_a_new_instance(ended: ChannelEnd) -> None:
    assert known_channel(CHANNEL, True, [held(ended)], {"b"}) is None
    assert known_channel(CHANNEL, True, [], {"b"}) is None


def test_a_rescaled_job_begins_with_the_earliest_watermark() -> None:
    assert least_watermark([30, 10, 20]) == 10
    assert least_watermark([5, 0]) == 0
    assert least_watermark([30, None, 20]) is None, "one had none: any row may still come"
    assert least_watermark([None]) is None
    assert least_watermark([]) is None
    assert least_watermark(ms for ms in (4, 3)) == 3
