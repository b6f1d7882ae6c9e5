"""Several recorded chains become one: which chains, which files its query has, and what keeps chains apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, TaskId, build_chains, unbounded_source
from dagster_checkpoints.state import (
    ENCODED_AS_AVRO,
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EndOfData,
    JoinedCheckpoint,
    OperatorState,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    WatermarkAt,
    fitted,
    joined,
    missing_versions,
    recorded_inputs,
    validate_restore,
)

DEDUP, WINDOW = "drop duplicates by v", "aggregate by window(ts, 1 hour): count(1)"
PLANS = {"a": (), "b": (DEDUP,), "c": (), "d": (WINDOW,)}
Change = Callable[[TaskSnapshot], TaskSnapshot]


class Derived(Stage):
    """A stage that reads others."""

    def __init__(self, name: str, *reads: str, sink: bool = False, **options: Any) -> None:
        inputs = {each: StageInput(**options) for each in reads}
        super().__init__(name, inputs=inputs, sink=object() if sink else None)

    def transform(self, context: Any, **inputs: Any) -> Any:
        raise NotImplementedError


def source(name: str) -> Any:
    return unbounded_source(name=name)(lambda context: None)


def pipeline(*more: Any, chaining: bool = True) -> Pipeline:
    """a -> b -> c -> d."""
    stages = (source("a"), Derived("b", "a"), Derived("c", "b"), Derived("d", "c", sink=True))
    return Pipeline("p", [*stages, *more], chaining=chaining)


def file(path: str) -> StateFile:
    return StateFile(path, f"sha of {path}", 1)


def query(of: str, batch_id: int, operators: int = 0, *, kind: str = "zip", sources: tuple[str, ...] = ()) -> QuerySnapshot:
    logs = [f"{log}/{batch}" for log in ("offsets", "commits") for batch in (batch_id - 1, batch_id) if batch >= 0]
    state = [
        f"state/{number}/{path}"
        for number in range(operators)
        for path in ("_metadata/metadata", f"0/{batch_id + 1}.{kind}", f"1/left/{batch_id + 1}.{kind}", "1/left/SSTs/x.sst")
    ]
    files = [StateFile(path, f"{of} {path}", 1) for path in ("metadata", *logs, "sources/0/0", *state)]
    return QuerySnapshot(batch_id, tuple(files), of == "a", sources or (f"read by {of}",))


def task(name: str, of: QuerySnapshot | None, **more: Any) -> TaskSnapshot:
    states = (OperatorState(f"of {name}", "list", (name.encode(),)),)
    stages = {name: StageInstanceSnapshot(states, state_plan=PLANS[name], rows_out=3, late_rows=1)}
    before = chr(ord(name) - 1)
    channels = () if name == "a" else (ChannelSnapshot(f"{before}[0]->{name}[0]", 4, watermark=800),)
    values = {"watermark": ord(name), "valve_watermark": 10 * ord(name), "channels": channels, **more}
    return TaskSnapshot(stages, of, **values)


def checkpoint(of: Pipeline, tasks: dict[str, TaskSnapshot | None]) -> CheckpointMetadata:
    inputs = recorded_inputs(of)
    stages = tuple(
        StageMetadata(
            each.name,
            1,
            ("main",),
            inputs=inputs[each.name],
            finished=(0,) if tasks.get(each.name, 1) is None else (),
            fully_finished=tasks.get(each.name, 1) is None,
        )
        for each in of.stages
    )
    stages = tuple(replace(each, instances=of.stage(each.name).instances) for each in stages)
    chains = tuple(ChainMetadata(name, (name,), {0: each} if each is not None else {}) for name, each in tasks.items())
    return CheckpointMetadata("p", 3, stages, chains)


def four(**others: TaskSnapshot | None) -> dict[str, TaskSnapshot | None]:
    """The tasks of the stages: `b` has run three batches more than `a` and `c`, and `d` two less."""
    return {
        "a": task("a", query("a", 7)),
        "b": task("b", query("b", 10, 1)),
        "c": task("c", query("c", 7)),
        "d": task("d", query("d", 5, 1)),
        **others,
    }


def made(of: Pipeline, metadata: CheckpointMetadata, **options: Any) -> JoinedCheckpoint:
    return joined(fitted(of, metadata), of, build_chains(of), **options)


def found(of: QuerySnapshot | None) -> dict[str, str]:
    assert of is not None
    return {each.path: each.sha256 for each in of.files}


def state_of(name: str, batch_id: int, old: int, new: int, shift: int) -> dict[str, str]:
    """Of one operator: by new path, the file that had the old one."""
    files = {f"state/{new}/{path}": f"{name} state/{old}/{path}" for path in ("_metadata/metadata", "1/left/SSTs/x.sst")}
    for store in ("0", "1/left"):
        version = batch_id + 1
        files[f"state/{new}/{store}/{version + shift}.zip"] = f"{name} state/{old}/{store}/{version}.zip"
    return files


def test_one_query_gets_the_state_of_all_and_the_sources_of_the_first() -> None:
    now, metadata = pipeline(), checkpoint(pipeline(chaining=False), four())
    plan = validate_restore(now, fitted(now, metadata))
    one = made(now, metadata)
    assert one.apart == {}
    assert [chain.stages for chain in one.metadata.chains] == [("a", "b", "c", "d")]
    restore = plan.with_joined_chains(one)
    assert restore.chains == (("a", "b", "c", "d"),)
    assert {name: [part.stages for part in parts] for name, parts in restore.joined.items()} == {
        "a": [("a",), ("b",), ("c",), ("d",)]
    }
    assert list(restore.tasks) == [TaskId("a", 0)]
    snapshot = restore.tasks[TaskId("a", 0)]
    logs = {f"{log}/{batch + 3}": f"a {log}/{batch}" for log in ("offsets", "commits") for batch in (6, 7)}
    kept = {"metadata": "a metadata", "sources/0/0": "a sources/0/0"}
    assert found(snapshot.query) == {**kept, **logs, **state_of("d", 5, 0, 0, 5), **state_of("b", 10, 0, 1, 0)}
    assert snapshot.query is not None
    assert (snapshot.query.batch_id, snapshot.query.own_watermark, snapshot.query.sources) == (10, True, ("read by a",))
    assert missing_versions(snapshot.query) == ()
    # It reads what the first chain has read, and has sent what the last one has sent.
    assert (snapshot.channels, snapshot.valve_watermark, snapshot.watermark) == ((), 10 * ord("a"), ord("d"))
    assert {name: of.operator_states[0].name for name, of in snapshot.stages.items()} == {n: f"of {n}" for n in "abcd"}
    assert snapshot.stages["c"].late_rows == 1


def test_a_query_behind_channels_begins_at_their_positions() -> None:
    audit = Derived("audit", "a", sink=True)
    now = pipeline(audit)
    tasks = four(audit=None)
    one = made(now, checkpoint(pipeline(audit, chaining=False), {**tasks, "audit": replace(task("d", None), stages={})}))
    assert [chain.stages for chain in one.metadata.chains] == [("a",), ("b", "c", "d"), ("audit",)]
    assert one.apart == {}, "the pipeline has them in separate queries"
    snapshot = one.metadata.chains[1].tasks[0]
    assert snapshot.query is not None and snapshot.query.sources == ()
    assert snapshot.channels == task("b", None).channels
    assert {path: of for path, of in found(snapshot.query).items() if path[0] == "o"} == {
        f"offsets/{n}": f"b offsets/{n}" for n in (9, 10)
    }


@pytest.mark.parametrize(
    ("batches", "missing"),
    [
        ((7, 5), ("state/0/0/7.changelog", "state/0/0/8.changelog", "state/0/1/left/7.changelog", "state/0/1/left/8.changelog")),
        ((3, 5), ("state/1/0/5.changelog", "state/1/0/6.changelog", "state/1/1/left/5.changelog", "state/1/1/left/6.changelog")),
        ((5, 5), ()),
    ],
)
def test_stores_that_begin_with_changes_keep_their_versions(batches: tuple[int, int], missing: tuple[str, ...]) -> None:
    """No whole version is stored yet: it cannot get a later number, so versions without a change follow."""
    first, second = batches
    tasks = four(
        a=None, b=task("b", query("b", first, 1, kind="changelog")), c=None, d=task("d", query("d", second, 1, kind="changelog"))
    )

    now = Pipeline("p", [source("a"), Derived("b", "a"), Derived("d", "b", sink=True)])
    started = {"a": task("a", query("a", first)), **{name: each for name, each in tasks.items() if name in "bd"}}
    one = made(now, checkpoint(now, started))
    (chain,) = one.metadata.chains
    of = chain.tasks[0].query
    assert of is not None and of.batch_id == max(batches)
    assert missing_versions(of) == missing
    assert {f"state/0/0/{second + 1}.changelog", f"state/1/0/{first + 1}.changelog"} <= set(found(of))


def test_the_first_batch_has_none_in_front_of_it() -> None:
    tasks = four(a=task("a", query("a", 0)), b=task("b", query("b", 4, 1)))
    one = made(pipeline(), checkpoint(pipeline(chaining=False), tasks))
    logs = {path: of for path, of in found(one.metadata.chains[0].tasks[0].query).items() if path[0] in "oc"}
    assert logs == {f"{log}/{n}": f"a {log}/0" for log in ("offsets", "commits") for n in (6, 7)}


def test_queries_that_have_run_no_batch() -> None:
    now, separate = pipeline(), pipeline(chaining=False)
    none = {name: task(name, None) for name in "abcd"}
    one = made(now, checkpoint(separate, none))
    assert [chain.stages for chain in one.metadata.chains] == [("a", "b", "c", "d")]
    assert one.metadata.chains[0].tasks[0].query is None
    some = {**none, "a": task("a", query("a", 2))}
    one = made(now, checkpoint(separate, some))
    assert [chain.stages for chain in one.metadata.chains] == [("a",), ("b", "c", "d")]
    assert one.apart == {"b": "the query of 'b', which keeps state, has run no batch yet"}
    one = made(now, checkpoint(separate, {**some, "b": task("b", query("b", 1, 1))}))
    assert [chain.stages for chain in one.metadata.chains] == [("a", "b", "c"), ("d",)]  # c keeps no state


def channel(**values: Any) -> Change:
    def change(of: TaskSnapshot) -> TaskSnapshot:
        return replace(of, channels=tuple(replace(each, **values) for each in of.channels))

    return change


def of_stage(name: str, **values: Any) -> Change:
    return lambda of: replace(of, stages={**of.stages, name: replace(of.stages[name], **values)})


def of_query(**values: Any) -> Change:
    def change(of: TaskSnapshot) -> TaskSnapshot:
        assert of.query is not None
        return replace(of, query=replace(of.query, **values))

    return change


OBSTACLES: list[tuple[str, Change, str]] = [
    ("d", channel(in_flight=(Segment((file("rows"),), 1),)), "rows were on their way from 'c' to 'd'"),
    ("d", channel(in_flight=(EndOfData(drain=True),)), "rows were on their way"),
    ("d", channel(ended="drain"), "'c' has reached the end of its data"),
    ("d", lambda of: replace(of, end_of_data="drain"), "reached the end of their data"),
    ("c", of_stage("c", transactions=("t",)), "the sink that 'c' had holds rows that were not committed"),
    ("d", of_stage("d", state_plan=None), "did not record"),
    ("d", of_stage("d", state_plan=(WINDOW + ENCODED_AS_AVRO,)), "encoded as Avro"),
    ("d", of_stage("d", state_plan=(WINDOW, DEDUP)), "Spark keeps the state of 1 operators, and the stages have 2"),
    ("d", of_query(files=()), "Spark keeps no state of d"),
    ("d", of_query(sources=None), "did not record"),
    ("d", lambda of: replace(of, query=query("d", 5, 1, kind="log")), "no known names"),
    ("c", lambda of: replace(of, splits=("s",)), "other inputs"),
]


@pytest.mark.parametrize(("name", "change", "words"), OBSTACLES)
def test_what_keeps_chains_apart(name: str, change: Change, words: str) -> None:
    tasks = four(b=None, a=None, c=task("c", query("c", 7)), d=task("d", query("d", 6, 1)))

    now = Pipeline("p", [source("c"), Derived("d", "c", sink=True)])
    metadata = checkpoint(now, {each: tasks[each] for each in "cd"})
    assert [chain.stages for chain in made(now, metadata).metadata.chains] == [("c", "d")]
    old = tasks[name]
    assert old is not None
    changed = made(now, checkpoint(now, {**{each: tasks[each] for each in "cd"}, name: change(old)}))
    assert [chain.stages for chain in changed.metadata.chains] == [("c",), ("d",)]
    assert list(changed.apart) == ["d"] and words in changed.apart["d"], changed.apart
    watermarks = {each: tasks[each] for each in "cd"}
    watermarks["d"] = channel(in_flight=(WatermarkAt(900),))(tasks["d"])  # type: ignore[arg-type]
    assert made(now, checkpoint(now, watermarks)).apart == {}, "the first query has the watermark"


@pytest.mark.parametrize(
    ("kind", "stored"), [("delta", "state/0/0/5.delta"), ("snapshot", "state/0/0/8.snapshot"), ("zip", "state/0/0/8.zip")]
)
def test_versions_of_either_provider(kind: str, stored: str) -> None:
    """A store that begins with a whole version gets later numbers."""
    tasks = four(b=task("b", query("b", 4, 1, kind=kind)))
    tasks = {"a": tasks["a"], "b": tasks["b"]}
    now = Pipeline("p", [source("a"), Derived("b", "a", sink=True)])
    of = made(now, checkpoint(now, tasks)).metadata.chains[0].tasks[0].query
    assert of is not None
    assert stored in found(of)
    missing = [f"state/0/{store}/{version}.delta" for store in ("0", "1/left") for version in (6, 7, 8)]
    assert missing_versions(of) == (tuple(missing) if kind == "delta" else ())


def test_very_many_versions_without_a_change() -> None:
    far = task("d", query("d", 700, 1, kind="changelog"))
    one = made(pipeline(), checkpoint(pipeline(chaining=False), four(d=far)))
    assert one.apart == {}, "two whole stores get later numbers"
    near = four(b=task("b", query("b", 10, 1, kind="changelog")), d=task("d", query("d", 600, 1)))
    one = made(pipeline(), checkpoint(pipeline(chaining=False), near))
    assert [chain.stages for chain in one.metadata.chains] == [("a", "b", "c"), ("d",)]
    assert "very different numbers of batches" in one.apart["d"]


def test_only_what_the_run_has_joined_before() -> None:
    now, metadata = pipeline(), checkpoint(pipeline(chaining=False), four())
    assert [chain.stages for chain in made(now, metadata, only={"c"}).metadata.chains] == [("a",), ("b", "c"), ("d",)]
    assert made(now, metadata, only=set()).metadata is not None
    assert made(now, metadata, only=set()).joined == {}
    assert made(now, metadata, rescaled={"d"}).apart == {"d": "instances have changed in the same restore"}


def test_a_pipeline_without_chains_and_finished_stages() -> None:
    separate = pipeline(chaining=False)
    assert made(separate, checkpoint(separate, four())) == JoinedCheckpoint(fitted(separate, checkpoint(separate, four())))
    ended = made(pipeline(), checkpoint(separate, four(a=None, b=None)))
    assert [chain.stages for chain in ended.metadata.chains] == [("a",), ("b",), ("c", "d")]
    assert list(ended.apart) == ["c"]


def as_of_a_checkpoint(part: TaskSnapshot) -> TaskSnapshot:
    """A part of a divided query in the next checkpoint: it reads a channel, of which its log knows nothing else."""
    assert part.query is not None
    return replace(
        part, query=replace(part.query, sources=("records of input 'b'",)), channels=(ChannelSnapshot("b[0]->c[0]", 0),)
    )


def test_a_chain_that_is_divided_and_joined_again_has_its_query_back() -> None:
    """The reader that divided it is gone; no part has run a batch since."""

    late = Derived("late", "b", sink=True)
    whole = query("a", 7, 2, sources=("files in x",))
    stages = {name: StageInstanceSnapshot(state_plan=plan) for name, plan in PLANS.items()}
    before = TaskSnapshot(stages, whole, watermark=5, valve_watermark=6)
    now, read = pipeline(), pipeline(late)
    metadata = replace(checkpoint(now, four()), chains=(ChainMetadata("a", ("a", "b", "c", "d"), {0: before}),))
    parts = fitted(read, metadata)
    assert [chain.stages for chain in parts.chains] == [("a", "b"), ("c", "d")]
    late_stage = StageMetadata("late", 1, ("main",), inputs=recorded_inputs(read)["late"], finished=(0,), fully_finished=True)
    stored = tuple(ChainMetadata(part.name, part.stages, dict(part.tasks)) for part in parts.chains)
    stored = (stored[0], replace(stored[1], tasks={0: as_of_a_checkpoint(stored[1].tasks[0])}))
    one = made(now, replace(metadata, stages=(*metadata.stages, late_stage), chains=stored))
    (chain,) = one.metadata.chains
    found_query = chain.tasks[0].query
    assert found_query is not None and found(found_query) == found(whole)
    assert replace(chain.tasks[0], query=replace(found_query, files=whole.files)) == before
