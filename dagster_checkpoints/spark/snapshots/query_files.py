"""Which files of a query's checkpoint directory a restore at one batch needs: a rule over names.

Source: Spark's `RocksDBFileManager` and `HDFSBackedStateStoreProvider` for the layout of `state/`.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS

_VERSION_FILE = re.compile(r"^(\d+)\.(zip|changelog|snapshot|delta)$")
_SOURCE_LOG = re.compile(r"^sources/(\d+)$")
_SOURCE_ENTRY = re.compile(r"^(\d+)(\.compact)?$")
_WHOLE_ENTRIES = 3
"""The newest whole entries of a source's log that are kept. Spark reads from the newest one on, and takes the distance of the two
newest ones for that of those to come; the newest one may belong to a batch that is planned, and not in the checkpoint."""
_STORE = re.compile(r"^state/(\d+)/(\d+)(?:/([^/]+))?/[^/]+$")
_NO_KEY = (b'{"type":"struct","fields":[]}', b'{"type":"struct","fields":[{"name":"key","type":"void",')
"""In the schema of state: that of an aggregation over all rows, and of a limit."""
_STORES_OF_A_JOIN = {f"{side}-{store}" for side in ("left", "right") for store in ("keyToNumValues", "keyWithIndexToValue")}
"""Of two streams (`SymmetricHashJoinStateManager.allStateStoreNames`): the only operator with several stores."""
_DELETED = (
    ": another program has deleted the files. Spark could not go on from here. Exclude the work directory from cleaning "
    "(tmpreaper, systemd-tmpfiles). The checkpoint is declined."
)
_WHOLE = frozenset({"zip", "snapshot"})
IMMUTABLE = frozenset({"SSTs", "logs"})
"""The folders of files that a version's .zip names."""


def log_files(batch_id: int, *, committed: bool = True) -> list[str]:
    """The files of the query's logs that a restore at a batch needs: Spark reads the batch before it, too.

    Args:
        batch_id: The batch.
        committed: Whether the commit log holds it.
    """
    batches = [batch for batch in (batch_id - 1, batch_id) if batch >= 0]
    last = batches if committed else batches[:-1]
    return ["metadata", *(f"offsets/{batch}" for batch in batches), *(f"commits/{batch}" for batch in last)]


def is_left_out(name: str) -> bool:
    """Whether a file is still being written, or is a checksum: Spark 4.1 does not hide those of its state."""
    return name.startswith(".") or name.endswith(".crc")


def is_of_later_batch(path: str, batch_id: int) -> bool:
    """Whether a file of `state/` was written by a batch after `batch_id`, which may be running."""
    version = _VERSION_FILE.match(path.rpartition("/")[2])
    return version is not None and path.startswith("state/") and int(version[1]) > batch_id + 1


def is_version(name: str) -> bool:
    """Whether a file of a state store holds a version of it, or the changes that lead to one."""
    return _VERSION_FILE.match(name) is not None


def is_source_log(folder: str) -> bool:
    """Whether a folder holds what Spark keeps of a source: what a source keeps below it is its own."""
    return _SOURCE_LOG.match(folder) is not None


def is_immutable(path: str) -> bool:
    """Whether a version's .zip names the file."""
    return path.rpartition("/")[0].rpartition("/")[2] in IMMUTABLE


def is_state_of_version(path: str) -> bool:
    """Whether a file holds rows of state: no restore changes it, as it does with some files of logs and descriptions."""
    return path.startswith("state/") and (is_immutable(path) or is_version(path.rpartition("/")[2]))


