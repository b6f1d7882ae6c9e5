"""Channels, query logs, key groups and operator state, without a Spark session."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import (
    EndOfData,
    WatermarkAt,
)
from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.spark.channels.channel_log import Channel, Records, SegmentFiles, segment_of
from dagster_checkpoints.spark.query.error_location import own_line, stage_of
from dagster_checkpoints.spark.query.query_log import PlannedBatch, QueryLog, channel_positions
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.state.metadata import OperatorState

IDENTITY = ChannelId("a", 0, "b", 1)


def segment(folder: Path, name: str, size: int = 10) -> SegmentFiles:
    file = folder / name
    file.write_bytes(b"x" * size)
    return segment_of([file], 1)


@pytest.fixture
def channel() -> Channel:
    return Channel(IDENTITY, base=5)


def test_a_channel_counts_from_its_base_and_forgets_elements_that_were_read(channel: Channel, tmp_path: Path) -> None:
    one, two = segment(tmp_path, "one"), segment(tmp_path, "two", 7)
    elements = [Records(one), WatermarkAt(3), Records(two), EndOfData(True)]
    for element in elements:
        channel.append(element)
    assert channel.elements_from(5) == elements
    assert channel.elements_from(7) == elements[2:]
    assert channel.elements_from(9) == []
    assert (channel.wait_below(17, 0), channel.wait_below(18, 0)) == (False, True)  # 17 bytes are queued

    channel.release_before(7)
    assert channel.elements_from(7) == elements[2:]
    assert (channel.wait_below(7, 0), channel.wait_below(8, 0)) == (False, True)
    assert not one.files[0].exists()
    assert two.files[0].exists()
    channel.release_before(7)  # again: nothing
    channel.release_before(99)  # more than the channel holds
    assert channel.elements_from(9) == []
    assert not two.files[0].exists()


def test_a_segment_in_two_channels_stays_until_both_have_released_it(tmp_path: Path) -> None:
    channels = [Channel(ChannelId("a", 0, "b", i)) for i in range(2)]
    shared = segment(tmp_path, "shared")
    shared.hold()
    for each in channels:
        each.append(Records(shared))
    shared.release()
    channels[0].release_before(1)
    assert shared.files[0].exists()
    channels[1].release_before(1)
    assert not shared.files[0].exists()


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_a_query_reads_up_to_the_last_records_and_needs_no_batch_for_the_marks_behind_them(
    elements: list[bool], released: int, opened: int
) -> None:
    """`elements`: for each, whether it holds records. Everything before `released` was read and forgotten."""
    channel, base = Channel(IDENTITY, base=3), 3
    heard: list[int] = []
    channel.on_append = lambda: heard.append(len(channel.elements_from(base)))
    segments = [SegmentFiles((Path(f"/none/{i}"),), 1, (1,)) for i in range(len(elements))]
    for holds, part in zip(elements, segments, strict=True):
        channel.append(Records(part) if holds else WatermarkAt(1))
    assert heard == list(range(1, len(elements) + 1)), "the consumer is notified after the element is there"

    released = base + min(released, len(elements))
    opened = max(released, base + min(opened, len(elements)))
    records = [base + i for i, holds in enumerate(elements) if holds]
    channel.release_before(released)
    read = max((position + 1 for position in records if position < opened), default=base)
    assert channel.behind_records(opened) == read
    assert channel.behind_marks(read, opened) == opened
    unread = [position for position in records if released <= position < opened]
    assert channel.files(released, opened) == [Path(f"/none/{position - base}") for position in unread]
    assert channel.files(0, opened) == channel.files(released, opened), "what was released is not read again"
    assert channel.behind_marks(released, opened) == min([*unread, opened])


def test_a_producer_waits_until_its_consumer_has_caught_up_or_the_channel_closes(channel: Channel, tmp_path: Path) -> None:
    channel.append(Records(segment(tmp_path, "one", 100)))
    assert not channel.wait_below(100, timeout=0.01)
    waits = threading.Event()
    passed: list[bool] = []

    def produce() -> None:
        waits.set()
        passed.append(channel.wait_below(100, timeout=60))

    producer = threading.Thread(target=produce)
    producer.start()
    assert waits.wait(60)
    channel.release_before(6)
    producer.join(60)
    assert passed == [True]

    channel.append(Records(segment(tmp_path, "two", 100)))
    channel.close()
    assert channel.wait_below(100, timeout=60)


# Query logs


class Checkpoint:
    """A hand-made checkpoint directory with batches as Spark writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for log in ("offsets", "commits"):
            (path / log).mkdir(parents=True)

    def plan(self, batch: int, watermark: int = 0, *sources: Any) -> None:
        metadata = json.dumps({"batchWatermarkMs": watermark, "batchTimestampMs": 1, "conf": {"x": "y"}})
        lines = ["v1", metadata, *[json.dumps(s) if s is not None else "-" for s in sources]]
        (self.path / "offsets" / str(batch)).write_text("\n".join(lines))
        (self.path / "offsets" / f".{batch}.crc").write_text("sum")

    def commit(self, batch: int, next_watermark: int = 0) -> None:
        text = "v1\n" + json.dumps({"nextBatchWatermarkMs": next_watermark})
        (self.path / "commits" / str(batch)).write_text(text)


