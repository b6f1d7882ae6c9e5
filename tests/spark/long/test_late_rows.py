"""Event time that lags behind: windows behind operators without a watermark, other event-time columns, rows dropped as late."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, StageFinished

ROWS = "k string, ts timestamp, v long"


def five_minutes(frame: Any, time: str = "ts") -> Any:
    found = frame.groupBy(F.window(time, "5 minutes"), "k").agg(F.count("*").alias("n"))
    return found.select(F.col("window.start").alias("start"), "k", "n")


def first_of_each(frame: Any) -> Any:
    """The first row of each value, by Spark's older operator with state, which does not give its output a watermark."""

    def update(key, batches, state):
        for batch in batches:
            if not state.exists:
                state.update((1,))
                yield batch[["k", "ts", "v"]].head(1)

    return frame.groupBy("v").applyInPandasWithState(update, ROWS, "n long", "append", "NoTimeout")


def sessions(frame: Any) -> Any:
    """Rows per key until a minute without a row; a session's event time, that of its last row, is long past then."""
    import pandas as pd

    def update(key, batches, state):
        if state.hasTimedOut:
            count, latest = state.get
            state.remove()
            yield pd.DataFrame({"k": [key[0]], "ts": [pd.Timestamp(latest, unit="ms", tz="UTC")], "v": [count]})
            return
        count, latest = state.get if state.exists else (0, 0)
        for batch in batches:
            count += len(batch)
            latest = max(latest, int(batch["ts"].max().timestamp() * 1000))
        state.update((count, latest))
        state.setTimeoutTimestamp(latest + 60_000)

    return frame.groupBy("k").applyInPandasWithState(update, ROWS, "n long, latest long", "append", "EventTimeTimeout")


