"""The start of a simulated process: the start that users request, reading checkpoints, and the tasks made from one.

The shipped code chooses the checkpoint, and plans the attempt; `deploy` performs the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.attempt_plan import AttemptPlan, TaskPlan, plan_attempt
from dagster_checkpoints.execution.input_channel import first_elements
from dagster_checkpoints.execution.start_point import NothingToRestoreError
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import rescaled_instances
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.fitted_checkpoint import SettledInstance
from dagster_checkpoints.state.metadata import CheckpointMetadata, StageMetadata
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.recording import ended_sources, recorded_chains, recorded_enumerators, recorded_stages
from dagster_checkpoints.state.rescaled_instances import with_known_instances
from dagster_checkpoints.state.restore import RestorePlan, validate_restore
from dagster_checkpoints.state.stage_names import with_uids
from simulation.channels import Channel, Ghost, Snapshot, total
from simulation.divisions import in_parts, keeps_layout
from simulation.fused_task import FusedTask
from simulation.rescalings import last_commit, recorded_task, transactions, with_instances
from simulation.shapes import Shape, StageSpec, TaskSpec, number_of, with_instances_of
from simulation.sinks import TaskSink
from simulation.storage import Metadata, Store
from simulation.task import Task
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process


class RequestedStart(msgspec.Struct, frozen=True):
    """The start that a user requests: the settings of the run configuration.

    Attributes:
        restore_from: "latest", "none", "retained" or "savepoint"; a location instead of the last two when storage was read.
        which: index in the retained checkpoints, or in the savepoints, newest first.
        copied: whether the savepoint is copied elsewhere first.
        claim: whether the pipeline becomes the owner of the savepoint.
        variant: index of the variant of the pipeline.
        burst: whether the run is a burst.
        allow_older_checkpoint: whether older ones are tried; no simulated user allows it.
    """

    restore_from: str = "latest"
    which: int = 0
    copied: bool = False
    claim: bool = False
    variant: int = 0
    burst: bool = False
    allow_older_checkpoint: bool = False

    @property
    def claim_mode(self) -> ClaimMode:
        return ClaimMode.CLAIM if self.claim else ClaimMode.NO_CLAIM


@dataclass(frozen=True)
class Restored:
    """A checkpoint that fits the pipeline."""

    metadata: Metadata
    plan: RestorePlan
    location: str


StartPoint = start_point.StartPoint[Restored]
RestorableCheckpoint = start_point.RestorableCheckpoint[Restored]


def start_options(process: Process) -> RequestedStart:
    """The request of a process, with the location of the checkpoint or savepoint that it stands for.

    Raises:
        NothingToRestoreError: the requested checkpoint or savepoint does not exist.
    """
    requested, store = process.requested_start, process.store
    restore_from = requested.restore_from
    if restore_from in ("retained", "savepoint"):
        found = _retained(process) if restore_from == "retained" else _savepoints(store)
        if requested.which >= len(found):
            raise NothingToRestoreError("storage holds fewer of them")
        restore_from = found[requested.which]
    if requested.copied:
        restore_from = store.copy_savepoint(restore_from, process.number)
    return msgspec.structs.replace(requested, restore_from=restore_from)


def _savepoints(store: Store) -> list[str]:
    """The savepoints that a user may restore, newest first."""
    own = [at for at in reversed(store.below("savepoints/")) if at not in store.abandoned]
    # One that was swept while its owner completed it has metadata without files; no user was told that it is complete.
    return [at for at in own if (found := store.metadata(at)) and (at in store.reported or not store.missing_files(at, found))]


def _retained(process: Process) -> list[str]:
    """The retained checkpoints that a user may restore, newest first; after a loss of the state, all that there are."""
    store, owner = process.store, process.owner
    if owner.unlisted.checkpoints:
        return [each.location for each in owner.unlisted.newest_first]
    # A deleted one may still be listed if a process crashed in between.
    retained = [p for p in owner.retained if p.job_id == owner.previous.job.job_id and store.metadata(p.location) is not None]
    newest = owner.previous.newest.checkpoint_id if owner.previous.newest is not None else 0
    # Sinks may have discarded the transactions of one that was passed over, and refuse it then.
    lost = [bool(process.world.lost_transactions(store.check_complete(p.location))) for p in retained]
    return [p.location for p, gone in zip(retained, lost, strict=True) if p.checkpoint_id <= newest or not gone]


def read_restored(
    store: Store, location: str, shapes: Sequence[Shape], variant: int, most_instances: Mapping[str, int] = MappingProxyType({})
) -> Restored:
    """Read a checkpoint or savepoint through the shipped format, and check that it fits by the shipped rules."""
    metadata = store.check_complete(location)
    before = shapes[metadata.variant]
    stored = encode(with_known_instances(with_uids(as_recorded(metadata, before), before.pipeline), most_instances))
    shape = shapes[variant]
    if keeps_layout(before, shape):  # the user has taken a division back: the chains stay divided
        return Restored(metadata, validate_restore(before.pipeline, decode(stored, location)), location)
    plan = validate_restore(shape.pipeline, decode(stored, location))
    if keeps_layout(shape, before):
        same = with_instances_of(shape, before)
        of_same = plan if same is shape else validate_restore(same.pipeline, decode(stored, location))
        metadata, before = in_parts(metadata, before, same, variant, of_same), same
    if shape is not before:
        metadata = with_instances(metadata, before, shape, variant, plan)
    return Restored(metadata, plan, location)


def as_recorded(metadata: Metadata, shape: Shape) -> CheckpointMetadata:
    states = metadata.states
    overtaken = {name: elements for state in states.values() for name, elements in state.output.items()}
    snapshots = {spec.id: recorded_task(states[spec.id], shape, spec, overtaken) for spec in shape.tasks if spec.id in states}
    enumerators = recorded_enumerators(metadata.enumerators, snapshots)
    ended = ended_sources(snapshots.values())
    groups = {stage.name: stage.state_partitions for stage in shape.pipeline.stages if stage.state_partitions}
    stages = recorded_stages(shape.pipeline, shape.chains, metadata.finished, ended, groups, enumerators, metadata.ending)
    for stage, spec in zip(stages, shape.stages, strict=True):
        _check_enumerator(stage, spec, metadata)
    return CheckpointMetadata(
        pipeline=shape.pipeline.name,
        checkpoint_id=metadata.pointer.checkpoint_id,
        stages=tuple(msgspec.structs.replace(s, most_instances=metadata.most_instances.get(s.name, 0)) for s in stages),
        chains=recorded_chains(shape.chains, snapshots),
        kind="savepoint" if metadata.pointer.kind == "savepoint" else "checkpoint",
        job_id=str(metadata.pointer.job_id),
        epoch=metadata.pointer.epoch,
    )


def _check_enumerator(stage: StageMetadata, spec: StageSpec, metadata: Metadata) -> None:
    """What a split source's enumerator says is what its instances have read: every split once, and finished ones to their end."""
    if not spec.enumerated:
        return
    read = [ghost.splits for task, ghost in metadata.ghosts.items() if task.vertex == stage.name]
    at = {split: position for splits in read for split, position in splits}
    check(len(at) == sum(map(len, read)), f"a split of {stage.name} is read twice: {read}")
    state = stage.enumerator
    check(state is not None, "the enumerator of {} is not in checkpoint {}", stage.name, metadata.pointer.checkpoint_id)
    assert state is not None
    unread = [split for split in map(int, state.finished) if at.get(split, -1) < spec.records_of(split)]
    check(not unread, f"splits {unread} of {stage.name} are finished and were not read to their end: {state}, {at}")
    again = [split for split in map(int, state.discovered) if split in at]
    check(not again, f"splits {again} of {stage.name} were read and are to be assigned: {state}, {at}")


