"""Stages that come between two others, or go: who keeps its state, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, StageKind, TaskId
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.state.errors import ChainLayoutChanged, InputsChanged, NonRestoredState
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    InputMetadata,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    WatermarkStatus,
)
from dagster_checkpoints.state.restore import RestorePlan, fitted, validate_restore
from dagster_checkpoints.state.stages_between import with_stages_now

BY_K = StageInput(key="k")
PW = StageInput()


class AnyStage(Stage):
    def transform(self, context: Any, **inputs: Any) -> Any:
        raise NotImplementedError


def pipeline(uids: Mapping[str, str] = MappingProxyType({}), /, **reads: dict[str, StageInput] | None) -> Pipeline:
    """By stage, what it reads; a name that ends with a number has as many instances. `uids`: of stages that had other names."""
    stages, read = [], {name for inputs in reads.values() for name in inputs or ()}
    for name, inputs in reads.items():
        kind = StageKind.DERIVED if inputs else StageKind.UNBOUNDED_SOURCE
        instances = [str(index) for index in range(int(name[-1]) if name[-1].isdigit() else 1)]
        stages.append(
            AnyStage(
                name,
                uid=uids.get(name),
                kind=kind,
                inputs=inputs or {},
                instances=instances,
                sink=None if name in read else ParquetSink(f"/never/{name}"),
            )
        )
    return Pipeline("p", stages)


def checkpoint(
    before: Pipeline, *chains: tuple[str, ...], known: dict[str, Any] | None = None, **more: Any
) -> CheckpointMetadata:
    """A checkpoint of a pipeline that runs as these chains; `known`: by channel, the elements in flight on it."""
    reads = {
        each.name: tuple(
            InputMetadata(edge.source, edge.input.mode, edge.pattern.value, edge.input.key or "")
            for edge in before.edges
            if edge.target == each.name
        )
        for each in before.stages
    }
    stages = tuple(StageMetadata(s.name, s.parallelism, tuple(s.instances), inputs=reads[s.name]) for s in before.stages)
    recorded = []
    for chain in chains:
        tasks = {}
        for index in range(before.stage(chain[0]).parallelism):
            own = {name: waits for name, waits in (known or {}).items() if name.endswith(f"->{chain[0]}[{index}]")}
            channels = tuple(ChannelSnapshot(name, 7, in_flight=waits) for name, waits in own.items())
            files = (StateFile("offsets/3", "sha", 1), StateFile("state/0/1/4.zip", "sha of state", 1))
            snapshots = {name: StageInstanceSnapshot(state_plan=("count",) if name == chain[-1] else ()) for name in chain}
            query = QuerySnapshot(3, files, sources=(f"first source of {chain[0]}",))
            tasks[index] = TaskSnapshot(snapshots, query, channels=channels, valve_watermark=50)
        recorded.append(ChainMetadata(chain[0], chain, tasks))
    return CheckpointMetadata("p", 3, stages, tuple(recorded))


def restored(changed: Pipeline, metadata: CheckpointMetadata, allow: bool = False) -> RestorePlan:
    return validate_restore(changed, metadata, allow)


APART = checkpoint(pipeline(a=None, c2={"a": BY_K}), ("a",), ("c2",), known={"a[0]->c2[0]": (), "a[0]->c2[1]": ()})


def test_new_stages_in_front_of_one_that_keeps_its_state() -> None:
    changed = pipeline(a=None, b3={"a": PW}, d={"b3": PW}, c2={"d": BY_K})
    plan = restored(changed, APART)
    assert (plan.chains, plan.new_stages) == ((("a",), ("c2",)), ("b3", "d"))
    assert plan.changes == (
        "other inputs: 'c2' keeps its state, and reads 'd' in place of 'a'.",
        "new: 'b3', 'd' begin without state.",
    )
    for index in range(2):
        before, now = APART.chains[1].tasks[index], plan.tasks[TaskId("c2", index)]
        assert (now.query, now.stages, now.valve_watermark) == (before.query, before.stages, 50)
        assert now.channels == (), "what the channels from a had read says nothing of those from d"


def test_a_stage_between_that_is_gone_or_another_one() -> None:
    before = checkpoint(pipeline(a=None, b={"a": PW}, c2={"b": BY_K}), ("a",), ("b",), ("c2",), known={"b[0]->c2[0]": ()})
    without, other = pipeline(a=None, c2={"a": BY_K}), pipeline(a=None, x={"a": PW}, c2={"x": BY_K})
    for changed, reads in ((without, "a"), (other, "x")):
        with pytest.raises(NonRestoredState, match="holds state of 'b'"):
            restored(changed, before)
        plan = restored(changed, before, allow=True)
        assert plan.chains == (("a",), ("c2",))
        assert plan.changes[0] == f"other inputs: 'c2' keeps its state, and reads '{reads}' in place of 'b'."


IN_ONE = checkpoint(pipeline(a=None, c={"a": PW}, d={"c": PW}), ("a", "c", "d"))


def test_a_stage_between_two_of_one_query_divides_it() -> None:
    changed = pipeline(a=None, b={"a": PW}, c={"b": PW}, d={"c": PW})
    plan = restored(changed, IN_ONE)
    assert (plan.chains, plan.new_stages) == ((("a",), ("c", "d")), ("b",))
    assert plan.changes == (
        "other inputs: 'c' keeps its state, and reads 'b' in place of 'a'.",
        "divided: the query of a -> c -> d, with its state, into a and c -> d.",
        "new: 'b' begins without state.",
    )
    second = plan.tasks[TaskId("c", 0)]
    assert second.query == QuerySnapshot(3, IN_ONE.chains[0].tasks[0].query.files, sources=())  # type: ignore[union-attr]
    assert with_stages_now(("a", "c", "d"), plan.metadata) == ("a", "b", "c", "d")
    assert with_stages_now(("c", "d"), plan.metadata) == ("c", "d")


def test_a_stage_in_the_middle_of_a_query_is_gone() -> None:
    changed = pipeline(a=None, d={"a": PW})
    with pytest.raises(NonRestoredState, match="holds state of 'c'"):
        restored(changed, IN_ONE)
    plan = restored(changed, IN_ONE, allow=True)
    assert (plan.chains, plan.dropped) == ((("a",), ("d",)), ("c",))
    assert plan.tasks[TaskId("d", 0)].stages == {"d": StageInstanceSnapshot(state_plan=("count",))}
    assert [file.path for file in plan.tasks[TaskId("d", 0)].query.files] == ["offsets/3", "state/0/1/4.zip"]  # type: ignore[union-attr]


WAITING = (Segment((), 4), WatermarkStatus(False))


def test_a_producer_that_has_another_name_by_now() -> None:
    """Channels are named by uids."""
    renamed = pipeline({"z": "a"}, z=None, b={"z": PW}, c2={"b": BY_K})
    plan = restored(renamed, APART)
    assert plan.changes[:2] == (
        "by uid: 'z' is 'a' in the checkpoint.",
        "other inputs: 'c2' keeps its state, and reads 'b' in place of 'z'.",
    )
    assert [plan.tasks[TaskId("c2", index)].channels for index in range(2)] == [(), ()]
    waiting = checkpoint(pipeline(a=None, c2={"a": BY_K}), ("a",), ("c2",), known={"a[0]->c2[1]": WAITING})
    with pytest.raises(InputsChanged):
        restored(renamed, waiting, allow=True)


@pytest.mark.parametrize(
    ("before", "chains", "known", "now"),
    [
        # another key, or none
        (pipeline(a=None, c2={"a": BY_K}), ("a", "c2"), {}, pipeline(a=None, b={"a": PW}, c2={"b": StageInput(key="v")})),
        (pipeline(a=None, c2={"a": BY_K}), ("a", "c2"), {}, pipeline(a=None, b2={"a": PW}, c2={"b2": PW})),
        # the rows of an instance would not stay together
        (pipeline(a2=None, c2={"a2": PW}), ("a2", "c2"), {}, pipeline(a2=None, b={"a2": PW}, c2={"b": PW})),
        (pipeline(a2=None, c2={"a2": PW}), ("a2", "c2"), {}, pipeline(a2=None, b2={"a2": BY_K}, c2={"b2": PW})),
        # rows that have not passed the new stage are in flight; or rows in front of the one that is gone
        (
            pipeline(a=None, c2={"a": BY_K}),
            ("a", "c2"),
            {"a[0]->c2[1]": WAITING},
            pipeline(a=None, b={"a": PW}, c2={"b": BY_K}),
        ),
        (
            pipeline(a=None, b={"a": PW}, c2={"b": BY_K}),
            ("a", "b", "c2"),
            {"a[0]->b[0]": WAITING},
            pipeline(a=None, c2={"a": BY_K}),
        ),
        # two ways to the reader, or another origin
        (
            pipeline(a=None, c2={"a": BY_K}),
            ("a", "c2"),
            {},
            pipeline(a=None, z=None, b={"a": PW, "z": PW}, c2={"b": BY_K}),
        ),
        (
            pipeline(a=None, c2={"a": BY_K}),
            ("a", "c2"),
            {},
            pipeline(a=None, b={"a": PW}, x={"a": PW}, c2={"b": BY_K, "x": BY_K}),
        ),
        (pipeline(a=None, c2={"a": BY_K}), ("a", "c2"), {}, pipeline(a=None, z=None, b={"z": PW}, c2={"b": BY_K})),
    ],
)
def test_a_reader_whose_rows_would_be_others(
    before: Pipeline, chains: tuple[str, ...], known: dict[str, Any], now: Pipeline
) -> None:
    metadata = checkpoint(before, *((name,) for name in chains), known=known)
    with pytest.raises(InputsChanged, match="Stage 'c2' does not read its inputs as in checkpoint 3"):
        restored(now, metadata, allow=True)


def test_other_instances_at_the_same_time() -> None:
    stages = (APART.stages[0], msgspec.structs.replace(APART.stages[1], parallelism=3, instances=("0", "1", "2")))
    metadata = msgspec.structs.replace(APART, stages=stages)
    assert fitted(pipeline(a=None, b={"a": PW}, c2={"b": BY_K}), metadata) is metadata, "its inputs are checked as they were"


def test_pointwise_readers_of_as_many_instances_stay_together() -> None:
    before = checkpoint(pipeline(a2=None, c2={"a2": PW}), ("a2",), ("c2",))
    assert restored(pipeline(a2=None, b2={"a2": PW}, c2={"b2": PW}), before).new_stages == ("b2",)
    one = checkpoint(pipeline(a2=None, c={"a2": PW}), ("a2",), ("c",))
    assert restored(pipeline(a2=None, b={"a2": BY_K}, c={"b": PW}), one).new_stages == ("b",)


def test_a_query_that_cannot_be_divided_is_refused() -> None:
    changed = pipeline(a=None, z=None, b={"a": PW, "z": PW}, c={"b": PW}, d={"c": PW})
    with pytest.raises(ChainLayoutChanged, match="now 'c' reads 'b'"):
        restored(changed, IN_ONE)


def test_a_checkpoint_that_fits_stays_as_it_is() -> None:
    same = pipeline(a=None, c2={"a": BY_K}, x={"c2": PW})
    assert fitted(same, APART) is APART
