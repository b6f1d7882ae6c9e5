"""Positions in a table with versions: every file is read once, in batches of any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.sources import InvalidSource
from dagster_checkpoints.sources.lake.positions import LakeFile, TablePosition, advanced, files_between
from dagster_checkpoints.sources.lake.stream import LakeReading, LakeStream
from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS, SourceFailed


@dataclass
class Versions:
    """A table in memory: what each version has added; rewrites change `files`, and add nothing."""

    adds: list[list[LakeFile]] = field(default_factory=list)
    id = ""
    shown = "a table in memory"

    def open(self) -> None:
        """Its newest state is at hand."""

    def resolved(self, files: Sequence[LakeFile]) -> Sequence[LakeFile]:
        return files

    def check_columns(self) -> None:
        """It has none."""

    def grow(self, files: int) -> None:
        version = len(self.adds)
        self.adds.append([LakeFile(f"{version}/{n}") for n in range(files)])

    def newest(self) -> int:
        return len(self.adds) - 1

    def after(self, version: int) -> int | None:
        return version + 1 if version + 1 < len(self.adds) else None

    def files(self, version: int) -> list[LakeFile]:
        return [file for added in self.adds[: version + 1] for file in added]

    def added(self, version: int) -> list[LakeFile]:
        return self.adds[version]


@dataclass(frozen=True)
class Offset:
    """An offset of Spark's."""

    text: str

    def json(self) -> str:
        return self.text


def as_offset(value: Any) -> Offset:
    return Offset(json.dumps(value, sort_keys=True))


def stream_of(table: Versions, at_most: int, only: int | None) -> Any:
    reading: Any = LakeReading(table, None, None, at_most, only)  # type: ignore[arg-type]
    sources: Any = SimpleNamespace(offset=as_offset)
    return LakeStream(sources, None, reading)  # type: ignore[arg-type]


def limit_of(files: int) -> Any:
    return SimpleNamespace(maxFiles=lambda: files, getClass=lambda: SimpleNamespace(getSimpleName=lambda: "ReadMaxFiles"))


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(SIZES, st.lists(st.tuples(st.none() | st.integers(1, 3), st.integers(0, 3)), max_size=20))
def test_every_file_is_read_once_and_in_order(sizes: list[int], steps: list[tuple[int | None, int]]) -> None:
    table = Versions()
    for size in sizes:
        table.grow(size)
    position = start = TablePosition.at_start("t", table.newest())
    read: list[LakeFile] = []
    for at_most, grown in [*steps, (None, 0)]:
        reached = TablePosition.from_json(advanced(table, position, at_most, None).to_json())
        batch = files_between(table, position, reached)
        assert at_most is None or len(batch) <= at_most
        assert batch or reached == position or at_most != 0
        read += batch
        position = reached
        if grown:
            table.grow(grown)
            table.grow(0)  # a commit that only rewrites files
    reached = advanced(table, position, None, None)
    read += files_between(table, position, reached)
    assert read == table.files(table.newest())
    assert files_between(table, start, reached) == read
    assert advanced(table, reached, 3, None) == reached


@given(SIZES, st.integers(1, 5), st.integers(0, 3))
def test_reading_ends_with_the_last_version(sizes: list[int], at_most: int, later: int) -> None:
    table = Versions()
    for size in sizes:
        table.grow(size)
    last = table.newest()
    expected = table.files(last)
    position = start = TablePosition.at_start("t", 0)
    for _ in range(later):
        table.grow(2)
    while (reached := advanced(table, position, at_most, last)) != position:
        position = reached
    assert files_between(table, start, position) == expected


@given(SIZES, st.integers(1, 5), st.integers(1, 3))
def test_a_first_batch_that_is_planned_again_reads_the_same_files(sizes: list[int], at_most: int, later: int) -> None:
    """Spark has stored its end, but not its start: that is asked for again, when the table has a newer version."""
    table = Versions()
    for size in sizes:
        table.grow(size)
    start = TablePosition.at_start("t", table.newest())
    end = advanced(table, start, at_most, None)
    planned = files_between(table, start, end)
    for _ in range(later):
        table.grow(2)
    assert files_between(table, TablePosition.at_start("t", table.newest()), end) == planned


@given(SIZES, st.integers(0, 5), st.integers(0, 5), st.integers(1, 3))
def test_a_restore_with_another_only_version_ends_with_it_or_is_refused(
    sizes: list[int], read: int, only: int, at_most: int
) -> None:
    """The version is an argument in the code, and the position comes from the checkpoint."""
    table = Versions()
    for size in sizes:
        table.grow(size)
    read, only = min(read, table.newest()), min(only, table.newest())
    position = advanced(table, TablePosition.at_start("", read), at_most, read)
    stream, limit = stream_of(table, at_most, only), limit_of(at_most)
    offset, before, found = as_offset(position.to_json()), None, list[LakeFile]()
    if only < read:
        with pytest.raises(SourceFailed) as raised:
            stream.latestOffset(offset, limit)
        refused = KEPT_ERRORS.take(raised.value)
        assert isinstance(refused, InvalidSource)
        assert f"has read up to {read}, which does not lead to {only}" in str(refused)
        return
    while offset != before:
        before, offset = offset, stream.latestOffset(offset, limit)
        start, end = (TablePosition.from_json(json.loads(each.json())) for each in (before, offset))
        found += files_between(table, start, end)
    assert table.files(read)[: position.read] + found == table.files(only)


@given(SIZES, st.integers(1, 3), st.lists(st.integers(0, 2), min_size=4, max_size=12), st.booleans())
def test_a_source_that_is_held_ends_with_the_version_of_that_moment_whatever_comes_in_between(
    sizes: list[int], at_most: int, grows: list[int], begun: bool
) -> None:
    """Spark asks a bounded source for its end and then for its beginning; a fused one has begun when it is held."""
    table, later = Versions(), iter(grows)
    for size in sizes:
        table.grow(size)
    stream, limit = stream_of(table, at_most, None), limit_of(at_most)
    if begun:
        stream.initialOffset()
        table.grow(next(later))
    last = table.newest()
    stream.prepareForTriggerAvailableNow()
    table.grow(next(later))
    offset, before, found = stream.initialOffset(), None, list[LakeFile]()
    for _ in range(sum(sizes) + sum(grows) + 2):  # rounds with one file each would be enough
        before, offset = offset, stream.latestOffset(offset, limit)
        found += files_between(table, *(TablePosition.from_json(json.loads(each.json())) for each in (before, offset)))
        table.grow(next(later, 1))
    assert found == table.files(last)
    assert offset == before, "it reads on and on"