def deploy(process: Process) -> AttemptPlan:
    """Make the tasks and channels of a new attempt, or of those that restart. Returns the plan of the attempt."""
    shape, restored, vertices, owner = process.shape, process.restored, process.restarted, process.owner
    restored_id = restored.plan.checkpoint_id if restored is not None else 0
    plan = plan_attempt(
        shape.pipeline,
        restored.plan if restored is not None else None,
        vertices=vertices,
        ended_sources=process.ended_sources,
        has_later=owner.has_later(restored_id),
        next_checkpoint_id=owner.first_id_after(restored_id),
    )
    states: Mapping[TaskId, Snapshot] = {}
    process.drop_tasks(vertices)
    ghosts: Mapping[TaskId, Ghost] = {}
    if restored is not None:
        finished, states = restored.metadata.finished, restored.metadata.states
        check(plan.finished == finished, "{} are restored as finished, not {}", plan.finished, finished)
        ghosts = {task: restored.metadata.ghosts[task] for task in finished}
    process.ghosts = {task: ghost for task, ghost in process.ghosts.items() if task.vertex not in vertices}
    process.ghosts |= {task: ghost for task, ghost in ghosts.items() if task.vertex in vertices}
    channels = [Channel(spec, process.scenario.config.unaligned) for spec in shape.channels]
    for number, spec in enumerate(shape.tasks):
        if spec.id in plan.tasks:
            process.tasks[spec.id] = _task(process, number, spec, channels, plan.tasks[spec.id])
    for of, channel in zip(shape.channels, channels, strict=True):
        sender, reader = states.get(of.producer), states.get(of.consumer)
        pinned = reader and reader.channels.get(of.name)
        overtaken = sender.output.get(of.name, ()) if sender else ()
        channel.queue.extend(first_elements(pinned.in_flight if pinned else (), of.producer in plan.finished, overtaken))
    if restored is not None:
        # Stages get all union list state of the checkpoint, also that of finished instances.
        held = total(ghost.counted for ghost in restored.metadata.ghosts.values())
        made = [task for task in process.tasks.values() if task.id.vertex in vertices]
        for stage, counted in total(task.ghost().counted for task in made).items():
            check(counted == held[stage], "stage {} is restored with {} of {} rows in union state", stage, counted, held[stage])
    return plan


