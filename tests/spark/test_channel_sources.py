"""The sources behind stage inputs, in queries of Spark: micro-batches end where the gate stands, and no file is skipped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties
from dagster_checkpoints.execution.elements import BarrierMark, WatermarkAt
from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.spark.channels.channel_log import Channel, Records
from dagster_checkpoints.spark.channels.segments import write_segment
from dagster_checkpoints.spark.files.work_path import urls
from dagster_checkpoints.spark.query.channel_sources import ChannelSources, SegmentsLostError
from dagster_checkpoints.spark.query.driver_sources import ParquetScans
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.stage_inputs import EventTime, StreamInput, stream_dataframe

SECONDS = 120.0
BARRIER = BarrierMark(CheckpointBarrier(1, 0.0, CheckpointProperties()))


class Reading:
    """A query over two channels of one input, and the rows of each of its batches."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self.channels = [Channel(ChannelId("a", index, "b", 0)) for index in range(2)]
        self.names = [str(channel.id) for channel in self.channels]
        self.gate = QueryGate(dict.fromkeys(self.names, 0))
        self.batches: list[list[int]] = []
        self._segments = 0
        self._query: Any = None

    def emit(self, index: int, *ids: int) -> Path:
        """Append a segment to a channel. Returns one of its files."""
        rows = self._spark.createDataFrame([(i,) for i in ids], "id bigint")
        frame = rows.select("id", F.timestamp_seconds("id").alias("ts"))
        segment = write_segment(frame, self._folder / f"segment-{self._segments}")
        self._segments += 1
        assert segment is not None
        self.channels[index].append(Records(segment))
        return segment.files[0]

    def open(self, *positions: int, watermark: int | None = None) -> None:
        self.gate.open_to(dict(zip(self.names, positions, strict=True)), watermark)

    def start(self, event_time: EventTime | None = None) -> None:
        schema = self._spark.createDataFrame([], "id bigint, ts timestamp").schema
        channels = dict(zip(self.names, self.channels, strict=True))
        stream = StreamInput("a", schema, self.gate, channels, event_time, 1)
        frame = stream_dataframe(ChannelSources(self._spark), stream)

        def keep(batch: Any, _: int) -> None:
            self.batches.append(sorted(row.id for row in batch.collect()))
            self.gate.batch_ran()

        self.gate.begin()
        writer = frame.writeStream.option("checkpointLocation", str(self._folder / "checkpoint"))
        self._query = writer.foreachBatch(keep).start()

    def settle(self) -> list[list[int]]:
        """The rows of all batches, as soon as Spark has nothing more to do."""
        deadline = time.monotonic() + SECONDS
        while not self.gate.idle:
            assert time.monotonic() < deadline and self._query.isActive, self._query.exception()
            time.sleep(0.01)
        return self.batches

    def stop(self) -> None:
        self.gate.close()
        if self._query is not None:
            self._query.stop()


@pytest.fixture
def reading(spark: Any, tmp_path: Path) -> Iterator[Reading]:
    made = Reading(spark, tmp_path)
    yield made
    made.stop()


def test_batches_end_where_the_gate_stands_and_marks_need_none(reading: Reading) -> None:
    reading.emit(0, 1, 2)
    reading.channels[0].append(BARRIER)
    reading.emit(0, 3)
    reading.channels[1].append(BARRIER)
    reading.emit(1, 10)
    reading.start()
    assert reading.settle() == [], "no records, no batch"
    reading.open(0, 1)
    assert reading.settle() == [], "only a barrier"
    reading.open(2, 1)
    assert reading.settle() == [[1, 2]], "not the records behind the barriers"
    reading.open(3, 2)
    assert reading.settle() == [[1, 2], [3, 10]]
    reading.channels[0].append(WatermarkAt(5))
    reading.open(4, 2)
    reading.channels[0].release_before(4)
    assert reading.settle() == [[1, 2], [3, 10]]
    for number in range(40):  # more files than Spark lists without a job of its own
        reading.emit(1, 100 + number)
    reading.open(4, 42)
    assert reading.settle()[2:] == [list(range(100, 140))]

    reading.stop()  # and again from its offsets
    reading.emit(1, 7)
    reading.start()
    reading.open(4, 43)
    assert reading.settle()[3:] == [[7]]


def test_the_row_of_a_watermark_is_dropped_and_the_watermark_is_that_of_the_next_batch(reading: Reading) -> None:
    reading.start(EventTime("ts", 5_000))
    reading.emit(0, 1, 2)
    reading.open(1, 0, watermark=1_000)
    assert reading.settle()[0] == [1, 2]
    reading.open(1, 0, watermark=10**15)
    assert [batch for batch in reading.settle() if batch] == [[1, 2]]
    offsets = [(reading._folder / "checkpoint/offsets" / str(number)).read_text() for number in range(len(reading.batches))]
    assert '"batchWatermarkMs":0' in offsets[0] and '"watermark": 1000' in offsets[0]
    assert '"watermark": 1000000000000000' in offsets[-1]


@pytest.mark.parametrize("moment", ["before the batch is planned", "after"])
def test_lost_files_fail_the_query_whatever_the_session_ignores(reading: Reading, spark: Any, moment: str) -> None:
    """`ignoreMissingFiles` and `ignoreCorruptFiles` of a user are for his own files."""
    ignored = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")
    for setting in ignored:
        spark.conf.set(setting, "true")
    try:
        lost = reading.emit(0, 1, 2)
        sources = ChannelSources(spark)
        if moment == "after":
            schema = sources.java_schema(spark.createDataFrame([], "id bigint, ts timestamp").schema)
            batch = ParquetScans(sources, schema).of(urls([lost])).toBatch()
            partitions = batch.planInputPartitions()
            lost.unlink()
            reader = batch.createReaderFactory().createColumnarReader(partitions[0])
            with pytest.raises(Exception, match=r"FileNotFound|FILE_NOT_EXIST"):
                reader.next()
            return
        lost.unlink()
        reading.start()
        reading.open(1, 0)
        with pytest.raises(StreamingQueryException):
            reading._query.awaitTermination()
        assert isinstance(reading.gate.error, SegmentsLostError)
        assert "input 'a'" in str(reading.gate.error) and lost.name in str(reading.gate.error)
        assert reading.batches == []
    finally:
        for setting in ignored:
            spark.conf.unset(setting)


def test_a_watermarks_row_holds_its_time_and_nothing_else(spark: Any) -> None:
    sources = ChannelSources(spark)
    for columns, ordinal in [(1, 0), (2, 1), (64, 0), (64, 63), (65, 0), (65, 64), (130, 63), (130, 64), (130, 129)]:
        row = sources.row(columns, ordinal, -(2**62) - ordinal)
        found = {column: row.getLong(column) for column in range(columns) if not row.isNullAt(column)}
        assert found == {ordinal: -(2**62) - ordinal} and row.numFields() == columns
