"""The format of `_metadata`: it is read back unchanged, stays readable, and is never misread."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.state.errors import CorruptMetadata, UnknownMetadataVersion
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EndOfData,
    EndOfPartition,
    EnumeratorState,
    FusedSourceSnapshot,
    InputMetadata,
    OperatorState,
    PlannedInput,
    PlannedOperator,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    StaticTableSnapshot,
    TaskSnapshot,
    WatermarkAt,
    WatermarkStatus,
    task_files,
)
from dagster_checkpoints.state.metadata_file import decode, encode

EXAMPLES = Path(__file__).parent / "examples"


def file(name: str, stored_by: int = 0) -> StateFile:
    return StateFile(name, hashlib.sha256(name.encode()).hexdigest(), len(name), stored_by)


EVERYTHING = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=7,
    kind="savepoint",
    job_id="job-1",
    run_id="2f0c",
    epoch=3,
    triggered_at=1_700_000_000.25,
    completed_at=1_700_000_001.5,
    spark_version="4.3.0",
    statistics={"new_bytes": 12.0},
    stages=(
        StageMetadata("history", 1, ("0",), finished=(0,), fully_finished=True),
        StageMetadata("live", 3, ("EWR", "JFK", "LGA"), finished=(1,)),
        StageMetadata("Verspätungen", 1, ("0",)),
    ),
    chains=(
        ChainMetadata("history", ("history",)),
        ChainMetadata(
            "live",
            ("live",),
            {
                0: TaskSnapshot(
                    stages={"live": StageInstanceSnapshot(rows_out=5)},
                    query=QuerySnapshot(4, (file("offsets/4"), file("commits/4")), own_watermark=True),
                    watermark=1_385_856_000_000,
                    output_positions={"live[0]->d[0]": 9},
                ),
                2: TaskSnapshot(end_of_data="drain"),
            },
        ),
        ChainMetadata(
            "Verspätungen",
            ("Verspätungen",),
            {
                0: TaskSnapshot(
                    stages={
                        "Verspätungen": StageInstanceSnapshot(
                            operator_states=(OperatorState("seen", "list", (b"\x00\xff", b"")),),
                            transactions=('{"dir":"a"}',),
                            rows_out=0,
                        )
                    },
                    channels=(
                        ChannelSnapshot(
                            "live[0]->d[0]",
                            9,
                            watermark=5,
                            in_flight=(
                                Segment((file("s-9.parquet"),), 10),
                                WatermarkAt(6),
                                WatermarkStatus(True),
                                EndOfData(True),
                                EndOfPartition(),
                            ),
                        ),
                        ChannelSnapshot("live[1]->d[0]", 3, idle=True, ended="partition"),
                    ),
                    static=(StaticTableSnapshot("airlines", (Segment((file("a.parquet"),), 16),)),),
                    valve_watermark=5,
                )
            },
        ),
    ),
)


SAVEPOINT = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=8,
    kind="savepoint",
    stages=(StageMetadata("daily", 1, ("0",), rows=0),),
    chains=(
        ChainMetadata(
            "daily",
            ("daily",),
            {
                0: TaskSnapshot(
                    stages={
                        "daily": StageInstanceSnapshot(
                            transactions=('{"dir":"a"}', '{"dir":"b"}', '{"dir":"c"}'),
                            transaction_files={0: (file("a/1.parquet"), file("a/2.parquet")), 2: (file("c/1.parquet"),)},
                        )
                    },
                )
            },
        ),
    ),
)
"""A savepoint that also holds the files of its sinks' uncommitted transactions."""

SPLITS = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=9,
    stages=(
        StageMetadata("live", 2, ("0", "1"), enumerator=EnumeratorState(("c",), ("a", "b"), ("z",)), max_parallelism=128),
        StageMetadata("history", 1, ("0",), (0,), True, enumerator=EnumeratorState(finished=("x", "y"))),
    ),
    chains=(ChainMetadata("live", ("live",), {0: TaskSnapshot(), 1: TaskSnapshot()}), ChainMetadata("history", ("history",))),
)
"""Sources with an enumerator, which is kept after all instances have finished; keyed state with its groups."""

