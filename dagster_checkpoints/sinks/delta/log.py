"""A Delta table and its log: opened, created, read, and changed by commits that are planned again after a conflict.

Delta keeps for each application id the newest version that a commit has recorded (its "application transactions"): they are the
sink's numbers. Two commits that record the same id conflict.

Must not know what the sink records, nor which rows belong to which checkpoint.

Source: Delta's protocol, "Transaction Identifiers".
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from dagster_checkpoints.files.durable import sync
from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.sinks.delta.columns import (
    KEY_TYPES,
    PARTITION_TYPES,
    check_types,
    columns_of,
    required_columns,
    schema_of,
    unkept_promises,
)
from dagster_checkpoints.sinks.delta.data_files import active_files, described, file_columns, is_removable, partition_text
from dagster_checkpoints.sinks.lake.columns import Column
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, LakeChange, PreparedFile, TableFormat, TableLog, TableShape
from dagster_checkpoints.sinks.parquet_files import fits
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkColumnsMismatch, SinkLibraryMissing
from dagster_checkpoints.systems.table_files import DeltaTableFiles, LocalTableFiles, TableFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable

_COLOURS = re.compile(r"\x1b\[\d+m")


class DeltaLog(TableLog):
    """A table, which need not exist.

    Args:
        url: the table's location: a path, or a URL that the ``deltalake`` library knows.
        storage_options: options of the library for that store; never shown.
        sink: the sink as errors name it.
    """

    format = TableFormat(
        name="Delta",
        cleaning="VACUUM deletes files that no version refers to, once they are older than its retention",
        rewriting="OPTIMIZE, DELETE, MERGE",
        access="the location, the credentials (storage_options, or the environment), their rights",
        numbers="application transactions of the log",
        partition_types=PARTITION_TYPES,
        key_types=KEY_TYPES,
        compression="snappy",
        partitions_in_files=False,
        names_return=True,
    )

    def __init__(self, url: str, storage_options: Mapping[str, str], sink: str) -> None:
        self._directory = local_path(url)
        super().__init__(sink, self._directory or url)
        self._url = url
        self._options = dict(storage_options)
        self._table: DeltaTable | None = None
        self._numbers: dict[str, int | None] = {}
        self._numbers_version = -1
        self._shape: tuple[int, TableShape] | None = None
        self._id = ""
        self._last_read: tuple[int, bytes | None] = (-1, None)
        self.files: TableFiles = LocalTableFiles(self._directory) if self._directory else DeltaTableFiles(url, self._options)

    @property
    def opened(self) -> DeltaTable:
        """The table as it was read last; it exists."""
        assert self._table is not None
        return self._table

    def shape(self) -> TableShape:
        version = self.opened.version()
        if self._shape is None or self._shape[0] != version:  # asked for each file
            schema, metadata = self.opened.schema().to_json(), self.opened.metadata()
            columns, required = columns_of(schema), required_columns(schema)
            self._shape = version, TableShape(str(metadata.id), columns, required, tuple(metadata.partition_columns))
        return self._shape[1]

    def columns_in(self, file: Path) -> tuple[Column, ...]:
        from deltalake import Schema

        columns = file_columns(file)
        check_types(columns)
        Schema.from_json(schema_of(columns))
        return columns

    def check_table(self, *, replaces: bool) -> None:
        table = self.opened
        unkept = unkept_promises(table.schema().to_json(), table.metadata().configuration, replaces=replaces)
        if replaces and "deletionVectors" in (table.protocol().reader_features or ()):
            unkept.append("deletion vectors")
        if unkept:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table whose rules hold without checking each row, found {'; '.join(unkept)}. The "
                "stage's files become part of the table as they are. Remove these rules from the table, or write to another table"
            )

    def columns_of(self, schema: str) -> tuple[Column, ...]:
        return columns_of(schema)

    def schema_of(self, columns: Sequence[Column]) -> str:
        return schema_of(columns)

    def refresh(self) -> DeltaTable:
        table = self._table
        if table is None:
            raise self._changed("no table")
        with self._reached("read"):
            table.update_incremental()
            version, digest = self._last_read
            if digest is not None and self._digest(version) == digest:
                if version != table.version():
                    self._last_read = table.version(), self._digest(table.version())
                return table
            found = self._loaded()  # its log was cleaned; or it is another table, which may have as many versions
        if found is None or str(found.metadata().id) != self._id:
            raise self._changed("no table" if found is None else f"another one, with id {found.metadata().id}")
        self._set(found)
        return found

    def _digest(self, version: int) -> bytes | None:
        """The digest of a version's file in the log, by which a table is known; None if there is no such file."""
        data = self.files.read(_log_file(version))
        return None if data is None else hashlib.sha256(data).digest()

    def _set(self, table: DeltaTable | None) -> None:
        self._table = table
        self._numbers_version, self._shape = -1, None
        if table is not None:
            self._id = str(table.metadata().id)
            self._last_read = table.version(), self._digest(table.version())

    def number(self, name: str) -> int | None:
        if self._table is None:
            return None
        version = self._table.version()
        if version != self._numbers_version:
            self._numbers, self._numbers_version = {}, version
        if name not in self._numbers:  # each look-up reads files of the log
            self._numbers[name] = self._table.transaction_version(name)
        return self._numbers[name]

    def active_files(self) -> set[str]:
        return set() if self._table is None else {file.path for file in self._files({})} - self._files_with_deleted_rows()

    def _files_with_deleted_rows(self) -> set[str]:
        """The files with deletion vectors: another program has deleted rows of them, and their names alone do not remove them.

        Source: Delta's protocol, "Deletion Vectors": a file is known by its path and its deletion vector together.
        """
        if "deletionVectors" not in (self.opened.protocol().reader_features or ()):
            return set()
        with self._reached("read"):
            urls = pa.table(self.opened.deletion_vectors().read_all())["filepath"].to_pylist()
        return {unquote(url.removeprefix(self.opened.table_uri)).lstrip("/") for url in urls}

    def active(self, bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]] | None = None) -> list[ActiveFile]:
        if self._files_with_deleted_rows():  # since the last batch was staged: see `check_table`
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table whose files can be replaced by files with other rows, found deletion vectors: "
                "another program has deleted rows with them. The staged rows stay: drop the table's feature deletionVectors "
                "(ALTER TABLE … DROP FEATURE), and start the run again"
            )
        return self._files(bounds or {})

    def _files(self, bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]]) -> list[ActiveFile]:
        return active_files(pa.table(self.opened.get_add_actions()), self.opened.metadata().partition_columns, bounds)

    def readable(self, name: str) -> Any:
        return self.files.readable(name)

    def arrow_types(self) -> dict[str, pa.DataType]:
        return {field.name: field.type for field in pa.schema(self.opened.schema().to_arrow())}

    def takes(self, metadata: Any) -> bool:
        return fits(metadata)

    def partition_texts(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        return {name: partition_text(value) for name, value in values.items()}

    def described(self, file: Path, metadata: Any, partition: Mapping[str, str | None]) -> PreparedFile:
        return described(file, metadata, self.shape().columns, partition)

    def create(self, schema: str, partition_by: Sequence[str], numbers: Mapping[str, int]) -> DeltaTable:
        from deltalake import CommitProperties, DeltaTable, Schema, Transaction

        with self._reached("create"):
            try:
                DeltaTable.create(
                    self._url,
                    Schema.from_json(schema),
                    mode="error",
                    partition_by=list(partition_by),
                    storage_options=self._options,
                    commit_properties=CommitProperties(app_transactions=[Transaction(*each) for each in numbers.items()]),
                )
            except Exception:
                if self._loaded() is None:
                    raise
            table = self._loaded()
            self._set(table)
            if table is None:
                raise self._changed("no table")
            self._sync(-1, table.version())
        return table

    def add_columns(self, columns: Sequence[Column]) -> DeltaTable:
        from deltalake import Schema
        from deltalake.exceptions import CommitFailedError, SchemaMismatchError

        table = self.refresh()
        present = {field.name for field in table.schema().fields}
        fields = [field for field in Schema.from_json(schema_of(columns)).fields if field.name not in present]
        with self._reached("add columns to"):
            if fields:
                with suppress(CommitFailedError, SchemaMismatchError):
                    table.alter.add_columns(fields)
        return self.refresh()

    def check_may_remove(self) -> None:
        if (self.opened.metadata().configuration.get("delta.appendOnly") or "").lower() == "true":
            raise SinkCannotTakeBack(
                f"{self._sink}: expected a table from which rows can be removed, found delta.appendOnly=true. Rows that earlier "
                "checkpoints have committed have to be taken back: unset the property while the run starts, or restore the "
                "newest checkpoint"
            )

    def _write(self, change: LakeChange) -> int:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, RemoveAction

        for file in change.remove:
            if isinstance(file, ActiveFile) and not is_removable(file):
                raise SinkColumnsMismatch(
                    f"{self._sink}: expected names of files that can be removed from the table's log, found {file.logged}, which "
                    "the writer of that file has written with other escapes than the library deltalake. Rewrite these files "
                    "with another program (OPTIMIZE, or Delta's own MERGE), or write to another table"
                )
        table, before, now = self.opened, self.opened.version(), int(time.time() * 1000)
        try:
            table.create_write_transaction(
                [
                    *(AddAction(f.path, f.size, f.partition, now, True, f.statistics) for f in change.add),
                    *(RemoveAction(f.path, True, now, f.size, f.partition) for f in change.remove),
                ],
                "append",
                table.schema(),
                table.metadata().partition_columns,
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(name, number) for name, number in change.numbers.items()],
                    custom_metadata=dict(change.note) or None,
                    max_commit_retries=0 if change.read_rows else None,
                ),
            )
        except CommitFailedError as error:
            if "Unsupported table features" not in str(error):
                raise
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table that the library deltalake can write to, found: {self._found(error)}. Drop "
                "these features of the table (ALTER TABLE … DROP FEATURE), install a release of deltalake that has them, or "
                "write to another table"
            ) from error
        table.update_incremental()
        if self._numbers_version == before:  # known for the next version, too, if no other commit came between
            self._numbers |= change.numbers
            self._numbers_version = before + 1
        self._sync(before, table.version())
        return int(table.version())

    def _is_conflict(self, error: BaseException | None) -> bool:
        from deltalake.exceptions import CommitFailedError

        return isinstance(error, CommitFailedError)

    def _loaded(self) -> DeltaTable | None:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self._url, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _sync(self, before: int, after: int) -> None:
        """On a local disk, the log's new files survive a power cut."""
        if self._directory is None:
            return
        for version in range(before + 1, after + 1):
            file = self._directory / _log_file(version)
            if file.exists():
                sync(file)
        sync(self._directory / "_delta_log")

    def _library_errors(self) -> tuple[type[Exception], ...]:
        try:
            from deltalake.exceptions import DeltaError
        except ModuleNotFoundError as error:
            raise library_missing(self._sink) from error
        return DeltaError, OSError, ValueError

    def _found(self, error: Exception) -> str:
        return " ".join(_COLOURS.sub("", str(error)).split())  # the library writes trees in colour


def library_missing(sink: str) -> SinkLibraryMissing:
    """The error for a machine without the library."""
    return SinkLibraryMissing(
        f"{sink}: expected the library deltalake, found that it is not installed. Install it: "
        "pip install 'dagster-checkpoints[delta]'"
    )


def _log_file(version: int) -> str:
    return f"_delta_log/{version:020}.json"
