"""A restore with other numbers of instances: when it is refused, and its earliest event time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import (
    InstancesChanged,
    check_rescaling,
    least_watermark,
    rescaled_stages,
)


@dataclass(frozen=True)
class StageOf:
    name: str
    instances: tuple[str, ...]

    @property
    def uid(self) -> str:
        return self.name


A, B = TaskId("a", 0), TaskId("b", 0)


def test_stages_with_other_instances_are_rescaled_and_those_that_come_or_go_are_not() -> None:
    before = [StageOf("a", ("0",)), StageOf("b", ("0", "1")), StageOf("gone", ("0",)), StageOf("c", ("x", "y"))]
    after = [StageOf("a", ("0",)), StageOf("b", ("0",)), StageOf("new", ("0", "1")), StageOf("c", ("y", "x"))]
    assert rescaled_stages(before, after) == {"b", "c"}, "the same instances in another order are other ones"
    assert rescaled_stages(before, before) == frozenset()


def test_an_instance_that_has_ended_refuses_other_instances_of_its_own_chain() -> None:
    with pytest.raises(InstancesChanged) as refused:
        check_rescaling(7, {B, A}, {"b", "z"})
    assert str(refused.value) == (
        "The instances of 'b', 'z' have changed, but checkpoint 7 holds instances that have ended: b[0]. They belong to the "
        "instances that it was taken with: give the stages the same instances in the same order, or restore another checkpoint."
    )
    with pytest.raises(InstancesChanged, match=r"ended: a\[0\], b\[0\]\. "):
        check_rescaling(7, {B, A}, {"b", "a"})
    check_rescaling(7, {B, A}, {"c"})
    check_rescaling(7, {B, A}, ())
    check_rescaling(7, (), {"a", "b"})


def test_a_rescaled_job_begins_with_the_earliest_watermark() -> None:
    assert least_watermark([30, 10, 20]) == 10
    assert least_watermark([5, 0]) == 0
    assert least_watermark([30, None, 20]) is None, "one had none: any row may still come"
    assert least_watermark([None]) is None
    assert least_watermark([]) is None
    assert least_watermark(ms for ms in (4, 3)) == 3
