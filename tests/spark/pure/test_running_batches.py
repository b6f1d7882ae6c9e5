"""What a snapshot sees of a micro-batch that runs: nothing while it is evaluated, all of it once it emits; without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.spark.query.query import BatchFailed, QueryClosing, TaskQuery

SECONDS = 60


class Step:
    """A place at which a batch waits until the test lets it go on, or fail."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(SECONDS)
        if self.error is not None:
            raise self.error

    def leave(self, error: Exception | None = None) -> None:
        self.error = error
        self.go_on.set()


class Running:
    """A query in whose first batch each step can be held; commits as Spark does, when the batch has returned."""

    def __init__(self, folder: Path) -> None:
        self.evaluating, self.emitting = Step(), Step()
        self.effects: list[str] = []
        self.query = TaskQuery(folder / "query", "pool", self._evaluate, lambda closing: None, self._begin)
        for log in ("offsets", "commits"):
            (folder / "query" / log).mkdir(parents=True)
        self.raised: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def _begin(self, batch_id: int) -> None:
        self.effects.append("begun")

    def _evaluate(self, frame: Any, batch_id: int) -> Callable[[], None]:
        self.evaluating()

        def emit() -> None:
            self.emitting()
            self.effects.append("emitted")

        return emit

    def run_batch(self) -> None:
        def run() -> None:
            frame: Any = None
            self.query._run_batch(frame, 0)
            (self.query.checkpoint / "commits" / "0").write_text("v1\n{}")

        self.in_background(run)

    def in_background(self, work: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self.raised.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        self._threads.append(thread)
        return thread

    def snapshot(self, *, pauses: bool = False) -> None:
        with self.query.between_batches() as batch_id:
            self.effects.append(f"snapshot at {batch_id}")
            if pauses:
                self.query.pause()

    def ended(self) -> list[type[BaseException]]:
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        return [type(error) for error in self.raised]


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


def test_a_snapshot_waits_for_no_evaluation(running: Running) -> None:
    running.run_batch()
    assert running.evaluating.reached.wait(SECONDS)
    running.snapshot()
    running.emitting.leave()
    running.evaluating.leave()
    assert running.ended() == []
    running.snapshot()
    assert running.effects == ["begun", "snapshot at -1", "emitted", "snapshot at 0"]


def test_a_snapshot_waits_for_a_batch_that_emits(running: Running) -> None:
    running.evaluating.leave()
    running.run_batch()
    assert running.emitting.reached.wait(SECONDS)
    running.query._query = active_query()
    running.in_background(running.snapshot)
    running.emitting.leave()
    assert running.ended() == []
    assert running.effects == ["begun", "emitted", "snapshot at 0"]


def test_a_sinks_commit_waits_for_a_batch_that_emits(running: Running) -> None:
    def commit() -> None:
        with running.query.no_batch_emits():
            running.effects.append("committed")

    running.run_batch()
    assert running.evaluating.reached.wait(SECONDS)
    commit()
    running.evaluating.leave()
    assert running.emitting.reached.wait(SECONDS)
    running.in_background(commit)
    running.emitting.leave()
    assert running.ended() == []
    assert running.effects == ["begun", "committed", "emitted", "committed"]


@pytest.mark.parametrize("then", ["stop", "kill"])
def test_no_batch_begins_when_the_source_is_to_end(running: Running, then: str) -> None:
    running.query.admit_no_batch()
    running.run_batch()
    with running.query.lock_if_free() as free:
        assert free
    getattr(running.query, then)()
    assert running.ended() == [QueryClosing]
    assert running.effects == []


@pytest.mark.parametrize("then", ["resume", "stop", "kill"])
def test_a_batch_that_is_evaluated_when_a_suspends_snapshot_is_taken_emits_nothing_behind_it(running: Running, then: str) -> None:
    """It waits; after a resume it goes on, and an end of the query leaves it uncommitted."""
    running.emitting.leave()
    running.run_batch()
    assert running.evaluating.reached.wait(SECONDS)
    running.snapshot(pauses=True)
    running.evaluating.leave()
    assert running.effects == ["begun", "snapshot at -1"]
    {"resume": running.query.resume, "stop": running.query.stop, "kill": running.query.kill}[then]()
    assert running.ended() == ([] if then == "resume" else [QueryClosing])
    assert running.effects[2:] == (["emitted"] if then == "resume" else [])
    assert running.query.error is None


def test_a_stop_lets_the_batch_that_is_evaluated_end_first(running: Running) -> None:
    running.emitting.leave()
    running.run_batch()
    assert running.evaluating.reached.wait(SECONDS)
    running.query._query = active_query()
    running.in_background(running.query.stop)
    running.evaluating.leave()
    assert running.ended() == []
    assert running.effects == ["begun", "emitted"]


def test_a_snapshot_that_waits_for_a_batch_that_fails_is_not_taken(running: Running) -> None:
    """The batch may have written to the sink before it failed, and it comes again after the restart."""
    running.evaluating.leave()
    running.run_batch()
    assert running.emitting.reached.wait(SECONDS)
    running.in_background(running.snapshot)
    running.emitting.leave(OSError("after the sink has the rows"))
    assert running.ended() == [BatchFailed, BatchFailed]
    with pytest.raises(BatchFailed):
        running.snapshot()
    assert isinstance(running.query.error, OSError)


def test_a_batch_whose_evaluation_fails_has_emitted_nothing_before_the_snapshot(running: Running) -> None:
    running.run_batch()
    assert running.evaluating.reached.wait(SECONDS)
    running.snapshot()
    running.evaluating.leave(OSError("a file is gone"))
    assert running.ended() == [BatchFailed]
    with pytest.raises(BatchFailed):
        running.snapshot()
    assert running.effects == ["begun", "snapshot at -1"]


def active_query() -> Any:
    """Spark's query, which runs."""

    class Active:
        isActive = True

        def stop(self) -> None:
            pass

    return Active()
