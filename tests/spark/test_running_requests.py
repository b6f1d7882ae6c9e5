"""Requests to a running job at every difficult moment; most of them through storage, as another process sends them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control import NoRunningPipeline, RequestFailed
from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.errors import RequestConflict
from dagster_checkpoints.pipeline import Pipeline, Stage, stage, unbounded_source
from dagster_checkpoints.spark.job.events import InstanceFinished, JobRestarting, JobStarted, SavepointDone

ROWS = "k string, v long"
DEADLINE = 150.0
INSTANCES = ("a", "b", "c")


def test_requests_through_storage_from_start_up_to_the_end(lab: Any) -> None:
    """Also: the status at these moments; the end of one instance of three."""
    may_start = threading.Event()
    written = dict.fromkeys(INSTANCES, 0)

    @unbounded_source(instances=INSTANCES)
    def live(context):
        assert may_start.wait(DEADLINE)
        return lab.stream(f"live-{context.instance}", ROWS)

    @stage(instances=INSTANCES, sink=lab.sink("rows"))
    def rows(live):
        return live

    def put(instance: str) -> None:
        lab.put(f"live-{instance}", ROWS, [(instance, written[instance] * 10 + v) for v in range(10)])
        written[instance] += 1

    def status() -> PipelineStatus:
        found = control.status()
        assert found is not None
        return found

    def sources() -> dict[str, Any]:
        return {one.name: one for one in status().stages[0].instances}

    def all_read() -> bool:
        """Judged by the status: other processes see the job's progress only in these files."""
        latest = status()
        if not latest.stages or latest.stages[-1].rows < 10 * sum(written.values()):
            return False
        return all(one.caught_up for one in sources().values())

    def refused(ask: Any, *arguments: Any, **options: Any) -> RequestFailed:
        with pytest.raises(RequestFailed) as caught:
            ask(*arguments, **options).wait(DEADLINE)
        return caught.value

    pipeline = Pipeline("asked", [live, rows])
    savepoints = lab.folder / "store/asked/savepoints"
    control = lab.control("asked")
    store = lab.troubled_store()
    with pytest.raises(NoRunningPipeline, match="never run"):
        control.checkpoint()
    for instance in INSTANCES:
        put(instance)

    # During start-up: the request waits until all tasks run. Requests with the same id are one request.
    job = lab.start(pipeline, interval=3600.0, storage=lab.storage("asked", store), status_seconds=0.1)
    job.wait_until(lambda: (state := control.state()) is not None and state.lease is not None)
    early = control.savepoint(request_id="early", name="early")
    job.wait_until(lambda: early.poll() is not None)
    assert early.poll().status == "accepted" and status().phase == "starting"
    assert control.savepoint(request_id="early", name="early").request.asked_at == early.request.asked_at
    may_start.set()
    answer = early.wait(DEADLINE)
    assert answer.location.startswith("savepoints/savepoint-1-early-")
    assert control.savepoint(request_id="early", name="early").wait(1.0) == answer
    with pytest.raises(RequestConflict):
        control.savepoint(request_id="early", name="another")
    assert [f"savepoints/{path.name}" for path in savepoints.iterdir()] == [answer.location]

    # While it runs.
    job.wait_until(all_read)
    running = status()
    assert (running.phase, running.roots, running.chains) == ("running", ("live",), (("live", "rows"),))
    assert {one.state for one in sources().values()} == {"RUNNING"} and running.pending == ()
    done = control.checkpoint().wait(DEADLINE)
    assert done.details["roots"] == ["live"]
    job.wait_until(lambda: (last := status().last_checkpoint) is not None and last.checkpoint_id == done.checkpoint_id)
    with store.holding("/savepoints/"):
        expired = refused(control.savepoint, name="slow", deadline=1.0)
    assert expired.reason == "CHECKPOINT_EXPIRED" and "1 s" in expired.message
    with store.holding("/_metadata"):
        twice = [job.ask("checkpoint", request_id="twice") for _ in range(2)]
        job.wait_until(lambda: any(one.kind == "checkpoint" and one.acknowledged == 3 for one in status().pending))
        assert status().pending[0].expected == 3 and not any(future.done() for future in twice)
    assert len({future.result(DEADLINE).checkpoint_id for future in twice}) == 1
    job.wait_until(lambda: (last := status().last_checkpoint) is not None and last.checkpoint_id > done.checkpoint_id)
    reported = status()
    assert reported.checkpoints is not None and reported.last_failure is not None and reported.last_checkpoint is not None
    assert (reported.checkpoints.completed, reported.checkpoints.savepoints, reported.checkpoints.failed) == (
        len(job.checkpoints()) + 1,
        1,
        1,
    )
    assert 0 < reported.checkpoints.duration_p50 <= reported.checkpoints.duration_p99 <= reported.checkpoints.duration_max
    assert reported.last_failure.reason == "CHECKPOINT_EXPIRED"
    (part,) = reported.last_checkpoint.parts
    assert part.stages == ("live", "rows") and 0 < part.acknowledged_after <= reported.last_checkpoint.duration

    # The end of one source's instance: the others continue.
    unknown = refused(control.end_source, "live", "z")
    assert "live[z]" in unknown.message and "live[a], live[b], live[c]" in unknown.message
    assert control.end_source("live", "b").wait(DEADLINE).details == {"ended": ["live[b]"]}
    job.wait_until(lambda: sources()["b"].end_of_data)
    lab.put("live-b", ROWS, [("b", -1)])
    put("a")
    put("c")
    job.wait_until(all_read)
    control.checkpoint().wait(DEADLINE)
    job.wait_for(InstanceFinished, lambda event: (event.stage, event.instance) == ("live", "b"))
    job.wait_until(lambda: sources()["b"].state == "FINISHED")

    # During a stop every other request is refused by name.
    put("a")
    job.wait_until(all_read)
    with store.holding("/_metadata"):
        stop = control.stop(drain=False, request_id="suspending")
        job.wait_until(lambda: status().stop is not None and any(one.kind == "savepoint" for one in status().pending))
        assert status().phase == "stopping" and not status().stop.drain
        for ask, arguments in (
            (control.stop, {"drain": True}),
            (control.savepoint, {}),
            (control.checkpoint, {}),
            (control.end_source, {"stage": "live", "instance": "a"}),
        ):
            no = refused(ask, **arguments)
            assert no.reason == "CHECKPOINT_COORDINATOR_SUSPEND" and "suspending" in no.message, no
    suspended = stop.wait(DEADLINE)
    assert job.finished().ended_by == "suspend"
    assert status().phase == "ended" and status().epoch == 1
    with pytest.raises(NoRunningPipeline, match="FINISHED by suspend") as nobody:
        control.stop(drain=True)
    assert suspended.location in str(nobody.value)
    lab.check([(instance, v) for instance in INSTANCES for v in range(10 * written[instance])], "rows")

    # Resumed: sources that have ended stay ended. During a drain a savepoint is refused as well.
    resumed = lab.start(pipeline, interval=3600.0, storage=lab.storage("asked", store), status_seconds=0.1)
    assert resumed.wait_for(JobStarted).restored_location == suspended.location
    put("c")
    resumed.wait_until(lambda: status().epoch == 2 and all_read())
    with store.holding("/_metadata"):
        stop = control.stop(drain=True, request_id="draining")
        resumed.wait_until(lambda: status().stop is not None and any(one.kind == "savepoint" for one in status().pending))
        assert "draining" in refused(control.savepoint).message
    assert stop.wait(DEADLINE).checkpoint_id == resumed.finished().last_checkpoint_id
    lab.check([(instance, v) for instance in INSTANCES for v in range(10 * written[instance])], "rows")
    with pytest.raises(NoRunningPipeline, match="FINISHED by drain"):
        control.checkpoint()


