"""A query's checkpoint directory at one committed batch on a file system of this machine: linked in milliseconds, and restored.

Spark's maintenance and the query itself run at the same time. So the files are hard-linked first (under the task's lock), in
a safe order: versions (`.zip`, `.changelog`) before the SST files that they name. Spark retains those of many batches, of which
only what the batch needs is linked. After that it is checked that all of this exists.

Where versions of a state store are missing in which nothing has changed, they are written as Spark writes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.files.durable import link_or_new_file
from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, url
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.snapshots.query_files import (
    IMMUTABLE,
    check_read_files,
    check_state_partitions,
    is_left_out,
    is_source_log,
    is_version,
    log_files,
    names_in_zip,
    needed_entries,
    needed_files,
    needed_versions,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_END_OF_DELTA = -1
"""The length of a key that ends a `.delta` file."""


def write_empty_versions(spark: SparkSession, files: Sequence[Path], codec: str) -> None:
    """Write files without a change, of RocksDB (`.changelog`) or of Spark's other provider (`.delta`).

    Args:
        spark: The session.
        files: The files of one query, on this machine; their directories may not exist yet.
        codec: The name of the compression of the query's state files.

    Source: Spark's `StateStoreChangelogWriterV1`; each changelog is read in the form in which it was written. And
    `HDFSBackedStateStoreProvider.finalizeDeltaFile`.
    """
    first, *others = files
    jvm = jvm_of(spark)
    first.parent.mkdir(parents=True, exist_ok=True)
    compression = jvm.org.apache.spark.io.CompressionCodec.createCodec(spark.sparkContext._jsc.sc().conf(), codec)
    if first.suffix == ".delta":
        compressed = compression.compressedOutputStream(jvm.java.io.FileOutputStream(str(first)))
        delta = jvm.java.io.DataOutputStream(compressed)
        delta.writeInt(_END_OF_DELTA)
        delta.close()
    else:
        _write_changelog(spark, first, compression)
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first, file)


def _write_changelog(spark: SparkSession, file: Path, compression: Any) -> None:
    jvm = jvm_of(spark)
    streaming = jvm.org.apache.spark.sql.execution.streaming
    path = jvm.org.apache.hadoop.fs.Path(url(file))
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    manager = streaming.checkpointing.CheckpointFileManager.create(path.getParent(), hadoop)
    streaming.state.StateStoreChangelogWriterV1(manager, path, compression).commit()


_SCHEMA_PATH = re.compile(r"^.*/state/\d+/(_stateSchema/.*)$")


def pin(checkpoint: Path, batch_id: int, target: Path, *, committed: bool = True) -> None:
    """Hard-link the files of the checkpoint directory that a restore at `batch_id` needs to `target`; copy them where links
    are impossible.

    Args:
        checkpoint: The query's checkpoint location.
        batch_id: A committed batch, and the newest one: `commits/<batch_id>` exists.
        target: A directory that does not exist yet.
        committed: False for a batch that has run, and that the query has not committed.

    Raises:
        SnapshotError: A version of a state store is missing; the text names it.
    """
    for name in log_files(batch_id, committed=committed):
        _link(checkpoint / name, target / name)
    for top in ("sources", "state"):
        for folder, folders, files in os.walk(checkpoint / top):
            folders[:] = [name for name in folders if name not in IMMUTABLE]
            relative = os.path.relpath(folder, checkpoint)
            if top == "state" and any(map(is_version, files)):
                _pin_versions(Path(folder), batch_id, target / relative)
                files = [name for name in files if not is_version(name)]
            elif is_source_log(relative):
                files = needed_entries(files)
            for name in files:
                if not is_left_out(name):
                    _link(Path(folder, name), target / relative / name, may_vanish=True)


def _pin_versions(store: Path, batch_id: int, target: Path, looks: int = 3) -> None:
    try:
        needed = needed_versions(os.listdir(store), batch_id, str(store))
        if deleted := [name for name in needed if not _link(store / name, target / name, may_vanish=True)]:
            raise SnapshotError(
                f"State store {store}: expected {deleted[:5]} to exist until they are linked, found that they were deleted. The "
                "checkpoint is declined; the next one tries again."
            )
    except SnapshotError:
        if looks == 1:
            raise
        # Spark's maintenance may have written a newer whole version, and deleted those that it replaces.
        return _pin_versions(store, batch_id, target, looks - 1)
    named = {name for archive in needed if archive.endswith(".zip") for name in names_in_zip(target / archive)}
    for folder in IMMUTABLE:
        if named and (store / folder).is_dir():
            for name in named.intersection(os.listdir(store / folder)):
                _link(store / folder / name, target / folder / name, may_vanish=True)
    return None


def prune(pinned: Path, batch_id: int, operators: int = 0) -> list[Path]:
    """The files of a pinned directory that a restore at `batch_id` needs, relative to `pinned`, sorted.

    Args:
        pinned: The directory.
        batch_id: The pinned batch.
        operators: The number of stateful operators that the query is known to have.

    Raises:
        SnapshotError: A file that is needed is missing; the text names it.
    """
    paths = [file.relative_to(pinned).as_posix() for file in _files(pinned)]
    offsets = (pinned / f"offsets/{batch_id}").read_text(encoding="utf-8")
    check_read_files(paths, offsets, str(pinned))
    check_state_partitions(paths, offsets, lambda path: (pinned / path).read_bytes(), str(pinned), operators)
    needed = needed_files(paths, batch_id, lambda archive: names_in_zip(pinned / archive), str(pinned))
    return [Path(path) for path in needed]


def state_operators(checkpoint: WorkPath) -> int:
    """The number of stateful operators whose state is in a query's checkpoint directory."""
    return sum(entry.name.isdigit() for entry in entries_of(checkpoint / "state"))


