"""Writing a checkpoint that every task has acknowledged: in which order, and what each failure means; as steps.

The commit point is one conditional replacement of the pipeline's `state.json` (:mod:`ownership`). Must not know when checkpoints
are taken, nor what their metadata says.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from dagster_checkpoints.coordination import (
    CheckpointProperties,
    FailureReason,
    MetadataOutcomeUnknown,
    MetadataWriteFailed,
    MetadataWritten,
)
from dagster_checkpoints.execution.checkpoint_deletion import RemoveMark
from dagster_checkpoints.execution.storage_errors import (
    AlreadyExists,
    OutcomeUnknown,
    OwnershipLost,
    StorageError,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.execution.storage_steps import Steps
from dagster_checkpoints.state import CheckpointMetadata, PartlyFinishedUnionState, check_union_states

_CREATE_ATTEMPTS = 3


class BuildMetadata(msgspec.Struct, frozen=True):
    """Make the metadata from what the tasks have acknowledged with.

    Answer: the CheckpointMetadata.
    """

    checkpoint_id: int


class ReserveId(msgspec.Struct, frozen=True):
    """Take the id of a savepoint: :meth:`OwnershipSteps.reserve`. Answer: None."""

    checkpoint_id: int


class StoreMetadata(msgspec.Struct, frozen=True):
    """Write a checkpoint's metadata: :func:`write_metadata`. Answer: the checkpoint's location."""

    checkpoint_id: int


class StoreSavepoint(msgspec.Struct, frozen=True):
    """Complete a savepoint's directory: :func:`complete_savepoint`. Answer: the savepoint's location."""

    checkpoint_id: int


class CompleteCheckpoint(msgspec.Struct, frozen=True):
    """Make it the newest completed one: :meth:`OwnershipSteps.complete`. Answer: None."""

    checkpoint_id: int
    location: str
    kind: str


class WriteResult(msgspec.Struct, frozen=True):
    """How the writing of a checkpoint has ended.

    Attributes:
        outcome: for the coordinator.
        keep: a savepoint's directory must not be deleted any more: its metadata is written, or may be.
    """

    outcome: MetadataWritten | MetadataWriteFailed | MetadataOutcomeUnknown
    keep: bool


class CreateObject(msgspec.Struct, frozen=True):
    """Create the object if it is absent.

    Answer: None.
    Errors: AlreadyExists, StorageUnavailable, WriteConflict, OutcomeUnknown.
    """


class CompareObject(msgspec.Struct, frozen=True):
    """Compare the object that is there with the one that was to be created.

    Answer: None.
    Errors: AlreadyExists: it has other content.
    """


class CheckStateFiles(msgspec.Struct, frozen=True):
    """See that every file that a savepoint's metadata names is in its directory, and of the right size.

    Answer: None.
    Errors: StorageError: one is not, or storage cannot be asked.
    """


class RenewLease(msgspec.Struct, frozen=True):
    """Learn whether this run still owns the pipeline: :meth:`OwnershipSteps.renew`.

    Answer: True if it does; False if storage did not say.
    Errors: OwnershipLost.
    """


def write_checkpoint(checkpoint_id: int, properties: CheckpointProperties) -> Steps[WriteResult]:
    """Write the metadata, then make `state.json` name it. Never raises: the outcome says what is known.

    A savepoint that does not stop the job is complete with its metadata: no restart begins from it.

    Args:
        checkpoint_id: of the checkpoint or savepoint.
        properties: which of the two it is, and whether it stops the job.
    """
    try:
        metadata: CheckpointMetadata = yield BuildMetadata(checkpoint_id)
        check_union_states(metadata)
        if properties.is_savepoint:
            # First: no later checkpoint of this job may have the savepoint's id, for sinks name what they commit by it.
            yield ReserveId(checkpoint_id)
            location: str = yield StoreSavepoint(checkpoint_id)
        else:
            location = yield StoreMetadata(checkpoint_id)
        if properties.commits:
            yield CompleteCheckpoint(checkpoint_id, location, properties.kind.value)
    except OutcomeUnknown as error:
        return WriteResult(MetadataOutcomeUnknown(checkpoint_id, str(error)), keep=True)
    except OwnershipLost as error:
        # Its metadata may be written: the run that owns the pipeline now may be restoring from it already.
        return WriteResult(MetadataWriteFailed(checkpoint_id, str(error)), keep=True)
    except PartlyFinishedUnionState as error:
        return WriteResult(MetadataWriteFailed(checkpoint_id, str(error), FailureReason.CHECKPOINT_DECLINED), keep=False)
    except Exception as error:
        return WriteResult(MetadataWriteFailed(checkpoint_id, f"{type(error).__name__}: {error}"), keep=False)
    return WriteResult(MetadataWritten(checkpoint_id, location), keep=True)


def write_metadata() -> Steps[None]:
    """Create a checkpoint's metadata only if it is absent; the checkpoint is *not* complete by that.

    Raises:
        AlreadyExists: other metadata is there.
        StorageUnavailable, WriteConflict: nothing was written.
        OutcomeUnknown: it may be there; delete nothing.
    """
    if not (yield from create_if_absent()):
        yield CompareObject()


def complete_savepoint(url: str, confirm: bool) -> Steps[None]:
    """Complete a savepoint: its metadata, created only if absent, once every file is seen to be there.

    Args:
        url: of the savepoint's directory, for the text of errors.
        confirm: it is in the pipeline's own directory, where a later owner of the pipeline sweeps up what is incomplete: what
            was swept meanwhile does not count, so the owner confirms that it still is one.

    Raises:
        OwnershipLost: the pipeline was taken over meanwhile; the savepoint may have been swept.
        StorageError: as the requests, and as :func:`write_metadata`.
    """
    yield CheckStateFiles()
    yield from write_metadata()
    # An owner that still owns the pipeline after the metadata was there cannot have been swept before.
    if confirm and not (yield RenewLease()):
        raise OutcomeUnknown(f"savepoint {url} is written, but storage did not say whether this run still owns the pipeline")
    with suppress(StorageError):  # it is complete all the same
        yield RemoveMark()


def create_if_absent() -> Steps[bool]:
    """Create an object, trying again where it may have been created.

    Returns:
        False if there is one, which may be this very write whose answer was lost: compare.

    Raises:
        StorageUnavailable, WriteConflict: nothing was written.
        OutcomeUnknown: it still may have been written.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            yield CreateObject()
            return True
        except AlreadyExists:
            return False
        except OutcomeUnknown:
            # Once more: it lands now, or is found to be there.
            if attempts == _CREATE_ATTEMPTS:
                raise
        except (StorageUnavailable, WriteConflict) as error:
            if attempts > 1:  # an earlier attempt may have landed
                raise OutcomeUnknown(str(error)) from error
            raise
