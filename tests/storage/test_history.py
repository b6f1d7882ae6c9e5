"""The kept history of a pipeline: its files, their bounds, and what is read of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.control import history
from dagster_checkpoints.control.history import (
    CheckpointEntry,
    Entries,
    EventEntry,
    HistorySample,
    HistorySegments,
    InstancePart,
    Measured,
    StageSample,
    VertexParts,
    decode_segment,
    encode_segment,
    read_history,
)
from dagster_checkpoints.errors import CorruptHistory, StorageUnavailable
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.layout import HistoryKey, Layout
from tests.storage.conftest import FaultyStore

AT = datetime(2026, 1, 31, tzinfo=UTC)
MEASURED = Measured(1.5, 0.25, 0.5, 0.25, 0.5, 10, 100, 7)


def checkpoint(number: int, epoch: int = 1) -> CheckpointEntry:
    at = AT + timedelta(minutes=number)
    parts = (VertexParts(("live", "sums"), MEASURED, (InstancePart("a", MEASURED), InstancePart("b", finished=True))),)
    return CheckpointEntry(
        checkpoint_id=number,
        epoch=epoch,
        kind="checkpoint",
        status="completed",
        triggered_at=at,
        ended_at=at + timedelta(seconds=2),
        acknowledged=1,
        expected=1,
        measured=MEASURED,
        vertices=parts,
    )


def of(*numbers: int, epoch: int = 1) -> Entries:
    return Entries(tuple(checkpoint(number, epoch) for number in numbers))


def ids(entries: Entries) -> list[int]:
    return [entry.checkpoint_id for entry in entries.checkpoints]


def names(storage: CheckpointStorage) -> list[str]:
    return sorted(found.key.rpartition("/")[2] for found in storage.store.list(storage.layout.history))


def test_what_is_written_is_read(storage: CheckpointStorage) -> None:
    entries = Entries(
        (checkpoint(1), checkpoint(2)),
        (EventEntry(at=AT, epoch=1, kind="run_started", run_id="a", instances={"live": 2}, settings={"interval": None}),),
        (HistorySample(AT, 1, {"live": StageSample(5, None, -1)}),),
    )
    HistorySegments(storage, 1).append(entries)
    assert read_history(storage) == (entries, ())


def test_a_pipeline_without_a_history(storage: CheckpointStorage) -> None:
    assert read_history(storage) == (Entries(), ())


def test_a_growing_segment_is_rewritten_until_it_is_full(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "FULL_CHECKPOINTS", 3)
    segments = HistorySegments(storage, 7)
    found = []
    for number in range(1, 8):
        segments.append(of(number, epoch=7))
        found.append(names(storage))
    assert found == [["7-1.json"]] * 3 + [["7-1.json", "7-2.json"]] * 3 + [["7-1.json", "7-2.json", "7-3.json"]]
    assert ids(read_history(storage)[0]) == list(range(1, 8))


def test_a_segment_is_full_of_bytes_too(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "FULL_BYTES", len(encode_segment(of(1, 2))))
    segments = HistorySegments(storage, 1)
    for number in (1, 2, 3):
        segments.append(of(number))
    assert names(storage) == ["1-1.json", "1-2.json"]


def test_only_the_newest_full_segments_are_kept(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "FULL_CHECKPOINTS", 2)
    monkeypatch.setattr(history, "KEPT_SEGMENTS", 3)
    for epoch in (1, 2):
        segments = HistorySegments(storage, epoch)
        for number in range(epoch * 100, epoch * 100 + 5):
            segments.append(of(number, epoch=epoch))
    # The first run left 100 to 104 in three segments; the second one continued the last of them.
    assert ids(read_history(storage)[0]) == [104, 200, 201, 202, 203, 204]
    assert names(storage) == ["2-1.json", "2-2.json", "2-3.json"]


def test_a_run_continues_the_last_segment_of_its_predecessor(storage: CheckpointStorage) -> None:
    for epoch in range(1, 30):
        HistorySegments(storage, epoch).append(of(epoch, epoch=epoch))
    assert names(storage) == ["29-1.json"]
    assert ids(read_history(storage)[0]) == list(range(1, 30)), "bursts of few checkpoints leave no file each"
    assert ids(HistorySegments(storage, 30).latest()) == []


def test_the_owner_remembers_the_newest_entries(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "FULL_CHECKPOINTS", 2)
    first = HistorySegments(storage, 1)
    for number in range(1, 21):
        first.append(of(number))
    second = HistorySegments(storage, 2)
    second.append(of(21, epoch=2))
    assert ids(second.latest()) == [*range(11, 21), 21]


def test_a_crash_before_the_predecessors_segment_is_deleted_repeats_nothing(storage: CheckpointStorage) -> None:
    HistorySegments(storage, 1).append(of(1, 2))
    kept = storage.store.get(storage.layout.history_segment(HistoryKey(1, 1)))
    HistorySegments(storage, 2).append(of(3, epoch=2))
    storage.store.put(storage.layout.history_segment(HistoryKey(1, 1)), kept)
    assert ids(read_history(storage)[0]) == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"version": 1}', b'{"version": 2}', b"[" * 100_000])
def test_a_segment_that_cannot_be_read_is_named_and_left(content: bytes, storage: CheckpointStorage) -> None:
    HistorySegments(storage, 1).append(of(1))
    storage.store.put(storage.layout.history_segment(HistoryKey(2, 1)), content)
    third = HistorySegments(storage, 3)
    third.append(of(3, epoch=3))
    entries, problems = read_history(storage)
    assert ids(entries) == [1, 3] == ids(third.latest())
    assert len(problems) == 1 and f"{storage.store.url}/flights/history/2-1.json" in problems[0]
    assert third.problems == problems
    assert "2-1.json" in names(storage)
    with pytest.raises(CorruptHistory, match=r"delete the file|newer release"):
        decode_segment(content, "there")


def test_files_of_others_are_no_part_of_it(storage: CheckpointStorage) -> None:
    storage.store.put(f"{storage.layout.history}notes.txt", b"mine")
    HistorySegments(storage, 1).append(of(1))
    assert ids(read_history(storage)[0]) == [1]
    assert "notes.txt" in names(storage)


def test_entries_survive_a_store_that_is_away(storage: CheckpointStorage, faulty: FaultyStore) -> None:
    segments = HistorySegments(storage, 1)
    faulty.away = True
    for number in (1, 2):
        with pytest.raises(StorageUnavailable):
            segments.append(of(number))
    faulty.away = False
    segments.append(of(3))
    assert ids(read_history(storage)[0]) == [1, 2, 3]


@given(st.integers(0, 10**12), st.integers(1, 10**9))
def test_names_of_segments(epoch: int, number: int) -> None:
    layout, key = Layout("flights"), HistoryKey(epoch, number)
    assert layout.parse_history(layout.history_segment(key)) == key


@pytest.mark.parametrize("name", ["", "1.json", "a-1.json", "1-1.json.tmp", "1-1", "-1-1.json", "sub/1-1.json"])
def test_other_names_are_no_segments(name: str) -> None:
    layout = Layout("flights")
    assert layout.parse_history(f"{layout.history}{name}") is None
