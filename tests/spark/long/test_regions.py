"""A pipeline of two parts that no edge connects: one fails and restarts, the other goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, split_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import AttemptBuilding, CheckpointNotDone, JobRestarting, JobStarted
from dagster_checkpoints.spark.tasks.task import Task
from dagster_checkpoints.state.key_groups import default_max_parallelism
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.metadata_file import decode

ROWS = "k string, ts timestamp, v long"
FAILING, GOING_ON = ("live", "checked", "hours"), ("weather", "storms")


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


class Checked(Stage):
    """Raises at the next batch after a file appears, and removes the file."""

    def __init__(self, fault: Path, **options: Any) -> None:
        super().__init__(inputs={"live": StageInput()}, **options)
        self.fault = fault

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        if self.fault.exists():
            self.fault.unlink()
            raise ValueError("a plane without wings")
        return batch


def pipeline_of(lab: Any, may_build: threading.Event) -> Pipeline:
    @unbounded_source(watermark=("ts", "10 minutes"))
    def live(context):
        assert may_build.wait(120)
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("hours"), inputs={"checked": StageInput(key="k")})
    def hours(checked):
        return in_hours(checked)

    @unbounded_source(watermark=("ts", "10 minutes"), sink=lab.sink("weather"))
    def weather(context):
        return lab.stream("weather", ROWS)

    @stage(sink=lab.sink("storms"))
    def storms(weather):
        return in_hours(weather)

    return Pipeline(
        "regional", [live, Checked(lab.folder / "fault", name="checked", sink=lab.sink("checked")), hours, weather, storms]
    )


class Regional:
    """The running pipeline and its input."""

    def __init__(self, lab: Any, **options: Any) -> None:
        self.lab = lab
        self.may_build = threading.Event()
        self.may_build.set()
        self.job = lab.start(pipeline_of(lab, self.may_build), interval=3600.0, restart=FixedDelayRestart(5, 2.0), **options)
        self._minutes = {"live": 0, "weather": 0}

    def more(self, name: str) -> None:
        begin = self._minutes[name]
        self._minutes[name] += 30
        self.lab.put(name, ROWS, [(k, self.lab.at(60 * m), m) for m in range(begin, begin + 30) for k in "ab"])

    def read(self) -> None:
        """Wait until all input has been read."""
        wanted = {"checked": 2 * self._minutes["live"], "weather": 2 * self._minutes["weather"]}
        self.job.wait_until(lambda: {name: self.job.execution.rows().get(name, 0) for name in wanted} == wanted)

    def checkpoint(self) -> int:
        before = len(self.job.checkpoints())
        self.job.wait_until(lambda: bool(self.job.execution.coordinator and self.job.execution.coordinator.roots))
        self.job.ask("checkpoint")
        self.job.wait_until(lambda: len(self.job.checkpoints()) > before)
        return self.job.checkpoints()[-1].checkpoint_id

    def metadata(self) -> CheckpointMetadata:
        """The metadata of the newest checkpoint."""
        location = self.job.checkpoints()[-1].location
        return decode((self.lab.folder / "store/regional" / location / "_metadata").read_bytes(), location)

    def tasks(self) -> dict[str, tuple[Task, str, int]]:
        """By chain: its task, its query's run, and in how many runs of the query it was."""
        tasks = self.job.execution.deployment.tasks.values()
        return {task.id.vertex: (task, str(getattr(task.query._query, "runId", None)), task.query.runs) for task in tasks}


