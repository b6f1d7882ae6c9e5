"""Delta tables as sources: rows arrive once through restores and rewrites; what has changed or gone is refused by name."""

from __future__ import annotations

import datetime as dt
import shutil
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.errors import repeats_by_nature
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sources import (
    SourceColumnsChanged,
    SourceRowsChanged,
    SourceRowsLost,
    read_delta_table,
)
from dagster_checkpoints.spark.errors import SourceRowsLostError
from dagster_checkpoints.spark.job.events import CheckpointDone, JobRestarting, StageFinished

PLACES = ["a b", "ü/x=1%", None, "007"]
COLUMNS = pa.schema(
    [
        ("place", pa.string()),
        ("n", pa.int64()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("price", pa.decimal128(9, 2)),
        ("nested", pa.struct([("words", pa.list_(pa.string()))])),
    ]
)


def append(table: Path, numbers: range, **options: Any) -> list[tuple[Any, ...]]:
    """Append rows to a table that is partitioned by its first and third column. Returns them."""
    first = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [
        {
            "place": PLACES[n % 4],
            "n": n,
            "day": dt.date(2026, 1, 1 + n // 50),
            "at": first + dt.timedelta(minutes=n),
            "price": Decimal(n) / 4,
            "nested": {"words": [f"w{n}", None]},
        }
        for n in numbers
    ]
    write_deltalake(table, pa.Table.from_pylist(rows, COLUMNS), partition_by=["place", "day"], mode="append", **options)
    return [tuple(row.values()) for row in rows]


def test_rows_arrive_once_through_a_restore_and_rewrites(lab: Any) -> None:
    """Behind a source of one file per micro-batch: a backfill of one version, and a live feed in one query with files."""
    table = lab.folder / "delta"
    rows = [row for begin in range(0, 100, 20) for row in append(table, range(begin, begin + 20))]
    backfill = list(rows)
    version = DeltaTable(table).version()
    lab.put("files", "n long, at timestamp", [(-1, lab.at(0))])

    @unbounded_source(watermark=("at", "1 hour"))
    def live(context):
        return read_delta_table(context.spark, table, files_per_trigger=1)

    @unbounded_source(watermark=("at", "1 hour"))
    def files(context):
        return lab.stream("files", "n long, at timestamp")

    @stage(sink=lab.sink("live"), inputs=dict.fromkeys(("live", "files"), StageInput(fuse=True)))
    def all_rows(live, files):
        return live.unionByName(files, allowMissingColumns=True)

    @bounded_source(sink=lab.sink("then"))
    def then(context):
        return read_delta_table(context.spark, f"file://{table}", version=version, files_per_trigger=3)

    pipeline = Pipeline("lake", [live, files, all_rows, then])
    job = lab.start(pipeline, interval=0.3)
    assert ("live", "files", "all_rows") in job.chains
    job.wait_until(lambda: lab.count("live") > 10)
    job.cancel()
    job.result()
    assert lab.count("live") > 10
    rows += append(table, range(100, 120))
    DeltaTable(table).optimize.compact()  # while the first version is still being read, or was read
    rows += append(table, range(120, 130))
    job = lab.start(pipeline, interval=0.3)
    job.wait_for(StageFinished, lambda event: event.stage == "then")
    job.wait_until(lambda: lab.count("live") == len(rows) + 1)
    DeltaTable(table).optimize.z_order(["n"])
    rows += append(table, range(130, 140))
    job.wait_until(lambda: lab.count("live") == len(rows) + 1)
    job.done("end_source", stage="live")
    job.wait_for(StageFinished, lambda event: event.stage == "live")
    append(table, range(140, 150))  # after its end
    lab.put("files", "n long, at timestamp", [(-2, lab.at(1))])
    job.wait_until(lambda: lab.count("live") == len(rows) + 2)
    job.drain()
    job.finished()
    others = [(None, n, None, lab.at(-1 - n), None, None) for n in (-1, -2)]
    assert _counted(lab.committed("live")) == _counted(rows + others)
    assert _counted(lab.committed("then")) == _counted(backfill)


def _counted(rows: list[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(str(value) if isinstance(value, dict) else value for value in row) for row in rows)


def delete_rows(table: Path) -> None:
    DeltaTable(table).delete("n = 3")


def clean_up(table: Path) -> None:
    for _ in range(2):
        append(table, range(100, 110))
    DeltaTable(table).optimize.compact()
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)


def lose_the_log(table: Path) -> None:
    for number in range(100, 130, 10):
        append(table, range(number, number + 10))
    DeltaTable(table).create_checkpoint()
    newest = DeltaTable(table).version()
    (table / f"_delta_log/{newest - 1:020}.json").unlink()


def create_again(table: Path) -> None:
    shutil.rmtree(table)
    append(table, range(0, 10))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            delete_rows,
            SourceRowsChanged,
            r"that only add rows, found that version 1 deletes or changes rows\. .* changed_rows='skip'",
        ),
        (clean_up, SourceRowsLost, r"files of the next rows: expected \d files, found that \d of them are gone"),
        (lose_the_log, SourceRowsLost, r"the commit of version 2, of 3, was deleted from its log"),
        (create_again, SourceRowsLost, r"found another one with the id .*: it was created again"),
    ],
    ids=["delete", "vacuum", "log", "created again"],
)
def test_what_has_changed_or_gone_is_refused_by_name(lab: Any, change: Callable[[Path], None], error: type, text: str) -> None:
    table = lab.folder / "delta"
    rows = append(table, range(40))

    @unbounded_source(sink=lab.sink())
    def live(context):
        return read_delta_table(context.spark, table)

    pipeline = Pipeline("changing", [live])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count() == 40)
    job.cancel()
    job.result()
    change(table)
    job = lab.start(pipeline, interval=0.3, restart=FixedDelayRestart(5, 0.1))
    failed = job.result().error
    causes = [failed, *_causes(failed)]
    assert any(type(cause) is error for cause in causes), causes
    with pytest.raises(error, match=text):
        raise next(cause for cause in causes if type(cause) is error)  # type: ignore[misc]
    assert any(type(cause) is SourceRowsLostError for cause in causes) == (error is SourceRowsLost)
    assert repeats_by_nature(failed) and job.of(JobRestarting) == []
    assert _counted(lab.committed()) == _counted(rows)


