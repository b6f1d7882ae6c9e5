"""An Iceberg table: opened, created, read, and changed by snapshots that are planned again after a conflict.

The sink's numbers are properties of the table: unlike the summaries of snapshots they do not vanish when snapshots expire. Every
change of them makes a snapshot, also one without files. A catalog accepts a snapshot only on top of the one that it was made for,
together with its properties: so the numbers are compared and set in one step. The summary of a snapshot says the same for people.

Must not know what the sink records, nor which rows belong to which checkpoint.

Source: Iceberg's specification, "Commit Conflict Resolution and Retry"; the REST catalog's ``assert-ref-snapshot-id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_checkpoints.sinks.iceberg.columns import (
    KEY_TYPES,
    PARTITION_TYPES,
    columns_of,
    holds,
    nested_required,
    required_columns,
    schema_of,
)
from dagster_checkpoints.sinks.iceberg.data_files import (
    ActiveFiles,
    described,
    file_columns,
    has_the_formats_paths,
    iceberg_file,
    manifests_of,
    may_hold,
    obstacles,
    partition_of,
    readable,
    texts_of,
)
from dagster_checkpoints.sinks.lake.columns import Column
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, LakeChange, PreparedFile, TableFormat, TableLog, TableShape
from dagster_checkpoints.sinks.parquet_files import arrow_schema, fits, has_field_ids
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkCannotTakeBack, SinkColumnsMismatch
from dagster_checkpoints.systems.iceberg_catalogs import CatalogSettings, library_missing
from dagster_checkpoints.systems.table_files import IcebergTableFiles, LocalTableFiles, NoTableFiles, TableFiles

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io.pyarrow import PyArrowFileIO
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table

_VERSION = 2
_SUMMARY = "dagster-checkpoints"
_OF_NEW_TABLES = {"format-version": "2", "write.metadata.delete-after-commit.enabled": "true"}
"""Each commit writes the whole metadata to a new file: the table keeps the newest hundred of them."""


class IcebergLog(TableLog):
    """A table, which need not exist.

    Args:
        identifier: the parts of the table's name.
        settings: the catalog.
        sink: the sink as errors name it.
    """

    format = TableFormat(
        name="Iceberg",
        cleaning="The removal of orphan files and the expiry of snapshots delete files that no snapshot refers to",
        rewriting="rewrite_data_files, DELETE, MERGE",
        access="the catalog, its properties, the credentials and their rights",
        numbers="properties of the table",
        partition_types=PARTITION_TYPES,
        key_types=KEY_TYPES,
        compression="zstd",
        partitions_in_files=True,
        names_return=False,  # the expiry of the snapshot that has removed a file may delete the file
    )

    def __init__(self, identifier: tuple[str, ...], settings: CatalogSettings, sink: str) -> None:
        super().__init__(sink, settings.directory or settings.place)
        self._identifier = identifier
        self._settings = settings
        self._catalog: Catalog | None = None
        self._table: Table | None = None
        self._active_files = ActiveFiles()
        self._active: dict[str, IcebergFile] = {}
        self.files: TableFiles = NoTableFiles()

    @property
    def opened(self) -> Table:
        """The table as it was read last; it exists."""
        assert self._table is not None
        return self._table

    def refresh(self) -> Table:
        if self._table is None:
            raise self._changed("no table")
        with self._reached("read"):
            found = self._loaded()
        if found is None:
            raise self._changed("no table")
        if found.metadata.table_uuid != self._table.metadata.table_uuid:
            raise self._changed(f"another one, with id {found.metadata.table_uuid}")
        self._set(found)
        return found

    def shape(self) -> TableShape:
        table = self.opened
        schema = table.schema().model_dump_json()
        partitions = [table.schema().find_column_name(field.source_id) or "" for field in table.spec().fields]
        return TableShape(str(table.metadata.table_uuid), columns_of(schema), required_columns(schema), tuple(partitions))

    def columns_in(self, file: Path) -> tuple[Column, ...]:
        from pydantic import ValidationError
        from pyiceberg.schema import Schema

        columns = file_columns(file)
        try:
            Schema.model_validate_json(schema_of(columns))
        except ValidationError as error:  # two columns with one name: a field of a structure is named after both
            raise TypeError(f"{error.errors()[0]['msg']}: rename one of them") from error
        return columns

    def check_table(self, *, replaces: bool) -> None:
        unkept = _unkept(self.opened) + (self.obstacles() if replaces else [])
        if unkept:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table that takes Parquet files as the stage has written them, found "
                f"{'; '.join(unkept)}. Change the table, or write to another one"
            )

    def columns_of(self, schema: str) -> tuple[Column, ...]:
        return columns_of(schema)

    def schema_of(self, columns: Sequence[Column]) -> str:
        return schema_of(columns)

    def holds(self, table: Any, stage: Any) -> bool:
        return holds(table, stage)

    def number(self, name: str) -> int | None:
        found = None if self._table is None else self._table.properties.get(name)
        return None if found is None else int(found)

    def active_files(self) -> set[str]:
        if self._table is None:
            return set()
        with self._reached("read"):
            files = self._active_files.read(self._table)
        self._active = {file.file_path.removeprefix(f"{self._location}/"): file for file in files}
        return set(self._active)

    def active(self, bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]] | None = None) -> list[ActiveFile]:
        found = self.obstacles()
        if found:
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a table whose files can be replaced by files with other rows, found {'; '.join(found)}. "
                "Start the run again after that"
            )
        self.active_files()
        return [
            ActiveFile(name, file.file_path, file.file_size_in_bytes, file.record_count, partition_of(file, self.opened))
            for name, file in self._active.items()
            if may_hold(file, self.opened, bounds or {})
        ]

    def obstacles(self) -> list[str]:
        """What keeps files of the table, which exists, from being replaced by files with other rows; a text for each."""
        with self._reached("read"):
            return obstacles(self.opened)

    def readable(self, name: str) -> Any:
        file = self._active.get(name)
        if file is None:  # of a transaction that is not committed: with the table's names
            return self.files.readable(name)
        return readable(file, self.opened)

    def arrow_types(self) -> dict[str, pa.DataType]:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        return {field.name: field.type for field in schema_to_pyarrow(self.opened.schema(), include_field_ids=False)}

    def takes(self, metadata: Any) -> bool:
        found = metadata.schema.to_arrow_schema()
        in_microseconds = fits(metadata) and bool(arrow_schema(metadata).equals(found))
        # Readers would look for columns by ids of another table, and not by the names.
        return in_microseconds and not has_field_ids(found) and has_the_formats_paths(metadata, self.opened)

    def partition_texts(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        return texts_of(self.opened, values)

    def described(self, file: Path, metadata: Any, partition: Mapping[str, str | None]) -> PreparedFile:
        return described(file, metadata, self.opened, partition)

    def create(self, schema: str, partition_by: Sequence[str], numbers: Mapping[str, int]) -> Table:
        from pyiceberg.exceptions import TableAlreadyExistsError
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.schema import Schema
        from pyiceberg.transforms import IdentityTransform

        columns = Schema.model_validate_json(schema)
        fields = [
            PartitionField(columns.find_field(name).field_id, 1000 + place, IdentityTransform(), name)
            for place, name in enumerate(partition_by)
        ]
        with self._reached("create"):
            catalog = self._open_catalog(create=True)
            assert catalog is not None
            try:
                catalog.create_namespace_if_not_exists(self._identifier[:-1])
            except Exception:  # a SQL catalog looks for it, and inserts it: the sink of another table may have done so in between
                if not catalog.namespace_exists(self._identifier[:-1]):
                    raise
            properties = {**_OF_NEW_TABLES, **{name: str(number) for name, number in numbers.items()}}
            with suppress(TableAlreadyExistsError):
                catalog.create_table(self._identifier, columns, partition_spec=PartitionSpec(*fields), properties=properties)
            self._set(self._loaded())
        if self._table is None:
            raise self._changed("no table")
        return self._table

    def add_columns(self, columns: Sequence[Column]) -> Table:
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.schema import Schema

        table = self.refresh()
        present = {field.name for field in table.schema().fields}
        fields = [field for field in Schema.model_validate_json(schema_of(columns)).fields if field.name not in present]
        with self._reached("add columns to"), suppress(CommitFailedException):
            if fields:
                with table.update_schema() as update:
                    for field in fields:
                        update.add_column((field.name,), field.field_type)
        return self.refresh()

    def check_may_remove(self) -> None:
        from pyiceberg.manifest import ManifestContent

        with self._reached("read"):
            manifests = manifests_of(self.opened)
        if any(manifest.content == ManifestContent.DELETES for manifest in manifests):
            raise SinkCannotTakeBack(
                f"{self._sink}: expected a table whose rows are those of its data files, found delete files: another program has "
                "deleted rows (write.delete.mode=merge-on-read), perhaps rows of this sink. Rows that earlier checkpoints have "
                "committed have to be taken back, and this sink cannot tell which are left. Nothing was changed. Apply the "
                "deletes (rewrite_data_files with delete-file-threshold=1), or restore the newest checkpoint"
            )

    def close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = None

    def _write(self, change: LakeChange) -> int:
        from dagster_checkpoints.sinks.iceberg.snapshots import commit_snapshot

        table, snapshot_id = commit_snapshot(
            self.opened,
            [iceberg_file(file, self.opened, self._location) for file in change.add],
            [self._active[file.path] for file in change.remove],
            {name: str(number) for name, number in change.numbers.items()},
            {f"{_SUMMARY}.{name}": text for name, text in change.note.items() if name not in change.numbers},
        )
        self._set(table)
        return snapshot_id

    def _is_conflict(self, error: BaseException | None) -> bool:
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

        return isinstance(error, CommitFailedException | CommitStateUnknownException)

    @property
    def _location(self) -> str:
        return self.opened.location().rstrip("/")

    def _open_catalog(self, *, create: bool) -> Catalog | None:
        if self._catalog is None:
            self._catalog = self._settings.open(create=create)
        return self._catalog

    def _loaded(self) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        catalog = self._open_catalog(create=False)
        try:
            return None if catalog is None else catalog.load_table(self._identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def _set(self, table: Table | None) -> None:
        before, self._table = self._table, table
        if table is None:
            self.files = NoTableFiles()
        elif before is None or (before.location(), before.io.properties) != (table.location(), table.io.properties):
            self.files = self._files_of(table)  # a REST catalog hands out credentials that expire

    def _files_of(self, table: Table) -> TableFiles:
        scheme, host, path = self._io.parse_location(table.location(), self._io.properties)
        return LocalTableFiles(Path(path)) if scheme == "file" else IcebergTableFiles(self._io.fs_by_scheme(scheme, host), path)

    @property
    def _io(self) -> PyArrowFileIO:
        from pyiceberg.io.pyarrow import PyArrowFileIO

        io = self.opened.io
        if not isinstance(io, PyArrowFileIO):
            raise InvalidSinkPath(
                f"{self._sink}: expected a catalog whose files are reached through pyarrow, found {type(io).__name__}. Leave out "
                "the property py-io-impl"
            )
        return io

    def _library_errors(self) -> tuple[type[Exception], ...]:
        try:
            from pyiceberg import exceptions
            from sqlalchemy.exc import SQLAlchemyError
        except ModuleNotFoundError as error:
            raise library_missing(self._sink) from error
        own = [each for each in vars(exceptions).values() if isinstance(each, type) and issubclass(each, Exception)]
        return (*own, SQLAlchemyError, OSError, ValueError)

    def _found(self, error: Exception) -> str:
        return self._settings.without_credentials(super()._found(error))


def _unkept(table: Table) -> list[str]:
    """What the table asks of its writers and this sink does not do, a text for each."""
    from pyiceberg.transforms import IdentityTransform

    found = [] if table.format_version == _VERSION else [f"format version {table.format_version}, not {_VERSION}"]
    found += [
        f"partition field {field.name!r} with the transform {field.transform}, not identity"
        for field in table.spec().fields
        if not isinstance(field.transform, IdentityTransform)
    ]
    found += nested_required(table.schema().model_dump_json())
    mapping = table.name_mapping()
    if mapping is not None:
        # Files without field ids are read by the names of their columns.
        mapped = {name: field.field_id for field in mapping.root for name in field.names}
        found += [
            f"the property schema.name-mapping.default without column {field.name!r}"
            for field in table.schema().fields
            if mapped.get(field.name) != field.field_id
        ]
    return found
