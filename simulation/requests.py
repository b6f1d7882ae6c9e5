"""Performs the requests of the shipped storage steps in the simulator's store of objects by path.

Stops before each write (`PUT`) and between a check and the step that relies on it (`PAUSE`): other steps can come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import GeneratorType
from typing import Any, TypeVar

from dagster_checkpoints.errors import (
    AlreadyExists,
    DagsterCheckpointsError,
    MissingStateFile,
    OutcomeUnknown,
    Precondition,
    StorageUnavailable,
)
from dagster_checkpoints.execution import acquisition, shared_files, start_point, storage_steps
from dagster_checkpoints.execution import checkpoint_deletion as deletion
from dagster_checkpoints.execution import checkpoint_writing as writing
from dagster_checkpoints.execution import unlisted_checkpoints as unlisted
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.storage.shared_files import SharedStateRegistry
from simulation.storage import Metadata, Store, is_savepoint
from simulation.violations import check

PUT, PAUSE, WAIT = "put", "pause", "wait"
"""What a procedure stops for: a write whose outcome is to be decided; a pause; the end of another procedure, or a time."""
OK, UNAVAILABLE, LOST, LANDED = "ok", "unavailable", "lost", "landed"
"""Outcomes of a write. In the last two the writer gets an unknown outcome: the write was lost, or it has landed."""

T = TypeVar("T")
Steps = Generator[str, str, T]
"""Steps of a thread: it stops, is sent the outcome, and continues."""


class Performer:
    """The part of a process that performs the shipped storage steps.

    Attributes:
        owner: the ownership of the pipeline, once acquired.
        locked: whether `state.json` is being written: a lease that expires now cannot be renewed.
        location: the checkpoint or savepoint that the input/output thread writes or deletes.
        metadata: the metadata that this thread writes.
    """

    __slots__ = ("location", "locked", "metadata", "owner", "registry", "store")

    def __init__(self, store: Store) -> None:
        self.store = store
        self.registry = SharedStateRegistry()
        self.owner: OwnershipSteps
        self.locked = False
        self.location: str
        self.metadata: Metadata

    def run(self, steps: storage_steps.Steps[T]) -> Steps[T]:
        """Perform the requests of shipped steps; errors of a request are thrown into the steps."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = self.perform(request)
                    if isinstance(answer, GeneratorType):
                        answer = yield from answer
                except DagsterCheckpointsError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def perform(self, request: object) -> Any:
        """The answer to a request, or steps that return it."""
        return _PERFORM[type(request)](self, request)

    def owned(self, steps: storage_steps.Steps[T]) -> Steps[T]:
        """Perform a procedure of the owner, after the one that is running."""
        while self.locked:
            yield WAIT
        self.locked = True
        try:
            return (yield from self.run(steps))
        finally:
            self.locked = False

    def for_location(self, steps: storage_steps.Steps[None]) -> Steps[str]:
        yield from self.run(steps)
        return self.location

    def check_files(self) -> None:
        if self.store.missing_files(self.location, self.metadata):
            raise MissingStateFile

    def discard_metadata(self, checkpoint_id: int) -> Steps[None] | None:
        """Without metadata nothing happens, and no other step can come in between."""
        path = f"checkpoints/chk-{checkpoint_id}-{self.owner.epoch}/_metadata"
        return paused(self.store.delete, path) if path in self.store.objects else None

    def delete_files(self, removing: AbstractContextManager[frozenset[str]]) -> Steps[int]:
        with removing as orphans:
            yield from self.run(deletion.delete_files(orphans, self.owner.ensure))
        return len(orphans)


def write(refused: type[Exception], put: Callable[..., T | None], *arguments: Any) -> Steps[T]:
    """Write under a condition: `put` returns None if it does not hold, and `refused` is raised.

    The world decides whether the write lands and whether the writer learns it.
    """
    outcome = (yield PUT) or OK
    if outcome == UNAVAILABLE:
        raise StorageUnavailable
    answer = put(*arguments) if outcome != LOST else None
    if outcome in (LOST, LANDED):
        raise OutcomeUnknown
    if answer is None:
        raise refused("the stored object is another one")
    return answer


def paused(act: Callable[..., T], *arguments: Any) -> Steps[T]:
    yield PAUSE
    return act(*arguments)


