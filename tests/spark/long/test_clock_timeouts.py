"""Timeouts of processing time, for which Spark runs batch after batch: a run ends, and they fire without new rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source

ROWS = "k string, v long"


def counted_after(frame: Any, milliseconds: int) -> Any:
    """The number of rows of each key, when it has had none for so long."""
    import pandas as pd

    def update(key: Any, batches: Any, state: Any) -> Iterator[pd.DataFrame]:
        (count,) = state.get if state.exists else (0,)
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"k": [key[0]], "n": [count]})
            return
        state.update((count + sum(map(len, batches)),))
        state.setTimeoutDuration(milliseconds)

    grouped = frame.groupBy("k")
    return grouped.applyInPandasWithState(update, "k string, n long", "n long", "append", "ProcessingTimeTimeout")


def pipeline(lab: Any, layout: str, declared: Any, milliseconds: int) -> Pipeline:
    """One source and the stage in one query, two fused ones, or one in a query of its own."""

    def source(name: str) -> Any:
        return declared(name=name)(lambda context: lab.stream(name, ROWS))

    if layout == "fused":

        @stage(sink=lab.sink())
        def both(one: Any, other: Any) -> Any:
            return counted_after(one.unionByName(other), milliseconds)

        return Pipeline("p", [source("one"), source("other"), both])

    @stage(sink=lab.sink(), inputs={"one": StageInput(fuse=False)} if layout == "apart" else None)
    def counted(one: Any) -> Any:
        return counted_after(one, milliseconds)

    return Pipeline("p", [source("one"), counted], chaining=layout != "apart")


@pytest.fixture(params=["in one query", "fused", "apart"])
def layout(lab: Any, request: pytest.FixtureRequest) -> str:
    lab.put("one", ROWS, [("a", 0), ("b", 1), ("a", 2)])
    lab.put("other", ROWS, [("c", 3)])
    return str(request.param)


def test_a_bounded_pipeline_ends_before_a_timeout_is_due(lab: Any, layout: str) -> None:
    assert lab.start(pipeline(lab, layout, bounded_source, 10**9)).finished().ended_by == "end_of_data"
    assert lab.committed() == []


def test_a_burst_ends_and_the_next_run_emits_what_is_due_without_a_row(lab: Any, layout: str) -> None:
    p = pipeline(lab, layout, unbounded_source, 4000)
    assert lab.start(p, until="caught_up", interval=None).finished().ended_by == "suspend"
    rows = [("a", 2), ("b", 1), *([("c", 1)] if layout == "fused" else [])]
    job = lab.start(p)
    job.wait_until(lambda: lab.count() == len(rows))
    job.drain()
    job.finished()
    lab.check(rows)