def test_a_query_log_reports_the_newest_committed_batch(tmp_path: Path) -> None:
    log = QueryLog(tmp_path / "not yet there")
    assert log.last_committed() == -1
    made = Checkpoint(tmp_path / "checkpoint")
    made.commit(6)
    made.commit(7)
    log = QueryLog(made.path)
    assert log.last_committed() == 7
    log.processed(8)
    assert log.last_committed() == 7, "processed, and not committed"
    made.commit(8, next_watermark=99)
    assert log.last_committed() == 8
    made.commit(9)
    assert log.last_committed() == 8, "a batch that was not processed is not looked for"
    assert log.is_committed(8)
    assert not log.is_committed(10)
    assert log.next_watermark(8) == 99


def test_a_planned_batch_has_the_offsets_of_the_one_before_and_its_own_watermark(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path)
    sources = [{"attempt": 1, "watermark": 5}, {"a[0]->b[0]": 3}, {"logOffset": 2}, None]
    made.plan(3, 10, *sources)
    made.commit(3)
    made.plan(4, 11, {"a[0]->b[0]": 9})
    log = QueryLog(tmp_path)
    assert log.planned(3) == PlannedBatch(3, 10, tuple(sources))
    assert channel_positions(log.planned(3)) == {"a[0]->b[0]": 3}

    log.plan_batch(4, MAX_WATERMARK_MS)
    assert log.planned(4) == PlannedBatch(4, MAX_WATERMARK_MS, tuple(sources))
    assert json.loads((tmp_path / "offsets/4").read_text().split("\n")[1])["conf"] == {"x": "y"}
    assert not (tmp_path / "offsets/.4.crc").exists(), "Spark would find that the file differs from the one that it wrote"
    with pytest.raises(FileNotFoundError):
        log.planned(5)

    made.plan(5, 12)
    log.forget_planned_after(4)
    assert sorted(file.name for file in (tmp_path / "offsets").iterdir()) == [".3.crc", "3", "4"]


def test_a_channel_behind_two_sources_is_consumed_as_far_as_the_slower_one() -> None:
    sources = ({"a->b": 7, "c->b": 1}, {"attempt": 1, "watermark": None}, {"a->b": 5, "c->b": 2})
    assert channel_positions(PlannedBatch(1, 0, sources)) == {"a->b": 5, "c->b": 1}


# Operator state


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
names = st.text(min_size=1, max_size=3)
items = st.lists(json_values, max_size=3)


@settings(max_examples=40)
@given(
    st.dictionaries(names, items, max_size=2),
    st.dictionaries(names, items, max_size=2),
    st.dictionaries(names, st.dictionaries(names, json_values, max_size=3), max_size=2),
)
def test_operator_state_comes_back_as_it_was(lists: dict, unions: dict, broadcasts: dict) -> None:
    store = OperatorStateStore()
    for name, items in lists.items():
        for item in items:
            store.list(name).add(item)
    for name, items in unions.items():
        store.union(name).update(items)
    for name, items in broadcasts.items():
        for key, value in items.items():
            store.broadcast(name).put(key, value)
        store.broadcast(name)  # also an empty one
    again = OperatorStateStore(store.snapshot())
    assert again.snapshot() == store.snapshot()
    assert {name: list(again.list(name)) for name in lists} == {n: [*i] for n, i in lists.items()}
    assert {name: list(again.union(name)) for name in unions} == {n: [*i] for n, i in unions.items()}
    assert {name: dict(again.broadcast(name).items()) for name in broadcasts} == broadcasts


def test_operator_state_is_changed_in_place_and_kinds_do_not_meet() -> None:
    store = OperatorStateStore()
    store.list("x").add(1)
    store.union("x").add(2)
    store.broadcast("x").put("k", 3)
    store.broadcast("x").put("gone", 4)
    store.broadcast("x").remove("gone")
    store.broadcast("x").remove("never there")
    assert list(store.list("x")) == [1]
    assert store.broadcast("x").get("gone", "default") == "default"
    for item in store.list("x"):
        store.list("x").add(item + 1)  # the loop sees the items that existed when it began
    assert list(store.list("x")) == [1, 2]
    store.list("x").clear()
    kinds = {state.kind: state for state in store.snapshot()}
    assert kinds["list"].items == ()
    assert kinds["union"] == OperatorState(name="x", kind="union", items=(b"2",))
    assert kinds["broadcast"].items == (b'["k",3]',)


def test_operator_state_that_json_cannot_hold_is_an_error() -> None:
    store = OperatorStateStore()
    store.list("x").add(object())
    with pytest.raises(TypeError):
        store.snapshot()


# The stage of an error


def test_an_error_from_a_worker_names_the_users_line() -> None:
    from dagster_checkpoints.pipeline import bounded_source, stage

    @bounded_source
    def first(context):
        return None

    @stage
    def second(first):
        return first

    line = second.location.line + 2
    text = f'Traceback:\n  File "worker.py", line 9, in main\n  File "{__file__}", line {line}, in udf\nValueError: no'
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        found = own_line(error, __file__)
        assert (found.file, found.line, found.function) == (__file__, line, "udf")
        assert str(found).endswith("in udf: return first")
        assert stage_of(error, [first, second]) is second
        assert stage_of(error, [first]) is None
    try:
        raise RuntimeError("no worker")
    except RuntimeError as error:
        assert stage_of(error, [first, second]) is None
        assert own_line(error, "other.py").function == "test_an_error_from_a_worker_names_the_users_line"
