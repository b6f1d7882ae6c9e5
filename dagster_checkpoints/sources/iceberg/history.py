"""The snapshots of an Iceberg table's main branch, read from its metadata. Must not know Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from dagster_checkpoints.sources.errors import (
    InvalidSource,
    SourceColumnsChanged,
    SourceError,
    SourceRowsChanged,
    SourceRowsLost,
    SourceUnavailable,
)
from dagster_checkpoints.sources.iceberg.projection import (
    AmbiguousColumns,
    FileField,
    RowLayout,
    changed_columns,
    columns_of_files,
    has_ids,
    read_columns,
    with_defaults,
    with_ids,
)
from dagster_checkpoints.sources.iceberg.schemas import spark_schema
from dagster_checkpoints.sources.lake.positions import ChangedRows, LakeFile
from dagster_checkpoints.systems.iceberg_catalogs import CatalogSettings

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile, ManifestEntry, ManifestFile
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

NOTHING = 0
"""The version of a table without a snapshot. Ids of snapshots are positive."""
_NEWEST_FORMAT = 2
_POLL_SECONDS = 1.0
_SNAPSHOTS_KEPT = 100
_FILES_KEPT = 10_000
_NAME_MAPPING = "schema.name-mapping.default"


class IcebergHistory:
    """An Iceberg table, as one query reads it. Its versions are the ids of snapshots.

    Args:
        identifier: the parts of the table's name.
        settings: the catalog.
        changed_rows: what happens to snapshots that delete or change rows.
    """

    def __init__(self, identifier: tuple[str, ...], settings: CatalogSettings, changed_rows: ChangedRows) -> None:
        self.shown = f"read_iceberg_table({'.'.join(identifier)!r})"
        self.id = ""
        self.schema: dict[str, Any] = {}
        self.layout = RowLayout((), {})
        self._identifier = identifier
        self._settings = settings
        self._changed_rows = changed_rows
        self._loaded: Table | None = None
        self._loaded_at = 0.0
        self._files: tuple[int, list[LakeFile]] | None = None
        self._added: dict[int, list[LakeFile]] = {}
        self._known: frozenset[int] = frozenset()  # the ids of the schemas that were there when the plan was made
        self._checked: set[int] = set()  # the snapshot whose files have the right format
        self._read: dict[str, str] = {}  # the columns to read from a file, by its path

    def open(self) -> None:
        """Read the newest state of the table.

        Raises:
            InvalidSource: there is no table, or one that cannot be read file by file.
            SourceUnavailable: the catalog or the store does not answer.
        """
        table = self._load()
        if table.metadata.format_version > _NEWEST_FORMAT:
            raise InvalidSource(
                f"{self.shown}: expected a table of Iceberg's format 1 or 2, found {table.metadata.format_version}. Read a copy"
            )
        if not self.schema:  # the plan is made with these columns; a query may open the table again
            self.schema = self._spark_schema(table.metadata.current_schema_id)
            self.layout = self._layout(table)
            self._known = frozenset(table.schemas())
        self._check_formats(table)
        self.id = str(table.metadata.table_uuid)

    def _layout(self, table: Table) -> RowLayout:
        schema = json.loads(table.schema().model_dump_json())
        defaults = with_defaults(schema["fields"])
        if defaults:
            raise InvalidSource(
                f"{self.shown}: expected columns that are null in files without them, found a default for {', '.join(defaults)}. "
                "Read a copy of the table"
            )
        return RowLayout.of(schema, (json.loads(spec.model_dump_json()) for spec in table.specs().values()))

    def _check_formats(self, table: Table) -> None:
        """Refuse a table of which the newest snapshot has data files that are not Parquet files."""
        snapshot = table.current_snapshot()
        if snapshot is not None and snapshot.snapshot_id not in self._checked:
            for entry in self._data_entries(snapshot):
                self._check_format(entry.data_file)
            self._checked = {snapshot.snapshot_id}

    # Versions

    def newest(self) -> int:
        snapshot = self._load().current_snapshot()
        return NOTHING if snapshot is None else snapshot.snapshot_id

    def after(self, version: int) -> int | None:
        found = self._following(version)
        if found is None and time.monotonic() - self._loaded_at > _POLL_SECONDS:
            self._load()
            found = self._following(version)
        return found

    def _following(self, version: int) -> int | None:
        """The child of a snapshot on the way to the newest one."""
        snapshot = self._table.current_snapshot()
        if snapshot is None or snapshot.snapshot_id == version:
            return None if snapshot is not None or version == NOTHING else self._raise_gone(version)
        while (parent := snapshot.parent_snapshot_id) is not None:
            if parent == version:
                return snapshot.snapshot_id
            snapshot = self._table.snapshot_by_id(parent)
            if snapshot is None:
                return self._raise_gone(version)
        # The library forgets the parents of snapshots when these expire.
        is_first = version == NOTHING and all(entry.snapshot_id == snapshot.snapshot_id for entry in self._entries(snapshot))
        return snapshot.snapshot_id if is_first else self._raise_gone(version)

    def _raise_gone(self, version: int) -> NoReturn:
        raise SourceRowsLost(
            f"{self.shown}: expected the snapshots of the main branch after {version}, up to which it was read, found that they "
            "expired, or that the table was rolled back. Keep snapshots for longer than a run may pause; make a new start, which "
            "reads the whole table"
        )

    def files(self, version: int) -> Sequence[LakeFile]:
        if self._files is None or self._files[0] != version:
            self._files = version, [] if version == NOTHING else self._all_files(self._snapshot(version))
        return self._files[1]

    def added(self, version: int) -> Sequence[LakeFile]:
        if version not in self._added:
            files = self._new_rows(self._snapshot(version))
            if len(self._added) >= _SNAPSHOTS_KEPT:
                self._added.pop(next(iter(self._added)))
            self._added[version] = files
        return self._added[version]

    # Files

    def _all_files(self, snapshot: Snapshot) -> list[LakeFile]:
        entries = self._entries(snapshot)
        entries.sort(key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))
        return [self._lake_file(entry.data_file) for entry in entries]

    def _entries(self, snapshot: Snapshot) -> list[ManifestEntry]:
        """The data files of a snapshot, as its manifests have them."""
        from pyiceberg.manifest import ManifestContent

        with self._reached():
            deletes = [each for each in snapshot.manifests(self._table.io) if each.content != ManifestContent.DATA]
            marked = any(each.has_added_files() or each.has_existing_files() for each in deletes)
        if marked:
            raise InvalidSource(
                f"{self.shown}: expected data files whose rows all count, found delete files in snapshot {snapshot.snapshot_id}. "
                "Rewrite the data files"
            )
        return self._data_entries(snapshot)

    def _data_entries(self, snapshot: Snapshot) -> list[ManifestEntry]:
        from pyiceberg.manifest import ManifestContent

        with self._reached():
            data = [each for each in snapshot.manifests(self._table.io) if each.content == ManifestContent.DATA]
            return [entry for each in data for entry in each.fetch_manifest_entry(self._table.io, discard_deleted=True)]

    def _new_rows(self, snapshot: Snapshot) -> list[LakeFile]:
        from pyiceberg.manifest import ManifestEntryStatus
        from pyiceberg.table.snapshots import Operation

        operation = snapshot.summary.operation if snapshot.summary is not None else Operation.OVERWRITE
        if operation == Operation.REPLACE:  # files were only rewritten
            return []
        if operation != Operation.APPEND:
            if self._changed_rows == "skip":
                return []
            raise SourceRowsChanged(
                f"{self.shown}: expected snapshots that only add rows, found that snapshot {snapshot.snapshot_id} "
                f"({operation.value}) deletes or changes rows. Rows that were read before stay in the pipeline's tables. Make a "
                "new start; or set changed_rows='skip', which reads no row of such a snapshot, also none that it adds"
            )
        if snapshot.schema_id is not None:
            self._check_schema(snapshot.schema_id)
        with self._reached():
            entries = [
                entry
                for manifest in self._manifests_of(snapshot)
                for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True)
                if entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id == snapshot.snapshot_id
            ]
        return [self._lake_file(file) for file in sorted((entry.data_file for entry in entries), key=lambda file: file.file_path)]

    def _manifests_of(self, snapshot: Snapshot) -> Iterator[ManifestFile]:
        return (each for each in snapshot.manifests(self._table.io) if each.added_snapshot_id == snapshot.snapshot_id)

    def check_columns(self) -> None:
        self._check_schema(self._table.metadata.current_schema_id)

    def _check_schema(self, schema_id: int) -> None:
        """Refuse columns that the plan does not have; it reads those of all schemas that were there when it was made."""
        if schema_id in self._known:
            return
        names = changed_columns(self.layout.columns, json.loads(self._table.schemas()[schema_id].model_dump_json())["fields"])
        if names:
            raise self._changed(f"rows with other columns: {', '.join(names)}")

    def _changed(self, found: str) -> SourceColumnsChanged:
        return SourceColumnsChanged(
            f"{self.shown}: expected the columns that the table had when the run began, found {found}. The next attempt reads "
            "the table with its new columns"
        )

    def _lake_file(self, file: DataFile) -> LakeFile:
        self._check_format(file)
        if file.spec_id not in self.layout.specs:
            raise self._changed(f"rows that are partitioned in another way (partition spec {file.spec_id})")
        try:
            values = self.layout.values(file.spec_id, [file.partition[at] for at in range(len(file.partition))])
        except OverflowError as error:
            raise InvalidSource(
                f"{self.shown}: expected partition values between the years 1 and 9999, found another one ({error}) of the data "
                f"file {file.file_path}"
            ) from None
        return LakeFile(self._hadoop_path(file.file_path), values)

    def _hadoop_path(self, path: str) -> str:
        scheme = urlsplit(path).scheme
        if scheme in ("", "file"):
            return f"file:{path.removeprefix('file://').removeprefix('file:')}"
        if scheme in ("s3", "s3a"):
            return f"s3a://{path.partition('://')[2]}"
        raise InvalidSource(f"{self.shown}: expected data files in a directory or on S3, found {path}")

    def _check_format(self, file: DataFile) -> None:
        from pyiceberg.manifest import FileFormat

        if file.file_format != FileFormat.PARQUET:
            raise InvalidSource(
                f"{self.shown}: expected data files in the format Parquet, found {file.file_path} in the format "
                f"{file.file_format.name}. Rewrite the data files, or read a copy of the table"
            )

    # Columns of files

    def resolved(self, files: Sequence[LakeFile]) -> Sequence[LakeFile]:
        new = [file for file in files if file.path not in self._read]
        if new:
            try:
                with self._reached():
                    found = columns_of_files(self._table.io, [file.path for file in new])
            except FileNotFoundError as error:
                raise SourceRowsLost(
                    f"{self.shown}: expected the {len(files)} data files of the next rows, found that some were deleted: {error}"
                    ". Keep files of older snapshots for longer than a run may pause; restore them, or make a new start"
                ) from None
            asked = {file.path for file in files}
            keeps = len(self._read) + len(new) <= _FILES_KEPT
            kept = {path: columns for path, columns in self._read.items() if keeps or path in asked}
            self._read = {**kept, **{file.path: self._columns(file, fields) for file, fields in zip(new, found, strict=True)}}
        return [replace(file, columns=self._read[file.path]) for file in files]

    def _columns(self, file: LakeFile, fields: tuple[FileField, ...]) -> str:
        if not has_ids(fields):
            mapping = self._table.properties.get(_NAME_MAPPING)
            if mapping is None:
                raise InvalidSource(
                    f"{self.shown}: expected data files with field ids, or the table's property {_NAME_MAPPING}, which maps "
                    f"names to ids, found that {file.path} has no field ids. Set the property"
                )
            fields = with_ids(fields, json.loads(mapping))
        missing = self.layout.without_value(fields)
        if missing:
            raise InvalidSource(
                f"{self.shown}: expected data files that hold the partition columns of type double and binary, found that "
                f"{file.path} does not hold {', '.join(missing)}. Read a copy of the table"
            )
        try:
            return read_columns(self.layout.in_files, fields)
        except AmbiguousColumns as error:
            raise InvalidSource(
                f"{self.shown}: expected one column of a data file for each column of the table, found two for one in "
                f"{file.path}: {error}. Read a copy of the table"
            ) from None

    # The library, and errors

    @property
    def _table(self) -> Table:
        assert self._loaded is not None
        return self._loaded

    def _load(self) -> Table:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with self._reached():
            try:
                catalog = self._settings.open(create=False)
                if catalog is None:
                    raise InvalidSource(f"{self.shown}: expected a warehouse with a catalog, found none")
                self._loaded = catalog.load_table(self._identifier)
            except (NoSuchTableError, NoSuchNamespaceError):
                raise InvalidSource(f"{self.shown}: expected an Iceberg table, found none of this name in the catalog") from None
        self._loaded_at = time.monotonic()
        return self._loaded

    def _snapshot(self, version: int) -> Snapshot:
        found = self._table.snapshot_by_id(version)
        if found is None:
            raise SourceRowsLost(
                f"{self.shown}: expected snapshot {version}, found that it expired. Keep snapshots for longer than a run may "
                "pause; make a new start, which reads the whole table"
            )
        return found

    def _spark_schema(self, schema_id: int) -> dict[str, Any]:
        try:
            return spark_schema(json.loads(self._table.schemas()[schema_id].model_dump_json()))
        except TypeError as error:
            raise InvalidSource(f"{self.shown}: expected columns whose type Spark has, found {error}. Read a copy") from None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (SourceError, FileNotFoundError):
            raise
        except Exception as error:  # the library raises errors of its own, of catalogs' clients and of file systems
            found = self._settings.without_credentials(f"{type(error).__name__}: {error}")
            raise SourceUnavailable(
                f"{self.shown}: expected to read the metadata of the Iceberg table, found: {found}. Check the catalog, the "
                "credentials and their rights; another attempt may succeed"
            ) from None