def test_one_region_restarts_and_the_queries_of_the_other_go_on(lab: Any) -> None:
    regional = Regional(lab)
    job = regional.job
    for name in ("live", "weather"):
        regional.more(name)
    regional.read()
    first = regional.checkpoint()
    job.wait_until(lambda: lab.count("weather") == 60)
    before = regional.tasks()
    assert set(before) == {"live", "hours", "weather", "storms"}, "checked runs in the query of live"

    regional.more("weather")
    regional.read()
    regional.may_build.clear()
    (lab.folder / "fault").touch()
    regional.more("live")
    restarting = job.wait_for(JobRestarting)
    assert (restarting.attempt, restarting.stages) == (2, FAILING)
    assert "a plane without wings" in restarting.cause
    read = job.execution.rows()["weather"]
    regional.more("weather")
    job.wait_until(lambda: job.execution.rows()["weather"] == read + 60)
    assert len(job.of(JobStarted)) == 1, "while the region still waits for its restart"
    assert job.of(AttemptBuilding)[0].stages == (*FAILING, *GOING_ON)
    regional.may_build.set()

    again = job.wait_for(JobStarted, lambda started: started.attempt == 2)
    assert (again.restarted, again.restored_checkpoint) == (FAILING, first)
    assert job.of(AttemptBuilding)[-1].stages == FAILING
    regional.more("live")
    regional.read()
    after = regional.tasks()
    assert {chain for chain in after if after[chain] == before[chain]} == set(GOING_ON)
    assert {chain for chain in after if after[chain][0] is not before[chain][0]} == {"live", "hours"}
    second = regional.checkpoint()
    job.wait_until(lambda: lab.count("weather") == 180 and lab.count("checked") == 180)
    assert second > first and not job.of(CheckpointNotDone)
    (hours,) = (known for known in regional.metadata().stages if known.name == "hours")
    assert hours.max_parallelism == default_max_parallelism(1), "by which the rows of the checkpoint's state are routed"

    # Again, with a savepoint; then the region is in its third attempt, the other in its first.
    (lab.folder / "fault").touch()
    asked = job.ask("savepoint")
    regional.more("live")
    job.wait_for(JobRestarting, lambda event: event.attempt == 3)
    regional.more("weather")
    regional.read()
    assert asked.result(120).status in ("done", "failed")
    assert {chain for chain, task in regional.tasks().items() if task == before[chain]} == set(GOING_ON)
    job.drain()
    job.finished()
    lab.check(lab.table("live", ROWS), "checked")
    lab.check(in_hours(lab.table("live", ROWS)), "hours")
    lab.check(lab.table("weather", ROWS), "weather")
    lab.check(in_hours(lab.table("weather", ROWS)), "storms")


def test_the_splits_of_a_region_that_restarts_are_read_once(lab: Any) -> None:
    days = [f"day{number}" for number in range(8)]
    for number, day in enumerate(days):
        lab.put(day, ROWS, [(k, lab.at(1800 * number + 60 * m), m) for m in range(30) for k in "ab"])
    lab.put("weather", ROWS, [(k, lab.at(60 * m), m) for m in range(30) for k in "ab"])
    more, reads = threading.Event(), Counter[str]()

    def discover() -> Iterator[str]:
        yield from days[:3]  # discoveries report 1, 2, 4, ... splits at a time
        assert more.wait(120)
        yield from days

    @split_source(schema=ROWS, discover=discover, watermark=("ts", "10 minutes"), instances=["x", "y"], sink=lab.sink("live"))
    def live(context, split):
        reads[split] += 1
        if split == days[6] and reads[split] == 1:
            raise ValueError("a plane without wings")
        return lab.table(split, ROWS)

    @stage(sink=lab.sink("hours"))
    def hours(live):
        return in_hours(live)

    @unbounded_source(watermark=("ts", "10 minutes"), sink=lab.sink("weather"))
    def weather(context):
        return lab.stream("weather", ROWS)

    pipeline = Pipeline("regional", [live, hours, weather])
    job = lab.start(pipeline, interval=3600.0, restart=FixedDelayRestart(5, 0.2))
    job.wait_until(lambda: (job.execution.rows().get("live"), job.execution.rows().get("weather")) == (3 * 60, 60))
    job.ask("checkpoint")
    job.wait_until(lambda: lab.count("live") == 3 * 60)
    before = [task for id, task in job.execution.deployment.tasks.items() if id.vertex == "weather"]
    more.set()
    assert job.wait_for(JobRestarting).stages == ("live", "hours")
    lab.put("weather", ROWS, [("a", lab.at(3600), 1)])
    again = job.wait_for(JobStarted, lambda started: started.attempt == 2)
    assert (again.restarted, again.restored_checkpoint) == (("live", "hours"), job.checkpoints()[0].checkpoint_id)
    job.wait_until(lambda: (job.execution.rows().get("live"), job.execution.rows().get("weather")) == (8 * 60, 61))
    assert [task for id, task in job.execution.deployment.tasks.items() if id.vertex == "weather"] == before
    job.drain()
    job.finished()
    assert [reads[day] for day in days[:3]] == [1] * 3 and reads[days[6]] == 2, "finished splits are not read again"
    rows = lab.spark.read.schema(ROWS).parquet(*[str(lab.input(day)) for day in days])
    lab.check(rows, "live")
    lab.check(in_hours(rows), "hours")
    lab.check(lab.table("weather", ROWS), "weather")
