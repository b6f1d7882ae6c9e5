"""The order of a sink instance's transactions, without files."""

from __future__ import annotations

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
