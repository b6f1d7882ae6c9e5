"""Rows as files of bounded size: one open file for each partition, completed when it is large enough.

Folders of partitions have Hive's names: ``day=2024-01-01/shop=a%2Fb``. Each format has a class of its own. Must
not know batches, checkpoints or where the files go.

Source: Spark's ``ExternalCatalogUtils.escapePathName``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.files.urls import is_hidden
from dagster_checkpoints.sinks.files.columns import FileFormat
from dagster_checkpoints.sinks.parquet_files import partitions
from dagster_checkpoints.sinks.text import csv_header, csv_lines, json_lines
from dagster_checkpoints.systems.errors import SinkRowsRefused

_STRIPE = 16 * 1024 * 1024
_ROWS_AT_A_TIME = 32_768


class RowEncoder(ABC):
    """Writes rows to one file."""

    @abstractmethod
    def write(self, table: pa.Table) -> None:
        """Append rows."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of bytes in the file so far."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""


def open_encoder(format: FileFormat, file: Path, schema: pa.Schema, target_bytes: int) -> RowEncoder:
    """Create a file.

    Args:
        format: its format.
        file: its path.
        schema: the schema of its rows.
        target_bytes: the size that the file shall have, about.
    """
    match format:
        case "parquet":
            return _ColumnsEncoder(file, lambda out: pq.ParquetWriter(out, schema, compression="snappy"))
        case "orc":
            from pyarrow import orc  # not part of every build of the library

            stripe = min(_STRIPE, max(target_bytes // 2, 1))
            return _ColumnsEncoder(file, lambda out: orc.ORCWriter(out, compression="snappy", stripe_size=stripe))
        case "csv":
            return _LinesEncoder(file, csv_header(schema.names), csv_lines)
        case "json":
            return _LinesEncoder(file, b"", json_lines)


class _ColumnsEncoder(RowEncoder):
    """A file of columns.

    Args:
        file: its path.
        open_writer: the library's writer to an opened file.
    """

    def __init__(self, file: Path, open_writer: Callable[[pa.NativeFile], Any]) -> None:
        self._file = pa.OSFile(str(file), "wb")
        self._writer = open_writer(self._file)

    def write(self, table: pa.Table) -> None:
        self._writer.write(table)

    @property
    def size(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class _LinesEncoder(RowEncoder):
    """A file of lines of text.

    Args:
        file: its path.
        header: its first bytes.
        lines: rows as lines.
    """

    def __init__(self, file: Path, header: bytes, lines: Callable[[pa.RecordBatch], memoryview]) -> None:
        self._file = file.open("wb")
        self._file.write(header)
        self._lines = lines

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=_ROWS_AT_A_TIME):
            self._file.write(self._lines(batch))

    @property
    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


DEFAULT_BYTES = 128 * 1024 * 1024
_GROUP = 8 * 1024 * 1024
_MOST_OPEN = 32
"""So that the rows that wait to be written together need at most `_MOST_OPEN` times `_GROUP` bytes of memory."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile("[\x00-\x1f\x7f\"#%'*/:=?\\\\{\\[\\]^]")
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How rows are divided into files.

    Args:
        format: the format.
        partition_by: the partition columns.
        rows_per_file: the largest number of rows in a file; None: any number.
        bytes_per_file: a file is completed when it has at least this size, in bytes; None: `DEFAULT_BYTES`.
    """

    format: FileFormat
    partition_by: tuple[str, ...]
    rows_per_file: int | None
    bytes_per_file: int | None

    @property
    def links(self) -> bool:
        """Whether Spark's Parquet files stay as they are."""
        return self.format == "parquet" and not self.partition_by and self.rows_per_file is None and self.bytes_per_file is None

    @property
    def target_bytes(self) -> int:
        return self.bytes_per_file or DEFAULT_BYTES


@dataclass(frozen=True, slots=True)
class CompletedPart:
    """A completed file.

    Args:
        file: its path.
        folder: the folder of its partition, empty if there is none.
        rows: the number of its rows.
    """

    file: Path
    folder: str
    rows: int


@dataclass
class _OpenPart:
    """A file that is being written; rows wait until there are enough of them for one group of the format."""

    file: Path
    encoder: RowEncoder
    rows: int = 0
    waiting: list[pa.Table] = field(default_factory=list)
    waiting_bytes: int = 0

    def add(self, rows: pa.Table, group: int) -> None:
        self.waiting.append(rows)
        self.waiting_bytes += rows.nbytes
        self.rows += rows.num_rows
        if self.waiting_bytes >= group:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.encoder.write(pa.concat_tables(self.waiting).combine_chunks())
            self.waiting, self.waiting_bytes = [], 0


class PartFiles:
    """Writes rows to files in a directory.

    Args:
        folder: the directory, which exists.
        layout: how rows are divided into files.
        schema: the schema of the rows.
        sink: the sink as errors name it.
    """

    def __init__(self, folder: Path, layout: FileLayout, schema: pa.Schema, sink: str) -> None:
        self._folder = folder
        self._layout = layout
        self._schema = pa.schema([each for each in schema if each.name not in layout.partition_by])
        self._sink = sink
        self._group = min(_GROUP, max(1, layout.target_bytes // 4))
        self._open: dict[str, _OpenPart] = {}
        self._completed: list[CompletedPart] = []
        self._count = 0

    def write(self, table: pa.Table) -> None:
        """Append rows to the files of their partitions."""
        names = self._layout.partition_by
        for values, rows in partitions(table, names):
            self._append(partition_folder(values, self._sink), rows.drop_columns(list(names)))

    def close(self) -> None:
        """Complete all files."""
        for folder in list(self._open):
            self._complete(folder)

    def take_completed(self) -> Sequence[CompletedPart]:
        """The files that were completed since the last call."""
        taken, self._completed = self._completed, []
        return taken

    def _append(self, folder: str, rows: pa.Table) -> None:
        most = self._layout.rows_per_file
        while rows.num_rows:
            part = self._part(folder)
            count = max(1, rows.num_rows * self._group // max(1, rows.nbytes))
            if most is not None:
                count = min(count, most - part.rows)
            part.add(rows.slice(0, count), self._group)
            rows = rows.slice(count)
            if part.rows == most or part.encoder.size >= self._layout.target_bytes:
                self._complete(folder)

    def _part(self, folder: str) -> _OpenPart:
        part = self._open.pop(folder, None)
        if part is None:
            if len(self._open) >= _MOST_OPEN:
                self._complete(next(iter(self._open)))  # the one that was not used for the longest time
            file = self._folder / f"{self._count:05d}"  # not with the format's name: the folder may be below the location
            self._count += 1
            part = _OpenPart(file, open_encoder(self._layout.format, file, self._schema, self._layout.target_bytes))
        self._open[folder] = part
        return part

    def _complete(self, folder: str) -> None:
        part = self._open.pop(folder)
        part.flush()
        part.encoder.close()
        self._completed.append(CompletedPart(part.file, folder, part.rows))


def partition_folder(values: Mapping[str, Any], sink: str) -> str:
    """The folder of the rows that have these values; empty if there are no partition columns.

    Args:
        values: the value of each partition column.
        sink: the sink as errors name it.

    Raises:
        SinkRowsRefused: a value cannot be a directory's name, or is not read back from it.
    """
    parts = [f"{_escaped(name)}={_text(value)}" for name, value in values.items()]
    for name, part in zip(values, parts, strict=True):
        if len(part.encode()) > _LONGEST:
            raise SinkRowsRefused(
                f"{sink}: expected values of the partition column {name!r} that fit a directory's name ({_LONGEST} bytes with "
                f"the column's name), found one of {len(part.encode())} bytes, which begins with {part[:40]!r}. Choose another "
                "partition column, or shorten the values in the stage"
            )
        if is_hidden(part):
            raise SinkRowsRefused(
                f"{sink}: expected values of the partition column {name!r} whose directories are read, found {part!r}: "
                "Spark and Hadoop skip a name with this end. Choose another partition column, or change the value in the stage"
            )
        if values[name] == _NULL:
            raise SinkRowsRefused(
                f"{sink}: expected values of the partition column {name!r} that are read back from a directory's name, found the "
                f"text {_NULL!r}, which stands for null there. Choose another partition column, or change the value in the stage"
            )
    return "/".join(parts)


def _text(value: Any) -> str:
    if value is None or value == "":  # Hive reads the empty text as null
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else _escaped(str(value))


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)
