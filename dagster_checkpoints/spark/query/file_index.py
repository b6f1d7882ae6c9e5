"""Spark's index of the files of a read: each file once, under its own name, whatever characters the name has.

Spark's public readers take paths for patterns. With the option that forbids it they read all files once for each path that looks
like a pattern (SPARK-58518), and Hadoop finds no file by a pattern in a directory with a colon in its name.

Source: Spark's `InMemoryFileIndex` and `PartitioningAwareFileIndex.isNonEmptyFile`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dagster_checkpoints.errors import DagsterCheckpointsError

_SHOWN = 3
_STATUS = re.compile(r"\{path=(.*?); isDirectory=false; length=(\d+);", re.DOTALL)
"""Path and size in the text of Hadoop's `FileStatus`."""


class FilesLost(DagsterCheckpointsError):
    """Files that were written before are gone, empty, or hidden from Spark by their names."""


def exact_index(jvm: Any, session: Any, files: Sequence[str]) -> Any:
    """Spark's index of these files and of no others, as its Java object.

    Args:
        jvm: the session's JVM.
        session: Spark's session, as its Java object.
        files: the paths of the files as Hadoop writes them (`file:/data/…`, `s3a://bucket/…`), not percent-encoded.

    Raises:
        FilesLost: Spark would not read all of them.
    """
    path, none = jvm.org.apache.hadoop.fs.Path, jvm.scala.Option.apply(None)
    roots = jvm.PythonUtils.toSeq([path(file) for file in files])
    options = jvm.PythonUtils.toScalaMap(jvm.java.util.HashMap())
    datasources = jvm.org.apache.spark.sql.execution.datasources
    cache = getattr(getattr(datasources, "NoopCache$"), "MODULE$")
    index = datasources.InMemoryFileIndex(session, roots, options, none, cache, none, none)
    listed = listed_files(index.allFiles())
    if len(listed) != len(files):
        raise _lost(files, unlisted(index, files), "gone, or hidden from Spark by a name that begins with _ or .")
    empty = [found for found, size in listed if size == "0"]
    if empty:
        raise _lost(files, empty, "empty")
    return index


def unlisted(index: Any, files: Sequence[str]) -> list[str]:
    """Those of some files that an index of Spark's has not found.

    Args:
        index: the index, as Spark's Java object.
        files: the paths of the files as Hadoop writes them.
    """
    known = {without_host(found) for found, _ in listed_files(index.allFiles())}
    return [file for file in files if without_host(file) not in known]


def listed_files(statuses: Any) -> list[tuple[str, str]]:
    """Path and size of the files in a collection of Scala's, in one call: a call for each file would be slow."""
    return _STATUS.findall(str(statuses.mkString()))


def without_host(path: str) -> str:
    """A path without the scheme and host that Spark and Hadoop add."""
    return re.sub(r"^[a-z][a-z0-9+.-]*:(//[^/]*)?", "", path)


def _lost(files: Sequence[str], lost: Sequence[str], why: str) -> FilesLost:
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return FilesLost(f"expected {len(files)} files, found that {len(lost)} of them are {why}: {', '.join(lost[:_SHOWN])}{more}")
