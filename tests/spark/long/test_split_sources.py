"""Split sources on Spark: each split is read once, by one instance, also after a failure and with an instance that has ended."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.execution.job_actions import DiscoverSplits
from dagster_checkpoints.pipeline import Pipeline, SplitSource, split_source, stage
from dagster_checkpoints.spark.errors import JobFailedError, StageFailedError, StageResultError
from dagster_checkpoints.spark.job.events import CheckpointDone, JobRestarting
from dagster_checkpoints.spark.job.split_discovery import SplitDiscovery
from dagster_checkpoints.spark.stored_state import read_state

FLIGHTS = "k string, ts timestamp, v long"
DAYS = [f"day{number}" for number in range(9)]


def put_split(lab: Any, name: str, number: int) -> None:
    lab.put(name, FLIGHTS, [("ab"[second % 2], lab.at(number * 600 + second), second) for second in range(0, 600, 25)])


def hourly(frame: Any) -> Any:
    windows = frame.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return windows.select(F.col("window.start").alias("start"), "k", "v", "n")


class Part(msgspec.Struct, frozen=True):
    name: str
    number: int


class Live(SplitSource):
    """Tables that are added while the pipeline runs."""

    schema = FLIGHTS
    split_type = Part
    bounded = False
    discovery_interval = 0.2
    watermark = ("ts", "1 hour")

    def __init__(self, lab: Any, parts: list[Part], **options: Any) -> None:
        super().__init__(**options)
        self.lab, self.parts = lab, parts

    def discover(self, context: Any) -> Iterable[Part]:
        assert context.stage == "live"
        return list(self.parts)

    def read(self, context: Any, split: Part) -> Any:
        return self.lab.table(split.name, FLIGHTS)


def test_splits_are_read_once_through_a_failure_with_an_instance_that_has_finished(lab: Any, tmp_path: Path) -> None:
    for number, day in enumerate(DAYS):
        put_split(lab, day, number)
    more, broken, reads = threading.Event(), threading.Event(), Counter()

    def discover() -> Iterator[str]:
        yield from DAYS[:3]
        assert more.wait(120)
        yield from DAYS

    @split_source(schema=FLIGHTS, discover=discover, watermark=("ts", "1 hour"), instances=["x", "y"], sink=lab.sink("days"))
    def days(context, split):
        reads[split] += 1
        if split == DAYS[6] and not broken.is_set():
            broken.set()
            raise RuntimeError("an engine without a plane")
        return lab.table(split, FLIGHTS)

    parts = [Part(f"live{number}", number) for number in range(5)]
    for part in parts:
        put_split(lab, part.name, part.number)
    there = parts[:2]

    @stage(sink=lab.sink("windows"))
    def windows(days, live):
        return hourly(days.unionByName(live))

    live = Live(lab, there, sink=lab.sink("live"))
    job = lab.start(Pipeline("splits", [days, live, windows]), restart=FixedDelayRestart(3, 0.1))
    job.wait_until(lambda: lab.count("days") == 3 * 24)
    job.execution.end_source("days", "y")
    job.wait_for(CheckpointDone, lambda done: done.stages["days"].finished_instances == 1)
    more.set()
    job.wait_for(JobRestarting, lambda restarting: "an engine without a plane" in restarting.cause)
    there += parts[2:]
    job.wait_until(lambda: lab.count("days") == 9 * 24 and lab.count("live") == 5 * 24)
    kept = job.done("savepoint", target=str(tmp_path / "kept")).location
    job.drain()
    job.finished()
    splits = read_state(lab.spark, kept, stage="days").splits
    assert splits is not None and (splits.discovered, splits.assigned, splits.complete) == ((), (), True)
    assert sorted(splits.finished) == DAYS

    def table(names: Iterable[str]) -> Any:
        return functools.reduce(DataFrame.unionByName, [lab.table(name, FLIGHTS) for name in names])

    of_days, of_live = table(DAYS), table([part.name for part in parts])
    lab.check(of_days, "days")
    lab.check(of_live, "live")
    lab.check(hourly(of_days.unionByName(of_live)), "windows")
    assert [reads[day] for day in DAYS[:3]] == [1, 1, 1], "finished splits are not read again"
    assert reads[DAYS[6]] == 2


def failing(lab: Any, error: type[Exception], words: str, **options: Any) -> None:
    read = options.pop("read", lambda split: lab.table("none", FLIGHTS))
    source = split_source(**{"schema": FLIGHTS, "discover": ["none"], "sink": lab.sink("none"), "name": "days", **options})(read)
    job = lab.start(Pipeline("failing", [source]))
    found = job.result().error
    with pytest.raises(error, match=words):
        raise found.__cause__ if isinstance(found, JobFailedError) else found


def test_what_a_split_source_does_wrong_names_the_source(lab: Any) -> None:
    lab.put("none", "k string", [("a",)])

    def discover() -> Iterator[str]:
        raise RuntimeError("no such airport")
        yield

    failing(
        lab,
        StageFailedError,
        r"(?s)'days'.*the discovery of its splits failed at .*, in discover: .*\nRuntimeError: no such airport",
        discover=discover,
    )
    read = lambda split: lab.table("none", "k string")  # noqa: E731
    failing(
        lab,
        StageResultError,
        "to return the columns of schema, struct<k:string,ts:timestamp,v:bigint>, found struct<k:string>",
        read=read,
    )


def test_a_list_of_splits_becomes_known_as_a_whole_and_an_iterator_bit_by_bit(spark: Any) -> None:
    def reports(discover: Any) -> list[Any]:
        source = split_source(schema=FLIGHTS, discover=discover, sink=object(), name="days")(lambda split: split)
        found: queue.Queue[Any] = queue.Queue()
        discovery = SplitDiscovery(Pipeline("known", [source]), spark, {}, logging.getLogger("tests"), found.put)
        discovery.begin(DiscoverSplits(1, "days"))
        events = [found.get(timeout=60).event]
        while not events[-1].last:
            events.append(found.get(timeout=60).event)
        return [event.splits for event in events]

    names = tuple(f"{number}" for number in range(2_000))
    assert reports(lambda: list(names)) == reports(names) == [names]
    assert [len(splits) for splits in reports(lambda: iter(names))] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 977]
