"""A stage's rows as Kafka messages, and the files in which they wait for their transaction.

The value is a column, or a JSON object of all columns::

    {"n":1,"text":"a \"b\"","at":"2026-01-01T00:00:00.000000Z","price":12.50,"data":"AP8=","nothing":null}

The files are in a directory that survives the process::

    <staging>/<pipeline>/<stage>-<index>/e7.h1-<attempt>-000003/batch-000000012.arrow   the messages of a batch

A crash of the run leaves them; the next run sends or deletes them. Must not know topics, nor when a transaction is committed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dagster_checkpoints.files.durable import make_directory, place, sizes, sync
from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.exact_values import check_values
from dagster_checkpoints.sinks.parquet_files import intervals_in
from dagster_checkpoints.sinks.text import json_objects, plain_texts
from dagster_checkpoints.systems.errors import SinkColumnsMismatch, SinkRowsRefused, SinkTransactionLost, few

KEY, VALUE, HEADERS = "key", "value", "headers"
RECORD_OVERHEAD = 61 + 36
"""Bytes of a batch of one message, and of the message, besides its key, value and headers, at most.

Source: https://kafka.apache.org/documentation/#recordbatch
"""
_HEADER_OVERHEAD = 10


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How rows become messages.

    Args:
        key: the column whose values are keys; None: messages have no key.
        value: the column whose values are values; None: JSON of all columns except `headers`.
        headers: columns whose values are headers of the same name.
        sink: the sink as errors name it.
    """

    key: str | None
    value: str | None
    headers: tuple[str, ...]
    sink: str

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns that cannot become messages.

        Raises:
            SinkColumnsMismatch: a column is missing, or has a type that the place cannot hold.
        """
        for setting, name in (("key", self.key), ("value", self.value), *(("headers", name) for name in self.headers)):
            if name is None:
                continue
            if schema.get_field_index(name) < 0:
                raise SinkColumnsMismatch(
                    f"{self.sink}: expected the column {name!r} that KafkaSink({setting}=...) names, found the columns "
                    f"{', '.join(schema.names)}"
                )
            self._check_type(schema, name, setting)
        if self.value is not None:
            return
        if not self._json_columns(schema):
            raise SinkColumnsMismatch(f"{self.sink}: expected a column for the value, found that every column is a header")
        for name in self._json_columns(schema):
            self._check_type(schema, name, "value")

    def encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The messages of rows: columns ``key`` and ``value`` (bytes), and one for each header.

        Raises:
            SinkRowsRefused: a text is not UTF-8, or a time is not of the years 1 to 9999.
        """
        if self.value is not None:  # other columns are no part of a message
            batch = batch.select([*dict.fromkeys(name for name in (self.key, self.value, *self.headers) if name is not None)])
        check_values(batch, {}, [name for name in (self.key,) if name is not None], self.sink)
        columns = {KEY: pa.nulls(batch.num_rows, pa.binary()) if self.key is None else self._bytes(batch, self.key)}
        columns[VALUE] = self._json(batch) if self.value is None else self._bytes(batch, self.value)
        for name in self.headers:
            columns[f"{HEADERS}.{name}"] = self._bytes(batch, name)
        return pa.record_batch(list(columns.values()), names=list(columns))

    def check_sizes(self, messages: pa.RecordBatch, header_bytes: int, limit: int) -> None:
        """Refuse a message that the topic would not accept.

        Args:
            messages: the messages.
            header_bytes: the longest header that the sink adds, in bytes.
            limit: the topic's ``max.message.bytes``.

        Raises:
            SinkRowsRefused: a message is too large.
        """
        if not messages.num_rows:
            return
        sizes = [pc.fill_null(pc.cast(pc.binary_length(column), pa.int64()), 0) for column in messages.columns]
        total = sizes[0]
        for each in sizes[1:]:
            total = pc.add(total, each)
        own = sum(len(name.encode()) + _HEADER_OVERHEAD for name in self.headers)
        longest = pc.max(total).as_py() + own + header_bytes + _HEADER_OVERHEAD + RECORD_OVERHEAD
        if longest > limit:
            raise SinkRowsRefused(
                f"{self.sink}: expected messages of at most {limit} bytes, the topic's max.message.bytes, found one of {longest} "
                "bytes with its headers, before compression. Enlarge the topic's setting, or split or shorten the rows in the "
                "stage"
            )

    def _json_columns(self, schema: pa.Schema) -> list[str]:
        return [name for name in schema.names if name not in self.headers]

    def _check_type(self, schema: pa.Schema, name: str, setting: str) -> None:
        kinds, field = pa.types, schema.field(name)
        interval = intervals_in(schema).get(name)
        simple = (
            kinds.is_boolean,
            kinds.is_integer,
            kinds.is_floating,
            kinds.is_decimal,
            kinds.is_string,
            kinds.is_large_string,
            kinds.is_binary,
            kinds.is_large_binary,
            kinds.is_date,
            kinds.is_timestamp,
        )
        if interval is not None or not any(fits(field.type) for fits in simple):
            raise SinkColumnsMismatch(
                f"{self.sink}: expected column {field.name!r} to be a number, a text, a time, true or false, or bytes, found "
                f"{interval or field.type}. Make it text in the stage, F.to_json({field.name!r}) or a cast to STRING; or make "
                "the whole message yourself, and name its column in KafkaSink(value=...)"
            )

    def _bytes(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """A column as the bytes of a key, a value or a header: text in UTF-8, bytes as they are."""
        column = batch.column(name)
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            return pc.cast(column, pa.binary())
        return pc.cast(pc.cast(plain_texts(column), pa.string()), pa.binary())

    def _json(self, batch: pa.RecordBatch) -> pa.Array:
        objects = json_objects(batch.select(self._json_columns(batch.schema)))
        return pc.cast(pc.cast(objects, pa.large_binary()), pa.binary())


def headers_of(messages: pa.RecordBatch) -> Sequence[tuple[str, list[bytes | None]]]:
    """The values of each header that the rows give."""
    prefix = f"{HEADERS}."
    return [(name[len(prefix) :], messages.column(name).to_pylist()) for name in messages.schema.names if name.startswith(prefix)]


_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


class StagedMessages:
    """The staged transactions of one instance.

    Args:
        root: the staging directory of the sink.
        scope: the instance.
        sink: the sink as errors name it.
    """

    def __init__(self, root: Path, scope: SinkScope, sink: str) -> None:
        self._root = root
        self._area = root / scope.pipeline / f"{scope.stage}-{scope.index}"
        self._sink = sink

    def names(self) -> list[str]:
        """The names of all transactions."""
        return sorted(folder.name for folder in self._area.iterdir()) if self._area.is_dir() else []

    def write(self, name: str, batch_id: int, schema: pa.Schema, messages: Iterator[pa.RecordBatch]) -> int:
        """Write the messages of a batch; they replace those that the batch had before. Returns their number."""
        folder = self._area / name
        make_directory(folder, self._root)
        rows = 0
        with (
            pa.OSFile(str(self._batch(name, batch_id)), "wb") as out,
            pa.ipc.new_file(out, schema, options=_COMPRESSED) as writer,
        ):
            for each in messages:
                writer.write_batch(each)
                rows += each.num_rows
        return rows

    def drop_batch(self, name: str, batch_id: int) -> None:
        """Forget the messages of a batch: it was written again without rows."""
        self._batch(name, batch_id).unlink(missing_ok=True)

    def make_durable(self, name: str) -> dict[str, int]:
        """Wait until a transaction's files are on disk. Returns their sizes by name."""
        folder = self._area / name
        found = sizes(folder)
        for file in found:
            sync(folder / file)
        sync(folder)
        return found

    def files(self, name: str, expected: Mapping[str, int]) -> dict[str, Path]:
        """The files of a transaction by name, in the order of its batches.

        Raises:
            SinkTransactionLost: files are missing, or have another size.
        """
        folder = self._area / name
        found = sizes(folder) if folder.is_dir() else {}
        if found != dict(expected):
            raise SinkTransactionLost(
                f"{self._sink}: expected the {len(expected)} files of a pre-committed transaction in {folder} "
                f"({few(expected)}), found {few(found)}: another program has deleted or changed them. Restore them from a "
                "backup, or start the job from a savepoint, or without restoring"
            )
        return {file: folder / file for file in sorted(found)}

    def restore(self, name: str, expected: Mapping[str, int], files: Mapping[str, Path]) -> None:
        """Create a transaction's files again from a savepoint's, unless they are there."""
        folder = self._area / name
        if folder.is_dir() and sizes(folder) == dict(expected):
            return
        make_directory(self._area, self._root)
        complete = self._area / f"{name}.restoring"
        shutil.rmtree(complete, ignore_errors=True)
        complete.mkdir()
        for file, source in files.items():
            place(source, complete / file)
        sync(complete)
        shutil.rmtree(folder, ignore_errors=True)  # incomplete: a crash has interrupted its deletion
        complete.rename(folder)
        sync(self._area)

    def delete(self, name: str) -> None:
        shutil.rmtree(self._area / name, ignore_errors=True)

    def _batch(self, name: str, batch_id: int) -> Path:
        return self._area / name / f"batch-{batch_id:09d}.arrow"


def read_messages(file: Path) -> Iterator[pa.RecordBatch]:
    """The messages of a batch's file."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
