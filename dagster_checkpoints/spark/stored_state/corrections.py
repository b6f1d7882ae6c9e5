"""A savepoint like another one, with other values of `context.state` or other offsets of sources. Spark is not needed."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    StateFile,
    TaskSnapshot,
    task_files,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.locating import StoredCheckpoint, opened_at
from dagster_checkpoints.storage.savepoints import SavepointDirectory

ListCorrections = Mapping[str, Mapping[str, Mapping[str, Sequence[Any]]]]
"""By stage, name of the state and instance: all values."""
BroadcastCorrections = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By stage and name of the state: the mapping, which all instances get."""
OffsetCorrections = Mapping[str, Mapping[str, Mapping[int, Any]]]
"""By stage, instance and number of the source in the query: the offset."""


class CorrectionError(DagsterCheckpointsError):
    """A savepoint cannot be corrected as described: it has no such stage, instance, state or source. Nothing was written."""


def correct_savepoint(
    location: str,
    target: str,
    *,
    list_state: ListCorrections | None = None,
    broadcast_state: BroadcastCorrections | None = None,
    offsets: OffsetCorrections | None = None,
    name: str = "corrected",
    open_at: Callable[[str], ObjectStore] = open_store,
) -> str:
    """Write a corrected copy of a savepoint, from which a run can start (`restore_from`). The savepoint itself stays.

    All files of the new savepoint are read again and compared with their checksums before this returns. A run that starts from it
    begins a new job: rows that were committed after the savepoint are not taken back. Keyed state and sinks are not changed: a
    source that goes back reads rows again, which are counted again and written again.

    Args:
        location: URL or path of the savepoint.
        target: URL or path of the directory below which the new one is written, outside of the pipeline's own directory.
        list_state: New values of list and union states, by stage, name and instance; instances that are not named keep theirs.
        broadcast_state: New mappings of broadcast states, by stage and name.
        offsets: New offsets, by stage, instance and number of the source, as :func:`read_state` shows them.
        name: A part of the new directory's name.
        open_at: Opens the store at a URL; default: with boto3's own configuration.

    Returns:
        The URL of the new savepoint.

    Raises:
        CorrectionError: It is a checkpoint; or it has no such stage, instance, state or source; or a value is not JSON; or an
            offset has another form than the present one, or is one of a channel between stages.
        StorageError: A file cannot be read or written.
    """
    with opened_at(location, open_at) as stored, tempfile.TemporaryDirectory(prefix="dagster-checkpoints-") as folder:
        if stored.kind != "savepoint":
            raise CorrectionError(
                f"expected a savepoint at {stored.url}, found a checkpoint, which is deleted when newer ones are complete. Take "
                "a savepoint of the pipeline, and correct that"
            )
        metadata = stored.read()
        correction = _Correction(stored, metadata, Path(folder))
        for stage, by_name in (list_state or {}).items():
            for state, by_instance in by_name.items():
                correction.replace_items(stage, state, by_instance)
        for stage, mappings in (broadcast_state or {}).items():
            for state, mapping in mappings.items():
                correction.replace_mapping(stage, state, mapping)
        for stage, instances in (offsets or {}).items():
            for instance, sources in instances.items():
                for position, offset in sources.items():
                    correction.replace_offset(stage, instance, position, offset)
        with _storage_beside(stored, open_at) as storage:
            return correction.write(storage.savepoint_directory(metadata.checkpoint_id, name, target))


def _storage_beside(stored: StoredCheckpoint, open_at: Callable[[str], ObjectStore]) -> CheckpointStorage:
    """The pipeline's storage; of a savepoint that lies elsewhere the place where it would be."""
    return CheckpointStorage(stored.storage.store, stored.storage.pipeline, open_elsewhere=open_at)


