"""The transactions of a task's sink in a savepoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import FileSink, ParquetSink, SinkContext, SinkError, TwoPhaseCommitSink
from dagster_checkpoints.spark.tasks.task_sink import TaskSink
from tests.sinks.staged_files import BATCH, Folder, context, numbers


def task(sink: TwoPhaseCommitSink, folder: Path) -> TaskSink:
    unused: Any = None
    return TaskSink(sink, context(), unused, unused, folder)


@pytest.mark.parametrize("kind", [FileSink, ParquetSink])
@pytest.mark.parametrize("linked", [True, False])
def test_pinned_files_outlive_the_commit_and_no_files_make_no_folder(
    tmp_path: Path, kind: type[FileSink], linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pins = Folder(tmp_path, kind), tmp_path / "pins"
    sink = task(folder.sink(), tmp_path)
    sink.open(None)
    assert sink.pre_commit(1) == () and sink.pin_transactions(pins) == {}
    assert not pins.exists()
    for checkpoint_id in (2, 3):  # of which one is pending when the savepoint is taken
        sink._sink.write(BATCH, [folder.file(numbers(checkpoint_id))], checkpoint_id)
        sink.pre_commit(checkpoint_id)

    def other_device(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        if not linked:
            patch.setattr(os, "link", other_device)
        pinned = sink.pin_transactions(pins)
    sink.commit_up_to(3)
    found = [
        [pq.read_table(file)["n"].to_pylist() for name, file in each.items() if "json" not in name] for each in pinned.values()
    ]
    assert found == [[[2]], [[3]]] and sink.pin_transactions(pins) == {}


class Rows(TwoPhaseCommitSink):
    """A sink whose transactions are not files, or have invalid names."""

    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self.files = files
        self.committed: list[str] = []

    def open(self, context: SinkContext) -> None: ...
    def write(self, batch: Any, files: Sequence[str], batch_id: int) -> None: ...
    def pre_commit(self, checkpoint_id: int) -> str:
        return f"t{checkpoint_id}"

    def commit(self, transaction: str) -> None:
        self.committed.append(transaction)

    def abort(self, transaction: str) -> None: ...
    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        for transaction in committed:
            self.commit(transaction)

    def start_new(self) -> None: ...
    def close(self) -> None: ...
    def transaction_files(self, transaction: str) -> Mapping[str, Path]:
        return super().transaction_files(transaction) if self.files is None else self.files


def test_a_sink_without_files_needs_neither_method(tmp_path: Path) -> None:
    rows = Rows()
    sink = task(rows, tmp_path)
    sink.open((), None)
    assert sink.pre_commit(1) == ("t1",)
    assert sink.pin_transactions(tmp_path / "pins") == {}
    again = task(rows, tmp_path)
    again.open(("t1",), 1, {0: {"file": tmp_path}})
    assert rows.committed == ["t1"]


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "ä"])
def test_names_that_cannot_be_paths_are_refused(tmp_path: Path, name: str) -> None:
    sink = task(Rows({name: tmp_path}), tmp_path)
    sink.open(None)
    sink.pre_commit(1)
    with pytest.raises(SinkError, match="name files by letters"):
        sink.pin_transactions(tmp_path / "pins")
