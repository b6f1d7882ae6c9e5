"""What a discovery of splits may give; it runs on a thread of its own, and reports to the job."""

from __future__ import annotations

import logging
import queue
from typing import Any

import pytest

from dagster_checkpoints.execution.job_actions import DiscoverSplits
from dagster_checkpoints.pipeline import Pipeline, split_source
from dagster_checkpoints.spark.errors import StageFailedError
from dagster_checkpoints.spark.job.split_discovery import SplitDiscovery


@pytest.mark.parametrize("given", ["2026-01-01", None, 7])
def test_what_is_no_collection_of_splits_is_refused(given: Any) -> None:
    """A text is one of letters: a read that filters by its split would find no rows, and the source would end without any."""
    source = split_source(schema="n LONG", discover=lambda: given, sink=object(), name="days")(lambda split: split)
    found: queue.Queue[Any] = queue.Queue()
    session: Any = None
    discovery = SplitDiscovery(Pipeline("days", [source]), session, {}, logging.getLogger("tests"), found.put)
    discovery.begin(DiscoverSplits(1, "days"))
    failure = found.get(timeout=60).event.failure
    assert isinstance(failure.error, StageFailedError), failure
    assert f"expected discover to give splits, as a list for example, found {given!r}" in failure.message
