"""Rows as files: one class for each format. Must not know partitions, sizes or checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

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
            return _ParquetEncoder(file, schema)
        case "orc":
            return _OrcEncoder(file, min(_STRIPE, max(target_bytes // 2, 1)))
        case "csv":
            return _LinesEncoder(file, csv_header(schema.names), csv_lines)
        case "json":
            return _LinesEncoder(file, b"", json_lines)


class _ParquetEncoder(RowEncoder):
    def __init__(self, file: Path, schema: pa.Schema) -> None:
        self._file = pa.OSFile(str(file), "wb")
        self._writer = pq.ParquetWriter(self._file, schema, compression="snappy")

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)

    @property
    def size(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class _OrcEncoder(RowEncoder):
    def __init__(self, file: Path, stripe: int) -> None:
        from pyarrow import orc  # not part of every build of the library

        self._file = pa.OSFile(str(file), "wb")
        self._writer = orc.ORCWriter(self._file, compression="snappy", stripe_size=stripe)

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
