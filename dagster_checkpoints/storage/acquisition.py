"""How a run becomes the owner of a pipeline: at once where it has no owner, or where the owner's process is known to be gone;
after a whole silent lease otherwise.

The waiting is observation: every renewal changes the file, so a file that has not changed for a lease by the
observer's own monotonic clock has no living owner. Taking over replaces exactly the version that was
observed: what a process that is gone had sent before its end either lands sooner, and is seen, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from uuid import uuid4

import msgspec

from dagster_checkpoints.storage import processes
from dagster_checkpoints.storage.base import ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.storage.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    PipelineOwned,
    Precondition,
    StorageUnavailable,
)
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.ownership import SAFETY, Ownership, now_utc
from dagster_checkpoints.storage.pipeline_state import (
    Lease,
    Owner,
    PipelineState,
    decode_state,
    describe_owner,
    encode_state,
)

_TAKE_ATTEMPTS = 5
_PROCESS_POLL_SECONDS = 1.0


def read_state(store: ObjectStore, layout: Layout) -> tuple[PipelineState, str] | None:
    """The pipeline's state and its etag, or None if it never ran here."""
    try:
        data, etag = store.get_with_etag(layout.state)
    except NotFound:
        return None
    return decode_state(data, f"{store.url}/{layout.state}"), etag


def acquire(
    store: ObjectStore,
    layout: Layout,
    owner: Owner,
    lease_seconds: float,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    poll: float | None = None,
    wall: Callable[[], datetime] = now_utc,
    on_watch: Callable[[PipelineState, float], None] | None = None,
) -> Ownership:
    """Become the pipeline's owner under a new epoch.

    Args:
        store: where the state lies.
        layout: of the pipeline.
        owner: who asks, see :func:`dagster_checkpoints.storage.processes.this_process`.
        lease_seconds: how long the owner may be silent before others may take over.
        monotonic: this process's monotonic clock, seconds.
        sleep: waits so many seconds while another owner's lease is watched.
        poll: seconds between two looks; a tenth of that lease by default.
        wall: for the times people read.
        on_watch: told of another owner's lease before it is watched, and of the seconds for which it is; 0 if its process is
            known to be gone.

    Raises:
        PipelineOwned: another run owns the pipeline and renewed its lease while it was watched.
        StorageUnavailable: storage cannot be reached.
        OutcomeUnknown: the lease may have been taken; it then runs out by itself.
    """
    if lease_seconds <= 0:
        raise ValueError(f"expected a lease of more than 0 seconds, found {lease_seconds!r}")
    for _ in range(_TAKE_ATTEMPTS):
        current = read_state(store, layout)
        if current is not None and current[0].lease is not None:
            gone = _is_gone(current[0], owner)
            if on_watch is not None:
                on_watch(current[0], 0.0 if gone else current[0].lease.seconds)
            if not gone:
                current = _watch(store, layout, current, owner, monotonic, sleep, poll)
        previous, etag = current or (PipelineState(pipeline=layout.pipeline, epoch=0, token=""), None)
        at = wall()
        lease = Lease(owner=owner, seconds=lease_seconds, acquired_at=at, renewed_at=at)
        history = previous.history or uuid4().hex[:8]
        taken = msgspec.structs.replace(previous, epoch=previous.epoch + 1, token=uuid4().hex, lease=lease, history=history)
        deadline = monotonic() + lease_seconds * SAFETY
        new_etag = _take(store, layout, taken, "create" if etag is None else UpdateVersion(etag))
        if new_etag is not None:
            return Ownership(store, layout, taken, new_etag, previous, deadline, monotonic, wall)
    raise PipelineOwned(
        f"pipeline {layout.pipeline!r} in {store.url} changed hands {_TAKE_ATTEMPTS} times while this run "
        "tried to own it. Start fewer runs of it at the same time"
    )


def _watch(
    store: ObjectStore,
    layout: Layout,
    observed: tuple[PipelineState, str],
    observer: Owner,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    poll: float | None,
) -> tuple[PipelineState, str]:
    """Watch an owned pipeline until its owner is gone, or for its whole lease; returns the state that may be replaced."""
    state = observed[0]
    assert state.lease is not None
    until = monotonic() + state.lease.seconds
    step = poll if poll is not None else max(0.05, state.lease.seconds / 10)
    if processes.shares_kernel(state.lease.owner, observer):
        step = min(step, _PROCESS_POLL_SECONDS)
    while (left := until - monotonic()) > 0:
        sleep(min(step, left))
        if _is_gone(state, observer):
            return observed
        found = None
        # An answer missed is no harm: taking over is conditional on the version observed.
        with suppress(StorageUnavailable):
            found = read_state(store, layout)
        if found is None or found[0].token == state.token:
            continue
        if found[0].lease is None or _is_gone(found[0], observer):
            return found
        raise PipelineOwned(
            f"pipeline {layout.pipeline!r} in {store.url} is {describe_owner(found[0])}, and that run is "
            "alive: it has just renewed its lease. Only one run at a time may own a pipeline: terminate that "
            "one, or wait for it"
        )
    return observed


def _is_gone(state: PipelineState, observer: Owner) -> bool:
    return state.lease is not None and processes.is_gone(state.lease.owner, observer)


def _take(store: ObjectStore, layout: Layout, taken: PipelineState, mode: PutMode) -> str | None:
    """Write the new owner's state; returns its etag, or None if the state has changed meanwhile."""
    try:
        return store.put(layout.state, encode_state(taken), mode)
    except (Precondition, AlreadyExists):
        unknown = None
    except OutcomeUnknown as error:
        unknown = error
    try:
        found = read_state(store, layout)
    except StorageUnavailable:
        if unknown is None:
            raise
        raise unknown from None
    if found is not None and found[0].token == taken.token:
        return found[1]
    return None
