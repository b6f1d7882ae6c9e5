"""Spark's own file streams: what Spark would lose, multiply or mix up without an error.

A file stream takes its path for a pattern. The files that it finds are read all together once for each of them whose own path
looks like a pattern (SPARK-58518): right only if a micro-batch has one file.

Spark lists a directory, plans the files that it has not read, and lists these again when it reads them: those that are gone by
then it leaves out, and those beside directories of partitions. It maps columns by their position, and learns which of them are
partition columns where a query begins.

Source: Spark's `FileStreamSource`, `DataSource.checkAndGlobPathIfNecessary`, `HadoopFSUtils.listLeafFiles`,
`PartitioningUtils.parsePartitions` and `MicroBatchExecution.runBatch`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from pyspark.sql import DataFrame

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import StageKind
from dagster_checkpoints.spark.errors import LostRows, SourcePathError
from dagster_checkpoints.spark.files.hadoop_path import HadoopFileSystem
from dagster_checkpoints.spark.files.work_path import has_escapes, is_pattern, literal
from dagster_checkpoints.spark.query.file_index import listed_files, unlisted
from dagster_checkpoints.spark.query.plan_nodes import V1_STREAM, source_options, streams, streams_of_batch
from dagster_checkpoints.spark.query.stage_calls import StageCall

_FILES = "FileSource["
_WAY_ON = (
    "rename the directories and files that have one of the characters { } [ ] * ? \\ in their names, or read them through a "
    "symbolic link whose path has none; or set maxFilesPerTrigger to 1"
)


class FilesReadTwice(DagsterCheckpointsError):
    """A micro-batch of Spark's file stream holds files more than once; none of its rows has left the query."""

    repeats: ClassVar[bool] = True


def reads_files(frame: DataFrame) -> bool:
    """Whether a DataFrame reads a file stream of Spark's."""
    return any(_is_file_stream(leaf) for leaf in streams(frame))


def check_file_paths(call: StageCall, frame: DataFrame) -> list[str]:
    """Check that Spark reads each file of the file streams of a DataFrame once, as far as it can be known before they run.

    Returns:
        Warnings of paths at which a bounded source finds nothing.

    Raises:
        SourcePathError: A path that is meant literally is a pattern to Spark, or files have such paths; or Spark cannot read
            them, because they are in directories of partitions.
    """
    warnings = []
    for leaf in streams(frame):
        if not _is_file_stream(leaf):
            continue
        options = source_options(leaf)
        path, matches = _qualified(frame, options.get("path", "")), list[str]()
        if is_pattern(path):
            there, matches = _found(frame, path)
            problem = _problem(path, there, matches, options.get("maxfilespertrigger") == "1")
            problem = problem or ("" if "basepath" in options else _partitions_problem(leaf))
            if problem:
                raise SourcePathError(
                    call.stage.name,
                    call.context.instance,
                    f"expected a path of which Spark reads each file once, found {path!r} ({call.stage.location}): {problem}",
                )
        if call.stage.kind is StageKind.BOUNDED_SOURCE and (not matches if is_pattern(path) else _is_empty(frame, path)):
            warnings.append(
                f"Stage {call.stage.name!r}: nothing is found at {path!r} ({call.stage.location}) now. If that remains so, the "
                "stage ends without rows of it. Is the path right, and its file system mounted?"
            )
    return warnings


def _qualified(frame: DataFrame, path: str) -> str:
    """The path as Spark reads it: a relative one with the working directory in front, whose characters are a pattern's, too."""
    if path.startswith("/") or ":" in path:
        return path
    with suppress(OSError):
        return str(HadoopFileSystem(frame.sparkSession, path).qualified(path))
    return path


def _found(frame: DataFrame, path: str) -> tuple[bool, list[str]]:
    """Whether a pattern is the name of something that exists, and what it matches."""
    with suppress(OSError):  # Spark says what is wrong with the place
        system = HadoopFileSystem(frame.sparkSession, path)
        return system.qualified(path).exists(), [str(status.path) for status in system.matching(path)]
    return False, []


def _is_empty(frame: DataFrame, path: str) -> bool:
    with suppress(OSError):
        return HadoopFileSystem(frame.sparkSession, path).is_empty(path)
    return False


def _partitions_problem(leaf: Any) -> str:
    """What is wrong with the partition columns of a stream over a pattern, and what to do; empty if it has none.

    Spark finds the columns when it lists the pattern, and no values of them when it reads the files of a micro-batch.
    """
    columns = leaf.dataSource().sourceInfo().partitionColumns()
    if not columns.size():
        return ""
    return (
        f"below the pattern there are directories of the partition columns {columns.mkString(', ')}, and Spark's stream reads "
        'none of their files without the option basePath. Set .option("basePath", …) to the directory in which they begin, or '
        "read that directory without a pattern"
    )


def _problem(path: str, there: bool, matches: Sequence[str], one_each: bool) -> str:
    """What is wrong with a path that Spark takes for a pattern, and what to do; empty if nothing is."""
    if there and not _is_only(path, matches):
        return (
            f"a directory of that very name exists, but Spark takes the path for a pattern, which matches {_first_of(matches)}. "
            f"Escape the characters and set maxFilesPerTrigger to 1: {literal(path)!r} (with more files in a micro-batch Spark "
            f"reads each more than once). Or {_WAY_ON}"
        )
    unclear = [match for match in matches if is_pattern(match)]
    if one_each or not (unclear or (has_escapes(path) and not matches)):
        return ""
    return (
        f"the paths of its files, as in {unclear[0] if unclear else path!r}, look like patterns to Spark, which then reads all "
        f"files of a micro-batch once for each such file. {_capital(_WAY_ON)}"
    )


