"""A simulated checkpoint whose chains a restore divides: the snapshots and tallies of its tasks, in parts.

The shipped rules say which parts there are, and what each of them knows of event time and of its channels.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_checkpoints.execution.task_events import PinnedChannel
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.errors import ChainLayoutChanged
from dagster_checkpoints.state.metadata import TaskSnapshot
from dagster_checkpoints.state.restore import RestorePlan
from simulation.channels import Ghost, Snapshot
from simulation.shapes import Shape, TaskSpec, name_of
from simulation.storage import Metadata
from simulation.violations import check


def keeps_layout(divided: Shape, whole: Shape) -> bool:
    """Whether a pipeline is the other one with some of its chains divided."""
    return len(divided.chains) > len(whole.chains)


def in_parts(metadata: Metadata, before: Shape, after: Shape, variant: int, plan: RestorePlan) -> Metadata:
    """The checkpoint as if it had been taken with the divided chains.

    Args:
        metadata: the checkpoint.
        before: the pipeline that has taken it.
        after: the same pipeline, with some of its chains divided.
        variant: index of `after` in the variants.
        plan: the plan of the restore into `after`.

    Raises:
        ChainLayoutChanged: the chains are divided in another way, since a source has ended: a simulated pipeline cannot run so.
    """
    if not {chain.stages for chain in after.chains}.issuperset(plan.chains):
        check(any(map(_ended, metadata.states.values())), "a chain is divided into {}", plan.chains)
        raise ChainLayoutChanged(f"a source has ended, and the chains of the restore are {plan.chains}")
    ran = {(stage, spec.id.index): spec for spec in before.tasks for stage in spec.stages}
    states: dict[TaskId, Snapshot] = {}
    ghosts: dict[TaskId, Ghost] = {}
    finished = set()
    for spec in after.tasks:
        whole = ran[spec.stages[0], spec.id.index]
        ghosts[spec.id] = _ghost(metadata.ghosts[whole.id], spec, whole)
        ended = _ended(metadata.states[whole.id]) if whole.id in metadata.states else frozenset()
        if whole.id in metadata.finished or ended.issuperset(map(name_of, spec.stages)):
            finished.add(spec.id)
            continue
        check(spec.id in plan.tasks, "{} is a part of a chain, and is not restored", spec.id)
        check(spec.fused > 1 or spec.id.vertex not in ended, "{} has ended, and is read again", spec.id)
        states[spec.id] = _part(metadata.states[whole.id], plan.tasks[spec.id], spec, whole, ghosts[spec.id])
    return replace(metadata, variant=variant, states=states, ghosts=ghosts, finished=frozenset(finished))


def _ended(state: Snapshot) -> frozenset[str]:
    """The fused sources of a task that have ended."""
    return frozenset(source.source for source in state.fused if source.ended)


def _part(state: Snapshot, planned: TaskSnapshot, spec: TaskSpec, whole: TaskSpec, ghost: Ghost) -> Snapshot:
    first, last = spec.stages[0] == whole.stages[0], spec.stages[-1] == whole.stages[-1]
    own = [name_of(stage) for stage in spec.stages]
    check(list(planned.stages) == own, "{} is restored with the state of {}, not of {}", spec.id, list(planned.stages), own)
    check(len(planned.fused) == spec.fused, "{} is restored with the ends of {} sources", spec.id, len(planned.fused))
    known = {channel.channel: channel for channel in planned.channels}
    read = set(known) & set(state.channels)
    check(first or not read, "{} reads a new channel, and is restored with {}", spec.id, read)
    return Snapshot(
        after_finish=planned.end_of_data == "drain",
        channels={name: state.channels.get(name) or PinnedChannel(channel) for name, channel in known.items()},
        output=state.output if last else {},
        valve=planned.valve_watermark,
        event_time=state.event_time,
        watermark=planned.watermark,
        stages=tuple([state.stages[whole.stages.index(stage)] for stage in spec.stages]),
        tables=state.tables if first else {},
        transactions=state.transactions if last else (),
        committed=state.committed if last else None,
        contents=state.contents if first else (),
        files=state.files if first else (),
        fused=planned.fused,
        splits=state.splits if first else (),
        ghost=ghost,
    )


def _ghost(ghost: Ghost, spec: TaskSpec, whole: TaskSpec) -> Ghost:
    first, last = spec.stages[0] == whole.stages[0], spec.stages[-1] == whole.stages[-1]
    splits = {stage: read for stage, read in ghost.fused.items() if stage in spec.stages}
    return Ghost(
        ghost.read if first else {},
        ghost.sent if last else {},
        ghost.written if last else 0,
        ghost.splits if first and not ghost.fused else () if spec.fused else splits.get(spec.stages[0], ()),
        {stage: counted for stage, counted in ghost.counted.items() if stage in spec.stages},
        splits if spec.fused else {},
    )
