"""Barriers that overtake what a slow stage has not read: what a checkpoint holds, and an exact restore from it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, TaskId, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, InstanceFinished, JobStarted
from dagster_checkpoints.state.metadata import CheckpointMetadata, Segment
from dagster_checkpoints.state.metadata_file import decode

ROWS = "k string, ts timestamp, v long"
PER_FILE = 40


def taken(permit: Path) -> bool:
    """Whether this instance has taken the permit: several wait in threads of their own, those of a cancelled job, too."""
    try:
        permit.unlink()
    except FileNotFoundError:
        return False
    return True


class Held(Stage):
    """Reads both sources; each micro-batch waits for a permit, which is a file, or for the file `free`."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder

    def transform(self, context: Any, history: Any, live: Any) -> Any:
        return history.unionByName(live)

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        (self.folder / "waits").touch()
        while not (self.folder / "free").exists():
            permit = next(self.folder.glob("permit*"), None)
            if permit is not None and taken(permit):
                break
            time.sleep(0.02)
        return batch


class CountsBatches(Held):
    """Remembers the rows of each micro-batch that it has processed."""

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        super().process_batch(batch, batch_id)
        (self.folder / f"batch{batch_id}").write_text(str(batch.count()))
        return batch

    @property
    def batches(self) -> list[int]:
        return [int(file.read_text()) for file in self.folder.glob("batch*")]


def in_hours(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def in_flight_rows(metadata: CheckpointMetadata) -> dict[str, int]:
    """By chain, the rows in flight."""
    found = {}
    for chain in metadata.chains:
        channels = [channel for task in chain.tasks.values() for channel in task.channels]
        found[chain.name] = sum(e.rows for channel in channels for e in channel.in_flight if isinstance(e, Segment))
    return found


@pytest.mark.parametrize(
    ("timeout", "max_rows"), [(None, PER_FILE), (0.3, None)], ids=["at once, limited micro-batches", "after a timeout"]
)
def test_a_checkpoint_overtakes_what_a_slow_stage_has_not_read(lab: Any, timeout: float | None, max_rows: int | None) -> None:
    permits = lab.input("permits")
    written = {"history": 0, "live": 0}

    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("hours"))
    def hours(slow):
        return in_hours(slow)

    slow = Held(permits, name="slow", sink=lab.sink("rows"), max_rows_per_trigger=max_rows)
    pipeline = Pipeline("unaligned", [history, live, slow, hours], chaining=False)

    def more(source: str, files: int) -> None:
        for _ in range(files):
            first = written[source]
            written[source] += PER_FILE
            lab.put(source, ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(first, first + PER_FILE)])

    def start() -> Any:
        settings = {"unaligned": True, "aligned_checkpoint_timeout": timeout}
        return lab.start(pipeline, interval=1000.0, checkpoints=settings)

    def metadata_of(done: CheckpointDone) -> CheckpointMetadata:
        return decode(lab.storage("unaligned").read_metadata(done.location), done.location)

    more("history", 1)
    more("live", 1)
    job = start()
    job.wait_until(lambda: (permits / "waits").exists())
    first_batch = sum(written.values())
    job.wait_until(lambda: sum(job.execution.rows().get(name, 0) for name in written) == first_batch)
    (permits / "permit").touch()  # the first batch may have begun before the second source's first rows
    job.wait_until(lambda: job.execution.rows().get("slow", 0) > 0)
    more("live", 10)
    job.wait_until(lambda: all(job.execution.rows().get(name) == rows for name, rows in written.items()))
    answered = job.ask("checkpoint")
    [task] = [task for id, task in job.execution.deployment.tasks.items() if id.vertex == "slow"]
    job.wait_until(lambda: task.machine.gate.holding is not None)  # the barrier has overtaken
    before = job.execution.rows()["slow"]
    (permits / "permit").touch()
    done = job.wait_for(CheckpointDone)
    assert answered.result(10).status == "done"
    assert job.execution.rows()["slow"] <= before + (max_rows or 12 * PER_FILE)
    in_flight = in_flight_rows(metadata_of(done))
    processed = done.stages["slow"].rows
    assert in_flight["slow"] == sum(written.values()) - processed > 0, (in_flight, written, processed)
    job.cancel()
    job.result()

    again = start()
    assert again.wait_for(JobStarted).restored_checkpoint == done.checkpoint_id
    (permits / "free").touch()
    more("live", 2)
    again.wait_until(lambda: again.execution.rows().get("live") == written["live"])
    again.drain()
    again.finished()
    table = lab.table("history", ROWS).unionByName(lab.table("live", ROWS))
    lab.check(table, "rows")
    lab.check(in_hours(table), "hours")


