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


def rows_of(folder: Path, sink: str, lab: Any, name: str = "hours") -> Sequence[tuple[Any, ...]]:
    """What a reader of the sink sees of these columns."""
    columns = ["start", "name", "v", "n"]
    match sink:
        case "parquet" | "files":
            return lab.rows(lab.spark.read.parquet(str(folder / name)).select(columns))  # type: ignore[no-any-return]
        case "sql":
            with closing(sqlite3.connect(folder / "hours.db")) as database:
                return database.execute(f"SELECT {', '.join(columns)} FROM {name}").fetchall()
        case "delta":
            table = DeltaTable(folder / name).to_pyarrow_table()
        case "iceberg":
            catalog = load_catalog("default", type="sql", uri=f"sqlite:///{folder}/lake/catalog.db")
            table = catalog.load_table(f"lake.{name}").scan().to_arrow()
            catalog.close()
        case _:
            raise AssertionError(f"{sink} has no reader here")
    return [tuple(row.values()) for row in table.select(columns).to_pylist()]


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


KILLS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "recovery": (
        "sql",
        "files",
        [{"hold": "pre-commit", "hold_at": 3}, {"hold": "commit", "hold_at": 2}, {"hold": "recover", "hold_at": 2}],
    ),
    "last-commit": (
        "iceberg",
        "delta",
        [{"hold": "commit", "hold_at": 2}, {"hold": "commit", "hold_at": 2, "hold_draining": True}],
    ),
}
"""The sinks of the rows that pass and of those that are refused, and where each run is held and killed: when a part of the sinks
has pre-committed; when a part has committed; when a part has recovered after that; when a part has committed at the end."""


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_of_a_pipeline_with_a_quarantine(lab: Any, start: Callable[..., Child], kill: str) -> None:
    """Each row is in one of the two tables, once, although its condition would answer differently when it is asked again."""
    sink, refused, runs = KILLS[kill]
    put = 0

    def more(files: int) -> None:
        nonlocal put
        for number in range(put, put + files):
            for name in "ab":
                lab.put(f"live-{name}", ROWS, [(name, lab.at(60 * m), m) for m in range(20 * number, 20 * number + 20)])
        put += files

    for number, held in enumerate(runs):
        more(2)
        if held.get("hold_draining"):
            drain_when_consumed(lab.folder, {"live": 40 * put})
        child = start(f"killed-{number}", sink=sink, refused=refused, interval=0.5, **held)
        child.wait_for("Holding")
        child.kill()
    if kill != "last-commit":
        more(1)
    pipeline = crash_runner.refusing_pipeline(lab.folder, str(lab.folder / "input"), sink, refused)
    last = lab.start(pipeline, interval=0.5, lease_seconds=6.0)
    last.wait_until(lambda: last.over or last.execution.rows().get("live") == 40 * put)
    if not last.over:
        last.drain()
    last.finished()
    passed, apart, hours = (
        rows_of(lab.folder, *of) for of in ((sink, lab, "passed"), (refused, lab, "refused"), (sink, lab, "hours"))
    )
    read = [(int(lab.at(60 * m).timestamp()), name, m, 1) for m in range(20 * put) for name in "ab"]
    assert sorted([*passed, *apart]) == sorted(read)
    assert sorted(hours) == sorted(passed)
    assert all(row[2] % 2 == 0 for row in passed) and any(row[2] % 2 == 0 for row in apart)