def windows_of_first_rows(lab: Any) -> Pipeline:
    """Windows behind `first_of_each`, over the live rows."""

    @unbounded_source(watermark=("ts", "10 seconds"), sink=lab.sink("rows"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage
    def first(live):
        return first_of_each(live)

    @stage(sink=lab.sink("windows"))
    def windows(first):
        return five_minutes(first)

    return Pipeline("p", [live, first, windows])


def test_windows_behind_an_operator_without_a_watermark_are_emitted_when_they_are_due(lab: Any) -> None:
    for number in range(5):
        lab.put("live", ROWS, [("a", lab.at(300 * number + s), 300 * number + s) for s in range(0, 10, 2)])

    job = lab.start(windows_of_first_rows(lab))
    job.wait_until(lambda: lab.count("windows") >= 3)
    due = [(lab.at(300 * number), "a", 5) for number in range(5)]
    assert sorted(lab.committed("windows")) == due[:3]
    job.drain()
    job.finished()
    lab.check(due, "windows")


def test_the_only_watermark_passes_an_operator_that_does_not_act_on_event_time(lab: Any) -> None:
    # All in one file, so that the query of `first` gets one watermark, and no batch to run under it.
    lab.put("live", ROWS, [("a", lab.at(300 * n + s), 300 * n + s) for n in range(5) for s in range(0, 10, 2)])

    job = lab.start(windows_of_first_rows(lab))
    job.wait_until(lambda: lab.count("windows") >= 3, 60)
    job.drain()
    job.finished()
    lab.check([(lab.at(300 * number), "a", 5) for number in range(5)], "windows")


def test_rows_that_a_timeout_emits_are_not_late_if_their_lateness_is_declared(lab: Any) -> None:
    for number in range(12):  # a session of one row each
        lab.put("live", ROWS, [(f"k{number}", lab.at(30 * number), 1)])

    @unbounded_source(watermark=("ts", "10 seconds"))
    def live(context):
        return lab.stream("live", ROWS)

    # A session is emitted a minute after its end, in the batch after the one that advanced the watermark.
    @stage(event_time=("ts", "70 seconds"))
    def visits(live):
        return sessions(live)

    @stage(sink=lab.sink("visited"))
    def visited(visits):
        found = visits.groupBy(F.window("ts", "30 seconds"), "k").agg(F.count("*").alias("n"))
        return found.select(F.col("window.start").alias("start"), "k", "n")

    job = lab.start(Pipeline("p", [live, visits, visited]))
    job.wait_until(lambda: lab.count("visited") >= 6)
    assert lab.count("visited") < 12
    job.drain()
    job.finished()
    lab.check([(lab.at(30 * number), f"k{number}", 1) for number in range(12)], "visited")
    assert {event.stage: event.late_rows for event in job.of(StageFinished)}["visited"] == 0


def test_a_lagging_event_time_is_declared_or_its_late_rows_are_counted_and_reported(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(15):
        lab.put("in", ROWS, [("a", lab.at(300 * number + s), s) for s in range(0, 300, 60)])

    @bounded_source(watermark=("ts", "10 seconds"), sink=lab.sink("rows"))
    def rows(context):
        return lab.stream("in", ROWS)

    def half_an_hour_before(rows: Any) -> Any:
        return rows.select("k", (F.col("ts") - F.expr("INTERVAL 30 MINUTES")).alias("booked"))

    undeclared = stage(name="undeclared", event_time="booked")(lambda rows: half_an_hour_before(rows))
    declared = stage(name="declared", event_time=("booked", "30 minutes"))(lambda rows: half_an_hour_before(rows))

    @stage(sink=lab.sink("lost"))
    def lost(undeclared):
        return five_minutes(undeclared, "booked")

    @stage(sink=lab.sink("kept"))
    def kept(declared):
        return five_minutes(declared, "booked")

    job = lab.start(Pipeline("p", [rows, undeclared, declared, lost, kept]))
    with caplog.at_level(logging.WARNING):
        job.finished()
    lab.check([(lab.at(300 * number - 1800), "a", 5) for number in range(15)], "kept")
    late = {event.stage: event.late_rows for event in job.of(StageFinished)}
    assert late["kept"] == 0
    missing = 15 * 5 - sum(n for _, _, n in lab.committed("lost"))
    assert 0 < late["lost"] <= missing
    warnings = [record.getMessage() for record in caplog.records if "as late" in record.getMessage()]
    assert len(warnings) == 1, warnings
    assert "Stage 'lost' (instance '0') dropped at least " in warnings[0] and "rows as late, at least " in warnings[0]
    assert "the watermark 2026-01-01 0" in warnings[0]
    assert "event_time=(column, lateness)" in warnings[0]


def test_rows_without_event_time_that_a_join_or_a_group_never_emits_are_reported_at_the_end(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lab.put("a", ROWS, [("x", lab.at(0), 1), ("y", lab.at(1), 2), ("z", None, 3)])
    lab.put("b", ROWS, [("x", lab.at(2), 1)])

    @bounded_source(watermark=("ts", "0 seconds"))
    def a(context):
        return lab.stream("a", ROWS)

    @bounded_source(watermark=("ts", "0 seconds"))
    def b(context):
        return lab.stream("b", ROWS)

    @stage(sink=lab.sink("pairs"))
    def pairs(a, b):
        right = b.select(F.col("k").alias("rk"), F.col("ts").alias("rts"))
        near = F.expr("k = rk AND rts BETWEEN ts AND ts + INTERVAL 1 MINUTE")
        return a.join(right, near, "left").select("k", F.col("rk").isNotNull().alias("matched"))

    @stage(sink=lab.sink("later"))
    def later(a, b):
        right = b.select(F.col("k").alias("rk"), F.col("ts").alias("rts"))
        return a.where("ts IS NOT NULL").join(right, F.expr("k = rk AND rts <= ts + INTERVAL 1 MINUTE"), "left")

    @stage(sink=lab.sink("instants"))
    def instants(a):
        return a.groupBy("ts").agg(F.count("*").alias("n")).select(F.unix_seconds("ts").alias("at"), "n")

    @stage(sink=lab.sink("hours"))
    def hours(a):
        return a.groupBy(F.window("ts", "1 hour")).agg(F.count("*").alias("n")).select("n")

    job = lab.start(Pipeline("p", [a, b, pairs, later, instants, hours]))
    with caplog.at_level(logging.WARNING):
        job.finished()
    assert lab.committed("pairs") == [("x", True), ("y", False)]
    assert lab.committed("hours") == [(2,)] and len(lab.committed("instants")) == 2
    held = {message.split(":")[0]: message for message in caplog.messages if "stay in its state at the end" in message}
    assert sorted(held) == ["Stage 'instants'", "Stage 'later'", "Stage 'pairs'"]
    assert all(": 1 rows stay in its state" in message for message in held.values())
    assert ["or they are" in message for _, message in sorted(held.items())] == [False, True, False]


def test_late_rows_are_counted_over_restarts_by_the_stage_that_drops_them(lab: Any) -> None:
    """Also the rows of a session, whose operator has a separate metric, and of a chain with two operators."""
    lab.put("live", ROWS, [("a", lab.at(s), s) for s in range(0, 600, 60)])

    @unbounded_source(watermark=("ts", "0 seconds"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage
    def distinct(live):
        return live.dropDuplicatesWithinWatermark(["k", "ts"])

    @stage(sink=lab.sink("windows"))
    def windows(distinct):
        found = distinct.groupBy(F.window("ts", "1 minute"), "k").agg(F.count("*").alias("n"))
        return found.select(F.col("window.start").alias("start"), "k", "n")

    @unbounded_source(watermark=("ts", "0 seconds"))
    def again(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("sessions"))
    def spells(again):
        found = again.groupBy(F.session_window("ts", "90 seconds").alias("session"), "k").agg(F.count("*").alias("n"))
        return found.select(F.col("session.start").alias("start"), "k", "n")

    def late_in(job: Any, count: int) -> None:
        job.wait_for(CheckpointDone, lambda e: (e.stages["distinct"].late_rows, e.stages["spells"].late_rows) == (count, count))

    pipeline = Pipeline("p", [live, distinct, windows, again, spells])
    job = lab.start(pipeline)
    job.wait_until(lambda: lab.count("windows") >= 8)
    lab.put("live", ROWS, [("a", lab.at(s), -1) for s in (5, 10, 15)])
    late_in(job, 3)
    assert job.chains == (("live", "distinct", "windows"), ("again", "spells"))
    assert job.checkpoints()[-1].stages["windows"].late_rows == 0
    job.cancel()
    job.result()
    job = lab.start(pipeline)
    lab.put("live", ROWS, [("a", lab.at(20), -2)])
    late_in(job, 4)
    job.drain()
    job.finished()
    assert {event.stage: event.late_rows for event in job.of(StageFinished)}["distinct"] == 4
