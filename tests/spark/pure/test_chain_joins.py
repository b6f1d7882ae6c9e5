"""A run joins chains in its first attempt only. No Spark runs."""

from __future__ import annotations

import logging
from typing import Any

from msgspec.structs import replace

from dagster_checkpoints.spark.job.chain_joins import ChainJoins
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage
from dagster_checkpoints.spark.query.joined_plans import QueriesStayApart
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.state import Segment, fitted, validate_restore
from tests.state.test_state_joined_chains import channel, checkpoint, four, pipeline

NOW, SEPARATE = pipeline(), pipeline(chaining=False)
IN_FLIGHT = channel(in_flight=(Segment((), 1),))


def restored(**others: Any) -> Restored:
    metadata = fitted(NOW, checkpoint(SEPARATE, four(**others)))
    return Restored(metadata, validate_restore(NOW, metadata), "chk")


def chains(joins: ChainJoins, of: Restored | None) -> list[str]:
    made = joins.restored(of)
    return [] if made is None else ["".join(chain) for chain in made.plan.chains]


def test_later_attempts_have_the_chains_of_the_first_one(caplog: Any) -> None:
    aligned, unaligned = restored(), restored(c=IN_FLIGHT(four()["c"]))  # type: ignore[arg-type]
    caplog.set_level(logging.INFO)
    joins = ChainJoins(NOW, logging.getLogger("joins"))
    assert chains(joins, unaligned) == ["ab", "cd"]
    joins.keep()
    assert chains(joins, aligned) == ["ab", "cd"], "a restart from a later checkpoint"
    joins.keep()
    assert [record.getMessage() for record in caplog.records] == [
        "The queries of a and b become one, with their state.",
        "The queries of c and d become one, with their state.",
        "'b' and 'c' could share a query, and keep separate ones: rows were on their way from 'b' to 'c': restore a savepoint, "
        "or an aligned checkpoint.",
    ]
    assert chains(joins, replaced_by_one(aligned)) == ["abcd"], "the layout of a checkpoint is kept"

    new = ChainJoins(NOW, logging.getLogger("joins"))
    assert chains(new, None) == []
    new.keep()
    assert chains(new, aligned) == ["a", "b", "c", "d"]


def replaced_by_one(of: Restored) -> Restored:
    """A checkpoint that was taken with one query."""
    one = ChainJoins(NOW, logging.getLogger("joins")).restored(of)
    assert one is not None
    whole = replace(one.metadata, chains=tuple(replace(each, parts=()) for each in one.metadata.chains))  # type: ignore[call-arg]
    return Restored(whole, validate_restore(NOW, whole), "chk")


def test_what_spark_cannot_join_stays_apart() -> None:
    joins = ChainJoins(NOW, logging.getLogger("joins"))
    assert not joins.stay_apart(RefusedAtStage("c", "no such plan")), "nothing is joined yet"
    assert chains(joins, restored()) == ["abcd"]
    assert not joins.stay_apart(RefusedAtStage("x", "no such plan"))
    assert joins.stay_apart(RefusedAtStage("c", "no such plan"))
    assert chains(joins, restored()) == ["a", "b", "c", "d"]
    assert joins.changes[0] == "'a' and 'b' could share a query, and keep separate ones: no such plan."
    other = ChainJoins(NOW, logging.getLogger("joins"))
    assert chains(other, restored(c=IN_FLIGHT(four()["c"]))) == ["ab", "cd"]  # type: ignore[arg-type]
    assert other.stay_apart(QueriesStayApart("c", "other columns"))
    assert chains(other, restored()) == ["abc", "d"]
