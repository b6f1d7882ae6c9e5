"""A stage reads its inputs and starts nothing: its own stream or query is refused by name, before a row is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, Stage, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.errors import StageError, StageQueryError, StageStreamError
from dagster_checkpoints.spark.job.events import JobStarted

FLIGHTS = "k string, ts timestamp, v long"


def own_stream(lab: Any, flights: Any) -> Any:
    return flights.unionByName(lab.stream("other", FLIGHTS))


def stream_of_the_same_folder(lab: Any, flights: Any) -> Any:
    return flights.join(lab.stream("in", FLIGHTS).select("k"), "k")


def started_query(lab: Any, flights: Any) -> Any:
    flights.writeStream.format("parquet").option("checkpointLocation", str(lab.folder / "c")).start(str(lab.folder / "own"))
    return flights


def query_to_table(lab: Any, flights: Any) -> Any:
    return flights.writeStream.option("checkpointLocation", str(lab.folder / "c")).toTable("own")


@pytest.mark.parametrize("chaining", [True, False])
@pytest.mark.parametrize(
    ("function", "kind", "texts"),
    [
        (own_stream, StageStreamError, ["than its inputs ('flights'), found FileSource[", "other]", "@unbounded_source"]),
        (stream_of_the_same_folder, StageStreamError, ["than its inputs ('flights'), found FileSource[", "in]"]),
        (started_query, StageQueryError, ["in started_query: flights.writeStream", "The query was not started"]),
        (query_to_table, StageQueryError, ["in query_to_table: return flights.writeStream", "process_batch"]),
    ],
)
def test_a_stream_or_a_query_of_a_stages_own_is_refused_in_a_chain_or_alone(
    lab: Any, chaining: bool, function: Callable[[Any, Any], Any], kind: type[StageError], texts: list[str]
) -> None:
    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context):
        return lab.stream("in", FLIGHTS)

    @stage
    def copied(flights):
        return flights

    mixed = stage(name="mixed")(lambda copied: function(lab, copied))

    @stage(sink=lab.sink())
    def last(mixed):
        return mixed

    lab.put("in", FLIGHTS, [("a", lab.at(0), 1)])
    lab.put("other", FLIGHTS, [("b", lab.at(0), 1)])
    job = lab.start(Pipeline("p", [flights, copied, mixed, last], chaining=chaining))
    error = job.result().error
    assert type(error) is kind
    assert str(error).startswith("Stage 'mixed' (instance '0'): ")
    for text in texts:
        assert text.replace("('flights')", "('copied')") in str(error)
    assert job.of(JobStarted) == []
    assert lab.spark.streams.active == []
    assert not (lab.folder / "own").exists()


def starts_query(stream: Any, batch: Any) -> Any:
    stream.writeStream.format("noop").start()
    return batch


def returns_stream(stream: Any, batch: Any) -> Any:
    return stream


@pytest.mark.parametrize(
    ("returned", "kind", "text"),
    [
        (starts_query, StageQueryError, r"test_stage_streams\.py:\d+, in starts_query: stream\.writeStream"),
        (returns_stream, StageStreamError, r"expected process_batch \(.*\) to return rows, found a stream"),
    ],
)
def test_process_batch_starts_no_query_and_returns_no_stream(
    lab: Any, returned: Callable[[Any, Any], Any], kind: type[StageError], text: str
) -> None:
    lab.put("in", FLIGHTS, [("a", lab.at(0), 1)])

    @unbounded_source
    def flights(context):
        return lab.stream("in", FLIGHTS)

    class Copies(Stage):
        def transform(self, context, flights):
            return flights

        def process_batch(self, batch, batch_id):
            return returned(lab.stream("in", FLIGHTS), batch)

    error = lab.start(Pipeline("p", [flights, Copies(sink=lab.sink())])).result().error
    assert type(error.__cause__) is kind
    assert "Stage 'copies' (instance '0'): " in str(error)
    assert re.search(text, str(error))
    assert lab.committed() == []


@pytest.mark.parametrize("chaining", [True, False])
def test_two_streams_in_one_source_a_self_join_and_a_batch_read_in_a_stage_are_accepted(lab: Any, chaining: bool) -> None:
    for minute in range(4):
        lab.put("left", FLIGHTS, [("a", lab.at(60 * minute), minute)])
        lab.put("right", FLIGHTS, [("b", lab.at(60 * minute + 5), 10 + minute)])
    lab.put("names", "k string, name string", [("a", "Anna"), ("b", "Bert")])

    @bounded_source(watermark=("ts", "1 minute"))
    def flights(context):
        return lab.stream("left", FLIGHTS).unionByName(lab.stream("right", FLIGHTS))

    @stage
    def paired(flights):
        names = lab.table("names", "k string, name string")
        return flights.unionByName(flights.withColumn("v", F.col("v") + 100)).join(names, "k")

    @stage(sink=lab.sink())
    def counted(paired):
        windows = paired.groupBy(F.window("ts", "2 minutes"), "name").agg(F.sum("v").alias("v"))
        return windows.select(F.col("window.start").alias("start"), "name", "v")

    lab.start(Pipeline("p", [flights, paired, counted], chaining=chaining)).finished()
    lab.check(
        [
            (lab.at(0), "Anna", 2 * (0 + 1) + 200),
            (lab.at(120), "Anna", 2 * (2 + 3) + 200),
            (lab.at(0), "Bert", 2 * (10 + 11) + 200),
            (lab.at(120), "Bert", 2 * (12 + 13) + 200),
        ]
    )