def _task(process: Process, number: int, spec: TaskSpec, channels: Sequence[Channel], planned: TaskPlan) -> Task:
    id, shape, restored, mine = spec.id, process.shape, process.restored, None
    siblings: list[Snapshot | None] = []
    head, tail = shape.stages[spec.stages[0]], shape.stages[spec.stages[-1]]
    if restored is not None:
        states = restored.metadata.states
        siblings = [states.get(TaskId(id.vertex, index)) for index in range(head.instances)]
        mine = states[id]
    task = (FusedTask if planned.fused else Task)(process, number, channels, mine, planned)
    if tail.sink:
        texts, system = planned.transactions, process.world.sinks[spec.stages[-1]]
        pending, committed = None if texts is None else transactions(texts), last_commit(planned.committed)
        scope = system.new_attempt(process.job_id, id.index, tail.instances, process.epoch, committed=committed)
        task.sink = TaskSink(system, scope, pending, planned.take_back_after)
    if mine is not None:
        task.restore(mine, [[s and s.stages[n] for s in siblings] for n in range(len(spec.stages))])
    elif head.is_source and not head.enumerated and not planned.fused:
        dealt_out = rescaled_instances.redistribute_lists([{"splits": range(head.splits)}], head.instances)
        for split in dealt_out[id.index]["splits"]:
            task.assign(split, 0)
    if planned.bounded and not planned.fused:  # behind the restore: until then it had not been asked to end
        task.source = "bounded"
    return task


def settled_sinks(process: Process, plan: AttemptPlan) -> list[TaskSink]:
    """The sinks that show exactly the rows of the restored checkpoint before tasks start."""
    return [_settled(process, of, plan) for instances in plan.settled.values() for of in instances]


def _settled(process: Process, of: SettledInstance, plan: AttemptPlan) -> TaskSink:
    system, committed = process.world.sinks[number_of(of.stage)], last_commit(of.snapshot.committed)
    scope = system.new_attempt(process.job_id, of.index, of.parallelism, process.epoch, committed=committed)
    return TaskSink(system, scope, transactions(of.snapshot.transactions), plan.take_back_after)
