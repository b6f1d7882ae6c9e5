"""Which micro-batch of a plain query is taken, and why a stage cannot go on from it: tables of logs, outputs and plans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from dagster_checkpoints.state import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EnumeratorState,
    ImportRefused,
    InputMetadata,
    OperatorState,
    OutputSays,
    PlainBatch,
    PlainQuery,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    StageSource,
    TaskSnapshot,
    batch_to_take,
    export_problems,
    import_problems,
    kind_of_offset,
)

STREAMING = "spark.sql.streaming"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
FILES, TOPIC = {"logOffset": 4}, {"flights": {"0": 12, "1": 7}}
READS = (StageSource("FileSource[/in]", "files", ("/in",)), StageSource("kafka", "kafka", ("flights",)))
JOIN = {0: "symmetricHashJoin"}
WHOLE = PlainQuery(
    place="file:///checkpoint",
    query_id="7a",
    log_versions=("v1", "v1"),
    planned=(6, 7),
    committed=(6, 7),
    batches={7: PlainBatch(1000, {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}, (FILES, TOPIC))},
    operators=JOIN,
    partitions={0: (2, frozenset({0, 1}))},
    read=("/in/a.parquet", ""),
)


def logs(planned: int, committed: int) -> PlainQuery:
    return replace(WHOLE, planned=tuple(range(planned + 1)), committed=tuple(range(committed + 1)))


@pytest.mark.parametrize("planned, committed, last", [*itertools.product(range(-1, 4), range(-1, 4), (None, *range(-1, 5)))])
def test_what_is_taken_never_repeats_or_leaves_out_a_batch_of_the_output(planned: int, committed: int, last: int | None) -> None:
    """The batch that is taken is the last one in the output, its state exists, and Spark would go on behind it as well."""
    try:
        taken = batch_to_take(logs(planned, committed), OutputSays(last, "the test"))
    except ImportRefused as refused:
        taken = None
        assert "xpected" in str(refused) or "not committed it" in str(refused) or "nothing to take over" in str(refused)
    known = planned if last is None else last
    stopped, killed = planned == committed, planned == committed + 1
    exact = (stopped and known == planned) or (killed and last in (committed, planned))
    assert taken == (known if exact and known >= 0 and planned >= 0 else None)


@pytest.mark.parametrize(
    "query, words",
    [
        (logs(-1, -1), "Name the directory that the query has as checkpointLocation"),
        (replace(WHOLE, log_versions=("v1", "v2")), "found v1 and v2"),
        (logs(9, 7), "asynchronous progress tracking"),
        (logs(8, 7), "last_batch=7 or last_batch=8"),
        (logs(0, -1), "last_batch=-1 or last_batch=0"),
    ],
)
def test_logs_that_are_refused_say_what_to_do(query: PlainQuery, words: str) -> None:
    with pytest.raises(ImportRefused) as refused:
        batch_to_take(query, OutputSays())
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "last, words",
    [(6, "is not the output of this checkpoint directory"), (9, "probably an older copy")],
)
def test_an_output_that_does_not_belong_to_the_directory(last: int, words: str) -> None:
    with pytest.raises(ImportRefused, match=words):
        batch_to_take(WHOLE, OutputSays(last, "out/_spark_metadata"))


def problems(query: PlainQuery, sources: tuple[StageSource, ...] = READS, operators: Any = None) -> list[str]:
    return import_problems(query, 7, sources, JOIN if operators is None else operators)


def at(offsets: tuple[Any, ...], **settings: str) -> PlainQuery:
    return replace(WHOLE, batches={7: PlainBatch(1000, settings, offsets)})


OTHER = StageSource("rate", "other")
REFUSED: list[tuple[str, list[str]]] = [
    ("expected commits/6", problems(replace(WHOLE, committed=(7,)))),
    ("expected offsets/6", problems(replace(WHOLE, planned=(7,)))),
    ("checkpointFormatVersion=2", problems(replace(WHOLE, unnumbered="state/0/0/8_ab.zip"))),
    ("found org.example.Own", problems(at((FILES, TOPIC), **{f"{STREAMING}.stateStore.providerClass": "org.example.Own"}))),
    ("found max", problems(at((FILES, TOPIC), **{f"{STREAMING}.multipleWatermarkPolicy": "max"}))),
    ("found none of number 0", problems(replace(WHOLE, operators={0: ""}))),
    ("[0] dedupe", problems(WHOLE, operators={0: "dedupe"})),
    ("[1] dedupe", problems(WHOLE, operators={**JOIN, 1: "dedupe"})),
    ("plans for the stage (none)", problems(WHOLE, operators={})),
    ("found state in [0, 2]", problems(replace(WHOLE, partitions={0: (4, frozenset({0, 2}))}))),
    ("found offsets of 2", problems(WHOLE, READS[:1])),
    ("found that of a Kafka source", problems(at((TOPIC, FILES)))),
    ("found that of a source of files", problems(at((TOPIC, FILES)))),
    ("a Delta table, read by Spark's connector", problems(at(({"reservoirId": "a", "index": 1}, TOPIC)))),
    ("read_delta_table", problems(at(({"table": "t", "first": 0, "version": 3, "read": 1}, TOPIC)))),
    ("found offsets of 'flights', 'others'", problems(at((FILES, {**TOPIC, "others": {"0": 1}})))),
    ("has read /elsewhere/a", problems(replace(WHOLE, read=("/elsewhere/a", "")))),
    ("has read /input/a", problems(replace(WHOLE, read=("/input/a", "")))),
    ("whose rows can be read again", problems(at((FILES, 12)), (READS[0], OTHER))),
]


@pytest.mark.parametrize("words, found", REFUSED, ids=[words for words, _ in REFUSED])
def test_a_stage_that_does_not_fit_is_told_why(words: str, found: list[str]) -> None:
    assert any(words in each for each in found), found


FITS = [
    WHOLE,
    at((FILES, None)),  # a source that has had no rows yet
    replace(WHOLE, read=("", "")),
]


@pytest.mark.parametrize("query", FITS)
def test_a_stage_with_the_querys_plan_goes_on(query: PlainQuery) -> None:
    assert problems(query) == []


def test_an_operator_without_a_key_has_one_partition_and_others_have_all() -> None:
    one = replace(WHOLE, partitions={0: (2, frozenset({0}))})
    assert import_problems(one, 7, READS, JOIN, {0}) == []
    assert "found state in [0]" in problems(one)[0]
    assert "expected the state partitions [0]" in import_problems(WHOLE, 7, READS, JOIN, {0})[0]


@pytest.mark.parametrize(
    "directory, below", [("/in", True), ("/in/*.parquet", True), ("/i{n,o}/x", True), ("/in/b*", False), ("/in/a.parquet", True)]
)
def test_a_pattern_of_files_is_compared_as_far_as_it_is_fixed(directory: str, below: bool) -> None:
    source = StageSource("FileSource", "files", (directory,))
    assert (problems(WHOLE, (source, READS[1])) == []) is below


@pytest.mark.parametrize(
    "offset, kind",
    [
        (FILES, "files"),
        (TOPIC, "kafka"),
        ({"a": {}}, "kafka"),
        ({"sourceVersion": 1, "reservoirId": "a", "reservoirVersion": 3, "index": -1}, "delta"),
        ({"table": "a", "first": 1, "version": 2, "read": 3}, "table"),
        (17, "other"),
        ({}, "other"),
        ({"attempt": 1, "watermark": 3}, "other"),
        (None, "other"),
    ],
)
def test_the_kind_of_a_source_by_its_offset(offset: Any, kind: str) -> None:
    assert kind_of_offset(offset) == kind


RUNNING = TaskSnapshot({"live": StageInstanceSnapshot()}, QuerySnapshot(7))


def exported(task: TaskSnapshot | None = RUNNING, **stage: Any) -> list[str]:
    recorded = StageMetadata(**{"name": "live", "parallelism": 1, "instances": ("live",), "inputs": (), **stage})
    chain = ChainMetadata("live", ("live",), {0: task} if task is not None else {})
    return export_problems(CheckpointMetadata("p", 3, (recorded,), (chain,)), chain)


def test_what_cannot_go_on_without_the_pipeline() -> None:
    assert exported() == []
    channel = ChannelSnapshot("other->live", 3)
    kept = StageInstanceSnapshot(operator_states=(OperatorState("limits", "list", (b"1",)),))
    refused = {
        "has a query and state of its own": exported(instances=("a", "b")),
        "no state is left": exported(None),
        "end of its data": exported(replace(RUNNING, end_of_data="drain")),
        "'other' through channels": exported(replace(RUNNING, channels=(channel,)), inputs=(InputMetadata("other"),)),
        "in splits": exported(enumerator=EnumeratorState()),
        "found none": exported(replace(RUNNING, query=None)),
        "committed a micro-batch": exported(replace(RUNNING, query=QuerySnapshot(-1))),
        "'limits' in context.state": exported(replace(RUNNING, stages={"live": kept})),
    }
    for words, found in refused.items():
        assert words in "".join(found), (words, found)
