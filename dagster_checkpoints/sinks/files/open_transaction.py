"""The transaction of an instance that batches are being written to: they become staged files.

Spark's Parquet files are linked as they are (`LinkedTransaction`), or their rows are written again, in another format, by
partition, or in files of another size (`EncodedTransaction`). Must not know checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.files.durable import link_or_copy
from dagster_checkpoints.sinks.exact_values import ColumnLimits, check_orc_times, check_values
from dagster_checkpoints.sinks.files.names import STAGED, StagedPart, staged_name
from dagster_checkpoints.sinks.files.part_files import FileLayout, PartFiles
from dagster_checkpoints.sinks.files.target_files import TargetFiles
from dagster_checkpoints.sinks.parquet_files import arrow_schema
from dagster_checkpoints.sinks.unwritable import place_error
from dagster_checkpoints.systems.errors import SinkRowsRefused, SinkUnavailable

_ROWS_AT_A_TIME = 131_072


class OpenTransaction(ABC):
    """The current transaction.

    Args:
        files: the location.
        folder: the folder of the staged files.
        ending: with what their names end.
    """

    def __init__(self, files: TargetFiles, folder: str, ending: str = STAGED) -> None:
        self._files = files
        self._folder = folder
        self._ending = ending
        self.placed = 0
        """Number of files that were staged, deleted ones included."""

    @abstractmethod
    def write(self, sources: Sequence[tuple[Path, int]], batch_id: int) -> None:
        """Add a batch; it replaces what was written under this id before.

        Args:
            sources: the batch's Parquet files, none of which is without rows, with their numbers of rows.
            batch_id: id of the micro-batch.
        """

    @abstractmethod
    def close(self) -> list[StagedPart]:
        """Write everything, durably, and return the staged files."""

    @abstractmethod
    def discard(self) -> None:
        """Delete everything."""

    def _place(self, parts: Sequence[tuple[Path, str, int]]) -> list[StagedPart]:
        """Create staged files from files of this machine, with the folders of their partitions and their numbers of rows."""
        first, self.placed = self.placed, self.placed + len(parts)
        placed = [
            StagedPart(first + position, folder, rows, file.stat().st_size) for position, (file, folder, rows) in enumerate(parts)
        ]
        self._files.place_all({self._name(part): file for part, (file, _, _) in zip(placed, parts, strict=True)})
        return placed

    def _delete(self, parts: Sequence[StagedPart]) -> None:
        self._files.delete(self._name(part) for part in parts)

    def _name(self, part: StagedPart) -> str:
        return f"{self._folder}/{staged_name(part.number, self._ending)}"


class LinkedTransaction(OpenTransaction):
    """A transaction whose files are those that Spark has written."""

    def __init__(self, files: TargetFiles, folder: str, ending: str) -> None:
        super().__init__(files, folder, ending)
        self._batches: dict[int, list[StagedPart]] = {}

    def write(self, sources: Sequence[tuple[Path, int]], batch_id: int) -> None:
        self._delete(self._batches.pop(batch_id, []))
        self._batches[batch_id] = self._place([(file, "", rows) for file, rows in sources])

    def close(self) -> list[StagedPart]:
        return [part for batch in self._batches.values() for part in batch]

    def discard(self) -> None:
        self._delete(self.close())


class EncodedTransaction(OpenTransaction):
    """A transaction whose rows are written again when they arrive.

    A batch that is written a second time is rare: then all batches of the transaction are encoded again, from links to their
    files.

    Args:
        files: the location.
        folder: the folder of the staged files.
        layout: how rows are divided into files.
        sink: the sink as errors name it.
    """

    def __init__(self, files: TargetFiles, folder: str, layout: FileLayout, sink: str) -> None:
        super().__init__(files, folder)
        self._layout = layout
        self._sink = sink
        self._sources: dict[int, list[Path]] = {}
        self._writer: PartFiles | None = None
        self._parts: list[StagedPart] = []
        self._stack = ExitStack()
        self._work = self._stack.enter_context(files.work_folder(folder))
        self._linked = 0

    def write(self, sources: Sequence[tuple[Path, int]], batch_id: int) -> None:
        again = batch_id in self._sources
        with self._errors():
            self._sources[batch_id] = [self._link(file) for file, _ in sources]
            if again:
                self._delete(self._parts)
                self._parts, self._writer = [], None
            for file in (each for batch in self._sources.values() for each in batch) if again else self._sources[batch_id]:
                self._encode(file)

    def close(self) -> list[StagedPart]:
        with self._errors():
            if self._writer is not None:
                self._writer.close()
                self._place_completed(self._writer)
        self._stack.close()
        return self._parts

    def discard(self) -> None:
        self._stack.close()
        self._delete(self._parts)

    def _encode(self, file: Path) -> None:
        with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as parquet:
            schema = arrow_schema(parquet.metadata).remove_metadata()
            if self._writer is None:
                folder = self._work / f"parts-{self._linked}"
                folder.mkdir()
                self._writer = PartFiles(folder, self._layout, schema, self._sink)
            for batch in parquet.iter_batches(_ROWS_AT_A_TIME):
                if self._layout.format in ("csv", "json"):
                    check_values(batch, self._limits(schema), (), self._sink)
                elif self._layout.format == "orc":
                    check_orc_times(batch.drop_columns(list(self._layout.partition_by)), self._sink)
                self._writer.write(pa.Table.from_batches([batch]).cast(schema))
                self._place_completed(self._writer)

    def _limits(self, schema: pa.Schema) -> dict[str, ColumnLimits]:
        """Of a null in its only column CSV has an empty line, which readers skip."""
        only = [name for name in schema.names if name not in self._layout.partition_by]
        return {only[0]: ColumnLimits(required=True)} if self._layout.format == "csv" and len(only) == 1 else {}

    def _place_completed(self, writer: PartFiles) -> None:
        completed = writer.take_completed()
        if completed:
            self._parts += self._place([(part.file, part.folder, part.rows) for part in completed])
            for part in completed:
                part.file.unlink()

    def _link(self, file: Path) -> Path:
        self._linked += 1
        link = self._work / f"source-{self._linked:06d}"  # see `PartFiles`
        link_or_copy(file, link)
        return link

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OverflowError, ValueError, KeyError) as error:
            raise SinkRowsRefused(
                f"{self._sink}: expected values that {self._layout.format.upper()} files can hold, found one that they cannot: "
                f"{error}. Change the value in the stage, or cast the column to STRING"
            ) from error
        except OSError as error:
            raise place_error(error, self._sink, self._work) or SinkUnavailable(
                f"{self._sink}: cannot write files in {self._work}: {error}. Expected a directory that is writable and not full. "
                "Another attempt may succeed"
            ) from error
