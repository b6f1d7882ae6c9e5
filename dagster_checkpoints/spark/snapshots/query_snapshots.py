"""A query's checkpoint directory at one committed batch: pinned in milliseconds, checked, and restored.

Spark's maintenance and the query itself run at the same time. So the files are hard-linked first (under the task's lock), in
a safe order: versions (`.zip`, `.changelog`) before the SST files that they name. After that, files that the batch does not need
are removed, and it is checked that all files that it needs exist.

Source: Spark's `RocksDBFileManager` and `HDFSBackedStateStoreProvider` for the layout of `state/`.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from dagster_checkpoints.sinks.durable import link_or_copy
from dagster_checkpoints.spark.errors import SnapshotError

_VERSION_FILE = re.compile(r"^(\d+)\.(zip|changelog|snapshot|delta)$")
_SCHEMA_PATH = re.compile(r"^.*/(state/\d+/_stateSchema/.*)$")
_WHOLE = frozenset({"zip", "snapshot"})
_IMMUTABLE = frozenset({"SSTs", "logs"})  # folders of files that a version's .zip names


def pin(checkpoint: Path, batch_id: int, target: Path) -> None:
    """Hard-link the files of the checkpoint directory at `batch_id` to `target`; copy them where links are impossible.

    Args:
        checkpoint: The query's checkpoint location.
        batch_id: A committed batch, and the newest one: `commits/<batch_id>` exists.
        target: A directory that does not exist yet.
    """
    _link(checkpoint / "metadata", target / "metadata")
    for log in ("offsets", "commits"):
        for batch in (batch_id - 1, batch_id):
            if batch >= 0:
                _link(checkpoint / log / str(batch), target / log / str(batch))
    immutable: list[Path] = []
    for name in ("sources", "state"):
        for file in _files(checkpoint / name):
            version = _VERSION_FILE.match(file.name)
            if version and name == "state" and int(version[1]) > batch_id + 1:
                continue
            if file.parent.name in _IMMUTABLE:
                immutable.append(file)
                continue
            _link(file, target / file.relative_to(checkpoint), may_vanish=True)
    # A version that was linked above may name SSTs that are newer than the listing.
    folders = {file.parent for file in immutable} | set(_immutable_folders(checkpoint / "state"))
    for folder in folders:
        for file in _files(folder):
            _link(file, target / file.relative_to(checkpoint), may_vanish=True)


def prune(pinned: Path, batch_id: int) -> list[Path]:
    """Remove files from a pinned directory that a restore at `batch_id` does not need, and check that the rest is whole.

    Returns:
        The files that belong to the snapshot, relative to `pinned`, sorted.

    Raises:
        SnapshotError: A file that is needed is missing; the text names it.
    """
    version = batch_id + 1
    stores: dict[Path, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in _files(pinned / "state"):
        match = _VERSION_FILE.match(file.name)
        if match:
            stores[file.parent][match[2]].add(int(match[1]))
    for store, versions in stores.items():
        _prune_store(store, versions, version)
    return sorted(file.relative_to(pinned) for file in _files(pinned))


def restore(files: Mapping[str, Path], checkpoint: Path) -> None:
    """Link fetched files into a new checkpoint directory.

    Args:
        files: The fetched files, by their path below the checkpoint directory.
        checkpoint: The new checkpoint directory.
    """
    for relative, source in files.items():
        target = checkpoint / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(source, target)


def relocate(checkpoint: Path) -> None:
    """Correct the absolute paths of state schemas in a restored checkpoint directory, which `transformWithState` writes.

    Source: Spark's `OperatorStateMetadataV2`, `stateSchemaFilePaths`.
    """
    for file in checkpoint.glob("state/*/_metadata/v2/*"):
        version, _, text = file.read_text().partition("\n")
        metadata = json.loads(text)
        for store in metadata.get("stateStoreInfo", ()):
            paths = store.get("stateSchemaFilePaths", ())
            store["stateSchemaFilePaths"] = [
                _SCHEMA_PATH.sub(lambda match: f"file:{checkpoint}/{match[1]}", path) for path in paths
            ]
        changed = file.with_name(f".{file.name}")
        changed.write_text(f"{version}\n{json.dumps(metadata, separators=(',', ':'))}")
        os.replace(changed, file)


def _prune_store(store: Path, versions: Mapping[str, set[int]], version: int) -> None:
    whole = {n for kind in _WHOLE for n in versions.get(kind, ()) if n <= version}
    base = max(whole, default=0)
    steps = {n for kind in ("changelog", "delta") for n in versions.get(kind, ())}
    missing = [n for n in range(base + 1, version + 1) if n not in steps]
    if missing:
        raise SnapshotError(
            f"State store {store}: version {version} needs the changes of version(s) {missing[:5]} after version {base}, "
            f"found {sorted(steps)[-5:]}. The checkpoint is declined; the next one tries again."
        )
    needed_immutable: set[str] = set()
    for file in list(store.iterdir()):
        match = _VERSION_FILE.match(file.name)
        if match is None:
            continue
        number = int(match[1])
        keep = number == base if match[2] in _WHOLE else base < number <= version
        if not keep:
            file.unlink()
        elif match[2] == "zip":
            needed_immutable |= _named_in(file)
    for folder in _IMMUTABLE:
        present = {file.name for file in _files(store / folder)}
        for name in present - needed_immutable:
            (store / folder / name).unlink()
        needed_immutable -= present
    if needed_immutable:
        raise SnapshotError(
            f"State store {store}: version {base} names {sorted(needed_immutable)[:3]}, which do not exist. The checkpoint "
            "is declined; the next one tries again."
        )


def _named_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as content:
        metadata = json.loads(content.read("metadata").decode().split("\n", 1)[1])
    ssts = {entry["dfsSstFileName"] for entry in metadata.get("sstFiles", ())}
    logs = {entry["dfsLogFileName"] for entry in metadata.get("logFiles") or () if "dfsLogFileName" in entry}
    return ssts | logs


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
            elif not entry.name.startswith("."):
                yield Path(entry.path)


def _immutable_folders(folder: Path) -> Iterator[Path]:
    for parent, folders, _ in os.walk(folder):
        yield from (Path(parent) / name for name in folders if name in _IMMUTABLE)


def _link(source: Path, target: Path, *, may_vanish: bool = False) -> None:
    try:
        try:
            link_or_copy(source, target)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(source, target)
    except FileExistsError:
        return
    except FileNotFoundError:
        if not may_vanish:  # Spark's maintenance removes files of older versions; `prune` checks the needed files
            raise
