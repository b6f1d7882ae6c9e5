"""A simulated checkpoint whose chains a restore divides: the snapshots and tallies of its tasks, in parts.

The shipped rules say which parts there are, and what each of them knows of event time and of its channels.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import RestorePlan, TaskSnapshot
from simulation.channels import Ghost, Snapshot
from simulation.shapes import Shape, TaskSpec, name_of
from simulation.storage import Metadata
from simulation.violations import check


def keeps_layout(divided: Shape, whole: Shape) -> bool:
    """Whether a pipeline is the other one with stages that end their chains."""
    return any(spec.apart for spec in divided.stages) and not any(spec.apart for spec in whole.stages)


def in_parts(metadata: Metadata, before: Shape, after: Shape, variant: int, plan: RestorePlan) -> Metadata:
    """The checkpoint as if it had been taken with the divided chains.

    Args:
        metadata: the checkpoint.
        before: the pipeline that has taken it.
        after: the same pipeline, with stages that end their chains.
        variant: index of `after` in the variants.
        plan: the plan of the restore into `after`.
    """
    ran = {(stage, spec.id.index): spec for spec in before.tasks for stage in spec.stages}
    states: dict[TaskId, Snapshot] = {}
    ghosts: dict[TaskId, Ghost] = {}
    finished = set()
    for spec in after.tasks:
        whole = ran[spec.stages[0], spec.id.index]
        ghosts[spec.id] = _ghost(metadata.ghosts[whole.id], spec, whole)
        if whole.id in metadata.finished:
            finished.add(spec.id)
            continue
        check(spec.id in plan.tasks, "{} is a part of a chain, and is not restored", spec.id)
        states[spec.id] = _part(metadata.states[whole.id], plan.tasks[spec.id], spec, whole, ghosts[spec.id])
    return replace(metadata, variant=variant, states=states, ghosts=ghosts, finished=frozenset(finished))


def _part(state: Snapshot, planned: TaskSnapshot, spec: TaskSpec, whole: TaskSpec, ghost: Ghost) -> Snapshot:
    first, last = spec.stages[0] == whole.stages[0], spec.stages[-1] == whole.stages[-1]
    begin = whole.stages.index(spec.stages[0])
    own = [name_of(stage) for stage in spec.stages]
    check(list(planned.stages) == own, "{} is restored with the state of {}, not of {}", spec.id, list(planned.stages), own)
    known = [channel.channel for channel in planned.channels]
    check(first or not known, "{} reads a new channel, and is restored with {}", spec.id, known)
    return Snapshot(
        after_finish=planned.end_of_data == "drain",
        channels={name: state.channels[name] for name in known if name in state.channels},
        output=state.output if last else {},
        valve=planned.valve_watermark,
        event_time=state.event_time,
        watermark=planned.watermark,
        stages=state.stages[begin : begin + len(own)],
        tables=state.tables if first else {},
        transactions=state.transactions if last else (),
        contents=state.contents if first else (),
        files=state.files if first else (),
        fused=planned.fused,
        splits=state.splits if first else (),
        ghost=ghost,
    )


def _ghost(ghost: Ghost, spec: TaskSpec, whole: TaskSpec) -> Ghost:
    first, last = spec.stages[0] == whole.stages[0], spec.stages[-1] == whole.stages[-1]
    return Ghost(
        ghost.read if first else {},
        ghost.sent if last else {},
        ghost.written if last else 0,
        ghost.splits if first else (),
        {stage: counted for stage, counted in ghost.counted.items() if stage in spec.stages},
        ghost.fused if first else {},
    )
