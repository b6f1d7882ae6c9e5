"""The file of a run's trace: its name, and errors when it cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dagster_checkpoints.execution.trace import about, read
from dagster_checkpoints.spark.errors import TraceError
from dagster_checkpoints.spark.job.trace_file import TraceFile, check_trace_folder, recording

LOG = logging.getLogger("test")


def test_a_run_has_a_file_named_after_it_and_its_epoch(tmp_path: Path) -> None:
    with recording(tmp_path, "flights", "run/1", 7, LOG) as recorder:
        assert recorder is not None
        written = (tmp_path / "flights" / "run_1-e7.trace").read_text()  # at once, not at the end
    lines = written.splitlines()
    assert {name: about(lines[0])[name] for name in ("pipeline", "run", "epoch")} == {
        "pipeline": "flights",
        "run": "run/1",
        "epoch": "7",
    }
    assert list(read(lines)) == []


def test_without_a_folder_nothing_is_recorded() -> None:
    with recording(None, "flights", "r", 1, LOG) as recorder:
        assert recorder is None


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=r"expected to write the run's trace below .*file/flights.*setting 'trace'"):
        check_trace_folder(tmp_path / "file", "flights")
    check_trace_folder(tmp_path / "new", "flights")
    assert list((tmp_path / "new" / "flights").iterdir()) == []


def test_a_trace_that_can_no_longer_be_written_ends_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(tmp_path / "x.trace", LOG)
    file.write("one")
    file._file.close()
    file._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - what a full disk does
    file.write("two")
    file.write("three")
    file.close()
    assert [record.getMessage().split(" ends here")[0] for record in caplog.records] == [f"The trace {tmp_path / 'x.trace'}"]
    assert (tmp_path / "x.trace").read_text() == "one\n"


def test_a_trace_file_that_cannot_be_created_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flights").write_text("")
    with recording(tmp_path, "flights", "r", 1, LOG) as recorder:
        assert recorder is None
    assert "continues without one" in caplog.text
