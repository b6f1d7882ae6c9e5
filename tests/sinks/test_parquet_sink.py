"""ParquetSink: commits are directories, and its settings. What it promises beside: `test_local_files.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from dagster_checkpoints.pipeline import Pipeline, PipelineDefinitionError, bounded_source
from dagster_checkpoints.sinks import (
    InvalidSinkPath,
    ParquetSink,
    ReservedSinkColumn,
    SinkCannotTakeBack,
    SinkTransactionConflict,
    SinkTransactionLost,
)
from tests.sinks.staged_files import BATCH, Folder, context, numbers


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, ParquetSink)


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_commit_is_a_directory_whose_name_readers_see_as_a_column(folder: Folder) -> None:
    sink = folder.opened()
    folder.commit(sink, 42, numbers(1), numbers(2))
    folder.commit(folder.opened(as_=context(epoch=2, history="other"), at_new_start="keep"), 1, numbers(3))
    assert {name for name in names(folder.path) if name[0] != "."} == {"checkpoint=42-job1-0", "checkpoint=1-job1.other-0"}
    table = ds.dataset(folder.path, format="parquet", partitioning="hive").to_table()
    assert sorted(zip(table["n"].to_pylist(), table["checkpoint"].to_pylist(), strict=True)) == [
        (1, "42-job1-0"), (2, "42-job1-0"), (3, "1-job1.other-0")
    ]  # fmt: skip


def test_a_new_start_that_crashed_half_way_is_completed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = folder.opened()
    for number in range(1, 5):
        folder.commit(sink, number, numbers(number))
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=3)
    (folder.path / "checkpoint=notes").mkdir()
    rename, moved = os.rename, []

    def crashing(source: Path, target: Path) -> None:
        rename(source, target)
        moved.append(source)
        if len(moved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", crashing)
        folder.opened(as_=context(job=2, epoch=3), at_new_start="replace")
    assert len(folder.numbers()) == 1
    folder.opened(as_=context(job=2, epoch=4), at_new_start="replace")
    assert names(folder.path) == {"checkpoint=notes", ".staging", ".sink.json", ".commits", ".ledgers", ".taken-back"}
    assert not names(folder.path / ".commits") and not names(folder.path / ".taken-back")


def test_directories_of_later_checkpoints_may_be_deleted_before_a_restore(folder: Folder) -> None:
    sink = folder.opened()
    for number in (1, 2):
        folder.commit(sink, number, numbers(number))
    shutil.rmtree(folder.path / "checkpoint=2-job1-0")
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    assert folder.numbers() == [1]
    with pytest.raises(SinkTransactionLost, match="found no checkpoint=2-job1-0"):
        folder.opened(as_=context(epoch=3), new=False).recover([], restored=2)


def test_a_transaction_of_which_files_are_gone_is_refused_before_its_checkpoint_completes(folder: Folder) -> None:
    sink = folder.opened()
    sink.write(BATCH, [folder.file(numbers(1))], 1)
    folder.hidden[0].unlink()
    with pytest.raises(SinkTransactionLost, match=r"found no \.staging/delays-0/e1\.h1-a1-000000 with files of \d+ bytes"):
        folder.staged(sink, 2, numbers(2))


@pytest.mark.parametrize("brought", [True, False])
def test_rows_that_are_there_though_the_ledger_was_deleted_are_not_doubled(folder: Folder, tmp_path: Path, brought: bool) -> None:
    sink = folder.opened()
    transaction = folder.staged(sink, 1, numbers(1))
    saved = {name: Path(shutil.copy(file, tmp_path / name)) for name, file in sink.transaction_files(transaction).items()}
    sink.commit(transaction)
    shutil.rmtree(folder.path / ".ledgers")  # as the error of one that cannot be read advises
    again = folder.opened(as_=context(epoch=2), new=False)
    if brought:
        again.restore_transaction(transaction, saved)
    again.recover([transaction])
    assert folder.hidden == [] and folder.numbers() == [1]


def test_an_older_restore_does_not_double_rows_of_which_the_records_were_deleted(folder: Folder) -> None:
    sink = folder.opened()
    for number in (1, 2):
        folder.commit(sink, number, numbers(number))
    shutil.rmtree(folder.path / ".commits")
    folder.opened(as_=context(epoch=2), new=False).recover([], restored=1)
    assert folder.numbers() == [1]
    folder.opened(as_=context(epoch=3), new=False).recover([], restored=2)
    assert folder.numbers() == [1, 2]
    shutil.rmtree(folder.path / ".ledgers")
    with pytest.raises(SinkCannotTakeBack, match="after checkpoint 1, found rows of checkpoint 2 that it does not name"):
        folder.opened(as_=context(epoch=4), new=False).recover([], restored=1)
    folder.opened(as_=context(epoch=5), new=False).recover([], restored=2)
    assert folder.numbers() == [1, 2]


def test_other_rows_where_a_transactions_rows_belong_are_a_conflict(folder: Folder) -> None:
    folder.commit(folder.opened(), 1, numbers(1))
    shutil.rmtree(folder.path / ".ledgers")
    again = folder.opened(as_=context(epoch=2), new=False)
    transaction = folder.staged(again, 1, numbers(2))  # a file of the same size
    with pytest.raises(SinkTransactionConflict, match=r"checkpoint=1-job1-0 .*00000-e2\.h1.*other files \(00000-e1\.h1"):
        again.commit(transaction)
    assert folder.numbers() == [1]


def test_rows_with_the_sinks_own_column_are_refused(folder: Folder) -> None:
    with pytest.raises(ReservedSinkColumn, match=r"'delays'.*'Checkpoint'.*rename"):
        folder.opened().write(BATCH, [folder.file(pa.table({"n": [1], "Checkpoint": [1]}))], 0)


def test_the_sink_does_not_load_spark() -> None:
    code = "import sys, dagster_checkpoints.sinks; sys.exit('pyspark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "bad", ["s3://bucket/table", "hdfs://host/x", "s3a://b", "dbfs:/x", "s3:b", "S3://b", "file:x", "file://host/x", "", "  "]
)
def test_paths_that_cannot_be_renamed_in_are_refused(bad: str) -> None:
    with pytest.raises(InvalidSinkPath, match="local or mounted file system"):
        ParquetSink(bad)


def test_paths_may_be_urls_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ParquetSink(f"file://{tmp_path}/a%20b").path == tmp_path / "a b"
    monkeypatch.chdir(tmp_path)
    relative = ParquetSink("table")
    monkeypatch.chdir("/")
    assert relative.path == tmp_path / "table"


def test_all_spellings_of_a_directory_have_one_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    written = [
        tmp_path / "real" / "table",
        f"{tmp_path}/real/table/",
        f"{tmp_path}/real/other/../table",
        "real//table",
        "link/table",
        f"file://{tmp_path}/link/table",
    ]
    assert {ParquetSink(path).location for path in written} == {str((tmp_path / "real" / "table").resolve())}
    inside = [bounded_source(sink=ParquetSink(path), name=name)(_reads) for name, path in (("a", "link/t/x"), ("b", "real/t"))]
    with pytest.raises(PipelineDefinitionError, match=r"(?s)'b'.*real/t,.*'a'.*real/t/x, which is inside the other"):
        Pipeline("p", inside)


def _reads(context: Any) -> Any:
    return None
