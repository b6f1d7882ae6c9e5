"""The directories of savepoints: how long a run keeps them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.errors import CheckpointDiscarded, InvalidStorageUrl
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointDestination, SavepointsInProgress
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.savepoints import SavepointDirectory

PROPERTIES = CheckpointProperties.for_savepoint(request_id="nightly")


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[CheckpointStorage]:
    with CheckpointStorage(LocalStore(tmp_path / "storage"), "flights") as storage:
        storage.acquire(Owner(run_id="run", host="here", pid=1), 600.0)
        yield storage


@pytest.fixture
def savepoints(storage: CheckpointStorage) -> SavepointsInProgress:
    made = SavepointsInProgress(storage)
    made.register("nightly", SavepointDestination("", "nightly"))
    return made


def upload(directory: SavepointDirectory, folder: Path, *names: str) -> dict[str, int]:
    for name in names:
        (folder / name).write_text(name)
    return {file.sha256: file.size for file in directory.upload_files({name: folder / name for name in names}).values()}


def transfers() -> int:
    """Number of transfers that something still refers to."""
    gc.collect()
    return sum(isinstance(each, Future) for each in gc.get_objects())


def test_a_run_that_takes_savepoints_for_months_keeps_nothing_of_the_complete_ones(
    storage: CheckpointStorage, savepoints: SavepointsInProgress, tmp_path: Path
) -> None:
    directory = savepoints.directory(7, PROPERTIES)
    directory.write_metadata(b"metadata", upload(directory, tmp_path, "a", "b"))
    savepoints.keep(7)
    kept = weakref.ref(directory)
    del directory
    gc.collect()
    assert kept() is None
    savepoints.discard(7)
    assert [each.checkpoint_id for each in storage.list_savepoints()] == [7], "it is the user's"


def test_of_a_failed_savepoint_stays_what_refuses_late_uploads(
    storage: CheckpointStorage, savepoints: SavepointsInProgress, tmp_path: Path
) -> None:
    before = transfers()
    upload(savepoints.directory(7, PROPERTIES), tmp_path, "a", "b")
    savepoints.discard(7)
    assert transfers() == before
    with pytest.raises(CheckpointDiscarded):
        upload(savepoints.directory(7, PROPERTIES), tmp_path, "c")
    assert list(storage.store.list("flights/savepoints/")) == []


@pytest.mark.parametrize(
    ("location", "target", "inside"),
    [
        ("{}/table", "{}/table", True),
        ("{}/table", "{}/table/", True),
        ("{}/table", "{}/table/savepoints/deeper", True),
        ("{}/table", "file://{}/table/savepoints", True),
        ("{}/table", "{}/link/savepoints", True),
        ("{}/table", "{}/tables", False),
        ("{}/table", "{}", False),
        ("s3://lake/table", "s3://lake/table/savepoints", True),
        ("s3://lake/table", "s3://lake/table2", False),
        ("sqlite:///{}/table/main/t", "{}/table", False),
    ],
)
def test_a_savepoint_is_not_made_where_a_sink_writes(
    storage: CheckpointStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, target: str, inside: bool
) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "table")
    stages: Any = [
        SimpleNamespace(name="past", sink=None),
        SimpleNamespace(name="sums", sink=SimpleNamespace(location=location.format(tmp_path))),
    ]
    made = SavepointsInProgress(storage, stages)
    monkeypatch.setattr(storage, "savepoint_directory", lambda *place: SimpleNamespace(check=lambda: None))
    destination = SavepointDestination(target.format(tmp_path), "x")
    if not inside:
        made.check(destination)
        return
    with pytest.raises(InvalidStorageUrl, match=r"in .*table, which is the location of the sink of stage 'sums'.*Name another"):
        made.check(destination)
