"""A recorded chain becomes several: which stages, which files of its query, which event time each part goes on with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.pipeline import EdgePattern, Pipeline, Stage, StageInput, TaskId, bounded_source, stage, unbounded_source
from dagster_checkpoints.state.errors import ChainLayoutChanged, InputRowsGone, InputsChanged, InstancesChanged, NonRestoredState
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    FusedSourceSnapshot,
    InputMetadata,
    OperatorState,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import RestorePlan, fitted, validate_restore

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
    return validate_restore(changed, metadata, allow)


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
        "divided: the query of a -> b -> c -> d, with its state, into a and b -> c and d.",
        "new: 'x', 'y' begin without state.",
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
    assert plan.changes == (
        "divided: the query of a -> b -> c -> d, with its state, into a -> b -> c and d.",
        "left behind: the state of 'd'.",
    )
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


TREE = (("a", "p"), ("b", "q"), ("p", "m"), ("q", "m"), ("c", "w"), ("m", "w"), ("w", "d"))
"""a and b meet at m, these two and c at w; p, q and m pass rows on."""


def tree(ended: str = "", idle: str = "", behind: str = "") -> CheckpointMetadata:
    """A checkpoint of one query of all stages of TREE: `w` has the operator 1, `d` operator 0. b is the first of its streams."""
    streams, times = {"a": 1, "b": 0, "c": 2}, {"a": 70, "b": 40, "c": 60}
    fused = tuple(
        FusedSourceSnapshot(name, streams[name], name in ended, times[name], name in idle, name in behind) for name in "abc"
    )
    plans = {**dict.fromkeys("abcpqm", ()), "w": (WINDOW,), "d": (DEDUP,)}
    parts = {name: StageInstanceSnapshot(state_plan=plan) for name, plan in plans.items() if name not in ended}
    state = [f"state/{number}/0/8.zip" for number in (0, 1)]
    files = tuple(file(path) for path in ("metadata", "offsets/7", *(f"sources/{n}/0" for n in range(3)), *state))
    query = QuerySnapshot(7, files, True, ("files b", "files a", "files c"))
    task = TaskSnapshot(parts, query, watermark=30, valve_watermark=40, fused=fused, output_positions={"d[0]->e[0]": 5})
    reads: dict[str, tuple[str, ...]] = {}
    for source, target in TREE:
        reads[target] = (*reads.get(target, ()), source)
    stages = tuple(
        StageMetadata(
            name,
            1,
            ("0",),
            (0,) if name in ended else (),
            name in ended,
            inputs=tuple(map(InputMetadata, reads.get(name, ()))),
        )
        for name in "abcpqmwd"
    )
    return CheckpointMetadata("p", 3, stages, (ChainMetadata("a", tuple("abcpqmwd"), {0: task}),))


LOG = {"metadata": "sha of metadata", "offsets/7": "sha of offsets/7"}


def of_stream(position: int) -> dict[str, str]:
    return {**LOG, "sources/0/0": f"sha of sources/{position}/0"}


def test_sources_go_on_alone_with_the_stages_that_pass_their_rows_on() -> None:
    plan = restored(pipeline(*TREE, ("m", "x")), tree(behind="a", idle="c"))
    assert (plan.chains, plan.new_stages) == ((("a", "b", "p", "q", "m"), ("c",), ("w", "d")), ("x",))
    meeting, alone, rest = (plan.tasks[TaskId(name, 0)] for name in "acw")
    assert [(each.source, each.position, each.watermark, each.behind) for each in meeting.fused] == [
        ("a", 1, 70, True),
        ("b", 0, 40, False),
    ]
    assert meeting.query is not None and meeting.query.sources == ("files b", "files a")
    assert found(meeting) == {**of_stream(0), "sources/1/0": "sha of sources/1/0"}
    assert alone.query is not None and (alone.query.sources, alone.query.streams, alone.fused) == (("files c",), (2,), ())  # type: ignore[attr-defined]
    assert found(alone) == of_stream(2)
    assert rest.query is not None and rest.query.sources == ()
    assert found(rest) == {**LOG, "state/0/0/8.zip": "sha of state/0/0/8.zip", "state/1/0/8.zip": "sha of state/1/0/8.zip"}
    # a is behind and holds back what m sends; c is idle. Event time is where it was.
    assert rest.channels == (
        ChannelSnapshot("c[0]->w[0]", 0, watermark=60, idle=True),
        ChannelSnapshot("m[0]->w[0]", 0, watermark=40),
    )
    assert [(t.valve_watermark, t.watermark) for t in (meeting, alone, rest)] == [(None, None), (None, None), (40, 30)]
    assert [t.output_positions for t in (meeting, alone, rest)] == [{}, {}, {"d[0]->e[0]": 5}]


@pytest.mark.parametrize(
    ("ended", "reads", "chains"),
    [
        ("", "b", "ap b q c m wd"),  # q reads b through a channel: so m and w read all of theirs through channels
        ("a", "c", "abpqm c wd"),  # the query of b goes on without a
        ("ab", "c", "p q m c wd"),  # it has nothing to read: its stages end behind finished ones
        ("a", "p", "p bq c m wd"),
        ("c", "p", "ap bq m wd"),
    ],
)
def test_a_source_that_has_ended_is_finished_when_its_query_is_divided(ended: str, reads: str, chains: str) -> None:
    plan = restored(pipeline(*TREE, (reads, "x")), tree(ended, behind="ab"))
    assert set(plan.chains) == {tuple(chain) for chain in chains.split()}
    alone = [name for name in ended if not any(name in chain for chain in plan.chains)]
    assert plan.finished_chains == tuple((name,) for name in alone)
    assert (plan.fully_finished, plan.finished) == (set(ended), {TaskId(name, 0) for name in alone})
    for name in (chain[0] for chain in plan.chains):
        task = plan.tasks[TaskId(name, 0)]
        for channel in task.channels:
            assert (channel.ended == "drain") == (channel.channel[0] in ended)
            # In front of w there is no event time yet that a source could be behind.
            assert channel.behind == (name == "w" and channel.channel[0] == "m" and ended != "ab")
        assert task.valve_watermark == (40 if name in "w" else None)


@pytest.mark.parametrize("missing", ["m", "p", "b", "wd", "d"])
def test_stages_that_are_taken_out_of_a_query_with_several_sources(missing: str) -> None:
    """What is in front of them goes on; a source can go only with all that reads it."""
    after = {"m": (("p", "w"), ("q", "w")), "p": (("a", "m"),)}.get(missing, ())
    edges = [edge for edge in TREE if not set(edge) & set(missing)]
    left = dict.fromkeys(name for name in "abcpqmwd" if name not in missing)
    changed = PipelineOf(tuple(map(StageOf, left)), tuple(EdgeOf(*edge) for edge in (*edges, *after)))
    chains = {"p": "a bq m c wd", "wd": "abpqm c", "d": "abcpqmw"}
    if missing in chains:
        plan = restored(changed, tree(), allow=True)
        assert ({*plan.chains}, plan.dropped) == ({tuple(chain) for chain in chains[missing].split()}, tuple(missing))
        return
    refused, words = (InputsChanged, "'w' does not read") if missing == "m" else (ChainLayoutChanged, "'b' is no longer in")
    with pytest.raises(refused, match=words):
        restored(changed, tree(), allow=True)


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


@pytest.mark.parametrize(("ended", "fused"), [(False, True), (True, True), (False, False)])
def test_a_part_gets_other_instances_in_the_same_restore(ended: bool, fused: bool) -> None:
    """All new instances go on from the part's own query, and from the event time of what it reads."""

    def of(key: str | None, *instances: str) -> Pipeline:
        @bounded_source(watermark=("ts", "1 minute"))
        def old(context: Any) -> None: ...

        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context: Any) -> None: ...

        class Counted(Stage):
            def transform(self, context: Any, **inputs: Any) -> None: ...

        inputs = dict.fromkeys(("old", "live") if fused else ("live",), StageInput(key=key))
        counted = Counted("counted", inputs=inputs, instances=instances, sink=object())
        return Pipeline("p", [*((old,) if fused else ()), live, counted])

    before, after = of(None, "0"), of("k", "p", "q", "r")
    read = recorded_inputs(before)
    stages = [StageMetadata(s.name, 1, ("0",), inputs=read[s.name]) for s in before.stages]
    if ended:
        stages[0] = msgspec.structs.replace(stages[0], finished=(0,), fully_finished=True)
    sources = (FusedSourceSnapshot("old", 1, ended, 40), FusedSourceSnapshot("live", 0, False, 70)) if fused else ()
    items = tuple(str(n).encode() for n in range(5))
    own = StageInstanceSnapshot((OperatorState("l", "list", items),), ("transaction",), 10, state_plan=("count by k",))
    files = tuple(file(path) for path in ("metadata", "offsets/7", "sources/0/0", "sources/1/0", "state/0/0/8.zip"))
    query = QuerySnapshot(7, files, True, ("files live", "files old")[: 1 + fused])
    task = TaskSnapshot(
        {"live": StageInstanceSnapshot(state_plan=()), "counted": own}, query, valve_watermark=40, watermark=30, fused=sources
    )
    names = tuple(s.name for s in before.stages)
    metadata = CheckpointMetadata("p", 3, tuple(stages), (ChainMetadata(names[0], names, {0: task}),))
    plan = validate_restore(after, metadata)
    assert plan.finished_chains == ((("old",),) if ended else ())
    assert plan.chains == ((("old",),) if fused and not ended else ()) + (("live",), ("counted",))
    parts = [plan.tasks[TaskId("counted", index)] for index in range(3)]
    assert [item for part in parts for state in part.stages["counted"].operator_states for item in state.items] == list(items)
    assert [part.stages["counted"].transactions for part in parts] == [("transaction",), (), ()]
    for index, part in enumerate(parts):
        assert part.query is not None and part.query.sources == ()
        assert [f.path for f in part.query.files] == ["metadata", "offsets/7", "state/0/0/8.zip"]
        share = plan.shares[TaskId("counted", index)]
        assert (share.logs, share.key, list(share.queries.values())) == (0, "k", [part.query])
        assert part.watermark == 30
        known = {channel.channel: channel.watermark for channel in part.channels}
        feeds = {f"live[0]->counted[{index}]": 70, **({} if ended else {f"old[0]->counted[{index}]": 40})}
        assert (part.valve_watermark, known) == ((40, feeds) if fused else (None, {}))
    live = plan.tasks[TaskId("live", 0)]
    assert live.query is not None and live.query.sources == ("files live",)


