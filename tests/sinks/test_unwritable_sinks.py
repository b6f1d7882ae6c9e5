"""Places that sinks cannot write to: each kind of sink names itself, the place and the remedy; a run does not try it again."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import make_url

from dagster_checkpoints.errors import StorageAccessDenied, StorageUnavailable, repeats_by_nature
from dagster_checkpoints.sinks import (
    DeltaSink,
    FileSink,
    IcebergSink,
    KafkaSink,
    ParquetSink,
    SinkContext,
    SinkError,
    SqlSink,
    TwoPhaseCommitSink,
)
from dagster_checkpoints.sinks.kafka.messages import StagedMessages
from dagster_checkpoints.sinks.unwritable import place_error, try_directory
from dagster_checkpoints.spark.tasks.task_sink import reaching_sink
from dagster_checkpoints.systems.errors import (
    InvalidSinkDatabase,
    InvalidSinkPath,
    ReservedSinkColumn,
    SinkColumnsMismatch,
    SinkPathInUse,
    SinkUnavailable,
)

CONTEXT = SinkContext("flights", "delays", "0", 0, 1, 1, "a1", history="h1", epoch=1)
ROWS = pa.table({"n": pa.array(range(5), pa.int64())})

SINKS: dict[str, Any] = {
    "parquet": lambda place: ParquetSink(place),
    "files": lambda place: FileSink(place),
    "text files": lambda place: FileSink(place, "csv"),
    "delta": lambda place: DeltaSink(place),
    "iceberg": lambda place: IcebergSink("flights.delays", warehouse=place),
    "sql": lambda place: SqlSink(f"sqlite:///{place}/x.db", "delays", retry_for=0.0),
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.parquet"
    pq.write_table(ROWS, file)
    return file


def write(sink: TwoPhaseCommitSink, rows: Path) -> None:
    """The steps of a task up to its first commit."""
    with reaching_sink(sink):
        sink.open(CONTEXT)
        sink.start_new()
        sink.write(None, [str(rows)], 0)  # type: ignore[arg-type]
        transaction = sink.pre_commit(1)
        assert transaction is not None
        sink.commit(transaction)


def below_a_file(folder: Path) -> Path:
    (folder / "a file").write_text("")
    return folder / "a file" / "out"


def too_long(folder: Path) -> Path:
    return folder / ("x" * 300)


@contextmanager
def another_user(user: int = 65534) -> Iterator[None]:
    """Without root's right to write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A directory that another user may enter, and may not write to."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o755)
    folder = tmp_path / "forbidden"
    folder.mkdir(mode=0o755)
    if os.geteuid():
        folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("place_of", "found"), [(below_a_file, "is a file, not a directory|needed"), (too_long, "choose a shorter place")]
)
@pytest.mark.parametrize("kind", SINKS)
def test_a_place_that_cannot_be_is_refused_with_its_remedy_and_without_another_attempt(
    tmp_path: Path, rows: Path, kind: str, place_of: Any, found: str
) -> None:
    sink = SINKS[kind](place_of(tmp_path))
    for step in (lambda: write(sink, rows), lambda: sink.check_target(CONTEXT, rows)):
        with pytest.raises(SinkError) as raised:
            step()
        check_text(raised.value, sink, place_of(tmp_path), found)


@pytest.mark.parametrize("kind", SINKS)
def test_a_directory_without_the_right_to_write_names_the_user(forbidden: Path, rows: Path, kind: str) -> None:
    sink = SINKS[kind](forbidden / "out")
    with another_user():
        for step in (lambda: write(sink, rows), lambda: sink.check_target(CONTEXT, rows)):
            with pytest.raises(SinkError) as raised:
                step()
            check_text(
                raised.value, sink, forbidden / "out", "Give the user '?nobody'? of the run the right|Give the user .* of the"
            )
    assert list(forbidden.iterdir()) == []


