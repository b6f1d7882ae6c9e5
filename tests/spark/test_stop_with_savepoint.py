"""Suspend, resume and drain over every stateful operator: the emitted rows, at the right time, and once.

A suspend emits only rows that are due; after a resume and a drain, the rows are those of a batch computation over all input. The
savepoint commits the rows of a stage that has finished its data and waits for its final checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import JobStarted, SavepointDone, StageFinished
from dagster_checkpoints.state.metadata_file import decode

CLICKS = "k string, ts timestamp, v long"
BUYS = "who string, bought timestamp, price long"
LATENESS = "65 seconds"
SOON = 120  # seconds in which a click may lead to a purchase


class Union(Stage):
    """History and live together; records the end of its inputs, which only a drain reaches."""

    def __init__(self, on_finish: Callable[[], object], **options: Any) -> None:
        super().__init__(**options)
        self.on_finish = on_finish

    def transform(self, context: Any, history: Any, live: Any) -> Any:
        return history.unionByName(live)

    def finish(self) -> None:
        self.on_finish()


# The computations of the stages: over a stream, and over a table for the reference.


def in_windows(frame: Any, length: str) -> Any:
    found = frame.groupBy(F.window("ts", length), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return found.select(F.window_time("window").alias("ts"), "k", "v", "n")


def twice_in_windows(frame: Any) -> Any:
    return in_windows(in_windows(frame, "1 minute").select("ts", "k", "v"), "5 minutes")


def in_sessions(frame: Any) -> Any:
    found = frame.groupBy(F.session_window("ts", "90 seconds").alias("session"), "k").agg(F.count("*").alias("n"))
    return found.select(F.col("session.start").alias("start"), F.col("session.end").alias("end"), "k", "n")


def bought_soon(clicks: Any, buys: Any) -> Any:
    soon = F.expr(f"who = k AND bought >= ts AND bought <= ts + INTERVAL {SOON} SECONDS")
    return clicks.join(buys, soon, "left_outer")


def distinct_rows(frame: Any) -> Any:
    return frame.dropDuplicates(["k", "ts"])


def by_timers(frame: Any) -> Any:
    """Five-minute counts in user code: a timer at the end of each emits the count."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Buckets(StatefulProcessor):
        def init(self, handle):
            self.handle = handle
            self.counts = handle.getMapState("counts", "ends long", "n long")

        def handleInputRows(self, key, rows, timerValues):
            for batch in rows:
                for at in batch["ts"]:
                    ends = (int(at.timestamp() * 1000) // 300_000 + 1) * 300_000
                    if self.counts.containsKey((ends,)):
                        self.counts.updateValue((ends,), (self.counts.getValue((ends,))[0] + 1,))
                    else:
                        self.counts.updateValue((ends,), (1,))
                        self.handle.registerTimer(ends)
            yield pd.DataFrame({"k": pd.Series([], dtype=str), "ends": pd.Series([], dtype="int64"), "n": []}).astype(
                {"n": "int64"}
            )

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            ends = expiredTimerInfo.getExpiryTimeInMs()
            n = self.counts.getValue((ends,))[0]
            self.counts.removeKey((ends,))
            yield pd.DataFrame({"k": [key[0]], "ends": [ends], "n": [n]})

        def close(self):
            pass

    return frame.groupBy("k").transformWithStateInPandas(Buckets(), "k string, ends long, n long", "Append", "EventTime")


def counted_by_five_minutes(frame: Any) -> Any:
    ends = (F.floor(F.unix_timestamp("ts") / 300) + 1) * 300_000
    return frame.groupBy("k", ends.alias("ends")).agg(F.count("*").alias("n"))


def batch(lab: Any) -> dict[str, Any]:
    """The result of a batch computation over all input so far, by sink."""
    clicks = lab.table("history", CLICKS).unionByName(lab.table("live", CLICKS))
    return {
        "kept": clicks,
        "windows": in_windows(clicks, "5 minutes"),
        "twice": twice_in_windows(clicks),
        "outer": bought_soon(clicks, lab.table("buys", BUYS)),
        "sessions": in_sessions(clicks),
        "distinct": distinct_rows(clicks),
        "timers": counted_by_five_minutes(clicks),
    }


def due(frames: dict[str, Any], watermark: Any) -> dict[str, Any]:
    """The part of the result that must be emitted when event time has reached a point."""
    reached = F.lit(watermark)
    conditions = {
        "windows": F.col("ts") < reached,
        "twice": F.col("ts") < reached,
        "outer": F.col("who").isNotNull() | (F.col("ts") + F.expr(f"INTERVAL {SOON} SECONDS") < reached),
        "sessions": F.col("end") <= reached,
        "timers": F.col("ends") <= F.unix_millis(reached),
    }
    return {name: frame.where(conditions[name]) if name in conditions else frame for name, frame in frames.items()}


def planned_and_not_processed(work: Path) -> bool:
    """Whether a task's query has planned a batch that it has not committed."""
    planned, committed = (
        {int(file.name) for file in (work / "checkpoint" / log).glob("[0-9]*")} for log in ("offsets", "commits")
    )
    return bool(planned - committed)


def test_suspend_emits_only_due_windows_and_a_drain_after_the_resume_emits_the_rest(lab: Any) -> None:
    def clicks(begin: int) -> list[tuple[Any, ...]]:
        rows = [(k, lab.at(begin + s), s) for s in range(0, 120, 20) for k in "ab"]
        return [*rows, *rows[-2:]]  # some rows come twice

    def buys_at(begin: int) -> list[tuple[Any, ...]]:
        return [("a", lab.at(begin + 50), begin), ("c", lab.at(begin + 120), begin)]

    @bounded_source(watermark=("ts", LATENESS))
    def history(context):
        return lab.stream("history", CLICKS)

    @unbounded_source(watermark=("ts", LATENESS))
    def live(context):
        return lab.stream("live", CLICKS)

    @unbounded_source(watermark=("bought", LATENESS))
    def buys(context):
        return lab.stream("buys", BUYS)

    @stage(sink=lab.sink("windows"))
    def windows(kept):
        return in_windows(kept, "5 minutes")

    @stage(sink=lab.sink("twice"))
    def twice(kept):
        return twice_in_windows(kept)

    @stage(sink=lab.sink("outer"))
    def outer(kept, buys):
        return bought_soon(kept, buys)

    @stage(sink=lab.sink("sessions"))
    def sessions(kept):
        return in_sessions(kept)

    @stage(sink=lab.sink("distinct"))
    def distinct(kept):
        return kept.dropDuplicatesWithinWatermark(["k", "ts"])

    @stage(sink=lab.sink("timers"))
    def timers(kept):
        return by_timers(kept)

    too_late = clicks(1440)
    kept = Union(lambda: lab.put("live", CLICKS, too_late), name="kept", sink=lab.sink("kept"))
    stages = [history, live, buys, kept, windows, twice, outer, sessions, distinct, timers]
    pipeline = Pipeline("zoo", stages, chaining=False)
    for begin in (0, 240):
        lab.put("history", CLICKS, clicks(begin))
    for begin in (480, 720):
        lab.put("live", CLICKS, clicks(begin))
    for begin in (0, 240, 480, 720):
        lab.put("buys", BUYS, buys_at(begin))
    event_time = lab.at(720 + 100 - 65)  # live's: the history has ended, and the purchases are ahead
    everything = {name: lab.rows(frame) for name, frame in batch(lab).items()}
    expected = {name: lab.rows(frame) for name, frame in due(batch(lab), event_time).items()}
    for name in ("windows", "twice", "outer", "sessions", "timers"):
        assert 0 < len(expected[name]) < len(everything[name]), f"{name} does not distinguish due rows from others"

    store = lab.troubled_store()
    job = lab.start(pipeline, interval=2.0, storage=lab.storage("zoo", store))
    job.wait_until(lambda: all(job.execution.rows().get(name) == len(rows) for name, rows in expected.items()))
    with store.holding("/_metadata"):
        # All tasks have acknowledged, so nothing may be processed any more; a file that arrives now is for the resumed job.
        asked = job.ask("stop", name="night")
        job.wait_until(lambda: any((lab.folder / "store/zoo/savepoints").glob("*/state/*")) and store.held > 0)
        lab.put("live", CLICKS, [*clicks(960), ("a", lab.at(820), 100), ("b", lab.at(820), 100)])  # two clicks from before
        [work] = (lab.folder / "work/zoo").glob("*-epoch-1-attempt-1/tasks/live.0")
        job.wait_until(lambda: planned_and_not_processed(work))
    result = job.finished()
    answer = asked.result(0)

    assert (result.ended_by, answer.status) == ("suspend", "done"), answer
    for name, rows in expected.items():
        lab.check(rows, name)
    [savepoint] = job.of(SavepointDone)
    assert (savepoint.stops, savepoint.location, result.savepoint) == ("suspend", answer.location, answer.url)
    assert savepoint.checkpoint.checkpoint_id == answer.checkpoint_id == result.last_checkpoint_id
    assert job.checkpoints()[-1].checkpoint_id < answer.checkpoint_id
    saved = lab.storage("zoo").open_savepoint(answer.location)
    metadata = decode(saved.read_metadata(), saved.url)
    assert {name for chain in metadata.chains if chain.tasks for name in chain.stages} == {s.name for s in stages} - {"history"}
    state = json.loads((lab.folder / "store/zoo/state.json").read_text())
    assert (state["job"]["status"], state["job"]["ended_by"]) == ("FINISHED", "suspend")
    assert state["job"]["savepoint"] == state["newest"]["location"] == answer.location
    assert state["lease"] is None and f"savepoint-{answer.checkpoint_id}-night-" in answer.location
    assert not [file for name in expected for file in (lab.folder / name / ".staging").rglob("*.parquet")]

    # During the suspension: more clicks, and a purchase that belongs to earlier clicks.
    lab.put("live", CLICKS, clicks(1200))
    lab.put("buys", BUYS, [("b", lab.at(905), 905), *buys_at(960)])
    lab.put("buys", BUYS, buys_at(1200))
    final = {name: lab.rows(frame) for name, frame in batch(lab).items()}
    lab.put("history", CLICKS, clicks(0))  # it had ended: no source reads this any more

    resumed = lab.start(pipeline, interval=2.0)
    started = resumed.wait_for(JobStarted)
    assert (started.restored_checkpoint, started.restored_location) == (answer.checkpoint_id, answer.location)
    assert (started.job_id, started.finished_stages) == (1, ("history",))
    resumed.wait_until(lambda: resumed.execution.rows().get("kept") == len(final["kept"]))
    drained = resumed.done("stop", drain=True)
    assert resumed.finished().ended_by == "drain"
    arrived = lab.rows(lab.table("live", CLICKS))
    assert sum(row in arrived for row in too_late) == len(too_late), "nothing arrived during the drain"
    for name, rows in final.items():
        lab.check(rows, name)
    assert [done.stops for done in resumed.of(SavepointDone)] == ["drain"]
    state = json.loads((lab.folder / "store/zoo/state.json").read_text())
    assert (state["job"]["status"], state["job"]["ended_by"]) == ("FINISHED", "drain")
    assert state["job"]["savepoint"] == drained.location
    kept_files = {
        path.parent.relative_to(lab.folder / "store/zoo").as_posix() for path in lab.folder.rglob("store/zoo/**/_metadata")
    }
    assert kept_files == {answer.location, drained.location}, "savepoints stay, checkpoints are deleted at the job's end"


def test_a_stage_that_waits_for_its_final_checkpoint_is_committed_by_the_savepoint_and_not_run_again(lab: Any) -> None:
    asked_for: list[str] = []

    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        asked_for.append("history")
        return lab.stream("history", CLICKS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        asked_for.append("live")
        return lab.stream("live", CLICKS)

    @stage(sink=lab.sink("past"))
    def past(history):
        return in_windows(history, "5 minutes")

    @stage(sink=lab.sink("now"))
    def now(live):
        return in_windows(live, "5 minutes")

    def put(name: str, begin: int) -> None:
        lab.put(name, CLICKS, [("a", lab.at(begin + s), s) for s in range(0, 300, 20)])

    def windows_of(name: str) -> list[tuple[Any, ...]]:
        return list(lab.rows(in_windows(lab.table(name, CLICKS), "5 minutes")))

    def at_end(job: Any) -> set[str]:
        status = lab.control("ends").status()
        assert status is not None and status.run_id == job.execution.run_id
        return {one.name for one in status.stages if all(i.end_of_data for i in one.instances)}

    pipeline = Pipeline("ends", [history, live, past, now], chaining=False)
    for begin in (0, 300):
        put("history", begin)
        put("live", begin)
    job = lab.start(pipeline, interval=3600.0, status_seconds=0.1)
    job.wait_for(JobStarted)
    job.wait_until(lambda: at_end(job) == {"history", "past"} and job.execution.rows().get("live") == 30)
    assert not lab.committed("past"), "a checkpoint has completed already: no task waits for one"
    suspended = job.done("stop")
    assert job.finished().ended_by == "suspend"
    assert {done.stage for done in job.of(StageFinished)} == {"history", "past"}
    past_rows = windows_of("history")
    lab.check(past_rows, "past")

    put("history", 600)
    resumed = lab.start(pipeline, interval=3600.0)
    assert resumed.wait_for(JobStarted).restored_checkpoint == suspended.checkpoint_id
    finished = resumed.done("checkpoint")
    resumed.wait_until(lambda: {done.stage for done in resumed.of(StageFinished)} == {"history", "past"})
    assert finished.details["roots"] == ["history", "live"]
    assert resumed.done("checkpoint").details["roots"] == ["live"]
    put("live", 600)
    resumed.wait_until(lambda: resumed.execution.rows().get("live") == 45)
    drained = resumed.done("stop", drain=True)
    assert resumed.finished().ended_by == "drain"
    live_rows = windows_of("live")
    lab.check(past_rows, "past")
    lab.check(live_rows, "now")
    assert asked_for == ["history", "live", "live"]

    # A job that continues from a drain's savepoint ends at once.
    put("live", 900)
    over = lab.start(pipeline, interval=3600.0, restore_from=drained.url)
    assert over.finished().ended_by == "end_of_data"
    assert over.wait_for(JobStarted).job_id == 1
    lab.check(past_rows, "past")
    lab.check(live_rows, "now")
    assert asked_for == ["history", "live", "live"]


def test_a_drain_names_the_unbounded_sources_that_it_ends_before_they_have_caught_up(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @unbounded_source(instances=["a", "b"], sink=lab.sink("rows"))
    def live(context):
        return lab.stream(context.instance, CLICKS)

    for number in range(100):
        lab.put("a", CLICKS, [("a", lab.at(number), number)])
    lab.put("b", CLICKS, [("b", lab.at(0), 0)])
    job = lab.start(Pipeline("early", [live]), interval=None, status_seconds=0.1)
    job.wait_for(JobStarted)

    def b_has_caught_up() -> bool:
        status = lab.control("early").status()
        return status is not None and bool(status.stages) and bool(status.stages[0].instances[1].caught_up)

    job.wait_until(b_has_caught_up)
    with caplog.at_level(logging.WARNING, "dagster_checkpoints"):
        job.done("stop", drain=True)
    assert job.finished().ended_by == "drain"
    assert lab.count("rows") < 101, "the drain came too late to leave anything"
    assert "The drain ends unbounded sources that have not caught up: live[a]. What they" in caplog.text