def test_behind_a_queue_of_a_hundred_micro_batches_a_checkpoint_waits_for_two_at_most(lab: Any) -> None:
    permits, queued, per_file = lab.input("permits"), 100, 2
    slow = CountsBatches(permits, name="slow", sink=lab.sink("rows"), max_rows_per_trigger=per_file)

    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    pipeline = Pipeline("queued", [live, slow])
    for first in range(0, per_file * queued, per_file):
        lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(first, first + per_file)])
    job = lab.start(pipeline, interval=1000.0, checkpoints={"unaligned": True})
    job.wait_until(lambda: job.execution.rows().get("live") == per_file * queued)
    assert slow.batches == []
    answered = job.ask("checkpoint")
    for allowed in (1, 2):
        (permits / "permit").touch()
        job.wait_until(lambda allowed=allowed: len(slow.batches) == allowed or answered.done())
    done = job.wait_for(CheckpointDone)
    assert answered.result(10).status == "done"
    assert len(slow.batches) <= 2 and set(slow.batches) == {per_file}
    metadata = decode(lab.storage("queued").read_metadata(done.location), done.location)
    assert in_flight_rows(metadata)["slow"] == per_file * queued - done.stages["slow"].rows
    job.cancel()
    job.result()


class HeldHours(Held):
    """Counts by window and key; each micro-batch waits for a permit."""

    def transform(self, context: Any, live: Any) -> Any:
        return in_hours(live)


