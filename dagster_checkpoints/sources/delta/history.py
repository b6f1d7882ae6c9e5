"""The versions of a Delta table, read from its log.

The state of a version comes from the ``deltalake`` library, the changes of later versions from the commits' files. Must not know
Spark.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.sources.delta.commits import (
    AddedFile,
    DeltaCommit,
    other_columns,
    parse_commit,
    required_features,
    unreadable,
    unreadable_columns,
    unreadable_partitions,
)
from dagster_checkpoints.sources.errors import (
    InvalidSource,
    SourceColumnsChanged,
    SourceColumnsUnreadable,
    SourceError,
    SourceRowsChanged,
    SourceRowsLost,
    SourceUnavailable,
)
from dagster_checkpoints.sources.lake.positions import ChangedRows, LakeFile, check_table
from dagster_checkpoints.systems.table_files import DeltaTableFiles, LocalTableFiles, TableFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable

_COMMITS_KEPT = 100
_POLL_SECONDS = 1.0
"""How often an object store is asked for a new version; a directory is asked whenever Spark asks."""
_IDENTITY_SECONDS = 10.0
"""How often it is asked, while there is no new version, whether the table was dropped or created again."""
_COLOURS = re.compile(r"\x1b\[\d+m")


class DeltaHistory:
    """A Delta table, as one query reads it.

    Args:
        url: the table's location: an absolute path, or an ``s3://`` URL.
        storage_options: options of the ``deltalake`` library for that store; never shown.
        changed_rows: what happens to commits that delete or change rows.
        only: the only version that is read, with its columns; None: the newest one with its columns, and those that follow.
    """

    def __init__(self, url: str, storage_options: Mapping[str, str], changed_rows: ChangedRows, only: int | None = None) -> None:
        self.shown = f"read_delta_table({url!r})"
        self.id = ""
        self.schema: dict[str, Any] = {}
        self.partition_by: tuple[str, ...] = ()
        self._url = url
        self._options = dict(storage_options)
        self._changed_rows = changed_rows
        self._only = only
        self._table: DeltaTable | None = None
        self._columns = ""  # the columns of the plan, as Delta's JSON
        self._planned = -1  # the version of which the plan has the columns
        self._schema: tuple[int, str | None] = (-1, None)  # the version that was looked at last, and its columns
        self._snapshot: tuple[int, list[LakeFile]] | None = None
        self._commits: dict[int, list[LakeFile]] = {}
        self._absent: tuple[int, float] | None = None  # a version that was not there, and until when it is not looked for
        self._read = -1, b""  # the version whose files were read last, and a hash of its commit; empty if that is not there
        self._same_until = 0.0  # until when the table is not asked whether it is still the same
        directory = local_path(url)
        self._local = directory is not None
        self._files: TableFiles = LocalTableFiles(directory) if directory else DeltaTableFiles(url, self._options)
        self._base = f"file:{directory}" if directory else url.replace("s3://", "s3a://", 1)

    def open(self) -> None:
        """Read the newest state of the table.

        Raises:
            InvalidSource: there is no table, or one that cannot be read file by file.
            SourceUnavailable: the store does not answer.
        """
        self._table = table = self._at(None)
        if self._only is not None:
            if not 0 <= self._only <= table.version():
                raise InvalidSource(f"{self.shown}: expected a version from 0 to {table.version()}, found {self._only}")
            table = self._at(self._only)
        metadata, protocol = table.metadata(), table.protocol()
        if not self.schema:  # the plan is made with these columns; a query may open the table again
            self.schema = json.loads(table.schema().to_json())
            self.partition_by = tuple(metadata.partition_columns)
            self._columns, self._planned = json.dumps(self.schema), int(table.version())
        self._check_features(required_features(protocol.min_reader_version, protocol.reader_features), metadata.configuration)
        wrong = unreadable_partitions(self.schema["fields"], self.partition_by)
        if wrong:
            raise InvalidSource(
                f"{self.shown}: expected partition columns of type string, integer, boolean, date or decimal, found "
                f"{', '.join(wrong)}: the log has their values as text, whose meaning depends on the program that wrote it. Read "
                "a copy that is not partitioned by them"
            )
        self.id = str(metadata.id)

    # Versions

    def newest(self) -> int:
        assert self._table is not None
        with self._reached():
            self._table.update_incremental()
        return int(self._table.version())

    def after(self, version: int) -> int | None:
        assert self._table is not None
        if self._absent is not None and self._absent[0] == version + 1 and time.monotonic() < self._absent[1]:
            return None
        with self._reached():
            follows = self._files.exists(_commit_file(version + 1))
        if follows or time.monotonic() >= self._same_until:
            self._check_same(version)
        if follows:
            return version + 1
        self._absent = version + 1, time.monotonic() + (0.0 if self._local else _POLL_SECONDS)
        if self._table.version() > version:
            raise self._gone(f"the commit of version {version + 1}, of {self._table.version()}, was deleted from its log")
        return None

    def _check_same(self, version: int) -> None:
        """Check that the table was not dropped or created again since a version was read: the version's commit is the same."""
        known = self._read
        with self._reached():
            self._note_read(version, self._files.read(_commit_file(version)))
        if known[0] == version and known != self._read:  # or its log was cleaned up
            check_table(self.shown, self.id, str(self._at(None).metadata().id))
        self._same_until = time.monotonic() + _IDENTITY_SECONDS

    def _note_read(self, version: int, commit: bytes | None) -> None:
        self._read = version, b"" if commit is None else sha256(commit).digest()

    def files(self, version: int) -> Sequence[LakeFile]:
        if self._snapshot is None or self._snapshot[0] != version:
            table = self._at(version)
            with self._reached():
                marked = bool(table.deletion_vectors().read_all().num_rows)
                actions = table.get_add_actions()
                columns = {name: actions.column(name).to_pylist() for name in actions.schema.names}
                self._note_read(version, self._files.read(_commit_file(version)))
            if marked:
                raise self._marked(version)
            self._check_schema(table.schema().to_json(), version)
            partitions: Any = columns.get("partition") or [{}] * len(columns["path"])
            found = sorted(zip(columns["modification_time"], columns["path"], partitions, strict=True), key=lambda each: each[:2])
            self._snapshot = version, self._lake_files(version, (AddedFile(path, _texts(values)) for _, path, values in found))
        return self._snapshot[1]

    def added(self, version: int) -> Sequence[LakeFile]:
        if version not in self._commits:
            with self._reached():
                text = self._files.read(_commit_file(version))
            if text is None:
                raise self._gone(f"the commit of version {version} was deleted from its log")
            self._note_read(version, text)
            files = self._new_rows(version, parse_commit(text.decode("utf-8")))
            if len(self._commits) >= _COMMITS_KEPT:
                self._commits.pop(min(self._commits))
            self._commits[version] = files
        return self._commits[version]

    def _new_rows(self, version: int, commit: DeltaCommit) -> list[LakeFile]:
        self._check_features(commit.features or (), commit.configuration or {})
        schema = self._schema_of(version, commit)
        if schema is not None:
            self._check_schema(schema, version)
        if commit.removes_rows:
            if self._changed_rows == "skip":
                return []
            raise SourceRowsChanged(
                f"{self.shown}: expected commits that only add rows, found that version {version} deletes or changes rows. Rows "
                "that were read before stay in the pipeline's tables. Make a new start; or set changed_rows='skip', which reads "
                "no row of such a commit, also none that it adds"
            )
        if any(file.deleted_rows for file in commit.added):
            raise self._marked(version)
        return self._lake_files(version, commit.added)

    def _schema_of(self, version: int, commit: DeltaCommit) -> str | None:
        """The columns with which a commit's rows were written; None if they are not known any more, or as in the plan."""
        schema = commit.schema
        if schema is None and version <= self._planned:
            known, schema = self._schema
            if known != version - 1:
                schema = None
                with suppress(SourceError):  # earlier commits were cleaned up; Spark refuses types that it cannot read
                    schema = self._at(version).schema().to_json()
        self._schema = version, schema
        return schema

    def check_columns(self) -> None:
        assert self._table is not None
        self._check_schema(self._table.schema().to_json(), self._table.version())

    def _check_schema(self, schema: str, version: int) -> None:
        """Check that the rows of a version are read right with the plan's columns."""
        if version > self._planned:
            others = other_columns(self._columns, schema)
            if others:
                raise self._changed(version, ", ".join(others))
            return
        unreadable = unreadable_columns(schema, self._columns)
        if unreadable:
            raise self._unreadable(version, ", ".join(unreadable))

    def _changed(self, version: int, found: str) -> SourceColumnsChanged:
        return SourceColumnsChanged(
            f"{self.shown}: expected the columns that the table had when the run began, found that version {version} has added "
            f"or changed {found}. The next attempt reads the table with its new columns"
        )

    def _unreadable(self, version: int, found: str) -> SourceColumnsUnreadable:
        return SourceColumnsUnreadable(
            f"{self.shown}: expected rows that can be read with the columns of version {self._planned}, which the table has now, "
            f"found that the rows of version {version}, which are read next, have others: {found}. Make a new start, which reads "
            f"the newest version whole; rows that are only in version {version} can be read with version={version} in another "
            "stage"
        )

    def resolved(self, files: Sequence[LakeFile]) -> Sequence[LakeFile]:
        return files

    # Files

    def _lake_files(self, version: int, files: Iterable[AddedFile]) -> list[LakeFile]:
        return [self._lake_file(version, file) for file in files]

    def _lake_file(self, version: int, file: AddedFile) -> LakeFile:
        others = sorted(set(file.partition) ^ set(self.partition_by))
        if others:
            text = f"the partitioning by {', '.join(others)}"
            raise self._changed(version, text) if version > self._planned else self._unreadable(version, text)
        path = unquote(file.path)
        if "://" in path or path.startswith("/"):
            raise InvalidSource(
                f"{self.shown}: expected data files below its directory, found {path}: read the table that this one is a copy of"
            )
        values = tuple(file.partition.get(name) or None for name in self.partition_by)  # an empty text is no value
        return LakeFile(f"{self._base}/{path}", values)

    # The library, and errors

    def _at(self, version: int | None) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        with self._reached():
            try:
                return DeltaTable(self._url, version=version, storage_options=self._options)
            except DeltaError as error:
                if version is not None:
                    raise self._gone(f"version {version} cannot be read any more ({_text(error)})") from error
                if isinstance(error, TableNotFoundError):
                    raise InvalidSource(f"{self.shown}: expected a Delta table, found none") from None
                if "Unsupported" in str(error):
                    raise InvalidSource(
                        f"{self.shown}: expected a table that the library deltalake reads, found: {_text(error)}. Read a copy of "
                        "the table without that"
                    ) from None
                raise

    def _check_features(self, features: Iterable[str], configuration: Mapping[str, str | None]) -> None:
        found = unreadable(features, configuration)
        if found:
            raise InvalidSource(
                f"{self.shown}: expected a table whose data files are plain Parquet files, found {', '.join(found)}. Read a copy "
                "of the table without that"
            )

    def _marked(self, version: int) -> InvalidSource:
        return InvalidSource(
            f"{self.shown}: expected data files whose rows all count, found deletion vectors in version {version}. Rewrite these "
            "files: REORG TABLE … APPLY (PURGE)"
        )

    def _gone(self, found: str) -> SourceRowsLost:
        return SourceRowsLost(
            f"{self.shown}: expected the versions of the table after the checkpoint, found that {found}. Keep the log for longer "
            "than a run may pause (delta.logRetentionDuration); make a new start, which reads the whole table"
        )

    @contextmanager
    def _reached(self) -> Iterator[None]:
        from deltalake.exceptions import DeltaError

        try:
            yield
        except SourceError:
            raise
        except (DeltaError, OSError, ValueError) as error:
            raise SourceUnavailable(
                f"{self.shown}: expected to read the log of the Delta table, found: {_text(error)}. Check the location, the "
                "credentials (storage_options, or the environment) and their rights; another attempt may succeed"
            ) from error


def _text(error: Exception) -> str:
    return " ".join(_COLOURS.sub("", str(error)).split())  # the library writes trees in colour


def _commit_file(version: int) -> str:
    return f"_delta_log/{version:020}.json"


def _texts(values: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Partition values as the log's text."""
    return {
        name: None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (values or {}).items()
    }
