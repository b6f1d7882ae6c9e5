"""The form of a checkpoint's metadata in storage: the `_metadata` file.

Two lines of JSON. The first names format, version, length and checksum; the second is the body::

    {"format":"dagster-checkpoints","version":1,"length":1234,"sha256":"…"}
    {"pipeline":"flights","checkpoint_id":7,…}

The checksum covers version, length and body, so that any changed byte is a `CorruptMetadata` and is never
misread; an intact file of another version is an `UnknownMetadataVersion`. The form of the first line is the same in
every version; every version that a release has written stays readable (tests/state/examples). Must not know: storage,
Spark, the pipeline.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from dagster_checkpoints.state.errors import CorruptMetadata, UnknownMetadataVersion
from dagster_checkpoints.state.key_groups import HIGHEST_MAX_PARALLELISM
from dagster_checkpoints.state.metadata import VERSION, ChainMetadata, CheckpointMetadata, StageMetadata

FORMAT = "dagster-checkpoints"
_SHOWN = 10
# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_METADATA = msgspec.json.Decoder(CheckpointMetadata)


def encode(metadata: CheckpointMetadata) -> bytes:
    """The bytes of the `_metadata` file; dictionaries keep their order, which is significant for a chain's stages."""
    body = msgspec.json.encode(metadata)
    return b"%s\n%s\n" % (_header(metadata.version, body), body)


