"""Makes tasks and channels from a shape, and perhaps a checkpoint; mirrors the runtime's deployment."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_checkpoints.execution.restored_channels import first_elements
from dagster_checkpoints.execution.task_events import PinnedChannel
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import known_channel, least_watermark, redistribution, rescaled_stages
from simulation.channels import Channel, Ghost, Snapshot
from simulation.elements import total
from simulation.shapes import Shape, TaskSpec, name_of, number_of
from simulation.sinks import TaskSink
from simulation.task import Task
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.restoring import Restored


def deploy(process: Process) -> frozenset[TaskId]:
    """Make the tasks and channels of a new attempt. Returns the tasks that had finished."""
    shape, restored = process.shape, process.restored
    finished: frozenset[TaskId] = frozenset()
    states: Mapping[TaskId, Snapshot] = {}
    process.drop_tasks()
    process.ghosts, process.enumerators = {}, _enumerators(shape, restored)
    if restored is not None:
        finished, states = restored.metadata.finished, restored.metadata.states
        found = restored.plan.finished
        check(found == finished, "{} are restored as finished, not {}", found, finished)
        process.ghosts = {task: restored.metadata.ghosts[task] for task in finished}
        process.world.counts["rescalings"] += restored.metadata.variant != process.requested_start.variant
    channels = [Channel(spec, process.scenario.config.unaligned) for spec in shape.channels]
    for number, spec in enumerate(shape.tasks):
        if spec.id not in finished:
            process.tasks[spec.id] = _task(process, number, spec, channels)
    for of, channel in zip(shape.channels, channels, strict=True):
        sender, reader = states.get(of.producer), states.get(of.consumer)
        pinned = reader and reader.channels.get(of.name)
        overtaken = sender.output.get(of.name, ()) if sender else ()
        channel.queue.extend(first_elements(pinned.in_flight if pinned else (), of.producer in finished, overtaken))
    if restored is not None:
        # Stages get all union list state of the checkpoint, also that of finished instances.
        held = total(ghost.counted for ghost in restored.metadata.ghosts.values())
        for stage, counted in total(task.ghost().counted for task in process.tasks.values()).items():
            check(
                counted == held[stage], "stage {} is restored with {} of {} in its union list state", stage, counted, held[stage]
            )
    return finished


def _task(process: Process, number: int, spec: TaskSpec, channels: Sequence[Channel]) -> Task:
    id, shape, restored, mine = spec.id, process.shape, process.restored, None
    siblings: list[Snapshot | None] = []
    head, tail = shape.stages[spec.stages[0]], shape.stages[spec.stages[-1]]
    if restored is not None:
        before, states = process.world.shapes[restored.metadata.variant], restored.metadata.states
        siblings = [states.get(TaskId(id.vertex, index)) for index in range(before.stages[spec.stages[0]].instances)]
        mine = states[id] if before is shape else _rescaled(spec, siblings, before, shape)
    task = Task(process, number, channels, mine)
    if tail.sink:
        task.sink = _sink(process, spec.stages[-1], id.index, mine, siblings)
    if mine is not None:
        task.restore(mine, [[s and s.stages[n] for s in siblings] for n in range(len(spec.stages))])
    elif head.is_source and not head.enumerated:
        dealt_out = redistribution.redistribute_lists([{"splits": range(head.splits)}], head.instances)
        for split in dealt_out[id.index]["splits"]:
            task.assign(split, 0)
    if task.source == "unbounded" and (name_of(task.head), str(id.index)) in process.ended_sources:
        task.source = "bounded"
    return task


def _sink(process: Process, stage: int, index: int, mine: Snapshot | None, siblings: Sequence[Snapshot | None]) -> TaskSink:
    """The sink of an instance, with the values that opening it needs."""
    restored = process.restored
    later = restored is not None and process.owner.has_later(restored.plan.checkpoint_id)
    return TaskSink(
        process.world.sinks[stage],
        process.job_id,
        index,
        process.shape.stages[stage].instances,
        process.epoch,
        None if mine is None else mine.transactions,
        restored.plan.checkpoint_id if restored is not None and later else None,
        {} if mine is None else mine.with_rows,
        [t for s in siblings if s is not None for t in s.transactions],
    )


def _enumerators(shape: Shape, restored: Restored | None) -> dict[int, deque[int]]:
    """By source stage whose splits are assigned one at a time: the splits that are not assigned yet."""
    if restored is None:
        return {number: deque(range(spec.splits)) for number, spec in enumerate(shape.stages) if spec.enumerated}
    return {number_of(name): deque(map(int, state.discovered)) for name, state in restored.plan.enumerators.items()}


def _rescaled(spec: TaskSpec, siblings: Sequence[Snapshot | None], before: Shape, after: Shape) -> Snapshot:
    """The snapshot that a task is restored with when its own stage or others were rescaled."""
    states = [s for s in siblings if s is not None]
    rescaled = rescaled_stages(before.pipeline.stages, after.pipeline.stages)
    held = [{} if s is None else {name: pinned.snapshot for name, pinned in s.channels.items()} for s in siblings]
    known = [known_channel(c.id, c.static, held, rescaled) for c in (after.channels[n] for n in spec.inputs)]
    own = siblings[spec.id.index] if spec.id.vertex not in rescaled else _share(spec, states, after)
    assert own is not None
    return msgspec.structs.replace(
        own,
        channels={channel.channel: PinnedChannel(channel) for channel in known if channel is not None},
        valve=least_watermark(s.valve for s in states),
        event_time=least_watermark(s.event_time for s in states),
    )


def _share(spec: TaskSpec, states: Sequence[Snapshot], after: Shape) -> Snapshot:
    """The part of an instance whose own stage was rescaled."""
    lists: list[dict[str, Sequence[Any]]] = [{"splits": s.ghost.splits, "transactions": s.transactions} for s in states]
    share = redistribution.redistribute_lists(lists, after.stages[spec.stages[0]].instances)[spec.id.index]
    ghosts = [s.ghost for s in states] if spec.id.index == 0 else []
    read, sent = total(ghost.read for ghost in ghosts), total(ghost.sent for ghost in ghosts)
    whole_tables = {edge: states[0].ghost.read.get(edge, 0) for edge in states[0].tables}
    return Snapshot(
        tables=states[0].tables,
        transactions=tuple(share.get("transactions", ())),
        with_rows={name: rows for s in states for name, rows in s.with_rows.items()},
        ghost=Ghost({**read, **whole_tables}, sent, sum(ghost.written for ghost in ghosts), tuple(share.get("splits", ())), {}),
    )
