"""Fused sources: a backfill and a live feed in the query of the stage that reads both, each with an end of its own."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted, StageFinished
from dagster_checkpoints.spark.query.fused_query import FusedQuery

ROWS = "k string, ts timestamp, v long"


def windows_of(frame: Any) -> Any:
    found = frame.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return found.select(F.col("window.start").alias("start"), "k", "v", "n")


def backfill_and_live(lab: Any, name: str = "p") -> Pipeline:
    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage
    def renamed(history):
        return history.where("v >= 0").select("ts", F.col("k").alias("key"), "v")

    @stage
    def both(live, renamed):
        return renamed.withColumnRenamed("key", "k").unionByName(live)

    @stage(sink=lab.sink())
    def windows(both):
        return windows_of(both)

    return Pipeline(name, [history, live, renamed, both, windows])


CHAIN = ("history", "live", "renamed", "both", "windows")


def put(lab: Any, name: str, first: int, minutes: int = 10) -> None:
    lab.put(name, ROWS, [(key, lab.at(60 * minute), minute) for minute in range(first, first + minutes) for key in "ab"])


def test_a_backfill_ends_in_the_query_that_it_shares_with_a_live_feed(lab: Any) -> None:
    for file in range(6):
        put(lab, "history", 10 * file)
    put(lab, "live", 1000)
    job = lab.start(backfill_and_live(lab))
    assert job.chains == (CHAIN,)
    done = job.wait_for(StageFinished)
    assert done.stage == "history"
    recorded = job.wait_for(CheckpointDone, lambda e: e.checkpoint_id == done.checkpoint_id)
    assert (recorded.finished_stages, recorded.roots) == (("history",), ("live",))
    everything = lab.rows(windows_of(lab.table("history", ROWS)))
    job.wait_until(lambda: lab.count() >= len(everything))
    put(lab, "history", 500)
    put(lab, "live", 1010)
    job.wait_until(lambda: lab.count() >= len(everything) + 2)
    job.drain()
    job.finished()
    lab.check(windows_of(lab.table("history", ROWS).where("ts < '2026-01-01 08:00:00'").unionByName(lab.table("live", ROWS))))


def test_the_drain_of_the_run_itself_reads_the_backfill_to_its_end(lab: Any) -> None:
    for file in range(6):
        put(lab, "history", 10 * file)
    put(lab, "live", 100)
    job = lab.start(backfill_and_live(lab))
    job.wait_for(JobStarted)
    job.drain()
    job.finished()
    lab.check(windows_of(lab.table("history", ROWS).unionByName(lab.table("live", ROWS))))


def test_a_finished_backfill_is_not_read_again_after_a_failure_and_an_unfinished_one_reads_on(lab: Any) -> None:
    for file in range(12):
        put(lab, "history", 10 * file)
    put(lab, "live", 1000)
    pipeline = backfill_and_live(lab)

    job = lab.start(pipeline, interval=0.3)
    job.wait_for(CheckpointDone, lambda e: not e.finished_stages)
    job.cancel()
    job.result()

    job = lab.start(pipeline, interval=0.3)
    assert job.wait_for(JobStarted).finished_stages == ()
    done = job.wait_for(StageFinished)
    assert (done.stage, done.restored) == ("history", False)
    job.cancel()
    job.result()
    put(lab, "history", 500)  # behind the bound: it belongs to no run
    put(lab, "live", 1010)

    job = lab.start(pipeline, interval=0.3)
    began = job.wait_for(JobStarted)
    assert (began.finished_stages, began.chains) == (("history",), (CHAIN,))
    assert job.wait_for(StageFinished).restored
    read = lab.table("history", ROWS).where("ts < '2026-01-01 08:00:00'").unionByName(lab.table("live", ROWS))
    due = [row for row in lab.rows(windows_of(read)) if row[0] < lab.at(60 * 1010)]
    job.wait_until(lambda: lab.count() >= len(due))
    last = job.wait_for(CheckpointDone, lambda e: e.checkpoint_id > began.restored_checkpoint + 1)
    assert (last.finished_stages, last.roots, last.stages["history"].finished_instances) == (("history",), ("live",), 1)
    job.cancel()
    job.result()

    job = lab.start(pipeline)  # the empty stream in its place is in the checkpoint now
    put(lab, "live", 1020)
    job.wait_until(lambda: lab.count() >= len(due) + 2)
    job.drain()
    job.finished()
    lab.check(windows_of(read.unionByName(lab.table("live", ROWS).where("ts >= '2026-01-01 17:00:00'"))))


def test_a_restored_query_emits_what_is_due_under_the_event_time_that_it_had_not_run_under(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the backfill moves event time, a checkpoint completes before the next batch, and no row comes any more."""
    put(lab, "history", 0)
    put(lab, "live", 1000)
    pipeline = backfill_and_live(lab)
    with monkeypatch.context() as behind:
        behind.setattr(FusedQuery, "advance", lambda self, watermark: None)
        behind.setattr(FusedQuery, "advance_between_batches", lambda self, watermark: False)
        job = lab.start(pipeline, interval=0.3)
        job.wait_for(CheckpointDone, lambda e: e.finished_stages == ("history",))
        job.cancel()
        job.result()
    assert lab.count() == 0
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count() >= 2)
    job.drain()
    job.finished()
    lab.check(windows_of(lab.table("history", ROWS).unionByName(lab.table("live", ROWS))))