def relocate(checkpoint: Path, target: WorkPath, partitions: int | None = None) -> None:
    """Correct the descriptions of stateful operators in a restored checkpoint directory, which was written at another place.

    They name the operator's number, which is another one in a part of a query that was divided, and the absolute paths of the
    state schemas that `transformWithState` writes, and the number of state partitions.

    Args:
        checkpoint: The directory on this machine.
        target: The directory's place in the work directory.
        partitions: The number of its state partitions, if it has changed; None for the recorded one.

    Source: Spark's `OperatorStateMetadataV1` and `OperatorStateMetadataV2`.
    """
    for file in [*checkpoint.glob("state/*/_metadata/metadata"), *checkpoint.glob("state/*/_metadata/v2/*")]:
        version, _, text = file.read_text().partition("\n")
        metadata = json.loads(text)
        number = file.relative_to(checkpoint).parts[1]
        metadata["operatorInfo"]["operatorId"] = int(number)
        for store in metadata.get("stateStoreInfo", ()):
            if partitions is not None:
                store["numPartitions"] = partitions
            if paths := store.get("stateSchemaFilePaths"):
                schemas = f"{url(target)}/state/{number}"
                store["stateSchemaFilePaths"] = [_schema_path(path, schemas) for path in paths]
        changed = file.with_name(f".{file.name}")
        changed.write_text(f"{version}\n{json.dumps(metadata, separators=(',', ':'))}")
        os.replace(changed, file)


def _schema_path(path: str, operator: str) -> str:
    return _SCHEMA_PATH.sub(lambda match: f"{operator}/{match[1]}", path)


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, except checksums (`.crc`) and files that are still being written."""
    stack = [folder]
    while stack:
        try:
            entries = list(os.scandir(stack.pop()))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                stack.append(Path(entry.path))
            elif not is_left_out(entry.name):
                yield Path(entry.path)


def _link(source: Path, target: Path, *, may_vanish: bool = False) -> bool:
    """Whether the file is linked: Spark's maintenance removes files of older versions; `prune` checks the needed files."""
    try:
        try:
            link_or_new_file(source, target)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_new_file(source, target)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if may_vanish:
            return False
        raise
    return True
