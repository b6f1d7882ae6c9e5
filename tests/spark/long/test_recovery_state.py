"""State across a restore: a run is cancelled after a checkpoint, another run continues, and the results are those of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink, SinkCommit
from dagster_checkpoints.spark.errors import StageFailedError
from dagster_checkpoints.spark.job import attempt_driver
from dagster_checkpoints.spark.job.events import InstanceFinished, JobRestarting, JobStarted, StageFinished

SCHEMA = "k string, ts timestamp, v long"


def take_checkpoint(job: Any) -> Any:
    """Request a checkpoint as soon as the job can take one, and wait until it is complete."""
    before = len(job.checkpoints())
    job.wait_until(lambda: job.execution.coordinator is not None and bool(job.execution.coordinator.roots))
    job.ask("checkpoint")
    job.wait_until(lambda: len(job.checkpoints()) > before)
    return job.checkpoints()[-1]


def checkpoint_until(job: Any, condition: Any) -> None:
    while not condition():
        take_checkpoint(job)


def in_windows(frame: Any) -> Any:
    counted = frame.groupBy(F.window("ts", "20 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


def in_pairs(left: Any, right: Any) -> Any:
    near = F.expr("h.k = l.k AND l.ts BETWEEN h.ts AND h.ts + INTERVAL 30 MINUTES")
    joined = left.alias("h").join(right.alias("l"), near)
    return joined.select(F.col("h.ts").alias("ts"), F.col("l.ts").alias("seen"), "h.k", F.expr("h.v * 1000 + l.v AS v"))


def test_window_and_join_state_of_a_partly_finished_pipeline_continue_in_another_run(lab: Any) -> None:
    """Finished stages and instances are not built again, their input is not read again; ids continue."""
    built: list[tuple[str, str]] = []

    @bounded_source(watermark=("ts", "10 minutes"))
    def history(context):
        built.append(("history", context.instance))
        return lab.stream("history", SCHEMA)

    @unbounded_source(watermark=("ts", "10 minutes"), instances=["a", "b", "c"])
    def live(context):
        built.append(("live", context.instance))
        return lab.stream(f"live-{context.instance}", SCHEMA)

    @stage
    def rows(history, live):
        return history.unionByName(live)

    @stage(sink=lab.sink("windows"))
    def windows(rows):
        return in_windows(rows)

    @stage(sink=lab.sink("pairs"))
    def pairs(history, live):
        return in_pairs(history, live)

    pipeline = Pipeline("partly", [history, live, rows, windows, pairs])
    for number in range(3):
        minutes = range(number * 22, number * 22 + 22, 2)
        lab.put("history", SCHEMA, [(k, lab.at(60 * m), m) for m in minutes for k in "abc"])

    def live_until(instance: str, begin: int, end: int) -> None:
        lab.put(f"live-{instance}", SCHEMA, [(instance, lab.at(60 * m + 1), m) for m in range(begin, end, 3)])

    for instance in "abc":
        live_until(instance, 0, 25)
        live_until(instance, 25, 50)

    first = lab.start(pipeline, interval=3600.0, lease_seconds=20.0, work_directory=lab.folder / "work-1")
    first.wait_until(lambda: first.execution.rows().get("live", 0) >= 3 * (9 + 9))
    checkpoint_until(first, lambda: any(e.stage == "history" for e in first.of(StageFinished)))
    first.execution.end_source("live", "a")
    checkpoint_until(first, lambda: any((e.stage, e.instance) == ("live", "a") for e in first.of(InstanceFinished)))
    last = take_checkpoint(first)
    assert last.finished_stages == ("history",)
    assert (last.stages["live"].finished_instances, last.stages["live"].instances) == (1, 3)
    assert set(last.roots) == {"live"}
    first.cancel()
    assert first.result().status == "CANCELED"
    ids = [done.checkpoint_id for done in first.checkpoints()]
    assert ids == list(range(1, len(ids) + 1))

    (lab.folder / "input/history").rename(lab.folder / "input/history-gone")
    (lab.folder / "input/live-a").rename(lab.folder / "input/live-a-gone")
    assert not (lab.folder / "work-1/partly").exists()
    built.clear()

    second = lab.start(pipeline, interval=3600.0, work_directory=lab.folder / "work-2")
    started = second.wait_for(JobStarted)
    assert (started.restored_checkpoint, started.finished_stages) == (last.checkpoint_id, ("history",))
    live_until("b", 50, 90)
    live_until("c", 50, 90)
    second.wait_until(lambda: second.execution.rows().get("live", 0) >= 3 * (9 + 9) + 2 * 14)
    assert take_checkpoint(second).checkpoint_id == last.checkpoint_id + 1
    second.drain()
    second.finished()
    assert set(built) == {("live", "b"), ("live", "c")}
    assert not [e for e in second.of(InstanceFinished) if (e.stage, e.instance) == ("live", "a")]

    past = lab.table("history-gone", SCHEMA)
    fresh = [lab.table(name, SCHEMA) for name in ("live-a-gone", "live-b", "live-c")]
    together = fresh[0].unionByName(fresh[1]).unionByName(fresh[2])
    lab.check(in_windows(past.unionByName(together)), "windows")
    lab.check(in_pairs(past, together), "pairs")


class StubbornSink(ParquetSink):
    """A sink that raises instead of a commit, also in a restore, as often as a file says."""

    def commit(self, transaction: str) -> SinkCommit:
        self._fail()
        return super().commit(transaction)

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        if committed:
            self._fail()
        super().recover(committed, restored=restored)

    def _fail(self) -> None:
        left = self.path.parent / "commits-to-fail"
        if left.exists() and int(left.read_text()) > 0:
            left.write_text(str(int(left.read_text()) - 1))
            raise OSError("the sink's disk is full")


def test_a_commit_that_fails_after_the_final_checkpoint_is_repeated_without_running_the_stage_again(lab: Any) -> None:
    """By a restart within the run, by the next run: the task is restored after its finish, and only commits."""
    from dagster_checkpoints.coordination.restarts import FixedDelayRestart

    built: list[str] = []
    rows = [("a", lab.at(second), second) for second in range(50)]
    lab.put("in", SCHEMA, rows)

    def pipeline(name: str) -> Pipeline:
        @bounded_source(name="numbers", sink=StubbornSink(lab.folder / name))
        def numbers(context):
            built.append(name)
            return lab.stream("in", SCHEMA)

        return Pipeline(name, [numbers])

    left = lab.folder / "commits-to-fail"
    left.write_text("1")
    within = lab.start(pipeline("within"), interval=3600.0, restart=FixedDelayRestart(1, 0.1))
    within.finished()
    assert [event.attempt for event in within.of(JobRestarting)] == [2]
    assert "numbers" in within.of(JobRestarting)[0].cause and "the sink's disk is full" in within.of(JobRestarting)[0].cause
    assert built == ["within"], "a stage that was restored after its finish computes nothing"
    lab.check(rows_as_read(lab, rows), "within")

    left.write_text("2")
    failing = lab.start(pipeline("later"), interval=3600.0, restart=FixedDelayRestart(1, 0.1))
    failed = failing.result()
    assert failed.status == "FAILED"
    assert isinstance(failed.error.__cause__, StageFailedError)
    assert failed.error.__cause__.stage == "numbers"
    (lab.folder / "input/in").rename(lab.folder / "input/gone")
    later = lab.start(pipeline("later"))
    later.finished()
    assert built == ["within", "later"]
    assert later.wait_for(JobStarted).restored_checkpoint == failing.checkpoints()[-1].checkpoint_id
    lab.check(rows_as_read(lab, rows), "later")


def rows_as_read(lab: Any, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return lab.rows(lab.spark.createDataFrame(rows, SCHEMA))


@pytest.mark.parametrize("chaining", [True, False], ids=["native source", "behind channels"])
def test_windows_that_were_due_at_the_checkpoint_are_emitted_after_a_restore_without_new_input(
    lab: Any, chaining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore between a batch and the no-data batch that its watermark asks for; a second stage of windows behind it

    must not see the watermark before those windows."""

    @unbounded_source(watermark=("ts", "1 second"))
    def live(context):
        return lab.stream("live", SCHEMA)

    @stage(sink=lab.sink("tens"), event_time="ts")
    def tens(live):
        counted = live.groupBy(F.window("ts", "10 minutes")).agg(F.sum("v").alias("v"))
        return counted.select(F.window_time("window").alias("ts"), "v")

    @stage(sink=lab.sink("halves"))
    def halves(tens):
        counted = tens.groupBy(F.window("ts", "30 minutes")).agg(F.sum("v").alias("v"), F.count("*").alias("n"))
        return counted.select(F.col("window.start").alias("start"), "v", "n")

    pipeline = Pipeline("due", [live, tens, halves], chaining=chaining)
    lab.put("live", SCHEMA, [("a", lab.at(60 * minute), minute) for minute in range(30)])
    lab.put("live", SCHEMA, [("a", lab.at(60 * 60), 1000)])
    last_ms = int(lab.at(60 * 60).timestamp() * 1000) - 1000
    no_data = "spark.sql.streaming.noDataMicroBatches.enabled"
    lab.spark.conf.set(no_data, "false")  # so the point that the test needs follows every batch
    monkeypatch.setattr(attempt_driver, "check_session", lambda spark: None)  # a job is refused with this setting
    try:
        first = lab.start(pipeline, interval=3600.0)
        first.wait_until(lambda: first.execution.coordinator is not None and windows_read(first, last_ms, chaining))
        take_checkpoint(first)
        first.cancel()
        assert first.result().status == "CANCELED"
    finally:
        lab.spark.conf.set(no_data, "true")
    assert not lab.committed("halves")
    assert (lab.at(30 * 60 - 0.000001), sum(range(20, 30))) not in lab.committed("tens")

    second = lab.start(pipeline, interval=1.0)
    sums = [(lab.at(600 * n - 0.000001), sum(range(10 * n - 10, 10 * n))) for n in (1, 2, 3)]
    second.wait_until(lambda: len(lab.committed("halves")) == 1)
    assert lab.committed("tens") == lab.rows(lab.spark.createDataFrame(sums, "ts timestamp, v long"))
    assert lab.committed("halves") == [(lab.at(0), sum(range(30)), 3)]
    second.drain()
    second.finished()
    assert len(lab.committed("tens")) == 4
    assert lab.committed("halves")[-1] == (lab.at(3600), 1000, 1)


def windows_read(job: Any, watermark_ms: int, chaining: bool) -> bool:
    """Whether the chain that counts windows has read everything: a committed batch has read the last watermark."""
    deployment = job.execution.deployment
    if deployment is None:
        return False
    tasks = {task_id.vertex: task for task_id, task in deployment.tasks.items()}
    log = tasks["live" if chaining else "tens"].query.log
    batch_id = log.last_committed()
    if batch_id < 0:
        return False
    if chaining:
        return bool(log.next_watermark(batch_id) == watermark_ms)
    return any(isinstance(s, dict) and s.get("watermark") == watermark_ms for s in log.planned(batch_id).sources)
