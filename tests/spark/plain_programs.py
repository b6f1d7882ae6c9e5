"""Programs that run as plain queries and as stages: one for each kind of stateful operator, with their results over all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS = "k string, ts timestamp, v long"
LATENESS = "1 minute"


@dataclass(frozen=True)
class Program:
    """What a query computes.

    Attributes:
        name: Its name.
        streams: The names of its streams.
        result: The result of streams with watermarks.
        expected: The same of all rows, by a batch computation.
        operators: Spark's names of its stateful operators, by number.
        held: Whether it holds rows back until event time has passed them.
    """

    name: str
    streams: tuple[str, ...]
    result: Callable[..., DataFrame]
    expected: Callable[..., DataFrame]
    operators: dict[int, str]
    held: bool = True

    def pipeline(self, read: Callable[[str], DataFrame], sink: Any, *, bounded: bool = False, apart: bool = False) -> Pipeline:
        """The program as the last stage of a pipeline.

        Args:
            read: Reads a stream.
            sink: The sink.
            bounded: Whether the pipeline ends when it has read what there is.
            apart: Whether the sources have queries of their own.
        """
        declared = bounded_source if bounded else unbounded_source
        how = {name: StageInput(fuse=False) for name in self.streams} if apart else None

        def source(name: str) -> Any:
            return declared(name=name, watermark=("ts", LATENESS))(lambda context: read(name))

        if len(self.streams) == 1:

            @stage(name=self.name, sink=sink, inputs=how)
            def one(left: Any) -> Any:
                return self.result(left)

            last = one
        else:

            @stage(name=self.name, sink=sink, inputs=how)
            def two(left: Any, right: Any) -> Any:
                return self.result(left, right)

            last = two
        return Pipeline(f"taken_{self.name}", [*map(source, self.streams), last])

    def plain(self, read: Callable[[str], DataFrame]) -> DataFrame:
        """The program as a streaming DataFrame of Spark alone."""
        return self.result(*(read(name).withWatermark("ts", LATENESS) for name in self.streams))


def _filtered(left: DataFrame) -> DataFrame:
    return left.where("v % 3 > 0").selectExpr("k", "ts", "v * 10 AS v")


def _windows(left: DataFrame) -> DataFrame:
    sums = left.groupBy(F.window("ts", "5 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return sums.select("k", F.window_time("window").alias("ts"), "v", "n")


def _joined(how: str) -> Callable[..., DataFrame]:
    def result(left: DataFrame, right: DataFrame) -> DataFrame:
        other = right.selectExpr("k AS k2", "ts AS ts2", "v AS v2")
        within = F.expr("k = k2 AND ts2 >= ts AND ts2 <= ts + INTERVAL 3 MINUTES AND v % 2 = 0")
        return left.join(other, within, how).select("k", "ts", "v", "v2")

    return result


def _distinct(left: DataFrame) -> DataFrame:
    return left.withColumn("of", F.expr("(v + 3) DIV 6")).dropDuplicatesWithinWatermark(["k", "of"]).select("k", "of")


def _first_of_each(left: DataFrame) -> DataFrame:
    """Of the rows of six numbers that a key has, the first one, however late the others are."""
    return left.withColumn("of", F.expr("(v + 3) DIV 6")).dropDuplicates(["k", "of"]).select("k", "of")


def _two_steps(left: DataFrame) -> DataFrame:
    """Two stateful operators, one behind the other."""
    first = left.groupBy(F.window("ts", "1 minute"), "k").agg(F.max("v").alias("v"))
    second = first.groupBy(F.window(F.window_time("window"), "5 minutes"), "k").agg(F.sum("v").alias("v"))
    return second.select("k", F.window_time("window").alias("ts"), "v")


def _by_timer(left: DataFrame) -> DataFrame:
    """For each key, the sum of the rows of each five minutes, from a processor with a map and timers."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Sums(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.sums = handle.getMapState("sums", "until long", "v long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
            for batch in rows:
                until = (batch["ts"].astype("datetime64[ms]").astype("int64") // 300_000 + 1) * 300_000
                for at, v in zip(until, batch["v"], strict=True):
                    before = self.sums.getValue((int(at),))[0] if self.sums.containsKey((int(at),)) else 0
                    self.sums.updateValue((int(at),), (before + int(v),))
                    self.handle.registerTimer(int(at))
            yield pd.DataFrame({"k": pd.Series([], dtype=str), "until": [], "v": []}).astype({"until": "int64", "v": "int64"})

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
            at = expiredTimerInfo.getExpiryTimeInMs()
            yield pd.DataFrame({"k": [key[0]], "until": [at], "v": [self.sums.getValue((at,))[0]]})
            self.sums.removeKey((at,))

        def close(self) -> None:
            pass

    frame = left.groupBy("k").transformWithStateInPandas(Sums(), "k string, until long, v long", "Append", "EventTime")
    return frame.select("k", "until", "v")


def _timer_sums(left: DataFrame) -> DataFrame:
    until = F.expr("(unix_millis(ts) DIV 300000 + 1) * 300000")
    return left.groupBy("k", until.alias("until")).agg(F.sum("v").alias("v"))


def _sessions(left: DataFrame) -> DataFrame:
    """Sessions that end: the gaps of each key are longer than two minutes now and then."""
    some = left.where("v DIV 20 % 3 < 2")
    sums = some.groupBy(F.session_window("ts", "2 minutes"), "k").agg(F.sum("v").alias("v"))
    return sums.select("k", F.col("session_window.start").alias("begin"), F.col("session_window.end").alias("ts"), "v")


def _folded(left: DataFrame) -> DataFrame:
    """For each key, the sum of its first 64 rows, when all of them are there."""
    import pandas as pd

    def fold(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        before, total = state.get if state.exists else (0, 0)
        count = before
        for frame in frames:
            first = frame[frame["v"] < 192]
            count, total = count + len(first), total + int(first["v"].sum())
        state.update((count, total))
        found = [(key[0], count, total)] if before < count == 64 else []
        yield pd.DataFrame(found, columns=["k", "n", "v"]).astype({"n": "int64", "v": "int64"})

    return left.groupBy("k").applyInPandasWithState(fold, "k string, n long, v long", "n long, v long", "append", "NoTimeout")


def _first_sums(left: DataFrame) -> DataFrame:
    sums = left.where("v < 192").groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("v"))
    return sums.where("n = 64").select("k", "n", "v")


_SAVE, _JOIN = "stateStoreSave", "symmetricHashJoin"
PROGRAMS = {
    each.name: each
    for each in (
        Program("filtered", ("left",), _filtered, _filtered, {}, held=False),
        Program("windows", ("left",), _windows, _windows, {0: _SAVE}),
        Program("pairs", ("left", "right"), _joined("inner"), _joined("inner"), {0: _JOIN}, held=False),
        # A row that the condition on its own side excludes is not held back.
        Program("unmatched", ("left", "right"), _joined("left_outer"), _joined("left_outer"), {0: _JOIN}, held=False),
        Program(
            "distinct",
            ("left",),
            _distinct,
            lambda left: left.selectExpr("k", "(v + 3) DIV 6 AS of").distinct(),
            {0: "dedupeWithinWatermark"},
            held=False,
        ),
        Program("steps", ("left",), _two_steps, _two_steps, {0: _SAVE, 1: _SAVE}),
        Program("sessions", ("left",), _sessions, _sessions, {0: "sessionWindowStateStoreSaveExec"}),
        Program("folded", ("left",), _folded, _first_sums, {0: "applyInPandasWithState"}, held=False),
        Program("timers", ("left",), _by_timer, _timer_sums, {0: "transformWithStateInPandasExec"}),
        Program("first", ("left",), _first_of_each, _first_of_each, {0: "dedupe"}, held=False),
    )
}


def rows_of(stream: str, file: int, at: Callable[[float], Any]) -> list[tuple[str, Any, int]]:
    """The rows of a file: the next four minutes, ten seconds from one row to the next.

    Args:
        stream: The name of the stream.
        file: The number of the file, from 0.
        at: The time that is a number of seconds after the beginning.
    """
    shift = 45 if stream == "right" else 0
    return [("abc"[n % 3], at(10 * n + shift), n) for n in range(24 * file, 24 * (file + 1))]
