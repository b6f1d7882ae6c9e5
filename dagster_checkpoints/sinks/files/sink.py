"""A sink that writes files to a directory, to S3 or to HDFS: its settings; :mod:`target` has the files.

Must not import Spark. Batches arrive as Parquet files that are already written; where the settings allow it, they become the
sink's files as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from uuid import uuid4

from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.pipeline.setting_values import is_count
from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.files.columns import FileFormat, check_columns
from dagster_checkpoints.sinks.files.names import OWN, VALID_NAME
from dagster_checkpoints.sinks.target_sink import TargetSink, scope_of
from dagster_checkpoints.sinks.unwritable import try_directory
from dagster_checkpoints.systems.errors import InvalidSinkPath
from dagster_checkpoints.systems.locations import location_of, target_url, uri_of

if TYPE_CHECKING:
    from dagster_checkpoints.sinks.files.target import FileTarget
    from dagster_checkpoints.sinks.files.target_files import TargetFiles

_SCHEMES = ("file", "s3", "s3a", "webhdfs")
_OPTIONS = {"s3": ("endpoint_url", "region_name", "profile_name"), "webhdfs": ("user",)}


class FileSink(TargetSink):
    """Commits a stage's rows as files below a directory, in S3 or in HDFS.

    Readers see the files of completed checkpoints, and no other ones. Only one stage of one pipeline may write there.

    Args:
        location: path of a local or mounted directory, URL in S3 (``s3://bucket/prefix``; ``s3a:`` means the same), or URL of
            HDFS's HTTP interface (``webhdfs://namenode:9870/path``).
        format: ``parquet`` (default), ``orc``, ``csv`` (with a header) or ``json`` (an object per line).
        partition_by: the columns by whose values rows are divided into directories (``day=2024-01-01``), in order. They are not
            in the files themselves.
        rows_per_file: the largest number of rows in a file; default: any number.
        bytes_per_file: a file is completed when it has at least this size, in bytes. By default Spark's Parquet files stay as
            they are; in other formats, or with partitions or `rows_per_file`, 128 MiB.
        manifest: whether each commit also writes a list of its files, as its last step: for readers that need all files of a
            commit or none.
        at_new_start: what a new start, not a resumption, does with files that an earlier job has committed: ``refuse`` (default)
            stops the run before Spark starts, ``keep`` leaves them beside the new job's files, ``replace`` removes them when the
            new job begins. Files that the sink has not written are never removed.
        storage_options: for S3, what boto3 does not take from the environment: ``endpoint_url``, ``region_name``,
            ``profile_name``. For HDFS ``user``, by default HADOOP_USER_NAME or the process's user.

    Raises:
        InvalidSinkPath: the location is empty, a URL of another kind, or contains credentials.
        ValueError: a setting has a value that is not allowed.

    Examples:
        >>> sink = FileSink("s3://lake/hourly_delays", format="json", partition_by="origin")
    """

    kind = "files"
    noun = "location"

    def __init__(
        self,
        location: str | os.PathLike[str],
        format: FileFormat = "parquet",
        *,
        partition_by: str | Sequence[str] = (),
        rows_per_file: int | None = None,
        bytes_per_file: int | None = None,
        manifest: bool = False,
        at_new_start: AtNewStart = "refuse",
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(at_new_start)
        self._url = target_url(location, _SCHEMES, "a directory of files", "a profile (storage_options['profile_name'])")
        self.format: FileFormat = format
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.rows_per_file = rows_per_file
        self.bytes_per_file = bytes_per_file
        self.manifest = manifest
        self._options = dict(storage_options or {})
        self._check_settings()

    def __repr__(self) -> str:
        return f"FileSink({self._url!r}, {self.format!r})"

    @property
    def location(self) -> str:
        """The directory, absolute and without symbolic links, or the URL."""
        return location_of(self._url)

    @property
    def uri(self) -> str:
        """The URL of the directory or of the S3 prefix."""
        return uri_of(self._url)

    def check_new_start(self, context: SinkContext) -> None:
        """Check whether a new job may write to the location; changes nothing.

        Raises:
            SinkHoldsEarlierRows: with ``at_new_start="refuse"``: an earlier job has committed files.
            SinkPathInUse: the location belongs to another stage or pipeline; or holds files that no FileSink has written (not
                with ``at_new_start="keep"``); or holds files of a job with the number that the new job will have.
            SinkColumnsMismatch: the files there have another format or other partition columns (not with ``replace``).
            InvalidSinkPath: the path is a file, or cannot be written; or a partition's directory is a symbolic link.
            SinkUnavailable: the location cannot be read, or its file system is full.
        """
        path = local_path(self._url)
        if path is not None and path.exists() and not path.is_dir():
            raise InvalidSinkPath(
                f"Stage {context.stage!r} of pipeline {context.pipeline!r}: expected {path} to be a directory or not to exist, "
                "found a file. Choose another path"
            )
        if path is not None:
            try_directory(path, f"Stage {context.stage!r} of pipeline {context.pipeline!r}: {self}")
        super().check_new_start(context)
        if self.at_new_start != "replace":
            with closing(self.new_target()) as target:
                target.check_layout()

    def check_target(self, context: SinkContext, rows: Path) -> None:
        """Check that the location can be written and is the stage's, and that the rows fit the format and the files there.

        In a directory a file without a name is written; in S3 a hidden object, which is deleted again; in HDFS nothing.

        Raises:
            InvalidSinkPath: the location cannot be written.
            SinkPathInUse: the location belongs to another stage or pipeline.
            SinkColumnsMismatch: the format does not have a column's type, or the rows do not fit the files that are there.
            SinkUnavailable: the location does not answer, or is full.
        """
        path = local_path(self._url)
        if path is not None:
            try_directory(path, str(self))
        files, scope = self._files(), scope_of(context)
        with closing(self.new_target()) as target:
            target.check_stage(scope)
            own = target.columns_of(rows, scope.job)
        if self.at_new_start != "replace":
            check_columns(files, own)
        if url_scheme(self._url) == "s3":
            probe = f"{OWN}/.check-{uuid4().hex}"
            files.put(probe, b"")
            files.delete([probe])

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkPathInUse: the location belongs to another stage or pipeline.
            SinkFenced: a newer run of the pipeline writes there.
            SinkUnavailable: the location cannot be written.
        """
        if not VALID_NAME.fullmatch(context.attempt):
            raise InvalidSinkPath(
                f"{self}: expected an attempt token that can be part of a file's name, found {context.attempt!r}"
            )
        super().open(context)

    def new_target(self) -> FileTarget:
        from dagster_checkpoints.sinks.files.part_files import FileLayout
        from dagster_checkpoints.sinks.files.target import FileTarget

        layout = FileLayout(self.format, self.partition_by, self.rows_per_file, self.bytes_per_file)
        return FileTarget(self._files(), layout, manifests=self.manifest, sink=str(self))

    def _files(self) -> TargetFiles:
        """The files at the location; nothing is opened."""
        if url_scheme(self._url) == "webhdfs":
            from dagster_checkpoints.sinks.files.hdfs_files import HdfsFiles  # with a library that others do not need

            return HdfsFiles(self._url, **self._options)
        from dagster_checkpoints.sinks.files.target_files import LocalTargetFiles, StoredTargetFiles

        path = local_path(self._url)
        return StoredTargetFiles(self._url, self._options) if path is None else LocalTargetFiles(path, type(self).__name__)

    def _check_settings(self) -> None:
        if self.format not in get_args(FileFormat):
            raise ValueError(
                f"expected FileSink(format=...) to be one of {', '.join(get_args(FileFormat))}, found {self.format!r}"
            )
        for name in ("rows_per_file", "bytes_per_file"):
            if (value := getattr(self, name)) is not None and not is_count(value, least=1):
                raise ValueError(f"expected FileSink({name}=...) to be a whole number of at least 1, found {value!r}")
        hidden = [name for name in self.partition_by if not name or name[0] in "._"]
        if hidden or len(set(self.partition_by)) < len(self.partition_by):
            raise ValueError(
                "expected FileSink(partition_by=...) to name each column once, and none whose name begins with '.' or '_', since "
                f"readers skip such directories; found {list(self.partition_by)}"
            )
        known = _OPTIONS.get(url_scheme(self._url) or "file", ())
        unknown = sorted(set(self._options) - set(known))
        if unknown:
            raise ValueError(
                f"expected FileSink(storage_options=...) for {self._url} to have {'the options ' if known else 'no options'}"
                f"{', '.join(known)}, found {', '.join(unknown)}. Credentials come from the environment, from a profile, or from "
                "the machine's role"
            )


class ParquetSink(FileSink):
    """Commits a stage's rows as Parquet files below a directory, whose readers see all files of a commit or none.

    Args:
        path: directory on a local file system, or on one that every machine of the run mounts at the same
            path. Only one stage of one pipeline may write to it.
        at_new_start: what a new start, not a resumption, does with rows that an earlier job has committed to the directory:
            ``refuse`` (default) stops the run before Spark starts, ``keep`` leaves them beside the new job's rows, ``replace``
            removes them when the new job begins. Files that the sink has not written are never removed.

    Raises:
        InvalidSinkPath: the path is an object store's URL, or empty.
        ValueError: ``at_new_start`` is not one of the three values.

    Examples:
        >>> sink = ParquetSink("/data/hourly_delays", at_new_start="replace")
    """

    kind = "parquet"
    noun = "directory"

    def __init__(self, path: str | os.PathLike[str], at_new_start: AtNewStart = "refuse") -> None:
        text = os.fspath(path)
        if not text.strip() or (url_scheme(text) is not None and local_path(text) is None):
            raise InvalidSinkPath(
                f"expected a path on a local or mounted file system, such as /data/hourly_delays, found "
                f"{text!r}. ParquetSink commits by renaming a directory, which object stores cannot do: mount "
                "the object store as a file system, or use another sink"
            )
        super().__init__(text, at_new_start=at_new_start)

    def __repr__(self) -> str:
        return f"ParquetSink({self._url!r}, at_new_start={self.at_new_start!r})"

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self._url)

    def open(self, context: SinkContext) -> None:
        """Prepare for writing.

        Raises:
            SinkPathInUse: the directory belongs to another stage or pipeline.
            SinkFenced: a newer run of the pipeline writes there.
            SinkUnavailable: the directory cannot be written.
        """
        if not VALID_NAME.fullmatch(context.stage):
            raise InvalidSinkPath(f"{self}: expected a stage name that can name a directory, found {context.stage!r}")
        super().open(context)

    def new_target(self) -> FileTarget:
        from dagster_checkpoints.sinks.files.directory_target import DirectoryTarget

        return DirectoryTarget(self.path, type(self).__name__, str(self))
