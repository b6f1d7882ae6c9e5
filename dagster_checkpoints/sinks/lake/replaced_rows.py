"""Rows that replace those with their keys: each file that holds such rows is replaced by the rows that remain of it.

::

    the table's files ── bounds of columns ──> candidates ── their key columns are read ──> files with rows of these keys
    remaining rows of one partition and one origin ──> new files          ("copy on write")
    one commit: these files are removed, the new files and the transaction's are added

What was read and written is kept for the next plan: after a conflict only files that are new in the table are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.lake.keys import KeyColumns, key_types, newest_of_each_key, split, with_keys
from dagster_checkpoints.sinks.lake.names import TransactionName, origin_of, remainder_epoch
from dagster_checkpoints.sinks.lake.placement import Placement, RowPlacement
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, DataFile, TableLog
from dagster_checkpoints.sinks.temporary_folder import temporary_folder
from dagster_checkpoints.systems.errors import SinkUnavailable

_ROWS_AT_A_TIME = 2_000_000
_BUFFERED_BYTES = 64 * 1024 * 1024
_FILE_BYTES = 128 * 1024 * 1024


class _Group(NamedTuple):
    """Files whose remaining rows go into the same new files.

    Args:
        partition: the partition's values, by column.
        origin: the job of this stage that has written the rows; None if another program may have.
    """

    partition: tuple[tuple[str, str | None], ...]
    origin: str | None


class ReplacedRows(RowPlacement):
    """The rows of one transaction, which replace those with their keys; of two rows with one key the later one is kept.

    Args:
        log: the table.
        scope: the instance that commits.
        sink: the sink as errors name it.
        name: the transaction.
        files: its data files, in the order in which their rows were written.
        key: the columns of the key.
    """

    def __init__(
        self,
        log: TableLog,
        scope: SinkScope,
        sink: str,
        name: TransactionName,
        files: Sequence[DataFile],
        key: Sequence[str],
    ) -> None:
        self._log = log
        self._scope = scope
        self._sink = sink
        self._name = name
        super().__init__(files)
        self._key = KeyColumns(key, {})
        self._keys: pa.Table | None = None
        self._texts: list[tuple[str, set[str | None]]] = []
        self._replaced: dict[str, pa.ChunkedArray | None] = {}
        self._remainders: dict[_Group, tuple[frozenset[str], list[DataFile]]] = {}
        self._token = uuid4().hex[:12]
        self._written: list[str] = []
        self._used: set[str] = set()

    def plan(self) -> Placement:
        if self._keys is None:
            self._delete_remainders()
            self._read_transaction()
        remove = self._with_rows_to_replace()
        groups: dict[_Group, set[str]] = defaultdict(set)
        superseded = self._superseded()
        origins: list[ActiveFile | DataFile] = [*remove, *superseded]
        for file in origins:
            origin = origin_of(file.path, self._scope.pipeline, self._scope.stage)
            groups[_Group(tuple(file.partition.items()), origin)].add(file.path)
        add = [file for file in self._files if file not in superseded]
        for group, paths in groups.items():
            add += self._remainder(group, frozenset(paths))
        self._used = {file.path for file in add}
        return Placement(add, remove)

    def committed(self) -> None:
        self._log.files.delete(path for path in self._written if path not in self._used)

    # Reading keys

    def _read_transaction(self) -> None:
        first = self._files[0]
        with self._reads(first.path):
            stored = [name for name in self._key.names if name not in first.partition]
            types = key_types(self._log.readable(first.path), stored)
        now = self._log.arrow_types()  # numbers may be wider than when the transaction was staged
        types = {
            name: now[name] if pa.types.is_integer(kind) or pa.types.is_decimal(kind) else kind for name, kind in types.items()
        }
        self._key = KeyColumns(self._key.names, types)
        read = [self._read(file.path, file.partition) for file in self._files]
        self._keys, replaced = newest_of_each_key(read)
        self._replaced = {file.path: mask for file, mask in zip(self._files, replaced, strict=True)}
        self._texts = [
            (name, set(self._keys.column(number).unique().to_pylist()))
            for number, name in enumerate(self._key.names)
            if name not in types
        ]

    def _superseded(self) -> list[DataFile]:
        """The transaction's files with rows that later rows of the transaction replace."""
        return [file for file in self._files if self._replaced[file.path] is not None]

    def _with_rows_to_replace(self) -> list[ActiveFile]:
        assert self._keys is not None
        candidates = [
            file
            for file in self._log.active(self._key.bounds(self._keys))
            if all(file.partition[name] in texts for name, texts in self._texts)
        ]
        for files in _in_portions([file for file in candidates if file.path not in self._replaced]):
            read = [self._read(file.path, file.partition) for file in files]
            found = split(with_keys(pa.concat_tables(read), self._keys), [keys.num_rows for keys in read])
            self._replaced |= {file.path: mask for file, mask in zip(files, found, strict=True)}
        return [file for file in candidates if self._replaced[file.path] is not None]

    def _read(self, path: str, partition: dict[str, str | None]) -> pa.Table:
        with self._reads(path):
            return self._key.read(self._log.readable(path), partition)

    @contextmanager
    def _reads(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowInvalid) as error:
            raise SinkUnavailable(
                f"{self._sink}: expected to read the table's file {path}, found: {error}. "
                f"{self._log.format.cleaning}. If it was deleted, restore it from a backup; another attempt may succeed"
            ) from error

    # Writing what remains

    def _remainder(self, group: _Group, paths: frozenset[str]) -> list[DataFile]:
        """The files with the rows of other files that remain."""
        known = self._remainders.get(group)
        if known is not None and known[0] == paths:
            return known[1]
        types = self._log.arrow_types()
        partition = dict(group.partition)
        with temporary_folder() as folder:
            writer = _RowWriter(folder)
            for path in sorted(paths):
                for rows in self._remaining_rows(path, types):
                    writer.add(rows)
            files = self._placed(writer.close(), partition, group.origin)
        self._remainders[group] = (paths, files)
        return files

    def _remaining_rows(self, path: str, types: Mapping[str, pa.DataType]) -> Iterator[pa.Table]:
        """The rows of a file that remain, in the table's types: each program has its own types of text in Arrow."""
        replaced = self._replaced[path]
        assert replaced is not None
        kept = pc.invert(replaced)
        with self._reads(path), pq.ParquetFile(self._log.readable(path), coerce_int96_timestamp_unit="us") as file:
            schema = pa.schema([(name, types.get(name, kind)) for name, kind in _columns(file.schema_arrow)])
            begin = 0
            for number in range(file.num_row_groups):
                part = kept.slice(begin, file.metadata.row_group(number).num_rows)
                begin += len(part)
                if pc.any(part).as_py():
                    yield file.read_row_group(number).cast(schema, safe=False).filter(part)

    def _placed(self, parts: Sequence[Path], partition: dict[str, str | None], origin: str | None) -> list[DataFile]:
        files, sources = [], {}
        for part in parts:
            prepared = self._log.described(part, pq.read_metadata(part), partition)
            path = self._name.remainder(self._scope.owner.epoch, self._token, origin, len(self._written))
            self._written.append(path)
            files.append(DataFile(path, part.stat().st_size, prepared.rows, prepared.statistics, partition))
            sources[path] = part
        self._log.files.place_all(sources)
        return files

    def _delete_remainders(self) -> None:
        """Delete what an attempt to commit this transaction has left; files of a newer owner stay."""
        left = self._log.files.sizes(self._name.remainders)
        self._log.files.delete(
            path for path in left if (epoch := remainder_epoch(path)) is not None and 0 < epoch <= self._scope.owner.epoch
        )