def needed_files(paths: Collection[str], batch_id: int, named_in: Callable[[str], set[str]], where: str) -> list[str]:
    """The files that a restore at a batch needs, sorted.

    Args:
        paths: All files, relative to the checkpoint directory.
        batch_id: The batch.
        named_in: Returns the names of the files that a .zip names.
        where: The checkpoint directory, for the text of errors.

    Raises:
        SnapshotError: A file that is needed is missing; the text names it.
    """
    stores: dict[str, list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    logs: dict[str, list[str]] = defaultdict(list)
    kept = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if is_source_log(folder):
            logs[folder].append(name)
        elif is_immutable(path):
            others[_store_of(path)].append(path)
        elif path.startswith("state/") and is_version(name):
            stores[folder].append(name)
        else:
            kept.append(path)
    for log, names in logs.items():
        kept += (f"{log}/{name}" for name in needed_entries(names))
    for store in stores.keys() | others.keys():
        if store not in stores:
            kept += others[store]
            continue
        needed = needed_versions(stores[store], batch_id, f"{where}/{store}")
        kept += (f"{store}/{name}" for name in needed)
        named = {name for archive in needed if archive.endswith(".zip") for name in named_in(f"{store}/{archive}")}
        found = {path.rpartition("/")[2]: path for path in others[store]}
        if missing := named - found.keys():
            raise SnapshotError(
                f"State store {where}/{store}: version {needed[0].removesuffix('.zip')} names {sorted(missing)[:3]}, which do "
                "not exist. The checkpoint is declined; the next one tries again."
            )
        kept += (found[name] for name in named)
    return sorted(kept)


def needed_entries(names: Iterable[str]) -> list[str]:
    """The entries of the log of a source of files that a restore needs: the newest whole ones, and those between and behind them.

    Source: Spark's `CompactibleFileStreamLog`; it deletes what a whole entry replaces ten minutes later.

    Args:
        names: The names of the source's files; what is no entry is needed.
    """
    entries = [(name, _SOURCE_ENTRY.match(name)) for name in names]
    whole = sorted(int(match[1]) for _, match in entries if match and match[2])
    first = whole[-_WHOLE_ENTRIES] if len(whole) >= _WHOLE_ENTRIES else 0
    return [name for name, match in entries if not match or int(match[1]) >= first]


def needed_versions(names: Iterable[str], batch_id: int, store: str) -> list[str]:
    """The versions of one state store that a restore at a batch needs: the newest whole one, and the changes that follow.

    Args:
        names: The names of the store's files; others than those of versions do not count.
        batch_id: The batch.
        store: The store's directory, for the text of errors.

    Returns:
        The names, the whole version first; none where no version is.

    Raises:
        SnapshotError: A version is missing; the text names it.
    """
    whole: dict[int, str] = {0: ""}  # the empty store
    changes: dict[int, str] = {}
    for name in names:
        if match := _VERSION_FILE.match(name):
            (whole if match[2] in _WHOLE else changes)[int(match[1])] = name
    if len(whole) == 1 and not changes:
        return []
    version = batch_id + 1
    base = max(number for number in whole if number <= version)
    steps = range(base + 1, version + 1)
    if missing := [number for number in steps if number not in changes]:
        raise SnapshotError(
            f"State store {store}: version {version} needs the changes of version(s) {missing[:5]} after version {base}, "
            f"found {sorted(changes)[-5:]}. The checkpoint is declined; the next one tries again."
        )
    return [*filter(None, (whole[base],)), *(changes[number] for number in steps)]


def check_read_files(paths: Collection[str], offsets: str, where: str) -> None:
    """Check that the log of each source of files is complete: without an entry Spark cannot go on, or reads files again.

    Source: Spark's `CompactibleFileStreamLog`: an entry for each number up to the offset, from the newest whole one on.

    Args:
        paths: As for :func:`needed_files`.
        offsets: The entry of the offset log of the batch.
        where: As for :func:`needed_files`.

    Raises:
        SnapshotError: An entry is missing; the text names it.
    """
    entries: dict[int, set[int]] = defaultdict(set)
    whole: dict[int, set[int]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        if (log := _SOURCE_LOG.match(folder)) and (entry := _SOURCE_ENTRY.match(name)):
            (whole if entry[2] else entries)[int(log[1])].add(int(entry[1]))
    texts = offsets.splitlines()[2:]
    logged = {text for source, text in enumerate(texts) if source in entries or source in whole}
    for source, text in enumerate(texts):
        if source not in entries and source not in whole and text in logged:
            continue  # a source that the query reads twice: it has two numbers, and one log
        offset = json.loads(text) if text.startswith("{") else None
        last = offset.get("logOffset") if isinstance(offset, dict) and len(offset) == 1 else None
        if not isinstance(last, int):  # also a topic of Kafka of this name
            continue
        base = max((number for number in whole[source] if number <= last), default=-1)
        missing = [number for number in range(base + 1, last + 1) if number not in entries[source]]
        if missing:
            raise SnapshotError(
                f"{where}/sources/{source}: expected entries {base + 1} to {last} in the log of the files that were read, found "
                f"that {missing[:5]} are missing{_DELETED}"
            )


def check_state_partitions(
    paths: Collection[str], offsets: str, read: Callable[[str], bytes], where: str, operators: int = 0
) -> None:
    """Check that each stateful operator has a version of each of its state stores: without one of them Spark cannot go on.

    Source: Spark's `StateStoreId`: `state/<operator>/<partition>/<store>`. An operator without a key has one partition, whatever
    the number of the query; it is known by its schema (`StateSchemaCompatibilityChecker`).

    Args:
        paths: As for :func:`needed_files`.
        offsets: The entry of the offset log of the batch.
        read: Returns the bytes of a file of `paths`.
        where: As for :func:`needed_files`.
        operators: The number of stateful operators that the query is known to have; Spark numbers them from 0.

    Raises:
        SnapshotError: A state store has no version; the text names it.
    """
    stores: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for path in paths:
        if (store := _STORE.match(path)) and is_version(path.rpartition("/")[2]):
            stores[store[1]].add((int(store[2]), store[3] or ""))
    if lost := [f"state/{number}" for number in range(operators) if str(number) not in stores]:
        raise SnapshotError(
            f"{where}: expected the state of {operators} stateful operators, found no version in {lost[:3]}{_DELETED}"
        )
    of_query = int(json.loads(offsets.splitlines()[1])["conf"][STATE_PARTITIONS]) if stores else 0
    for operator, found in stores.items():
        partitions, names = {partition for partition, _ in found}, {name for _, name in found}
        names |= _STORES_OF_A_JOIN if names & _STORES_OF_A_JOIN else set()
        is_one = partitions == {0} and of_query > 1 and _has_no_key(f"state/{operator}/0/_metadata/schema", paths, read)
        number = 1 if is_one else of_query
        missing = sorted({(partition, name) for partition in range(number) for name in names} - found)
        if missing:
            folders = ["/".join(("state", operator, str(partition), name)).rstrip("/") for partition, name in missing]
            raise SnapshotError(
                f"{where}: expected a version of each state store of {number} partitions, found none in {folders[:3]}{_DELETED}"
            )


def _has_no_key(schema: str, paths: Collection[str], read: Callable[[str], bytes]) -> bool:
    return schema not in paths or any(key in read(schema) for key in _NO_KEY)


def _store_of(immutable: str) -> str:
    return immutable.rsplit("/", 2)[0]


def names_in_zip(archive: Path) -> set[str]:
    """The names of the files that a version's .zip names."""
    with zipfile.ZipFile(archive) as content:
        metadata = json.loads(content.read("metadata").decode().split("\n", 1)[1])
    ssts = {entry["dfsSstFileName"] for entry in metadata.get("sstFiles", ())}
    logs = {entry["dfsLogFileName"] for entry in metadata.get("logFiles") or () if "dfsLogFileName" in entry}
    return ssts | logs
