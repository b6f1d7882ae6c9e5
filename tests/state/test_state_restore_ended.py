"""A finished stage behind one that has reached its end of data: nothing more comes, so the checkpoint can be restored."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dagster_checkpoints.pipeline import EdgePattern
from dagster_checkpoints.state import (
    ChainMetadata,
    CheckpointMetadata,
    StageMetadata,
    TaskSnapshot,
    UnfinishedPredecessor,
    validate_restore,
)


@dataclass(frozen=True)
class View:
    name: str
    instances: tuple[str, ...]


@dataclass(frozen=True)
class Edge:
    source: str
    target: str
    pattern: EdgePattern


@dataclass(frozen=True)
class Job:
    stages: tuple[View, ...]
    edges: tuple[Edge, ...]
    name: str = "p"


def checkpoint(ended: tuple[int, ...]) -> CheckpointMetadata:
    """Stage `up` of two instances, of which those given wait behind their end of data; `down` has finished."""
    tasks = {i: TaskSnapshot(end_of_data="drain" if i in ended else "none") for i in range(2)}
    stages = (StageMetadata("up", 2, ("0", "1")), StageMetadata("down", 2, ("0", "1"), (0, 1), fully_finished=True))
    return CheckpointMetadata("p", 2, stages, (ChainMetadata("up", ("up",), tasks), ChainMetadata("down", ("down",))))


@pytest.mark.parametrize("pattern", EdgePattern)
def test_a_predecessor_that_emits_nothing_more(pattern: EdgePattern) -> None:
    job = Job((View("up", ("0", "1")), View("down", ("0", "1"))), (Edge("up", "down", pattern),))
    plan = validate_restore(job, checkpoint((0, 1)))
    assert {str(task) for task in plan.finished} == {"down[0]", "down[1]"}
    assert {str(task) for task in plan.after_finish} == {"up[0]", "up[1]"}


@pytest.mark.parametrize("ended", [(), (0,)])
def test_a_predecessor_that_still_has_something_to_say(ended: tuple[int, ...]) -> None:
    job = Job((View("up", ("0", "1")), View("down", ("0", "1"))), (Edge("up", "down", EdgePattern.POINTWISE),))
    with pytest.raises(UnfinishedPredecessor, match="'down' is fully finished"):
        validate_restore(job, checkpoint(ended))
