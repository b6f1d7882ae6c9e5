"""The files below a FileSink's location in HDFS. Must not know what the files are, nor how HDFS is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from uuid import uuid4

from dagster_checkpoints.errors import AlreadyExists, NotFound
from dagster_checkpoints.sinks.engine import LedgerChanged
from dagster_checkpoints.sinks.files.target_files import LedgerFile, TargetFiles, available, in_parallel
from dagster_checkpoints.sinks.files.web_hdfs import WebHdfs
from dagster_checkpoints.sinks.temporary_folder import temporary_folder
from dagster_checkpoints.systems.errors import SinkUnavailable

_TEMPORARY = ".~"
"""Prefix of the names under which files are written. Readers skip such names, and no commit has one."""
_MAKING = 100


class HdfsFiles(TargetFiles):
    """Files in HDFS. HDFS keeps a name as soon as it has answered, and a file as soon as it is closed.

    Args:
        url: the location, ``webhdfs://namenode:9870/path``.
        user: the user whose files they are, see :class:`WebHdfs`.
    """

    def __init__(self, url: str, user: str | None = None) -> None:
        self._hdfs = WebHdfs(url, user)

    @property
    def place(self) -> str:
        return self._hdfs.url

    def read(self, name: str) -> bytes | None:
        with available(self.place):
            try:
                return b"".join(self._hdfs.stream(name))
            except NotFound:
                return None

    def put(self, name: str, data: bytes) -> None:
        with available(self.place):
            self._write(name, data, overwrite=True)

    def create(self, name: str, data: bytes) -> bool:
        with available(self.place):
            try:
                self._write(name, data, overwrite=False)
            except AlreadyExists:
                return False
        return True

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        with available(self.place):
            found = list(self._below(prefix.rpartition("/")[0]))
        yield from sorted((name, size) for name, size in found if name.startswith(prefix))

    def folders(self, prefix: str) -> list[str]:
        with available(self.place):
            return [entry.name for entry in self._hdfs.entries(prefix.rstrip("/")) if entry.is_folder]

    def missing(self, names: Sequence[str]) -> list[str]:
        with available(self.place):
            found = in_parallel(self._hdfs.status, names)
        return [name for name, status in zip(names, found, strict=True) if status is None]

    def delete(self, names: Iterable[str]) -> None:
        with available(self.place):
            names = list(names)
            in_parallel(self._hdfs.delete, names)
            for folder in {name.rpartition("/")[0] for name in names}:
                while folder and self._hdfs.delete(folder):
                    folder = folder.rpartition("/")[0]

    def ledger_file(self, name: str) -> LedgerFile:
        return HdfsLedgerFile(self, name)

    def work_folder(self, name: str) -> AbstractContextManager[Path]:
        return temporary_folder()

    def place_all(self, sources: Mapping[str, Path]) -> None:
        with available(self.place):
            in_parallel(lambda pair: self._copy_in(*pair), list(sources.items()))

    def move(self, moves: Sequence[tuple[str, str, int]]) -> list[int]:
        with available(self.place):
            for folder in {new.rpartition("/")[0] for _, new, _ in moves}:
                self._hdfs.make_folder(folder)
            moved = in_parallel(lambda move: self._move(*move[:2]), moves)
        return [position for position, done in enumerate(moved) if not done]

    def on_this_machine(self, name: str, scratch: Path) -> Path:
        copy = scratch / uuid4().hex
        with available(self.place), copy.open("wb") as file:
            for chunk in self._hdfs.stream(name):
                file.write(chunk)
        return copy

    def _below(self, folder: str) -> Iterator[tuple[str, int]]:
        for entry in self._hdfs.entries(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_folder:
                yield from self._below(name)
            else:  # also one with a temporary name, which a killed run has left: it is deleted with its folder
                yield name, entry.size

    def _copy_in(self, name: str, source: Path) -> None:
        with source.open("rb") as file:
            temporary = self._temporary(name)
            self._hdfs.write(temporary, file)
        self._hdfs.rename(temporary, name, overwrite=True)

    def _write(self, name: str, data: bytes, *, overwrite: bool) -> None:
        temporary = self._temporary(name)
        self._hdfs.write(temporary, data)
        try:
            self._hdfs.rename(temporary, name, overwrite=overwrite)
        except AlreadyExists:
            self._hdfs.delete(temporary)
            raise

    def _temporary(self, name: str) -> str:
        folder, separator, _ = name.rpartition("/")
        return f"{folder}{separator}{_TEMPORARY}{uuid4().hex}"

    def _move(self, present: str, new: str) -> bool:
        for _ in range(_MAKING):  # another instance may delete the directory while it is empty
            with suppress(NotFound):
                self._hdfs.rename(present, new, overwrite=True)
                return True
            if self._hdfs.status(present) is None:
                return False
            self._hdfs.make_folder(new.rpartition("/")[0])
        raise SinkUnavailable(f"another program deletes the directory of {self.place}/{new} again and again")


class HdfsLedgerFile:
    """A :class:`~dagster_checkpoints.sinks.files.target_files.LedgerFile` in HDFS.

    HDFS has no replacement under a condition, but of two that create a file one is refused. So each content is a file of its own,
    and the one with the highest number counts. Lower ones are deleted only when a higher one exists: an owner that creates a
    number again, since it was deleted, finds the higher one.

    Args:
        files: the files of the location.
        name: the file's name, without a number.
    """

    def __init__(self, files: HdfsFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._newest = 0

    @property
    def place(self) -> str:
        return f"{self._files.place}/{self._name}"

    def read(self) -> bytes | None:
        for _ in range(_MAKING):
            self._newest = max(self._numbers(), default=0)
            data = self._files.read(self._file(self._newest)) if self._newest else None
            if data is not None or not self._newest:
                return data  # else deleted in this moment: there is a higher one
        raise SinkUnavailable(f"another program deletes {self.place} again and again")

    def replace(self, data: bytes) -> None:
        own = self._newest + 1
        created = self._files.create(self._file(own), data)
        numbers = self._numbers()
        if not created or max(numbers) != own:
            if created:
                self._files.delete([self._file(own)])
            raise LedgerChanged
        self._newest = own
        self._files.delete(self._file(number) for number in numbers if number < own)

    def _numbers(self) -> list[int]:
        ends = (name.removeprefix(f"{self._name}.") for name in self._files.names(f"{self._name}."))
        return [int(end) for end in ends if end.isdigit()]

    def _file(self, number: int) -> str:
        return f"{self._name}.{number}"
