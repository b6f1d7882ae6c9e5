"""The sinks of this package pass the suite that it offers to authors of sinks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from dagster_checkpoints.sinks import ParquetSink
from tests.sinks.suites import TargetConformance


class TestParquetSink(TargetConformance):
    def make_sink(self, folder: Path) -> ParquetSink:
        return ParquetSink(folder / "table")

    def read(self, folder: Path) -> Sequence[int]:
        committed = sorted((folder / "table").glob("checkpoint=*/*.parquet"))
        return ds.dataset([str(file) for file in committed], format="parquet").to_table()["n"].to_pylist() if committed else []


class TestParquetSinkThatReplaces(TestParquetSink):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 4

    def make_sink(self, folder: Path) -> ParquetSink:
        return ParquetSink(folder / "table", at_new_start="replace")


def test_the_suite_notices_readers_that_fail_at_some_moment(tmp_path: Path) -> None:
    suite = TestParquetSink()

    def read(folder: Path) -> Sequence[int]:
        rows = TestParquetSink.read(suite, folder)
        if rows and threading.current_thread() is not threading.main_thread():
            raise FileNotFoundError("a file that a commit has just moved")
        return rows

    suite.read = read  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"expected a reader at every moment(.|\n)*a file that a commit has just moved"):
        suite.test_readers_see_whole_checkpoints_at_every_moment(tmp_path)
