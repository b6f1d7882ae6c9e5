"""FileSink passes the suite that every sink has to pass: in each format, on a file system and on S3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.json as pa_json

from dagster_checkpoints.sinks import FileSink
from dagster_checkpoints.testing import SinkConformance
from tests.sinks.suites import TargetConformance


class TestParquetFiles(TargetConformance):
    """With a list of files for each commit, since Spark's files are taken as they are: several for each checkpoint."""

    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 8

    def make_sink(self, folder: Path) -> FileSink:
        return FileSink(folder / "rows", manifest=True)

    def read(self, folder: Path) -> Sequence[int]:
        rows: list[int] = []
        for manifest in (folder / "rows/_manifests").glob("*.manifest"):
            files = [str(folder / "rows" / file["path"]) for file in json.loads(manifest.read_text())["files"]]
            rows += ds.dataset(files).to_table()["n"].to_pylist()
        return rows


class TestOrcFiles(SinkConformance):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 4

    def make_sink(self, folder: Path) -> FileSink:
        return FileSink(folder / "rows", "orc")

    def read(self, folder: Path) -> Sequence[int]:
        return _rows(folder, "orc")


class TestCsvFilesThatReplace(TargetConformance):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 4

    def make_sink(self, folder: Path) -> FileSink:
        return FileSink(folder / "rows", "csv", at_new_start="replace")

    def read(self, folder: Path) -> Sequence[int]:
        return _rows(folder, "csv")


class TestJsonFilesBesideEarlierOnes(SinkConformance):
    new_start = "keep"
    crash_points = 4

    def make_sink(self, folder: Path) -> FileSink:
        return FileSink(folder / "rows", "json", at_new_start="keep")

    def read(self, folder: Path) -> Sequence[int]:
        return [n for file in (folder / "rows").glob("*.json") for n in pa_json.read_json(file)["n"].to_pylist()]


def _rows(folder: Path, format: str) -> list[int]:
    files = [str(file) for file in (folder / "rows").glob(f"*.{format}")]
    if not files:
        return []
    table = ds.dataset(files, format=format).to_table()
    return table["n"].to_pylist() if "n" in table.column_names else []