_PERFORM: dict[type[object], Callable[[Any, Any], Any]] = {
    # state.json
    storage_steps.ReadState: lambda p, request: p.store.read_state(),
    storage_steps.CreateState: lambda p, request: write(AlreadyExists, p.store.put_state, None, request.state),
    storage_steps.ReplaceState: lambda p, request: write(Precondition, p.store.put_state, request.expected, request.state),
    acquisition.CheckOwnerGone: lambda p, request: p.is_owner_gone(request.owner.run_id),
    acquisition.AnnounceWatch: lambda p, request: None,
    unlisted.ListUnlisted: lambda p, request: p.store.unlisted(),
    acquisition.Sleep: lambda p, request: p.sleep(request.seconds),
    writing.ReserveId: lambda p, request: p.owned(p.owner.reserve(request.checkpoint_id)),
    writing.RenewLease: lambda p, request: p.owned(p.owner.renew()),
    writing.CompleteCheckpoint: lambda p, request: p.owned(
        p.owner.complete(request.checkpoint_id, request.location, request.kind)
    ),
    deletion.ForgetCheckpoint: lambda p, request: p.owned(p.owner.forget(request.location)),
    # The start
    start_point.RegisterFiles: lambda p, request: p.register(request.location),
    start_point.ReadRestorable: lambda p, request: p.restorable(request.location),
    start_point.ResolveName: lambda p, request: start_point.NamedPlace(request.name, is_savepoint(request.name)),
    # Metadata
    writing.BuildMetadata: lambda p, request: p.recorded_metadata(),
    writing.StoreMetadata: lambda p, request: p.for_location(writing.write_metadata()),
    writing.StoreSavepoint: lambda p, request: p.for_location(writing.complete_savepoint(p.location, confirm=True)),
    writing.CreateObject: lambda p, request: write(AlreadyExists, p.store.create, f"{p.location}/_metadata", p.metadata),
    writing.CompareObject: lambda p, request: check(p.store.metadata(p.location) is p.metadata, "there are two {}", p.location),
    writing.CheckStateFiles: lambda p, request: p.check_files(),
    deletion.DeleteMetadata: lambda p, request: paused(p.store.delete, f"{request.location}/_metadata"),
    deletion.ListMetadata: lambda p, request: [
        deletion.FoundMetadata(location, int(location.rpartition("-")[2])) for location in p.store.below("checkpoints/")
    ],
    deletion.SweepMetadata: lambda p, request: p.run(deletion.sweep_metadata(p.owner)),
    # A savepoint's directory
    deletion.MarkIncomplete: lambda p, request: paused(p.mark_incomplete, p.location),
    deletion.RemoveMark: lambda p, request: paused(p.store.delete, f"{p.location}/_incomplete"),
    deletion.RemoveMarkIfEmpty: lambda p, request: paused(p.store.delete_mark_if_empty, p.location),
    deletion.ReadMark: lambda p, request: p.store.objects.get(f"{request.location}/_incomplete"),
    deletion.DeleteSavepointMetadata: lambda p, request: paused(p.store.delete, f"{p.location}/_metadata"),
    deletion.DeleteSavepointFiles: lambda p, request: paused(p.store.delete_below, f"{p.location}/state/"),
    deletion.DeleteSavepoint: lambda p, request: p.delete_savepoint(request.location),
    deletion.DiscardSavepoint: lambda p, request: p.discard_savepoint(request.checkpoint_id),
    deletion.HasMetadata: lambda p, request: p.store.metadata(request.location) is not None,
    deletion.ListSavepointDirectories: lambda p, request: p.store.below("savepoints/"),
    deletion.SweepSavepoints: lambda p, request: p.run(deletion.sweep_savepoints(p.owner, "simulated")),
    # Shared files
    shared_files.PutFile: lambda p, request: p.store.objects.update({f"shared/{request.name}": p.owner.epoch}),
    deletion.DiscardFiles: lambda p, request: p.delete_files(p.registry.discarding(request.location)),
    deletion.DiscardMetadata: lambda p, request: p.discard_metadata(request.checkpoint_id),
    deletion.DiscardPendingFiles: lambda p, request: p.delete_files(p.registry.discarding(p.location_of(request.checkpoint_id))),
    deletion.DeleteUnnamed: lambda p, request: p.delete_files(p.registry.sweeping(request.names)),
    deletion.DeleteFiles: lambda p, request: paused(p.store.delete_shared, p.owner.epoch, request.names),
    deletion.IsRegistered: lambda p, request: request.location in p.registry.checkpoints(),
    deletion.ListFiles: lambda p, request: [shared_name(path.removeprefix("shared/")) for path in p.store.below("shared/")],
    deletion.SweepFiles: lambda p, request: p.run(deletion.sweep_files(p.owner.epoch)),
}


def shared_name(name: str) -> shared_files.SharedName:
    """Parse the name of a file in shared/; the simulator uses the content in place of its sha256."""
    content, _, epoch = name.partition("-")
    return shared_files.SharedName(content, int(epoch or 0))