STORED_BY = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=10,
    epoch=3,
    stages=(StageMetadata("live", 1, ("0",)),),
    chains=(
        ChainMetadata(
            "live",
            ("live",),
            {
                0: TaskSnapshot(
                    query=QuerySnapshot(4, (file("offsets/4", stored_by=3), file("commits/4", stored_by=2))),
                    static=(StaticTableSnapshot("airlines", (Segment((file("a.parquet"),), 16),)),),
                )
            },
        ),
    ),
)
"""Files stored by this owner, by the one before, and by a release that did not know epochs in names."""

INPUTS = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=11,
    stages=(
        StageMetadata("live", 1, ("0",), inputs=()),
        StageMetadata("airlines", 1, ("0",), (0,), True),
        StageMetadata(
            "hourly",
            1,
            ("0",),
            inputs=(InputMetadata("live", pattern="all_to_all", key="origin"), InputMetadata("airlines", "static", "all_to_all")),
        ),
    ),
    chains=(
        ChainMetadata("live", ("live",), {0: TaskSnapshot()}),
        ChainMetadata("airlines", ("airlines",)),
        ChainMetadata("hourly", ("hourly",), {0: TaskSnapshot()}),
    ),
)
"""The inputs of stages; unknown for a stage that an earlier release recorded without them."""

PLANS = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=12,
    stages=(StageMetadata("live", 1, ("0",)), StageMetadata("hourly", 1, ("0",))),
    chains=(
        ChainMetadata(
            "live",
            ("live", "hourly"),
            {
                0: TaskSnapshot(
                    stages={
                        "live": StageInstanceSnapshot(state_plan=()),
                        "hourly": StageInstanceSnapshot(state_plan=("aggregate by window(ts, 1 hour), origin: count(1)",)),
                    },
                    query=QuerySnapshot(4, (file("offsets/4"),), sources=("parquet /flights",)),
                )
            },
        ),
    ),
)
"""The plan that the state and the offsets of a query depend on."""

LATE_ROWS = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=12,
    stages=(StageMetadata("hourly", 2, ("0", "1"), (1,), rows=30, late_rows=7),),
    chains=(
        ChainMetadata("hourly", ("hourly",), {0: TaskSnapshot({"hourly": StageInstanceSnapshot(rows_out=20, late_rows=4)})}),
    ),
)
"""Rows dropped as late: three of them by an instance that has finished."""

SPLITS_READ = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=13,
    stages=(StageMetadata("days", 2, ("0", "1"), (1,), enumerator=EnumeratorState(("c",), ("b",), ("a",), complete=True)),),
    chains=(ChainMetadata("days", ("days",), {0: TaskSnapshot(splits=("b",))}),),
)
"""A bounded split source whose second instance has finished."""

STATE_PARTITIONS = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=14,
    stages=(StageMetadata("seen", 2, ("0", "1"), max_parallelism=8, state_partitions=8),),
    chains=(ChainMetadata("seen", ("seen",), {0: TaskSnapshot(), 1: TaskSnapshot()}),),
)
"""Keyed state whose key groups are its state partitions, four of each instance."""

PLANNED = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=15,
    stages=(StageMetadata("hourly", 1, ("0",)),),
    chains=(
        ChainMetadata(
            "hourly",
            ("hourly",),
            {
                0: TaskSnapshot(
                    stages={
                        "hourly": StageInstanceSnapshot(
                            planned=(
                                PlannedOperator(
                                    "inner join of streams",
                                    ("left.k = right.k",),
                                    ("(left.ts = right.ts)",),
                                    ("left side: (k > 3)",),
                                    (PlannedInput(("k: bigint",), ("k",), ("rows of records of input 'live'",)), PlannedInput()),
                                ),
                            )
                        ),
                    },
                    query=QuerySnapshot(4, (file("offsets/4"),)),
                )
            },
        ),
    ),
)
"""The operators that Spark has planned for the state of a query."""

