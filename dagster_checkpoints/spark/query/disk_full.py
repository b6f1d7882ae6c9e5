"""A full disk: Spark's error says neither which directory is meant nor what to do. Must not know tasks."""

from __future__ import annotations

import re

from dagster_checkpoints.spark.files.work_path import WorkPath

_FULL = re.compile(r"(?:java\.io\.IOException|RocksDBException)\b[^\n]*(No space left on device|Disk quota exceeded)")


class DiskFull(Exception):
    """Spark could not write a file of a query; the code of its stages is not the cause."""


def disk_full(error: BaseException, directory: WorkPath) -> DiskFull | None:
    """What Spark's error says of a full disk; None if it says something else.

    Args:
        error: the error with which a query has ended. Those of Python, as of a sink, name the place by themselves.
        directory: the directory of the query's files, in the work directory.
    """
    found = _FULL.search(str(error)) if type(error).__module__.partition(".")[0] in ("pyspark", "py4j") else None
    if found is None:
        return None
    full = DiskFull(
        f"because a disk is full: expected to write the query's files to the work directory, below {directory}, or to Spark's "
        f"own directory (spark.local.dir), found: {found[1]}. Free space there, or choose another work_directory. Nothing is "
        "lost: what no checkpoint has committed is read again"
    )
    full.__cause__ = error
    return full
