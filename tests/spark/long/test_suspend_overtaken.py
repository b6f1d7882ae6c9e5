"""A task ends by itself while a suspend takes its savepoint: the savepoint is taken again, without the task."""

from __future__ import annotations

import time
from typing import Any

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import CheckpointNotDone, JobStarted

ROWS = "k string, v long"


class SlowToCommit(ParquetSink):
    """A sink whose commit waits while a file exists beside the table."""

    def commit(self, transaction: str) -> None:
        while self.path.with_name("hold").exists():
            time.sleep(0.05)
        super().commit(transaction)


def test_a_task_that_ends_during_a_suspend_is_left_out(lab: Any) -> None:
    @bounded_source(sink=SlowToCommit(lab.folder / "early"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("late"))
    def copied(live):
        return live

    for name in ("history", "live"):
        lab.put(name, ROWS, [(name, n) for n in range(10)])
    hold = lab.folder / "hold"
    hold.touch()
    pipeline = Pipeline("overtaken", [history, live, copied], chaining=False)
    # Before the savepoint is triggered the job waits for finishing tasks, at most for this time:
    job = lab.start(pipeline, interval=3600.0, checkpoints={"timeout": 10.0})
    job.wait_until(lambda: job.execution.rows() == {"history": 10, "live": 10, "copied": 10})
    job.done("checkpoint")
    stopped = job.ask("stop", name="overtaken")
    job.wait_until(lambda: job.execution.coordinator.pending_ids != ())
    hold.unlink()
    answer = stopped.result(150)
    assert (answer.status, job.finished().ended_by) == ("done", "suspend"), f"{answer}; {job.story()}"
    given_up = [event.reason for event in job.of(CheckpointNotDone) if event.checkpoint_id == answer.checkpoint_id - 1]
    assert given_up == ["CHECKPOINT_DECLINED_TASK_CLOSING"], job.story()
    lab.check([("history", n) for n in range(10)], "early")

    lab.put("live", ROWS, [("live", n) for n in range(10, 20)])
    job = lab.start(pipeline)
    started = job.wait_for(JobStarted)
    assert started.restored_checkpoint == answer.checkpoint_id
    job.wait_until(lambda: job.execution.rows().get("copied") == 20)
    job.drain()
    job.finished()
    lab.check([("history", n) for n in range(10)], "early")
    lab.check([("live", n) for n in range(20)], "late")
