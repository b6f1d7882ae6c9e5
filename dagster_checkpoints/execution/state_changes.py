"""The changes that an owner makes to ``state.json``: pure functions from one state to the next.

Must not know how the file is replaced, or whether it may be replaced: see :mod:`ownership`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from dagster_checkpoints.execution.pipeline_state import (
    CheckpointPointer,
    EndedBy,
    Job,
    JobState,
    Origin,
    PipelineState,
    StopAskedBy,
)

KEPT_DROPPED_SAVEPOINTS = 100


def begun(
    state: PipelineState,
    *,
    resume: bool,
    restored: CheckpointPointer | None,
    at: datetime,
    named: bool,
    origin: Origin,
    instances: Mapping[str, int],
) -> PipelineState:
    """A job runs.

    Args:
        state: the state before.
        resume: whether the previous job continues; otherwise a new one starts.
        restored: the checkpoint or savepoint that it starts from; None for the newest one of the previous job if `resume` is set,
            and for none otherwise. One that is claimed is so from this state on: a run that dies right after it has claimed it.
        at: wall-clock time.
        named: whether the run's configuration names the start, instead of the newest checkpoint.
        origin: where the pipeline is defined.
        instances: by the uid of a stage, its number of instances.
    """
    state = msgspec.structs.replace(state, origin=state.origin.then(origin))
    run_id = state.lease.owner.run_id if state.lease is not None else ""
    chooses = named or not (resume or restored)  # the newest may be a savepoint of another job: then a new job goes on from it
    begun_by = run_id if chooses else state.job.begun_by
    if resume:
        job = msgspec.structs.replace(
            state.job,
            status="RUNNING",
            ended_at=None,
            ended_by="",
            savepoint="",
            stop_asked_by="",
            run_id=run_id,
            begun_by=begun_by,
        )
    else:
        job = Job(job_id=state.job.job_id + 1, status="RUNNING", started_at=at, run_id=run_id, begun_by=begun_by)
    several = {uid: number for uid, number in instances.items() if number > max(1, job.most_instances.get(uid, 0))}
    job = msgspec.structs.replace(job, most_instances={**job.most_instances, **several})
    if restored is None:
        return msgspec.structs.replace(state, job=job, newest=state.newest if resume else None)
    known = next((pointer for pointer in state.retained if pointer.location == restored.location), None)
    # The job number of a savepoint from another storage has no meaning in this one.
    newest = known or msgspec.structs.replace(restored, job_id=job.job_id)
    retained = state.retained if known or not newest.ours else (newest, *state.retained)
    if restored.claimed:  # the pipeline's own from now on: retained, and deleted when it is no longer retained
        newest = msgspec.structs.replace(newest, claimed=True, job_id=job.job_id)
        retained = (newest, *(old for old in state.retained if old.location != newest.location))
        state = reserved(state, newest.checkpoint_id)
    if resume and restored.checkpoint_id < state.highest_checkpoint_id:
        # Sinks take back what came after it. A run that restores a later one after all shows it again: OwnershipSteps.has_later.
        state = reserved(state, state.highest_checkpoint_id + 1)
    return msgspec.structs.replace(state, job=job, newest=newest, retained=retained)


def reserved(state: PipelineState, checkpoint_id: int) -> PipelineState:
    """The id is reserved: no later checkpoint may have it."""
    return msgspec.structs.replace(state, highest_checkpoint_id=max(state.highest_checkpoint_id, checkpoint_id))


def completed(state: PipelineState, pointer: CheckpointPointer) -> PipelineState:
    """A checkpoint, or the savepoint of a stop, is the newest. The later ones of its job, which were passed over, are dropped:
    transactions that they held are discarded by now."""
    newest = state.newest.checkpoint_id if state.newest is not None else pointer.checkpoint_id
    kept = [old for old in state.retained if not (old.ours and old.job_id == pointer.job_id and old.checkpoint_id > newest)]
    retained = (pointer, *(old for old in kept if old.location != pointer.location))
    return reserved(msgspec.structs.replace(state, newest=pointer, retained=retained), pointer.checkpoint_id)


def forgotten(state: PipelineState, location: str) -> PipelineState:
    """No restart begins from the checkpoint at this location any more."""
    is_newest = state.newest is not None and state.newest.location == location
    retained = tuple(pointer for pointer in state.retained if pointer.location != location)
    return msgspec.structs.replace(state, newest=None if is_newest else state.newest, retained=retained)


def with_dropped_savepoints(before: PipelineState, after: PipelineState) -> PipelineState:
    """The state after a change, with a record of the claimed savepoints that are not retained any more."""
    claimed_before = [pointer.location for pointer in before.retained if pointer.claimed]
    if not claimed_before:
        return after
    kept = {pointer.location for pointer in after.retained}
    dropped = [location for location in claimed_before if location not in kept]
    known = (*dropped, *after.dropped_savepoints)[:KEPT_DROPPED_SAVEPOINTS]
    return msgspec.structs.replace(after, dropped_savepoints=known) if dropped else after


def ended(
    state: PipelineState,
    status: JobState,
    *,
    keep: bool,
    ended_by: EndedBy,
    savepoint: str,
    at: datetime,
    stop_asked_by: StopAskedBy,
) -> PipelineState:
    """The job has ended. The newest checkpoint stays only if `keep` is set or the job was suspended."""
    job = msgspec.structs.replace(
        state.job,
        status=status,
        ended_at=at,
        ended_by=ended_by,
        savepoint=savepoint,
        stop_asked_by=stop_asked_by if ended_by in ("drain", "suspend") else "",
    )
    return msgspec.structs.replace(state, job=job, newest=state.newest if keep or ended_by == "suspend" else None)
