"""DeltaSink with a key, in tables that only Delta has. What it promises beside: `test_lake_by_key.py`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.sinks import SinkColumnsMismatch, SinkPathInUse, SinkRowsRefused
from tests.sinks.delta_lake import Table
from tests.sinks.sink_instance import context
from tests.sinks.test_lake_by_key import DAY, MOMENT, Job, rows


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(Table(tmp_path))


def test_a_key_of_several_columns_and_partitions_that_are_in_it_or_not(tmp_path: Path) -> None:
    def columns(*values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(("shop", "day", "n", "v"), map(pa.array, zip(*values, strict=True)), strict=True))

    first = columns(("a b/ü=", DAY, 1, "x"), ("n", DAY, 1, "x"), ("n", DAY + timedelta(1), 1, "x"))
    second = columns(("n", DAY + timedelta(1), 1, "y"), ("a b/ü=", DAY, 2, "y"), ("a b/ü=", DAY, 1, "z"))
    for number, (key, partition_by, left) in enumerate(
        (
            (["shop", "day", "n"], ["shop", "day"], {("n", DAY, 1, "x")}),
            (["n", "shop"], ["day"], set()),
            (["shop", "day", "n"], None, {("n", DAY, 1, "x")}),
            (["n"], ["shop"], set()),
        )
    ):
        job = Job(Table(tmp_path / str(number)), key, partition_by=partition_by)
        sink = job.sink()
        job.commit(sink, first)
        job.commit(sink, second)
        written = [*pa.table(first).to_pylist(), *pa.table(second).to_pylist()]
        model = {tuple(row[name] for name in key): tuple(row.values()) for row in written}
        found = job.lake.sorted_rows("shop", "day", "n", "v")
        assert found == sorted(model.values(), key=repr)
        assert {row for row in found if row[3] == "x"} == left


def test_an_empty_text_in_a_partition_column_of_the_key_is_refused(tmp_path: Path) -> None:
    job = Job(Table(tmp_path), "s", partition_by="s")
    with pytest.raises(SinkRowsRefused, match="An empty text in a partition column may be null"):
        job.write(job.sink(), {"s": pa.array(["", "x"]), "v": pa.array([1, 2])})
    assert job.lake.data_files() == []


def test_rows_of_other_programs_are_replaced_and_their_other_rows_stay(tmp_path: Path) -> None:
    job = Job(Table(tmp_path), ["k", "ts"])

    def columns(kind: Any, *rows: tuple[str | None, Any, int]) -> dict[str, Any]:
        keys, times, values = zip(*rows, strict=True)
        return {"k": pa.array(keys, kind), "ts": pa.array(times, pa.timestamp("us", "UTC")), "v": pa.array(values)}

    later = MOMENT + timedelta(seconds=1)
    job.lake.append(**columns(pa.large_string(), ("a", MOMENT, 1), ("b", MOMENT, 2), (None, later, 3)))
    sink = job.sink()
    new = columns(pa.string(), ("b", MOMENT, 20), ("c", MOMENT, 30))
    job.commit(sink, new)
    job.lake.append(**columns(pa.string(), ("c", MOMENT, 31)))
    assert sorted(v for _, v in job.rows()) == [1, 3, 20, 30, 31]
    job.commit(sink, new)
    assert sorted(v for _, v in job.rows()) == [1, 3, 20, 30]
    job.lake.rewrite()
    DeltaTable(job.lake.path).create_checkpoint()
    job.commit(sink, columns(pa.string(), ("c", MOMENT, 30)))
    assert sorted(v for _, v in job.rows()) == [1, 3, 20, 30]


def test_a_commit_that_a_merge_overtakes_is_planned_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a"), (3, "c")))
    text = job.staged(sink, rows((1, "A"), (3, "C"), (5, "E")))

    def merge() -> None:
        source = pa.table(rows((3, "other"), (5, "other"), (6, "other")))
        one = DeltaTable(job.lake.path).merge(source, "t.k = s.k", source_alias="s", target_alias="t")
        one.when_matched_update_all().when_not_matched_insert_all().execute()

    job.lake.overtake(monkeypatch, merge)
    sink.commit(text)
    assert job.rows() == [(1, "A"), (3, "C"), (5, "E"), (6, "other")]


def test_a_new_start_does_not_remove_what_remains_of_rows_of_other_programs(job: Job) -> None:
    job.lake.append(**rows((1, "other"), (2, "other")))
    job.commit(job.sink(), rows((1, "a")))
    assert len(job.lake.files()) == 2  # the other program's file was written again
    with pytest.raises(SinkPathInUse, match=r"-of-others-.*of another program, or rewritten by one"):
        job.lake.sink(key="k", at_new_start="replace").check_new_start(context(job_id=2))


def test_tables_in_which_rows_cannot_be_replaced_are_refused(job: Job) -> None:
    for name in ("delta.appendOnly", "delta.enableChangeDataFeed"):
        write_deltalake(job.lake.path, pa.table(rows((1, "a"))), mode="overwrite")
        DeltaTable(job.lake.path).alter.set_table_properties({name: "true"})
        with pytest.raises(SinkColumnsMismatch, match=name):
            job.sink()
        DeltaTable(job.lake.path).alter.set_table_properties({name: "false"})
    job.sink()


def test_a_file_whose_name_the_library_would_write_otherwise_is_refused(job: Job) -> None:
    job.lake.append(**rows((1, "a")))
    log = job.lake.path / "_delta_log" / "00000000000000000000.json"
    (file,) = job.lake.files()
    file.rename(file.with_name("café.parquet"))
    log.write_text(log.read_text().replace(file.name, "café.parquet"))
    sink = job.sink()
    text = job.staged(sink, rows((1, "A")))
    with pytest.raises(SinkColumnsMismatch, match=r"caf.*other escapes"):
        sink.commit(text)
