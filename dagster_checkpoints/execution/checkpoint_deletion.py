"""Deleting checkpoints, savepoints and state files: in which order, and what is left alone; as steps.

Nothing that `state.json` lists is deleted, nothing of a later owner, and nothing that a retained or pending checkpoint names. A
crash between two requests leaves only what a later owner sweeps up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.shared_files import SharedName
from dagster_checkpoints.execution.storage_steps import Steps

_DELETE_BATCH = 500


class ForgetCheckpoint(msgspec.Struct, frozen=True):
    """Take it out of `state.json`: :meth:`OwnershipSteps.forget`. Answer: None."""

    location: str


class DeleteMetadata(msgspec.Struct, frozen=True):
    """Delete the metadata of a checkpoint. Answer: None."""

    location: str


class DeleteSavepoint(msgspec.Struct, frozen=True):
    """Delete a savepoint's directory: :func:`delete_savepoint`. Answer: None."""

    location: str


class DiscardFiles(msgspec.Struct, frozen=True):
    """Delete the state files that only this checkpoint names: :func:`delete_files`. Answer: the number of files."""

    location: str


class DiscardSavepoint(msgspec.Struct, frozen=True):
    """Delete the directory of a savepoint that has failed, unless it is none, or is to be kept. Answer: None."""

    checkpoint_id: int


class DiscardPendingFiles(msgspec.Struct, frozen=True):
    """Delete the state files that only this pending checkpoint names: :func:`delete_files`. Answer: the number of files."""

    checkpoint_id: int


class DeleteFiles(msgspec.Struct, frozen=True):
    """Delete files in ``shared/``. Answer: None."""

    names: tuple[str, ...]


class MarkIncomplete(msgspec.Struct, frozen=True):
    """Write the mark that says that a savepoint is incomplete. Answer: None."""


class DeleteSavepointMetadata(msgspec.Struct, frozen=True):
    """Delete the savepoint's metadata. Answer: None."""


class DeleteSavepointFiles(msgspec.Struct, frozen=True):
    """Delete the savepoint's state files. Answer: None."""


class RemoveMark(msgspec.Struct, frozen=True):
    """Delete the mark that says that a savepoint is incomplete. Answer: None."""


class RemoveMarkIfEmpty(msgspec.Struct, frozen=True):
    """Delete the mark that says that a savepoint is incomplete, unless state files are left. Answer: None."""


class ListMetadata(msgspec.Struct, frozen=True):
    """List the metadata of checkpoints. Answer: a sequence of :class:`FoundMetadata`."""


class IsRegistered(msgspec.Struct, frozen=True):
    """Whether a checkpoint's files are registered: it is restored from, or pending. Answer: a bool."""

    location: str


class ListSavepointDirectories(msgspec.Struct, frozen=True):
    """List the directories in the pipeline's own ``savepoints/``. Answer: their locations."""


class ReadMark(msgspec.Struct, frozen=True):
    """Read the mark that says whose an incomplete savepoint is. Answer: an :class:`IncompleteMark`; None if there is none."""

    location: str


class HasMetadata(msgspec.Struct, frozen=True):
    """Whether the savepoint is complete. Answer: a bool."""

    location: str


class SweepSavepoints(msgspec.Struct, frozen=True):
    """Sweep ``savepoints/``: :func:`sweep_savepoints`. Answer: the number of savepoints deleted."""


class SweepMetadata(msgspec.Struct, frozen=True):
    """Sweep ``checkpoints/``: :func:`sweep_metadata`. Answer: the number of checkpoints deleted."""


class SweepFiles(msgspec.Struct, frozen=True):
    """Sweep ``shared/``: :func:`sweep_files`. Answer: the number of files deleted."""


class ListFiles(msgspec.Struct, frozen=True):
    """List ``shared/``. Answer: the :class:`SharedName` of each file."""


class DeleteUnnamed(msgspec.Struct, frozen=True):
    """Of these files, delete those that no checkpoint names: :func:`delete_files`. Answer: the number of files."""

    names: frozenset[str]


class FoundMetadata(msgspec.Struct, frozen=True):
    """A checkpoint's metadata that is in storage; the checkpoint may never have been completed.

    Attributes:
        location: of the checkpoint.
        epoch: of the owner that wrote it.
    """

    location: str
    epoch: int