@pytest.mark.parametrize("kind", SINKS)
def test_a_read_only_file_system_is_named(small: Path, rows: Path, kind: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    sink = SINKS[kind](small / "out")
    for step in (lambda: write(sink, rows), lambda: sink.check_target(CONTEXT, rows)):
        with pytest.raises(SinkError) as raised:
            step()
        check_text(raised.value, sink, small / "out", "mount it writable")


@pytest.mark.parametrize("kind", SINKS)
def test_a_full_disk_is_named_and_another_attempt_may_succeed(small: Path, rows: Path, kind: str) -> None:
    (small / "filling").write_bytes(b"")
    if kind == "sql":  # an existing database, as SQLite needs pages for the rows
        write(SINKS[kind](small / "out"), rows)
    with (small / "filling").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    sink = SINKS[kind](small / "out") if kind != "sql" else SqlSink(f"sqlite:///{small}/out/x.db", "more", retry_for=0.0)
    with pytest.raises(SinkError) as raised:
        write(sink, rows)
    error = raised.value
    assert type(error) is SinkUnavailable and not repeats_by_nature(error)
    assert type(sink).__name__ in str(error) and str(small / "out") in str(error)
    assert "Free space there" in str(error) and "continues from its latest checkpoint" in str(error)
    (small / "filling").unlink()
    write(sink.new_instance(), rows)


def check_text(error: SinkError, sink: TwoPhaseCommitSink, place: Path, found: str) -> None:

    assert repeats_by_nature(error), error
    assert isinstance(error, InvalidSinkPath | InvalidSinkDatabase), repr(error)
    assert type(sink).__name__ in str(error) and str(place) in str(error), error
    if isinstance(error, InvalidSinkPath):
        assert re.search(found, str(error)), error
        assert "then start the run again" in str(error)


def test_the_staging_directory_of_a_kafka_sink(tmp_path: Path, rows: Path) -> None:
    place = below_a_file(tmp_path)
    sink = KafkaSink("delays", "localhost:1", staging=place)
    with pytest.raises(InvalidSinkPath, match=r"KafkaSink.*A part of the path is a file"):
        sink.check_target(CONTEXT, rows)
    messages = pa.record_batch({"key": pa.array([b"1"]), "value": pa.array([b"1"])})
    with pytest.raises(InvalidSinkPath, match=r"KafkaSink.*A part of the path is a file"), reaching_sink(sink):
        StagedMessages(place, CONTEXT, str(sink)).write("a", 0, messages.schema, iter([messages]))


@pytest.mark.parametrize("kind", SINKS)
def test_a_check_of_a_new_place_changes_nothing(tmp_path: Path, rows: Path, kind: str) -> None:
    place = tmp_path / "new" / "out"
    before = sorted(tmp_path.rglob("*"))
    SINKS[kind](place).check_target(CONTEXT, rows)
    assert sorted(tmp_path.rglob("*")) == before


# What an error means


MEANINGS = [
    (OSError(number, os.strerror(number), "/data/out"), repeats)
    for number, repeats in [
        (errno.EACCES, True),
        (errno.EPERM, True),
        (errno.EROFS, True),
        (errno.ENOTDIR, True),
        (errno.EEXIST, True),
        (errno.EISDIR, True),
        (errno.ENAMETOOLONG, True),
        (errno.ELOOP, True),
        (errno.ENOSPC, False),
        (errno.EDQUOT, False),
        (errno.EFBIG, False),
    ]
] + [
    (OSError("Generic LocalFileSystem error: Unable to create dir /data/out: Permission denied (os error 13)"), True),
    (OSError("Failed to open local file '/data/out'. Detail: [errno 28] No space left on device"), False),
    (OSError("When initiating multiple part upload: AWS Error ACCESS_DENIED during CreateMultipartUpload operation"), True),
    (OSError("AWS Error ACCESS_DENIED: the token has expired"), None),
    (StorageAccessDenied("cannot write s3://lake/out: denied"), True),
    (StorageUnavailable("cannot write s3://lake/out: timeout"), None),
    (OSError(errno.EIO, "Input/output error"), None),
    (OSError(errno.ESTALE, "Stale file handle"), None),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset"), None),
    (ValueError("no file"), None),
]


@pytest.mark.parametrize(("error", "repeats"), MEANINGS, ids=[str(error) for error, _ in MEANINGS])
def test_what_an_error_of_the_operating_system_or_of_a_library_means(error: Exception, repeats: bool | None) -> None:
    found = place_error(error, "Sink()", "/data/out")
    assert (None if found is None else found.repeats) is repeats
    assert found is None or re.match(r"Sink\(\): (expected to write to /data/out, found: |cannot write s3:)", str(found))


def test_an_error_about_another_place_is_not_the_sinks(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "out")
    with pytest.raises(PermissionError), reaching_sink(sink):
        raise PermissionError(errno.EACCES, "Permission denied", "/scratch/segments/part-0.parquet")


def test_links_that_lead_nowhere_or_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("broken", "circle"):
        with pytest.raises(InvalidSinkPath, match="broken link"):
            try_directory(tmp_path / name / "out", "Sink()")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])  # ENOENT: a file system that takes no files, as /proc
def test_a_directory_that_fails_in_another_way_is_named_and_another_attempt_may_succeed(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "probe"))

    monkeypatch.setattr("dagster_checkpoints.sinks.unwritable.tempfile.TemporaryFile", fails)
    with pytest.raises(SinkUnavailable, match=f"expected to write to {tmp_path}/out, found: {os.strerror(number)}") as raised:
        try_directory(tmp_path / "out", "Sink()")
    assert not repeats_by_nature(raised.value) and "probe" not in str(raised.value)


