"""What storage holds of a pipeline for which it records no job: ``state.json`` is missing, or no run has begun a job under it.

A first start finds nothing. Where checkpoints or savepoints are found, ``state.json`` was lost, or a user has put savepoints
there, as the import of a plain query does: a run that does not name its start is refused, because it would read all input again
beside the rows that the sinks hold.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.storage_steps import StatePlace

_NAMED_IN_ERRORS = 5


class PipelineStateMissing(StorageError):
    """Storage has checkpoints or savepoints of the pipeline, and no record of the job that took them."""

    repeats: ClassVar[bool] = True


class ListUnlisted(msgspec.Struct, frozen=True):
    """List the pipeline's whole directory. Answer: :class:`UnlistedFiles`. Errors: StorageUnavailable."""


class UnlistedCheckpoint(msgspec.Struct, frozen=True, order=True):
    """A checkpoint or savepoint with metadata that no ``state.json`` names. The later one is the larger one.

    A checkpoint may never have been completed. Of two owners the later one has the larger epoch, and each counts ids upwards.

    Attributes:
        epoch: fencing epoch of the owner that wrote it; 0 if its metadata cannot be read.
        checkpoint_id: its id; 0 if its metadata cannot be read.
        location: its location, relative to the pipeline's directory.
    """

    epoch: int
    checkpoint_id: int
    location: str


class UnlistedFiles(msgspec.Struct, frozen=True):
    """The files of a pipeline for which no job is recorded.

    Attributes:
        checkpoints: checkpoints and savepoints with metadata, in any order.
        shared_epoch: the highest fencing epoch in the name of a state file; 0 without state files.
        imported: whether there are only savepoints that were made from plain queries, and no file that a run writes.
    """

    checkpoints: tuple[UnlistedCheckpoint, ...] = ()
    shared_epoch: int = 0
    imported: bool = False

    @property
    def highest_epoch(self) -> int:
        """The highest fencing epoch of an owner that wrote one of the files; 0 without files."""
        return max(self.shared_epoch, *(each.epoch for each in self.checkpoints), 0)

    @property
    def newest_first(self) -> tuple[UnlistedCheckpoint, ...]:
        """The checkpoints and savepoints, newest first."""
        return tuple(sorted(self.checkpoints, reverse=True))

    def later_than(self, location: str) -> tuple[str, ...]:
        """The locations of those that were taken after the one at this location, newest first; none if it is not here."""
        locations = [each.location for each in self.newest_first]
        return tuple(locations[: locations.index(location)]) if location in locations else ()

    def checkpoints_with_id(self, checkpoint_id: int) -> list[str]:
        """The locations of those with this id, newest first."""
        return [each.location for each in self.newest_first if each.checkpoint_id == checkpoint_id]


def check_start(unlisted: UnlistedFiles, place: StatePlace, *, exists: bool) -> None:
    """Refuse a run that does not name its start, if storage has checkpoints or savepoints that it would ignore.

    Args:
        unlisted: what storage holds.
        place: the location of the pipeline's ``state.json``.
        exists: whether there is a ``state.json``, which records no job.

    Raises:
        PipelineStateMissing: names them, and both ways on.
    """
    if unlisted.checkpoints:
        raise PipelineStateMissing(describe_unlisted(unlisted, place, exists=exists))


def describe_unlisted(unlisted: UnlistedFiles, place: StatePlace, *, exists: bool) -> str:
    """What is missing, what is there, and what the user can do."""
    locations = [each.location for each in unlisted.newest_first]
    more = f" and {len(locations) - _NAMED_IN_ERRORS} more" if len(locations) > _NAMED_IN_ERRORS else ""
    named = f"{', '.join(locations[:_NAMED_IN_ERRORS])}{more}"
    found = "a file that records no job" if exists else "no such file"
    if unlisted.imported and not exists:
        return (
            f"pipeline {place.pipeline!r} is imported, not started yet: expected {place.url}, which its first run writes, "
            f"found {found}, and savepoints made from plain queries: {named}. Start it with "
            f"restore_from: {locations[0]!r}, which goes on where the query has stopped, or, without the query's state, with "
            "restore_from: 'none'"
        )
    # A finished job has deleted its checkpoints, and nothing here says what it has committed.
    after_its_end = ", unless the job has finished since: its later rows would come twice"
    unless = after_its_end if locations[0].startswith("savepoints/") else ""
    return (
        f"expected {place.url}, which says where pipeline {place.pipeline!r} continues, found {found}, although storage holds "
        f"checkpoints or savepoints of the pipeline, newest first: {named}. A run that "
        "ignored them would read all input again, and the sinks would hold rows twice, or lose those that they replace. If you "
        "have a copy of the lost state.json (a bucket with versioning keeps it), put it back. Otherwise launch the run with "
        f"restore_from: {locations[0]!r}, which continues there{unless}. To begin again from the start, launch it with "
        "restore_from: 'none': the run deletes the old checkpoints, savepoints stay, and at_new_start of the sinks decides about "
        "their rows"
    )
