"""Where a simulated process starts from; mirrors `spark.job.restoring`, with the real restore validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster_checkpoints.coordination import CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, PipelineState
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import (
    ChainMetadata,
    CheckpointMetadata,
    EnumeratorState,
    OperatorState,
    RestorePlan,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
    decode,
    encode,
    recorded_inputs,
    validate_restore,
)
from simulation.channels import Snapshot
from simulation.shapes import Shape, StageSpec, name_of
from simulation.storage import Metadata, Ownership, Store, pointer_to
from simulation.violations import check

OVER = frozenset({"FINISHED", "NONE"})


class NothingToRestore(Exception):
    """The run names something that storage does not have."""


@dataclass(frozen=True)
class From:
    """What a user asks a run to start from.

    Attributes:
        what: "latest", "none", "retained" or "savepoint".
        which: of the retained ones, or of the savepoints: how many back from the newest.
        copied: the savepoint was copied elsewhere first.
        claim: it becomes the pipeline's own.
        variant: of the pipeline: other numbers of instances.
    """

    what: str = "latest"
    which: int = 0
    copied: bool = False
    claim: bool = False
    variant: int = 0


@dataclass(frozen=True)
class Restored:
    """A checkpoint that fits."""

    metadata: Metadata
    plan: RestorePlan
    location: str
    savepoint: bool
    own: bool


@dataclass(frozen=True)
class StartPoint:
    """What a run begins with."""

    restored: Restored | None
    resume: bool
    next_checkpoint_id: int
    pointer: CheckpointPointer | None = None
    claimed: bool = False
    retained: tuple[CompletedCheckpoint, ...] = ()
    passed_over: tuple[CompletedCheckpoint, ...] = ()


def choose_start(store: Store, ownership: Ownership, asked: From, shapes: Sequence[Shape], copies: int) -> StartPoint:
    """Decide what an owned pipeline starts from.

    Raises:
        NothingToRestore: there is no such thing.
        RestoreError: it does not fit.
    """
    previous = ownership.previous
    location = _location(store, ownership, asked, copies)
    if location is None:
        return StartPoint(None, False, 1)
    restored = read_restored(store, location, shapes)
    if restored.metadata.variant != asked.variant:
        check_rescaling(restored.metadata, shapes[restored.metadata.variant], shapes[asked.variant])
    metadata = restored.metadata
    chosen, own_id = metadata.checkpoint_id, previous.job.job_id
    pointer = pointer_to(chosen, location, metadata.kind, metadata.epoch, metadata.job_id)
    # What an earlier job had is no way back for the latest one.
    resume = metadata.job_id == own_id and (not restored.savepoint or restored.own)
    listed = next((p for p in store.pointers() if p.location == location), None)
    claimed = restored.savepoint and (asked.claim or (listed is not None and listed.claimed))
    kept: list[CompletedCheckpoint] = []
    later: list[CompletedCheckpoint] = []
    if resume:
        this_job = [p for p in ownership.retained if p.job_id == own_id and p.location != location]
        kept = [completed_checkpoint(p) for p in this_job if p.checkpoint_id <= chosen]
        # A savepoint that is passed over stays the user's.
        later = [completed_checkpoint(p) for p in this_job if p.checkpoint_id > chosen and p.ours]
    kept.append(CompletedCheckpoint(chosen, location) if claimed else completed_checkpoint(pointer))
    next_id = max(chosen, previous.highest_checkpoint_id if resume else 0) + 1
    return StartPoint(restored, resume, next_id, pointer, claimed, tuple(kept), tuple(later))


def job_is_over(state: PipelineState) -> bool:
    """Whether there is nothing to go on with."""
    return state.job.status in OVER and state.job.ended_by != "suspend"


def _location(store: Store, ownership: Ownership, asked: From, copies: int) -> str | None:
    previous = ownership.previous
    if asked.what == "none":
        return None
    if asked.what == "latest":
        newest = previous.newest
        return None if newest is None or job_is_over(previous) else newest.location
    if asked.what == "retained":
        # One that was deleted may still be listed, if a process died just then.
        retained = [p for p in ownership.retained if p.location in store.metadata or p.location in store.savepoints]
        newest = previous.newest
        # What a job went back behind, or what a new one began in spite of, lost its uncommitted transactions then.
        retained = [p for p in retained if p.job_id == previous.job.job_id]
        retained = [p for p in retained if newest is None or p.checkpoint_id <= newest.checkpoint_id]
        if asked.which >= len(retained):
            raise NothingToRestore
        return retained[asked.which].location
    found = [s for s in store.savepoints.values() if s.own and s.metadata is not None and not s.deleted]
    if asked.which >= len(found):
        raise NothingToRestore
    savepoint = found[-1 - asked.which]
    return store.copy_savepoint(savepoint.location, copies) if asked.copied else savepoint.location


def completed_checkpoint(pointer: CheckpointPointer) -> CompletedCheckpoint:
    """What the coordinator is to know of a checkpoint that the state names."""
    properties = CheckpointProperties() if pointer.ours else CheckpointProperties.for_savepoint(stops_job=True)
    return CompletedCheckpoint(pointer.checkpoint_id, pointer.location, properties)


def check_rescaling(metadata: Metadata, before: Shape, after: Shape) -> None:
    """Records in flight and finished instances belong to the channels and tasks that there were.

    Raises:
        NothingToRestore: it cannot be restored with other numbers of instances.
    """
    changed = {v.name for v, w in zip(before.graph.vertices, after.graph.vertices, strict=True) if v != w}
    for task, state in metadata.states.items():
        in_flight = any(elements for _, _, elements in state.channels.values()) or any(state.output.values())
        if in_flight or (state.after_finish and task.vertex in changed):
            raise NothingToRestore
    if any(task.vertex in changed for task in metadata.finished):
        raise NothingToRestore


def read_restored(store: Store, location: str, shapes: Sequence[Shape]) -> Restored:
    """Read what lies there, and check that it fits: through the real format and the real rules."""
    metadata = store.check_whole(location)
    shape = shapes[metadata.variant]
    recorded = decode(encode(as_recorded(metadata, shape)), location)
    plan = validate_restore(shape.pipeline, recorded)
    savepoint = location in store.savepoints
    return Restored(metadata, plan, location, savepoint, savepoint and store.savepoints[location].own)


def as_recorded(metadata: Metadata, shape: Shape) -> CheckpointMetadata:
    """What the state floor is to know of the checkpoint."""
    chains, finished = [], {}
    for chain in shape.chains:
        ids = [TaskId(chain.name, index) for index in range(len(chain.instances))]
        tasks = {task.index: _recorded(metadata.states[task], shape, chain.stages) for task in ids if task in metadata.states}
        chains.append(ChainMetadata(name=chain.name, stages=chain.stages, tasks=tasks))
        finished.update(dict.fromkeys(chain.stages, tuple(task.index for task in ids if task in metadata.finished)))
    inputs = recorded_inputs(shape.pipeline)
    stages = tuple(
        StageMetadata(
            name=name_of(number),
            parallelism=spec.instances,
            instances=tuple(str(i) for i in range(spec.instances)),
            finished=finished[name_of(number)],
            fully_finished=len(finished[name_of(number)]) == spec.instances,
            enumerator=_enumerator(metadata, spec, TaskId(name_of(number), 0).vertex) if spec.enumerated else None,
            inputs=inputs[name_of(number)],
        )
        for number, spec in enumerate(shape.stages)
    )
    return CheckpointMetadata(
        pipeline=shape.pipeline.name,
        checkpoint_id=metadata.checkpoint_id,
        stages=stages,
        chains=tuple(chains),
        kind="savepoint" if metadata.kind == "savepoint" else "checkpoint",
        job_id=str(metadata.job_id),
        epoch=metadata.epoch,
    )


def _enumerator(metadata: Metadata, spec: StageSpec, vertex: str) -> EnumeratorState:
    """What the enumerator of a source's splits knows, as of what its readers had when they took their snapshots."""
    read = [s.splits for task, s in metadata.states.items() if task.vertex == vertex]
    read += [ghost.splits for task, ghost in metadata.ghosts.items() if task.vertex == vertex]
    at = {split: position for splits in read for split, position in splits}
    check(len(at) == sum(map(len, read)), f"a split of {vertex} is read twice: {read}")
    over = [split for split, position in at.items() if position >= spec.records_of(split)]
    return EnumeratorState(
        discovered=tuple(str(split) for split in range(spec.splits) if split not in at),
        assigned=tuple(str(split) for split in at if split not in over),
        finished=tuple(map(str, over)),
    )


_UNION = StageInstanceSnapshot(operator_states=(OperatorState(name="counts", kind="union"),))
_NONE = StageInstanceSnapshot()


def _recorded(snapshot: Snapshot, shape: Shape, stages: tuple[str, ...]) -> TaskSnapshot:
    kinds = {name: shape.stages[int(name[1:])].kind for name in stages}
    return TaskSnapshot(
        stages={name: _UNION if kind == "union" else _NONE for name, kind in kinds.items()},
        end_of_data="drain" if snapshot.after_finish else "none",
    )
