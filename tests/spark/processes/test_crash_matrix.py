"""A process that is killed: at each point of the protocol, with and without its JVM, with each sink. Every row is there once.

All cells run with `make test-all`; `make test` takes three of them. The protocol itself is killed at every step in `simulation`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from tests.spark.processes import crash_runner
from tests.spark.processes.killed_runs import ROWS, Child, drain_when_consumed

POINTS: dict[str, dict[str, Any]] = {
    "upload": {"hold": "upload", "hold_at": 3},
    "metadata": {"hold": "metadata", "hold_at": 2},
    "commit": {"hold": "commit", "hold_at": 1},
    "ending": {"hold": "metadata", "hold_draining": True},
    "last-commit": {"hold": "commit", "hold_draining": True},
}
"""While a state file is uploaded; before a checkpoint completes; after that, before its sink commits; the same two at the end."""

CELLS = {
    f"{point}-{sink}{'-alone' if alone else ''}": (point, sink, alone)
    for point, sink, alone in product(POINTS, crash_runner.SINKS, (False, True))
}
"""The point; the sink; whether the Python process is killed alone, or with its JVM."""


def rows_of(folder: Path, sink: str, lab: Any) -> Sequence[tuple[Any, ...]]:
    """What a reader of the sink sees."""
    match sink:
        case "parquet":
            return lab.committed("hours")  # type: ignore[no-any-return]
        case "files":
            return lab.rows(lab.spark.read.parquet(str(folder / "hours")))  # type: ignore[no-any-return]
        case "sql":
            with closing(sqlite3.connect(folder / "hours.db")) as database:
                return database.execute("SELECT start, name, v, n FROM hours").fetchall()
        case "delta":
            table = DeltaTable(folder / "hours").to_pyarrow_table()
        case "iceberg":
            catalog = load_catalog("default", type="sql", uri=f"sqlite:///{folder}/lake/catalog.db")
            table = catalog.load_table("lake.hours").scan().to_arrow()
            catalog.close()
        case _:
            raise AssertionError(f"{sink} has no reader here")
    return [tuple(row.values()) for row in table.select(["start", "name", "v", "n"]).to_pylist()]


@pytest.mark.parametrize("cell", CELLS)
def test_a_kill(lab: Any, start: Callable[..., Child], cell: str) -> None:
    point, sink, alone = CELLS[cell]
    put = 0

    def more(files: int) -> None:
        nonlocal put
        for _ in range(files):
            lab.put("live-a", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(put, put + 45)])
            put += 45

    more(4)
    settings = POINTS[point]
    if settings.get("hold_draining"):
        drain_when_consumed(lab.folder, {"live": put})
    child = start("killed", sink=sink, interval=0.5, **settings)
    child.wait_for("Holding")
    child.kill(group=not alone)

    before = put
    more(2)
    last = lab.start(crash_runner.sink_pipeline(lab.folder, str(lab.folder / "input"), sink), interval=0.5, lease_seconds=6.0)
    last.wait_until(lambda: last.over or last.execution.rows().get("live") == put)
    if last.over:  # the checkpoint that it went on from was behind the end of the drained source, which reads no more
        assert settings.get("hold_draining") and last.result().ended_by == "end_of_data"
        put = before
    else:
        last.drain()
    last.finished()
    rows = lab.table("live-a", ROWS).where(f"v < {put}").withColumnRenamed("k", "name")
    assert sorted(rows_of(lab.folder, sink, lab)) == sorted(lab.rows(crash_runner.in_numbers(crash_runner.in_hours(rows))))
