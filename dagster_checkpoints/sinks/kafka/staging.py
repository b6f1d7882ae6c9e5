"""The messages of transactions that are not committed yet, in files of a directory that survives the process.

::

    <staging>/<pipeline>/<stage>-<index>/e7.h1-<attempt>-000003/batch-000000012.arrow   the messages of a batch

A crash of the run leaves them; the next run sends or deletes them.

Must not know Kafka, nor which transaction is current.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from dagster_checkpoints.files.durable import make_directory, place, sizes, sync
from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.systems.errors import SinkTransactionLost, few

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
