"""Makes a run the owner of a pipeline; the rules are :mod:`dagster_checkpoints.execution.acquisition`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from uuid import uuid4

from dagster_checkpoints.execution import acquisition
from dagster_checkpoints.execution.acquisition import AnnounceWatch, CheckOwnerGone, Sleep
from dagster_checkpoints.execution.pipeline_state import Owner, PipelineState
from dagster_checkpoints.execution.storage_steps import DriverValues, StatePlace, drive
from dagster_checkpoints.storage import processes
from dagster_checkpoints.storage.base import ObjectStore
from dagster_checkpoints.storage.layout import Layout
from dagster_checkpoints.storage.ownership import Ownership, PipelineStateFile, now_utc


def read_state(store: ObjectStore, layout: Layout) -> PipelineState | None:
    """The pipeline's state; None if the pipeline never ran with this storage."""
    found = PipelineStateFile(store, layout).read()
    return None if found is None else found.state


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
        store: the object store that holds the state.
        layout: the names of the pipeline's files.
        owner: this process, see :func:`dagster_checkpoints.storage.processes.this_process`.
        lease_seconds: the lease's length: seconds without a renewal after which another run may take the pipeline over.
        monotonic: this process's monotonic clock, seconds.
        sleep: waits for a number of seconds while another owner's lease is watched.
        poll: seconds between two reads of that lease; default: a tenth of its length.
        wall: the wall clock, for times that are displayed.
        on_watch: called before another owner's lease is watched, with the state and the seconds of the watch; 0 if the owner's
            process is known to have ended.

    Raises:
        PipelineOwned: another run owns the pipeline and renewed its lease while it was watched.
        StorageUnavailable: storage cannot be reached.
        OutcomeUnknown: the lease may have been taken; it then expires by itself.
    """
    file = PipelineStateFile(store, layout)

    def perform(request: object) -> object:
        match request:
            case CheckOwnerGone(other):
                return processes.is_gone(other, owner)
            case AnnounceWatch(state, seconds):
                if on_watch is not None:
                    on_watch(state, seconds)
                return None
            case Sleep(seconds):
                sleep(seconds)
                return None
            case _:
                return file.perform(request)

    values = DriverValues(monotonic, wall, lambda: uuid4().hex)
    place = StatePlace(layout.pipeline, store.url, file.url)
    return Ownership(file, drive(acquisition.acquire(place, owner, lease_seconds, values, poll), perform))
