"""The two Python streaming sources behind every stage input: its records and its watermark.

`ChannelsSource` reads the Parquet segments of all channels of one input, up to the positions to which the task's gate has
opened, so the task decides exactly where a micro-batch ends. `WatermarkSource` emits one row at W + lateness whenever the
task's watermark W moves; a filter drops the row again, after `withWatermark` has read its time.

This module is sent to Spark's workers by value, and they may not have the package: it must import nothing of it.

Source: https://spark.apache.org/docs/latest/api/python/tutorial/sql/python_data_source.html
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

CHANNELS_FORMAT = "dagster_checkpoints_channels"
WATERMARK_FORMAT = "dagster_checkpoints_watermark"
ROWS_PER_ARROW_BATCH = 65_536


def read_gate(path: str) -> dict[str, Any]:
    """The gate file: `{"positions": {channel: int}, "watermark": ms | None}`; replaced atomically by the task."""
    for _ in range(3):
        try:
            with open(path, encoding="utf-8") as file:
                gate: dict[str, Any] = json.load(file)
                return gate
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.02)  # a shared file system may show the replacement late
    with open(path, encoding="utf-8") as file:
        last: dict[str, Any] = json.load(file)
        return last


def _end_quietly() -> None:
    """Do not print an error when Spark ends a source's process by closing its socket."""
    usual = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if not isinstance(error, BrokenPipeError | ConnectionResetError):
            usual(kind, error, trace)

    sys.excepthook = hook


def balanced(files: Sequence[str], groups: int) -> list[list[str]]:
    """Divide files into at most `groups` groups of about the same number of bytes."""
    sized: list[tuple[int, list[str]]] = [(0, []) for _ in range(min(groups, len(files)))]
    for size, file in sorted(((os.path.getsize(file), file) for file in files), reverse=True):
        smallest = min(range(len(sized)), key=lambda group: sized[group][0])
        sized[smallest] = (sized[smallest][0] + size, [*sized[smallest][1], file])
    return [members for _, members in sized]


class ChannelsSource(DataSource):
    """All channels of one stage input.

    Options: `gate`, `logs` (JSON, channel to log file), `base` (JSON, first positions), `tasks` (maximum concurrent readers).
    """

    @classmethod
    def name(cls) -> str:
        return CHANNELS_FORMAT

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        _end_quietly()
        return ChannelsReader(self.options, schema)


class ChannelsReader(DataSourceStreamReader):
    """Reads the channels. Offset: `{channel: position}`, the number of log elements consumed of each channel."""

    def __init__(self, options: Any, schema: StructType) -> None:
        self.gate = options["gate"]
        self.logs: dict[str, str] = json.loads(options["logs"])
        self.base: dict[str, int] = json.loads(options["base"])
        self.tasks = int(options["tasks"])
        self.schema = schema
        self.read_to: dict[str, tuple[int, int]] = {}  # channel: (next position, byte offset in its log)
        self.known: dict[str, dict[int, list[str]]] = {channel: {} for channel in self.logs}

    def initialOffset(self) -> dict[str, int]:
        return dict(sorted(self.base.items()))

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        positions = read_gate(self.gate)["positions"]
        return {c: max(start.get(c, self.base[c]), positions.get(c, self.base[c])) for c in sorted(self.logs)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        files: list[str] = []
        for channel in sorted(self.logs):
            first, last = start.get(channel, self.base[channel]), end[channel]
            if last > first:
                self._follow(channel, last)
            known = self.known[channel]
            files += [file for position in range(first, last) for file in known.get(position, ())]
            for position in [p for p in known if p < first]:
                del known[position]
        # A Python task costs tens of milliseconds even for few rows, and a batch may have to read very many files.
        return [InputPartition(tuple(group)) for group in balanced(files, self.tasks)]

    def _follow(self, channel: str, until: int) -> None:
        position, offset = self.read_to.get(channel, (self.base[channel], 0))
        deadline = time.monotonic() + 30
        while position < until:
            with open(self.logs[channel], "rb") as log:
                log.seek(offset)
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    element = json.loads(line)
                    if "files" in element:
                        self.known[channel][position] = element["files"]
                    position, offset = position + 1, offset + len(line)
            if position < until:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Channel log {self.logs[channel]}: expected {until} elements, since the gate is open up to this "
                        f"position, found {position}. Is the work directory on a file system that all processes share?"
                    )
                time.sleep(0.05)
        self.read_to[channel] = (position, offset)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for file in partition.value:
            yield from self._read(file)

    def _read(self, path: str) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from pyspark.sql.pandas.types import to_arrow_schema

        wanted = to_arrow_schema(self.schema, timezone="UTC")
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            columns = [field.name for field in wanted]
            for batch in file.iter_batches(ROWS_PER_ARROW_BATCH, columns=columns):
                if batch.schema.names != columns:
                    batch = batch.select(columns)
                if batch.schema.equals(wanted):
                    yield batch
                    continue
                arrays = [
                    column if column.type == field.type else column.cast(field.type)
                    for column, field in zip(batch.columns, wanted, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


class WatermarkSource(DataSource):
    """The watermark of one stage input. Options: `gate`, `attempt`, `column`, `lateness_ms`."""

    @classmethod
    def name(cls) -> str:
        return WATERMARK_FORMAT

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        _end_quietly()
        return WatermarkReader(self.options, schema)


class WatermarkReader(DataSourceStreamReader):
    """Reads the watermark. Offset: `{"watermark": ms, "attempt": n}`.

    A new attempt emits its watermark again, since Spark does not restore the watermark of each input.
    """

    def __init__(self, options: Any, schema: StructType) -> None:
        self.gate = options["gate"]
        self.attempt = int(options["attempt"])
        self.column = options["column"]
        self.lateness_ms = int(options["lateness_ms"])
        self.schema = schema

    def initialOffset(self) -> dict[str, Any]:
        return {"attempt": 0, "watermark": None}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        watermark = read_gate(self.gate)["watermark"]
        return {"attempt": self.attempt, "watermark": watermark} if watermark is not None else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(end["watermark"])] if end != start else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        wanted = to_arrow_schema(self.schema, timezone="UTC")
        moment_us = (partition.value + self.lateness_ms) * 1000  # may be after the year 9999, which datetime cannot represent
        arrays = [
            pa.array([moment_us], pa.int64()).cast(field.type) if field.name == self.column else pa.nulls(1, field.type)
            for field in wanted
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted)
