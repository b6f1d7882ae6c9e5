"""A pipeline that writes to tables of a database: its sink fails, the run is cancelled, another one continues."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.sinks import SqlSink

ROWS = "n long, k string, ts timestamp, price decimal(10,2)"


class FailingSqlSink(SqlSink):
    """Fails once in each of the methods that a file names, before or after the call."""

    def __init__(self, url: str, table: str, faults: Path, **settings: Any) -> None:
        super().__init__(url, table, **settings)
        self.faults = faults

    def write(self, *arguments: Any) -> None:
        self._fail("before write")
        super().write(*arguments)
        self._fail("after write")

    def commit(self, transaction: str) -> Any:
        self._fail("before commit")
        committed = super().commit(transaction)
        self._fail("after commit")
        return committed

    def _fail(self, moment: str) -> None:
        fault = self.faults / moment
        if fault.exists():
            fault.unlink()
            raise OSError(f"the test fails the sink {moment}")


def test_a_pipeline_with_tables_of_a_database(lab: Any) -> None:
    file = lab.folder / "shop.db"
    faults = lab.folder / "faults"
    faults.mkdir()
    written: list[tuple[Any, ...]] = []

    @unbounded_source
    def live(context: Any) -> Any:
        return lab.stream("live", ROWS)

    @stage(sink=FailingSqlSink(f"sqlite:///{file}", "sales", faults))
    def sales(live: Any) -> Any:
        return live.withColumn("day", F.to_date("ts"))

    @stage(sink=SqlSink(f"sqlite:///{file}", "totals", key="k"), output_mode="update")
    def totals(sales: Any) -> Any:
        return sales.groupBy("k").agg(F.count("*").alias("sales"), F.sum("price").cast("decimal(14,2)").alias("turnover"))

    def read(query: str) -> list[tuple[Any, ...]]:
        if not file.exists():
            return []
        with closing(sqlite3.connect(file, timeout=60)) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError:  # no such table yet
                return []

    def put(count: int) -> None:
        rows = [(len(written) + n, "abc"[n % 3], lab.at(60 * n), n) for n in range(count)]
        written.extend(rows)
        lab.put("live", ROWS, rows)

    def all_there() -> bool:
        return read("SELECT count(*) FROM sales") == [(len(written),)]

    def run() -> Any:
        return lab.start(pipeline, interval=0.5, restart=FixedDelayRestart(50, 0.1))

    pipeline = Pipeline("shop", [live, sales, totals])
    job = run()
    for moment in ("after write", "before commit", "after commit"):
        (faults / moment).touch()
        put(7)
        job.wait_until(lambda: not any(faults.iterdir()))
    job.wait_until(all_there)
    put(11)
    job.cancel()
    job.result()
    job = run()
    put(4)
    job.wait_until(all_there)
    job.drain()
    job.finished()
    assert read("SELECT n, k, ts, price, day FROM sales ORDER BY n") == [
        (n, k, f"{ts:%Y-%m-%d %H:%M:%S.%f}", price, "2026-01-01") for n, k, ts, price in written
    ]
    counted = Counter(k for _, k, _, _ in written)
    turnover = {k: sum(price for _, kk, _, price in written if kk == k) for k in counted}
    assert read("SELECT k, sales, turnover FROM totals ORDER BY k") == [(k, counted[k], turnover[k]) for k in sorted(counted)]
    assert read("SELECT name FROM sqlite_master WHERE name LIKE '%staging%'") == []
