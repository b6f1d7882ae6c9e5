"""A small pipeline and its coordinator: real Spark, real storage, a handful of rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    pipeline_assets,
    stage,
    unbounded_source,
)
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.control.status import InstanceStatus, PipelineStatus, StageStatus, write_status
from dagster_checkpoints.execution.pipeline_state import UNKNOWN_ORIGIN, JobState, Origin, Owner
from dagster_checkpoints.plugin.run_events import RunReporter
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.ownership import LeaseRenewer
from tests.dagster.recorded_run import Recorder

SPARK = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture
def coordinator(tmp_path: Path) -> Callable[..., CheckpointCoordinatorResource]:
    """A coordinator whose files are all below the test's directory, with the given settings."""

    def make(**settings: Any) -> CheckpointCoordinatorResource:
        defaults: dict[str, Any] = {
            "storage": str(tmp_path / "storage"),
            "work_directory": str(tmp_path / "work"),
            "restart_attempts": 0,
            "lease_seconds": 30.0,  # no test waits for the end of a lease; a busy machine may stop for seconds
            "spark_config": SPARK,
        }
        return CheckpointCoordinatorResource(**{**defaults, **settings})

    return make


@pytest.fixture
def numbers_pipeline(tmp_path: Path) -> Pipeline:
    """numbers (two instances, five rows each) -> doubled -> total, with a sink."""

    @bounded_source(instances=["left", "right"])
    def numbers(context):
        """Numbers from zero."""
        return context.spark.range(5)

    @stage(instances=["left", "right"])
    def doubled(numbers):
        return numbers.selectExpr("id * 2 AS id")

    @stage(sink=ParquetSink(tmp_path / "total", at_new_start="replace"))
    def total(doubled):
        return doubled

    return Pipeline("numbers", [total, doubled, numbers])


@pytest.fixture
def assets_of() -> Callable[[Pipeline], dg.AssetsDefinition]:
    """The assets of a pipeline, as a user declares them."""

    def make(pipeline: Pipeline, **options: Any) -> dg.AssetsDefinition:
        @pipeline_assets(pipeline=pipeline, **options)
        def pipeline_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
            yield from checkpoint_coordinator.run(pipeline, context=context)

        return pipeline_op

    return make


@pytest.fixture
def materialize() -> Callable[..., dg.ExecuteInProcessResult]:
    """Materializes assets with a coordinator; a failure is in the result, or raised on demand."""

    def run(
        assets: dg.AssetsDefinition,
        coordinator: CheckpointCoordinatorResource,
        raise_on_error: bool = False,
        **options: Any,
    ) -> dg.ExecuteInProcessResult:
        resources = {"checkpoint_coordinator": coordinator}
        return dg.materialize([assets], resources=resources, raise_on_error=raise_on_error, **options)

    return run


