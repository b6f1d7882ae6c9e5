"""Rows a second of SqlSink, against the same rows written by the libraries that a user would call in `foreachBatch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from sqlalchemy import create_engine

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least
from bench.postgresql import PostgresqlServer, binaries
from dagster_checkpoints.sinks import SinkContext, SqlSink

PART = "SqlSink"
ROWS, BATCHES = 600_000, 6
LIMIT = 0.8
_BATCH: Any = SimpleNamespace()
_DDL = "CREATE TABLE {} (n BIGINT, k TEXT, ts TIMESTAMPTZ, price INTEGER, v DOUBLE PRECISION)"


def measure(environment: Environment) -> Iterator[Measure]:
    """One transaction of some batches of rows, from the first batch to the end of the commit."""
    files = _files(environment.fresh("sql"), min(ROWS, environment.rows))
    folder = environment.fresh("sqlite")
    urls = iter(f"sqlite:///{folder}/{number}.db" for number in range(1000))
    yield from _ratios(environment, "SQLite", files, {"pandas.to_sql": lambda: _pandas(next(urls), files)}, lambda: next(urls))
    programs = binaries()
    if programs is None:
        return
    server = PostgresqlServer(programs)
    try:
        schemas = iter(f"s{number}" for number in range(1000))
        new_url = lambda: server.url(schema=next(schemas))  # noqa: E731
        baselines = {
            "pandas.to_sql": lambda: _pandas(new_url(), files),
            "COPY of CSV": lambda: _copy(server, f"t{next(schemas)}", files),
        }
        yield from _ratios(environment, "PostgreSQL", files, baselines, new_url)
    finally:
        server.close()


def _ratios(
    environment: Environment,
    database: str,
    files: Sequence[Path],
    baselines: dict[str, Callable[[], None]],
    new_url: Callable[[], str],
) -> Iterator[Measure]:
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    rounds: dict[str, list[float]] = {name: [] for name in baselines}
    rates: list[float] = []
    for _ in range(environment.repeats):
        ours = _timed(lambda: _sink(new_url(), files, rows))
        rates.append(rows / ours)
        for name, baseline in baselines.items():
            rounds[name].append(_timed(baseline) / ours)
    yield Measure(PART, f"{database}: rows a second", median(rates), "rows/s")
    for name, ratios in rounds.items():
        yield at_least(PART, f"{database}: rate / rate of {name}", median(ratios), "", LIMIT)


def _files(folder: Path, rows: int) -> list[Path]:
    files = []
    for number in range(BATCHES):
        size = rows // BATCHES
        numbers = range(number * size, (number + 1) * size)
        start = datetime(2026, 1, 1, tzinfo=UTC)
        table = pa.table(
            {
                "n": pa.array(numbers, pa.int64()),
                "k": [f"shop {n % 1000}" for n in numbers],
                "ts": pa.array([start + timedelta(seconds=n) for n in numbers], pa.timestamp("us", "UTC")),
                "price": pa.array([n % 100_000 for n in numbers], pa.int32()),
                "v": pa.array([n / 7 for n in numbers], pa.float64()),
            }
        )
        files.append(folder / f"{number}.parquet")
        pq.write_table(table, files[-1])
    return files


def _sink(url: str, files: Sequence[Path], rows: int) -> None:
    sink = SqlSink(url, "t")
    sink.open(SinkContext("bench", "stage", "0", 0, 1, 1, "a1", "h1", 1))
    sink.start_new()
    for number, file in enumerate(files):
        sink.write(_BATCH, [str(file)], number)
    committed = sink.commit(sink.pre_commit(1) or "")
    if committed.rows != rows:
        raise BenchFailed(f"SqlSink committed {committed.rows} rows of {rows}")
    sink.close()


def _pandas(url: str, files: Sequence[Path]) -> None:
    engine = create_engine(url)
    for file in files:
        pq.read_table(file).to_pandas().to_sql("t", engine, if_exists="append", index=False)
    engine.dispose()


def _copy(server: PostgresqlServer, table: str, files: Sequence[Path]) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(_DDL.format(table).encode())
        for file in files:
            sink = pa.BufferOutputStream()
            pyarrow.csv.write_csv(pq.read_table(file), sink, pyarrow.csv.WriteOptions(include_header=False))
            with cursor.copy(f"COPY {table} FROM STDIN (FORMAT csv)".encode()) as copy:
                copy.write(bytes(sink.getvalue()))


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
