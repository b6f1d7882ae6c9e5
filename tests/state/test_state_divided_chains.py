"""A recorded chain becomes several: which stages, which files of its query, which event time each part goes on with."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dagster_checkpoints.pipeline import EdgePattern, StageInput, TaskId
from dagster_checkpoints.state import (
    ChainLayoutChanged,
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    FusedSourceSnapshot,
    InputMetadata,
    InputRowsGone,
    NonRestoredState,
    OperatorState,
    QuerySnapshot,
    RestorePlan,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    fitted,
    validate_restore,
)

DEDUP, WINDOW, JOIN = "drop duplicates by v", "aggregate by window(ts, 1 hour): count(1)", "inner join of streams on a = b"


@dataclass(frozen=True)
class StageOf:
    name: str
    instances: tuple[str, ...] = ("0",)
    split_interval: float | None = None
    state_partitions: int | None = None

    @property
    def uid(self) -> str:
        return self.name


@dataclass(frozen=True)
class EdgeOf:
    source: str
    target: str
    pattern: EdgePattern = EdgePattern.POINTWISE
    input: StageInput = field(default_factory=StageInput)


@dataclass(frozen=True)
class PipelineOf:
    stages: tuple[StageOf, ...]
    edges: tuple[EdgeOf, ...]
    name: str = "p"


def pipeline(*edges: tuple[str, str] | EdgeOf) -> PipelineOf:
    known = tuple(edge if isinstance(edge, EdgeOf) else EdgeOf(*edge) for edge in edges)
    names = dict.fromkeys(name for edge in known for name in (edge.source, edge.target))
    return PipelineOf(tuple(StageOf(name) for name in names), known)


def file(path: str) -> StateFile:
    return StateFile(path, f"sha of {path}", 1)


LOGS = ("metadata", "offsets/6", "offsets/7", "commits/6", "commits/7")
PLANS = {"a": (), "b": (DEDUP,), "c": (), "d": (WINDOW, JOIN, "output mode append")}
CHAIN = (("a", "b"), ("b", "c"), ("c", "d"))


def snapshot(plans: dict[str, tuple[str, ...]] = PLANS, operators: int = 3, **more: object) -> TaskSnapshot:
    """The only task of the chain: `d` has the operators 0 and 1, `b` has operator 2."""
    stages = {
        name: StageInstanceSnapshot((OperatorState(f"of {name}", "list", (name.encode(),)),), state_plan=plan, late_rows=1)
        for name, plan in plans.items()
    }
    state = [f"state/{number}/{path}" for number in range(operators) for path in ("_metadata/metadata", "0/8.zip", "11/3.delta")]
    query = QuerySnapshot(7, tuple(file(path) for path in (*LOGS, "sources/0/0", *state)), True, ("files in x",))
    channels = (ChannelSnapshot("z[0]->a[0]", 4),)
    values: dict[str, object] = {"watermark": 500, "valve_watermark": 900, "channels": channels, **more}
    return TaskSnapshot(stages, query, output_positions={"d[0]->e[0]": 5}, **values)  # type: ignore[arg-type]


READS = {"b": ("a",), "c": ("b",), "d": ("c",)}


def checkpoint(task: TaskSnapshot, *, reads: dict[str, tuple[str, ...]] | None = READS) -> CheckpointMetadata:
    inputs = {name: tuple(map(InputMetadata, reads.get(name, ()))) if reads is not None else None for name in "abcd"}
    stages = tuple(StageMetadata(name, 1, ("0",), inputs=of) for name, of in inputs.items())
    return CheckpointMetadata("p", 3, stages, (ChainMetadata("a", ("a", "b", "c", "d"), {0: task}),))


def restored(changed: PipelineOf, metadata: CheckpointMetadata, allow: bool = False) -> RestorePlan:
    return validate_restore(changed, fitted(changed, metadata), allow)


def paths(task: TaskSnapshot) -> list[str]:
    assert task.query is not None
    assert all(file.sha256.endswith(file.path.partition("/")[2].partition("/")[2]) for file in task.query.files[6:])
    return [file.path for file in task.query.files]


def state_of(old: int, new: int) -> dict[str, str]:
    """Of one operator: by new path, the sha256 of the file that had the old one."""
    return {f"state/{new}/{path}": f"sha of state/{old}/{path}" for path in ("_metadata/metadata", "0/8.zip", "11/3.delta")}


def found(task: TaskSnapshot) -> dict[str, str]:
    assert task.query is not None
    return {file.path: file.sha256 for file in task.query.files}


def test_each_part_gets_its_stages_and_the_state_of_their_operators() -> None:
    plan = restored(pipeline(*CHAIN, ("a", "x"), ("c", "y")), checkpoint(snapshot()))
    assert (plan.chains, plan.new_stages) == ((("a",), ("b", "c"), ("d",)), ("x", "y"))
    assert plan.divided == dict.fromkeys("abd", ("a", "b", "c", "d"))
    assert plan.changes == (
        "The query of a -> b -> c -> d is divided, with its state, into a and b -> c and d.",
        "The checkpoint has no state of 'x', 'y', which begin without it.",
    )
    first, second, third = (plan.tasks[TaskId(name, 0)] for name in "abd")
    logs = {path: f"sha of {path}" for path in LOGS}
    assert found(first) == {**logs, "sources/0/0": "sha of sources/0/0"}
    assert found(second) == {**logs, **state_of(2, 0)}
    assert found(third) == {**logs, **state_of(0, 0), **state_of(1, 1)}
    assert [task.query and task.query.batch_id for task in (first, second, third)] == [7, 7, 7]
    assert [task.query and (task.query.own_watermark, task.query.sources) for task in (first, second, third)] == [
        (True, ("files in x",)),
        (False, ()),
        (False, ()),
    ]
    assert [list(task.stages) for task in (first, second, third)] == [["a"], ["b", "c"], ["d"]]
    assert second.stages["c"] == snapshot().stages["c"], "its operator states, and its numbers"
    # The first part goes on reading its channels, the last one has sent what the chain had sent.
    assert (first.channels, first.valve_watermark, first.watermark) == (snapshot().channels, 900, None)
    assert [(task.channels, task.valve_watermark) for task in (second, third)] == [((), None)] * 2
    assert [task.watermark for task in (second, third)] == [None, 500]
    assert [task.output_positions for task in (first, second, third)] == [{}, {}, {"d[0]->e[0]": 5}]


def test_operators_in_front_of_a_removed_stage_get_its_numbers() -> None:
    shorter = pipeline(("a", "b"), ("b", "c"))
    with pytest.raises(NonRestoredState, match="holds state of 'd'"):
        restored(shorter, checkpoint(snapshot()))
    plan = restored(shorter, checkpoint(snapshot()), allow=True)
    assert (plan.chains, plan.dropped) == ((("a", "b", "c"),), ("d",))
    assert plan.changes[1:] == ("The state of 'd' is left behind.",)
    state = {path: of for path, of in found(plan.tasks[TaskId("a", 0)]).items() if path.startswith("state/")}
    assert state == state_of(2, 0)


def test_a_chain_that_fits_stays_as_it_is() -> None:
    metadata, same = checkpoint(snapshot()), pipeline(*CHAIN, ("d", "x"))
    assert fitted(same, metadata) is metadata
    assert restored(same, metadata).divided == {}
    assert restored(pipeline(*CHAIN), metadata).changes == ()


def test_a_query_that_has_run_no_batch_is_divided() -> None:
    plan = restored(pipeline(*CHAIN, ("a", "x")), checkpoint(TaskSnapshot({name: StageInstanceSnapshot() for name in PLANS})))
    assert [plan.tasks[TaskId(name, 0)].query for name in "ab"] == [None, None]


def test_sources_that_share_a_query_stay_with_their_reader() -> None:
    """a and b are fused sources of c."""
    fused = (FusedSourceSnapshot("a", 0), FusedSourceSnapshot("b", 1))
    inputs = {"c": ("a", "b"), "d": ("c",)}
    metadata, read = checkpoint(snapshot(fused=fused, channels=()), reads=inputs), (("a", "c"), ("b", "c"), ("c", "d"))
    plan = restored(pipeline(*read, ("c", "x")), metadata)
    assert plan.chains == (("a", "b", "c"), ("d",))
    assert (plan.tasks[TaskId("a", 0)].fused, plan.tasks[TaskId("d", 0)].fused) == (fused, ())
    for edges, words in (((*read, ("b", "x")), "share one query"), (read[:2], "'c', 'd' is no longer")):
        changed = pipeline(*edges)
        if "longer" in words:
            changed = PipelineOf(changed.stages[:1] + changed.stages[2:], ())
        with pytest.raises(ChainLayoutChanged, match=words):
            restored(changed, metadata, allow=True)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (snapshot(operators=2), "Spark keeps the state of 2 operators, and the stages have 3"),
        (snapshot(plans={**PLANS, "b": None}), "did not record which stage keeps which state"),  # type: ignore[dict-item]
        (snapshot(end_of_data="drain"), "reached the end of its data"),
    ],
)
def test_state_that_cannot_be_divided(task: TaskSnapshot, words: str) -> None:
    sink = pipeline(*CHAIN)
    reader = pipeline(*CHAIN, ("b", "x"))
    with pytest.raises(ChainLayoutChanged, match=f"now 'x' is new, and reads 'b', .* cannot be divided for that: .*{words}"):
        restored(reader, checkpoint(task))
    assert restored(sink, checkpoint(task)).chains == (("a", "b", "c", "d"),)


def test_a_link_that_distributes_rows_otherwise_is_not_divided() -> None:
    """The release that took the checkpoint did not record inputs, so that only the layout shows the change."""
    by_key = EdgeOf("b", "c", EdgePattern.ALL_TO_ALL, StageInput(key="k"))
    with pytest.raises(ChainLayoutChanged, match="a stage would read other rows"):
        restored(pipeline(("a", "b"), by_key, ("c", "d"), ("b", "x")), checkpoint(snapshot(), reads=None))


def test_a_new_static_input_of_a_stage_whose_rows_stayed_in_the_query() -> None:
    static = EdgeOf("a", "x", EdgePattern.ALL_TO_ALL, StageInput(mode="static"))
    with pytest.raises(InputRowsGone, match=r"'x' is not in .*, which has run micro-batches before it"):
        restored(pipeline(*CHAIN, static), checkpoint(snapshot()))
