"""The state of an instance of a rescaled stage, as whole state partitions of old instances: a rule over the names of files.

Where key groups are state partitions, no row changes its partition: the files of a partition get the number that it has in its
new instance. The partitions of several old instances have different versions, one per batch of their queries; a query needs one
version. So it continues with the latest of these batches, and partitions of earlier ones catch up: where a whole version is
stored, all versions of the state store get later numbers; otherwise the store begins with changes to version 0, and versions
without a change follow. RocksDB only. Nothing is read or written here.

Source: Spark's `RocksDBFileManager` and `RocksDB.load`; `state.key_groups` for the numbers of partitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from dagster_checkpoints.spark.snapshots.query_files import is_immutable, is_state_of_version
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.fitted_checkpoint import KeyedStateShare
from dagster_checkpoints.state.metadata import QuerySnapshot, StateFile

MOST_EMPTY_VERSIONS = 1_000
"""Number of versions without a change, over all state stores of an instance, up to which its partitions are moved as they are."""

_IN_PARTITION = re.compile(r"^state/(\d+)/(\d+)/(.+)$")
_VERSION = re.compile(r"^(\d+)\.(zip|changelog)$")
_LOG_ENTRY = re.compile(r"^(offsets|commits)/(\d+)$")


@dataclass(frozen=True, slots=True)
class MovedPartitions:
    """The query of an instance, made of whole partitions of old instances.

    Attributes:
        query: The query, with the logs and descriptions of the one that it continues.
        partitions: The number of its state partitions.
        empty_versions: The files of versions without a change that the query needs, and no storage holds.
    """

    query: QuerySnapshot
    partitions: int
    empty_versions: tuple[str, ...] = ()


@dataclass(slots=True)
class _Store:
    """A state store of the old instances: its files by their path in it, and the number of batches that it is behind."""

    behind: int
    files: dict[str, StateFile] = field(default_factory=dict)

    @property
    def begins_whole(self) -> bool:
        return any(path.endswith(".zip") for path in self.files)


def moved_partitions(share: KeyedStateShare, continued: QuerySnapshot, where: str) -> MovedPartitions:
    """The query of an instance that gets whole partitions.

    Args:
        share: The instance's share.
        continued: The query that it continues.
        where: The stage and the checkpoint, for the text of errors.

    Raises:
        InstancesChanged: The state is not in RocksDB.
    """
    batch_id = max(query.batch_id for query in (continued, *share.queries.values()))
    stores: dict[tuple[int, str, str], _Store] = {}
    for old, query in share.queries.items():
        for partition, operator, name, path, file in _files(share, old, query, where):
            store = stores.setdefault((partition, operator, name), _Store(batch_id - query.batch_id))
            store.files[path] = file
    later = batch_id - continued.batch_id
    files = [replace(f, path=_later_entry(f.path, later)) for f in continued.files if not is_state_of_version(f.path)]
    if later and continued.batch_id == 0:  # a later batch needs the one before it, and batch 0 has none
        files += [replace(f, path=_later_entry(f.path, later - 1)) for f in continued.files if _LOG_ENTRY.match(f.path)]
    empty: list[str] = []
    for operator, name in sorted({(operator, name) for _, operator, name in stores}):
        for partition in range(len(share.groups)):
            store = stores.get((partition, operator, name), _Store(batch_id + 1))
            folder = "/".join(("state", operator, str(partition), *([name] if name else [])))
            shift = store.behind if store.begins_whole else 0
            files += [replace(file, path=f"{folder}/{_later_version(path, shift)}") for path, file in store.files.items()]
            missing = range(batch_id + 2 - (store.behind - shift), batch_id + 2)
            empty += [f"{folder}/{version}.changelog" for version in missing]
    return MovedPartitions(replace(continued, batch_id=batch_id, files=tuple(files)), len(share.groups), tuple(empty))


def are_moved_whole(moved: Sequence[MovedPartitions]) -> bool:
    """Whether the instances of a stage take partitions as they are: not if very many versions without a change were needed.

    Where each instance continues the query of one old instance, its partitions have that query's version: none is needed.
    """
    return all(len(each.empty_versions) <= MOST_EMPTY_VERSIONS for each in moved)


def _files(share: KeyedStateShare, old: int, query: QuerySnapshot, where: str) -> Iterator[tuple[int, str, str, str, StateFile]]:
    """The files of an old instance's partitions that the instance gets, as (new partition, operator, store, path in it, file)."""
    for file in query.files:
        found = _IN_PARTITION.match(file.path) if is_state_of_version(file.path) else None
        if found is None:
            continue
        operator, partition, inside = found.groups()
        folder, _, path = inside.rpartition("/")
        if is_immutable(file.path):
            folder, _, kind = folder.rpartition("/")
            path = f"{kind}/{path}"
        elif not _VERSION.match(path):
            raise InstancesChanged(
                f"{where}: expected state in RocksDB, which alone can be moved to other instances, found the file {file.path}. "
                "Give the stage the same instances, or start the pipeline without this checkpoint (restore_from: none), with "
                "RocksDB."
            )
        group = share.held[old].start + int(partition)
        if group in share.groups:
            yield group - share.groups.start, operator, folder, path, file


def _later_version(path: str, batches: int) -> str:
    """The path of a file in a state store, if the store's version has a later number; SST files have names of their own."""
    found = _VERSION.match(path)
    return path if found is None else f"{int(found[1]) + batches}.{found[2]}"


def _later_entry(path: str, batches: int) -> str:
    """The path of a file of the query's logs, if its last batch has a later number."""
    found = _LOG_ENTRY.match(path)
    return path if found is None else f"{found[1]}/{int(found[2]) + batches}"
