"""The sinks of this package pass the suite that it offers to authors of sinks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.dataset as ds

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
