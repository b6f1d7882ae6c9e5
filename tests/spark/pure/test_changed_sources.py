"""Other streaming sources than those of the checkpoint: refused, or allowed and said in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.pipeline import Chain, Pipeline, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.spark.query.restored_plans import check_restored_plan
from dagster_checkpoints.state.errors import SourcesChanged
from dagster_checkpoints.state.metadata import QuerySnapshot, TaskSnapshot

OLD, NEW = "kafka subscribe=old", "kafka subscribe=new"


def check(now: tuple[str, ...], allowed: bool) -> None:
    @unbounded_source(sink=ParquetSink("out"))
    def live(context: Any) -> Any:
        """Not called."""

    snapshot = TaskSnapshot({}, QuerySnapshot(4, sources=(OLD,)))
    chain = SimpleNamespace(name="live", tasks={0: snapshot})
    metadata: Any = SimpleNamespace(chains=[chain], stages=[], checkpoint_id=7, pipeline="flights")
    described = PlanDescription({}, now, None)
    log = logging.getLogger("run")
    check_restored_plan(
        Pipeline("flights", [live]),
        metadata,
        Chain("live", ("live",), ("all",)),
        0,
        described,
        None,
        allow_changed_plan=allowed,
        log=log,
    )


def test_they_are_said_where_they_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    check((OLD,), allowed=False)
    with pytest.raises(SourcesChanged, match="reads other streaming sources"):
        check((NEW,), allowed=False)
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "allow_changed_plan" in record.message]
    check((NEW,), allowed=True)
    [warning] = [record.message for record in caplog.records if "allow_changed_plan: true, the run continues" in record.message]
    assert OLD in warning and NEW in warning


def test_another_number_of_them_is_refused_whatever_is_allowed() -> None:
    with pytest.raises(SourcesChanged, match="reads 2 streaming sources, and in the checkpoint 1"):
        check((OLD, NEW), allowed=True)
