"""Errors of sources that run in the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.sources import SourceUnavailable
from dagster_checkpoints.spark.query.driver_sources import kept
from dagster_checkpoints.spark.query.fused_plans import FusedStream
from dagster_checkpoints.spark.query.fused_query import FusedQuery


@pytest.mark.parametrize("error", [SourceUnavailable("the store does not answer"), ValueError("of Spark's own source")])
def test_a_source_that_fails_when_it_is_held_to_what_is_there_gives_its_own_error(error: Exception) -> None:
    def prepare() -> None:
        raise error

    source = SimpleNamespace(prepareForTriggerAvailableNow=kept(prepare) if isinstance(error, SourceUnavailable) else prepare)
    made = SimpleNamespace(size=lambda: 1, apply=lambda position: source)
    query: Any = SimpleNamespace(execution=SimpleNamespace(uniqueSources=lambda: made, sources=lambda: made))
    with pytest.raises(type(error)) as raised:
        FusedQuery(query, {"history": FusedStream(0, "", True)}).hold("history")
    assert raised.value is error
