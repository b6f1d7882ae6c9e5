"""ParquetSink: rows become visible exactly once, after any crash."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.pipeline import Pipeline, PipelineDefinitionError, bounded_source
from dagster_checkpoints.sinks import (
    InvalidSinkPath,
    ParquetSink,
    ReservedSinkColumn,
    SinkCommit,
    SinkContext,
    SinkHoldsEarlierRows,
    SinkNotOpen,
    SinkPathInUse,
    SinkTransactionConflict,
    SinkTransactionLost,
    UnreadableSinkTransaction,
)

BATCH: Any = SimpleNamespace(columns=["n"])


def _context(**changes: Any) -> SinkContext:
    values: dict[str, Any] = {
        "pipeline": "flights",
        "stage": "delays",
        "instance": "0",
        "index": 0,
        "parallelism": 1,
        "job_id": 1,
        "attempt": "a1",
    }
    return SinkContext(**{**values, **changes})


def _opened(path: Path, at_new_start: Any = "refuse", **changes: Any) -> ParquetSink:
    sink = ParquetSink(path, at_new_start)
    sink.open(_context(**changes))
    return sink


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def segment(tmp_path: Path) -> Any:
    """Writes rows as a Parquet file of a micro-batch, as the runtime does."""
    count = iter(range(10**6))

    def write(*rows: int) -> str:
        (tmp_path / "work").mkdir(exist_ok=True)
        file = tmp_path / "work" / f"segment-{next(count)}.snappy.parquet"
        pq.write_table(pa.table({"n": pa.array(rows, pa.int64())}), file)
        return str(file)

    return write


def _rows(path: Path) -> list[int]:
    """The rows that a reader of the table sees."""
    table = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    return sorted(table["n"].to_pylist()) if "n" in table.column_names else []


def _staged(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path / ".staging")) for p in (path / ".staging").glob("*/*"))


def _checkpoint(sink: ParquetSink, checkpoint_id: int) -> str:
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    return transaction


def test_the_constructor_touches_nothing(path: Path) -> None:
    sink = ParquetSink(path)
    assert not path.exists()
    copy = pickle.loads(pickle.dumps(sink))
    assert (copy.path, copy.at_new_start) == (sink.path, sink.at_new_start)
    assert not path.exists()


def test_rows_are_visible_after_the_commit_and_not_before(path: Path, segment: Any) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1, 2), segment(3)], 0)
    sink.write(BATCH, ["file://" + segment(4)], 1)
    transaction = _checkpoint(sink, 42)
    sink.write(BATCH, [segment(5)], 2)
    assert _rows(path) == []
    sink.commit(transaction)
    assert _rows(path) == [1, 2, 3, 4]
    table = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    assert set(table["checkpoint"].to_pylist()) == {"42-job1-0"}
    sink.commit(_checkpoint(sink, 43))
    assert _rows(path) == [1, 2, 3, 4, 5]


def test_nothing_written_is_nothing_to_commit(path: Path, segment: Any) -> None:
    sink = _opened(path)
    assert sink.pre_commit(1) is None
    sink.write(BATCH, [], 0)
    assert sink.pre_commit(2) is None
    sink.write(BATCH, [segment(1)], 1)
    sink.commit(_checkpoint(sink, 3))
    assert sink.pre_commit(4) is None


def test_the_work_directory_may_be_deleted_after_a_batch_is_written(path: Path, segment: Any) -> None:
    sink = _opened(path)
    file = segment(1)
    sink.write(BATCH, [file], 0)
    os.unlink(file)
    sink.commit(_checkpoint(sink, 1))
    assert _rows(path) == [1]


def test_files_are_copied_where_links_are_impossible(path: Path, segment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = _opened(path)

    def other_device(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_device)
    sink.write(BATCH, [segment(1)], 0)
    sink.commit(_checkpoint(sink, 1))
    assert _rows(path) == [1]


def test_a_batch_written_again_replaces_itself(path: Path, segment: Any) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1), segment(2)], 7)
    sink.write(BATCH, [segment(9)], 8)
    sink.write(BATCH, [segment(1, 2)], 7)
    sink.commit(_checkpoint(sink, 1))
    assert _rows(path) == [1, 2, 9]


def test_commit_is_idempotent_in_any_process(path: Path, segment: Any) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    transaction = _checkpoint(sink, 1)
    code = (
        "import sys; from dagster_checkpoints.sinks import ParquetSink, SinkContext\nsink = ParquetSink(sys.argv[1])\n"
        "sink.open(SinkContext('flights', 'delays', '0', 0, 1, 1, sys.argv[3]))\nsink.commit(sys.argv[2])"
    )
    for attempt in ("a2", "a3"):
        subprocess.run([sys.executable, "-c", code, str(path), transaction, attempt], check=True, timeout=60)
    size = sum(file.stat().st_size for file in path.glob("checkpoint=1-*/*"))
    assert sink.commit(transaction) == SinkCommit(rows=1, bytes=size, files=1)
    assert _rows(path) == [1]


def test_a_batch_that_is_written_again_counts_once(path: Path, segment: Any) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    sink.write(BATCH, [segment(1), segment(2)], 0)
    done = sink.commit(_checkpoint(sink, 1))
    assert (done.rows, done.files, (done.bytes or 0) > 0) == (2, 2, True)


def test_the_sink_does_not_load_spark() -> None:
    code = "import sys, dagster_checkpoints.sinks; sys.exit('pyspark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_transactions_of_aborted_checkpoints_commit_with_the_next(path: Path, segment: Any) -> None:
    sink = _opened(path)
    pending = []
    for checkpoint_id in (1, 2, 3):
        sink.write(BATCH, [segment(checkpoint_id)], checkpoint_id)
        pending.append(_checkpoint(sink, checkpoint_id))
    for transaction in pending:
        sink.commit(transaction)
    assert _rows(path) == [1, 2, 3]


def test_recovery_commits_what_the_checkpoint_holds_and_aborts_the_rest(path: Path, segment: Any) -> None:
    crashed = _opened(path)
    transactions = []
    for number in (1, 2, 3):
        crashed.write(BATCH, [segment(number)], number)
        transactions.append(_checkpoint(crashed, number))
    crashed.write(BATCH, [segment(4)], 4)  # written, not pre-committed
    crashed.commit(transactions[0])

    recovered = _opened(path, attempt="a2")
    recovered.recover(transactions[:2])
    assert _rows(path) == [1, 2]
    assert _staged(path) == []
    recovered.recover(transactions[:2])
    recovered.write(BATCH, [segment(3, 4)], 3)
    recovered.commit(_checkpoint(recovered, 3))
    assert _rows(path) == [1, 2, 3, 4]
    crashed.write(BATCH, [segment(5)], 5)  # the crashed process continues late
    with pytest.raises(SinkTransactionLost):
        crashed.pre_commit(4)


@pytest.mark.parametrize("crash", ["before the rename", "after the rename"])
def test_a_crash_around_the_commit_is_repaired(path: Path, segment: Any, monkeypatch: pytest.MonkeyPatch, crash: str) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    transaction = _checkpoint(sink, 1)
    rename = os.rename

    def crashing(source: Path, target: Path) -> None:
        if crash == "after the rename":
            rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", crashing)
    with pytest.raises(KeyboardInterrupt):
        sink.commit(transaction)
    monkeypatch.undo()
    _opened(path, attempt="a2").recover([transaction])
    assert _rows(path) == [1]
    assert _staged(path) == []


def test_two_processes_that_commit_the_same_transaction_at_the_same_time(
    path: Path, segment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    transaction = _checkpoint(sink, 1)
    rename = os.rename

    def overtaken(source: Path, target: Path) -> None:
        rename(source, target)  # another program's
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    sink.commit(transaction)
    assert _rows(path) == [1]


def test_a_crash_between_link_and_pre_commit_loses_only_what_is_read_again(
    path: Path, segment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, link, calls = _opened(path), os.link, []

    def crashing(source: Path, target: Path) -> None:
        link(source, target)
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", crashing)
    with pytest.raises(KeyboardInterrupt):
        sink.write(BATCH, [segment(1), segment(2), segment(3)], 0)
    monkeypatch.undo()
    again = _opened(path, attempt="a2")
    again.recover([])
    assert _staged(path) == []
    again.write(BATCH, [segment(1), segment(2), segment(3)], 0)
    again.commit(_checkpoint(again, 1))
    assert _rows(path) == [1, 2, 3]


def test_an_aborted_transaction_is_gone(path: Path, segment: Any) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    transaction = _checkpoint(sink, 1)
    sink.abort(transaction)
    sink.abort(transaction)
    assert _staged(path) == []
    with pytest.raises(SinkTransactionLost, match=r"checkpoint 1, .* found no \.staging/delays-0/"):
        sink.commit(transaction)


def test_closing_keeps_what_is_pre_committed(path: Path, segment: Any) -> None:
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    transaction = _checkpoint(sink, 1)
    sink.write(BATCH, [segment(2)], 1)
    sink.close()
    sink.close()
    assert len(_staged(path)) == 1
    for call in (lambda: sink.write(BATCH, [segment(3)], 2), lambda: sink.commit(transaction)):
        with pytest.raises(SinkNotOpen):
            call()
    _opened(path, attempt="a2").commit(transaction)
    assert _rows(path) == [1]


def test_instances_of_a_stage_share_a_table_and_recover_apart(path: Path, segment: Any) -> None:
    configured = ParquetSink(path)
    sinks = [configured.new_instance() for _ in range(3)]
    transactions = []
    for index, sink in enumerate(sinks):
        sink.open(_context(index=index, parallelism=3, instance=["EWR", "JFK", "LGA"][index]))
        sink.write(BATCH, [segment(index)], 0)
        transactions.append(_checkpoint(sink, 1))
    first = _opened(path, index=0, parallelism=3, attempt="a2")
    first.recover(transactions[:1])
    assert _rows(path) == [0]
    assert len(_staged(path)) == 2
    with pytest.raises(UnreadableSinkTransaction, match=r"instance 1 .*of instance 2"):
        sinks[1].commit(transactions[2])
    for sink, transaction in list(zip(sinks, transactions, strict=True))[1:]:
        sink.commit(transaction)
    assert _rows(path) == [0, 1, 2]


@pytest.mark.parametrize(("choice", "rows"), [("keep", [1, 2, 3]), ("replace", [3])])
def test_a_new_start_treats_earlier_rows_as_configured(path: Path, segment: Any, choice: str, rows: Sequence[int]) -> None:
    for job_id, row in ((1, 1), (2, 2), (3, 3)):
        sink = _opened(path, choice, job_id=job_id, attempt=f"a{job_id}")
        sink.start_new()
        sink.write(BATCH, [segment(row)], 0)
        sink.commit(_checkpoint(sink, 1))
        sink.write(BATCH, [segment(99)], 1)
        _checkpoint(sink, 2)
    assert _rows(path) == rows


@pytest.mark.parametrize(
    ("found", "choice", "error", "expected"),
    [
        ("nothing", "refuse", None, []),
        ("an empty directory", "refuse", None, []),
        ("an aborted job", "refuse", None, []),
        (
            "rows of job 1",
            "refuse",
            SinkHoldsEarlierRows,
            [
                "ParquetSink('{path}'",
                "stage 'delays' of pipeline 'flights'",
                "found rows that job 1 has committed",
                "'refuse' (the default) stops",
                "'keep' leaves",
                "'replace' removes",
                "restore_from",
            ],
        ),
        ("rows of job 1", "keep", None, []),
        ("rows of job 1", "replace", None, []),
        ("rows of job 2", "keep", SinkPathInUse, ["begins job 2", "{path}", "counts its jobs from 1 again"]),
        ("rows of job 2", "replace", SinkPathInUse, ["begins job 2"]),
        (
            "other files",
            "refuse",
            SinkPathInUse,
            ["{path}", "other ones (day=1, part-0.parquet)", "'keep'", "never removes"],
        ),
        ("other files", "replace", SinkPathInUse, ["found other ones"]),
        ("other files", "keep", None, []),
        ("a file", "keep", InvalidSinkPath, ["{path} to be a directory", "found a file"]),
        ("another stage's rows", "keep", SinkPathInUse, ["stage 'arrivals' of pipeline 'flights' writes there"]),
    ],
)
def test_the_check_before_a_new_start(
    path: Path, segment: Any, found: str, choice: Any, error: type[Exception] | None, expected: Sequence[str]
) -> None:
    match found.split():
        case ["an", "empty", "directory"]:
            path.mkdir()
        case ["an", "aborted", "job"]:
            sink = _opened(path)
            sink.write(BATCH, [segment(1)], 0)
            sink.pre_commit(1)
        case ["rows", "of", "job", number]:
            sink = _opened(path, job_id=int(number))
            sink.write(BATCH, [segment(1)], 0)
            sink.commit(_checkpoint(sink, 1))
        case ["other", "files"]:
            path.mkdir()
            for name in ("part-0.parquet", "day=1", "_SUCCESS", ".crc"):
                (path / name).write_text("")
        case ["a", "file"]:
            path.write_text("")
        case ["another", *_]:
            _opened(path, stage="arrivals")
    before = sorted(path.rglob("*"))
    sink = ParquetSink(path, choice)
    next_job = _context(job_id=2, attempt="")
    if error is None:
        sink.check_new_start(next_job)
    else:
        with pytest.raises(error) as caught:
            sink.check_new_start(next_job)
        for part in expected:
            assert part.format(path=path) in str(caught.value), caught.value
    assert sorted(path.rglob("*")) == before, "the check changes nothing"


def test_a_new_start_keeps_its_own_rows_and_foreign_files(path: Path, segment: Any) -> None:
    sink = _opened(path, "replace", parallelism=2)
    sink.start_new()
    sink.write(BATCH, [segment(1)], 0)
    sink.commit(_checkpoint(sink, 1))
    (path / "checkpoint=notes").mkdir()
    (path / "README").write_text("mine")
    late = _opened(path, "replace", index=1, parallelism=2)
    late.start_new()  # another instance of the same job, a little later
    assert _rows(path / "checkpoint=1-job1-0") == [1]
    assert {entry.name for entry in path.iterdir()} == {
        "checkpoint=1-job1-0", "checkpoint=notes", "README", ".staging", ".sink.json", ".commits", ".ledgers"
    }  # fmt: skip


def test_a_new_start_that_crashed_half_way_is_completed(path: Path, segment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = _opened(path, "replace")
    for number in range(4):
        sink.write(BATCH, [segment(number)], number)
        sink.commit(_checkpoint(sink, number))
    rename, moved = os.rename, []

    def crashing(source: Path, target: Path) -> None:
        rename(source, target)
        moved.append(source)
        if len(moved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", crashing)
    starting = _opened(path, "replace", job_id=2, attempt="a2")
    with pytest.raises(KeyboardInterrupt):
        starting.start_new()
    monkeypatch.undo()
    assert len(_rows(path)) == 2
    _opened(path, "replace", job_id=2, attempt="a3").start_new()
    assert {entry.name for entry in path.iterdir()} == {".staging", ".sink.json", ".commits", ".ledgers"}
    assert not list((path / ".commits").iterdir())


def test_resuming_after_a_new_start_removes_nothing(path: Path, segment: Any) -> None:
    sink = _opened(path, "replace")
    sink.start_new()
    sink.write(BATCH, [segment(1)], 0)
    transaction = _checkpoint(sink, 1)
    sink.commit(transaction)
    _opened(path, "replace", attempt="a2").recover([transaction])
    assert _rows(path) == [1]


def test_restoring_an_older_checkpoint_takes_back_later_rows(path: Path, segment: Any) -> None:
    earlier = _opened(path, job_id=1)
    earlier.write(BATCH, [segment(100)], 0)
    earlier.commit(_checkpoint(earlier, 9))
    sinks = [_opened(path, job_id=2, index=index, parallelism=2) for index in (0, 1)]
    transactions = {}
    for number in (1, 2, 3):
        for index, sink in enumerate(sinks):
            sink.write(BATCH, [segment(10 * index + number)], number)
            transactions[number, index] = _checkpoint(sink, number)
            sink.commit(transactions[number, index])
    back = _opened(path, job_id=2, index=0, parallelism=2, attempt="a2")
    back.recover([transactions[1, 0]], restored=1)
    assert _rows(path) == [1, 11, 12, 13, 100]
    back.recover([transactions[1, 0]], restored=1)
    assert _rows(path) == [1, 11, 12, 13, 100]


@pytest.mark.parametrize("other", [{"stage": "other"}, {"pipeline": "other"}])
def test_a_path_of_another_stage_or_pipeline_is_refused(path: Path, other: dict[str, str]) -> None:
    _opened(path)
    _opened(path, index=1)
    with pytest.raises(SinkPathInUse, match=r"'delays' of pipeline 'flights' writes there") as caught:
        _opened(path, **other)
    assert str(path) in str(caught.value)
    assert [entry.name for entry in path.iterdir()] == [".sink.json"]


def test_a_marker_that_cannot_be_read_is_refused(path: Path) -> None:
    path.mkdir()
    (path / ".sink.json").write_text("{")
    with pytest.raises(SinkPathInUse, match="cannot be read"):
        _opened(path)


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


@pytest.mark.parametrize(
    ("settings", "error", "expected"),
    [
        ({"at_new_start": "upsert"}, ValueError, ["'refuse', 'keep' or 'replace'", "'upsert'"]),
        ({"at_new_start": "append"}, ValueError, ["Write at_new_start='keep'"]),
        ({"mode": "append"}, TypeError, ["mode='append'", "Write at_new_start='keep'"]),
        ({"mode": "overwrite"}, TypeError, ["mode='overwrite'", "Write at_new_start='replace'"]),
        ({"at_new_strat": "keep"}, TypeError, ["path and at_new_start", "at_new_strat"]),
        ({"mode": "upsert"}, TypeError, ["mode='upsert'", "Write 'refuse', 'keep' or 'replace'"]),
    ],
)
def test_an_invalid_at_new_start_is_refused(path: Path, settings: Any, error: type[Exception], expected: Sequence[str]) -> None:
    with pytest.raises(error) as caught:
        ParquetSink(path, **settings)
    assert all(part in str(caught.value) for part in expected), caught.value


def test_rows_with_the_sinks_own_column_are_refused(path: Path, segment: Any) -> None:
    sink = _opened(path)
    file = segment(1)
    pq.write_table(pa.table({"n": [1], "Checkpoint": [1]}), file)
    with pytest.raises(ReservedSinkColumn, match=r"'delays'.*'Checkpoint'.*rename"):
        sink.write(BATCH, [file], 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"sink": "kafka"}',
        json.dumps({"sink": "parquet", "staging": "../../etc", "target": "checkpoint=1-job1-0", "files": 1}),
        json.dumps({"sink": "parquet", "staging": ".staging/a/..", "target": "checkpoint=1-job1-0", "files": 1}),
        json.dumps({"sink": "parquet", "staging": ".staging/a/b", "target": "../out", "files": 1}),
    ],
)
def test_a_text_that_is_not_a_transaction_is_refused(path: Path, text: str) -> None:
    sink = _opened(path)
    for action in (sink.commit, sink.abort):
        with pytest.raises(UnreadableSinkTransaction):
            action(text)


def test_committing_over_another_transactions_rows_is_refused(path: Path, segment: Any) -> None:
    """As after a restore from a checkpoint older than the newest."""
    sink = _opened(path)
    sink.write(BATCH, [segment(1)], 0)
    sink.commit(_checkpoint(sink, 1))
    sink.write(BATCH, [segment(1, 2)], 0)
    again = _checkpoint(sink, 1)
    with pytest.raises(SinkTransactionConflict, match="no other transaction for checkpoint 1"):
        sink.commit(again)
    assert _rows(path) == [1]


@pytest.mark.parametrize("at_new_start", ["keep", "replace"])
def test_another_checkpoint_storage_counts_its_jobs_from_1(path: Path, segment: Any, at_new_start: Any) -> None:
    """Its job 1 is not the job 1 of these rows: the sink neither treats them as its own, nor overwrites them."""

    def committed(history: str, row: int) -> None:
        sink = _opened(path, at_new_start, history=history)
        sink.start_new()
        sink.write(BATCH, [segment(row)], 0)
        transaction = sink.pre_commit(1)
        assert transaction is not None
        sink.commit(transaction)
        sink.close()

    committed("aaaa1111", 1)
    committed("bbbb2222", 2)
    assert _rows(path) == ([1, 2] if at_new_start == "keep" else [2])
    again = _opened(path, at_new_start, history="bbbb2222", attempt="a2")
    again.start_new()  # a second beginning of the same job
    assert 2 in _rows(path), "rows that the job itself has committed stay"
    committed("aaaa1111", 3) if at_new_start == "replace" else None
    assert at_new_start == "keep" or _rows(path) == [3]


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
