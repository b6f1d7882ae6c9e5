"""Paths on file systems that only the driver's JVM reaches: HDFS, S3A, GCS, ABFS and every other one of Hadoop's.

Few calls, each with much work: a call into the JVM costs more than an operation on a local file, and on a remote file system
a request. Never call them on the main thread of a Dagster run (`spark_session`).

Source: https://hadoop.apache.org/docs/current/hadoop-project-dist/hadoop-common/filesystem/filesystem.html
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.spark.jvm import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MISSING = frozenset({"java.io.FileNotFoundException", "java.nio.file.NoSuchFileException"})
_STATUS = re.compile(
    r"\{path=(.*?); isDirectory=(?:true|false);(?: length=(\d+);)?.*?modification_time=(\d+)(?:[^{]*?\[eTag='(.*?)', versionId=)?"
)
"""Of `FileStatus.toString`; a directory has no length, and only S3A adds the version of an object."""
_READ_BYTES = 1 << 20
_P = ParamSpec("_P")
_T = TypeVar("_T")


class WorkFileError(OSError):
    """A file system of Hadoop's refused or failed an operation.

    Attributes:
        java_exception: The JVM's exception.
    """

    def __init__(self, message: str, java_exception: Any) -> None:
        super().__init__(message)
        self.java_exception = java_exception


class WorkFileMissing(WorkFileError, FileNotFoundError):
    """A file system of Hadoop's has no such file or directory."""