class _RowWriter:
    """Writes rows to Parquet files of a limited size; rows of other columns go to another file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._rows: list[pa.Table] = []
        self._bytes = 0

    def add(self, rows: pa.Table) -> None:
        if self._schema is None or not self._schema.equals(rows.schema):
            self._end_file()
            self._schema = rows.schema
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _BUFFERED_BYTES:
            self._flush()
            if self._files[-1].stat().st_size >= _FILE_BYTES:
                self._end_file()

    def close(self) -> list[Path]:
        """Write the rest. Returns all files."""
        self._end_file()
        return self._files

    def _flush(self) -> None:
        if not self._rows:
            return
        rows = pa.concat_tables(self._rows)
        if self._writer is None:
            self._files.append(self._folder / f"{len(self._files):04d}.parquet")
            self._writer = pq.ParquetWriter(self._files[-1], rows.schema, compression="snappy")
        self._writer.write_table(rows)
        self._rows, self._bytes = [], 0

    def _end_file(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _columns(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in schema]


def _in_portions(files: Sequence[ActiveFile]) -> Iterator[list[ActiveFile]]:
    """The files in portions of limited rows: the keys are made into a table for lookups once for each portion."""
    portion: list[ActiveFile] = []
    rows = 0
    for file in files:
        portion.append(file)
        rows += _ROWS_AT_A_TIME if file.rows is None else file.rows
        if rows >= _ROWS_AT_A_TIME:
            yield portion
            portion, rows = [], 0
    if portion:
        yield portion
