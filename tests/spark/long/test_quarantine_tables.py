"""Each kind of sink as the table of the rows that pass and as that of refused ones, with nested columns, and other ones later."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Quarantine, StageInput, stage, unbounded_source
from dagster_checkpoints.sinks import DeltaSink, FileSink, IcebergSink, ParquetSink, SqlSink

ROWS = "k string, v long, tags array<string>, counts map<string, long>, place struct<x: long, y: struct<z: string>>"
CONDITIONS: dict[str, Any] = {
    "is_counted": "counts['a'] > 0",  # null for a map without the key, and for a key without a value
    "has_tags": lambda rows: F.get(rows.tags, 0).isNotNull(),
    "has_place": "place.y.z <> 'nowhere'",
}
SINKS: dict[str, Callable[[Path, str], Any]] = {
    "parquet": lambda folder, name: ParquetSink(folder / name),
    "files": lambda folder, name: FileSink(folder / name, "json"),
    "delta": lambda folder, name: DeltaSink(folder / name, schema_evolution="add"),
    "iceberg": lambda folder, name: IcebergSink(f"lake.{name}", warehouse=folder / "lake", schema_evolution="add"),
    "sql": lambda folder, name: SqlSink(f"sqlite:///{folder}/rows.db", name),
}
OF_FLAT_ROWS = {"is_counted": "v % 5 IN (0, 3)", "has_tags": "v % 4 = 0", "has_place": "v % 3 = 0"}
"""The same, of rows that a database can hold."""


def read(lab: Any, kind: str, name: str) -> list[dict[str, Any]]:
    match kind:
        case "parquet" | "files":
            reader = lab.spark.read.option("mergeSchema", True)
            rows = reader.parquet(str(lab.folder / name)) if kind == "parquet" else reader.json(str(lab.folder / name))
            return rows.toArrow().to_pylist()  # type: ignore[no-any-return]
        case "delta":
            return DeltaTable(lab.folder / name).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]
        case "iceberg":
            catalog = load_catalog("default", type="sql", uri=f"sqlite:///{lab.folder}/lake/catalog.db")
            found = catalog.load_table(f"lake.{name}").scan().to_arrow().to_pylist()
            catalog.close()
            return found  # type: ignore[no-any-return]
    with closing(sqlite3.connect(lab.folder / "rows.db")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(f"SELECT * FROM {name}")]


def row_of(n: int) -> tuple[Any, ...]:
    tags = [["x", None], [], [None], None][n % 4]
    counts = [{"a": 1}, {"a": None}, {"b": 2}, {"a": 3, "b": None}, {}][n % 5]
    place = [{"x": n, "y": {"z": "here"}}, {"x": None, "y": {"z": "nowhere"}}, {"x": n, "y": None}][n % 3]
    return f"k{n}", n, tags, counts, place


def reasons(n: int, conditions: list[str]) -> str:
    unmet = {"is_counted": n % 5 not in (0, 3), "has_tags": n % 4 != 0, "has_place": n % 3 != 0}
    return ", ".join(name for name in conditions if unmet[name])


def test_each_kind_of_sink_holds_rows_and_refused_rows(lab: Any) -> None:
    """Through a suspend, a column that one sink refuses, other instances, a column that the sinks take, and a condition less."""
    kinds = list(SINKS)
    pairs = dict(zip(kinds, kinds[3:] + kinds[:3], strict=True))

    def is_flat(kind: str) -> bool:
        return "sql" in (kind, pairs[kind])

    def pipeline(instances: list[str], conditions: list[str], with_extra: Callable[[str], bool]) -> Pipeline:
        @unbounded_source
        def feed(context):
            return lab.stream("feed", ROWS)

        def rows_in(kind: str) -> Any:
            known: dict[str, Any] = {name: (OF_FLAT_ROWS if is_flat(kind) else CONDITIONS)[name] for name in conditions}
            columns = [*(["k", "v"] if is_flat(kind) else ["*"]), *(["v * 2 AS extra"] if with_extra(kind) else [])]
            made = stage(
                name=kind,
                inputs={"feed": StageInput(edge="all_to_all")},
                instances=instances,
                sink=SINKS[kind](lab.folder, kind),
                quarantine=Quarantine(known, sink=SINKS[pairs[kind]](lab.folder, f"not_in_{kind}")),
            )
            return made(lambda feed: feed.selectExpr(*columns))

        return Pipeline("p", [feed, *map(rows_in, kinds)])

    def put(first: int) -> None:
        lab.put("feed", ROWS, [row_of(n) for n in range(first, first + 30)])

    def takes_columns(kind: str) -> bool:
        return not {"files", "sql"} & {kind, pairs[kind]}

    names = list(CONDITIONS)
    put(0)
    lab.start(pipeline(["x"], names, lambda kind: False), interval=0.5, until="caught_up").finished()
    put(30)
    columns_refused = lab.start(pipeline(["x"], names, lambda kind: kind == "iceberg"), interval=0.5).result()
    assert columns_refused.status == "FAILED"
    for part in ("SinkColumnsMismatch", "not_in_iceberg", "'extra'"):
        assert part in repr(columns_refused.error)
    job = lab.start(pipeline(["x", "y"], names[:2], takes_columns), interval=0.5)
    job.wait_until(lambda: job.execution.rows().get("feed") == 60)
    job.drain()
    job.finished()

    expected = {n: reasons(n, names if n < 30 else names[:2]) for n in range(60)}
    for kind, other in pairs.items():
        passed, refused_rows = read(lab, kind, kind), read(lab, other, f"not_in_{kind}")
        assert sorted(row["v"] for row in passed) == [n for n, unmet in expected.items() if not unmet], kind
        assert {row["v"]: row["refused_by"] for row in refused_rows} == {n: unmet for n, unmet in expected.items() if unmet}, kind
        assert len(refused_rows) == sum(map(bool, expected.values())) and all(
            row["refused_in_checkpoint"] for row in refused_rows
        )
        for row in (*passed, *refused_rows):
            assert row["k"] == f"k{row['v']}"
            if takes_columns(kind):
                assert row["extra"] == (2 * row["v"] if row["v"] >= 30 else None), kind
        for table, rows in ((kind, passed), (other, refused_rows)):
            if table != "files" and not is_flat(kind):
                assert all((row["tags"], row["place"]) == row_of(row["v"])[2::2] for row in rows), table
