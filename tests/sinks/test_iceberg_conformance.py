"""IcebergSink passes the suite that every sink has to pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError

from dagster_checkpoints.sinks import IcebergSink
from dagster_checkpoints.testing import SinkConformance
from tests.sinks.suites import ReplacesByKey, ReplacesPartitions, TargetConformance


class IcebergRows(SinkConformance):
    settings: ClassVar[dict[str, Any]] = {}

    def make_sink(self, folder: Path) -> IcebergSink:
        return IcebergSink("lake.rows", warehouse=folder, **self.settings)

    def read(self, folder: Path) -> Sequence[int]:
        if not (folder / "catalog.db").exists():
            return []
        catalog = load_catalog("default", type="sql", uri=f"sqlite:///{folder}/catalog.db")
        try:
            return [row["n"] for row in catalog.load_table("lake.rows").scan().to_arrow().to_pylist()]
        except NoSuchTableError:
            return []
        finally:
            catalog.close()


class TestIcebergSink(TargetConformance, IcebergRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 3


class TestIcebergSinkThatReplaces(IcebergRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 1
    settings: ClassVar[dict[str, Any]] = {"at_new_start": "replace"}


class TestIcebergSinkOfPartitions(ReplacesPartitions, IcebergRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 1


class TestIcebergSinkByKey(ReplacesByKey, IcebergRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    crash_points = 1