def test_rows_in_flight_go_to_the_instances_that_own_their_keys_now(lab: Any) -> None:
    """From two instances to three, and to one: each time from an unaligned checkpoint with rows on several channels."""
    permits, written = lab.input("permits"), 0
    done = None
    for number, (feeds, instances) in enumerate((("ab", "pq"), ("ba", "pqr"), ("ab", "p"))):
        for _ in range(3):
            for feed in "ab":
                minutes = range(written // 2, written // 2 + PER_FILE)
                lab.put(feed, ROWS, [("cdefghij"[m % 8], lab.at(60 * m), m) for m in minutes])
            written += 2 * PER_FILE

        @unbounded_source(watermark=("ts", "1 minute"), instances=list(feeds))
        def live(context):
            return lab.stream(context.instance, ROWS)

        reads = {"live": StageInput(key="k")}
        slow = HeldHours(
            permits,
            name="slow",
            inputs=reads,
            instances=list(instances),
            sink=lab.sink("hours"),
            max_rows_per_trigger=PER_FILE,
        )
        job = lab.start(Pipeline("divided", [live, slow]), interval=1000.0, checkpoints={"unaligned": True})
        started = job.wait_for(JobStarted)
        assert started.restored_checkpoint == (None if done is None else done.checkpoint_id)
        job.wait_until(lambda rows=written, job=job: job.execution.rows().get("live") == rows)
        if number == 2:
            break
        answered = job.ask("checkpoint")
        while not answered.done():  # a permit each for some micro-batches, until the snapshots are taken
            (permits / f"permit{time.monotonic_ns()}").touch()
            time.sleep(0.2)
        done = job.wait_for(CheckpointDone)
        metadata = decode(lab.storage("divided").read_metadata(done.location), done.location)
        channels = [c for chain in metadata.chains for task in chain.tasks.values() for c in task.channels if c.in_flight]
        assert in_flight_rows(metadata)["slow"] > 0 and len({c.channel.partition("->")[0] for c in channels}) == 2, channels
        job.cancel()
        job.result()
        for permit in permits.glob("permit*"):
            permit.unlink(missing_ok=True)
    (permits / "free").touch()
    job.drain()
    job.finished()
    lab.check(in_hours(lab.table("a", ROWS).unionByName(lab.table("b", ROWS))), "hours")


class OwnPermits(Held):
    """Counts by window and key; the micro-batches of each instance wait for permits of their own."""

    def open(self, context: Any) -> None:
        self.folder = self.folder / context.instance

    def transform(self, context: Any, history: Any) -> Any:
        return in_hours(history)


class OddOnesLast(Stage):
    """Emits even numbers at once and odd ones at the end, from a list that it does not clear then."""

    def open(self, context: Any) -> None:
        self.spark = context.spark
        self.odd = context.state.list("odd")

    def transform(self, context: Any, live: Any) -> Any:
        return live.select("v")

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        self.odd.update([*self.odd, *(row.v for row in batch.where("v % 2 = 1").collect())])
        return batch.where("v % 2 = 0")

    def finish(self) -> Any:
        return self.spark.createDataFrame([(v,) for v in self.odd], "v long")


def checkpoint_of(lab: Any, job: Any, permits: Path, held: str) -> CheckpointMetadata:
    """Take a checkpoint, with a permit each for some micro-batches of these instances, until the snapshots are taken."""
    answered = job.ask("checkpoint")
    while not answered.done():
        for instance in held:
            (permits / instance / f"permit{time.monotonic_ns()}").touch()
        time.sleep(0.2)
    assert answered.result(10).status == "done", job.story()
    for permit in permits.glob("*/permit*"):
        permit.unlink(missing_ok=True)
    location = job.of(CheckpointDone)[-1].location
    return decode(lab.storage("partly").read_metadata(location), location)


def test_the_rest_of_two_partly_finished_stages_goes_on_in_other_instances(lab: Any) -> None:
    """Twice: with fewer instances, and with more. One stage has state by key and rows in flight, and its producer has ended; the
    other one has list state, and one of the two producers that its instances read runs on."""
    permits, files = lab.input("permits"), 6
    for name in "pqrs":
        (permits / name).mkdir()
    lab.put("a", ROWS, [("a", lab.at(m), m) for m in range(20)])
    for number, (slow, odd) in enumerate((("pqr", 4), ("pq", 3), ("pqrs", 6))):
        lab.put("b", ROWS, [("b", lab.at(m), m) for m in range(1000 * (number + 1), 1000 * (number + 1) + 30)])

        @unbounded_source(watermark=("ts", "1 minute"))
        def history(context):
            return lab.stream("history", ROWS)

        by_key = {"history": StageInput(key="k")}
        hours = OwnPermits(
            permits, name="hours", inputs=by_key, instances=list(slow), sink=lab.sink("hours"), max_rows_per_trigger=2
        )

        @unbounded_source(watermark=("ts", "1 minute"), instances=["a", "b"])
        def live(context):
            return lab.stream(context.instance, ROWS)

        pointwise = {"live": StageInput(edge="pointwise")}
        last = OddOnesLast(name="odd", inputs=pointwise, instances=[str(n) for n in range(odd)], sink=lab.sink("odd"))
        job = lab.start(Pipeline("partly", [history, hours, live, last]), interval=1000.0, checkpoints={"unaligned": True})
        job.wait_for(JobStarted)
        job.wait_until(lambda rows=20 + 30 * (number + 1), job=job: job.execution.rows().get("live") == rows)
        if number == 2:
            break
        (permits / "p" / "free").touch()
        if number == 0:
            job.execution.end_source("live", "a")
            while len([event for event in job.of(InstanceFinished) if event.stage == "odd"]) < 2:
                checkpoint_of(lab, job, permits, slow[1:])
            for first in range(0, files * PER_FILE, PER_FILE):
                lab.put("history", ROWS, [("cdefghij"[m % 8], lab.at(60 * m), m) for m in range(first, first + PER_FILE)])
            job.wait_until(lambda job=job: job.execution.rows().get("history") == files * PER_FILE)
            job.execution.end_source("history")
        tasks = job.execution.deployment.tasks
        over = [TaskId("hours", 0), *([TaskId("odd", 0), TaskId("odd", 1)] if number else ())]
        job.wait_until(lambda tasks=tasks, over=over: all(tasks[task].machine.operators_finished for task in over))
        metadata = checkpoint_of(lab, job, permits, slow[1:])
        ends = {chain.name: {i: task.end_of_data for i, task in chain.tasks.items()} for chain in metadata.chains}
        assert ends["hours"][0] == "drain" and "none" in ends["hours"].values() and in_flight_rows(metadata)["hours"] > 0
        assert ends["odd"] == ({0: "drain", 1: "drain", 2: "none"} if number else {2: "none", 3: "none"})
        job.cancel()
        job.result()
        (permits / "p" / "free").unlink()
    for name in "pqrs":
        (permits / name / "free").touch()
    job.drain()
    job.finished()
    lab.check(in_hours(lab.table("history", ROWS)), "hours")
    lab.check(lab.table("a", ROWS).unionByName(lab.table("b", ROWS)).select("v"), "odd")
