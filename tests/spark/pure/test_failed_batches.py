"""No snapshot is taken between a batch that failed and the end of its query; without Spark."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.spark.query.query import BatchFailed, TaskQuery


def test_a_snapshot_that_waits_for_a_batch_that_fails_is_not_taken(tmp_path: Path) -> None:
    """The batch may have written to the sink before it failed, and it comes again after the restart."""
    in_batch, fail = threading.Event(), threading.Event()

    def on_batch(frame: Any, batch_id: int) -> None:
        in_batch.set()
        assert fail.wait(60)
        raise OSError("after the sink has the rows")

    query = TaskQuery(tmp_path / "query", "pool", on_batch, lambda closing: None)
    raised: list[BaseException] = []

    def run(work: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def snapshot() -> None:
        with query.between_batches():
            raised.append(AssertionError("a snapshot holds the rows of the failed batch"))

    frame: Any = None
    batch = run(lambda: query._run_batch(frame, 0))
    assert in_batch.wait(60)
    waiting = run(snapshot)
    fail.set()
    for thread in (batch, waiting):
        thread.join(60)
    assert [type(error) for error in raised] == [BatchFailed, BatchFailed]
    with pytest.raises(BatchFailed), query.between_batches():
        pass
    assert isinstance(query.error, OSError)