def decode(data: bytes, where: str) -> CheckpointMetadata:
    """Read the bytes of a `_metadata` file.

    Args:
        data: the bytes of the whole file.
        where: its location, for the errors.

    Raises:
        CorruptMetadata: the bytes were changed after they were written, or contradict themselves.
        UnknownMetadataVersion: they are intact, and of a version that this release cannot read.
    """
    newline = data.find(b"\n")
    header = data[:newline] if newline >= 0 else data
    version = _read_version(header, where)
    body = memoryview(data)[newline + 1 : -1]
    if newline < 0 or len(data) < newline + 2 or data[-1:] != b"\n" or _header(version, body) != header:
        raise _corrupt(
            where,
            f"its first line promises {header[:200].decode('utf-8', 'replace')}, and the {len(body)} bytes behind it do "
            "not match that length and checksum",
        )
    if version != VERSION:
        raise UnknownMetadataVersion(
            f"The checkpoint metadata at {where} is intact and of format version {version}; this release reads version "
            f"{VERSION}. Use a release of dagster-checkpoints that knows version {version}, or restore from another "
            "checkpoint."
        )
    try:
        metadata = _METADATA.decode(body)
    except msgspec.ValidationError as error:
        raise UnknownMetadataVersion(
            f"The checkpoint metadata at {where} is intact, but says something that this release does not understand: "
            f"{error}. It was written by another release of dagster-checkpoints; use that one, or restore from another "
            "checkpoint."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(where, f"what follows its first line is no JSON ({error})") from error
    for contradiction in _contradictions(metadata):
        raise _corrupt(where, f"it contradicts itself: {contradiction}")
    return metadata


def _header(version: int, body: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(b"%s %d %d\n" % (FORMAT.encode(), version, len(body)))
    checksum.update(body)
    fields = {"format": FORMAT, "version": version, "length": len(body), "sha256": checksum.hexdigest()}
    return json.dumps(fields, separators=(",", ":")).encode()


def _read_version(header: bytes, where: str) -> int:
    try:
        fields = json.loads(header)
        version = fields["version"]
        known = fields["format"] == FORMAT and type(version) is int
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(where, f"its first line is no metadata header ({error})") from error
    if not known:
        raise _corrupt(where, f"its first line does not name the format {FORMAT!r} and a version")
    return int(version)


def _corrupt(where: str, found: str) -> CorruptMetadata:
    return CorruptMetadata(
        f"The checkpoint metadata at {where} is damaged: {found}. Expected a file written by dagster-checkpoints, "
        "unchanged. Restore from another retained checkpoint or savepoint."
    )


def _contradictions(metadata: CheckpointMetadata) -> Iterator[str]:
    """Contradictions that no release writes, and that a restore could not handle."""
    if metadata.version != VERSION:
        yield f"its first line says version {VERSION}, its body {metadata.version}"
    stages = {stage.name: stage for stage in metadata.stages}
    names = Counter(stage.name for stage in metadata.stages)
    yield from (f"there are {count} stages {name!r}" for name, count in names.items() if count > 1)
    for stage in metadata.stages:
        yield from _of_stage(stage)
    places = Counter(name for chain in metadata.chains for name in chain.stages)
    yield from (f"stage {name!r} runs in {places[name]} chains" for name in stages if places[name] != 1)
    for chain in metadata.chains:
        yield from _of_chain(chain, stages)


def _of_stage(stage: StageMetadata) -> Iterator[str]:
    name, parallelism = f"stage {stage.name!r}", stage.parallelism
    if parallelism < 1 or len(stage.instances) != parallelism:
        yield f"{name} has parallelism {parallelism} and {len(stage.instances)} instances"
    yield from (f"{name} has {count} instances {of!r}" for of, count in Counter(stage.instances).items() if count > 1)
    if len(set(stage.finished)) != len(stage.finished) or not all(0 <= index < parallelism for index in stage.finished):
        yield f"the finished instances {_few(stage.finished)} of {name} are none of its {parallelism}"
    if stage.fully_finished != (len(stage.finished) == parallelism):
        yield f"{name} is {'' if stage.fully_finished else 'not '}fully finished, with {_few(stage.finished)} finished"
    # A fully finished stage has no keyed state, and its instances may have changed since.
    least = 1 if stage.fully_finished else parallelism
    if stage.max_parallelism and not least <= stage.max_parallelism <= HIGHEST_MAX_PARALLELISM:
        yield f"{name} has parallelism {parallelism} and {stage.max_parallelism} key groups"
    partitions = stage.state_partitions
    if partitions and (partitions != stage.max_parallelism or (partitions % parallelism and not stage.fully_finished)):
        yield f"{name} has parallelism {parallelism}, {stage.max_parallelism} key groups and {partitions} state partitions"
    if stage.enumerator is not None:
        splits = Counter((*stage.enumerator.discovered, *stage.enumerator.assigned, *stage.enumerator.finished))
        yield from (f"the enumerator of {name} has the split {s!r} {count} times" for s, count in splits.items() if count > 1)


def _of_chain(chain: ChainMetadata, stages: dict[str, StageMetadata]) -> Iterator[str]:
    unknown = [name for name in chain.stages if name not in stages]
    if unknown or not chain.stages:
        yield f"chain {chain.name!r} runs the stages {unknown}, which the checkpoint does not know"
        return
    if chain.name != chain.stages[0]:
        yield f"chain {chain.name!r} begins with the stage {chain.stages[0]!r}, after which it would be named"
    parallelisms = sorted({stages[name].parallelism for name in chain.stages})
    if len(parallelisms) > 1:
        yield f"the stages of chain {chain.name!r} have different parallelisms: {parallelisms}"
    # A task runs all stages of its chain, so they finish together: otherwise the state of a stage would have no task. A fused
    # source finishes while its task runs.
    ended = chain.ended_sources
    if unfinished_sources := [name for name in ended if name not in stages or not stages[name].fully_finished]:
        yield f"the fused sources {unfinished_sources} of chain {chain.name!r} have ended, and are not finished"
    finished = {frozenset(stages[name].finished) for name in chain.stages if name not in ended}
    if not finished:
        yield f"every stage of chain {chain.name!r} is a fused source that has ended"
        return
    if len(finished) > 1:
        yield f"the stages of chain {chain.name!r} have different finished instances: {[_few(each) for each in finished]}"
    unfinished = set(range(parallelisms[0])).difference(*finished)
    if missing := unfinished - set(chain.tasks):
        yield f"chain {chain.name!r} has no snapshot of its unfinished tasks {_few(missing)}"
    if unexpected := set(chain.tasks) - unfinished:
        yield f"chain {chain.name!r} has the tasks {_few(unexpected)}, which have finished or are none of its {parallelisms[0]}"
    known = set(chain.stages)
    for index, task in chain.tasks.items():
        enumerator = stages[chain.name].enumerator
        if strange := sorted(set(task.splits) - set(enumerator.assigned if enumerator is not None else ())):
            yield f"task {index} of chain {chain.name!r} reads the splits {strange[:_SHOWN]}, which are not assigned"
        if not known.issuperset(task.stages):
            yield f"task {index} of chain {chain.name!r} holds state of {sorted(set(task.stages) - known)}, which it does not run"


def _few(indices: Iterable[int]) -> list[int | str]:
    """The first of these indices, for a message: there may be very many."""
    shown = sorted(indices)
    return list(shown) if len(shown) <= _SHOWN else [*shown[:_SHOWN], "…"]
