"""From a shape, and perhaps a checkpoint, to tasks and channels; mirrors `spark.deployment` and `spark.wiring`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import TaskId
from simulation.elements import END_OF_DATA, END_OF_PARTITION, even
from simulation.sinks import TaskSink
from simulation.task import Channel, Output, Snapshot, Task
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.restoring import Restored, StartPoint

_NOTHING: tuple[tuple[int, int], ...] = ()


def deploy(process: Process, restored: Restored | None, start: StartPoint | None) -> None:
    """Make the tasks and channels of a new attempt. Tasks begin when the world lets them."""
    shape = process.shape
    finished = set(restored.plan.finished) if restored is not None else set()
    states: dict[TaskId, Snapshot] = dict(restored.metadata.states) if restored is not None else {}
    process.finished = finished
    process.ghosts = dict(restored.metadata.ghosts) if restored is not None else {}
    if restored is not None:
        check(
            finished == set(restored.metadata.finished), f"{finished} are restored as finished, not {restored.metadata.finished}"
        )
    buffered = process.settings.barriers in ("unaligned", "timeout")
    channels = [Channel(n, spec.name, spec.edge, spec.static, buffered) for n, spec in enumerate(shape.channels)]
    process.tasks = {}
    for number, spec in enumerate(shape.tasks):
        if spec.id in finished:
            continue
        outputs = []
        for output in spec.outputs:
            to = [channels[c] for c in output.channels]
            outputs.append(Output(output, to))
        task = Task(
            process, number, spec, [channels[c] for c in spec.inputs], outputs, _sink(process, spec.stages[-1], spec.id.index)
        )
        _restore(process, task, states, restored)
        process.tasks[spec.id] = task
    for channel_spec, channel in zip(shape.channels, channels, strict=True):
        producer, consumer = shape.tasks[channel_spec.producer].id, shape.tasks[channel_spec.consumer].id
        if consumer in states:
            saved = states[consumer].channels.get(channel.name)
            if saved is not None:
                channel.queue.extend(saved[2])
        if producer in states:
            channel.queue.extend(states[producer].output.get(channel.name, ()))
        if producer in finished:
            channel.queue.extend([(END_OF_DATA, True), (END_OF_PARTITION,)])
    process.running = list(process.tasks.values())
    if start is not None:
        _begin_sinks(process, restored)


def _begin_sinks(process: Process, restored: Restored | None) -> None:
    """What every task needs to know to open its sink."""
    ownership = process.ownership
    assert ownership is not None
    chosen = restored.plan.checkpoint_id if restored is not None else 0
    later = restored is not None and ownership.state.highest_checkpoint_id > chosen
    for task in process.running:
        task.new_start = restored is None
        task.take_back_after = chosen if later else None


def _sink(process: Process, stage: int, index: int) -> TaskSink | None:
    spec = process.shape.stages[stage]
    if not spec.sink:
        return None
    attempt = f"{process.number}.{process.attempt}"
    return TaskSink(process.world.sinks[stage], process.job_id, index, spec.instances, attempt)


def _restore(process: Process, task: Task, states: dict[TaskId, Snapshot], restored: Restored | None) -> None:
    if restored is None:
        if task.source:
            spec = process.shape.stages[task.head]
            task.splits = [[split, 0] for split in even(spec.instances, spec.instances, task.id.index)]
    elif task.id in states:
        mine = states[task.id]
        siblings = [states[t] for t in states if t.vertex == task.id.vertex]
        unioned = [op.spec.kind == "union" for op in task.operators]
        stages = [[s.stages[n] for s in siblings] if unioned[n] else [mine.stages[n]] for n in range(len(task.operators))]
        task.restore(mine, mine.splits, stages)
    if task.source == "unbounded" and task.head in process.ended_sources:
        task.source = "bounded"
