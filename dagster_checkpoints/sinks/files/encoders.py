"""Rows as files: one class for each format. Must not know partitions, sizes or checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks.files.columns import FileFormat
from dagster_checkpoints.sinks.text import csv_header, csv_lines, json_lines

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
