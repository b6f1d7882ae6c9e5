"""Real processes that end: killed at points of the protocol, suspended and replaced. The sinks must hold every row once."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from dagster_checkpoints.control import NoRunningPipeline
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import NoRestart
from dagster_checkpoints.errors import PipelineOwned
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.state.metadata_file import decode
from tests.spark.processes import crash_runner
from tests.spark.processes.killed_runs import DEADLINE, LIVE_FILES, ROWS, Child, Feed


def history_is_done(event: dict[str, Any]) -> bool:
    return "history" in event["finished_stages"]


def test_a_pipeline_killed_at_six_moments_commits_every_row_once(lab: Any, start: Callable[..., Child]) -> None:
    """Barriers are aligned, overtake at once or after a timeout, and several checkpoints are in flight. Feeds keep state."""
    start = functools.partial(start, numbered=True)
    chance = random.Random(147)
    feed = Feed(lab)
    feed.more()

    # Before the first checkpoint.
    child = start("early", initial_delay=3600.0)
    emitted = chance.randint(1, 40)
    child.wait_for("Rows", lambda rows: rows.get("named", 0) >= emitted)
    child.kill()
    assert not lab.committed("named")

    # While a checkpoint uploads a state file, and others have begun after it.
    child = start("uploading", hold="upload", hold_at=chance.randint(1, 6), interval=0.3, checkpoints={"max_concurrent": 3})
    child.wait_for("Holding")
    child.wait_until(lambda: len(lab.control("crashing").status().pending) == 3)
    child.kill(group=False)

    # While the backfill still runs; the barriers overtake.
    child = start("backfill", initial_delay=0.2, checkpoints={"unaligned": True})
    done = child.wait_for("CheckpointDone")
    child.kill()
    assert not history_is_done(done)
    feed.more()

    # After a checkpoint has completed, before a sink commits it.
    child = start("committing", hold="commit", hold_at=chance.randint(1, 2))
    assert child.wait_for("JobStarted")["restored_checkpoint"] is not None
    child.wait_for("Holding")
    child.kill(group=False)

    # After the backfill has finished.
    child = start("live", checkpoints={"unaligned": True, "aligned_checkpoint_timeout": 0.05})
    done = child.wait_for("CheckpointDone", history_is_done)
    assert done["roots"] == ["live"]
    child.kill()
    feed.more()

    # While the final checkpoint is written.
    feed.drain_when_consumed()
    child = start("ending", hold=chance.choice(["upload", "metadata"]), hold_draining=True)
    started = child.wait_for("JobStarted")
    assert started["restored_checkpoint"] >= done["checkpoint_id"]
    assert set(started["finished_stages"]) == {"history", "names"}
    child.wait_for("Holding")
    child.kill()

    child = start("last")
    assert child.end()["status"] == "FINISHED", child.story()
    feed.check(numbered=True)
    assert not list((lab.folder / "store/crashing/checkpoints").rglob("_metadata"))


def test_a_pipeline_killed_and_started_with_other_instances_commits_every_row_once(lab: Any, start: Callable[..., Child]) -> None:
    """The backfill has ended; windows move from two instances to three, feeds are in another order and keep their state.

    All state gets another number of partitions. One process is killed when the first instance has its part of it.
    """
    start = functools.partial(start, numbered=True)
    feed = Feed(lab)
    feed.more()
    child = start("two", hours=2)
    done = child.wait_for("CheckpointDone", lambda event: history_is_done(event) and event["stages"]["hours"]["rows"] > 0)
    child.kill()
    feed.more()
    feed.drain_when_consumed()
    start = functools.partial(start, hours=3, feeds="cab", repartition_state=True, spark={"spark.sql.shuffle.partitions": "5"})
    child = start("moving", hold="state", hold_at=2)
    child.wait_for("Holding")
    child.kill()
    child = start("three")
    started = child.wait_for("JobStarted")
    assert started["restored_checkpoint"] >= done["checkpoint_id"]
    assert set(started["finished_stages"]) == {"history", "names"}
    assert child.end()["status"] == "FINISHED", child.story()
    feed.check(numbered=True)


def test_a_split_source_killed_while_it_is_partly_finished_and_started_with_other_instances(
    lab: Any, start: Callable[..., Child]
) -> None:
    """Of three instances one has finished. Of the other two one is gone after the first kill, and a new one is there."""
    feed, reads = Feed(lab), lab.folder / "reads"
    child = start("three", splits="abc", split_seconds=2.0)
    half = 7 * 30
    child.wait_for("Rows", lambda rows: rows.get("days") == half)
    lab.control("crashing").end_source("days", "c").wait(DEADLINE)
    child.wait_for("CheckpointDone", lambda done: done["stages"]["days"]["finished_instances"] == 1)
    (lab.folder / "all").touch()
    done = child.wait_for("CheckpointDone", lambda done: half < done["stages"]["days"]["rows"] < feed.history_rows)
    done = child.wait_for("CheckpointDone", lambda later, id=done["checkpoint_id"]: later["checkpoint_id"] > id)
    child.kill()
    assert done["finished_stages"] == []
    finished = {"uploading": finished_splits(lab)}

    # The first upload: what is left to read may be done with the first checkpoint. It comes before, since the splits are slow.
    child = start("uploading", splits="bdc", split_seconds=8.0, hold="upload", hold_at=1)
    assert child.wait_for("JobStarted")["restored_checkpoint"] >= done["checkpoint_id"]
    child.wait_for("Holding")
    child.kill(group=False)
    finished["last"] = finished_splits(lab)

    child = start("last", splits="bdc")
    assert child.end()["status"] == "FINISHED", child.story()
    lab.check(lab.table("history", ROWS), "days")
    lab.check(crash_runner.in_hours(lab.table("history", ROWS).withColumnRenamed("k", "name")), "hours")
    read = [line.split(" ") for line in reads.read_text().splitlines()]
    assert [(run, split) for run, split in read if split in finished.get(run, ())] == [], "finished splits are not read again"
    assert len(finished["last"]) >= len(finished["uploading"]) >= 7


def finished_splits(lab: Any) -> tuple[str, ...]:
    """The splits of `days` that the newest checkpoint names as finished."""
    location = json.loads((lab.folder / "store/crashing/state.json").read_text())["newest"]["location"]
    metadata = decode((lab.folder / "store/crashing" / location / "_metadata").read_bytes(), location)
    (enumerator,) = (stage.enumerator for stage in metadata.stages if stage.name == "days")
    assert enumerator is not None and enumerator.complete
    return enumerator.finished


def test_fused_sources_killed_before_and_after_the_backfill_has_finished_commit_every_row_once(
    lab: Any, start: Callable[..., Child]
) -> None:
    feed = Feed(lab)
    feed.more()
    child = start("backfill", fused=True, initial_delay=0.2)
    done = child.wait_for("CheckpointDone")
    child.kill()
    assert not history_is_done(done)

    child = start("uploading", fused=True, hold="upload", hold_at=3)
    assert child.wait_for("JobStarted")["chains"] == [["history", "live", "hours"]]
    child.wait_for("Holding")
    child.kill(group=False)

    child = start("live", fused=True)
    done = child.wait_for("CheckpointDone", history_is_done)
    assert done["roots"] == ["live"]
    child.kill()

    feed.more()
    feed.drain_when_consumed()
    child = start("last", fused=True)
    assert "history" in child.wait_for("JobStarted")["finished_stages"]
    assert child.end()["status"] == "FINISHED", child.story()
    lab.check(crash_runner.in_hours(feed.rows().withColumnRenamed("k", "name")), "hours")


@pytest.mark.parametrize("regions", [False, True])
def test_a_run_whose_java_process_is_killed_ends_and_tells_why(lab: Any, start: Callable[..., Child], regions: bool) -> None:
    """The Python process lives on: it does not try again, and the next run continues."""
    feed = Feed(lab)
    feed.more()
    child = start("short", regions=regions, restart_attempts=5)
    done = child.wait_for("CheckpointDone")
    feed.more()
    child.kill_java()
    ended = child.end()
    assert ended["status"] == "FAILED", child.story()
    assert ended["error"].startswith("SparkEndedError("), ended["error"]
    assert "Spark's Java process was ended by signal 9" in ended["error"]
    assert not child.events("JobRestarting")
    assert child.process.returncode == 0

    if regions:
        return
    feed.drain_when_consumed()
    child = start("last")
    assert child.wait_for("JobStarted")["restored_checkpoint"] >= done["checkpoint_id"]
    assert child.end()["status"] == "FINISHED", child.story()
    feed.check()


def test_a_pipeline_killed_while_a_region_restarts_commits_every_row_once(lab: Any, start: Callable[..., Child]) -> None:
    feed = Feed(lab)
    feed.more()
    child = start("regional", regions=True, restart_attempts=5)
    done = child.wait_for("CheckpointDone")
    (lab.folder / "fault").touch()
    feed.more()
    restarting = child.wait_for("JobRestarting")
    assert restarting["stages"] == ["live", "checked", "hours"]
    again = child.wait_for("JobStarted", lambda started: started["attempt"] == 2)
    assert again["restored_checkpoint"] >= done["checkpoint_id"]
    child.wait_for("CheckpointDone", lambda later: later["checkpoint_id"] > again["restored_checkpoint"])
    (lab.folder / "fault").touch()
    feed.more()
    child.wait_for("JobRestarting", lambda event: event["attempt"] == 3)
    child.kill()
    assert not (lab.folder / "fault").exists()

    job = lab.start(crash_runner.regions_pipeline(lab.folder, str(lab.folder / "input")), lease_seconds=6.0)
    assert job.wait_for(JobStarted).restored_checkpoint >= again["restored_checkpoint"]
    put = 3 * LIVE_FILES * 10
    job.wait_until(lambda: [job.execution.rows().get(stage) for stage in ("checked", "weather")] == [put, put])
    job.drain()
    job.finished()
    rows = {name: lab.table(f"live-{name}", ROWS).withColumnRenamed("k", "name") for name in "ab"}
    lab.check(rows["a"], "checked")
    lab.check(rows["b"], "weather")
    lab.check(crash_runner.in_hours(rows["a"]), "hours")
    lab.check(crash_runner.in_hours(rows["b"]), "storms")


def test_a_query_that_is_divided_between_two_kills_commits_every_row_once(lab: Any, start: Callable[..., Child]) -> None:
    """A stage inside the query gets a reader, which is then taken away again. The process is killed again before the first
    checkpoint of the parts, and before the first one without the reader."""
    feed = Feed(lab)
    for _ in range(8):
        feed.more()
    child = start("alone", chained="alone", initial_delay=0.2)
    assert child.wait_for("JobStarted")["chains"] == [["live", "fresh", "hours"]]
    done = child.wait_for("CheckpointDone", lambda done: done["stages"]["hours"]["rows"] > 0)
    child.kill()
    assert done["finished_stages"] == []

    random_ = random.Random(13)
    child = start("dividing", chained="read", hold="upload", hold_at=random_.randint(1, 12))
    child.wait_for("Holding")
    child.kill(group=False)

    child = start("divided", chained="read", initial_delay=0.2, interval=0.5)
    assert child.wait_for("JobStarted")["chains"] == [["live", "fresh"], ["hours"], ["seen"]]
    done = child.wait_for("CheckpointDone", lambda done: done["stages"]["seen"]["rows"] > 0)
    # The event comes before the sinks commit; the next pipeline has no such sink, so what is not committed now never is.
    child.wait_until(lambda: {name for name, _ in lab.committed("seen")} == {"a", "b"})
    child.kill()
    assert done["finished_stages"] == []

    for run_id, hold in (("without", "upload"), ("last", "")):
        child = start(run_id, chained="alone", hold=hold, hold_at=random_.randint(1, 12), allow_non_restored_state=True)
        assert child.wait_for("JobStarted")["chains"] == [["live", "fresh"], ["hours"]]
        if hold:
            child.wait_for("Holding")
            child.kill(group=False)
    assert child.end()["status"] == "FINISHED", child.story()
    rows = lab.table("live-a", ROWS).unionByName(lab.table("live-b", ROWS))
    lab.check(crash_runner.in_hours(rows.withColumnRenamed("k", "name")), "hours")
    before = 0
    for instance in "ab":  # the reader has the rows from the division to the last commit before it was taken away, each once
        read = sorted(v for name, v in lab.committed("seen") if name == instance)
        values = sorted(row.v for row in lab.table(f"live-{instance}", ROWS).collect())
        first = values.index(read[0])
        assert read == values[first : first + len(read)]
        before += first
    assert before > 0


def test_a_pipeline_killed_between_a_stops_savepoint_and_its_commit_continues_from_the_savepoint(
    lab: Any, start: Callable[..., Child]
) -> None:
    """Also: the answers to requests to a process that is dead."""
    feed = Feed(lab)
    feed.more()
    child = start("suspending", interval=3600.0, hold="commit-savepoint")
    child.wait_for("Rows", lambda rows: rows.get("named", 0) >= 60)
    control = lab.control("crashing")
    asked = control.stop(drain=False, name="night")
    child.wait_for("Holding")
    child.kill()
    assert not lab.committed("named") and not lab.committed("hours")
    state = json.loads((lab.folder / "store/crashing/state.json").read_text())
    savepoint = state["newest"]["location"]
    assert "-night-" in savepoint and state["job"]["status"] == "RUNNING"
    nobody_hears = control.savepoint()
    for request in (asked, nobody_hears):
        with pytest.raises(NoRunningPipeline, match="dead"):
            request.wait(DEADLINE)

    metadata = decode((lab.folder / "store/crashing" / savepoint / "_metadata").read_bytes(), savepoint)
    saved = {stage.name: stage.rows for stage in metadata.stages}
    job = lab.start(crash_runner.pipeline(lab.folder, str(lab.folder / "input")), interval=3600.0, lease_seconds=6.0)
    assert job.wait_for(JobStarted).restored_location == savepoint
    job.wait_until(lambda: all(lab.count(name) == saved[name] for name in ("named", "hours")))
    assert {request.poll().reason for request in (asked, nobody_hears)} == {"NO_RUNNING_PIPELINE"}
    feed.more()
    job.wait_until(lambda: job.execution.rows().get("named") == feed.live_rows + feed.history_rows)
    control.stop(drain=True).wait(DEADLINE)
    job.finished()
    feed.check()


def test_a_suspended_owner_is_replaced_and_can_do_nothing_when_it_continues(lab: Any, start: Callable[..., Child]) -> None:
    feed = Feed(lab)
    feed.more()
    first = start("first")
    first.wait_for("CheckpointDone")

    refused = JobExecution(
        crash_runner.pipeline(lab.folder, str(lab.folder / "input")),
        storage=lab.storage("crashing"),
        options=JobOptions(CheckpointConfig(interval=1.0), NoRestart(), lab.folder / "work"),
        session=lambda: pytest.fail("Spark is started for a pipeline that is owned"),
        on_event=lambda event: None,
        run_id="refused",
    )
    with pytest.raises(PipelineOwned, match="first"):
        refused.run()

    os.kill(first.process.pid, signal.SIGSTOP)
    second = start("second")
    taken_over = second.wait_for("CheckpointDone")
    os.kill(first.process.pid, signal.SIGCONT)
    ended = first.end()
    assert ended["status"] == "FAILED", first.story()
    assert "OwnershipLost" in ended["error"]
    restored = second.events("JobStarted")[0]["restored_checkpoint"]
    assert all(done["checkpoint_id"] <= restored for done in first.events("CheckpointDone"))

    feed.more()
    feed.drain_when_consumed()
    assert second.end()["status"] == "FINISHED", second.story()
    assert second.events("CheckpointDone")[-1]["checkpoint_id"] > taken_over["checkpoint_id"]
    assert not second.events("JobRestarting")
    feed.check()
    assert json.loads((lab.folder / "store/crashing/state.json").read_text())["job"]["status"] == "FINISHED"