class IncompleteMark(msgspec.Struct, frozen=True):
    """Whose an incomplete savepoint is.

    Attributes:
        pipeline: its name.
        epoch: of the owner that writes or deletes it.
    """

    pipeline: str
    epoch: int


def delete_checkpoint(location: str, savepoint: bool) -> Steps[int]:
    """Delete a checkpoint's metadata, then the state files that only it names; or a claimed savepoint.

    Returns:
        The number of files deleted from ``shared/``.
    """
    yield ForgetCheckpoint(location)
    if savepoint:
        yield DeleteSavepoint(location)
        return 0
    yield DeleteMetadata(location)
    deleted: int = yield DiscardFiles(location)
    return deleted


def discard_states(checkpoint_id: int) -> Steps[int]:
    """Delete what only an aborted checkpoint or savepoint names. Returns the number of files deleted from ``shared/``."""
    yield DiscardSavepoint(checkpoint_id)
    deleted: int = yield DiscardPendingFiles(checkpoint_id)
    return deleted


def delete_savepoint(own: bool) -> Steps[None]:
    """Delete a savepoint, complete or not. May be repeated.

    Args:
        own: it is in the pipeline's own ``savepoints/``, where a later owner sweeps up what carries the mark.
    """
    if own:
        yield MarkIncomplete()  # until all is gone: what was complete would else never be swept
    yield DeleteSavepointMetadata()  # without it there is no savepoint
    yield DeleteSavepointFiles()
    # Once more: an owner that lost the pipeline may have written it in between.
    yield DeleteSavepointMetadata()
    # With files that such an owner has stored in between the mark stays, so that the next sweep deletes them.
    yield RemoveMarkIfEmpty()


def delete_files(names: Collection[str], may_delete: Callable[[], None]) -> Steps[None]:
    """Delete files in ``shared/`` that nothing names.

    Args:
        names: of the files.
        may_delete: raises unless this process may still delete; asked before each request.
    """
    ordered = sorted(names)
    for start in range(0, len(ordered), _DELETE_BATCH):
        # Between this and the request another run may become the owner; what that one relies on has none of these names.
        may_delete()
        yield DeleteFiles(tuple(ordered[start : start + _DELETE_BATCH]))


def sweep(files: bool) -> Steps[None]:
    """Delete what killed owners have left behind; for the owner, once what it restores is registered.

    Args:
        files: every retained checkpoint could be read, so files that none of them names may be deleted.
    """
    yield SweepSavepoints()
    yield SweepMetadata()
    if files:
        yield SweepFiles()


def sweep_savepoints(ownership: OwnershipSteps, pipeline: str) -> Steps[int]:
    """Delete what earlier owners began to write in ``savepoints/`` and never completed. Returns their number.

    Only what says of itself that an earlier owner of this pipeline was writing it: a savepoint that a user copies there is
    left alone, complete or not, and so are those of this owner.
    """
    swept = 0
    directories: Sequence[str] = yield ListSavepointDirectories()
    for location in directories:
        mark: IncompleteMark | None = yield ReadMark(location)
        if mark is None or mark.pipeline != pipeline or mark.epoch >= ownership.epoch:
            continue
        if not (yield HasMetadata(location)):
            ownership.ensure()
            yield DeleteSavepoint(location)
            swept += 1
    return swept


def sweep_metadata(ownership: OwnershipSteps) -> Steps[int]:
    """Delete the metadata of checkpoints that earlier owners wrote but never completed. Returns their number.

    The state files that only they named go with :func:`sweep_files`.
    """
    found: Sequence[FoundMetadata] = yield ListMetadata()
    kept = ownership.in_use
    swept = 0
    for metadata in found:
        registered: bool = yield IsRegistered(metadata.location)
        if metadata.epoch < ownership.epoch and metadata.location not in kept and not registered:
            ownership.ensure()
            yield DeleteMetadata(metadata.location)
            swept += 1
    return swept


def sweep_files(epoch: int, keep: frozenset[str]) -> Steps[int]:
    """Delete every shared file that is neither kept nor named by a checkpoint. Returns the number of files.

    Args:
        epoch: of this owner: what a later owner has stored is seen only once the pipeline is lost, and stays.
        keep: names of files that stay.
    """
    found: Sequence[SharedName] = yield ListFiles()
    deleted: int = yield DeleteUnnamed(frozenset(str(name) for name in found if name.epoch <= epoch) - keep)
    return deleted
