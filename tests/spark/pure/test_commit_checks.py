"""Uncommitted rows that are held for checks: which rows a check sees, and when their files are released. No Spark is started."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.pipeline import CheckEvaluation, CommitCheckResult, commit_check
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.tasks.commit_checks import CheckedRows, CommitChecks


@commit_check(blocking=True)
def what(rows: Any) -> CommitCheckResult:
    return CommitCheckResult(True, " ".join(rows))


class Rows:
    """Batches of one file each; a check sees the files' names."""

    def __init__(self, folder: Path, *checks: Any, sample_rows: int = 0) -> None:
        self.folder = folder
        self.checks = CommitChecks(checks, "left", sample_rows, self.read)

    @staticmethod
    def read(files: Sequence[Any]) -> Any:
        assert all(file.exists() for file in files)
        return [file.name for file in files]

    def write(self, name: str, batch_id: int) -> None:
        file = self.folder / name
        pq.write_table(pa.table({"id": [1, 2, 3], "name": [name] * 3}), file)
        segment = SegmentFiles((file,), 3, (file.stat().st_size,))
        segment.hold()  # the channels' writer, for as long as it calls the sink
        self.checks.add(segment, batch_id, [file])
        segment.release()

    def seen(self, checkpoint_id: int) -> str | None:
        [evaluation] = self.checks.evaluate(checkpoint_id) or [None]
        return evaluation and evaluation.result.description

    @property
    def kept(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path, what)


def test_a_check_sees_the_rows_since_the_last_commit(rows: Rows) -> None:
    assert rows.seen(1) is None, "nothing was written"
    rows.write("a", 0)
    rows.write("b", 1)
    assert rows.seen(2) == "a b"
    rows.write("c", 2)
    assert rows.seen(3) == "a b c", "checkpoint 2 has not completed"
    assert rows.checks.committed(2).checks == (CheckEvaluation("what", "left", 2, True, CommitCheckResult(True, "a b")),)
    assert rows.kept == ["c"]
    assert rows.seen(4) == "c"
    assert rows.checks.committed(4).checks[0].result.description == "c"
    assert rows.kept == []
    assert rows.seen(5) is None
    assert rows.checks.committed(5) == CheckedRows()


def test_a_batch_that_is_written_again_replaces_itself(rows: Rows) -> None:
    rows.write("a", 0)
    rows.write("again", 0)
    assert rows.kept == ["again"]
    assert rows.seen(1) == "again"


def test_a_check_that_raises_loses_no_rows(tmp_path: Path) -> None:
    answers: list[Exception | None] = [ValueError("no"), None]

    @commit_check
    def raises(rows: Any) -> CommitCheckResult:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return CommitCheckResult(True, " ".join(rows))

    rows = Rows(tmp_path, raises)
    rows.write("a", 0)
    with pytest.raises(ValueError, match="no"):
        rows.seen(1)
    rows.write("b", 1)
    assert rows.seen(2) == "a b"


def test_all_is_released_at_the_end(rows: Rows) -> None:
    rows.write("a", 0)
    rows.seen(1)
    rows.write("b", 1)
    rows.checks.close()
    rows.checks.close()
    assert rows.kept == []


def test_a_sample_needs_no_check_and_holds_no_file(tmp_path: Path) -> None:
    rows = Rows(tmp_path, sample_rows=2)
    rows.write("a", 0)
    assert rows.kept == []
    assert rows.checks.evaluate(1) == ()
    assert rows.checks.committed(1).sample == ({"id": 1, "name": "a"}, {"id": 2, "name": "a"})


def test_a_sample_shows_values_that_python_does_not_have(tmp_path: Path) -> None:
    """Malformed input has them: bytes of a message that are no UTF-8, times after the year 9999."""
    data = pa.array([b"caf\xe9", b"text", None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    at = pa.array([2**58, 0, None], pa.timestamp("us", "UTC"))
    columns = {
        "text": text,
        "at": at,
        "day": pa.array([2**30, 0, None], pa.int32()).view(pa.date32()),
        "nested": pa.StructArray.from_arrays([text, at], ["text", "at"]),
        "number": pa.array([1, 2, 3]),
    }
    file = tmp_path / "batch.parquet"
    pq.write_table(pa.table(columns), file)
    rows = Rows(tmp_path, sample_rows=3)
    rows.checks.add(SegmentFiles((file,), 3, (1,)), 0, [file])
    rows.checks.evaluate(1)
    first, second, third = rows.checks.committed(1).sample
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert second == {"text": "text", "at": epoch, "day": date(1970, 1, 1), "nested": {"text": "text", "at": epoch}, "number": 2}
    assert third == {"text": None, "at": None, "day": None, "nested": {"text": None, "at": None}, "number": 3}
    assert (first["text"], first["at"], first["number"]) == ("caf\ufffd", "11103-08-29 17:22:31.711744Z", 1)
    assert "value out of range" in first["day"] and "caf\ufffd" in first["nested"] and first["at"] in first["nested"]