def _is_only(path: str, matches: Sequence[str]) -> bool:
    return len(matches) == 1 and matches[0].endswith(path.rstrip("/").removeprefix("file:").lstrip("/"))


def _first_of(matches: Sequence[str]) -> str:
    return f"{matches[0]!r}{' and others' if len(matches) > 1 else ''}" if matches else "nothing"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _is_file_stream(leaf: Any) -> bool:
    return leaf.nodeName() == V1_STREAM and str(leaf.sourceName()).startswith(_FILES)


SKIPS_MISSING_FILES = "ignoreMissingFiles"
"""Spark's option, and the end of the name of its setting, with which it skips files that are gone."""
_SHOWN = 3


class PlannedFilesGone(LostRows):
    """Files that Spark's file stream has found were deleted before it read them; no row of the micro-batch has left the query."""


class PartitionColumnsAppeared(DagsterCheckpointsError):
    """A file stream has got partition columns since its query began: the next attempt reads them."""


class FilesOutsidePartitions(DagsterCheckpointsError):
    """A micro-batch has files beside directories of partitions, whose rows Spark does not read."""

    repeats: ClassVar[bool] = True


def check_files(execution: Any) -> None:
    """Check that the micro-batch that a query processes reads the rows of its file streams right, and each once.

    Args:
        execution: Spark's execution of the query, a Java object.

    Raises:
        FilesReadTwice: a file is there more than once.
        PlannedFilesGone: a file is not there any more.
        FilesOutsidePartitions: Spark would not read a file.
        PartitionColumnsAppeared: values would come into other columns.
    """
    for position, leaf in enumerate(streams_of_batch(execution.lastExecution().logical())):
        if leaf.nodeName() == "LogicalRelation":
            relation = leaf.relation()
            index = relation.location()
            paths = index.rootPaths()
            read = paths.size()
            _check_once(paths, read)
            if index.allFiles().size() != read:
                _check_there(relation, index, paths)
            if relation.partitionSchema().size():
                _check_in_partitions(relation)
                _check_columns(streams_of_batch(execution.logicalPlan())[position], leaf)


def _check_once(paths: Any, read: int) -> None:
    once = paths.distinct()
    if once.size() != read:
        found = str(once.mkString("\n")).split("\n")
        raise FilesReadTwice(
            f"expected each of {len(found)} files once in a micro-batch of Spark's file stream, found {read} reads: "
            f"Spark reads all of them once for each path that looks like a pattern, such as "
            f"{next(path for path in found if is_pattern(path))!r}. No row of the micro-batch was emitted. "
            f"{_capital(_WAY_ON)}"
        )


def _check_there(relation: Any, index: Any, paths: Any) -> None:
    if _skips_missing_files(relation):
        return
    files = str(paths.mkString("\n")).split("\n")
    gone = unlisted(index, files)
    raise PlannedFilesGone(
        f"expected the {len(files)} files of a micro-batch that Spark's file stream has found before, found that {len(gone)} of "
        f"them were deleted before they were read: {_shown(gone)}. No row of the micro-batch was emitted. Keep "
        "files until no checkpoint in use is older than their rows. Put them back, or empty files of these names if their rows "
        f'are not needed; or set .option("{SKIPS_MISSING_FILES}", "true"), with which Spark skips such files without an error'
    )


def _skips_missing_files(relation: Any) -> bool:
    option = relation.options().get(SKIPS_MISSING_FILES)
    if option.isDefined():
        return str(option.get()).lower() == "true"
    return bool(relation.sparkSession().sessionState().conf().ignoreMissingFiles())


def _check_in_partitions(relation: Any) -> None:
    index = relation.location()
    no_filter = index.rootPaths().take(0)
    read = {path for path, _ in listed_files(index.listFiles(no_filter, no_filter))}
    lost = [path for path, size in listed_files(index.allFiles()) if size != "0" and path not in read]
    if lost:
        columns = ", ".join(_names(relation.partitionSchema()))
        raise FilesOutsidePartitions(
            f"expected files in directories of the partition columns {columns}, found {len(lost)} beside these in a micro-batch: "
            f"{_shown(lost)}. Spark would read no row of them, without an error. No row of the micro-batch was emitted. Move "
            "them into such directories, or read them with a source of their own"
        )


def _shown(files: Sequence[str]) -> str:
    return f"{', '.join(files[:_SHOWN])}{f' and {len(files) - _SHOWN} more' if len(files) > _SHOWN else ''}"


def _check_columns(stream: Any, leaf: Any) -> None:
    expected, found = _names(stream), _names(leaf)
    if [name.lower() for name in expected] != [name.lower() for name in found]:
        raise PartitionColumnsAppeared(
            f"expected files with the columns {', '.join(expected)}, in this order, found {', '.join(found)}: directories of the "
            f"partition columns {', '.join(_names(leaf.relation().partitionSchema()))} have appeared since the query began, and "
            "Spark would put values into other columns. No row of the micro-batch was emitted. The next attempt reads them right"
        )


def _names(columns: Any) -> list[str]:
    """The names of a plan's, or a type's, columns."""
    kind = columns if columns.getClass().getSimpleName() == "StructType" else columns.schema()
    return [field["name"] for field in json.loads(str(kind.json()))["fields"]]
