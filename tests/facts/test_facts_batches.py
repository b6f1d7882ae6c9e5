"""Micro-batches: the threads and the commit of `foreachBatch`, timestamps in Parquet and Arrow, sources that act on commit."""

from __future__ import annotations

import datetime as dt
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECONDS = 60.0


def test_batches_of_two_queries_run_at_once_on_threads_of_this_process_and_are_committed_when_they_return(scene: Any) -> None:
    scene.put("in", ("a", 1, 1))
    both = threading.Barrier(2, timeout=SECONDS)
    threads: set[int] = set()
    committed: list[bool] = []

    def start(name: str) -> Any:
        checkpoint = scene.folder / name

        def meet(batch: DataFrame, number: int) -> None:
            assert batch.count() == 1
            both.wait()
            threads.add(threading.get_ident())
            committed.append((checkpoint / "commits" / str(number)).exists())

        writer = scene.stream().writeStream.option("checkpointLocation", str(checkpoint))
        return writer.trigger(availableNow=True).foreachBatch(meet).start()

    queries = [start("first"), start("second")]
    for query in queries:
        query.awaitTermination()
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert committed == [False, False]
    assert [(scene.folder / name / "commits" / "0").exists() for name in ("first", "second")] == [True, True]


def test_a_batch_without_input_follows_when_the_watermark_has_moved(scene: Any) -> None:
    scene.put("in", ("a", 1, 1), ("a", 100, 1))
    counted = scene.stream().withWatermark("ts", "0 seconds").groupBy(F.window("ts", "30 seconds")).count().select("count")
    assert scene.run(counted, scene.folder / "query") == [(0, []), (1, [(1,)])]


@pytest.mark.parametrize("evaluate", [lambda batch: batch.limit(1).collect(), lambda batch: None], ids=["limit", "no action"])
def test_a_stateful_batch_that_is_not_evaluated_whole_fails_the_query(scene: Any, evaluate: Any) -> None:
    for _ in range(2):
        scene.put("in", *[(str(number), number, 1) for number in range(100)])
    numbers: list[int] = []

    def partly(batch: DataFrame, number: int) -> None:
        numbers.append(number)
        evaluate(batch)

    with scene.setting("spark.sql.shuffle.partitions", "4"):
        writer = scene.stream().groupBy("k").count().writeStream.outputMode("update").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(scene.folder / "query")).foreachBatch(partly).start()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination()
    assert numbers == [0]


def test_timestamps_are_microseconds_in_utc_in_parquet_and_arrow_if_the_session_says_so(scene: Any) -> None:
    instant = dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC)
    frame = scene.spark.createDataFrame([(instant,)], "ts timestamp")
    utc = pa.timestamp("us", "UTC")
    assert frame.toArrow().schema.field("ts").type == utc

    frame.write.parquet(str(scene.folder / "micros"))
    written = pq.read_table(scene.folder / "micros")
    assert pa.types.is_timestamp(written.schema.field("ts").type) and written.schema.field("ts").type == utc
    assert written.column("ts").to_pylist() == [instant]

    with scene.setting("spark.sql.parquet.outputTimestampType", "INT96"):  # Spark's default
        frame.write.parquet(str(scene.folder / "int96"))
    read = pq.read_table(scene.folder / "int96").schema.field("ts").type
    assert read == pa.timestamp("ns"), "other readers cannot hold the year 9999 in it"


def test_a_source_that_cleans_up_on_commit_does_so_before_a_checkpoint_can_hold_the_batch(scene: Any) -> None:
    files = [scene.put("in", ("a", number, 1)) for number in range(3)]
    seen: list[list[bool]] = []

    def look(batch: DataFrame, _: int) -> None:
        batch.count()
        seen.append([file.exists() for file in files])

    with scene.setting("spark.sql.streaming.fileSource.cleaner.numThreads", "0"):  # on the query's thread
        writer = scene.stream(cleanSource="delete").writeStream.option("checkpointLocation", str(scene.folder / "query"))
        writer.trigger(availableNow=True).foreachBatch(look).start().awaitTermination()
    assert seen == [[True, True, True], [False, True, True], [False, False, True]]


def test_a_source_without_a_limit_is_one_batch(scene: Any) -> None:
    for number in range(3):
        scene.put("in", ("a", number, 1))
    stream = scene.spark.readStream.schema("k string").parquet(str(scene.folder / "in"))
    assert scene.run(stream, scene.folder / "query") == [(0, [("a",), ("a",), ("a",)])]


def test_a_query_can_be_held_at_its_start_and_its_sources_limited_while_it_runs(scene: Any) -> None:
    """Listeners are told of a start on the query's thread, before it has sources; batches are planned under the query's lock."""
    for file in range(12):
        scene.put("in", *[(str(number), file, number) for number in range(10)])
    jvm, streams = scene.spark.sparkContext._jvm, scene.spark.streams
    held, limited = threading.Event(), threading.Event()

    def hold(query_id: str) -> None:
        lock = streams._jsqm.get(query_id).streamingQuery().awaitProgressLock()
        lock.lock()
        held.set()
        limited.wait(SECONDS)
        lock.unlock()

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            threading.Thread(target=hold, args=(str(event.id),)).start()
            held.wait(SECONDS)

        def onQueryProgress(self, event: Any) -> None: ...

        def onQueryTerminated(self, event: Any) -> None: ...

    def limit(bytes_of_files: int) -> None:
        execution = query._jsq.streamingQuery()
        of = jvm.org.apache.spark.sql.connector.read.streaming.ReadLimit.maxBytes(bytes_of_files)
        getattr(execution, "uniqueSources_$eq")(execution.uniqueSources().updated(execution.sources().apply(0), of))

    sizes, limits = [], [1, 10**9, 1, 1, 1]

    def process(batch: DataFrame, number: int) -> None:
        (leaf,) = [query._jsq.streamingQuery().lastExecution().logical().collectLeaves().apply(0)]
        sizes.append((batch.count(), leaf.relation().location().sizeInBytes()))
        if number == 0:  # a stream that is then held to what is there keeps its limit
            query._jsq.streamingQuery().sources().apply(0).prepareForTriggerAvailableNow()
            scene.put("in", ("late", 1, 1))
        limit(limits.pop(0))

    reader = scene.spark.readStream.schema("k string, ts timestamp, v long").parquet(str(scene.folder / "in"))
    listener = Listener()
    streams.addListener(listener)
    try:
        checkpoint = scene.folder / "query"
        query = reader.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(process).start()
        while not query._jsq.streamingQuery().uniqueSources().size():
            assert query.isActive
        limit(1)
        limited.set()
        query.processAllAvailable()
        query.stop()
    finally:
        limited.set()
        streams.removeListener(listener)
    size = next((scene.folder / "in").glob("0*")).stat().st_size
    assert sizes == [(10, size), (10, size), (100, 10 * size)]
