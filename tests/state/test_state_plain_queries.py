"""Which micro-batch of a plain query is taken, and why a stage cannot go on from it: tables of logs, outputs and plans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EnumeratorState,
    InputMetadata,
    OperatorState,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.plain_queries import (
    ImportRefused,
    OutputSays,
    PlainBatch,
    PlainQuery,
    StageSource,
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


IN_THE_MIDDLE = (
    "file:///checkpoint has planned micro-batch {planned} and not committed it: the query was stopped or killed in the middle. "
    "Its rows may be in the output or not, which the checkpoint directory does not say. Name the output (output=, --output) if "
    "it is that of Spark's file sink or of Delta Lake; of another sink, name the last micro-batch whose rows are completely in "
    "the output, with nothing of a later one: last_batch={committed} or last_batch={planned} (--last-batch). If you cannot know, "
    "as with Spark's Kafka sink, start the query once more and stop it between two batches: StreamingQuery.stop() after "
    "processAllAvailable()"
)
LOGS: list[tuple[PlainQuery, int | None, str]] = [
    (
        logs(-1, -1),
        None,
        "expected the checkpoint directory of a Structured Streaming query at file:///checkpoint, with entries in offsets/, "
        "found none. Name the directory that the query has as checkpointLocation",
    ),
    (
        replace(WHOLE, log_versions=("v1", "v2")),
        None,
        "expected logs of version v1 in file:///checkpoint, found v1 and v2: a query whose sources have names of Spark's own, or "
        "with spark.sql.streaming.offsetLog.formatVersion=2 or stateStore.checkpointFormatVersion=2. A query keeps these for "
        "ever. Begin the pipeline as a new start",
    ),
    (
        logs(9, 7),
        None,
        "expected the last planned micro-batch in file:///checkpoint to be the last committed one or the one after it, found "
        "planned 9, committed 7. A query with asynchronous progress tracking leaves such logs, and so does a directory that was "
        "copied while the query ran. Stop the query, start it without asyncProgressTrackingEnabled, stop it again, and copy the "
        "directory after that",
    ),
    (logs(8, 7), None, IN_THE_MIDDLE.format(planned=8, committed=7)),
    (logs(0, -1), None, IN_THE_MIDDLE.format(planned=0, committed=-1)),
    (
        logs(0, -1),
        -1,
        "file:///checkpoint has committed no micro-batch, and the output holds none: there is nothing to take over. Start the "
        "pipeline without a checkpoint (restore_from: none)",
    ),
    (
        WHOLE,
        6,
        "expected micro-batch 7 as the last one in the output, which file:///checkpoint has committed, found 6 (the test): the "
        "output is not the output of this checkpoint directory, or rows were removed. Name the right output, or the right "
        "directory",
    ),
    (
        WHOLE,
        9,
        "expected micro-batch 7 as the last one in the output, which file:///checkpoint has committed, found 9 (the test): the "
        "output is ahead of it, and the directory probably an older copy. Name the right output, or the right directory",
    ),
    (
        logs(8, 7),
        6,
        "expected micro-batch 7 or 8 as the last one in the output: file:///checkpoint has committed the first and planned the "
        "second. Found 6 (the test). Name the right output, or the right directory",
    ),
]


@pytest.mark.parametrize("query, last, text", LOGS)
def test_logs_and_outputs_that_are_refused_say_what_to_do(query: PlainQuery, last: int | None, text: str) -> None:
    with pytest.raises(ImportRefused) as refused:
        batch_to_take(query, OutputSays(last, "the test"))
    assert str(refused.value) == text


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
    ("file:///checkpoint/sources/0, found none", problems(replace(WHOLE, read=("", "")))),
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


def exported(task: TaskSnapshot | None = RUNNING, kind: Any = "savepoint", **stage: Any) -> list[str]:
    recorded = StageMetadata(**{"name": "live", "parallelism": 1, "instances": ("live",), "inputs": (), **stage})
    chain = ChainMetadata("live", ("live",), {0: task} if task is not None else {})
    return export_problems(CheckpointMetadata("p", 3, (recorded,), (chain,), kind=kind), chain)


CHANNEL = ChannelSnapshot("other->live", 3)
KEPT = StageInstanceSnapshot(operator_states=(OperatorState("limits", "list", (b"1",)), OperatorState("empty", "list")))
ENDED = "expected rows that are still to come, found that it has reached the end of its data: no state is left"
READS_CHANNELS = (
    "expected a query that begins with its sources, found that 'live' reads {} through channels of the pipeline, which Spark "
    "alone does not have"
)
NO_BATCH = "expected a query that has committed a micro-batch, found none: start the plain query as a new one"
CHECKPOINT = (
    "expected a savepoint, found checkpoint 3. Its rows may not be committed yet, and those of later checkpoints may be: with "
    "the plain query, rows would be missing, or there twice. Stop the pipeline with a savepoint (dagster-checkpoints stop), and "
    "give that back; if the pipeline has failed, start it again, and stop it"
)
EXPORTS: list[tuple[list[str], list[str]]] = [
    (exported(), []),
    (exported(kind="checkpoint"), [CHECKPOINT]),
    (exported(replace(RUNNING, query=QuerySnapshot(0))), []),
    (exported(instances=("a", "b")), ["expected one instance, found 'a', 'b': each has a query and state of its own"]),
    (exported(None), [ENDED]),
    (exported(replace(RUNNING, end_of_data="drain")), [ENDED]),
    (exported(replace(RUNNING, channels=(CHANNEL,)), inputs=(InputMetadata("other"),)), [READS_CHANNELS.format("'other'")]),
    (exported(inputs=(InputMetadata("other"),)), [READS_CHANNELS.format("'other'")]),
    (exported(replace(RUNNING, channels=(CHANNEL,))), [READS_CHANNELS.format("other stages")]),
    (
        exported(enumerator=EnumeratorState()),
        ["expected a streaming source, found that 'live' is read in splits, which Spark alone does not have"],
    ),
    (exported(replace(RUNNING, query=None)), [NO_BATCH]),
    (exported(replace(RUNNING, query=QuerySnapshot(-1))), [NO_BATCH]),
    (
        exported(replace(RUNNING, stages={"live": KEPT})),
        [
            "expected state in Spark's operators alone, found that 'live' keeps 'limits' in context.state, which a plain query "
            "does not have"
        ],
    ),
]


@pytest.mark.parametrize("found, texts", EXPORTS)
def test_what_cannot_go_on_without_the_pipeline(found: list[str], texts: list[str]) -> None:
    assert found == texts
