"""A source is never `caught up` while files wait, and always when none do: fused sources, and sources before channels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import FirstBatch

ROWS = "k string, ts timestamp, v long"
PER_FILE = 3
DEADLINE = 150.0


class Statuses:
    """Reads every status of a pipeline, and holds each micro-batch open until statuses were taken while it ran."""

    def __init__(self, lab: Any, pipeline: str) -> None:
        self.control = lab.control(pipeline)
        self.newest: PipelineStatus | None = None
        self.wrong: list[str] = []
        self.held = 0
        self.arrived: list[tuple[datetime, str, int]] = []
        """When rows have arrived, of which source, and how many."""
        self.in_first_batch: Callable[[], None] | None = None
        """Called while the first batch is held, which has rows of the live source."""
        self._read = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE)

    def _follow(self) -> None:
        while not self._over.wait(0.02):
            status = self.control.status()
            if status is None or (self.newest is not None and status.updated_at <= self.newest.updated_at):
                continue
            for each in status.stages:
                rows = sum(rows for at, name, rows in list(self.arrived) if name == each.name and at < status.updated_at)
                if any(instance.caught_up for instance in each.instances) and (each.rows or 0) < rows:
                    self.wrong.append(f"{each.name} caught up with {each.rows} of {rows} rows, {status.phase}")
            with self._read:
                self.newest = status
                self._read.notify_all()

    def hold(self, query: str, batch_id: int) -> None:
        """Wait until two statuses were taken after now."""
        if batch_id == 0 and query != "past_held" and self.in_first_batch is not None:
            self.in_first_batch()
        after = datetime.now(UTC)
        for _ in range(2):
            with self._read:
                assert self._read.wait_for(lambda before=after: self.newest and self.newest.updated_at > before, DEADLINE)
                after = self.newest.updated_at
        self.held += 1

    def all_caught_up(self) -> bool:
        stages = {each.name: each for each in self.newest.stages} if self.newest is not None else {}
        sources = [stages[name] for name in ("past", "live")] if stages else []
        return bool(sources) and all(each.end_of_data or each.caught_up for source in sources for each in source.instances)


class Held(Stage):
    """Passes its rows on, or counts them in windows, and holds every micro-batch."""

    def __init__(self, statuses: Statuses, names: Sequence[str], windows: bool, **options: Any) -> None:
        super().__init__(inputs={name: StageInput(fuse=windows or None) for name in names}, **options)
        self._statuses, self._names, self._windows = statuses, names, windows

    def transform(self, context: Any, **inputs: Any) -> Any:
        first, *others = (inputs[name] for name in self._names)
        for frame in others:
            first = first.unionByName(frame)
        return windows_of(first) if self._windows else first

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        self._statuses.hold(self.name, batch_id)
        return batch


def windows_of(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "10 minutes"), "k").agg(F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "n")


def pipeline_of(lab: Any, statuses: Statuses, *, fused: bool) -> Pipeline:
    @bounded_source(watermark=("ts", "1 minute"))
    def past(context):
        return lab.stream("past", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    if fused:
        return Pipeline("p", [past, live, Held(statuses, ("past", "live"), True, name="windows", sink=lab.sink())])

    @stage(sink=lab.sink(), inputs={"past_held": StageInput(fuse=False), "live_held": StageInput(fuse=False)})
    def windows(past_held, live_held):
        return windows_of(past_held.unionByName(live_held))

    return Pipeline(
        "p", [past, live, *(Held(statuses, (name,), False, name=f"{name}_held") for name in ("past", "live")), windows]
    )


def put(lab: Any, statuses: Statuses, name: str, files: int, first: int) -> None:
    for number in range(first, first + files):
        lab.put(name, ROWS, [(key, lab.at(300 * number), number) for key in "abc"])
        statuses.arrived.append((datetime.now(UTC), name, PER_FILE))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "channels"])
def test_a_source_is_caught_up_only_if_no_file_waits(lab: Any, fused: bool) -> None:
    statuses = Statuses(lab, "p")
    try:
        put(lab, statuses, "past", 3, 0)
        put(lab, statuses, "live", 2, 0)
        statuses.in_first_batch = lambda: put(lab, statuses, "live", 2, 2)
        pipeline = pipeline_of(lab, statuses, fused=fused)
        job = lab.start(pipeline, status_seconds=0.05)
        job.wait_until(statuses.all_caught_up)
        assert set(job.chains) == set(
            (("past", "live", "windows"),) if fused else (("past", "past_held"), ("live", "live_held"), ("windows",))
        )
        assert job.execution.rows()["live"] == 4 * PER_FILE
        first = {event.stages: (event.rows, event.rows_read) for event in reversed(job.of(FirstBatch))}
        if fused:
            assert first == {("past", "live", "windows"): (0, 2 * PER_FILE)}, "rows were read, and no window is closed"
        else:
            assert first[("live", "live_held")] == (PER_FILE, PER_FILE) and first[("windows",)][1] is None
        job.done("stop")
        assert job.finished().ended_by == "suspend"

        put(lab, statuses, "live", 3, 4)
        before = statuses.held
        resumed = lab.start(pipeline, status_seconds=0.05)
        resumed.wait_until(lambda: statuses.held > before and statuses.newest.epoch == 2)
        resumed.wait_until(statuses.all_caught_up)
        assert resumed.execution.rows()["live"] == 7 * PER_FILE
        resumed.drain()
        assert resumed.finished().ended_by == "drain"
    finally:
        statuses.close()
    assert statuses.wrong == []
    lab.check(windows_of(lab.table("past", ROWS).unionByName(lab.table("live", ROWS))))
