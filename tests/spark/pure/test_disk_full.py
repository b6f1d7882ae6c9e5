"""A disk that is full while Spark writes a query's files: the error names the directory, and not the user's code."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from dagster_checkpoints.pipeline import StageContext, unbounded_source
from dagster_checkpoints.sinks import SinkUnavailable
from dagster_checkpoints.spark.query.error_location import located
from dagster_checkpoints.spark.query.error_text import DiskFull
from dagster_checkpoints.spark.query.query import TaskQuery


def failure(raised: BaseException, of_batch: BaseException | None = None) -> BaseException | None:
    query: Any = object.__new__(TaskQuery)
    query._query = SimpleNamespace(isActive=False, exception=lambda: raised)
    query._closing, query._gate, query.error, query.checkpoint = False, None, of_batch, Path("/scratch/flights/live")
    found: BaseException | None = query.failure()
    return found


FULL = [
    "java.io.IOException: No space left on device",
    "org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device\n\tat java.io.FileOutputStream.write(F.java)",
    "org.rocksdb.RocksDBException: While appending to file: /tmp/x/000012.sst: No space left on device",
    "Job aborted due to stage failure: Lost task 0.0: java.io.IOException: Disk quota exceeded\n",
]


@pytest.mark.parametrize("text", FULL)
@pytest.mark.parametrize("in_batch", [False, True])
def test_a_full_disk_of_spark_is_named_with_the_remedy(text: str, in_batch: bool) -> None:
    @unbounded_source
    def live(context: StageContext) -> Any: ...

    error = Py4JError(text)
    found = failure(RuntimeError("of the query"), error) if in_batch else failure(error)
    assert isinstance(found, DiskFull) and found.__cause__ is error
    shown = located(found, live)
    assert "below /scratch/flights/live, or to Spark's own directory (spark.local.dir), found: " in shown
    assert "Free space there, or choose another work_directory" in shown and str(live.location) not in shown


@pytest.mark.parametrize(
    "error",
    [
        SinkUnavailable("expected to write to /data, found: java.io.IOException: No space left on device"),
        OSError(errno.ENOSPC, "No space left on device"),
        Py4JError("OSError: [Errno 28] No space left on device"),
        Py4JError("java.io.IOException: Permission denied"),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert failure(error) is error
