"""What a simulated process starts from: what users ask for, and how checkpoints are read; the choice is the shipped one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer
from dagster_checkpoints.execution.start_point import NothingToRestoreError
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state import (
    ChainMetadata,
    CheckpointMetadata,
    ClaimMode,
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
from dagster_checkpoints.storage import SharedStateRegistry
from simulation.channels import Snapshot
from simulation.shapes import Shape, StageSpec, name_of
from simulation.storage import LONG_AGO, Metadata, Store, is_savepoint
from simulation.violations import check

T = TypeVar("T")


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


StartPoint = start_point.StartPoint[Restored]


@dataclass(frozen=True)
class StartOptions:
    """What the run configuration says of the start."""

    restore_from: str
    claim_mode: ClaimMode
    allow_older_checkpoint: bool = False


def options(store: Store, ownership: OwnershipSteps, asked: From, copies: int) -> StartOptions:
    """What a user writes who means what `asked` says.

    Raises:
        NothingToRestoreError: there is no such thing.
    """
    restore_from = asked.what
    if asked.what == "retained":
        restore_from = nth(_useful(store, ownership), asked.which).location
    elif asked.what == "savepoint":
        own = [f"savepoints/{name}" for name in store.names("savepoints/")]
        found = [
            (m.checkpoint_id, m.epoch, location)
            for location in own
            if (m := store.metadata(location)) and location not in store.given_up
        ]
        location = nth(sorted(found)[::-1], asked.which)[2]
        restore_from = store.copy_savepoint(location, copies) if asked.copied else location
    return StartOptions(restore_from, ClaimMode.CLAIM if asked.claim else ClaimMode.NO_CLAIM)


def nth(found: Sequence[T], which: int) -> T:
    """One of what there is."""
    if which >= len(found):
        raise NothingToRestoreError("storage holds fewer of them")
    return found[which]


def _useful(store: Store, ownership: OwnershipSteps) -> list[CheckpointPointer]:
    """The retained checkpoints that a user may well go back to."""
    # One that was deleted may still be listed, if a process died just then.
    retained = [p for p in ownership.retained if store.metadata(p.location) is not None]
    newest, job_id = ownership.previous.newest, ownership.previous.job.job_id
    # What a job went back behind, or what a new one began in spite of, lost its uncommitted transactions then.
    return [p for p in retained if p.job_id == job_id and (newest is None or p.checkpoint_id <= newest.checkpoint_id)]


def choose_start(
    store: Store, registry: SharedStateRegistry, ownership: OwnershipSteps, asked: From, shapes: Sequence[Shape], copies: int
) -> StartPoint:
    """Decide what an owned pipeline starts from.

    Raises:
        NothingToRestoreError: there is no such thing, or it cannot be restored with other numbers of instances.
        RestoreError: it does not fit.
    """

    def perform(request: object) -> object:
        match request:
            case start_point.RegisterFiles(location):
                registry.register(location, store.check_whole(location).files)
                return None
            case start_point.ReadRestorable(location):
                return restorable(location)
            case start_point.ResolveName(name):
                return start_point.NamedPlace(name, is_savepoint(name))
            case _:
                raise TypeError(request)

    def restorable(location: str) -> start_point.RestorableCheckpoint[Restored]:
        restored = read_restored(store, location, shapes)
        metadata = restored.metadata
        if metadata.variant != asked.variant:
            check_rescaling(metadata, shapes[metadata.variant], shapes[asked.variant])
        if not restored.savepoint:
            registry.register(location, metadata.files)
        pointer = CheckpointPointer(
            checkpoint_id=metadata.checkpoint_id,
            location=location,
            kind=metadata.kind,
            epoch=metadata.epoch,
            job_id=metadata.job_id,
            completed_at=LONG_AGO,
        )
        return start_point.RestorableCheckpoint(
            restored, pointer, location, restored.savepoint, restored.own or not restored.savepoint
        )

    asks = options(store, ownership, asked, copies)
    return drive(start_point.choose_start(ownership.previous, ownership.retained, asks, "the store"), perform)


def check_rescaling(metadata: Metadata, before: Shape, after: Shape) -> None:
    """Records in flight and finished instances belong to the channels and tasks that there were.

    Raises:
        NothingToRestoreError: it cannot be restored with other numbers of instances.
    """
    changed = {v.name for v, w in zip(before.graph.vertices, after.graph.vertices, strict=True) if v != w}
    for task, state in metadata.states.items():
        in_flight = any(pinned.in_flight for pinned in state.channels.values()) or any(state.output.values())
        if in_flight or (state.after_finish and task.vertex in changed):
            raise NothingToRestoreError("it holds records in flight, or finished instances")
    if any(task.vertex in changed for task in metadata.finished):
        raise NothingToRestoreError("it holds records in flight, or finished instances")


def read_restored(store: Store, location: str, shapes: Sequence[Shape]) -> Restored:
    """Read what lies there, and check that it fits: through the real format and the real rules."""
    metadata = store.check_whole(location)
    shape = shapes[metadata.variant]
    recorded = decode(encode(as_recorded(metadata, shape)), location)
    plan = validate_restore(shape.pipeline, recorded)
    return Restored(metadata, plan, location, is_savepoint(location), location.startswith("savepoints/"))


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
    read = [ghost.splits for task, ghost in metadata.ghosts.items() if task.vertex == vertex]
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