# What `check` compares


def columns_file(folder: Path, **columns: pa.Array) -> Path:
    file = folder / f"{'-'.join(columns)}.parquet"
    pq.write_table(pa.table(columns).slice(0, 0), file)
    return file


TABLES = {kind: SINKS[kind] for kind in ("files", "delta", "iceberg", "sql")}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"n": pa.array(["a"])}, "column 'n'|'n'"),
        ({"n": pa.array([1], pa.int64()), "more": pa.array([1], pa.int64())}, "'more'"),
        ({"other": pa.array([1], pa.int64())}, "'n'|'other'"),
    ],
    ids=["type", "more", "other"],
)
def test_a_check_compares_the_stages_columns_with_those_of_the_table(
    tmp_path: Path, rows: Path, kind: str, columns: dict[str, Any], found: str
) -> None:
    sink = TABLES[kind](tmp_path / "out")
    write(sink.new_instance(), rows)
    sink.check_target(CONTEXT, rows)
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("*")) if path.suffix != ".db"}
    with pytest.raises(SinkColumnsMismatch, match=found) as raised:
        sink.check_target(CONTEXT, columns_file(tmp_path, **columns))
    assert repeats_by_nature(raised.value)
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("*")) if path.suffix != ".db"} == before


@pytest.mark.parametrize("kind", ["parquet", "files", "sql"])
def test_a_check_finds_that_the_place_is_another_stages(tmp_path: Path, rows: Path, kind: str) -> None:
    sink = SINKS[kind](tmp_path / "out")
    write(sink.new_instance(), rows)
    with pytest.raises(SinkPathInUse, match="delays"):
        sink.check_target(dataclasses.replace(CONTEXT, stage="others"), rows)


def test_a_check_refuses_what_the_first_rows_would_be_refused_for(tmp_path: Path) -> None:
    reserved = columns_file(tmp_path, checkpoint=pa.array([1]))
    nested = columns_file(tmp_path, nested=pa.array([[1]]))
    plain = columns_file(tmp_path, n=pa.array([1]))
    with pytest.raises(ReservedSinkColumn):
        ParquetSink(tmp_path / "out").check_target(CONTEXT, reserved)
    with pytest.raises(SinkColumnsMismatch, match="CSV"):
        FileSink(tmp_path / "out", "csv").check_target(CONTEXT, nested)
    with pytest.raises(SinkColumnsMismatch, match="partition column 'day'"):
        FileSink(tmp_path / "out", partition_by="day").check_target(CONTEXT, plain)
    with pytest.raises(SinkColumnsMismatch, match="day"):
        DeltaSink(tmp_path / "out", partition_by="day").check_target(CONTEXT, plain)
    with pytest.raises(SinkColumnsMismatch, match="day"):
        IcebergSink("a.b", warehouse=tmp_path / "out", key="day").check_target(CONTEXT, plain)
    with pytest.raises(SinkColumnsMismatch, match="to_json"):
        SqlSink(f"sqlite:///{tmp_path}/x.db", "t").check_target(CONTEXT, nested)
    with pytest.raises(SinkColumnsMismatch, match="the key's columns day"):
        SqlSink(f"sqlite:///{tmp_path}/x.db", "t", key="day").check_target(CONTEXT, plain)
    with pytest.raises(SinkColumnsMismatch, match="'day'"):
        KafkaSink("delays", "localhost:1", staging=tmp_path / "s", key="day").check_target(CONTEXT, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.parquet", "n.parquet", "nested.parquet"]


def test_a_check_of_a_database_shows_missing_rights(postgresql: Any, tmp_path: Path, rows: Path) -> None:
    from sqlalchemy import create_engine, text

    engine = create_engine(postgresql.url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in (
            "DROP TABLE IF EXISTS checked",
            "CREATE TABLE checked (n bigint)",
            "DROP ROLE IF EXISTS reader",
            "CREATE ROLE reader LOGIN PASSWORD 'secret'",
            "GRANT CREATE, USAGE ON SCHEMA public TO reader",
            "GRANT SELECT ON checked TO reader",
        ):
            connection.execute(text(statement))
        tables = text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        before = connection.execute(tables).scalar_one()
        SqlSink(postgresql.url(), "checked").check_target(CONTEXT, rows)
        refused = SqlSink(make_url(postgresql.url()).set(username="reader", password="secret"), "checked")
        with pytest.raises(InvalidSinkDatabase, match="permission denied"):
            refused.check_target(CONTEXT, rows)
        assert connection.execute(tables).scalar_one() == before
        connection.execute(text("DROP OWNED BY reader"))
        connection.execute(text("DROP ROLE reader"))
        connection.execute(text("DROP TABLE checked"))
    engine.dispose()