class _Correction:
    """The new metadata, and the files that differ from those of the savepoint.

    Args:
        stored: The savepoint.
        metadata: Its metadata.
        folder: A directory for copies of files.
    """

    def __init__(self, stored: StoredCheckpoint, metadata: CheckpointMetadata, folder: Path) -> None:
        self._stored = stored
        self._metadata = metadata
        self._folder = folder
        self._changed: dict[str, Path] = {}  # new files, by sha256

    def replace_items(self, stage: str, state: str, by_instance: Mapping[str, Sequence[Any]]) -> None:
        for instance, values in by_instance.items():
            self._replace_state(stage, self._running(stage, instance), state, ("list", "union"), values)

    def replace_mapping(self, stage: str, state: str, mapping: Mapping[str, Any]) -> None:
        for index in self._chain_of(stage).tasks:
            self._replace_state(stage, index, state, ("broadcast",), list(mapping.items()))

    def replace_offset(self, stage: str, instance: str, position: int, offset: Any) -> None:
        chain, index = self._chain_of(stage), self._running(stage, instance)
        task = chain.tasks[index]
        query = task.query
        recorded = next(each for each in self._metadata.stages if each.name == chain.name)
        if task.channels or recorded.inputs:
            raise CorrectionError(
                f"expected a stage whose query reads sources, found that {chain.name!r}, with which the query of {stage!r} "
                "begins, reads other stages through channels. Their positions belong to the rows that the savepoint holds: with "
                "others, rows would be left out. Correct the offsets of the sources"
            )
        if query is None or query.batch_id < 0:
            raise CorrectionError(f"instance {instance!r} of {stage!r} had read nothing in {self._stored.url}: it has no offsets")
        entries = [file for file in query.files if file.path.startswith("offsets/")]
        copy = self._folder / f"{chain.name}.{index}"
        self._stored.fetch([file for file in entries if file.sha256 not in self._changed], copy)
        log = QueryLog(copy)
        known = log.planned(query.batch_id).sources
        if not 0 <= position < len(known) or known[position] is None or not _is_like(known[position], offset):
            shown = ", ".join(f"{number}: {_json(found).decode()}" for number, found in enumerate(known))
            raise CorrectionError(
                f"expected the number of a source of {stage!r}, instance {instance!r}, and an offset like its present one "
                f"({shown}), with all that it names, found {position}: {offset!r}. Spark reads a Kafka partition that an offset "
                "does not name from its beginning: name the ones that stay, too"
            )
        log.move_source(position, _json(offset).decode())
        new = {file.path: self._new_file(file, copy / file.path) for file in entries}
        files = tuple(new.get(file.path, file) for file in query.files)
        self._put(chain, index, msgspec.structs.replace(task, query=msgspec.structs.replace(query, files=files)))

    def write(self, directory: SavepointDirectory) -> str:
        """Write the new savepoint, and read it again. Returns its URL."""
        files = {
            file.sha256: file for chain in self._metadata.chains for task in chain.tasks.values() for file in task_files(task)
        }
        kept = [msgspec.structs.replace(file, path=file.sha256) for file in files.values() if file.sha256 not in self._changed]
        copies = self._folder / "kept"
        self._stored.fetch(kept, copies)
        changed = {sha256: path for sha256, path in self._changed.items() if sha256 in files}
        directory.upload_files({**{file.sha256: copies / file.path for file in kept}, **changed})
        sizes = {file.sha256: file.size for file in files.values()}
        directory.write_metadata(encode(self._metadata), sizes)
        if problems := directory.verify(sizes):
            raise CorrectionError(f"expected the new savepoint {directory.url} to be complete, found {problems[0]}")
        return directory.url

    def _replace_state(self, stage: str, index: int, state: str, kinds: tuple[str, ...], values: Sequence[Any]) -> None:
        chain = self._chain_of(stage)
        task = chain.tasks[index]
        own = task.stages[stage]
        names = [each.name for each in own.operator_states if each.kind in kinds]
        if state not in names:
            raise CorrectionError(
                f"expected a {' or '.join(kinds)} state {state!r} of stage {stage!r} in {self._stored.url}, found none. "
                f"{suggestion(state, names)}"
            )
        items = tuple(_json(value) for value in values)
        states = tuple(
            OperatorState(each.name, each.kind, items) if each.name == state and each.kind in kinds else each
            for each in own.operator_states
        )
        stages = {**task.stages, stage: msgspec.structs.replace(own, operator_states=states)}
        self._put(chain, index, msgspec.structs.replace(task, stages=stages))

    def _chain_of(self, stage: str) -> ChainMetadata:
        known = [each.name for each in self._metadata.stages]
        if stage not in known:
            raise CorrectionError(
                f"expected a stage {stage!r} in {self._stored.url}, found none of that name. {suggestion(stage, known)}"
            )
        chain = next((each for each in self._metadata.chains if stage in each.stages), None)
        if chain is None or not any(stage in task.stages for task in chain.tasks.values()):
            raise CorrectionError(f"stage {stage!r} had finished in {self._stored.url}: it has no state and is not run again")
        return chain

    def _running(self, stage: str, instance: str) -> int:
        tasks = self._chain_of(stage).tasks
        names = next(each.instances for each in self._metadata.stages if each.name == stage)
        running = {names[index]: index for index, task in tasks.items() if stage in task.stages}
        if instance not in running:
            raise CorrectionError(
                f"expected a running instance {instance!r} of stage {stage!r} in {self._stored.url}, found none. "
                f"{suggestion(instance, running)}"
            )
        return running[instance]

    def _put(self, chain: ChainMetadata, index: int, task: TaskSnapshot) -> None:
        new = msgspec.structs.replace(chain, tasks={**chain.tasks, index: task})
        chains = tuple(new if each.name == chain.name else each for each in self._metadata.chains)
        self._metadata = msgspec.structs.replace(self._metadata, chains=chains)

    def _new_file(self, file: StateFile, path: Path) -> StateFile:
        data = path.read_bytes()
        new = StateFile(file.path, hashlib.sha256(data).hexdigest(), len(data))
        kept = self._folder / "changed" / new.sha256
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(data)
        self._changed[new.sha256] = kept
        return new


def _is_like(known: Any, offset: Any) -> bool:
    """Whether an offset has the form of another one: the same names, at each level, and values of the same types."""
    if isinstance(known, dict) and isinstance(offset, dict):
        return known.keys() == offset.keys() and all(_is_like(known[name], offset[name]) for name in known)
    return type(known) is type(offset)


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError) as error:
        raise CorrectionError(f"expected values that JSON can hold, found {value!r}: {error}") from error