def _causes(error: Any) -> list[BaseException]:
    found = []
    while (error := error.__cause__) is not None:
        found.append(error)
    return found


def test_deleted_rows_are_skipped_if_asked_for_and_a_new_column_takes_a_restart(lab: Any) -> None:
    table = lab.folder / "delta"
    rows = append(table, range(40))

    @unbounded_source(sink=lab.sink())
    def live(context):
        return read_delta_table(context.spark, table, changed_rows="skip").select("n", "price")

    job = lab.start(Pipeline("skipping", [live]), interval=0.3, restart=FixedDelayRestart(5, 0.1))
    job.wait_until(lambda: lab.count() == 40)
    delete_rows(table)
    rows += append(table, range(40, 50))
    job.wait_until(lambda: lab.count() == 50)
    wider = pa.table({"n": [50], "place": ["here"], "day": [dt.date(2026, 2, 1)], "colour": ["red"]})
    write_deltalake(table, wider, mode="append", schema_mode="merge")
    job.wait_until(lambda: lab.count() == 51)
    [restarting] = job.of(JobRestarting)
    assert SourceColumnsChanged.__name__ in str(restarting) and "version 3 has added or changed colour" in str(restarting)
    job.wait_for(CheckpointDone, lambda done: done.stages["live"].rows >= 1)
    job.drain()
    job.finished()
    lab.check([*((row[1], row[4]) for row in rows), (50, None)])
