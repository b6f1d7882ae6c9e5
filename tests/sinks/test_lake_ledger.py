"""The ledger of a sink's instance as numbers of a lake table, and what is recorded before there is a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.sinks import SinkFenced
from dagster_checkpoints.sinks.lake.ledger import changed_numbers, read_job, read_ledger
from dagster_checkpoints.sinks.lake.names import InstanceNames
from dagster_checkpoints.sinks.ledger import JobLedger, SinkOwner
from tests.sinks.delta_lake import Table

INSTANCE = InstanceNames("flights", "delays", 0)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 4)),
        st.tuples(st.just("begin"), st.integers(0, 12)),
        st.tuples(st.just("show"), st.integers(0, 12)),
        st.tuples(st.just("show also"), st.integers(1, 12)),
    ),
    max_size=12,
)


@given(CHANGES)
def test_the_numbers_of_each_change_give_the_ledger_after_it(changes: list[tuple[str, int]]) -> None:
    numbers: dict[str, int] = {}
    ledger, newest = JobLedger(), 0
    for what, value in changes:
        before = ledger
        if what == "commit":
            newest += value
            ledger = ledger.committed(newest, "")
        elif what == "begin":
            newest += 1
            ledger = ledger.begun(min(value, newest - 1), newest)
        else:
            ledger = ledger.showing(value) if what == "show" else ledger.showing_also(value)
        numbers |= changed_numbers(INSTANCE, "1.h1", before, ledger)
        found = read_job(INSTANCE, "1.h1", numbers.get)
        known = {0, *(branch.first for branch in ledger.branches.branches)}
        assert found.newest == {branch: newest for branch, newest in ledger.newest.items() if branch in known}
        assert (found.branches, found.stretches, found.shown) == (ledger.branches, ledger.stretches, ledger.shown)
        assert found.again == ledger.again
        assert changed_numbers(INSTANCE, "1.h1", ledger, ledger) == {}


def test_the_newest_owner_is_that_of_the_same_history() -> None:
    numbers = {"dagster-checkpoints/flights/delays/0/owner@h1": 4, "dagster-checkpoints/flights/delays/0/owner": 9}
    assert read_ledger(INSTANCE, "h1", numbers.get).owner == SinkOwner(4, "h1")
    assert read_ledger(INSTANCE, "", numbers.get).owner == SinkOwner(9, "")
    assert read_ledger(INSTANCE, "h2", numbers.get).owner == SinkOwner(0, "h2")


@pytest.mark.parametrize("index", [0, 1])
def test_an_owner_that_has_come_before_the_table_is_recorded_with_it(tmp_path: Path, index: int) -> None:
    """Also by another instance than the one that creates it."""
    table = Table(tmp_path)
    late = table.opened(index=1, parallelism=2, epoch=1)
    newer = table.opened(index=1, parallelism=2, epoch=2, attempt="newer")
    creating = newer if index else table.opened(index=0, parallelism=2, epoch=2)
    creating.commit(table.staged(creating, 1, 10))
    newer.commit(table.staged(newer, 2, 20))
    with pytest.raises(SinkFenced, match="epoch 2"):
        table.staged(late, 2, 30)
    assert table.rows() == [10, 20]


def test_a_replaced_jobs_run_that_is_still_there_commits_nothing_in_any_instance(tmp_path: Path) -> None:
    """The first instance of the new job removes the rows of all: those of instances that the new job has not opened, too, and
    of one that has not committed anything yet.
    """
    table = Table(tmp_path)
    old = [table.opened(index=index, parallelism=3) for index in (0, 1, 2)]
    for sink in old[:2]:
        sink.commit(table.staged(sink, 1, 1))
    waiting = [table.staged(sink, 2, 2) for sink in old[1:]]
    replacing = table.opened(settings={"at_new_start": "replace"}, job_id=2, epoch=2, attempt="new")
    replacing.start_new()
    assert table.rows() == []
    for sink, transaction in zip(old[1:], waiting, strict=True):
        with pytest.raises(SinkFenced, match="epoch 2"):
            sink.commit(transaction)
    assert table.rows() == []
