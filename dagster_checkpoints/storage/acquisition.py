"""Makes a run the owner of a pipeline; the rules are :mod:`dagster_checkpoints.execution.acquisition`.

A pipeline whose name another pipeline already uses on this storage is refused. The comparison of two pipelines is in
:mod:`dagster_checkpoints.execution.pipeline_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from uuid import uuid4

from dagster_checkpoints.errors import NotFound, StorageError
from dagster_checkpoints.execution import acquisition
from dagster_checkpoints.execution.acquisition import AnnounceWatch, CheckOwnerGone, Sleep
from dagster_checkpoints.execution.pipeline_state import Origin, Owner, PipelineState, is_same_pipeline
from dagster_checkpoints.execution.storage_steps import DriverValues, StatePlace, drive
from dagster_checkpoints.execution.unlisted_checkpoints import ListUnlisted, UnlistedCheckpoint, UnlistedFiles
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage import processes
from dagster_checkpoints.storage.layout import METADATA, SAVEPOINTS, Layout, SharedName
from dagster_checkpoints.storage.ownership import Ownership, PipelineStateFile, now_utc

_SHOWN = 5


class PipelineNameTaken(StorageError):
    """The pipeline's directory in storage belongs to another pipeline of the same name."""


def check_origin(pipeline: str, url: str, known: Origin, found: Origin) -> None:
    """Refuse a pipeline whose name another pipeline already uses on this storage.

    Args:
        pipeline: the pipeline's name.
        url: URL of the pipeline's directory, for the error.
        known: the origin recorded in storage.
        found: the origin of this run's pipeline.

    Raises:
        PipelineNameTaken: names where both pipelines are defined, and the remedy.
    """
    if is_same_pipeline(known, found):
        return
    raise PipelineNameTaken(
        f"expected {url} to belong to this run's pipeline {pipeline!r}, {_described(found)}; found that it belongs to another "
        f"pipeline of that name, {_described(known)}. Two pipelines of one name would restore each other's checkpoints. Rename "
        "one of them, or give it another storage (storage= of CheckpointCoordinatorResource). If it is the same pipeline, moved "
        "and restructured at the same time, launch it once with allow_moved_pipeline: true in its run configuration"
    )


def _described(origin: Origin) -> str:
    shown = ", ".join(origin.assets[:_SHOWN]) + (", …" if len(origin.assets) > _SHOWN else "")
    location = f"code location {origin.code_location!r}" if origin.code_location else "an unknown code location"
    instance = f" of Dagster instance {origin.instance}" if origin.instance else ""
    return f"defined in {location}{instance} with the assets {shown}"


def read_state(store: ObjectStore, layout: Layout) -> PipelineState | None:
    """The pipeline's state; None if the pipeline never ran with this storage."""
    found = PipelineStateFile(store, layout).read()
    return None if found is None else found.state


def unlisted_files(store: ObjectStore, layout: Layout) -> UnlistedFiles:
    """What storage holds of a pipeline for which it records no job.

    One LIST of the pipeline's directory (per 1,000 files), and one GET for each savepoint, whose name does not contain an epoch.
    """
    found: list[UnlistedCheckpoint] = []
    epoch, only_imported = 0, True
    for info in store.list(f"{layout.pipeline}/"):
        location, _, name = info.key.removeprefix(f"{layout.pipeline}/").rpartition("/")
        only_imported = only_imported and location.startswith(f"{SAVEPOINTS}/")
        if location == "shared" and (file := SharedName.parse(name)) is not None:
            epoch = max(epoch, file.epoch)
        elif name == METADATA and (key := layout.parse_checkpoint(location)) is not None:
            found.append(UnlistedCheckpoint(key.epoch, key.checkpoint_id, location))
        elif name == METADATA and layout.is_savepoint(location):
            savepoint, imported = _unlisted_savepoint(store, info.key, location)
            found.append(savepoint)
            only_imported = only_imported and imported
    return UnlistedFiles(tuple(found), epoch, imported=only_imported and bool(found))


def _unlisted_savepoint(store: ObjectStore, key: str, location: str) -> tuple[UnlistedCheckpoint, bool]:
    """A savepoint, and whether it was made from a plain query.

    Its epoch and id are 0 if its metadata cannot be read: a restore of it says why.
    """
    with suppress(NotFound, StateError):
        metadata = decode(store.get(key), f"{store.url}/{key}")
        return UnlistedCheckpoint(metadata.epoch, metadata.checkpoint_id, location), metadata.imported
    return UnlistedCheckpoint(0, 0, location), False


def acquire(
    store: ObjectStore,
    layout: Layout,
    owner: Owner,
    lease_seconds: float,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    poll: float | None = None,
    start_named: bool = False,
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
        start_named: whether the run's configuration names the start: a checkpoint, a savepoint or a new start.
        wall: the wall clock, for times that are displayed.
        on_watch: called before another owner's lease is watched, with the state and the seconds of the watch; 0 if the owner's
            process is known to have ended.

    Raises:
        PipelineStateMissing: storage holds checkpoints or savepoints, but records no job, and the run does not name its start.
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
            case ListUnlisted():
                return unlisted_files(store, layout)
            case _:
                return file.perform(request)

    values = DriverValues(monotonic, wall, lambda: uuid4().hex)
    place = StatePlace(layout.pipeline, store.url, file.url)
    steps = acquisition.acquire(place, owner, lease_seconds, values, poll, start_named=start_named)
    return Ownership(file, drive(steps, perform))
