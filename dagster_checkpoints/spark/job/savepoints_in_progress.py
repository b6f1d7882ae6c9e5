"""The savepoints that a job is taking, and their directories.

A savepoint's barrier carries the id of its request, and the request names the destination. It must not know when savepoints are
taken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from dagster_checkpoints.control.requests import ControlRequest
from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.errors import InvalidStorageUrl
from dagster_checkpoints.files.urls import validate_directory
from dagster_checkpoints.pipeline import Stage
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.savepoints import SavepointDirectory
from dagster_checkpoints.systems.locations import location_of


@dataclass(frozen=True)
class SavepointDestination:
    """The destination of a requested savepoint.

    Attributes:
        target: The parent directory's URL or path; empty for the pipeline's own `savepoints/`.
        name: The part of the directory's name that the user chose.
    """

    target: str
    name: str

    @classmethod
    def of(cls, request: ControlRequest) -> SavepointDestination:
        """The destination that a request names."""
        return cls(request.target, request.name or request.request_id)


class SavepointsInProgress:
    """Creates the directory of each savepoint. Thread-safe: the uploads of several tasks call it at the same time.

    Args:
        storage: The storage of the pipeline.
        stages: The stages, in whose sinks' locations no savepoint is made.
    """

    def __init__(self, storage: CheckpointStorage, stages: Iterable[Stage] = ()) -> None:
        self._storage = storage
        self._sinks = {stage.name: str(at) for stage in stages if (at := getattr(stage.sink, "location", None))}
        self._lock = threading.Lock()
        self._destinations: dict[str, SavepointDestination] = {}
        self._directories: dict[int, SavepointDirectory] = {}
        """By id, those of savepoints that are not complete. One that has failed stays: it refuses late uploads."""

    def register(self, request_id: str, destination: SavepointDestination) -> None:
        """Record the destination of a requested savepoint; the savepoint's properties carry `request_id`.

        Raises:
            StorageError: The destination cannot be used.
        """
        self._storage.savepoint_directory(0, destination.name, destination.target)  # only for its errors
        with self._lock:
            self._destinations[request_id] = destination

    def check(self, destination: SavepointDestination) -> None:
        """Check that a savepoint can be written to its destination, before it is triggered. Waits for storage.

        A drain whose savepoint fails costs a restart of the job.

        Raises:
            StorageError: The destination cannot be written, or is in the location of a sink; names it and the cause.
        """
        if destination.target:
            self._check_outside_sinks(destination.target)
            self._storage.savepoint_directory(0, destination.name, destination.target).check()

    def _check_outside_sinks(self, target: str) -> None:
        """Refuse a place where readers of a sink's table would find the savepoint's files, or a program that cleans it up."""
        place = location_of(validate_directory(target))
        for stage, location in self._sinks.items():
            if f"{place}/".startswith(f"{location.rstrip('/')}/"):
                raise InvalidStorageUrl(
                    f"expected a directory for savepoints outside of what sinks write, found {target!r} in {location}, which is "
                    f"the location of the sink of stage {stage!r}: readers there would take the savepoint's files for rows. Name "
                    "another directory, or none: then it is stored with the pipeline's checkpoints"
                )

    def directory(self, checkpoint_id: int, properties: CheckpointProperties) -> SavepointDirectory:
        """The directory of a savepoint that was triggered."""
        with self._lock:
            if checkpoint_id not in self._directories:
                own = SavepointDestination("", properties.request_id)  # of a request of the job itself
                destination = self._destinations.get(properties.request_id, own)
                self._directories[checkpoint_id] = self._storage.savepoint_directory(
                    checkpoint_id, destination.name, destination.target
                )
            return self._directories[checkpoint_id]

    def keep(self, checkpoint_id: int) -> None:
        """Never delete this savepoint: its metadata is written, or may be written. Nothing is uploaded for it any more."""
        with self._lock:
            self._directories.pop(checkpoint_id, None)  # it holds an entry for each of its files

    def discard(self, checkpoint_id: int) -> None:
        """Delete the files of a failed savepoint. Does nothing for a checkpoint, and for a savepoint that is kept.

        Raises:
            StorageError: The savepoint cannot be deleted now; a later owner of the pipeline deletes it.
        """
        with self._lock:
            directory = self._directories.get(checkpoint_id)
        if directory is not None:
            directory.delete()
