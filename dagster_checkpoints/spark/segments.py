"""Writing a micro-batch once, as Parquet files: the segment that channels, sinks and `process_batch` then share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import functions as F

from dagster_checkpoints.spark.channels import SegmentFiles, segment_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COMPRESSION = "lz4_raw"  # a segment is read again at once and then deleted: speed matters, size little
_PART = "__dagster_checkpoints_channel__"  # beside the user's own columns, whatever they are called


@dataclass(frozen=True)
class Split:
    """How rows are dealt out to `parallelism` consumers: by key group of a column, or in turn."""

    parallelism: int
    key: str | None
    key_groups: int

    def column(self):  # type: ignore[no-untyped-def]
        """The consumer's index of a row. Keyed: key group g of G belongs to instance g*p/G (PROTOCOL 8.3)."""
        if self.key is None:
            return F.pmod(F.monotonically_increasing_id(), F.lit(self.parallelism)).cast("int")
        group = F.pmod(F.hash(F.col(f"`{self.key}`")), F.lit(self.key_groups))
        return F.floor(group * F.lit(self.parallelism) / F.lit(self.key_groups)).cast("int")


def default_key_groups(parallelism: int) -> int:
    """G = nextPow2(1.5 p) within 128..32768, as Flink's default maximum parallelism."""
    wanted = parallelism + parallelism // 2
    return min(max(1 << max(wanted - 1, 0).bit_length(), 128), 32_768)


def write_segment(batch: DataFrame, folder: Path) -> SegmentFiles | None:
    """Evaluate a micro-batch, once, into Parquet files below `folder`. None if it has no rows."""
    _write(batch, folder)
    return _collect(folder)


def write_split_segments(batch: DataFrame, folder: Path, split: Split) -> dict[int, SegmentFiles]:
    """Evaluate a micro-batch into one segment per consumer index; an index without rows is left out."""
    _write(batch.withColumn(_PART, split.column()), folder, _PART)
    segments = {}
    for index in range(split.parallelism):
        segment = _collect(folder / f"{_PART}={index}")
        if segment is not None:
            segments[index] = segment
    return segments


def _write(batch: DataFrame, folder: Path, *partition_by: str) -> None:
    writer = batch.write.mode("overwrite").option("compression", COMPRESSION)
    writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    # Nothing reads the folder before the batch is whole, so tasks may move their files there at once.
    writer = writer.option("mapreduce.fileoutputcommitter.algorithm.version", "2")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet(str(folder))


def _collect(folder: Path) -> SegmentFiles | None:
    files, rows = [], 0
    for file in sorted(folder.glob("*.parquet")) if folder.exists() else ():
        count = pq.read_metadata(file).num_rows
        if count:
            files.append(file)
            rows += count
        else:
            file.unlink()
    return segment_of(files, rows) if files else None
