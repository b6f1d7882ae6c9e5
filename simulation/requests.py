"""The world's performer of the shipped storage steps: what each of their requests is in a store of objects by path.

It stops in front of each write (`PUT`) and between a check and what relies on it (`PAUSE`): anything can happen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import GeneratorType
from typing import Any, TypeVar

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.execution import acquisition, shared_files, start_point, storage_errors, storage_steps
from dagster_checkpoints.execution import checkpoint_deletion as deletion
from dagster_checkpoints.execution import checkpoint_writing as writing
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.storage.errors import MissingStateFile
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from simulation.storage import Metadata, Store, is_savepoint
from simulation.violations import check

PUT, PAUSE, WAIT = "put", "pause", "wait"
"""What a procedure stops for: a write whose outcome is about to be decided, a moment, another procedure's end or a time."""
OK, UNAVAILABLE, LOST, LANDED = "ok", "unavailable", "lost", "landed"
"""Outcomes of a write. The writer does not learn the last two: the write was lost, or it has landed."""

T = TypeVar("T")
Steps = Generator[str, str, T]
"""What a thread of a process does: it stops, is sent the outcome, and goes on."""


class Performer:
    """Performs shipped storage steps: the part of a process that does so.

    Attributes:
        owner: its right to the pipeline, once acquired.
        locked: whether `state.json` is being written: a lease that runs out now cannot be renewed.
        location: of the checkpoint or savepoint that the thread for input and output writes or deletes.
        metadata: what that thread writes.
    """

    __slots__ = ("location", "locked", "metadata", "owner", "registry", "store")

    def __init__(self, store: Store) -> None:
        self.store = store
        self.registry = SharedStateRegistry()
        self.owner: OwnershipSteps
        self.locked = False
        self.location = ""
        self.metadata: Metadata | None = None

    def run(self, steps: storage_steps.Steps[T]) -> Steps[T]:
        """Perform the requests of shipped steps, which see the shipped errors that a request raises."""
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
        """The answer to a request, or steps to it."""
        return _PERFORM[type(request)](self, request)

    def owned(self, steps: storage_steps.Steps[T]) -> Steps[T]:
        """Perform a procedure of the owner, after the one that is under way."""
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

    def create_metadata(self) -> bool:
        return self.store.create(f"{self.location}/_metadata", self.metadata)

    def compare_metadata(self) -> None:
        check(self.store.metadata(self.location) is self.metadata, "there are two {}", self.location)

    def check_files(self) -> None:
        if self.metadata is None or self.store.lacks(self.location, self.metadata):
            raise MissingStateFile

    def delete_orphans(self, removing: AbstractContextManager[frozenset[str]]) -> Steps[int]:
        with removing as orphans:
            yield from self.run(deletion.delete_files(orphans, self.owner.ensure))
        return len(orphans)


def write(put: Callable[[], bool], refused: Exception, answer: Any = None) -> Steps[Any]:
    """Write under a condition. Whether that lands, and whether the writer learns it, is the world's to decide."""
    outcome = (yield PUT) or OK
    if outcome == UNAVAILABLE:
        raise storage_errors.StorageUnavailable
    landed = outcome != LOST and put()
    if outcome in (LOST, LANDED):
        raise storage_errors.OutcomeUnknown
    if not landed:
        raise refused
    return answer


def paused(act: Callable[..., T], *arguments: Any) -> Steps[T]:
    """A moment passes, then it happens."""
    yield PAUSE
    return act(*arguments)


def _put_state(on: Performer, expected: storage_steps.StateVersion | None, asked: Any) -> Steps[str]:
    refused = storage_errors.AlreadyExists if expected is None else storage_errors.Precondition
    return write(lambda: on.store.put_state(expected, asked.state), refused("it was changed"), asked.state.token)


