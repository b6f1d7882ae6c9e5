"""The table of docs/sources.md: what each source does at a limit, at a restore, at its end and at a drain."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as orc

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, StageFinished

PAGE = Path(__file__).parents[2] / "docs/sources.md"
SHOWN_BY = {
    "files": ("test_files_of_each_format_are_read_once", "test_unbounded_sources_continue_and_end"),
    "files on S3A": ("servers/test_remote_work_directory.py::test_a_pipeline_on_s3a_is_exact_after_a_kill",),
    "`rate`, `rate-micro-batch`": (
        "test_unbounded_sources_continue_and_end",
        "test_source_checks.py::test_rows_that_have_no_end_are_refused_in_a_bounded_source",
    ),
    "Kafka": (
        "servers/test_kafka_source.py::test_a_live_topic_through_failures_of_the_job_and_of_the_broker",
        "servers/test_kafka_source.py::test_rows_that_retention_has_deleted_are_missed_by_name",
        "servers/test_kafka_source.py::test_a_topic_is_read_to_an_end",
    ),
    "`@split_source`": (
        "long/test_split_sources.py::test_splits_are_read_once_through_a_failure_with_an_instance_that_has_finished",
        "processes/test_killed_sources.py::test_a_killed_run_continues_with_the_next_split",
    ),
    "`read_sql_table`": ("processes/test_killed_sources.py::test_a_killed_run_continues_with_the_next_split",),
    "`read_delta_table`": (
        "long/test_delta_source.py::test_rows_arrive_once_through_a_restore_and_rewrites",
        "long/test_delta_source.py::test_what_has_changed_or_gone_is_refused_by_name",
        "processes/test_killed_sources.py::test_a_killed_run_continues_with_the_next_split",
    ),
    "`read_iceberg_table`": ("long/test_iceberg_source.py::test_rows_of_a_sink_and_of_another_program_arrive_once",),
    "a batch DataFrame": ("test_a_batch_dataframe_is_one_micro_batch",),
    "`socket`, queues (JMS, MQTT, RabbitMQ, SQS, Solace, NATS), Kafka's share groups (`kafka-share`), `cleanSource`": (
        "test_source_checks.py::test_a_source_that_acts_on_commit_is_refused_before_anything_starts",
    ),
}
"""By line of the table, the tests that show it."""


def test_every_line_of_the_table_has_a_test() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## What each one does")[1].split("\n## ")[0]
    lines = [
        re.sub(r"\[(.+?)\]\(.*?\)", r"\1", line.split("|")[1].strip()) for line in table.splitlines() if line.startswith("| ")
    ]
    assert set(lines) - {"source"} == set(SHOWN_BY)
    for tests in SHOWN_BY.values():
        for test in tests:
            file, _, name = test.rpartition("::")
            text = (Path(__file__).parent / (file or Path(__file__).name)).read_text(encoding="utf-8")
            assert f"def {name}(" in text, test


def put_csv(folder: Path, name: str, rows: list[tuple[int, str]]) -> None:
    (folder / f"{name}.csv").write_text("".join(f"{n},{word}\n" for n, word in rows))


def put_json(folder: Path, name: str, rows: list[tuple[int, str]]) -> None:
    (folder / f"{name}.json").write_text("".join(json.dumps({"n": n, "word": word}) + "\n" for n, word in rows))


def put_text(folder: Path, name: str, rows: list[tuple[int, str]]) -> None:
    (folder / f"{name}.txt").write_text("".join(f"{n} {word}\n" for n, word in rows))


def put_orc(folder: Path, name: str, rows: list[tuple[int, str]]) -> None:
    orc.write_table(pa.table({"n": [n for n, _ in rows], "word": [word for _, word in rows]}), folder / f"{name}.orc")


FORMATS: dict[str, Callable[[Path, str, list[tuple[int, str]]], None]] = {
    "csv": put_csv,
    "json": put_json,
    "text": put_text,
    "orc": put_orc,
}
FILES = 12


def test_files_of_each_format_are_read_once(lab: Any) -> None:
    """Bounded, one file per trigger; the run is cancelled in the middle, and continued. (Parquet: nearly all other tests.)"""
    rows = [[(10 * file + n, f"w{n}") for n in range(10)] for file in range(FILES)]
    for kind, put in FORMATS.items():
        for number, each in enumerate(rows):
            put(lab.input(kind), f"{number:03d}", each)

    def source(kind: str) -> Any:
        def read(context):
            reader = lab.spark.readStream.format(kind).option("maxFilesPerTrigger", 1)
            frame = (reader if kind == "text" else reader.schema("n long, word string")).load(str(lab.input(kind)))
            return (
                frame.selectExpr("CAST(split(value, ' ')[0] AS long) AS n", "split(value, ' ')[1] AS word")
                if kind == "text"
                else frame
            )

        return bounded_source(name=f"{kind}_files", sink=lab.sink(kind))(read)

    pipeline = Pipeline("formats", [source(kind) for kind in FORMATS])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: all(lab.count(kind) for kind in FORMATS))
    job.cancel()
    job.result()
    before = {kind: lab.count(kind) for kind in FORMATS}
    assert min(before.values()) > 0
    lab.start(pipeline, interval=0.3).finished()
    for kind in FORMATS:
        lab.check([row for each in rows for row in each], kind)


def test_unbounded_sources_continue_and_end(lab: Any) -> None:
    """A cancelled run is continued; one source is ended on request, the others by a drain."""

    @unbounded_source(sink=lab.sink("files"))
    def files(context):
        return lab.stream("files", "n long")

    @unbounded_source(sink=lab.sink("rate"))
    def rate(context):
        return lab.spark.readStream.format("rate").option("rowsPerSecond", 50).load()

    @unbounded_source(sink=lab.sink("micro"))
    def micro(context):
        options = {"rowsPerBatch": 7, "startTimestamp": 0, "advanceMillisPerBatch": 1000}
        return lab.spark.readStream.format("rate-micro-batch").options(**options).load()

    pipeline = Pipeline("endless", [files, rate, micro])
    for number in range(3):
        lab.put("files", "n long", [(number,)])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count("files") == 3 and lab.count("rate") and lab.count("micro"))
    job.cancel()
    job.result()
    before = {name: lab.count(name) for name in ("rate", "micro")}
    lab.put("files", "n long", [(3,)])
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count("files") == 4)
    job.done("end_source", stage="files")
    job.wait_for(StageFinished, lambda event: event.stage == "files")
    lab.put("files", "n long", [(4,)])  # after its end
    job.wait_until(lambda: all(lab.count(name) > count for name, count in before.items()))
    job.drain()
    job.finished()
    lab.check([(n,) for n in range(4)], "files")

    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    found = sorted((value, time) for time, value in lab.committed("micro"))
    assert found == [(n, epoch + dt.timedelta(seconds=n // 7)) for n in range(len(found))] and len(found) % 7 == 0

    found = sorted((value, time) for time, value in lab.committed("rate"))
    began = found[0][1]  # of the first run: the checkpoint holds it
    assert found == [(n, began + dt.timedelta(milliseconds=20 * n)) for n in range(len(found))] and len(found) % 50 == 0


def test_a_batch_dataframe_is_one_micro_batch(lab: Any) -> None:
    """It is read once: a restore from a later checkpoint does not read it again."""

    @bounded_source(sink=lab.sink("table"))
    def table(context):
        return lab.spark.range(0, 5000, 1, 4).selectExpr("id", "uuid() AS random")

    @unbounded_source
    def live(context):
        return lab.stream("live", "n long")

    @stage(sink=lab.sink("copied"))
    def copied(live):
        return live

    pipeline = Pipeline("static", [table, live, copied])
    lab.put("live", "n long", [(1,)])
    job = lab.start(pipeline, interval=0.3)
    job.wait_for(StageFinished, lambda event: event.stage == "table")
    job.wait_for(CheckpointDone, lambda done: lab.count("table") == 5000)
    job.cancel()
    job.result()
    before = lab.committed("table")
    job = lab.start(pipeline, interval=0.3)
    lab.put("live", "n long", [(2,)])
    job.wait_until(lambda: lab.count("copied") == 2)
    job.drain()
    job.finished()
    assert lab.committed("table") == before
    assert sorted(n for n, _ in before) == list(range(5000))
