"""What a discovery of splits may give; it runs on a thread of its own, and reports to the job."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dagster_checkpoints.execution.job_actions import DiscoverSplits
from dagster_checkpoints.pipeline import Pipeline, split_source
from dagster_checkpoints.spark.errors import StageFailedError
from dagster_checkpoints.spark.job import split_discovery
from dagster_checkpoints.spark.job.split_discovery import SplitDiscovery


def discovery_of(discover: Callable[[], Any], bounded: bool = True) -> tuple[SplitDiscovery, queue.Queue[Any]]:
    source = split_source(schema="n LONG", discover=discover, bounded=bounded, sink=object(), name="days")(lambda split: split)
    found: queue.Queue[Any] = queue.Queue()
    session: Any = None
    return SplitDiscovery(Pipeline("days", [source]), session, {}, logging.getLogger("tests"), found.put), found


@pytest.mark.parametrize("given", ["2026-01-01", None, 7])
def test_what_is_no_collection_of_splits_is_refused(given: Any) -> None:
    """A text is one of letters: a read that filters by its split would find no rows, and the source would end without any."""
    discovery, found = discovery_of(lambda: given)
    discovery.begin(DiscoverSplits(1, "days"))
    failure = found.get(timeout=60).event.failure
    assert isinstance(failure.error, StageFailedError), failure
    assert f"expected discover to give splits, as a list for example, found {given!r}" in failure.message


@pytest.mark.parametrize("first", [[], ["2026-01-01"]])
def test_a_discovery_that_does_not_answer_is_warned_of(first: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_discovery, "SILENT_SECONDS", 0.2)
    go_on, warned, texts = threading.Event(), threading.Event(), list[str]()

    def discover() -> Iterator[str]:
        yield from first
        assert go_on.wait(60)
        yield "2026-01-02"

    discovery, found = discovery_of(discover, bounded=False)

    def warning(text: str, *values: object) -> None:
        texts.append(text % values)
        warned.set()

    monkeypatch.setattr(logging.getLogger("tests"), "warning", warning)
    discovery.begin(DiscoverSplits(1, "days"))
    assert warned.wait(60 if not first else 1.0) == (not first)
    go_on.set()
    while not found.get(timeout=60).event.last:
        pass
    assert [text.partition(":")[0] for text in texts] == ([] if first else ["Source 'days' has given no splits yet"])