BEHIND = CheckpointMetadata(
    pipeline="flights",
    checkpoint_id=15,
    stages=(
        StageMetadata("history", 1, ("0",)),
        StageMetadata("live", 1, ("0",)),
        StageMetadata("seen", 1, ("0",)),
    ),
    chains=(
        ChainMetadata(
            "history",
            ("history", "live"),
            {0: TaskSnapshot(fused=(FusedSourceSnapshot("live", 1, watermark=3, behind=True),))},
        ),
        ChainMetadata(
            "seen",
            ("seen",),
            {0: TaskSnapshot(channels=(ChannelSnapshot("live[0]->seen[0]", 3, 7, behind=True),), valve_watermark=9)},
        ),
    ),
)
"""Active again after idleness, and not caught up."""

WRITTEN = {
    "version-1.metadata": EVERYTHING,
    "version-1-transaction-files.metadata": SAVEPOINT,
    "version-1-enumerators.metadata": SPLITS,
    "version-1-stored-by.metadata": STORED_BY,
    "version-1-inputs.metadata": INPUTS,
    "version-1-plans.metadata": PLANS,
    "version-1-late-rows.metadata": LATE_ROWS,
    "version-1-splits.metadata": SPLITS_READ,
    "version-1-state-partitions.metadata": STATE_PARTITIONS,
    "version-1-planned.metadata": PLANNED,
    "version-1-behind.metadata": BEHIND,
}
"""The content of each stored example. A file is added with each addition to the format and never changed."""


@pytest.mark.parametrize("metadata", WRITTEN.values(), ids=WRITTEN)
def test_written_metadata_is_read_back(metadata: CheckpointMetadata) -> None:
    assert decode(encode(metadata), "x") == metadata
    minimal = CheckpointMetadata("p", 1)
    assert decode(encode(minimal), "x") == minimal


def test_the_same_metadata_gives_the_same_bytes() -> None:
    assert encode(EVERYTHING) == encode(decode(encode(EVERYTHING), "x"))


def test_metadata_is_readable_text() -> None:
    header, body, rest = encode(EVERYTHING).split(b"\n")
    assert header.startswith(b'{"format":"dagster-checkpoints","version":1,')
    assert json.loads(body)["stages"][1]["instances"] == ["EWR", "JFK", "LGA"]
    assert rest == b""


def test_the_files_of_a_checkpoint_are_those_that_must_stay() -> None:
    names = ["offsets/4", "commits/4", "s-9.parquet", "a.parquet"]
    assert EVERYTHING.files() == {file(name).sha256 for name in names}
    assert [f.path for f in task_files(EVERYTHING.chains[2].tasks[0])] == ["s-9.parquet", "a.parquet"]


def test_the_files_of_uncommitted_transactions_must_stay_too() -> None:
    assert SAVEPOINT.files() == {file(name).sha256 for name in ["a/1.parquet", "a/2.parquet", "c/1.parquet"]}


def test_files_are_named_by_their_content_and_their_owner() -> None:
    mine, before, oldest = file("offsets/4", 3), file("commits/4", 2), file("a.parquet")
    assert STORED_BY.files() == {f"{mine.sha256}-3", f"{before.sha256}-2", oldest.sha256}


def test_additions_to_the_format_are_written_only_where_used() -> None:
    written = [encode(metadata) for metadata in WRITTEN.values() if metadata != EVERYTHING]
    additions = {
        b"transaction_files": (0,),
        b"max_parallelism": (1, 7),
        b"stored_by": (2,),
        b"inputs": (3,),
        b"state_plan": (4,),
        b"sources": (4,),
        b"late_rows": (5,),
        b"splits": (6,),
        b'"complete":': (6,),
        b"state_partitions": (7,),
        b"planned": (8,),
        b"behind": (9,),
    }
    for addition, only in additions.items():
        assert [addition in data for data in written] == [number in only for number in range(len(written))]


