"""Timers at the end of data: event-time timers fire, also those that timers set; processing-time timers do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.errors import EndlessTimersError
from dagster_checkpoints.spark.tasks import task_watermarks

CLICKS = "k string, ts timestamp, v long"
COUNTED = "k string, ts timestamp, n long"
MINUTE = 60_000


def counted(frame: Any, delay_ms: Callable[[int], int | None], time_mode: str = "EventTime") -> Any:
    """One row per key and timer: the timer's number. Timer `n - 1` sets timer `n`, `delay_ms` after itself."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    nothing = pd.DataFrame(
        {"k": pd.Series([], dtype=str), "ts": pd.Series([], dtype="datetime64[ns, UTC]"), "n": pd.Series([], dtype="int64")}
    )

    class Timers(StatefulProcessor):
        def init(self, handle):
            self.handle = handle
            self.number = handle.getValueState("number", "n long")

        def handleInputRows(self, key, rows, timerValues):
            latest = max(int(batch["ts"].max().timestamp() * 1000) for batch in rows)
            if not self.number.exists():
                self.number.update((0,))
                begin = latest if time_mode == "EventTime" else timerValues.getCurrentProcessingTimeInMs()
                self.handle.registerTimer(begin + delay_ms(0))
            yield nothing

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            number = self.number.get()[0] + 1
            self.number.update((number,))
            at = expiredTimerInfo.getExpiryTimeInMs()
            delay = delay_ms(number)
            if delay is not None:
                self.handle.registerTimer(at + delay)
            yield pd.DataFrame({"k": [key[0]], "ts": [pd.Timestamp(at, unit="ms", tz="UTC")], "n": [number]})

        def close(self):
            pass

    return frame.groupBy("k").transformWithStateInPandas(Timers(), COUNTED, "Append", time_mode)


def hour_later(number: int) -> int | None:
    return 60 * MINUTE if number < 3 else None


def put_clicks(lab: Any) -> None:
    lab.put("clicks", CLICKS, [(k, lab.at(s), s) for s in (0, 20) for k in ("a", "b")])


def test_timers_that_timers_set_fire_at_the_end_in_a_sources_query_and_behind_channels(lab: Any) -> None:
    """The rows that timers emit are not late for the windows behind them."""
    put_clicks(lab)

    @bounded_source(watermark=("ts", "1 minute"))
    def clicks(context):
        return lab.stream("clicks", CLICKS)

    @stage(sink=lab.sink("native"))
    def native(clicks):
        return counted(clicks, hour_later)

    @bounded_source(watermark=("ts", "1 minute"), sink=lab.sink("rows"))
    def others(context):
        return lab.stream("clicks", CLICKS)

    @stage(sink=lab.sink("timers"))
    def timers(others):
        return counted(others, hour_later)

    @stage(sink=lab.sink("windows"))
    def windows(timers):
        from pyspark.sql import functions as F

        return (
            timers.groupBy(F.window("ts", "1 day"), "k")
            .agg(F.sum("n").alias("n"), F.count("*").alias("rows"))
            .select("k", "n", "rows")
        )

    job = lab.start(Pipeline("p", [clicks, native, others, timers, windows]))
    job.finished()
    assert ("clicks", "native") in job.chains
    expected = [(k, lab.at(20 + 3600 * n), n) for k in ("a", "b") for n in (1, 2, 3)]
    assert sorted(lab.committed("native")) == expected
    assert sorted(lab.committed("timers")) == expected
    assert sorted(lab.committed("windows")) == [("a", 6, 3), ("b", 6, 3)]


def test_timers_without_an_end_are_refused_by_name(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_watermarks, "TIMER_ROUNDS", 2)
    put_clicks(lab)

    @bounded_source(watermark=("ts", "1 minute"))
    def clicks(context):
        return lab.stream("clicks", CLICKS)

    @stage(sink=lab.sink())
    def heartbeat(clicks):
        return counted(clicks, lambda number: 60 * MINUTE)

    result = lab.start(Pipeline("p", [clicks, heartbeat])).result()
    assert result.status == "FAILED"
    assert isinstance(result.error.__cause__ or result.error, EndlessTimersError), result.error
    assert "Stage 'heartbeat' (instance '0')" in str(result.error)
    assert "timers still set timers after 2 rounds" in str(result.error)
    assert lab.committed() == []


def test_processing_time_timers_that_are_not_due_do_not_fire_at_the_end(lab: Any) -> None:
    """FLIP-34: a drain fires event-time timers."""
    put_clicks(lab)

    def soon(number: int) -> int | None:
        return 1 if number == 0 else 60 * MINUTE

    @bounded_source(watermark=("ts", "1 minute"), sink=lab.sink("clicks"))
    def clicks(context):
        return lab.stream("clicks", CLICKS)

    @stage(sink=lab.sink("behind"))
    def behind(clicks):
        return counted(clicks, soon, "ProcessingTime")

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("clicks", CLICKS)

    @stage(sink=lab.sink("native"))
    def native(live):
        return counted(live, soon, "ProcessingTime")

    job = lab.start(Pipeline("p", [clicks, behind, live, native]))
    job.wait_until(lambda: lab.count("native") >= 2)
    job.drain()
    job.finished()
    assert sorted((k, n) for k, _, n in lab.committed("native")) == [("a", 1), ("b", 1)]
    assert {n for _, _, n in lab.committed("behind")} <= {1}
