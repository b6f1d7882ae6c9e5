"""A sink that writes rows as Parquet files to a directory, visible exactly once: its settings; :mod:`target` has the directories.

Must not import Spark. Batches arrive as Parquet files that are already written; they are hard-linked, and of their content only
the number of rows is read.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Never, get_args

from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.target_sink import TargetSink, scope_of
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import InvalidSinkPath

if TYPE_CHECKING:
    from dagster_checkpoints.sinks.parquet.target import ParquetTarget

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
"""A name that can be a directory's."""
_FORMER_MODES = {"append": "keep", "overwrite": "replace"}


class ParquetSink(TargetSink):
    """Commits a stage's rows as Parquet files below a directory.

    Args:
        path: directory on a local file system, or on one that every machine of the run mounts at the same
            path. Only one stage of one pipeline may write to it.
        at_new_start: what a new start, not a resumption, does with rows that an earlier job has committed to the directory:
            ``refuse`` (default) stops the run before Spark starts, ``keep`` leaves them beside the new job's rows, ``replace``
            removes them when the new job begins. Files that the sink has not written are never removed.

    Raises:
        InvalidSinkPath: the path is an object store's URL, or empty.
        ValueError: ``at_new_start`` is not one of the three values.
        TypeError: an unknown setting, or ``at_new_start`` by its former name, ``mode``.

    Examples:
        >>> sink = ParquetSink("/data/hourly_delays", at_new_start="replace")
    """

    kind = "parquet"
    noun = "directory"

    def __init__(self, path: str | os.PathLike[str], at_new_start: AtNewStart = "refuse", **former: Never) -> None:
        if "mode" in former:
            raise TypeError(_renamed(f"mode={former['mode']!r}", former["mode"]))
        if former:
            raise TypeError(f"ParquetSink has the settings path and at_new_start, found {', '.join(former)}")
        if at_new_start not in get_args(AtNewStart) and at_new_start in _FORMER_MODES:
            raise ValueError(_renamed(f"at_new_start={at_new_start!r}", at_new_start))
        super().__init__(at_new_start)
        self.path = _local_path(os.fspath(path))

    def __repr__(self) -> str:
        return f"ParquetSink({str(self.path)!r}, at_new_start={self.at_new_start!r})"

    @property
    def location(self) -> str:
        """The directory, absolute and without symbolic links."""
        return os.path.realpath(self.path)

    @property
    def uri(self) -> str:
        """The directory as a ``file:`` URL."""
        return self.path.as_uri()

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the directory; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job has committed rows to the directory.
            SinkPathInUse: the directory belongs to another stage or pipeline; or holds files that no ParquetSink has written
                (not with ``at_new_start="keep"``); or holds rows of a job with the number that the new job will have.
            InvalidSinkPath: the path is a file, or cannot be written.
            SinkUnavailable: the file system is full.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InvalidSinkPath(
                f"Stage {context.stage!r} of pipeline {context.pipeline!r}: expected {self.path} to be a directory or not to "
                "exist, found a file. Choose another path"
            )
        super().check_new_start(context)
        try_directory(self.path, f"Stage {context.stage!r} of pipeline {context.pipeline!r}: {self}")

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check that the directory can be written and is the stage's, and that the rows have no column ``checkpoint``.

        Raises:
            InvalidSinkPath: the directory cannot be written.
            SinkPathInUse: the directory belongs to another stage or pipeline.
            ReservedSinkColumn: the rows have a column called ``checkpoint``.
            SinkUnavailable: the file system is full.
        """
        import pyarrow.parquet as pq

        try_directory(self.path, str(self))
        with closing(self.new_target()) as target:
            target.check_stage(scope_of(context))
            target.check_columns(pq.read_schema(rows).names, f"stage {context.stage!r}")

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkPathInUse: the directory belongs to another stage or pipeline.
            SinkFenced: a newer run of the pipeline writes there.
        """
        for what, name in (("stage name", context.stage), ("attempt token", context.attempt)):
            if not _NAME.fullmatch(name):
                raise InvalidSinkPath(f"{self}: expected a {what} that can name a directory, found {name!r}")
        super().open(context)

    def new_target(self) -> ParquetTarget:
        from dagster_checkpoints.sinks.parquet.target import ParquetTarget

        return ParquetTarget(self.path, str(self))


def _renamed(found: str, former: str) -> str:
    now = f"at_new_start={_FORMER_MODES[former]!r}" if former in _FORMER_MODES else "'refuse', 'keep' or 'replace'"
    return (
        f"expected ParquetSink(path, at_new_start=...), found {found}: the setting is called at_new_start now; "
        f"mode='append' is at_new_start='keep', mode='overwrite' is at_new_start='replace'. Write {now}; the default, 'refuse', "
        "stops a new start that finds rows of an earlier job"
    )


def _local_path(path: str) -> Path:
    """A path from a path or a ``file:`` URL; touches nothing."""
    scheme = url_scheme(path)
    found = local_path(path) if scheme == "file" else None
    if found is not None:
        return found
    if scheme is not None or not path.strip():
        raise InvalidSinkPath(
            f"expected a path on a local or mounted file system, such as /data/hourly_delays, found "
            f"{path!r}. ParquetSink commits by renaming a directory, which object stores cannot do: mount "
            "the object store as a file system, or use another sink"
        )
    return Path(os.path.abspath(os.path.expanduser(path)))
