"""DeltaSink with a key against the merge of its library: the same rows, the same table, a commit for each batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, at_least
from dagster_checkpoints.sinks import DeltaSink, SinkContext

PART = "Delta merge"
ROWS, FILES, BATCHES, BATCH = 2_000_000, 20, 5, 20_000
LIMIT = 0.8
_UNUSED: Any = SimpleNamespace()


def measure(environment: Environment) -> Iterator[Measure]:
    """Batches that replace rows of a table, and add as many: keys anywhere in the table, or the newest keys."""
    for keys, chosen in (("keys anywhere", _anywhere), ("newest keys", _newest)):
        ratios, rates = [], []
        for number in range(environment.repeats):
            folder = environment.fresh("delta-merge")
            rows = min(ROWS, environment.rows)
            batches = [chosen(rows, batch, random.Random(number)) for batch in range(BATCHES)]
            ours = _seconds(folder / "sink", rows, lambda table: _sink(table, folder, batches))  # noqa: B023 - called at once
            library = _seconds(folder / "library", rows, lambda table: _library(table, batches))  # noqa: B023
            _check(folder / "sink", folder / "library")
            ratios.append(library / ours)
            rates.append(BATCHES * BATCH / ours)
        note = f"{BATCHES} batches of {BATCH:,} rows into {rows:,} rows in {FILES} files; half of the rows replace others"
        yield at_least(PART, f"{keys}: rate / rate of the library's merge", median(ratios), "", LIMIT, note)
        yield Measure(PART, f"{keys}: rows a second", median(rates), "rows/s")


def _rows(keys: list[int], value: int) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64()), "v": [value] * len(keys), "text": [f"row {k}" for k in keys]})


def _anywhere(rows: int, batch: int, r: random.Random) -> pa.Table:
    new = range(rows + batch * BATCH // 2, rows + (batch + 1) * BATCH // 2)
    return _rows([*r.sample(range(rows), BATCH // 2), *new], batch + 1)


def _newest(rows: int, batch: int, r: random.Random) -> pa.Table:
    begin = rows + (batch - 1) * BATCH // 2
    return _rows(list(range(begin, begin + BATCH)), batch + 1)


def _seconds(table: Path, rows: int, act: Callable[[Path], None]) -> float:
    for begin in range(0, rows, rows // FILES):
        write_deltalake(table, _rows(list(range(begin, begin + rows // FILES)), 0), mode="append")
    began = time.perf_counter()
    act(table)
    return time.perf_counter() - began


def _library(table: Path, batches: list[pa.Table]) -> None:
    for batch in batches:
        merge = DeltaTable(table).merge(batch, "t.k = s.k", source_alias="s", target_alias="t", streamed_exec=False)
        merge.when_matched_update_all().when_not_matched_insert_all().execute()


def _sink(table: Path, folder: Path, batches: list[pa.Table]) -> None:
    sink = DeltaSink(table, key="k")
    sink.open(SinkContext("bench", "rows", "0", 0, 1, 1, "a1", history="h1", epoch=1))
    sink.start_new()
    for number, batch in enumerate(batches):
        file = folder / f"segment-{number}.parquet"
        pq.write_table(batch, file)
        sink.write(_UNUSED, [str(file)], number)
        transaction = sink.pre_commit(number + 1)
        assert transaction is not None
        sink.commit(transaction)
    sink.close()


def _check(*tables: Path) -> None:
    found = [DeltaTable(table).to_pyarrow_table().select(["k", "v"]).sort_by("k") for table in tables]
    if not found[0].equals(found[1]):
        raise BenchFailed("expected the same rows in the sink's table and in the library's, found other ones")
