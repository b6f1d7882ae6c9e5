"""Paths in the work directory, on every kind of file system, and what is done with files there.

A path on a file system of this machine (a mount counts) is a `pathlib.Path`; Python and Spark both work on it. Any other is a
`HadoopPath`, on which only the JVM's Hadoop client works. Spark's readers of files take
some characters of a path for a pattern; they are escaped. Must not know segments, logs or snapshots.

Source: Hadoop's `FileSystem.globStatus`, Spark's `SparkHadoopUtil.isGlobPath`
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from dagster_checkpoints.sinks.parquet_files import parquet_rows
from dagster_checkpoints.spark.files.hadoop_path import HadoopPath

PATTERN_CHARACTERS = frozenset("*?[]{}\\")
_ESCAPED = re.compile(r"\\(.)")


def is_pattern(path: str) -> bool:
    """Whether Spark's readers take a path for a pattern."""
    return not PATTERN_CHARACTERS.isdisjoint(path)


def literal(path: str) -> str:
    """The pattern whose only match is this path."""
    return "".join(f"\\{letter}" if letter in PATTERN_CHARACTERS else letter for letter in path)


def has_escapes(pattern: str) -> bool:
    """Whether a pattern names characters by their escapes: then the paths of its matches look like patterns themselves."""
    return any(found[1] in PATTERN_CHARACTERS for found in _ESCAPED.finditer(pattern))


class WorkPath(Protocol):
    """A file or directory in the work directory: the methods that `Path` and `HadoopPath` share.

    All raise OSError, and FileNotFoundError where there is no such file, on every file system.
    """

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Self: ...

    def __truediv__(self, part: str, /) -> Self: ...

    def exists(self) -> bool: ...

    def iterdir(self) -> Iterator[Self]: ...

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None: ...

    def read_text(self, encoding: str) -> str: ...

    def write_text(self, data: str, encoding: str) -> int: ...

    def unlink(self, missing_ok: bool = False) -> None: ...


_PARALLEL_COPIES = 8
_Path = TypeVar("_Path", bound=WorkPath)


def url(path: WorkPath) -> str:
    """The path for Spark. A path of this machine names its file system: Spark's default one may be another (fs.defaultFS)."""
    return f"file://{path.absolute()}" if isinstance(path, Path) else str(path)


def urls(paths: Iterable[WorkPath]) -> list[str]:
    """The paths for Spark, see :func:`url`."""
    return [url(path) for path in paths]


def entries_of(folder: _Path) -> list[_Path]:
    """A directory's entries; none if there is no such directory."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def size_of(file: WorkPath) -> int:
    """The size of a file in bytes."""
    return file.stat().st_size if isinstance(file, Path) else _hadoop(file).size()


def rows_of(file: WorkPath) -> int:
    """The number of rows that a Parquet file's footer counts."""
    return parquet_rows(file) if isinstance(file, Path) else _hadoop(file).parquet_rows()


def remove_tree(folder: WorkPath) -> None:
    """Remove a directory with all that is in it; what cannot be removed stays."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with suppress(OSError):
            _hadoop(folder).remove()


def remove_if_empty(folder: WorkPath) -> None:
    """Remove a directory unless something is in it."""
    with suppress(OSError):
        if isinstance(folder, Path):
            folder.rmdir()
        elif not entries_of(folder):
            _hadoop(folder).remove()


def place(scratch: Path, target: WorkPath) -> None:
    """Move the files of a directory of this machine into the work directory; nothing to do if they are there already.

    Args:
        scratch: The directory.
        target: Its place in the work directory, which may hold files that were placed before.
    """
    if isinstance(target, Path):
        assert scratch == target
        return
    files = [file for file in scratch.rglob("*") if file.is_file()]
    hadoop = _hadoop(target)
    with ThreadPoolExecutor(_PARALLEL_COPIES, thread_name_prefix="place") as threads:
        list(threads.map(lambda file: (hadoop / file.relative_to(scratch).as_posix()).copy_from(file), files))
    shutil.rmtree(scratch, ignore_errors=True)


def rename(source: _Path, target: _Path) -> None:
    """Move a file, or a directory with all that is in it, to a path on the same file system where nothing exists yet."""
    if isinstance(source, Path) and isinstance(target, Path):
        source.rename(target)
    else:
        _hadoop(source).rename(_hadoop(target))


@contextmanager
def local_copies(files: Sequence[WorkPath], scratch: Path) -> Iterator[list[Path]]:
    """Yields the files on this machine: themselves, or copies that last as long as the block.

    Args:
        files: The files.
        scratch: A directory for the copies, which does not exist.
    """
    copies = [file if isinstance(file, Path) else scratch / f"{number:05d}-{file.name}" for number, file in enumerate(files)]
    copied = [(_hadoop(file), copy) for file, copy in zip(files, copies, strict=True) if file is not copy]
    if not copied:
        yield copies
        return
    scratch.mkdir(parents=True)
    try:
        for file, copy in copied:
            file.copy_to(copy)
        yield copies
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _hadoop(path: WorkPath) -> HadoopPath:
    assert isinstance(path, HadoopPath)
    return path


@dataclass(frozen=True)
class WorkFolder:
    """A directory of an attempt or a task.

    Attributes:
        work: The directory that the driver and all executors see.
        scratch: A directory of the driver's machine; the same one if the work directory is on a file system of this machine, so
            that files can be linked and moved.
    """

    work: WorkPath
    scratch: Path

    def __truediv__(self, part: str, /) -> WorkFolder:
        return WorkFolder(self.work / part, self.scratch / part)

    def remove(self) -> None:
        """Remove the directory with all that is in it, at both places; what cannot be removed stays."""
        remove_tree(self.work)
        remove_tree(self.scratch)
