"""Stages are stored under their uids, and restored under the names that the pipeline has now."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageKind
from dagster_checkpoints.state.errors import NonRestoredState
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    FusedSourceSnapshot,
    InputMetadata,
    StageInstanceSnapshot,
    StageMetadata,
    StaticTableSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.restore import fitted, validate_restore
from dagster_checkpoints.state.stage_names import with_uids


@dataclass(frozen=True)
class StageOf:
    name: str
    uid: str
    instances: tuple[str, ...] = ("0",)


@dataclass(frozen=True)
class PipelineOf:
    stages: tuple[StageOf, ...]
    name: str = "p"
    edges: tuple[()] = ()


def metadata(**names: str) -> CheckpointMetadata:
    """A checkpoint in which every field that names a stage does so. `names` are those of a, b, c and d, if they have others."""
    a, b, c, d = (names.get(name, name) for name in "abcd")
    fused = (FusedSourceSnapshot(a, 0), FusedSourceSnapshot(b, 1, ended=True))
    first = TaskSnapshot({a: StageInstanceSnapshot(rows_out=1), c: StageInstanceSnapshot(rows_out=2)}, fused=fused)
    second = TaskSnapshot(
        {d: StageInstanceSnapshot()},
        channels=(ChannelSnapshot("c[0]->d[0]", 3),),  # channels are named by uids in both forms
        static=(StaticTableSnapshot(b),),
        output_positions={"c[0]->d[0]": 3},
    )
    stages = (
        StageMetadata(a, 1, ("0",), inputs=()),
        StageMetadata(b, 1, ("0",), finished=(0,), fully_finished=True, inputs=()),
        StageMetadata(c, 1, ("0",), inputs=(InputMetadata(a), InputMetadata(b))),
        StageMetadata(d, 1, ("0",), inputs=(InputMetadata(c), InputMetadata(b, "static"))),
    )
    return CheckpointMetadata("p", 5, stages, (ChainMetadata(a, (a, b, c), {0: first}), ChainMetadata(d, (d,), {0: second})))


NEW = {"a": "first", "b": "b", "c": "third", "d": "last"}
RENAMED = PipelineOf(tuple(StageOf(name, uid) for uid, name in NEW.items()))


def test_every_field_that_names_a_stage_is_translated() -> None:
    assert with_uids(metadata(**NEW), RENAMED) == metadata()
    assert fitted(RENAMED, decode(encode(metadata()), "x")) == metadata(**NEW)


def test_names_that_are_uids_cost_nothing() -> None:
    stored, plain = metadata(), PipelineOf(tuple(StageOf(name, name) for name in "abcd"))
    assert with_uids(stored, plain) is stored is fitted(plain, stored)


def test_two_stages_swap_their_names() -> None:
    swapped = {"a": "d", "b": "b", "c": "c", "d": "a"}
    pipeline = PipelineOf(tuple(StageOf(name, uid) for uid, name in swapped.items()))
    assert fitted(pipeline, metadata()) == metadata(**swapped)
    assert with_uids(metadata(**swapped), pipeline) == metadata()


class Plain(Stage):
    def transform(self, context: StageContext, **inputs: object) -> object:  # type: ignore[override]
        raise AssertionError


class Sink:
    supported_output_modes = frozenset({"append"})


def test_a_new_stage_under_the_name_of_a_removed_one_does_not_get_its_state() -> None:
    task = {0: TaskSnapshot({"a": StageInstanceSnapshot()})}
    stored = CheckpointMetadata("p", 5, (StageMetadata("a", 1, ("0",), inputs=()),), (ChainMetadata("a", ("a",), task),))

    def pipeline(**options: str) -> Pipeline:
        return Pipeline("p", [Plain("a", kind=StageKind.UNBOUNDED_SOURCE, sink=Sink(), **options)])  # type: ignore[arg-type]

    assert validate_restore(pipeline(), stored).new_stages == ()
    other = pipeline(uid="a2")
    with pytest.raises(NonRestoredState, match="holds state of 'uid a'"):
        validate_restore(other, stored)
    plan = validate_restore(other, stored, allow_non_restored_state=True)
    assert (plan.new_stages, plan.tasks, plan.dropped) == (("a",), {}, ("uid a",))
