"""A restore with other numbers of instances: when it is refused, and what a task still knows of its channels and event time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dagster_checkpoints.pipeline import ChannelId, TaskId
from dagster_checkpoints.state import (
    ChannelSnapshot,
    InstancesChanged,
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

    @property
    def uid(self) -> str:
        return self.name


A, B = TaskId("a", 0), TaskId("b", 0)
TASKS = {A: TaskSnapshot(), B: TaskSnapshot(channels=(ChannelSnapshot("a[0]->b[0]", 4),))}
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
    check_rescaling(7, TASKS, (), {"a", "b"})


def test_elements_in_flight_refuse_other_instances() -> None:
    tasks = {A: TaskSnapshot(), B: IN_FLIGHT}
    with pytest.raises(InstancesChanged) as refused:
        check_rescaling(7, tasks, (), {"z", "y"})
    assert str(refused.value) == (
        "The instances of 'y', 'z' have changed, but checkpoint 7 holds elements in flight on a[0]->b[0], a[1]->b[0]. These "
        "belong to the instances that it was taken with: give the stages the same instances in the same order, or restore "
        "another checkpoint."
    )
    check_rescaling(7, tasks, (), ())


def test_an_instance_that_has_ended_refuses_other_instances_of_its_own_chain() -> None:
    with pytest.raises(InstancesChanged, match=r"'b' have changed, but checkpoint 7 holds instances that have ended: b\[0\]\. "):
        check_rescaling(7, TASKS, {B, A}, {"b"})
    with pytest.raises(InstancesChanged, match=r"ended: a\[0\], b\[0\]\. "):
        check_rescaling(7, TASKS, {B, A}, {"b", "a"})
    check_rescaling(7, TASKS, {B, A}, {"c"})
    check_rescaling(7, TASKS, {B, A}, ())


def held(ended: ChannelEnd, channel: str = "a[1]->b[0]") -> dict[str, ChannelSnapshot]:
    return {channel: ChannelSnapshot(channel, 9, watermark=50, idle=True, ended=ended)}


CHANNEL = ChannelId("a", 1, "b", 0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("ended", ["none", "drain", "suspend", "partition"])
def test_a_channel_between_stages_that_keep_their_instances_is_as_it_was(ended: ChannelEnd, static: bool) -> None:
    known = ChannelSnapshot("a[1]->b[0]", 0, watermark=50, idle=True, ended=ended)
    assert known_channel(CHANNEL, static, [held(ended), {}], {"c"}) == known
    assert known_channel(ChannelId("a", 1, "b", 1), static, [held(ended), {}], {"c"}) is None, "another instance's channel"


@pytest.mark.parametrize("rescaled", [{"a"}, {"a", "b"}])
def test_of_a_sender_with_other_instances_the_earliest_watermark_is_known(rescaled: set[str]) -> None:
    one = {"a[0]->b[0]": ChannelSnapshot("a[0]->b[0]", 9, watermark=70, idle=True)}
    early = {"a[1]->b[1]": ChannelSnapshot("a[1]->b[1]", 9, watermark=40)}
    third = ChannelId("a", 2, "b", 0)
    assert known_channel(third, False, [one, early], rescaled) == ChannelSnapshot("a[2]->b[0]", 0, watermark=40)
    silent = {"a[1]->b[1]": ChannelSnapshot("a[1]->b[1]", 9)}
    assert known_channel(third, False, [one, silent], rescaled) == ChannelSnapshot("a[2]->b[0]", 0)
    assert known_channel(third, False, [held("drain")], rescaled) is None, "its end is sent again"
    assert known_channel(third, False, [{}], rescaled) is None


def test_a_sender_that_is_matched_by_name_keeps_its_watermark() -> None:
    before = [{f"a[{i}]->b[0]": ChannelSnapshot(f"a[{i}]->b[0]", 9, watermark=10 * i, idle=i == 1) for i in range(3)}]
    origins = {"a": (2, None, 1)}
    known = [known_channel(ChannelId("a", index, "b", 1), False, before, {"a", "b"}, origins) for index in range(3)]
    assert known == [
        ChannelSnapshot("a[0]->b[1]", 0, watermark=20),
        None,
        ChannelSnapshot("a[2]->b[1]", 0, watermark=10, idle=True),
    ]


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
