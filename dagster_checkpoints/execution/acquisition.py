"""How a run becomes the owner of a pipeline: at once if it has no owner, or if the owner's process is known to have ended;
otherwise after a whole lease without a renewal. As steps.

Every renewal changes the file, so a file that has not changed for a whole lease by the observer's own clock has no living
owner. A take-over replaces exactly the version that was observed: a write that an ended process had sent before its end either
lands earlier, and is seen, or is refused.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from dagster_checkpoints.errors import (
    AlreadyExists,
    OutcomeUnknown,
    PipelineOwned,
    Precondition,
    StorageUnavailable,
)
from dagster_checkpoints.execution.ownership import SAFETY, OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import Lease, Owner, PipelineState, describe_owner
from dagster_checkpoints.execution.storage_steps import (
    CreateState,
    DriverValues,
    ReadState,
    ReplaceState,
    StatePlace,
    StateVersion,
    Steps,
    StoredState,
)
from dagster_checkpoints.execution.unlisted_checkpoints import ListUnlisted, UnlistedFiles, check_start

_TAKE_ATTEMPTS = 5
_PROCESS_POLL_SECONDS = 1.0
_SHORTEST_POLL_SECONDS = 0.05
_OWNERS_WITHOUT_FILES = 1000
"""Owners behind the last one that has written a file, at most, under a `state.json` that was lost."""


class CheckOwnerGone(msgspec.Struct, frozen=True):
    """Find out whether the owner's process is known to have ended, with all processes that it has started.

    Answer: a bool; False also if that is not known.
    """

    owner: Owner


class AnnounceWatch(msgspec.Struct, frozen=True):
    """Report to the user the lease of another owner, and for how many seconds it is watched; 0 if that owner has ended.

    Answer: None.
    """

    state: PipelineState
    seconds: float


class Sleep(msgspec.Struct, frozen=True):
    """Wait. Answer: None."""

    seconds: float


def shares_kernel(owner: Owner, observer: Owner) -> bool:
    """Whether the owner's process would have the same process id for the observer: same machine, boot and namespaces."""
    known = bool(owner.boot_id and owner.namespaces and owner.started)
    return known and (owner.host, owner.boot_id, owner.namespaces) == (observer.host, observer.boot_id, observer.namespaces)


def acquire(
    place: StatePlace,
    owner: Owner,
    lease_seconds: float,
    values: DriverValues,
    poll: float | None = None,
    *,
    start_named: bool = False,
) -> Steps[OwnershipSteps]:
    """Become the pipeline's owner under a new epoch.

    Args:
        place: the location of the pipeline's ``state.json``.
        owner: the process that acquires the pipeline.
        lease_seconds: seconds without a renewal after which another run may take over.
        values: the driver's times and tokens.
        poll: seconds between two reads of another owner's lease; a tenth of that lease by default.
        start_named: whether the run's configuration names the start: a checkpoint, a savepoint or a new start.

    Raises:
        ValueError: the lease is not longer than 0 seconds.
        PipelineStateMissing: storage holds checkpoints or savepoints, but records no job, and the run does not name its start.
            Nothing was written.
        PipelineOwned: another run owns the pipeline and renewed its lease while it was watched.
        StorageUnavailable: storage cannot be reached.
        OutcomeUnknown: the pipeline may have been acquired; the lease then expires by itself.
    """
    if lease_seconds <= 0:
        raise ValueError(f"expected a lease of more than 0 seconds, found {lease_seconds!r}")
    for _ in range(_TAKE_ATTEMPTS):
        current: StoredState | None = yield ReadState()
        if current is not None and current.state.lease is not None:
            gone: bool = yield CheckOwnerGone(current.state.lease.owner)
            yield AnnounceWatch(current.state, 0.0 if gone else current.state.lease.seconds)
            if not gone:
                current = yield from _watch(current, owner, place, values, poll)
        previous = PipelineState(pipeline=place.pipeline, epoch=0, token="") if current is None else current.state
        unlisted = UnlistedFiles()
        if previous.records_nothing:
            unlisted = yield ListUnlisted()
            if not start_named:
                check_start(unlisted, place, exists=current is not None)
            previous = _after_lost_state(previous, unlisted.highest_epoch)
        taken = _taken(previous, owner, lease_seconds, values)
        deadline = values.elapsed() + lease_seconds * SAFETY
        version = yield from _take(taken, None if current is None else current.version)
        if version is not None:
            return OwnershipSteps(StoredState(taken, version), previous, deadline, values, place, unlisted)
    raise PipelineOwned(
        f"pipeline {place.pipeline!r} in {place.root} changed hands {_TAKE_ATTEMPTS} times while this run "
        "tried to own it. Start fewer runs of this pipeline at the same time"
    )


