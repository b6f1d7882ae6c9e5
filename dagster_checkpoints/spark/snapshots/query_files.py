"""Which files of a query's checkpoint directory a restore at one batch needs: a rule over names.

Source: Spark's `RocksDBFileManager` and `HDFSBackedStateStoreProvider` for the layout of `state/`.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS

_VERSION_FILE = re.compile(r"^(\d+)\.(zip|changelog|snapshot|delta)$")
_SOURCE_FILE = re.compile(r"^sources/(\d+)/(\d+)(\.compact)?$")
_STORE = re.compile(r"^state/(\d+)/(\d+)(?:/([^/]+))?/[^/]+$")
_NO_KEY = (b'{"type":"struct","fields":[]}', b'{"type":"struct","fields":[{"name":"key","type":"void",')
"""In the schema of state: that of an aggregation over all rows, and of a limit."""
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


def is_immutable(path: str) -> bool:
    """Whether a version's .zip names the file."""
    return path.rpartition("/")[0].rpartition("/")[2] in IMMUTABLE


def is_state_of_version(path: str) -> bool:
    """Whether a file holds rows of state: no restore changes it, as it does with some files of logs and descriptions."""
    return path.startswith("state/") and (is_immutable(path) or _VERSION_FILE.match(path.rpartition("/")[2]) is not None)


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
    versions: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in paths:
        store, _, name = path.rpartition("/")
        match = _VERSION_FILE.match(name)
        if match and path.startswith("state/"):
            versions[store][match[2]].add(int(match[1]))
    bases = {store: _base(f"{where}/{store}", found, batch_id + 1) for store, found in versions.items()}
    named = {store: named_in(f"{store}/{base}.zip") if base in versions[store]["zip"] else set() for store, base in bases.items()}
    kept = sorted(path for path in paths if _is_needed(path, bases, named, batch_id + 1))
    for store, names in named.items():
        missing = names - {path.rpartition("/")[2] for path in kept if is_immutable(path) and _store_of(path) == store}
        if missing:
            raise SnapshotError(
                f"State store {where}/{store}: version {bases[store]} names {sorted(missing)[:3]}, which do not exist. The "
                "checkpoint is declined; the next one tries again."
            )
    return kept


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
        if match := _SOURCE_FILE.match(path):
            (whole if match[3] else entries)[int(match[1])].add(int(match[2]))
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


def check_state_partitions(paths: Collection[str], offsets: str, read: Callable[[str], bytes], where: str) -> None:
    """Check that each stateful operator has a version of each of its state stores: without one of them Spark cannot go on.

    Source: Spark's `StateStoreId`: `state/<operator>/<partition>/<store>`. An operator without a key has one partition, whatever
    the number of the query; it is known by its schema (`StateSchemaCompatibilityChecker`).

    Args:
        paths: As for :func:`needed_files`.
        offsets: The entry of the offset log of the batch.
        read: Returns the bytes of a file of `paths`.
        where: As for :func:`needed_files`.

    Raises:
        SnapshotError: A state store has no version; the text names it.
    """
    stores: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for path in paths:
        if (store := _STORE.match(path)) and _VERSION_FILE.match(path.rpartition("/")[2]):
            stores[store[1]].add((int(store[2]), store[3] or ""))
    of_query = int(json.loads(offsets.splitlines()[1])["conf"][STATE_PARTITIONS]) if stores else 0
    for operator, found in stores.items():
        partitions, names = {partition for partition, _ in found}, {name for _, name in found}
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


def _base(store: str, versions: Mapping[str, set[int]], version: int) -> int:
    """The newest whole version up to `version`, from which changes lead to it without a gap; 0 is the empty store."""
    base = max((n for kind in _WHOLE for n in versions.get(kind, ()) if n <= version), default=0)
    steps = {n for kind in ("changelog", "delta") for n in versions.get(kind, ())}
    missing = [n for n in range(base + 1, version + 1) if n not in steps]
    if missing:
        raise SnapshotError(
            f"State store {store}: version {version} needs the changes of version(s) {missing[:5]} after version {base}, "
            f"found {sorted(steps)[-5:]}. The checkpoint is declined; the next one tries again."
        )
    return base


def _is_needed(path: str, bases: Mapping[str, int], named: Mapping[str, set[str]], version: int) -> bool:
    folder, _, name = path.rpartition("/")
    match = _VERSION_FILE.match(name)
    if match and folder in bases:
        number = int(match[1])
        return number == bases[folder] if match[2] in _WHOLE else bases[folder] < number <= version
    if is_immutable(path) and _store_of(path) in named:
        return name in named[_store_of(path)]
    return True


def _store_of(immutable: str) -> str:
    return immutable.rsplit("/", 2)[0]


def names_in_zip(archive: Path) -> set[str]:
    """The names of the files that a version's .zip names."""
    with zipfile.ZipFile(archive) as content:
        metadata = json.loads(content.read("metadata").decode().split("\n", 1)[1])
    ssts = {entry["dfsSstFileName"] for entry in metadata.get("sstFiles", ())}
    logs = {entry["dfsLogFileName"] for entry in metadata.get("logFiles") or () if "dfsLogFileName" in entry}
    return ssts | logs