class Fragile(Stage):
    """Raises once, in the method that a file names."""

    def __init__(self, fault: Path, **options: Any) -> None:
        super().__init__(**options)
        self.fault = fault

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        self._perhaps("batch")
        return batch

    def finish(self) -> None:
        self._perhaps("finish")

    def _perhaps(self, where: str) -> None:
        if self.fault.exists() and self.fault.read_text() == where:
            self.fault.unlink()
            raise ValueError(f"a plane without wings in {where}")


def test_requests_while_a_job_fails_and_restarts(lab: Any) -> None:
    may_start = threading.Event()
    may_start.set()
    fault = lab.folder / "fault"
    written = 0

    @unbounded_source
    def live(context):
        assert may_start.wait(DEADLINE)
        return lab.stream("live", ROWS)

    def put() -> None:
        nonlocal written
        lab.put("live", ROWS, [("a", written * 10 + v) for v in range(10)])
        written += 1

    def read_all() -> None:
        job.wait_until(lambda: job.execution.rows().get("fragile") == 10 * written)

    store = lab.troubled_store()
    pipeline = Pipeline("falling", [live, Fragile(fault, name="fragile", sink=lab.sink("rows"))], chaining=False)
    restart = FixedDelayRestart(10, 0.1)
    job = lab.start(pipeline, interval=3600.0, storage=lab.storage("falling", store), restart=restart, status_seconds=0.1)
    put()
    read_all()
    first = job.done("checkpoint")

    # Requests during a restart are carried out when the job runs again.
    may_start.clear()
    fault.write_text("batch")
    put()
    job.wait_for(JobRestarting)
    job.wait_until(lambda: (found := lab.control("falling").status()) is not None and found.phase == "restarting")
    asked = {kind: job.ask(kind) for kind in ("checkpoint", "savepoint")}
    hopeless = job.ask("savepoint", deadline_seconds=0.0)
    assert not any(future.done() for future in asked.values())
    may_start.set()
    assert job.wait_for(JobStarted, lambda started: started.attempt == 2).restored_checkpoint == first.checkpoint_id
    answers = {kind: future.result(DEADLINE) for kind, future in asked.items()}
    assert {kind: answer.status for kind, answer in answers.items()} == {"checkpoint": "done", "savepoint": "done"}
    assert hopeless.result(DEADLINE).reason == "CHECKPOINT_EXPIRED"

    # A savepoint in progress when a task fails is answered, and leaves no files.
    read_all()
    with store.holding("/savepoints/"):
        unlucky = job.ask("savepoint", name="unlucky")
        job.wait_until(lambda: store.held > 0)
        fault.write_text("batch")
        put()
        answer = unlucky.result(DEADLINE)
    assert (answer.status, answer.reason) == ("failed", "TASK_FAILURE"), answer
    job.wait_for(JobStarted, lambda started: started.attempt == 3)
    job.wait_until(lambda: not list(lab.folder.glob("store/falling/savepoints/*unlucky*")))

    # A task that fails during a drain: the answer names the error, and the job continues.
    read_all()
    fault.write_text("finish")
    answer = job.ask("stop", drain=True).result(DEADLINE)
    assert answer.status == "failed" and not answer.location, answer
    assert "'fragile'" in job.of(JobRestarting)[-1].cause and "a plane without wings in finish" in job.of(JobRestarting)[-1].cause
    put()
    job.wait_for(JobStarted, lambda started: started.attempt == 4)
    read_all()
    job.done("stop")
    assert job.finished().ended_by == "suspend"
    lab.check([("a", v) for v in range(10 * written)], "rows")
    assert [done.stops for done in job.of(SavepointDone)] == ["", "suspend"]
