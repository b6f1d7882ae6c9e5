"""From a shape, and perhaps a checkpoint, to tasks and channels; mirrors the runtime's deployment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.execution.elements import EndOfData, EndOfPartition
from dagster_checkpoints.execution.task_events import PinnedChannel
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import ChannelSnapshot, redistribution
from simulation.channels import Channel, Ghost, Output, Snapshot
from simulation.elements import even
from simulation.operators import Union
from simulation.shapes import Shape, name_of
from simulation.sinks import TaskSink
from simulation.task import Task
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.restoring import Restored


def deploy(process: Process, restored: Restored | None) -> set[TaskId]:
    """Make the tasks and channels of a new attempt. Returns the tasks that had finished."""
    shape = process.shape
    finished = set(restored.plan.finished) if restored is not None else set()
    states: dict[TaskId, Snapshot] = dict(restored.metadata.states) if restored is not None else {}
    process.ghosts = dict(restored.metadata.ghosts) if restored is not None else {}
    if restored is not None:
        check(
            finished == set(restored.metadata.finished), f"{finished} are restored as finished, not {restored.metadata.finished}"
        )
    buffered = process.settings.config.unaligned
    channels = [Channel(spec, buffered) for spec in shape.channels]
    process.tasks = {}
    process.enumerators = _enumerators(shape, restored)
    for number, spec in enumerate(shape.tasks):
        if spec.id in finished:
            continue
        outputs = [Output(output, [channels[c] for c in output.channels]) for output in spec.outputs]
        sink = _sink(process, spec.stages[-1], spec.id.index)
        task = Task(process, number, spec, [channels[c] for c in spec.inputs], outputs, sink)
        _restore(process, task, states, restored)
        process.tasks[spec.id] = task
    for channel_spec, channel in zip(shape.channels, channels, strict=True):
        producer, consumer = shape.tasks[channel_spec.producer].id, shape.tasks[channel_spec.consumer].id
        if consumer in states:
            saved = states[consumer].channels.get(channel.name)
            if saved is not None:
                channel.queue.extend(saved.in_flight)
        if producer in states:
            channel.queue.extend(states[producer].output.get(channel.name, ()))
        if producer in finished:
            channel.queue.extend([EndOfData(True), EndOfPartition()])
    if restored is not None:
        if process.world.shapes[restored.metadata.variant] is not shape:
            process.count("rescalings")
        _check_unions(process, restored)
    _begin_sinks(process, restored)
    return finished


def _enumerators(shape: Shape, restored: Restored | None) -> dict[int, deque[int]]:
    """By source stage whose splits are assigned one after the other: those that nobody reads yet."""
    enumerated = [number for number, spec in enumerate(shape.stages) if spec.enumerated]
    if restored is None:
        return {number: deque(range(shape.stages[number].splits)) for number in enumerated}
    known = restored.plan.enumerators
    return {n: deque(map(int, known[name_of(n)].discovered)) for n in enumerated if name_of(n) in known}


def _check_unions(process: Process, restored: Restored) -> None:
    """Whoever is restored with union list state gets all of it, also what finished instances had."""
    held: dict[int, int] = {}
    for ghost in (*restored.metadata.ghosts.values(), *(state.ghost for state in states_of(restored))):
        for stage, counted in ghost.counted.items():
            held[stage] = held.get(stage, 0) + counted
    found: dict[int, int] = {}
    for task in process.tasks.values():
        for op in task.operators:
            if isinstance(op, Union):
                found[op.number] = found.get(op.number, 0) + op.held
    for stage, counted in found.items():
        check(counted == held[stage], f"stage {stage} is restored with {counted} of {held[stage]} in its union list state")


def states_of(restored: Restored) -> list[Snapshot]:
    return list(restored.metadata.states.values())


def _begin_sinks(process: Process, restored: Restored | None) -> None:
    """What every task needs to know to open its sink."""
    ownership = process.ownership
    assert ownership is not None
    chosen = restored.plan.checkpoint_id if restored is not None else 0
    later = restored is not None and ownership.steps.has_later(chosen)
    for task in process.tasks.values():
        task.new_start = restored is None
        task.take_back_after = chosen if later else None


def _sink(process: Process, stage: int, index: int) -> TaskSink | None:
    spec = process.shape.stages[stage]
    if not spec.sink:
        return None
    attempt = f"{process.number}.{process.attempt}"
    return TaskSink(process.world.sinks[stage], process.job_id, index, spec.instances, attempt, process.epoch)


def _restore(process: Process, task: Task, states: dict[TaskId, Snapshot], restored: Restored | None) -> None:
    spec = process.shape.stages[task.head]
    if restored is None:
        if task.source and not spec.enumerated:
            task.splits = [[split, 0] for split in even(spec.splits, spec.instances, task.id.index)]
    else:
        before = process.world.shapes[restored.metadata.variant]
        instances = before.stages[task.head].instances
        siblings = [states.get(TaskId(task.id.vertex, index)) for index in range(instances)]
        mine = states.get(task.id) if instances == spec.instances else _rescaled(task, siblings, spec.instances)
        if mine is not None and before is not process.shape:
            mine = _with_other_instances(mine, siblings, before, process.shape)
        if mine is not None:
            task.restore(mine, mine.splits, [[s and s.stages[n] for s in siblings] for n in range(len(task.operators))])
    if task.source == "unbounded" and (name_of(task.head), str(task.id.index)) in process.ended_sources:
        task.source = "bounded"


def _with_other_instances(snapshot: Snapshot, siblings: Sequence[Snapshot | None], before: Shape, after: Shape) -> Snapshot:
    """In a job with other numbers of instances somewhere: rows come by other ways, so a task must not know more of event
    time than every instance of its stage did. A channel's end belongs to its producer."""
    changed = {name_of(n) for n, (a, b) in enumerate(zip(before.stages, after.stages, strict=True)) if a.instances != b.instances}
    kept = copy(snapshot)
    kept.channels = {
        name: PinnedChannel(ChannelSnapshot(name, 0, ended=pinned.snapshot.ended), pinned.in_flight)
        for name, pinned in snapshot.channels.items()
        if name.partition("[")[0] not in changed
    }
    kept.valve = _least(s.valve for s in siblings if s is not None)
    kept.event_time = _least(s.event_time for s in siblings if s is not None)
    return kept


