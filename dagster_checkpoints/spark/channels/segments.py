"""Writes a micro-batch once, as Parquet files: the segment that channels, sinks and `process_batch` share.

If the path of the work directory is another folder on an executor, the driver never sees the rows that the executor writes, and
Spark still reports success. So the files must hold as many rows as Spark's write has counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles, SegmentFolder, segment_of
from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, remove_tree, rows_of, url
from dagster_checkpoints.spark.identifiers import identifier
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.state.rescaled_channels import SegmentShare

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.readwriter import DataFrameWriter

COMPRESSION = "lz4_raw"  # a segment is read once and deleted: speed matters more than size
_PART = "__dagster_checkpoints_channel__"  # must differ from the names of all user columns


class SegmentRowsError(DagsterCheckpointsError):
    """The files of a segment do not hold the rows that Spark has written: nothing of the batch may be used."""


@dataclass(frozen=True)
class Split:
    """The distribution of rows to `parallelism` consumers: by key group of a column, or in turn.

    Attributes:
        parallelism: The number of consumers.
        key: The key column; None for a distribution in turn.
        key_groups: The number of key groups.
    """

    parallelism: int
    key: str | None
    key_groups: int

    def column(self):  # type: ignore[no-untyped-def]
        """A row's consumer index, as a Spark expression. With a key: PROTOCOL 8.3."""
        if self.key is None:
            return F.pmod(F.monotonically_increasing_id(), F.lit(self.parallelism)).cast("int")
        group = key_group(F.col(identifier(self.key)), self.key_groups)
        return owner_of_group(group, self.parallelism, self.key_groups)


def owner_of_group(group: Column, parallelism: int, groups: int) -> Column:
    """The index of the instance that owns a key group, as a Spark expression: that of `state.owner_of`."""
    return F.floor(group * F.lit(parallelism) / F.lit(groups)).cast("int")


def key_group(column: Column, groups: int) -> Column:
    """The key group of a column's value, as a Spark expression: by Spark's hash, with another number than its partitions."""
    return F.pmod(F.hash(column), F.lit(groups))


def write_segment(batch: DataFrame, folder: WorkPath) -> SegmentFiles | None:
    """Evaluate a micro-batch once into Parquet files below `folder`. Returns None if it has no rows.

    Raises:
        SegmentRowsError: The files hold another number of rows than Spark has counted.
    """
    written = _write(batch, folder)
    segment = _collect(SegmentFolder(folder))
    _check_rows(folder, written, segment.rows if segment else 0)
    return segment


def write_parts(batch: DataFrame, folder: WorkPath, part: Column) -> dict[int, SegmentFiles]:
    """Evaluate a micro-batch once into segments that share its rows.

    Args:
        batch: The micro-batch.
        folder: The directory of the segments.
        part: The number of the segment that a row belongs to.

    Returns:
        The segments by number, in its order; a number without rows is left out.

    Raises:
        SegmentRowsError: The files hold another number of rows than Spark has counted.
    """
    written = _write(batch.withColumn(_PART, part), folder, _PART)
    folders = {int(each.name.rpartition("=")[2]): each for each in entries_of(folder) if each.name.startswith(f"{_PART}=")}
    collected = {number: _collect(SegmentFolder(folders[number], parent=folder)) for number in sorted(folders)}
    segments = {number: segment for number, segment in collected.items() if segment is not None}
    _check_rows(folder, written, sum(segment.rows for segment in segments.values()))
    if not segments:
        remove_tree(folder)
    return segments


def part_of_file() -> Column:
    """The number of the segment of :func:`write_parts` whose files a row is read from, as a BIGINT."""
    return F.regexp_extract(F.input_file_name(), f"/{_PART}=([0-9]+)/[^/]*$", 1).cast("bigint")


def write_share(rows: DataFrame, folder: WorkPath, share: SegmentShare) -> SegmentFiles | None:
    """Write the rows of a segment that an instance gets: those that :class:`Split` gives it. Returns None if there are none.

    Args:
        rows: All rows of the segment.
        folder: The directory of the new segment.
        share: The instance's part.

    Raises:
        SegmentRowsError: The files hold another number of rows than Spark has counted.
    """
    split = Split(share.readers, share.key, share.key_groups)
    return write_segment(rows.where(split.column() == F.lit(share.reader)), folder)


def _write(batch: DataFrame, folder: WorkPath, *partition_by: str) -> int:
    """Write the files. Returns the number of rows that Spark has counted while writing."""
    writer = batch.write.format("parquet").mode("overwrite").option("compression", COMPRESSION)
    writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    # Nothing reads the folder before the batch is complete, so tasks may move their files into it at once.
    writer = writer.option("mapreduce.fileoutputcommitter.algorithm.version", "2")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    return _execute(batch, writer, folder)


def _execute(batch: DataFrame, writer: DataFrameWriter, folder: WorkPath) -> int:
    """Do the two steps of `writer.save(folder)`: that call discards the execution, and with it the row count.

    Each writing task sends its count with its result, so the sum costs nothing and is known when the command has returned; an
    observation would be evaluated for every row, and a listener may be called late.
    """
    jvm = jvm_of(batch.sparkSession)
    command = writer._jwrite.saveCommand(jvm.scala.Option.apply(url(folder)))
    state = batch._jdf.sparkSession().sessionState()
    execution = state.executePlan(command, getattr(state, "executePlan$default$2")())
    execution.assertCommandExecuted()
    write = _write_node(execution.commandExecuted().commandPhysicalPlan())
    return int(write.metrics().apply("numOutputRows").value())


def _write_node(plan: Any) -> Any:
    """The node of an executed plan that has written the files; adaptive execution wraps it."""
    name = str(plan.getClass().getSimpleName())
    while name != "DataWritingCommandExec":
        if name == "AdaptiveSparkPlanExec":
            plan = plan.executedPlan()
        elif name == "ResultQueryStageExec":
            plan = plan.plan()
        else:
            raise SegmentRowsError(
                f"expected Spark to execute the write of a batch as DataWritingCommandExec, found {name}: without it the rows "
                "written cannot be counted. Is an extension installed that replaces Spark's writes (spark.sql.extensions, "
                "spark.plugins)? Remove it from the resource's spark_config."
            )
        name = str(plan.getClass().getSimpleName())
    return plan


def _check_rows(folder: WorkPath, written: int, found: int) -> None:
    if written != found:
        raise SegmentRowsError(
            f"expected {written} rows in the files of a batch in {folder}, as many as Spark has written, found {found}. An "
            "executor that does not share the work directory with the driver writes to another folder; or files were "
            "deleted. Nothing of this batch was used. Set work_directory= of CheckpointCoordinatorResource to a directory that "
            "the driver and every executor see under the same path (NFS, a shared volume), and let nothing clean it up"
        )


def _collect(folder: SegmentFolder) -> SegmentFiles | None:
    """The segment in a directory; None without rows: then the directory is removed."""
    files, rows = [], 0
    for file in sorted(entries_of(folder.path), key=lambda entry: entry.name):
        if not file.name.endswith(".parquet"):
            continue
        count = rows_of(file)
        if count:
            files.append(file)
            rows += count
        else:
            file.unlink()
    if files:
        return segment_of(files, rows, folder)
    folder.remove()
    return None
