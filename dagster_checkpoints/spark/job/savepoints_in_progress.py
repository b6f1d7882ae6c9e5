"""The savepoints that a job is taking: where each goes, while it is being written.

A savepoint's barrier carries the id of the request that it answers; by that the place is found. It must not know when
savepoints are taken.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dagster_checkpoints.control import ControlRequest
from dagster_checkpoints.coordination import CheckpointProperties
from dagster_checkpoints.storage import CheckpointStorage, SavepointDirectory


@dataclass(frozen=True)
class SavepointPlace:
    """Where somebody wants a savepoint.

    Attributes:
        target: A directory's URL or path; empty for the pipeline's own `savepoints/`.
        name: Part of the savepoint's name.
    """

    target: str
    name: str

    @classmethod
    def of(cls, request: ControlRequest) -> SavepointPlace:
        """The one that a request names."""
        return cls(request.target, request.name or request.request_id)


class SavepointsInProgress:
    """Hands out the directory of each savepoint. Thread-safe: tasks' uploads ask at the same time."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._places: dict[str, SavepointPlace] = {}
        self._directories: dict[int, SavepointDirectory] = {}
        self._kept: set[int] = set()

    def ask(self, request_id: str, place: SavepointPlace) -> None:
        """A savepoint is asked for; its properties carry `request_id`.

        Raises:
            StorageError: There can be no savepoint at that place.
        """
        self._storage.savepoint_directory(0, place.name, place.target)  # for its errors: nothing has begun yet
        with self._lock:
            self._places[request_id] = place

    def check(self, place: SavepointPlace) -> None:
        """Find out whether a savepoint can be written there, before anything is done for it. Waits for storage.

        A drain whose savepoint fails costs a restart of the job.

        Raises:
            StorageError: It cannot: names the place and the cause.
        """
        if place.target:
            self._storage.savepoint_directory(0, place.name, place.target).check()

    def directory(self, checkpoint_id: int, properties: CheckpointProperties) -> SavepointDirectory:
        """The directory of a savepoint that was triggered."""
        with self._lock:
            if checkpoint_id not in self._directories:
                place = self._places[properties.request_id]
                self._directories[checkpoint_id] = self._storage.savepoint_directory(checkpoint_id, place.name, place.target)
            return self._directories[checkpoint_id]

    def keep(self, checkpoint_id: int) -> None:
        """Its metadata is written, or may be: it must not be deleted any more."""
        with self._lock:
            self._kept.add(checkpoint_id)

    def discard(self, checkpoint_id: int) -> None:
        """A savepoint has failed: delete what was written of it. Does nothing for a checkpoint.

        Raises:
            StorageError: It cannot be deleted now; a later owner of the pipeline sweeps it up.
        """
        with self._lock:
            directory = self._directories.get(checkpoint_id)
            if directory is None or checkpoint_id in self._kept:
                return
        directory.delete()
