"""Positions in a table with versions: every file is read once, in batches of any size."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.sources.lake.positions import LakeFile, TablePosition, advanced, files_between


@dataclass
class Versions:
    """A table in memory: what each version has added; rewrites change `files`, and add nothing."""

    adds: list[list[LakeFile]] = field(default_factory=list)

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