def test_two_feeds_end_one_after_the_other_and_a_suspend_lies_between(lab: Any) -> None:
    """A watermark is the minimum over the feeds that are open: one far ahead makes no row of the other late."""

    def feed(name: str) -> Any:
        def read(context):
            return lab.stream(name, ROWS)

        return unbounded_source(name=name, watermark=("ts", "1 minute"))(read)

    @stage
    def both(ahead, behind):
        return ahead.unionByName(behind).where("v >= 0")

    @stage(sink=lab.sink())
    def windows(both):
        return windows_of(both)

    pipeline = Pipeline("p", [feed("ahead"), feed("behind"), both, windows])
    put(lab, "ahead", 5000)
    put(lab, "behind", 0)
    job = lab.start(pipeline, interval=0.5)
    assert job.chains == (("ahead", "behind", "both", "windows"),)
    put(lab, "behind", 10)
    job.wait_until(lambda: lab.count() >= 2)
    answer = job.done("stop", drain=False)
    job.finished()
    assert "savepoint" in answer.location

    put(lab, "behind", 20)
    job = lab.start(pipeline, interval=0.5)
    job.wait_until(lambda: lab.count() >= 4)
    job.done("end_source", stage="behind")
    assert job.wait_for(StageFinished).stage == "behind"
    put(lab, "behind", 600)  # after its end
    put(lab, "ahead", 6000)
    job.wait_until(lambda: lab.count() >= 6 + 2)  # the windows of the ended feed, and the first of the other one
    job.done("end_source", stage="ahead")
    job.finished()
    assert [event.stage for event in job.of(StageFinished)] == ["behind", "ahead", "both", "windows"]
    assert not job.wait_for(StageFinished, lambda e: e.stage == "windows").late_rows
    read = lab.table("ahead", ROWS).unionByName(lab.table("behind", ROWS).where("ts < '2026-01-01 08:00:00'"))
    lab.check(windows_of(read))


