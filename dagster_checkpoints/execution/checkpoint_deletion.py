"""Deleting checkpoints, savepoints and state files: the order of requests, and which files stay; as steps.

No checkpoint that `state.json` names is deleted, no file of a later owner, and no file that a retained or pending checkpoint
names. After a crash between two requests a later owner deletes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.shared_files import SharedName
from dagster_checkpoints.execution.storage_steps import Steps

_DELETE_BATCH = 500


class ForgetCheckpoint(msgspec.Struct, frozen=True):
    """Take the checkpoint out of `state.json`: :meth:`OwnershipSteps.forget`. Answer: None."""

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
    """Delete the directory of a failed savepoint that need not be kept; does nothing for a checkpoint. Answer: None."""

    checkpoint_id: int


class DiscardMetadata(msgspec.Struct, frozen=True):
    """Delete the metadata of a checkpoint that was not completed, if it was written. Answer: None."""

    checkpoint_id: int


class DiscardPendingFiles(msgspec.Struct, frozen=True):
    """Delete the state files that only this pending checkpoint names: :func:`delete_files`. Answer: the number of files."""

    checkpoint_id: int


class DeleteFiles(msgspec.Struct, frozen=True):
    """Delete files in ``shared/``. Answer: None."""

    names: tuple[str, ...]


class MarkIncomplete(msgspec.Struct, frozen=True):
    """Write the mark of an incomplete savepoint. Answer: None."""


class DeleteSavepointMetadata(msgspec.Struct, frozen=True):
    """Delete the savepoint's metadata. Answer: None."""


class DeleteSavepointFiles(msgspec.Struct, frozen=True):
    """Delete the savepoint's state files. Answer: None."""


class RemoveMark(msgspec.Struct, frozen=True):
    """Delete the mark of an incomplete savepoint. Answer: None."""


class RemoveMarkIfEmpty(msgspec.Struct, frozen=True):
    """Delete the mark of an incomplete savepoint, unless state files are left. Answer: None."""


class ListMetadata(msgspec.Struct, frozen=True):
    """List the metadata of checkpoints. Answer: a sequence of :class:`FoundMetadata`."""


class IsRegistered(msgspec.Struct, frozen=True):
    """Whether a checkpoint's files are registered, because it is being restored or pending. Answer: a bool."""

    location: str


class ListSavepointDirectories(msgspec.Struct, frozen=True):
    """List the directories in the pipeline's own ``savepoints/``. Answer: their locations."""


class ReadMark(msgspec.Struct, frozen=True):
    """Read the mark of an incomplete savepoint. Answer: an :class:`IncompleteMark`; None without one."""

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
    """Delete those of these files that no checkpoint names: :func:`delete_files`. Answer: the number of files."""

    names: frozenset[str]


class FoundMetadata(msgspec.Struct, frozen=True):
    """The metadata of a checkpoint in storage; the checkpoint may never have been completed.

    Attributes:
        location: location of the checkpoint.
        epoch: fencing epoch of the owner that wrote it.
    """

    location: str
    epoch: int


class IncompleteMark(msgspec.Struct, frozen=True):
    """The pipeline and the owner of an incomplete savepoint.

    Attributes:
        pipeline: name of the pipeline.
        epoch: fencing epoch of the owner that writes or deletes it.
    """

    pipeline: str
    epoch: int


def delete_checkpoint(location: str, savepoint: bool) -> Steps[int]:
    """Delete a checkpoint's metadata, then the state files that only it names; or delete a claimed savepoint.

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


def discard_states(checkpoint_id: int, may_delete: Callable[[], None]) -> Steps[int]:
    """Delete the files that only an aborted checkpoint or savepoint names, and metadata that was written and not completed.

    The metadata goes first: after the loss of `state.json` a restore finds checkpoints by their metadata, and needs their files.

    Args:
        checkpoint_id: id of the checkpoint or savepoint.
        may_delete: raises unless this process may still delete: another owner may be restoring from such metadata.

    Returns:
        The number of files deleted from ``shared/``.
    """
    yield DiscardSavepoint(checkpoint_id)
    may_delete()
    yield DiscardMetadata(checkpoint_id)
    deleted: int = yield DiscardPendingFiles(checkpoint_id)
    return deleted


def delete_savepoint(own: bool) -> Steps[None]:
    """Delete a savepoint, complete or not. May be repeated.

    Args:
        own: whether it is in the pipeline's own ``savepoints/``, where a later owner deletes savepoints that carry the mark.
    """
    if own:
        yield MarkIncomplete()  # first, so that the next sweep finishes an interrupted deletion
    yield DeleteSavepointMetadata()  # without it there is no savepoint
    yield DeleteSavepointFiles()
    # A second time: an owner that lost the pipeline may have written it in between.
    yield DeleteSavepointMetadata()
    # If such an owner has stored files in between, the mark stays, so that the next sweep deletes them.
    yield RemoveMarkIfEmpty()


def delete_files(names: Collection[str], may_delete: Callable[[], None]) -> Steps[None]:
    """Delete files in ``shared/`` that no checkpoint names.

    Args:
        names: names of the files.
        may_delete: raises unless this process may still delete; called before each request.
    """
    ordered = sorted(names)
    for start in range(0, len(ordered), _DELETE_BATCH):
        # Another run may become the owner before the request is carried out; its checkpoints use none of these names.
        may_delete()
        yield DeleteFiles(tuple(ordered[start : start + _DELETE_BATCH]))


def sweep(files: bool) -> Steps[None]:
    """Delete files that killed owners have left in storage; for the owner, after it has registered what it restores.

    Args:
        files: whether every retained checkpoint could be read, so that files that none of them names may be deleted.
    """
    yield SweepSavepoints()
    yield SweepMetadata()
    if files:
        yield SweepFiles()


def sweep_savepoints(ownership: OwnershipSteps, pipeline: str) -> Steps[int]:
    """Delete savepoints in ``savepoints/`` that earlier owners began and never completed. Returns their number.

    Only savepoints with the mark of an earlier owner of this pipeline are deleted: savepoints that a user copies there stay,
    complete or not, and so do those of this owner.
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

    The state files that only they named are deleted by :func:`sweep_files`.
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


def sweep_files(epoch: int) -> Steps[int]:
    """Delete every shared file that no checkpoint names. Returns the number of files.

    Args:
        epoch: fencing epoch of this owner; files of later owners, which appear only after this owner has lost the pipeline, stay.
    """
    found: Sequence[SharedName] = yield ListFiles()
    deleted: int = yield DeleteUnnamed(frozenset(str(name) for name in found if name.epoch <= epoch))
    return deleted
