"""interval=None: no periodic checkpoints. Sinks commit when the job ends, and not before."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination.lifecycle import LifecycleState
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, TaskId, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import JobRestarting, JobStarted

ROWS = "k string, v long"


class Raising(ParquetSink):
    """Raises in the methods whose names are in the list; each once."""

    raising: list[str]

    def write(self, batch: Any, files: Any, batch_id: int) -> None:
        self._raise("write")
        super().write(batch, files, batch_id)

    def commit(self, transaction: str) -> None:
        self._raise("commit")
        super().commit(transaction)

    def new_instance(self) -> Any:
        made = super().new_instance()
        made.raising = self.raising
        return made

    def _raise(self, method: str) -> None:
        if method in self.raising:
            self.raising.remove(method)
            raise OSError(f"the disk has gone in {method}")


class Scene:
    """A backfill and a live feed, each with a sink; the live feed's sink raises when a test wants it."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.put = {"history": 0, "live": 0}

        @bounded_source(sink=lab.sink("early"))
        def history(context):
            return lab.stream("history", ROWS)

        @unbounded_source
        def live(context):
            return lab.stream("live", ROWS)

        late = Raising(lab.folder / "late")
        late.raising = self.raising = []

        @stage(sink=late)
        def copied(live):
            return live

        self.pipeline = Pipeline("copying", [history, live, copied], chaining=False)
        self.more("history")
        self.more("live")

    def more(self, name: str) -> None:
        first, self.put[name] = self.put[name], self.put[name] + 10
        self.lab.put(name, ROWS, [(name, n) for n in range(first, self.put[name])])

    def start(self, **options: Any) -> Any:
        return self.lab.start(self.pipeline, interval=None, **options)

    def wait_for_backfill(self, job: Any) -> None:
        """Wait until the backfill's data has ended: its task waits, or has ended."""

        def over() -> bool:
            deployment = job.execution.deployment
            tasks = deployment.tasks if deployment is not None else {}
            task = tasks.get(TaskId("history", 0))
            return task is not None and task.machine.state not in (LifecycleState.RUNNING, LifecycleState.FINISHING)

        job.wait_until(over)

    def has_read(self, job: Any) -> None:
        job.wait_until(lambda: job.execution.rows().get("copied") == self.put["live"])

    def nothing_is_committed(self) -> bool:
        return self.lab.count("early") == self.lab.count("late") == 0

    def check(self) -> None:
        self.lab.check([("history", n) for n in range(self.put["history"])], "early")
        self.lab.check([("live", n) for n in range(self.put["live"])], "late")


@pytest.fixture
def scene(lab: Any) -> Scene:
    return Scene(lab)


def test_without_an_interval_sinks_commit_at_the_end_after_any_failure(scene: Scene) -> None:
    job = scene.start(restart=FixedDelayRestart(5, 0.1))
    scene.wait_for_backfill(job)
    scene.has_read(job)
    assert scene.nothing_is_committed()
    scene.raising.append("write")
    scene.more("live")
    job.wait_for(JobRestarting)
    job.wait_for(JobStarted, lambda started: started.attempt == 2 and started.restored_checkpoint is None)
    scene.wait_for_backfill(job)
    scene.has_read(job)
    assert scene.nothing_is_committed()
    job.cancel()  # like a crash: no row of this job may be visible, nor disturb the next job
    assert job.result().status == "CANCELED"

    job = scene.start()
    assert job.wait_for(JobStarted).restored_checkpoint is None
    scene.has_read(job)
    assert scene.nothing_is_committed()
    scene.raising.append("commit")
    job.drain()
    failed = job.result()
    assert (failed.status, [done.checkpoint_id for done in job.checkpoints()]) == ("FAILED", [1]), job.story()
    assert scene.lab.count("late") == 0, "the final checkpoint has completed, and this commit has failed"

    job = scene.start()
    assert job.finished().job_id == failed.job_id
    assert job.of(JobStarted)[0].restored_checkpoint == 1
    assert not scene.raising
    scene.check()


def test_checkpoints_and_savepoints_on_request_work_without_an_interval(scene: Scene) -> None:
    job = scene.start()
    scene.wait_for_backfill(job)
    scene.has_read(job)
    job.done("savepoint", name="on-the-way")
    assert scene.nothing_is_committed()
    stopped = job.done("stop", name="suspended")
    assert job.finished().ended_by == "suspend"
    scene.check()

    scene.more("live")
    job = scene.start()
    assert job.wait_for(JobStarted).restored_checkpoint == stopped.checkpoint_id
    scene.has_read(job)
    job.done("checkpoint")
    job.wait_until(lambda: scene.lab.count("late") == scene.put["live"])
    scene.more("live")
    scene.has_read(job)
    job.cancel()
    job.result()
    job = scene.start()
    job.wait_for(JobStarted, lambda started: started.restored_checkpoint is not None)
    scene.has_read(job)
    job.done("stop", name="drained", drain=True)
    assert job.finished().ended_by == "drain"
    scene.check()