def _as_os_error(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Raise OSError for an exception of the JVM: callers treat all file systems alike."""

    @functools.wraps(method)
    def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return method(*arguments, **named)
        except Exception as error:
            raised = getattr(error, "java_exception", None)
            if raised is None or isinstance(error, OSError):
                raise
            name = str(raised.getClass().getName())
            kind = WorkFileMissing if name in _MISSING else WorkFileError
            first_line = str(raised.getMessage()).partition("\n")[0]
            raise kind(f"{arguments[0]}: {name}: {first_line}", raised) from error

    return call


def _raise(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, unless it has vanished."""
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass(frozen=True)
class FileStatus:
    """A file that a listing has found.

    Attributes:
        path: The file.
        size: Its size in bytes.
        modified_ms: When it was written, epoch ms by the file system's clock.
        etag: S3's version of the bytes; "" on other file systems.
    """

    path: HadoopPath
    size: int
    modified_ms: int
    etag: str = ""


class HadoopFileSystem:
    """Hadoop's client for one file system, in the driver's JVM.

    Args:
        spark: The session; its Hadoop configuration applies (`spark.hadoop.*`).
        root: A URL on the file system, such as `hdfs://namenode:8020/work`.

    Attributes:
        is_local: Whether its files are on this machine.
        bucket: For S3A: the bucket as the checkpoints' storage reaches it, once it is proven that the server of that storage
            copies objects from it and to it (`server_copies`); else None.

    Raises:
        WorkFileError: Hadoop knows no file system for the URL's scheme, or refuses the URL.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm = jvm_of(spark)
        self.root = root
        self.bucket: ObjectStore | None = None
        self.configuration: Any = spark._jsparkSession.sessionState().newHadoopConf()
        self.path: Callable[[str], Any] = jvm.org.apache.hadoop.fs.Path
        self.to_list: Callable[[Any], Any] = jvm.org.apache.hadoop.util.functional.RemoteIterators.toList
        self.read: Callable[[Any], Any] = jvm.org.apache.commons.io.IOUtils.toByteArray
        self.file_of: Callable[[Any, Any], Any] = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath
        self.open_parquet: Callable[[Any], Any] = jvm.org.apache.parquet.hadoop.ParquetFileReader.open
        self.copy: Callable[..., bool] = jvm.org.apache.hadoop.fs.FileUtil.copy
        self.hash: Callable[[Any], Any] = jvm.org.apache.commons.codec.digest.DigestUtils.sha256Hex
        self.buffered: Callable[[Any, int], Any] = jvm.java.io.BufferedInputStream
        self.wrapped: Callable[[Any], Any] = jvm.scala.Predef.genericWrapArray
        self.local: Any = jvm.org.apache.hadoop.fs.FileSystem.getLocal(self.configuration).getRawFileSystem()
        self.client: Any = self._client(root)
        self.is_local = str(self.client.getUri().getScheme()) == "file"

    @_as_os_error
    def _client(self, root: str) -> Any:
        return self.path(root).getFileSystem(self.configuration)

    @_as_os_error
    def qualified(self, url: str) -> HadoopPath:
        """The path of a URL on this file system, as listings write it: with the default host if the URL names none."""
        return HadoopPath(self, str(self.client.makeQualified(self.path(url)).toString()))

    @_as_os_error
    def matching(self, pattern: str) -> list[FileStatus]:
        """The files and directories of a pattern with Hadoop's wildcards; none if nothing matches."""
        found = self.client.globStatus(self.path(pattern))
        return [] if found is None else self.parsed(str(self.wrapped(found).mkString()))

    @_as_os_error
    def is_empty(self, url: str) -> bool:
        """Whether a directory holds nothing; only the beginning of its listing is read."""
        return not self.client.listStatusIterator(self.path(url)).hasNext()

    def parsed(self, text: str) -> list[FileStatus]:
        """The statuses of a listing: one text for all, because a call into the JVM for each field of each would be slow."""
        return [
            FileStatus(HadoopPath(self, path), int(size or 0), int(modified), etag)
            for path, size, modified, etag in _STATUS.findall(text)
        ]

    def __str__(self) -> str:
        return self.root


class HadoopPath:
    """A path on one of Hadoop's file systems; see `work_path.WorkPath`. Two with the same URL are equal.

    Args:
        system: The file system.
        url: The URL, as Hadoop writes it (not percent-encoded), without a slash at its end.
    """

    def __init__(self, system: HadoopFileSystem, url: str) -> None:
        self._system = system
        self._url = url

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"HadoopPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HadoopPath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> HadoopPath:
        return HadoopPath(self._system, self._url.rpartition("/")[0])

    def __truediv__(self, part: str, /) -> HadoopPath:
        return HadoopPath(self._system, f"{self._url}/{part}")

    @property
    def _path(self) -> Any:
        return self._system.path(self._url)

    @_as_os_error
    def exists(self) -> bool:
        return bool(self._system.client.exists(self._path))

    def iterdir(self) -> Iterator[HadoopPath]:
        yield from (status.path for status in self._listed(self._system.client.listStatusIterator))

    def files_below(self) -> list[FileStatus]:
        """All files below a directory; none if there is no such directory.

        Raises:
            OSError: It cannot be listed, or a directory in it was removed meanwhile.
        """
        if self._system.is_local:
            return list(self._local_files())
        try:
            return self._listed(lambda path: self._system.client.listFiles(path, True))
        except FileNotFoundError:
            if self.exists():
                raise
            return []

    def _local_files(self) -> Iterator[FileStatus]:
        """The files below a directory of this machine, without those that vanish meanwhile.

        Hadoop would start a process for each file, which tells its rights, and fail if the file has vanished by then.
        """
        root = str(self._path.toUri().getPath())
        for folder, _, names in [("", [], [root])] if os.path.isfile(root) else os.walk(root, onerror=_raise, followlinks=True):
            for file in (os.path.join(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    found = os.stat(file)
                    path = HadoopPath(self._system, self._url + file[len(root) :])
                    yield FileStatus(path, found.st_size, found.st_mtime_ns // 1_000_000)

    @_as_os_error
    def _listed(self, entries: Callable[[Any], Any]) -> list[FileStatus]:
        return self._system.parsed(str(self._system.to_list(entries(self._path)).toString()))

    @_as_os_error
    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        self._system.client.mkdirs(self._path)

    @_as_os_error
    def read_bytes(self) -> bytes:
        stream = self._system.client.open(self._path)
        try:
            return bytes(self._system.read(stream))
        finally:
            stream.close()

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    @_as_os_error
    def write_text(self, data: str, encoding: str = "utf-8") -> int:
        stream = self._system.client.create(self._path, True)
        try:
            stream.write(bytearray(data.encode(encoding)))
        finally:
            stream.close()
        return len(data)

    @_as_os_error
    def unlink(self, missing_ok: bool = False) -> None:
        if not self._system.client.delete(self._path, False) and not missing_ok:
            raise FileNotFoundError(self._url)

    @_as_os_error
    def remove(self) -> None:
        """Remove the file, or the directory with all that is in it."""
        self._system.client.delete(self._path, True)

    @_as_os_error
    def rename(self, target: HadoopPath) -> None:
        """Move the file, or the directory with all that is in it, to a path where nothing exists yet."""
        if not self._system.client.rename(self._path, target._path):
            raise FileNotFoundError(f"{self} cannot be moved to {target}: it does not exist, or the target does")

    @_as_os_error
    def size(self) -> int:
        """The size in bytes."""
        return int(self._system.client.getFileStatus(self._path).getLen())

    @_as_os_error
    def parquet_rows(self) -> int:
        """The number of rows that a Parquet file's footer counts."""
        reader = self._system.open_parquet(self._system.file_of(self._path, self._system.configuration))
        try:
            return int(reader.getRecordCount())
        finally:
            reader.close()

    @_as_os_error
    def sha256(self) -> str:
        """The sha256 of the file's bytes, hexadecimal; the JVM reads them."""
        stream = self._system.buffered(self._system.client.open(self._path), _READ_BYTES)
        try:
            return str(self._system.hash(stream))
        finally:
            stream.close()

    @property
    def system(self) -> HadoopFileSystem:
        """The file system."""
        return self._system

    @property
    def object_key(self) -> str:
        """The key in the bucket of the file that this path names, if the file system is S3A."""
        return self._url.partition("://")[2].partition("/")[2]

    @_as_os_error
    def copy_to(self, target: Path) -> None:
        """Copy the file to this machine."""
        raw = True  # without a checksum file beside it
        self._system.client.copyToLocalFile(False, self._path, self._system.path(f"file://{target}"), raw)

    @_as_os_error
    def copy_from(self, source: Path) -> None:
        """Copy a file of this machine to this path; missing directories are made."""
        system, here = self._system, self._system.path(f"file://{source}")
        system.copy(system.local, here, system.client, self._path, False, True, system.configuration)
