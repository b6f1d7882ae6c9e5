"""A pipeline's storage, local or on S3, with checkpoints and savepoints in it, and an owner that answers requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from click.testing import CliRunner, Result

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.control.status import (
    CheckpointCountsStatus,
    CompletedCheckpointStatus,
    FailureStatus,
    InstanceStatus,
    PendingStatus,
    PipelineStatus,
    StageStatus,
    StopStatus,
    VertexPart,
    write_status,
)
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    StaticTableSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.state_files import StoredFile
from resources.embedded_s3 import EmbeddedS3

AIRPORTS = ("EWR", "JFK", "LGA")
NOW = datetime.now(UTC)
Files = Callable[[str, str], StateFile]


def metadata_of(checkpoint_id: int, kind: Any, files: Files, **changes: Any) -> CheckpointMetadata:
    """history (finished) and three live feeds into departures, joined with airlines; delays behind it in the same query.

    Args:
        files: creates a state file from a path and content.
    """
    live = {
        index: TaskSnapshot(
            stages={"live": StageInstanceSnapshot(rows_out=1000 + index)},
            query=QuerySnapshot(
                4,
                (
                    files("offsets/4", f'v1\n{{"batchWatermarkMs":0}}\n{{"logOffset":{7 + index}}}'),
                    files("commits/4", "v1\n{}"),
                ),
            ),
            watermark=1_385_856_000_000 + index * 1000,
            output_positions={f"live[{index}]->departures[0]": 9},
        )
        for index in range(3)
        if index != 1
    }
    transaction = {0: (files("transactions/0/part-0.parquet", f"rows not committed before {checkpoint_id}"),)}
    departures = TaskSnapshot(
        stages={
            "departures": StageInstanceSnapshot(),
            "delays": StageInstanceSnapshot(
                transactions=('{"sink":"parquet"}',), rows_out=42, transaction_files=transaction if kind == "savepoint" else {}
            ),
        },
        query=QuerySnapshot(8, (files("state/0/0/9.zip", f"the state of windows at {checkpoint_id}"),)),
        channels=(
            ChannelSnapshot("history[0]->departures[0]", 31, ended="partition"),
            *(
                ChannelSnapshot(
                    f"live[{index}]->departures[0]",
                    9,
                    in_flight=(Segment((files("segments/x.parquet", f"segment {index}"),), 5),),
                )
                for index in range(3)
            ),
        ),
        static=(StaticTableSnapshot("airlines", (Segment((files("segments/airlines.parquet", "the airlines"),), 16),)),),
        watermark=1_385_852_400_000,
    )
    values: dict[str, Any] = {
        "pipeline": "flights",
        "checkpoint_id": checkpoint_id,
        "kind": kind,
        "job_id": "1",
        "run_id": "2f0c9a17",
        "epoch": 1,
        "triggered_at": time.time() - 1.5,
        "completed_at": time.time(),
        "spark_version": "4.3.0",
        "statistics": {"new_bytes": 12.0},
        "stages": (
            StageMetadata("history", 1, ("0",), finished=(0,), fully_finished=True, rows=300_000),
            StageMetadata("live", 3, AIRPORTS, finished=(1,), rows=3003),
            StageMetadata("airlines", 1, ("0",), finished=(0,), fully_finished=True, rows=16),
            StageMetadata("departures", 1, ("0",)),
            StageMetadata("delays", 1, ("0",), rows=42),
        ),
        "chains": (
            ChainMetadata("history", ("history",)),
            ChainMetadata("live", ("live",), live),
            ChainMetadata("airlines", ("airlines",)),
            ChainMetadata("departures", ("departures", "delays"), {0: departures}),
        ),
    }
    return CheckpointMetadata(**{**values, **changes})


@dataclass
class World:
    """The storage of a pipeline called flights, and the command line over it."""

    url: str
    folder: Path
    environment: dict[str, str]
    store: Any
    storage: CheckpointStorage
    ownership: Ownership | None = None
    bytes: int = 0
    threads: list[tuple[threading.Thread, threading.Event]] = field(default_factory=list)

    # The actions of a run

    def run(self, lease_seconds: float = 30.0, resume: bool | None = None) -> World:
        """Begin a run; by default it continues the previous job."""
        resume = self.storage.read_state() is not None if resume is None else resume
        self.ownership = self.storage.acquire(Owner(run_id="2f0c9a17", host="worker-1", pid=7), lease_seconds)
        self.ownership.begin_job(resume=resume)
        return self

    def end(self, status: Any = "CANCELED", **how: Any) -> None:
        assert self.ownership is not None
        self.ownership.end_job(status, **how)
        self.ownership.release()

    def checkpoint(self, checkpoint_id: int, **changes: Any) -> str:
        assert self.ownership is not None
        made = self._metadata(checkpoint_id, "checkpoint", lambda paths: self.storage.upload_files(checkpoint_id, paths), changes)
        location = self.storage.write_metadata(checkpoint_id, self.ownership.epoch, encode(made))
        self.ownership.complete(checkpoint_id, location)
        return location

    def savepoint(self, checkpoint_id: int, name: str = "nightly", target: str = "", stops: bool = False, **changes: Any) -> str:
        assert self.ownership is not None
        self.ownership.reserve(checkpoint_id)
        directory = self.storage.savepoint_directory(checkpoint_id, name, target)
        made = self._metadata(checkpoint_id, "savepoint", directory.upload_files, changes)
        sizes = {f.sha256: f.size for f in self.files.values()}
        location = directory.write_metadata(encode(made), sizes)
        if stops:
            self.ownership.complete(checkpoint_id, location, kind="savepoint")
        return location

    def _metadata(
        self, checkpoint_id: int, kind: str, upload: Callable[[dict[str, Path]], dict[str, StoredFile]], changes: dict[str, Any]
    ) -> CheckpointMetadata:
        texts: dict[str, str] = {}

        def note(path: str, text: str) -> StateFile:
            texts[text] = path
            return StateFile(path, "0" * 64, 0)

        metadata_of(checkpoint_id, kind, note)
        if kind == "checkpoint":  # only savepoints hold files of transactions
            texts = {text: path for text, path in texts.items() if not path.startswith("transactions/")}
        folder = self.folder / uuid4().hex
        folder.mkdir()
        paths = {}
        for number, text in enumerate(texts):
            paths[text] = folder / str(number)
            paths[text].write_text(text)
        stored = upload(paths)
        self.files = {text: StateFile(texts[text], found.sha256, found.size, found.stored_by) for text, found in stored.items()}
        self.bytes = sum({file.sha256: file.size for file in self.files.values()}.values())

        def look_up(path: str, text: str) -> StateFile:
            found = self.files.get(text)
            return msgspec.structs.replace(found, path=path) if found else StateFile(path, "0" * 64, 0)

        return metadata_of(checkpoint_id, kind, look_up, **changes)

    def status(self, **changes: Any) -> PipelineStatus:
        assert self.ownership is not None
        live = tuple(
            InstanceStatus(name=name, state="FINISHED" if name == "JFK" else "RUNNING", end_of_data=name == "JFK", caught_up=True,
                           watermark_ms=1_385_856_000_000)
            for name in AIRPORTS
        )  # fmt: skip
        values: dict[str, Any] = {
            "pipeline": "flights",
            "run_id": "2f0c9a17",
            "epoch": self.ownership.epoch,
            "job_id": self.ownership.job_id,
            "phase": "running",
            "sequence": 1,
            "updated_at": datetime.now(UTC),
            "started_at": NOW,
            "roots": ("live",),
            "chains": (("history",), ("live",), ("airlines",), ("departures", "delays")),
            "stages": (
                StageStatus(name="history", finished=True, rows=300_000, instances=(InstanceStatus(name="0", state="FINISHED"),)),
                StageStatus(name="live", finished=False, rows=3003, instances=live),
                StageStatus(name="airlines", finished=True, rows=16, instances=(InstanceStatus(name="0", state="FINISHED"),)),
                StageStatus(name="departures", finished=False, instances=(InstanceStatus(name="0", state="RUNNING"),)),
                StageStatus(
                    name="delays",
                    finished=False,
                    rows=42,
                    instances=(InstanceStatus(name="0", state="RUNNING", watermark_ms=1_385_852_400_000),),
                ),
            ),
            "pending": (
                PendingStatus(
                    checkpoint_id=44,
                    kind="savepoint",
                    acknowledged=2,
                    expected=3,
                    seconds=1.5,
                    waits_for=("departures + delays",),
                ),
            ),
            "last_checkpoint": CompletedCheckpointStatus(
                checkpoint_id=42,
                location="checkpoints/chk-42-1",
                completed_at=datetime.now(UTC) - timedelta(seconds=12),
                duration=0.8,
                new_bytes=1_500_000,
                total_bytes=48_000_000,
                parts=(
                    VertexPart(stages=("live",), acknowledged_after=0.1),
                    VertexPart(
                        stages=("departures", "delays"),
                        acknowledged_after=0.7,
                        alignment_seconds=0.5,
                        sync_seconds=0.2,
                        async_seconds=0.1,
                    ),
                ),
            ),
            "last_failure": FailureStatus(
                checkpoint_id=41,
                reason="CHECKPOINT_EXPIRED",
                message="not complete within 600 s",
                failed_at=datetime.now(UTC) - timedelta(minutes=5),
            ),
            "checkpoints": CheckpointCountsStatus(
                triggered=41, completed=39, failed=1, savepoints=2, duration_p50=0.3, duration_p99=0.9, duration_max=4.0
            ),
            "stop": None,
        }
        status = PipelineStatus(**{**values, **changes})
        write_status(self.storage, status)
        return status

    def stopping(self, drain: bool = False) -> StopStatus:
        return StopStatus(request_id="stop-1", drain=drain, state="WAITING_FOR_SAVEPOINT")

    def answering(self, answer: Callable[[ControlRequest], Answer | None]) -> list[ControlRequest]:
        """An owner that answers requests, until the end of the test. Returns the list of the requests that it has read."""
        assert self.ownership is not None
        ownership, stopped, seen = self.ownership, threading.Event(), []
        box = RequestBox(self.storage.store, self.storage.layout)

        def serve() -> None:
            while not stopped.wait(0.02):
                for request in box.open_requests(ownership.epoch):
                    if request not in seen:
                        seen.append(request)
                    given = answer(request)
                    if given is not None:
                        box.answer(given)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.threads.append((thread, stopped))
        return seen

    def close(self) -> None:
        for thread, stopped in self.threads:
            stopped.set()
            thread.join(30)
        self.storage.close()

    # The command line

    def cli(self, *arguments: str, code: int = 0, **options: Any) -> Result:
        """Run a command; its exit code is checked."""
        storage_option = ("--storage", self.url) if not any(a.startswith("--storage") for a in arguments) else ()
        result = CliRunner().invoke(app, [arguments[0], *storage_option, *arguments[1:]], env=self.environment, **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.cli(*arguments, "--json", code=code).stdout)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[EmbeddedS3]:
    with EmbeddedS3() as server:
        yield server


def make_world(url: str, folder: Path, environment: dict[str, str], store: Any) -> World:
    folder.mkdir(exist_ok=True)
    clean = {"CHECKPOINT_STORAGE": "", "DAGSTER_HOME": "", "COLUMNS": "160", **environment}
    return World(url, folder, clean, store, CheckpointStorage(store, "flights"))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    url = str(tmp_path / "storage")
    world = make_world(url, tmp_path / "work", {}, open_store(url))
    yield world
    world.close()


@pytest.fixture
def on_s3(tmp_path: Path, s3_server: EmbeddedS3) -> Iterator[World]:
    url = f"{s3_server.url}/root-{uuid4().hex}"
    world = make_world(url, tmp_path / "work", s3_server.environment, open_store(url, s3_server.client()))
    yield world
    world.close()
    s3_server.heal()


@pytest.fixture(params=["local", "s3"])
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue("local" if request.param == "local" else "on_s3")
    return found