def test_each_stored_example_is_accounted_for() -> None:
    assert {path.name for path in EXAMPLES.glob("*.metadata")} == set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_version_ever_written_stays_readable(name: str) -> None:
    assert decode((EXAMPLES / name).read_bytes(), name) == WRITTEN[name]


def test_there_is_an_example_of_the_present_version() -> None:
    headers = [path.read_bytes().partition(b"\n")[0] for path in EXAMPLES.glob("*.metadata")]
    assert CheckpointMetadata("p", 1).version in [json.loads(header)["version"] for header in headers]


DATA = encode(EVERYTHING)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, flip: int) -> None:
    damaged = bytearray(DATA)
    damaged[position] ^= flip
    with pytest.raises(CorruptMetadata, match="s3://b/_metadata"):
        decode(bytes(damaged), "s3://b/_metadata")


def test_every_flipped_bit_of_the_header_is_noticed() -> None:
    for position in range(DATA.index(b"\n") + 1):
        for bit in range(8):
            damaged = bytearray(DATA)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptMetadata):
                decode(bytes(damaged), "x")


@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_noticed(length: int) -> None:
    with pytest.raises(CorruptMetadata, match="damaged"):
        decode(DATA[:length], "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}\n{}\n",
        b"[]\n[]\n",
        b"7\n",
        b"\xff\xfe\n",
        b'{"format":"other","version":1}\n{}\n',
        b'{"format":"dagster-checkpoints","version":"1"}\n{}\n',
        b"PAR1" * 20,
        DATA + b"\n",
        DATA + b"x",
        b" " + DATA,
        b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_a_file_that_is_not_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptMetadata):
        decode(data, "x")


@given(st.binary(max_size=200))
def test_random_bytes_are_never_misread(data: bytes) -> None:
    with pytest.raises(CorruptMetadata):
        decode(data, "x")


def sealed(version: int, body: bytes) -> bytes:
    """A file as a release would write it that has other fields or another version."""
    covered = b"dagster-checkpoints %d %d\n%s" % (version, len(body), body)
    digest = hashlib.sha256(covered).hexdigest()
    name = '"format":"dagster-checkpoints"'
    header = f'{{{name},"version":{version},"length":{len(body)},"sha256":"{digest}"}}'
    return header.encode() + b"\n" + body + b"\n"


def test_the_seal_is_the_one_of_the_format() -> None:
    assert sealed(1, DATA.split(b"\n")[1]) == DATA


def test_an_intact_file_of_another_version_is_refused_by_version() -> None:
    with pytest.raises(UnknownMetadataVersion, match="version 2"):
        decode(sealed(2, b'{"anything":1}'), "x")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"claimed": True}, "claimed"),
        ({"kind": "snapshot"}, "snapshot"),
        ({"checkpoint_id": "7"}, "checkpoint_id"),
    ],
)
def test_a_flag_of_a_newer_release_is_refused_and_not_skipped(change: dict[str, object], named: str) -> None:
    body = json.loads(DATA.split(b"\n")[1])
    body.update(change)
    with pytest.raises(UnknownMetadataVersion, match=named):
        decode(sealed(1, json.dumps(body).encode()), "x")


# Sealed files that no release has written


def test_a_sealed_body_that_is_not_json_is_refused() -> None:
    for body in [b"", b"{", b"\xff", b"nothing", b"[" * 100_000, b'{"pipeline":"\xff\xfe","checkpoint_id":1}', DATA]:
        with pytest.raises((CorruptMetadata, UnknownMetadataVersion), match="s3://b/_metadata"):
            decode(sealed(1, body), "s3://b/_metadata")


BODY = DATA.split(b"\n")[1]


