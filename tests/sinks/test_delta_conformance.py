"""DeltaSink passes the suite that every sink has to pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.sinks import DeltaSink
from dagster_checkpoints.testing import SinkConformance
from tests.sinks.suites import ReplacesByKey, ReplacesPartitions, TargetConformance

OTHER = "of another program"


class DeltaRows(SinkConformance):
    settings: ClassVar[dict[str, Any]] = {}

    def make_sink(self, folder: Path) -> DeltaSink:
        return DeltaSink(folder / "table", **self.settings)

    def read(self, folder: Path) -> Sequence[int]:
        if not DeltaTable.is_deltatable(str(folder / "table")):
            return []
        return [row["n"] for row in DeltaTable(folder / "table").to_pyarrow_table().to_pylist()]


class TestDeltaSink(TargetConformance, DeltaRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 8


class TestDeltaSinkThatReplaces(DeltaRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 2
    settings: ClassVar[dict[str, Any]] = {"at_new_start": "replace"}


class TestDeltaSinkByKey(ReplacesByKey, DeltaRows):
    """Every row replaces a row of another program, so that each commit writes files again."""

    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 4

    def make_sink(self, folder: Path) -> DeltaSink:
        others = [*range(60), *range(1_000_000, 1_000_060)]
        rows = pa.table({"n": pa.array(others, pa.int64()), "text": [OTHER] * len(others)})
        write_deltalake(folder / "table", rows, mode="ignore")
        return super().make_sink(folder)

    def read(self, folder: Path) -> Sequence[int]:
        rows = DeltaTable(folder / "table").to_pyarrow_table().to_pylist()
        assert sorted({row["n"] for row in rows}) == sorted(row["n"] for row in rows)
        assert len(rows) == 120
        return [row["n"] for row in rows if row["text"] != OTHER]


class TestDeltaSinkByKeyThatReplaces(ReplacesByKey, DeltaRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 1
    settings: ClassVar[dict[str, Any]] = {"key": ["text", "n"], "at_new_start": "replace"}


class TestDeltaSinkOfPartitions(ReplacesPartitions, DeltaRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 2
