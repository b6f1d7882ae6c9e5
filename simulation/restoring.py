"""The start of a simulated process: the start that users request, and reading checkpoints; the shipped code chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.start_point import NothingToRestoreError
from dagster_checkpoints.state import (
    ChannelSnapshot,
    CheckpointMetadata,
    ClaimMode,
    EnumeratorState,
    OperatorState,
    RestorePlan,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
    decode,
    encode,
    recorded_chains,
    recorded_stages,
    validate_restore,
)
from simulation.channels import Snapshot
from simulation.shapes import Shape, StageSpec, TaskSpec, name_of
from simulation.storage import Metadata, Store
from simulation.violations import check


@dataclass(frozen=True)
class RequestedStart:
    """The start that a user requests: the settings of the run configuration.

    Attributes:
        restore_from: "latest", "none", "retained" or "savepoint"; a location instead of the last two when storage was read.
        which: index in the retained checkpoints, or in the savepoints, newest first.
        copied: whether the savepoint is copied elsewhere first.
        claim: whether the pipeline becomes the owner of the savepoint.
        variant: index of the variant of the pipeline.
        allow_older_checkpoint: whether older ones are tried; no simulated user allows it.
    """

    restore_from: str = "latest"
    which: int = 0
    copied: bool = False
    claim: bool = False
    variant: int = 0
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


def start_options(store: Store, owner: OwnershipSteps, requested: RequestedStart, copies: int) -> RequestedStart:
    """The request, with the location of the checkpoint or savepoint that it stands for.

    Raises:
        NothingToRestoreError: the requested checkpoint or savepoint does not exist.
    """
    restore_from = requested.restore_from
    if restore_from in ("retained", "savepoint"):
        found = _retained(store, owner) if restore_from == "retained" else _savepoints(store)
        if requested.which >= len(found):
            raise NothingToRestoreError("storage holds fewer of them")
        restore_from = found[requested.which]
    if requested.copied:
        restore_from = store.copy_savepoint(restore_from, copies)
    return replace(requested, restore_from=restore_from)


def _savepoints(store: Store) -> list[str]:
    """The savepoints that a user may restore, newest first."""
    own = [at for at in reversed(store.below("savepoints/")) if at not in store.abandoned]
    # One that was swept while its owner completed it has metadata without files; no user was told that it is complete.
    return [at for at in own if (found := store.metadata(at)) and (at in store.reported or not store.missing_files(at, found))]


def _retained(store: Store, owner: OwnershipSteps) -> list[str]:
    """The retained checkpoints that a user may restore, newest first."""
    # A deleted one may still be listed if a process crashed in between.
    retained = [p for p in owner.retained if store.metadata(p.location) is not None]
    newest, job_id = owner.previous.newest, owner.previous.job.job_id
    # Checkpoints after the newest, or of an earlier job, have lost their uncommitted transactions.
    return [p.location for p in retained if p.job_id == job_id and (newest is None or p.checkpoint_id <= newest.checkpoint_id)]


def read_restored(store: Store, location: str, shapes: Sequence[Shape]) -> Restored:
    """Read a checkpoint or savepoint through the shipped format, and check that it fits by the shipped rules."""
    metadata = store.check_complete(location)
    shape = shapes[metadata.variant]
    recorded = decode(encode(as_recorded(metadata, shape)), location)
    return Restored(metadata, validate_restore(shape.pipeline, recorded), location)


def as_recorded(metadata: Metadata, shape: Shape) -> CheckpointMetadata:
    snapshots = {spec.id: _recorded(metadata.states[spec.id], shape, spec) for spec in shape.tasks if spec.id in metadata.states}
    stages = recorded_stages(shape.pipeline, shape.chains, metadata.finished)
    return CheckpointMetadata(
        pipeline=shape.pipeline.name,
        checkpoint_id=metadata.pointer.checkpoint_id,
        stages=tuple(_with_enumerator(stage, spec, metadata) for stage, spec in zip(stages, shape.stages, strict=True)),
        chains=recorded_chains(shape.chains, snapshots),
        kind="savepoint" if metadata.pointer.kind == "savepoint" else "checkpoint",
        job_id=str(metadata.pointer.job_id),
        epoch=metadata.pointer.epoch,
    )


def _with_enumerator(stage: StageMetadata, spec: StageSpec, metadata: Metadata) -> StageMetadata:
    """Add the enumerator's state to a source: derived from the positions in the readers' snapshots."""
    if not spec.enumerated:
        return stage
    read = [ghost.splits for task, ghost in metadata.ghosts.items() if task.vertex == stage.name]
    at = {split: position for splits in read for split, position in splits}
    check(len(at) == sum(map(len, read)), f"a split of {stage.name} is read twice: {read}")
    finished = [split for split, position in at.items() if position >= spec.records_of(split)]
    enumerator = EnumeratorState(
        discovered=tuple(str(split) for split in range(spec.splits) if split not in at),
        assigned=tuple(str(split) for split in at if split not in finished),
        finished=tuple(map(str, finished)),
    )
    return msgspec.structs.replace(stage, enumerator=enumerator)


_UNION = StageInstanceSnapshot(operator_states=(OperatorState(name="counts", kind="union"),))
_NONE = StageInstanceSnapshot()
_IN_FLIGHT = (Segment((), 1),)


def _recorded(snapshot: Snapshot, shape: Shape, spec: TaskSpec) -> TaskSnapshot:
    """A task as shipped metadata. Of a channel a restore reads only whether elements are in flight, also on an output."""
    stages = {name_of(n): _UNION if shape.stages[n].kind == "union" else _NONE for n in spec.stages}
    waiting = [name for name, pinned in snapshot.channels.items() if pinned.in_flight]
    waiting += [name for name, elements in snapshot.output.items() if elements]
    channels = tuple(ChannelSnapshot(name, 0, in_flight=_IN_FLIGHT) for name in waiting)
    return TaskSnapshot(stages=stages, channels=channels, end_of_data="drain" if snapshot.after_finish else "none")