def test_an_idle_feed_holds_no_window_back_until_it_has_rows_again(lab: Any) -> None:
    @unbounded_source(watermark=("ts", "1 minute"), idle_after=0.5)
    def silent(context):
        return lab.stream("silent", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def busy(context):
        return lab.stream("busy", ROWS)

    @stage(sink=lab.sink())
    def windows(silent, busy):
        return windows_of(silent.unionByName(busy))

    put(lab, "silent", 0)
    put(lab, "busy", 1000)
    job = lab.start(Pipeline("p", [silent, busy, windows]), interval=0.5)
    assert job.chains == (("silent", "busy", "windows"),)
    job.wait_until(lambda: lab.count() >= 2)  # only the watermark of the busy feed is behind the silent one's window
    put(lab, "silent", 1010)
    job.wait_until(lambda: job.execution.rows().get("silent") == 40)
    put(lab, "busy", 1020)
    job.wait_until(lambda: lab.count() >= 6)
    job.drain()
    job.finished()
    lab.check(windows_of(lab.table("silent", ROWS).unionByName(lab.table("busy", ROWS))))


def test_feeds_without_event_time_share_a_query_unless_one_sets_a_watermark_itself(lab: Any) -> None:
    def feed(name: str, kind: Any, marked: bool = False) -> Any:
        def read(context):
            rows = lab.stream(name, ROWS)
            return rows.withWatermark("ts", "1 minute") if marked else rows

        return kind(name=name)(read)

    def union_of(to: str, *, marked: bool = False) -> Pipeline:
        @stage
        def positive(history):
            return history.where("v >= 0")

        @stage(sink=lab.sink(to), name="all_rows")
        def union(positive, live):
            return positive.unionByName(live)

        return Pipeline(to, [feed("history", bounded_source, marked), feed("live", unbounded_source), positive, union])

    put(lab, "history", 0)
    put(lab, "live", 100)
    job = lab.start(union_of("rows"), interval=0.3)
    assert job.chains == (("history", "live", "positive", "all_rows"),)
    assert job.wait_for(StageFinished).stage == "history"
    job.cancel()
    job.result()
    put(lab, "history", 200)  # behind the bound
    put(lab, "live", 110)
    job = lab.start(union_of("rows"), interval=0.3)
    job.wait_until(lambda: lab.count("rows") == 60)
    assert job.execution.rows() == {"history": 20, "live": 40, "positive": 20, "all_rows": 60}
    job.done("end_source", stage="live")
    job.finished()
    lab.check(lab.table("history", ROWS).where("ts < '2026-01-01 03:00:00'").unionByName(lab.table("live", ROWS)), "rows")

    job = lab.start(union_of("apart", marked=True))
    assert job.chains == (("history", "positive"), ("live",), ("all_rows",))
    job.drain()
    job.finished()


def test_batches_of_a_backfill_without_a_limit_begin_small_and_a_limit_of_the_users_is_kept(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What a feed gets while the first batch is processed is read beside the backfill, and not behind it."""
    for file in range(60):
        put(lab, "history", 10 * file)
    for file in range(4):
        put(lab, "dated", 10 * file)
    put(lab, "live", 0)
    batches: list[Counter[str]] = []

    def source(name: str, kind: Any, **options: Any) -> Any:
        def read(context):
            reader = lab.spark.readStream.schema(ROWS).options(maxFileAge="36500d", **options)
            return reader.parquet(str(lab.input(name))).select("*", F.lit(name).alias("source"))

        return kind(name=name, watermark=("ts", "1 minute"))(read)

    class Rows(Stage):
        sink = lab.sink()

        def transform(self, context, history, dated, live):
            return history.unionByName(dated).unionByName(live)

        def process_batch(self, batch, batch_id):
            counts = Counter({source: rows for source, rows in batch.groupBy("source").count().collect()})
            if counts["history"]:
                batches.append(counts)
                if len(batches) == 1:
                    put(lab, "live", 10)
            return batch

    sources = [
        source("history", bounded_source),
        source("dated", bounded_source, maxFilesPerTrigger=1),
        source("live", unbounded_source),
    ]
    with caplog.at_level(logging.WARNING, "dagster_checkpoints"):
        job = lab.start(Pipeline("p", [*sources, Rows()]))
        assert job.chains == (("history", "dated", "live", "rows"),)
        job.wait_until(lambda: {done.stage for done in job.of(StageFinished)} == {"history", "dated"})
    job.drain()
    job.finished()
    assert "PerTrigger" not in caplog.text
    of_a_file = 20
    assert batches[:1] == [Counter(history=of_a_file, dated=of_a_file, live=of_a_file)]
    assert all(counts["dated"] in (0, of_a_file) for counts in batches)
    assert 3 <= len(batches) < 60
    assert [counts["live"] for counts in batches] == [of_a_file, of_a_file] + [0] * (len(batches) - 2)
    tables = [lab.table(name, ROWS).select("*", F.lit(name).alias("source")) for name in ("history", "dated", "live")]
    lab.check(tables[0].unionByName(tables[1]).unionByName(tables[2]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("csv", {"mode": "DROPMALFORMED"}), ("json", {"columnNameOfCorruptRecord": "damaged"})],
    ids=["dropped", "marked"],
)
def test_a_damaged_value_counts_in_a_shared_query_also_where_the_reader_does_not_use_it(
    lab: Any, kind: str, options: dict[str, str]
) -> None:
    """Spark parses only the columns that a query uses: the rows of a source would depend on which stages share its query."""
    lines = {
        "csv": ["1,1", "2,no number", "3,3"],
        "json": ['{"k": 1, "v": 1}', '{"k": 2, "v": "no number"}', '{"k": 3, "v": 3}'],
    }
    (lab.input("lines") / f"1.{kind}").write_text("\n".join(lines[kind]) + "\n")
    schema = "k long, v long, damaged string" if kind == "json" else "k long, v long"

    @bounded_source
    def read(context):
        reader = context.spark.readStream.schema(schema).options(maxFileAge="36500d", maxFilesPerTrigger="1", **options)
        return reader.format(kind).load(str(lab.input("lines")))

    @stage(sink=lab.sink())
    def keys(read):
        return (read.where("damaged IS NULL") if kind == "json" else read).select("k")

    job = lab.start(Pipeline("p", [read, keys]))
    assert job.chains == (("read", "keys"),)
    job.finished()
    lab.check([(1,), (3,)])