def test_a_part_that_would_get_the_rows_of_other_instances_is_refused() -> None:
    """Over channels the event time of each instance is known, and compared."""

    def of(feeds: str, *more: Stage) -> Pipeline:
        @unbounded_source(watermark=("ts", "1 minute"), instances=list(feeds))
        def live(context: Any) -> None: ...

        @stage(instances=["a", "b"], sink=object())
        def plain(live: Any) -> None: ...

        return Pipeline("p", [live, plain, *more])

    @stage(inputs={"live": StageInput(edge="all_to_all")}, sink=object())
    def seen(live: Any) -> None: ...

    read = recorded_inputs(of("ab"))
    stages = tuple(StageMetadata(name, 2, ("a", "b"), inputs=read[name]) for name in ("live", "plain"))
    parts = {name: StageInstanceSnapshot(state_plan=()) for name in ("live", "plain")}
    tasks = {index: TaskSnapshot(parts, watermark=100 * index) for index in range(2)}
    metadata = CheckpointMetadata("p", 3, stages, (ChainMetadata("live", ("live", "plain"), tasks),))

    def plan(changed: Pipeline) -> RestorePlan:
        return validate_restore(changed, metadata)

    assert plan(of("ab", seen)).chains == (("live",), ("plain",))
    with pytest.raises(
        InstancesChanged, match=r"divides the query that 'plain' shares with 'live' .*one after the other: restore"
    ):
        plan(of("abc", seen))