def _after_lost_state(state: PipelineState, epoch: int) -> PipelineState:
    """The state with numbers that no owner had under a lost ``state.json``: one must not write names of another, and sinks refuse
    the older of two.

    Files show the epochs of owners that have written some; others may have opened sinks alone. No more jobs than epochs were
    counted, so the next job's number is not that of a savepoint that is left of an earlier job.
    """
    if epoch > state.epoch:
        epoch += _OWNERS_WITHOUT_FILES
    job = msgspec.structs.replace(state.job, job_id=max(state.job.job_id, epoch))
    return msgspec.structs.replace(state, epoch=max(state.epoch, epoch), job=job)


def _taken(previous: PipelineState, owner: Owner, lease_seconds: float, values: DriverValues) -> PipelineState:
    at = values.wall()
    return msgspec.structs.replace(
        previous,
        epoch=previous.epoch + 1,
        token=values.new_token(),
        lease=Lease(owner=owner, seconds=lease_seconds, acquired_at=at, renewed_at=at),
        history=previous.history or values.new_token()[:8],
    )


def _watch(
    observed: StoredState, observer: Owner, place: StatePlace, values: DriverValues, poll: float | None
) -> Steps[StoredState]:
    """Watch an owned pipeline until its owner has ended, or for its whole lease; returns the state that may be replaced."""
    state = observed.state
    assert state.lease is not None
    until = values.elapsed() + state.lease.seconds
    step = poll if poll is not None else max(_SHORTEST_POLL_SECONDS, state.lease.seconds / 10)
    if shares_kernel(state.lease.owner, observer):
        step = min(step, _PROCESS_POLL_SECONDS)
    while (left := until - values.elapsed()) > 0:
        yield Sleep(min(step, left))
        if (yield CheckOwnerGone(state.lease.owner)):
            return observed
        found: StoredState | None = None
        # A missed answer does no harm: the take-over is conditional on the version observed.
        with suppress(StorageUnavailable):
            found = yield ReadState()
        if found is None or found.state.token == state.token:
            continue
        if found.state.lease is None or (yield CheckOwnerGone(found.state.lease.owner)):
            return found
        raise PipelineOwned(
            f"pipeline {place.pipeline!r} in {place.root} is {describe_owner(found.state)}, and that run is "
            "alive: it has just renewed its lease. Only one run at a time may own a pipeline: terminate that "
            "one, or wait for it",
            found.state.lease.owner.run_id,
        )
    return observed


def _take(taken: PipelineState, expected: StateVersion | None) -> Steps[StateVersion | None]:
    """Write the new owner's state; returns its version, or None if another run has changed the state."""
    try:
        version: StateVersion = yield CreateState(taken) if expected is None else ReplaceState(expected, taken)
        return version
    except (Precondition, AlreadyExists):
        unknown = None
    except OutcomeUnknown as error:
        unknown = error
    try:
        found: StoredState | None = yield ReadState()
    except StorageUnavailable:
        if unknown is None:
            raise
        raise unknown from None
    return found.version if found is not None and found.state.token == taken.token else None
