"""Recorded chains that the pipeline runs as one query now, joined into one chain: the counterpart of `divided_chains`.

A reader or a sink between two stages was taken away again, or the pipeline allows chains again. At an aligned checkpoint nothing
is on its way between two queries, so the two can go on as one, which reads on where the first one has stopped. It continues with
the batch after the later one of both: the state of the other query gets later versions. The operators of the first chain are
numbered behind those of the second one. Chains for which that is not certain stay apart, which is no error. Must not know:
storage, Spark, tasks.

Source: Spark numbers the stateful operators of a query from its output to its inputs (`IncrementalExecution`), and keeps their
state in `state/<number>`; version n + 1 of the state belongs to batch n.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dagster_checkpoints.pipeline import Chain, Pipeline, chain_obstacle
from dagster_checkpoints.state.divided_chains import ChainPart, division_obstacle, operator_counts
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    WatermarkAt,
)
from dagster_checkpoints.state.processor_states import ENCODED_AS_AVRO
from dagster_checkpoints.state.stages_between import replaced_inputs

MOST_EMPTY_VERSIONS = 1_000
"""Number of versions without a change, over all state stores of a task, up to which two queries are joined."""

_LOG_ENTRY = re.compile(r"^(offsets|commits)/(\d+)$")
_OPERATOR = re.compile(r"^state/(\d+)/(.+)$")
_VERSION = re.compile(r"^(.*/)(\d+)\.(zip|changelog|snapshot|delta)$")
_OF_ROCKSDB = frozenset({"zip", "changelog"})
_WHOLE = frozenset({"zip", "snapshot"})


class JoinedChain(ChainMetadata, frozen=True):
    """A chain that is made of several recorded ones; in memory only.

    Attributes:
        parts: the recorded chains, in order: their plans as separate queries show whether the state still fits.
    """

    parts: tuple[ChainMetadata, ...] = ()


@dataclass(frozen=True)
class JoinedCheckpoint:
    """A checkpoint as if it had been taken with fewer queries.

    Attributes:
        metadata: its metadata.
        joined: by chain that is made of several recorded ones, these.
        apart: by first stage of a chain that stays apart from the stage that it reads, although the pipeline has both in one
            chain: the reason.
    """

    metadata: CheckpointMetadata
    joined: Mapping[str, tuple[ChainMetadata, ...]] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


def joined(
    metadata: CheckpointMetadata,
    pipeline: Pipeline,
    chains: Sequence[Chain],
    *,
    rescaled: Collection[str] = (),
    only: Collection[str] | None = None,
) -> JoinedCheckpoint:
    """The checkpoint with recorded chains joined where the pipeline runs them as one query now, and where their state allows it.

    Args:
        metadata: the checkpoint, fitted to the pipeline, which can be restored from it.
        pipeline: the pipeline that is to run.
        chains: its chains in a new start.
        rescaled: the stages that have other instances than in the checkpoint.
        only: the first stages of chains that may be joined with the stage that they read; None for all.
    """
    recorded = {stage.name: stage for stage in metadata.stages}
    chain_of = {name: chain.name for chain in chains for name in chain.stages}
    ending: dict[str, ChainMetadata] = {}
    apart: dict[str, str] = {}
    for chain in metadata.chains:  # in the order of the pipeline: a chain comes after the one that it reads
        head, found = chain.stages[0], chain
        upstream = pipeline.upstream(head) if head in chain_of else ()
        before = ending.get(upstream[0]) if len(upstream) == 1 else None
        one_chain = before is not None and {chain_of.get(name) for name in (*before.stages, *chain.stages)} == {chain_of[head]}
        if before is not None and one_chain and (only is None or head in only):
            obstacle = _obstacle(pipeline, before, chain, recorded, rescaled)
            if obstacle is None:
                del ending[before.stages[-1]]
                found = _joined(pipeline, before, chain)
            elif not _have_finished(chain, recorded):
                apart[head] = obstacle
        ending[found.stages[-1]] = found
    found_chains = tuple(ending.values())
    made = {chain.name: chain.parts for chain in found_chains if isinstance(chain, JoinedChain)}
    if made:
        metadata = msgspec.structs.replace(metadata, chains=_in_recorded_order(metadata.chains, found_chains))
    return JoinedCheckpoint(metadata, made, apart)


def missing_versions(query: QuerySnapshot) -> tuple[str, ...]:
    """The files of versions without a change that a joined query needs, and no storage holds.

    Args:
        query: the query.
    """
    newest: dict[str, tuple[int, str]] = {}
    for file in query.files:
        version = _VERSION.match(file.path)
        if version is not None and file.path.startswith("state/"):
            kind = "changelog" if version[3] in _OF_ROCKSDB else "delta"
            newest[version[1]] = max((int(version[2]), kind), newest.get(version[1], (0, "")))
    return tuple(
        f"{store}{version}.{kind}"
        for store, (last, kind) in sorted(newest.items())
        for version in range(last + 1, query.batch_id + 2)
    )


def _in_recorded_order(recorded: Sequence[ChainMetadata], found: Sequence[ChainMetadata]) -> tuple[ChainMetadata, ...]:
    by_name = {chain.name: chain for chain in found}
    return tuple(by_name[chain.name] for chain in recorded if chain.name in by_name)


def _have_finished(chain: ChainMetadata, recorded: Mapping[str, StageMetadata]) -> bool:
    return all(recorded[name].fully_finished for name in chain.stages if name in recorded)


# Whether two chains can be joined


def _obstacle(
    pipeline: Pipeline,
    first: ChainMetadata,
    second: ChainMetadata,
    recorded: Mapping[str, StageMetadata],
    rescaled: Collection[str],
) -> str | None:
    """Why two recorded chains, of which the second reads the first, cannot go on as one query; None if they can."""
    tail, head = first.stages[-1], second.stages[0]
    obstacle = chain_obstacle(pipeline, head)
    if obstacle is not None:
        return obstacle
    for chain in (first, second):
        known = [recorded[name] for name in chain.stages]
        stages = [pipeline.stage(name) for name in chain.stages]
        if isinstance(chain, ChainPart):
            return f"the query of {' -> '.join(chain.whole)} is divided in the same restore"
        if set(chain.stages) & set(rescaled):
            return "instances have changed in the same restore"
        if any(stage.finished for stage in known) or any(task.end_of_data == "drain" for task in chain.tasks.values()):
            return "some of their instances have reached the end of their data"
        if any(stage.state_partitions for stage in known) or any(stage.state_partitions for stage in stages):
            return "a stage has a number of state partitions of its own"
        if any(replaced_inputs(stage) for stage in known):
            return "stages have come or gone between them in the same restore"
        unfit = division_obstacle(chain)
        if unfit is not None:
            return unfit
    if recorded[head].inputs != recorded_inputs(pipeline)[head]:
        return f"the release that took the checkpoint did not record how {head!r} reads {tail!r}"
    if set(first.tasks) != set(second.tasks):
        return "they have other instances"
    found = (_task_obstacle(first, first.tasks[index], second, second.tasks[index]) for index in sorted(first.tasks))
    return next((each for each in found if each is not None), None)


def _task_obstacle(first: ChainMetadata, before: TaskSnapshot, second: ChainMetadata, after: TaskSnapshot) -> str | None:
    tail, head = first.stages[-1], second.stages[0]
    if any(channel.ended != "none" for channel in after.channels):
        return f"{tail!r} has reached the end of its data"
    if any(not isinstance(element, WatermarkAt) for channel in after.channels for element in channel.in_flight):
        return f"rows were on their way from {tail!r} to {head!r}: restore a savepoint, or an aligned checkpoint"
    if tail in before.stages and before.stages[tail].transactions:
        return f"the sink that {tail!r} had holds rows that were not committed"
    if after.static or after.splits or before.splits:
        return f"{head!r} waits for other inputs"
    return _query_obstacle(first, before, second, after)


def _query_obstacle(first: ChainMetadata, before: TaskSnapshot, second: ChainMetadata, after: TaskSnapshot) -> str | None:
    if before.query is None and after.query is None:
        return None
    if before.query is None:
        return f"the query of {first.name!r} has run no batch yet"
    if after.query is None:
        plans = [stage.state_plan for stage in after.stages.values()]
        return f"the query of {second.name!r}, which keeps state, has run no batch yet" if any(plans) or not plans else None
    plans = [stage.state_plan for task in (before, after) for stage in task.stages.values()]
    if None in plans or None in (before.query.sources, after.query.sources):
        return "the release that took the checkpoint did not record their plans"
    for chain, task in ((first, before), (second, after)):
        if any(operator_counts(task, chain.stages)) and not any(_OPERATOR.match(file.path) for file in _files(task)):
            return f"Spark keeps no state of {' -> '.join(chain.stages)}"
    if any(ENCODED_AS_AVRO in text for stage in after.stages.values() for text in stage.state_plan or ()):
        # In Avro, a key that may be NULL is written in another form, and columns of a channel may be NULL.
        return f"the state of {' -> '.join(second.stages)} is encoded as Avro"
    query = _joined_query(before.query, after.query, sum(operator_counts(after, second.stages)), reads_channels=False)
    state = [file for file in query.files if _OPERATOR.match(file.path)]
    if state and not any(_VERSION.match(file.path) for file in state):
        return "their state is in stores whose files have no known names"
    if len(missing_versions(query)) > MOST_EMPTY_VERSIONS:
        return "their queries have run very different numbers of batches, and their state was not written as a whole yet"
    return None


def _files(task: TaskSnapshot) -> tuple[StateFile, ...]:
    return task.query.files if task.query is not None else ()


# The chain that two become


def _joined(pipeline: Pipeline, first: ChainMetadata, second: ChainMetadata) -> JoinedChain:
    stages = (*first.stages, *second.stages)
    parts = tuple(part for chain in (first, second) for part in (chain.parts if isinstance(chain, JoinedChain) else (chain,)))
    reads_channels = bool(pipeline.upstream(first.name))
    tasks = {
        index: _joined_task(task, second.tasks[index], second.stages, reads_channels=reads_channels)
        for index, task in first.tasks.items()
    }
    return JoinedChain(first.name, stages, tasks, parts=parts)


def _joined_task(first: TaskSnapshot, second: TaskSnapshot, stages: Sequence[str], *, reads_channels: bool) -> TaskSnapshot:
    query = first.query
    if first.query is not None:
        later = second.query if second.query is not None else QuerySnapshot(-1)
        query = _joined_query(first.query, later, sum(operator_counts(second, stages)), reads_channels=reads_channels)
    return msgspec.structs.replace(
        first,
        stages={**first.stages, **second.stages},
        query=query,
        watermark=second.watermark,
        output_positions=second.output_positions,
    )


def _joined_query(first: QuerySnapshot, second: QuerySnapshot, operators: int, *, reads_channels: bool) -> QuerySnapshot:
    """The query that two become: it has the logs and sources of the first one.

    Args:
        first: the query that reads what the joined one reads.
        second: the query that reads the first one; it may have run no batch.
        operators: number of the second query's operators, which keep their numbers.
        reads_channels: whether the first query reads channels: they begin at the positions of the checkpoint, not of its log.
    """
    batch_id = max(first.batch_id, second.batch_id)
    files = _later_logs([file for file in first.files if _OPERATOR.match(file.path) is None], batch_id - first.batch_id)
    for query, behind in ((first, operators), (second, 0)):
        state = [file for file in query.files if _OPERATOR.match(file.path)]
        whole = {version[1] for file in state if (version := _VERSION.match(file.path)) and version[3] in _WHOLE}
        files += [_moved(file, behind, batch_id - query.batch_id, whole) for file in state]
    return QuerySnapshot(batch_id, tuple(files), first.own_watermark, () if reads_channels else first.sources)


def _later_logs(files: Sequence[StateFile], batches: int) -> list[StateFile]:
    """The files of a query besides its state, if its last batch has a later number: a batch needs the one before it, too."""
    if not batches:
        return list(files)
    entries = {(found[1], int(found[2])): file for file in files if (found := _LOG_ENTRY.match(file.path))}
    moved = [file for file in files if _LOG_ENTRY.match(file.path) is None]
    for (log, batch), file in entries.items():
        moved.append(msgspec.structs.replace(file, path=f"{log}/{batch + batches}"))
        if (log, batch - 1) not in entries and (log, batch + 1) not in entries:  # batch 0 has none before it
            moved.append(msgspec.structs.replace(file, path=f"{log}/{batch + batches - 1}"))
    return moved


def _moved(file: StateFile, operators: int, batches: int, whole: Collection[str]) -> StateFile:
    """A file of state under the number of its operator in the joined query, and of its version there.

    Args:
        file: the file.
        operators: number of operators that come in front of its own one.
        batches: number of batches that its query is behind.
        whole: the stores that begin with a whole version. Another one begins with changes to version 0, so its versions stay, and
            versions without a change follow.
    """
    path = file.path
    version = _VERSION.match(path)
    if version is not None and version[1] in whole:
        path = f"{version[1]}{int(version[2]) + batches}.{version[3]}"
    found = _OPERATOR.match(path)
    assert found is not None
    return msgspec.structs.replace(file, path=f"state/{int(found[1]) + operators}/{found[2]}")