def _rescaled(task: Task, siblings: Sequence[Snapshot | None], parallelism: int) -> Snapshot:
    """What an instance is restored from when there are more or fewer of them than in the checkpoint."""
    index = task.id.index
    states = [s for s in siblings if s is not None]
    made = Snapshot()
    lists: list[dict[str, Sequence[Any]]] = [{"splits": s.splits, "transactions": s.transactions} for s in states]
    share = redistribution.redistribute_lists(lists, parallelism)[index]
    made.splits = tuple(share.get("splits", ()))
    made.transactions = tuple(share.get("transactions", ()))
    task.others = tuple(t for s in states for t in s.transactions)
    made.with_rows = {name: rows for s in states for name, rows in s.with_rows.items()}
    made.valve = _least(s.valve for s in states)
    made.event_time = _least(s.event_time for s in states)
    made.tables = dict(states[0].tables)
    made.held_in_tables = dict(states[0].held_in_tables)
    ended = {name.partition("->")[0] for s in states for name, pinned in s.channels.items() if pinned.snapshot.ended == "drain"}
    for channel in task.inputs:
        if channel.static and channel.name.partition("->")[0] in ended:
            made.channels[channel.name] = PinnedChannel(ChannelSnapshot(channel.name, 0, ended="drain"))
    static = {c.edge for c in task.inputs if c.static}
    tables = {edge: pair for edge, pair in states[0].ghost.read.items() if edge in static}
    if index == 0:
        made.ghost = Ghost(
            {**_added([s.ghost.read for s in states]), **tables},
            _added([s.ghost.sent for s in states]),
            _sum([s.ghost.written for s in states]),
            (),
            {},
        )
    else:
        made.ghost = Ghost(tables, {}, (0, 0), (), {})
    return made


def _least(watermarks: Iterable[int | None]) -> int | None:
    """The earliest of several instances; None if one of them has none: all that it gets is still to come."""
    earliest: int | None = None
    for watermark in watermarks:
        if watermark is None:
            return None
        earliest = watermark if earliest is None else min(earliest, watermark)
    return earliest


def _added(pairs: Sequence[dict[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    return {edge: _sum([p.get(edge, (0, 0)) for p in pairs]) for edge in {edge for p in pairs for edge in p}}


def _sum(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(count for count, _ in pairs), sum(total for _, total in pairs)
