"""Ids in bounded memory: the same answers as a set gives, as long as there are not too many gaps."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.checkpoints import AcknowledgeAnswer
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    AcknowledgeAnswered,
    Acknowledged,
    CheckpointRequested,
    Declined,
    MetadataWritten,
    TaskStateChanged,
)
from dagster_checkpoints.coordination.id_ranges import IdRanges
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex


@given(st.lists(st.integers(1, 60), max_size=80))
def test_the_same_answers_as_a_set(ids: list[int]) -> None:
    found, wanted = IdRanges(), set()
    for each in ids:
        found.add(each)
        wanted.add(each)
        assert [n for n in range(62) if n in found] == sorted(wanted)
    assert len(found) == sum(n - 1 not in wanted for n in wanted)


@pytest.mark.parametrize("ids", list(itertools.permutations((2, 3, 5, 6, 7, 9))))
def test_ranges_that_meet_are_one(ids: tuple[int, ...]) -> None:
    found = IdRanges()
    for each in ids:
        found.add(each)
    assert (len(found), [n for n in range(12) if n in found]) == (3, sorted(ids))
    found.add(4)
    assert (len(found), [n for n in range(12) if n in found]) == (2, [2, 3, 4, 5, 6, 7, 9])


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 5))
def test_beyond_its_bounds_it_forgets_nothing_that_was_added(ids: list[int], most: int) -> None:
    found, wanted = IdRanges(most), set()
    for each in ids:
        found.add(each)
        wanted.add(each)
        assert len(found) <= most
        assert all(n in found for n in wanted)
        assert max(wanted) + 1 not in found and min(wanted) - 1 not in found


@pytest.mark.parametrize("seed", range(3))
def test_a_long_job_remembers_little_and_answers_as_ever(seed: int) -> None:
    """Some checkpoints complete, some are declined; each acknowledgement is repeated late."""
    r = random.Random(seed)
    task = TaskId("V0", 0)
    graph = ExecutionGraph((Vertex("V0", ("v0",), 1),), ())
    coordinator = CheckpointCoordinator(graph, CheckpointConfig(interval=None, tolerable_failed_checkpoints=10**6, history=0))
    coordinator.handle(TaskStateChanged(task, TaskState.RUNNING), 0.0)
    completed = set()
    for checkpoint_id in range(1, 3001):
        coordinator.handle(CheckpointRequested("r"), 0.0)
        if r.random() < 0.1:
            coordinator.handle(Declined(task, checkpoint_id), 0.0)
        else:
            coordinator.handle(Acknowledged(task, checkpoint_id, "state"), 0.0)
            coordinator.handle(MetadataWritten(checkpoint_id, f"at-{checkpoint_id}"), 0.0)
            completed.add(checkpoint_id)
    for checkpoint_id in (*r.sample(range(1, 3001), 200), 3001):
        (answered, *_) = coordinator.handle(Acknowledged(task, checkpoint_id, "state"), 0.0)
        expected = AcknowledgeAnswer.DUPLICATE if checkpoint_id in completed else AcknowledgeAnswer.DISCARDED
        expected = expected if checkpoint_id <= 3000 else AcknowledgeAnswer.UNKNOWN
        assert answered == AcknowledgeAnswered(task, checkpoint_id, expected)
    held = [value for value in vars(coordinator._pending).values() if hasattr(value, "__len__")]
    assert sum(map(len, held)) < 500, "ranges of ids, not ids"
