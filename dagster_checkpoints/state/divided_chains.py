"""A recorded chain whose stages cannot run as one query any more, divided into chains that can; or refused.

A stage inside a chain gets another reader or a sink, or stages behind it are removed, or others are put between. At a checkpoint
the query is between two micro-batches, so nothing is on its way between its stages. The first part goes on as the query that it
was, with its offsets. Each later part becomes a query behind a new, empty channel. All parts continue with the next batch of the
recorded query; the state of an operator goes with the stage that has it.

Where fused sources meet, the query is divided in front of the stage at which they do: each source that has not ended goes on as a
query of its own, from its own offsets, with the stages behind it that pass its rows on. One that has ended is a finished stage.
The event time of each source becomes that of the new channel from it. Must not know: storage, Spark, tasks.

The stages of a chain run as one query again only if they read what they read then.

Source: Spark numbers the stateful operators of a query from its output to its inputs (`IncrementalExecution`), and keeps their
state in `state/<number>`; version n + 1 of the state belongs to batch n. It numbers the streams, too: for their offsets, and for
what a source stores in `sources/<number>`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from dagster_checkpoints.pipeline import ChannelId, EdgePattern, Pipeline, joining_obstacle, merging_stage
from dagster_checkpoints.state.errors import ChainLayoutChanged
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint, quoted
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    FusedSourceSnapshot,
    InputMetadata,
    QuerySnapshot,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_channels import least_watermark
from dagster_checkpoints.state.stages_between import ReplacedInput, replaced_inputs
from dagster_checkpoints.state.views import EdgeView

Reads = Mapping[str, list[str]]
"""By stage, the stages that it reads; sources are not in it."""


def reads_of(checkpoint: FittedCheckpoint) -> Reads:
    """The stages that each stage of the pipeline that is to run reads."""
    return {name: [edge.source for edge in edges] for name, edges in checkpoint.edges_into.items()}


def recorded_reads(checkpoint: FittedCheckpoint, chain: ChainMetadata) -> Reads:
    """What the stages of a recorded chain read of each other: as recorded up to its merging stage, then each the one in front."""
    inputs = {name: [_recorded_name(each) for each in checkpoint.recorded[name].inputs or ()] for name in chain.stages}
    merging = merging_stage(chain.stages, inputs)
    first = chain.stages.index(merging) if merging else 0
    reads = {name: inputs[name] for name in chain.stages[: first + 1] if merging and inputs[name]}
    return {**reads, **{name: [upstream] for upstream, name in pairwise(chain.stages[first:])}}


def _recorded_name(read: InputMetadata) -> str:
    return read.before if isinstance(read, ReplacedInput) else read.stage


def readers(before: Reads) -> dict[str, str]:
    """By stage of a recorded chain, the stage of the chain that reads it."""
    return {upstream: name for name, read in before.items() for upstream in read}


def changed_input(reads: Reads, before: Reads) -> tuple[str, str] | None:
    """The first stage of a chain that does not read exactly what it read there, after one of the stages that it read."""
    return next(((read[0], name) for name, read in before.items() if sorted(reads.get(name, ())) != sorted(read)), None)


def changes_inside(checkpoint: FittedCheckpoint, before: Reads) -> Iterator[tuple[str, str]]:
    """The stages of a chain that cannot run in the query of those in front any more, each with the change in words.

    Args:
        checkpoint: the checkpoint, with the pipeline that is to run.
        before: what the stages of the chain read of each other, see `recorded_reads`.
    """
    pipeline = checkpoint.pipeline
    followed_by = readers(before)
    for edge in pipeline.edges:
        if edge.source in followed_by and edge.target != followed_by[edge.source]:
            what = "reads" if edge.target in checkpoint.recorded else "is new, and reads"
            yield followed_by[edge.source], f"{edge.target!r} {what} {edge.source!r}, whose rows do not leave that query"
    for name in before:
        obstacle = joining_obstacle(pipeline, name) if isinstance(pipeline, Pipeline) else None
        if obstacle is not None:
            yield name, obstacle


_STATE = "state/"
_SOURCES = "sources/"


class ChainPart(ChainMetadata, frozen=True):
    """A part of a chain that was divided; in memory only.

    Attributes:
        whole: the stages of the recorded chain: their plan as one query shows whether the state still fits.
    """

    whole: tuple[str, ...] = ()


class QueryOfStreams(QuerySnapshot, frozen=True):
    """The part of a query with some of its streams; in memory only.

    Attributes:
        streams: the positions that these streams had among those of the recorded query, in order.
    """

    streams: tuple[int, ...] = ()


def divided(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """The checkpoint with each chain divided where the pipeline needs it, and where its state allows it; a rule."""
    reads = _reads_without_stages_between(checkpoint)
    chains: list[ChainMetadata] = []
    changes = []
    for chain in checkpoint.metadata.chains:
        begins = _beginnings(checkpoint, reads, chain)
        parts = _Division(checkpoint, chain, begins).parts() if begins and division_obstacle(chain) is None else [chain]
        chains += parts
        running = [_shown(part) for part in parts if part.tasks]
        if len(parts) > 1 and running:
            changes.append(f"the query of {_shown(chain)}, with its state, into {' and '.join(running)}")
    if len(chains) == len(checkpoint.metadata.chains):
        return None
    return checkpoint.changed("divided", changes, msgspec.structs.replace(checkpoint.metadata, chains=tuple(chains)))


def check_layouts(checkpoint: FittedCheckpoint) -> None:
    """Check that each recorded chain that goes on can run as one query; a rule, behind `divided`.

    Raises:
        ChainLayoutChanged: names the stages of the chain, the change, and the remedy.
    """
    reads, where = reads_of(checkpoint), checkpoint.where
    for chain in checkpoint.running:
        layout, obstacle, missing = _shown(chain), division_obstacle(chain), _missing_stages(checkpoint, chain)
        if missing:
            because = f" ({obstacle})" if obstacle else ""
            raise ChainLayoutChanged(
                f"In {where} the stages {layout} run as one Spark query, whose state belongs to all of them; {quoted(missing)} "
                f"is no longer in the pipeline{because}. Put it back, or start without this checkpoint. "
                "(allow_non_restored_state can only leave whole chains behind, and the last stages of a chain.)"
            )
        before = recorded_reads(checkpoint, chain)
        changed = changed_input(reads, before)
        if changed is not None:
            upstream, name = changed
            raise ChainLayoutChanged(
                f"In {where} the stages {layout} run as one Spark query, in which {name!r} reads {upstream!r} and nothing else; "
                f"now {name!r} reads {quoted(reads.get(name, ())) or 'nothing'}. Spark's state belongs to the plan of that "
                "query. Restore the stages' order, or start without this checkpoint."
            )
        for _, change in changes_inside(checkpoint, before):
            raise ChainLayoutChanged(
                f"In {where} the stages {layout} run as one Spark query; now {change}. The query's state cannot be divided for "
                f"that: {obstacle or 'a stage would read other rows'}. Take the change back, or start the pipeline without this "
                "checkpoint (restore_from: none). With Pipeline(..., chaining=False) from that start on, each stage has a query "
                "of its own."
            )


def _shown(chain: ChainMetadata) -> str:
    return " -> ".join(chain.stages)


def _missing_stages(checkpoint: FittedCheckpoint, chain: ChainMetadata) -> list[str]:
    """The stages of a chain that the pipeline does not have."""
    return [name for name in chain.stages if name not in checkpoint.instances]


def _reads_without_stages_between(checkpoint: FittedCheckpoint) -> Reads:
    """What stages read, without the stages that have come between two of the recorded ones."""
    reads = dict(reads_of(checkpoint))
    for stage in checkpoint.metadata.stages:
        replaced = replaced_inputs(stage)
        if replaced:
            reads[stage.name] = [replaced[name].origin if name in replaced else name for name in reads[stage.name]]
    return reads


def _beginnings(checkpoint: FittedCheckpoint, reads: Reads, chain: ChainMetadata) -> frozenset[str]:
    """The stages that have to begin a query of their own; empty if there are none, or if a restore refuses the change."""
    missing, whole = _missing_stages(checkpoint, chain), recorded_reads(checkpoint, chain)
    if len(missing) == len(chain.stages):
        return frozenset()
    before, recorded = _without(whole, missing), checkpoint.recorded
    begins = {name for name, _ in changes_inside(checkpoint, before)}
    followed_by = readers(before)
    read_otherwise = any(
        (edge.target in begins and recorded[edge.target].inputs is None and _distributes(edge))
        or (edge.source in followed_by and edge.target in recorded and followed_by[edge.source] != edge.target)
        for edge in checkpoint.pipeline.edges
    )
    if read_otherwise or changed_input(reads, before) is not None:
        return frozenset()
    # A removed stage, and the one behind it: the operators of the removed one are between those of the others.
    begins.update(name for upstream, name in readers(whole).items() if (upstream in missing) != (name in missing))
    return _with_meeting_stages(chain, whole, begins)


def _distributes(edge: EdgeView) -> bool:
    """Whether a stage reads another one in another way than stages of one query read each other."""
    return edge.input.mode != "stream" or edge.pattern is not EdgePattern.POINTWISE


def _without(reads: Reads, missing: Collection[str]) -> dict[str, list[str]]:
    """What the present stages read, with the inputs of the missing ones in the place of these."""

    def inputs(name: str) -> Iterator[str]:
        for upstream in reads[name]:
            yield from inputs(upstream) if upstream in missing and upstream in reads else (upstream,)

    return {name: list(inputs(name)) for name in reads if name not in missing}


def _with_meeting_stages(chain: ChainMetadata, reads: Reads, begins: Collection[str]) -> frozenset[str]:
    """The stages that begin a query, and with them those at which their rows meet others: no query has sources and channels.

    In a part whose sources have all ended, the stages behind these begin a query, too: it ends at once, behind finished stages.
    """
    found, ended = _with_meeting(chain.stages, reads, begins), chain.ended_sources
    for stages in _parts_of(chain.stages, reads, found):
        sources = [name for name in stages if name not in reads]
        if sources and ended.issuperset(sources):
            found.update(name for name in stages if not set(sources).isdisjoint(reads.get(name, ())))
    return frozenset(_with_meeting(chain.stages, reads, found)) if begins else frozenset()


def _with_meeting(stages: Sequence[str], reads: Reads, begins: Collection[str]) -> set[str]:
    found, behind_channels = set(begins), set[str]()
    for name in stages:
        read = reads.get(name, ())
        if not behind_channels.isdisjoint(read):
            behind_channels.add(name)
            if len(read) > 1:
                found.add(name)
        elif name in found:
            behind_channels.add(name)
    return found


def _parts_of(stages: Sequence[str], reads: Reads, begins: Collection[str]) -> list[tuple[str, ...]]:
    """The stages of each part of a chain, in the order of the chain.

    Args:
        stages: the stages of the chain, in order.
        reads: what they read of each other.
        begins: the stages that begin a part.
    """
    followed_by, last = readers(reads), dict[str, str]()
    for name in reversed(stages):
        after = followed_by.get(name)
        last[name] = name if after is None or after in begins else last[after]
    parts: dict[str, list[str]] = {}
    for name in stages:
        parts.setdefault(last[name], []).append(name)
    return [tuple(part) for part in parts.values()]


def division_obstacle(chain: ChainMetadata) -> str | None:
    """Why the state of a recorded chain cannot be divided among its stages; None if it can."""
    for task in chain.tasks.values():
        if task.end_of_data == "drain":
            return (
                "it has reached the end of its data, and waits for its last checkpoint. Restore with the pipeline as it was; "
                "the next checkpoint holds no state of these stages any more"
            )
        held = _operators_with_state(task)
        plans = [snapshot.state_plan for snapshot in task.stages.values()]
        if held and None in plans:
            return "the release that took the checkpoint did not record which stage keeps which state"
        stateful = sum(operator_counts(task, chain.stages))
        if held and held != set(range(stateful)):
            return f"Spark keeps the state of {len(held)} operators, and the stages have {stateful}"
    return None


class _Division:
    """A recorded chain that is divided.

    Args:
        checkpoint: the checkpoint, with the pipeline that is to run.
        chain: the chain.
        begins: the stages that begin a part.
    """

    def __init__(self, checkpoint: FittedCheckpoint, chain: ChainMetadata, begins: Collection[str]) -> None:
        self._chain = chain
        self._recorded = checkpoint.recorded
        self._reads = recorded_reads(checkpoint, chain)
        self._begins = begins
        self._merging = merging_stage(chain.stages, self._reads)
        self._edges = [e for e in checkpoint.pipeline.edges if e.source in chain.stages and e.input.mode == "stream"]
        self._uids = checkpoint.uids

    def parts(self) -> list[ChainMetadata]:
        """The parts, in the order of their first stages in the chain; a source that has ended has no task."""
        found: list[ChainMetadata] = []
        for stages in _parts_of(self._chain.stages, self._reads, self._begins):
            ended = all(self._recorded[name].fully_finished for name in stages)
            tasks = {} if ended else {index: self._task(task, stages) for index, task in self._chain.tasks.items()}
            found.append(ChainPart(stages[0], stages, tasks, whole=self._chain.stages))
        return found

    def _task(self, task: TaskSnapshot, stages: tuple[str, ...]) -> TaskSnapshot:
        """The part of a task with some of its stages."""
        whole, state = self._chain.stages, self._state(task, stages)
        own = {name: task.stages[name] for name in stages if name in task.stages}
        last = stages[-1] == whole[-1]
        # The others have sent nothing over channels yet.
        watermark, sent = (task.watermark, task.output_positions) if last else (None, {})
        if whole[0] in stages and (self._merging is None or self._merging in stages):
            query = _query(task.query, state, None)
            return msgspec.structs.replace(task, stages=own, query=query, watermark=watermark, output_positions=sent)
        fused = [source for source in task.fused if source.source in stages]
        streams = sorted(source.position for source in fused)
        return TaskSnapshot(
            stages=own,
            query=_query(task.query, state, streams),
            channels=tuple(self._channels(task, stages[0])),
            end_of_data=task.end_of_data,
            watermark=watermark,
            output_positions=sent,
            valve_watermark=task.valve_watermark if stages[0] == self._merging else None,
            fused=tuple(msgspec.structs.replace(each, position=streams.index(each.position)) for each in fused if len(fused) > 1),
        )

    def _state(self, task: TaskSnapshot, stages: Sequence[str]) -> range:
        """The numbers of the stateful operators of a part; stages behind it have lower ones."""
        whole = self._chain.stages
        counts = operator_counts(task, whole)
        behind = sum(counts[whole.index(stages[-1]) + 1 :])
        return range(behind, behind + sum(count for name, count in zip(whole, counts, strict=True) if name in stages))

    # Event time

    def _channels(self, task: TaskSnapshot, reader: str) -> Iterator[ChannelSnapshot]:
        """The new channels into a part, with the event time of the fused sources behind them.

        In front of the stage at which all sources have met, a part has no watermark yet, and so no channel is behind it.
        """
        sources = {source.source: source for source in task.fused}
        for edge in self._edges if sources else ():
            if edge.target == reader:
                name = str(ChannelId(self._uids[edge.source], 0, self._uids[reader], 0))
                if self._recorded[edge.source].fully_finished:
                    yield ChannelSnapshot(name, 0, ended="drain")
                    continue
                known = _event_time(name, [sources[each] for each in self._sources_of(edge.source)])
                yield known if reader == self._merging else msgspec.structs.replace(known, behind=False)

    def _sources_of(self, stage: str) -> list[str]:
        """The fused sources whose rows a stage passes on."""
        read = self._reads.get(stage, ())
        return [name for upstream in read for name in self._sources_of(upstream)] if read else [stage]


def _event_time(channel: str, sources: Sequence[FusedSourceSnapshot]) -> ChannelSnapshot:
    """What the reader of a new channel knows of it: the event time of the sources whose rows come over it.

    A source that is behind decides, too: its rows may still come.

    Args:
        channel: name of the channel.
        sources: the sources, as recorded.
    """
    going_on = [source for source in sources if not source.ended]
    deciding = [source for source in going_on if not source.idle] or going_on
    idle = bool(going_on) and all(source.idle for source in going_on)
    return ChannelSnapshot(
        channel,
        0,
        watermark=least_watermark(source.watermark for source in deciding),
        idle=idle,
        behind=bool(going_on) and not idle and all(source.idle or source.behind for source in going_on),
    )


def _query(query: QuerySnapshot | None, state: range, streams: Sequence[int] | None) -> QuerySnapshot | None:
    """The query of a part.

    Args:
        query: the recorded query; None before it has one.
        state: the numbers of the part's stateful operators.
        streams: the positions of the streams that the part reads on, in order; None if it reads on as before.
    """
    if query is None:
        return None
    files: list[StateFile] = []
    for file in query.files:
        number, _, path = file.path.partition("/")[2].partition("/")
        if file.path.startswith(_STATE):
            if int(number) in state:
                files.append(msgspec.structs.replace(file, path=f"{_STATE}{int(number) - state.start}/{path}"))
        elif streams is None or not file.path.startswith(_SOURCES):
            files.append(file)
        elif int(number) in streams:
            files.append(msgspec.structs.replace(file, path=f"{_SOURCES}{streams.index(int(number))}/{path}"))
    if streams is None:
        return msgspec.structs.replace(query, files=tuple(files))
    if not streams:
        return QuerySnapshot(query.batch_id, tuple(files), sources=())
    sources = tuple(query.sources[position] for position in streams) if query.sources else query.sources
    return QueryOfStreams(query.batch_id, tuple(files), query.own_watermark, sources, streams=tuple(streams))


def _operators_with_state(task: TaskSnapshot) -> set[int]:
    """The numbers of the operators whose state the task's query holds."""
    files = task.query.files if task.query is not None else ()
    return {_operator_number(file.path) for file in files if file.path.startswith(_STATE)}


def _operator_number(path: str) -> int:
    return int(path.split("/", 2)[1])


def operator_counts(task: TaskSnapshot, stages: Sequence[str]) -> list[int]:
    """By stage, the number of its stateful operators."""
    return [len(task.stages[name].operators) if name in task.stages else 0 for name in stages]
