"""Spark's own file streams over paths with characters that mean something in a pattern: Spark loses or multiplies their rows.

A file stream takes its path for a pattern. The files that it finds are read all together once for each of them whose own path
looks like a pattern (SPARK-58518): right only if a micro-batch has one file.

Source: Spark's `FileStreamSource` and `DataSource.checkAndGlobPathIfNecessary`
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from pyspark.sql import DataFrame

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import StageKind
from dagster_checkpoints.spark.errors import SourcePathError
from dagster_checkpoints.spark.files.hadoop_path import HadoopFileSystem
from dagster_checkpoints.spark.files.path_patterns import has_escapes, is_pattern, literal
from dagster_checkpoints.spark.query.plan_nodes import V1_STREAM, source_options, streams
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


def check_read_once(plan: Any) -> None:
    """Check that a micro-batch of file streams has each file once.

    Args:
        plan: the micro-batch's logical plan, as Spark's Java object.

    Raises:
        FilesReadTwice: a file is there more than once.
    """
    leaves = plan.collectLeaves()
    for index in range(leaves.size()):
        leaf = leaves.apply(index)
        if leaf.getClass().getSimpleName() != "LogicalRelation" or not leaf.isStreaming():
            continue
        paths = leaf.relation().location().rootPaths()
        if paths.size() != paths.distinct().size():
            found = str(paths.distinct().mkString("\n")).split("\n")
            raise FilesReadTwice(
                f"expected each of {len(found)} files once in a micro-batch of Spark's file stream, found {paths.size()} reads: "
                f"Spark reads all of them once for each path that looks like a pattern, such as "
                f"{next(path for path in found if is_pattern(path))!r}. No row of the micro-batch was emitted. "
                f"{_capital(_WAY_ON)}"
            )


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
            f"a directory of that very name exists, but Spark takes the path for a pattern, which matches {_shown(matches)}. "
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


def _shown(matches: Sequence[str]) -> str:
    return f"{matches[0]!r}{' and others' if len(matches) > 1 else ''}" if matches else "nothing"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _is_file_stream(leaf: Any) -> bool:
    return leaf.nodeName() == V1_STREAM and str(leaf.sourceName()).startswith(_FILES)
