"""The layout of a pipeline that a checkpoint records."""

from __future__ import annotations

import pytest

from dagster_checkpoints.pipeline import Chain, Pipeline, StageInput, TaskId, unbounded_source
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    FusedSourceSnapshot,
    InputMetadata,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.recording import ended_sources, recorded_chains, recorded_stages
from dagster_checkpoints.state.stage_changes import with_ended_sources
from simulation.shapes import InputSpec, StageSpec, shape_of

SHAPE = shape_of((StageSpec("bounded", 2), StageSpec("map", 2, (InputSpec(0, StageInput()),), sink=True)), chaining=False)
SOURCE, READER = SHAPE.chains


def test_an_unfinished_task_is_in_its_chain_and_a_finished_one_is_not() -> None:
    one, two, three = (TaskSnapshot(watermark=n) for n in range(3))
    snapshots = {TaskId("s0", 1): one, TaskId("s1", 1): two, TaskId("s1", 0): three}
    assert recorded_chains(SHAPE.chains, snapshots) == (
        ChainMetadata("s0", ("s0",), {1: one}),
        ChainMetadata("s1", ("s1",), {0: three, 1: two}),
    )


def test_a_stage_records_which_of_its_instances_have_finished() -> None:
    stages = recorded_stages(SHAPE.pipeline, SHAPE.chains, {TaskId("s0", 0), TaskId("s0", 1), TaskId("s1", 1)})
    read = (InputMetadata("s0", "stream", "pointwise"),)
    assert stages == (
        StageMetadata("s0", 2, ("0", "1"), finished=(0, 1), fully_finished=True, inputs=()),
        StageMetadata("s1", 2, ("0", "1"), finished=(1,), inputs=read),
    )


def test_the_stages_of_a_chain_finish_together() -> None:
    chain = Chain("s0", ("s0", "s1"), ("0", "1"))
    stages = recorded_stages(SHAPE.pipeline, [chain], [TaskId("s0", 1)])
    assert [(stage.finished, stage.fully_finished) for stage in stages] == [((1,), False)] * 2


def test_a_fused_source_finishes_while_its_task_runs() -> None:
    sources = [StageSpec("bounded", 1), StageSpec("unbounded", 1)]
    reader = StageSpec("map", 1, tuple(InputSpec(n, StageInput(fuse=True)) for n in range(2)), sink=True)
    shape = shape_of((*sources, reader), chaining=True)
    assert [chain.stages for chain in shape.chains] == [("s0", "s1", "s2")]
    snapshot = TaskSnapshot(fused=(FusedSourceSnapshot("s0", 0, ended=True), FusedSourceSnapshot("s1", 1)))
    assert ended_sources([snapshot, TaskSnapshot()]) == {"s0"}
    stages = recorded_stages(shape.pipeline, shape.chains, (), ended_sources([snapshot]))
    assert [(stage.finished, stage.fully_finished) for stage in stages] == [((0,), True), ((), False), ((), False)]


def test_a_source_that_a_request_has_ended_is_recorded_until_it_has_finished() -> None:
    ending = {("s0", "0"), ("s0", "1"), ("gone", "0")}
    stages = recorded_stages(SHAPE.pipeline, SHAPE.chains, {TaskId("s0", 0)}, ending=ending)
    assert [stage.ending for stage in stages] == [("1",), ()]


@pytest.mark.parametrize(
    ("finished", "ending", "now", "ends"),
    [
        ((), (), "01", ""),
        ((), ("1",), "01", "1"),
        ((0,), ("1",), "01", "01"),  # all that had not finished: what has finished stays so
        ((), ("0", "1"), "012", "012"),
        ((0,), ("1",), "ab", "ab"),
        ((), ("1",), "0", ""),
        ((), ("1",), "12", "1"),
        ((0, 1), (), "012", ""),
    ],
)
def test_which_instances_end_again(finished: tuple[int, ...], ending: tuple[str, ...], now: str, ends: str) -> None:
    pipeline = Pipeline("p", [unbounded_source(name="s0", instances=list(now), sink=object())(lambda context: None)])
    stage = StageMetadata("s0", 2, ("0", "1"), finished, len(finished) == 2, ending=ending)
    other = StageMetadata("removed", 1, ("0",), ending=("0",))
    restored = with_ended_sources(FittedCheckpoint(pipeline, CheckpointMetadata("p", 1, (other, stage))))
    assert (restored.ending if restored is not None else frozenset()) == {("s0", name) for name in ends}
    said = "; ".join(f"{name!r} of 's0' reads what is there, and ends" for name in ends)
    assert (restored.changes if restored is not None else ()) == ((f"ended by a request: {said}.",) if ends else ())