_PERFORM: dict[type[object], Callable[[Any, Any], Any]] = {
    # state.json
    storage_steps.ReadState: lambda on, asked: on.store.read_state(),
    storage_steps.CreateState: lambda on, asked: _put_state(on, None, asked),
    storage_steps.ReplaceState: lambda on, asked: _put_state(on, asked.expected, asked),
    acquisition.CheckOwnerGone: lambda on, asked: on.knows_gone(asked.owner.run_id),
    acquisition.AnnounceWatch: lambda on, asked: None,
    acquisition.Sleep: lambda on, asked: on.sleep(asked.seconds),
    writing.ReserveId: lambda on, asked: on.owned(on.owner.reserve(asked.checkpoint_id)),
    writing.RenewLease: lambda on, asked: on.owned(on.owner.renew()),
    writing.CompleteCheckpoint: lambda on, asked: on.owned(on.owner.complete(asked.checkpoint_id, asked.location, asked.kind)),
    deletion.ForgetCheckpoint: lambda on, asked: on.owned(on.owner.forget(asked.location)),
    # The start
    start_point.RegisterFiles: lambda on, asked: on.register(asked.location),
    start_point.ReadRestorable: lambda on, asked: on.restorable(asked.location),
    start_point.ResolveName: lambda on, asked: start_point.NamedPlace(asked.name, is_savepoint(asked.name)),
    # Metadata
    writing.BuildMetadata: lambda on, asked: on.built(on.metadata),
    writing.StoreMetadata: lambda on, asked: on.for_location(writing.write_metadata()),
    writing.StoreSavepoint: lambda on, asked: on.for_location(writing.complete_savepoint(on.location, confirm=True)),
    writing.CreateObject: lambda on, asked: write(on.create_metadata, storage_errors.AlreadyExists("it was created")),
    writing.CompareObject: lambda on, asked: on.compare_metadata(),
    writing.CheckStateFiles: lambda on, asked: on.check_files(),
    deletion.DeleteMetadata: lambda on, asked: paused(on.store.delete, f"{asked.location}/_metadata"),
    deletion.ListMetadata: lambda on, asked: [deletion.FoundMetadata(*found) for found in on.store.checkpoints()],
    deletion.SweepMetadata: lambda on, asked: on.run(deletion.sweep_metadata(on.owner)),
    # A savepoint's directory
    deletion.MarkIncomplete: lambda on, asked: paused(on.mark_incomplete, on.location),
    deletion.RemoveMark: lambda on, asked: paused(on.store.delete, f"{on.location}/_incomplete"),
    deletion.RemoveMarkIfEmpty: lambda on, asked: paused(on.store.delete_mark_if_empty, on.location),
    deletion.ReadMark: lambda on, asked: on.store.objects.get(f"{asked.location}/_incomplete"),
    deletion.DeleteSavepointMetadata: lambda on, asked: paused(on.store.delete, f"{on.location}/_metadata"),
    deletion.DeleteSavepointFiles: lambda on, asked: paused(on.store.delete_below, f"{on.location}/state/"),
    deletion.DeleteSavepoint: lambda on, asked: on.delete_savepoint(asked.location),
    deletion.DiscardSavepoint: lambda on, asked: on.discard_savepoint(asked.checkpoint_id),
    deletion.HasMetadata: lambda on, asked: on.store.metadata(asked.location) is not None,
    deletion.ListSavepointDirectories: lambda on, asked: [f"savepoints/{name}" for name in on.store.names("savepoints/")],
    deletion.SweepSavepoints: lambda on, asked: on.run(deletion.sweep_savepoints(on.owner, "simulated")),
    # Shared files
    shared_files.PutFile: lambda on, asked: on.store.objects.update({f"shared/{asked.name}": on.owner.epoch}),
    deletion.DiscardFiles: lambda on, asked: on.delete_orphans(on.registry.discarding(asked.location)),
    deletion.DiscardPendingFiles: lambda on, asked: on.delete_orphans(on.discarding(asked.checkpoint_id)),
    deletion.DeleteUnnamed: lambda on, asked: on.delete_orphans(on.registry.sweeping(asked.names)),
    deletion.DeleteFiles: lambda on, asked: paused(on.store.delete_shared, on.owner.epoch, asked.names),
    deletion.IsRegistered: lambda on, asked: asked.location in on.registry.checkpoints(),
    deletion.ListFiles: lambda on, asked: [shared_name(name) for name in on.store.names("shared/")],
    deletion.SweepFiles: lambda on, asked: on.run(deletion.sweep_files(on.owner.epoch)),
}


def shared_name(name: str) -> shared_files.SharedName:
    """From the name of a file in shared/, whose bytes the simulator keeps instead of their sha256."""
    content, _, epoch = name.partition("-")
    return shared_files.SharedName(content, int(epoch or 0))