@given(st.integers(0, len(BODY) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_a_sealed_body_that_was_changed_is_read_or_refused_by_name(position: int, inserted: bytes, removed: int) -> None:
    changed = BODY[:position] + inserted + BODY[position + removed :]
    try:
        assert isinstance(decode(sealed(1, changed), "x"), CheckpointMetadata)
    except (CorruptMetadata, UnknownMetadataVersion) as error:
        assert "at x is" in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(st.data())
def test_a_value_of_any_other_type_is_read_or_refused_by_name(data: st.DataObject) -> None:
    body = json.loads(BODY)
    place: object = body
    while True:
        choices = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        key = data.draw(st.sampled_from(choices))
        below = place[key]  # type: ignore[index]
        if not isinstance(below, dict | list) or not below or data.draw(st.integers(0, 3)) == 0:
            break
        place = below
    place[key] = data.draw(JSON)  # type: ignore[index]
    try:
        assert isinstance(decode(sealed(1, json.dumps(body).encode()), "x"), CheckpointMetadata)
    except (CorruptMetadata, UnknownMetadataVersion) as error:
        assert "at x is" in str(error)


@given(JSON, JSON)
def test_any_first_line_is_read_or_refused_by_name(version: object, length: object) -> None:
    header = json.dumps({"format": "dagster-checkpoints", "version": version, "length": length, "sha256": ""}).encode()
    with pytest.raises(CorruptMetadata):
        decode(header + b"\n{}\n", "x")


ONE = StageMetadata("a", 1, ("0",))
ALONE = ChainMetadata("a", ("a",), {0: TaskSnapshot()})
ENDED = ChainMetadata("a", ("a",))


def of_two(*finished: int, name: str = "a", **fields: Any) -> StageMetadata:
    return StageMetadata(name, 2, ("0", "1"), finished, len(finished) == 2, **fields)


def tasks(*indices: int, **stages: StageInstanceSnapshot) -> dict[int, TaskSnapshot]:
    return {index: TaskSnapshot(stages) for index in indices}


TWO = ChainMetadata("a", ("a",), tasks(0, 1))
BOTH = ChainMetadata("a", ("a", "b"), tasks(0, 1))
ONE_OF_A, FINISHED_A = StageMetadata("a", 1, ("0",)), StageMetadata("a", 1, ("0",), (0,), True)
FUSED_ENDED = ChainMetadata("a", ("a",), {0: TaskSnapshot(fused=(FusedSourceSnapshot("a", 0, ended=True),))})


@pytest.mark.parametrize(
    ("stages", "chains", "words"),
    [
        ((ONE, ONE), (ALONE,), "there are 2 stages 'a'"),
        ((StageMetadata("a", 2, ("0",)),), (ALONE,), "parallelism 2 and 1 instances"),
        ((StageMetadata("a", 2, ("0", "1"), (2,)),), (ALONE,), "the finished instances"),
        ((StageMetadata("a", 2, ("0", "1"), (0, 0)),), (ALONE,), "the finished instances"),
        ((StageMetadata("a", 2, ("0", "1"), (0,), True),), (ALONE,), "is fully finished, with"),
        ((StageMetadata("a", 1, ("0",), (0,)),), (ALONE,), "is not fully finished, with"),
        ((ONE,), (), "'a' runs in 0 chains"),
        ((ONE,), (ALONE, ALONE), "'a' runs in 2 chains"),
        ((ONE,), (ChainMetadata("a", ("a", "b")),), "the stages \\['b'\\]"),
        ((ONE,), (ALONE, ChainMetadata("b", ())), "chain 'b' runs the stages"),
        ((ONE, StageMetadata("b", 2, ("0", "1"))), (ChainMetadata("a", ("a", "b")),), "different parallelisms: \\[1, 2\\]"),
        ((ONE,), (ChainMetadata("a", ("a",), tasks(0, 1)),), "has the tasks \\[1\\]"),
        ((ONE,), (ChainMetadata("a", ("a",), tasks(0, -1)),), "has the tasks \\[-1\\]"),
        ((of_two(1),), (TWO,), "has the tasks \\[1\\], which have finished"),
        ((of_two(),), (ChainMetadata("a", ("a",), tasks(1)),), "no snapshot of its unfinished tasks \\[0\\]"),
        ((of_two(0),), (ENDED,), "no snapshot of its unfinished tasks \\[1\\]"),
        ((StageMetadata("a", 10, tuple(map(str, range(10)))),), (ENDED,), "tasks \\[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\\]"),
        ((StageMetadata("a", 99, tuple(map(str, range(99)))),), (ENDED,), "tasks \\[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, '…'\\]"),
        ((StageMetadata("a", 0, (), (), True),), (ENDED,), "parallelism 0 and 0 instances"),
        ((StageMetadata("a", 2, ("x", "x")),), (TWO,), "2 instances 'x'"),
        # Finished or not, a task runs all stages of its chain.
        ((of_two(1), of_two(name="b")), (BOTH,), "chain 'a' have different finished instances"),
        ((of_two(0, 1), of_two(name="b")), (BOTH,), "chain 'a' have different finished instances"),
        ((of_two(0, 1), of_two(0, name="b")), (ChainMetadata("a", ("a", "b")),), "different finished instances"),
        ((ONE_OF_A,), (FUSED_ENDED,), "fused sources \\['a'\\] of chain 'a' have ended, and are not finished"),
        ((FINISHED_A,), (FUSED_ENDED,), "every stage of chain 'a' is a fused source that has ended"),
        ((of_two(),), (ChainMetadata("x", ("a",), tasks(0, 1)),), "chain 'x' begins with the stage 'a'"),
        ((of_two(), of_two(name="b")), (ChainMetadata("b", ("a", "b"), tasks(0, 1)),), "chain 'b' begins with the stage 'a'"),
        (
            (of_two(), of_two(name="b")),
            (ChainMetadata("a", ("a",), tasks(0, 1, b=StageInstanceSnapshot())), ChainMetadata("b", ("b",), tasks(0, 1))),
            "task 0 of chain 'a' holds state of \\['b'\\]",
        ),
        ((of_two(max_parallelism=-1),), (TWO,), "-1 key groups"),
        ((of_two(max_parallelism=1),), (TWO,), "parallelism 2 and 1 key groups"),
        ((of_two(max_parallelism=32769),), (TWO,), "32769 key groups"),
        ((of_two(enumerator=EnumeratorState(("x", "y"), ("y",))),), (TWO,), "split 'y' 2 times"),
        ((of_two(enumerator=EnumeratorState((), ("x",), ("x",))),), (TWO,), "split 'x' 2 times"),
        ((of_two(enumerator=EnumeratorState(("x", "x"))),), (TWO,), "split 'x' 2 times"),
        (
            (of_two(enumerator=EnumeratorState((), ("x",))),),
            (ChainMetadata("a", ("a",), {0: TaskSnapshot(splits=("x", "y")), 1: TaskSnapshot()}),),
            "task 0 of chain 'a' reads the splits \\['y'\\], which are not assigned",
        ),
    ],
)
def test_contradictory_metadata_is_refused(
    stages: tuple[StageMetadata, ...], chains: tuple[ChainMetadata, ...], words: str
) -> None:
    with pytest.raises(CorruptMetadata, match=f"contradicts itself: .*{words}"):
        decode(encode(CheckpointMetadata("p", 1, stages, chains)), "x")


@pytest.mark.parametrize("groups", [2, 32768])
def test_a_stage_may_have_as_few_and_as_many_key_groups(groups: int) -> None:
    metadata = CheckpointMetadata("p", 1, (of_two(max_parallelism=groups),), (TWO,))
    assert decode(encode(metadata), "x") == metadata


def test_a_stage_that_has_fully_finished_may_have_more_instances_than_key_groups() -> None:
    metadata = CheckpointMetadata("p", 1, (of_two(0, 1, max_parallelism=1),), (ENDED,))
    assert decode(encode(metadata), "x") == metadata


def test_first_line_and_body_hold_the_same_version() -> None:
    body = json.loads(BODY) | {"version": 2}
    with pytest.raises(CorruptMetadata, match="its first line says version 1, its body 2"):
        decode(sealed(1, json.dumps(body).encode()), "x")
