"""DeltaSink passes the suite that every sink has to pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.sinks import DeltaSink, SinkCannotTakeBack
from dagster_checkpoints.testing import SinkConformance

OTHER = "of another program"


class DeltaRows(SinkConformance):
    settings: ClassVar[dict[str, Any]] = {}

    def make_sink(self, folder: Path) -> DeltaSink:
        return DeltaSink(folder / "table", **self.settings)

    def read(self, folder: Path) -> Sequence[int]:
        if not DeltaTable.is_deltatable(str(folder / "table")):
            return []
        return [row["n"] for row in DeltaTable(folder / "table").to_pyarrow_table().to_pylist()]


class TestDeltaSink(DeltaRows):
    crash_points = 8


class TestDeltaSinkThatReplaces(DeltaRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 2
    settings: ClassVar[dict[str, Any]] = {"at_new_start": "replace"}


class ByKey(DeltaRows):
    older_restore = "rewrites"

    def test_an_older_checkpoint_is_restored(self, tmp_path: Path) -> None:
        """And a savepoint of an abandoned branch is refused: rows between may have been replaced by older ones."""
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        older = job.checkpoint(1)
        job.write(2)
        later = job.checkpoint(2, savepoint=True)
        again = self._job(tmp_path)
        again.start(older, epoch=2)
        assert self._rows(tmp_path) == later.visible
        again.write(1)
        taken = again.checkpoint(4)
        assert self._rows(tmp_path) == later.visible
        with pytest.raises(SinkCannotTakeBack, match="checkpoint 2 "):
            self._job(tmp_path).start(later, epoch=3)
        forward = self._job(tmp_path)
        forward.start(taken, epoch=4)
        forward.write(7)
        assert forward.checkpoint(5).visible == self._rows(tmp_path)


class TestDeltaSinkByKey(ByKey):
    """Every row replaces a row of another program, so that each commit writes files again."""

    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "keep"
    crash_points = 4
    settings: ClassVar[dict[str, Any]] = {"key": "n", "at_new_start": "keep"}

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


class TestDeltaSinkByKeyThatReplaces(ByKey):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "replace"
    crash_points = 1
    settings: ClassVar[dict[str, Any]] = {"key": ["text", "n"], "at_new_start": "replace"}


class TestDeltaSinkOfPartitions(DeltaRows):
    test_a_job_that_is_killed_at_any_moment = None  # in processes/test_killed_sinks.py
    new_start = "keep"
    crash_points = 2
    settings: ClassVar[dict[str, Any]] = {"partition_by": "text", "overwrite_partitions": True, "at_new_start": "keep"}

    def test_a_new_start_after_an_earlier_job(self, tmp_path: Path) -> None:
        """Each row has a partition of its own: what the new job writes again replaces the earlier job's row."""
        job = self._job(tmp_path)
        job.start()
        job.write(5)
        earlier = job.checkpoint(1)
        later = self._job(tmp_path)
        later.sink.check_new_start(later.context(0, epoch=2, job_id=2, attempt=""))
        later.start(None, epoch=2, job_id=2)
        later.write(3)
        later.checkpoint(2)
        assert self._rows(tmp_path) == earlier.visible
