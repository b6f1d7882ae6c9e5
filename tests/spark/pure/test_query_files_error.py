"""Spark cannot write a query's files: the error names the directory, and not the user's code."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from dagster_checkpoints.pipeline import StageContext, unbounded_source
from dagster_checkpoints.sinks import SinkUnavailable
from dagster_checkpoints.spark.errors import StageFailedError
from dagster_checkpoints.spark.query.error_text import query_files_error
from dagster_checkpoints.spark.tasks.stage_errors import StageErrors


@unbounded_source
def live(context: StageContext) -> Any: ...


def failed(checkpoint: Path, error: BaseException) -> str:
    """What the stage's failure says of an error of its query."""
    instance: Any = SimpleNamespace(stage=live, call=SimpleNamespace(context=SimpleNamespace(instance=0)))
    found = StageErrors([instance], files=checkpoint).explain(error)
    assert isinstance(found, StageFailedError) and found.__cause__ is error
    return str(found)


FULL = [
    "java.io.IOException: No space left on device",
    "org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device\n\tat java.io.FileOutputStream.write(F.java)",
    "org.rocksdb.RocksDBException: While appending to file: /tmp/x/000012.sst: No space left on device",
    "Job aborted due to stage failure: Lost task 0.0: java.io.IOException: Disk quota exceeded\n",
]


@pytest.mark.parametrize("text", FULL)
def test_a_full_disk_of_spark_is_named_with_the_remedy(text: str, tmp_path: Path) -> None:
    shown = failed(tmp_path, Py4JError(text))
    assert f"below {tmp_path}, or to Spark's own directory (spark.local.dir), found: " in shown
    assert "Free space there, or choose another work_directory" in shown and str(live.location) not in shown


@pytest.mark.parametrize("deleted", [True, False])
def test_a_directory_that_was_deleted_or_replaced_is_named_with_the_remedy(deleted: bool, tmp_path: Path) -> None:
    checkpoint = tmp_path / "live"
    if not deleted:
        checkpoint.write_text("in its place")
    shown = failed(checkpoint, Py4JError("java.io.FileNotFoundException: state/0/0/1.delta"))
    assert f"below {checkpoint}, found: {'it was deleted' if deleted else '[Errno 20] Not a directory'}" in shown
    assert "or choose another work_directory" in shown and str(live.location) not in shown


@pytest.mark.parametrize(
    "text",
    [
        "File file:{file} does not exist",  # of the query's own thread
        "[LOAD]\nCaused by: java.io.FileNotFoundException: File file:{file} does not exist\n\tat x",
        "Job aborted: java.nio.file.NoSuchFileException: {file}\n\tat x",
        "java.io.FileNotFoundException: /else (No such file)\nCaused by: java.io.FileNotFoundException: {file} (No such file)",
    ],
)
def test_a_missing_file_of_the_query_is_named_with_the_remedy(text: str, tmp_path: Path) -> None:
    file = tmp_path / "state/0/1"
    shown = failed(tmp_path, Py4JError(text.format(file=file)))
    assert f"below {tmp_path}, found: " in shown and f"{file}" in shown.partition("found: ")[2] and "/else" not in shown


def test_a_missing_file_that_python_reads_is_named_with_the_remedy(tmp_path: Path) -> None:
    shown = failed(tmp_path, FileNotFoundError(2, "No such file", tmp_path / "offsets/1"))
    assert "work directory cannot be used" in shown and "found: [Errno 2] No such file: " in shown


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "/data/of/a/stage"),
        Py4JError("java.io.FileNotFoundException: File /data/of/a/source does not exist"),
        SinkUnavailable("expected to write to /data, found: java.io.IOException: No space left on device"),
        OSError(errno.ENOSPC, "No space left on device"),
        Py4JError("OSError: [Errno 28] No space left on device"),
        Py4JError("java.io.IOException: Permission denied"),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    assert query_files_error(error, tmp_path) is None and "work directory" not in failed(tmp_path, error)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_users_code_is_not_about_the_directory(tmp_path: Path) -> None:
    error = ValueError("of a stage")
    assert "work directory" not in failed(tmp_path / "deleted", error)
