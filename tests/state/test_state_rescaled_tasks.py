"""A restore with other numbers of instances: the stages that it concerns, and its earliest event time."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_checkpoints.state import (
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


def test_stages_with_other_instances_are_rescaled_and_those_that_come_or_go_are_not() -> None:
    before = [StageOf("a", ("0",)), StageOf("b", ("0", "1")), StageOf("gone", ("0",)), StageOf("c", ("x", "y"))]
    after = [StageOf("a", ("0",)), StageOf("b", ("0",)), StageOf("new", ("0", "1")), StageOf("c", ("y", "x"))]
    assert rescaled_stages(before, after) == {"b", "c"}, "the same instances in another order are other ones"
    assert rescaled_stages(before, before) == frozenset()


def test_a_rescaled_job_begins_with_the_earliest_watermark() -> None:
    assert least_watermark([30, 10, 20]) == 10
    assert least_watermark([5, 0]) == 0
    assert least_watermark([30, None, 20]) is None, "one had none: any row may still come"
    assert least_watermark([None]) is None
    assert least_watermark([]) is None
    assert least_watermark(ms for ms in (4, 3)) == 3