@pytest.fixture
def failure_of() -> Callable[[dg.ExecuteInProcessResult], Any]:
    """The failure's text and metadata, as the UI shows them."""

    def find(result: dg.ExecuteInProcessResult) -> Any:
        assert not result.success
        (failed,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
        data = failed.step_failure_data.user_failure_data
        assert data is not None, failed.step_failure_data.error
        return data

    return find


class FakeOwner:
    """Owns a pipeline in storage as a run does, and answers requests as a test wants, without Spark.

    Attributes:
        requests: All requests that it received.
        answers: The answer to each kind of request; default: "done". None: no answer yet.
    """

    def __init__(
        self,
        root: Path,
        pipeline: Pipeline,
        run_id: str,
        *,
        resume: bool = False,
        lease_seconds: float = 60.0,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> None:
        self.pipeline = pipeline
        self.run_id = run_id
        self.folder = root.parent / "files-of-the-owner" / run_id
        self.taken = 0
        self.storage = CheckpointStorage(open_store(str(root)), pipeline.name)
        self.ownership = self.storage.acquire(Owner(run_id=run_id, host="a-machine", pid=1), lease_seconds)
        self.job_id = self.ownership.begin_job(resume=resume, origin=origin)
        self.box = RequestBox(self.storage.store, self.storage.layout)
        self.requests: list[ControlRequest] = []
        self.answers: dict[str, Callable[[ControlRequest], Answer | None]] = {}
        self.sequence = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def serve(self) -> list[ControlRequest]:
        """Answer the open requests; returns the requests that it read for the first time."""
        new = []
        for request in self.box.open_requests(self.ownership.epoch):
            if request.request_id not in {known.request_id for known in self.requests}:
                new.append(request)
            answer = self.answers.get(request.kind, self.done)(request)
            if answer is not None:
                self.box.answer(answer)
        self.requests += new
        return new

    def serve_forever(self) -> None:
        """Answer on a separate thread until the end of the test."""
        self._renewer = LeaseRenewer(self.ownership, lambda error: None)
        self._renewer.start()

        def run() -> None:
            while not self._over.wait(0.05):
                self.serve()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self, request: ControlRequest, **fields: Any) -> Answer:
        return Answer(request_id=request.request_id, status="done", answered_at=datetime.now(UTC), **fields)

    def failed(self, request: ControlRequest, reason: str, message: str, **fields: Any) -> Answer:
        now = datetime.now(UTC)
        return Answer(request_id=request.request_id, status="failed", reason=reason, message=message, answered_at=now, **fields)

    def report(
        self, *, finished: tuple[str, ...] = (), ended: tuple[str, ...] = (), behind: tuple[str, ...] = (), **fields: Any
    ) -> None:
        """Write a status in which these stages have finished, these emit no more rows, and these sources have not caught up."""
        self.sequence += fields.pop("after", 10)
        now = datetime.now(UTC)
        stages = tuple(
            StageStatus(
                name=stage.name,
                finished=stage.name in finished,
                instances=tuple(
                    InstanceStatus(
                        name=name,
                        state="RUNNING",
                        end_of_data=stage.name in (*finished, *ended),
                        caught_up=stage.name not in behind and f"{stage.name}[{name}]" not in behind
                        if stage.kind.is_source
                        else None,
                    )
                    for name in stage.instances
                ),
            )
            for stage in self.pipeline.stages
        )
        values: dict[str, Any] = {
            "run_id": self.run_id,
            "epoch": self.ownership.epoch,
            "phase": "running",
            "sequence": self.sequence,
            "updated_at": now,
            "started_at": now,
            "job_id": self.job_id,
            "stages": stages,
            "checkpoint_interval": 60.0,
        }
        write_status(self.storage, PipelineStatus(pipeline=self.pipeline.name, **{**values, **fields}))

    def take_savepoint(self, number: int, name: str = "", target: str = "", **fields: Any) -> dict[str, Any]:
        """Write a savepoint as a run does: `history` has finished, `live` reads two directories. Returns an answer's fields."""
        directory = self.storage.savepoint_directory(number, name, target)
        contents = {
            f"{index}/{path}": text
            for index, offset in enumerate((11, 22))
            for path, text in {
                "offsets/4": f'v1\n{{"batchWatermarkMs":0}}\n{{"logOffset":{offset}}}',
                "state/0/1.zip": f"state of instance {index}, as of savepoint {number}",
            }.items()
        }
        files = {}
        for where, text in contents.items():
            path = self.folder / str(number) / where
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            files[where] = path
        stored = directory.upload_files(files)
        tasks = {
            index: TaskSnapshot(
                stages={"live": StageInstanceSnapshot(rows_out=5)},
                query=QuerySnapshot(
                    batch_id=4,
                    files=tuple(
                        StateFile(where[2:], stored[where].sha256, stored[where].size)
                        for where in contents
                        if where.startswith(f"{index}/")
                    ),
                ),
            )
            for index in (0, 1)
        }
        stages = tuple(
            StageMetadata(
                name=stage.name,
                parallelism=stage.parallelism,
                instances=stage.instances,
                finished=(0,) if stage.name in ("history", "copied") else (),
                fully_finished=stage.name in ("history", "copied"),
                rows=7,
            )
            for stage in self.pipeline.stages
        )
        chains = (
            ChainMetadata("history", ("history", "copied")),
            ChainMetadata("live", ("live",), tasks),
            ChainMetadata("joined", ("joined",), {0: TaskSnapshot(stages={"joined": StageInstanceSnapshot()})}),
        )
        values: dict[str, Any] = {
            "kind": "savepoint",
            "job_id": str(self.job_id),
            "run_id": self.run_id,
            "epoch": self.ownership.epoch,
            "triggered_at": 1_700_000_000.0 + number,
            "completed_at": 1_700_000_001.5 + number,
            "spark_version": "4.3.0",
        }
        metadata = CheckpointMetadata(self.pipeline.name, number, stages, chains, **{**values, **fields})
        location = directory.write_metadata(encode(metadata), {one.sha256: one.size for one in stored.values()})
        return {"checkpoint_id": number, "location": location, "url": directory.url}

    def answer_with_savepoints(self) -> None:
        """Answer every request for a savepoint or a stop with one; ids count from 1."""

        def answer(request: ControlRequest) -> Answer:
            self.taken += 1
            return self.done(request, **self.take_savepoint(self.taken, request.name, request.target))

        self.answers["savepoint"] = self.answers["stop"] = answer

    def checkpoint(self, number: int) -> None:
        """Complete a checkpoint in state.json only."""
        self.ownership.complete(number, f"checkpoints/chk-{number}-{self.ownership.epoch}")

    def end(self, status: JobState = "FINISHED", **fields: Any) -> None:
        """End the job and release the pipeline."""
        self.ownership.end_job(status, **fields)
        self.release(status)

    def release(self, status: JobState) -> None:
        self.stop()
        self.ownership.release(status)

    def stop(self) -> None:
        """Stop renewing the lease, as a killed process does."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(10.0)
            self._renewer.stop(5.0)
            self._thread = None


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[..., FakeOwner]]:
    """Creates owners of a pipeline below the test's directory."""
    made: list[FakeOwner] = []

    def make(pipeline: Pipeline, run_id: str = "run-1", **options: Any) -> FakeOwner:
        made.append(FakeOwner(tmp_path / "storage", pipeline, run_id, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()
        each.storage.close()


@pytest.fixture
def meeting_pipeline(tmp_path: Path) -> Pipeline:
    """history (bounded) and live (two instances, unbounded) meet in joined, which has a sink."""

    @bounded_source
    def history(context):
        return context.spark.range(5)

    @unbounded_source(instances=["left", "right"])
    def live(context):
        return context.spark.readStream.schema("id long").json(str(tmp_path / "live" / context.instance))

    @stage
    def copied(history):
        return history

    @stage(sink=ParquetSink(tmp_path / "joined"))
    def joined(copied, live):
        return copied.unionByName(live)

    return Pipeline("meeting", [history, live, copied, joined])


@pytest.fixture
def tick(coordinator: Callable[..., CheckpointCoordinatorResource]) -> Callable[..., dg.SensorResult]:
    """One tick of a sensor, with Dagster's instance and the cursor of the previous tick."""

    def evaluate(sensor: dg.SensorDefinition, instance: dg.DagsterInstance, cursor: str | None = None, **settings: Any) -> Any:
        resources = {"checkpoint_coordinator": coordinator(**settings)}
        with dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources) as context:
            return sensor.evaluate_tick(context)

    return evaluate


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def reporter(recorder: Recorder, numbers_pipeline: Pipeline) -> RunReporter:
    return recorder.reporter(numbers_pipeline)
