"""The order of a sink instance's transactions, without files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.sinks.branches import Branches, settlement
from dagster_checkpoints.sinks.transactions import PendingTransactions


def test_a_checkpoint_holds_all_pending_transactions_and_commits_those_up_to_it() -> None:
    pending = PendingTransactions[str]()
    for checkpoint_id, transaction in ((3, "a"), (4, "b"), (6, "c")):
        pending.add(checkpoint_id, transaction)
    assert pending.all == ("a", "b", "c")
    assert pending.first_up_to(2) is None
    committed = []
    while (transaction := pending.first_up_to(4)) is not None:
        committed.append(transaction)
        pending.committed()
    assert (committed, pending.all) == (["a", "b"], ("c",))
    assert pending.first_up_to(None) == "c"
    pending.committed()
    assert pending.first_up_to(None) is None


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12))),
    st.integers(0, 12),
    st.frozensets(st.integers(1, 12)),
    st.frozensets(st.integers(1, 12)),
)
def test_a_settlement_shows_exactly_the_rows_of_the_restored_checkpoint(
    gone: list[tuple[int, int]], restored: int, visible: frozenset[int], hidden: frozenset[int]
) -> None:
    branches = Branches()
    for origin, first in gone:
        branches = branches.begun(min(origin, first - 1), first)
    moves = settlement(branches, restored, visible, hidden, lambda checkpoint_id: checkpoint_id)
    shown = (visible - moves.hide) | moves.show
    assert shown == {number for number in visible | hidden if branches.is_ancestor(number, restored)}
    assert moves.hide <= visible and moves.show <= hidden
