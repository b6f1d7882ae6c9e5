"""Writing a checkpoint that every task has acknowledged: the order of requests, and the meaning of each failure; as steps.

The commit point is one conditional replacement of the pipeline's `state.json` (:mod:`ownership`). Must not know when checkpoints
are taken, nor the content of their metadata.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.coordination.events import MetadataOutcomeUnknown, MetadataWriteFailed, MetadataWritten
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import (
    AlreadyExists,
    OutcomeUnknown,
    OwnershipLost,
    StorageError,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.execution.checkpoint_deletion import RemoveMark
from dagster_checkpoints.execution.storage_steps import Steps
from dagster_checkpoints.state.errors import PartlyFinishedUnionState
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.restore import check_union_states

_CREATE_ATTEMPTS = 3


class BuildMetadata(msgspec.Struct, frozen=True):
    """Build the metadata from the states that the tasks have acknowledged.

    Answer: the CheckpointMetadata.
    """

    checkpoint_id: int


class ReserveId(msgspec.Struct, frozen=True):
    """Reserve the id of a savepoint: :meth:`OwnershipSteps.reserve`. Answer: None."""

    checkpoint_id: int


class StoreMetadata(msgspec.Struct, frozen=True):
    """Write a checkpoint's metadata: :func:`write_metadata`. Answer: the checkpoint's location."""

    checkpoint_id: int


class StoreSavepoint(msgspec.Struct, frozen=True):
    """Complete a savepoint's directory: :func:`complete_savepoint`. Answer: the savepoint's location."""

    checkpoint_id: int


class CompleteCheckpoint(msgspec.Struct, frozen=True):
    """Make the checkpoint the newest completed one: :meth:`OwnershipSteps.complete`. Answer: None."""

    checkpoint_id: int
    location: str
    kind: str


class WriteResult(msgspec.Struct, frozen=True):
    """The outcome of writing a checkpoint.

    Attributes:
        outcome: the event for the coordinator.
        keep: whether the directory of a savepoint must stay: its metadata is written, or may be.
    """

    outcome: MetadataWritten | MetadataWriteFailed | MetadataOutcomeUnknown
    keep: bool


class CreateObject(msgspec.Struct, frozen=True):
    """Create the object if it is absent.

    Answer: None.
    Errors: AlreadyExists, StorageUnavailable, WriteConflict, OutcomeUnknown.
    """


class CompareObject(msgspec.Struct, frozen=True):
    """Compare the stored object with the one that was to be created.

    Answer: None.
    Errors: AlreadyExists: the stored object has other content.
    """


class CheckStateFiles(msgspec.Struct, frozen=True):
    """Check that every file that a savepoint's metadata names is in its directory, with the right size.

    Answer: None.
    Errors: StorageError: a file is missing or of another size, or storage does not answer.
    """


class RenewLease(msgspec.Struct, frozen=True):
    """Find out whether this run still owns the pipeline: :meth:`OwnershipSteps.renew`.

    Answer: True if it does; False if storage did not answer.
    Errors: OwnershipLost.
    """


def write_checkpoint(checkpoint_id: int, properties: CheckpointProperties) -> Steps[WriteResult]:
    """Write the metadata, then make `state.json` name it. Never raises: every failure is an outcome.

    A savepoint that does not stop the job is complete with its metadata: no restart begins from it.

    Args:
        checkpoint_id: id of the checkpoint or savepoint.
        properties: its properties; read are whether it is a savepoint, and whether it stops the job.
    """
    try:
        metadata: CheckpointMetadata = yield BuildMetadata(checkpoint_id)
        check_union_states(metadata)
        if properties.is_savepoint:
            # First, because no later checkpoint of this job may have the savepoint's id: sinks name transactions by it.
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
        # Does not count: a restart does not help, it goes back in front of the end that the instances have reached.
        closing = FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING
        return WriteResult(MetadataWriteFailed(checkpoint_id, str(error), closing), keep=False)
    except Exception as error:
        return WriteResult(MetadataWriteFailed(checkpoint_id, f"{type(error).__name__}: {error}"), keep=False)
    return WriteResult(MetadataWritten(checkpoint_id, location), keep=True)


def write_metadata() -> Steps[None]:
    """Create a checkpoint's metadata only if it is absent; that does *not* complete the checkpoint.

    Raises:
        AlreadyExists: other metadata is stored.
        StorageUnavailable, WriteConflict: nothing was written.
        OutcomeUnknown: it may be stored; delete nothing.
    """
    if not (yield from create_if_absent()):
        yield CompareObject()


def complete_savepoint(url: str, confirm: bool) -> Steps[None]:
    """Complete a savepoint: check its files, then create its metadata if absent.

    Args:
        url: URL of the savepoint's directory, for the text of errors.
        confirm: whether it is in the pipeline's own directory, where a later owner deletes incomplete savepoints. Then the
            owner confirms after the metadata that it still owns the pipeline.

    Raises:
        OwnershipLost: the pipeline was taken over; the new owner may have deleted the savepoint.
        StorageError: as the requests, and as :func:`write_metadata`.
    """
    yield CheckStateFiles()
    yield from write_metadata()
    # If this run still owns the pipeline after the metadata was written, no other owner has deleted the savepoint.
    if confirm and not (yield RenewLease()):
        raise OutcomeUnknown(f"savepoint {url} is written, but storage did not answer whether this run still owns the pipeline")
    with suppress(StorageError):  # the savepoint is complete without that
        yield RemoveMark()


def create_if_absent() -> Steps[bool]:
    """Create an object; repeat the request while its outcome is unknown.

    Returns:
        False if the object exists, perhaps by this write, whose answer was lost: compare.

    Raises:
        StorageUnavailable, WriteConflict: nothing was written.
        OutcomeUnknown: it may have been written.
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
            # Repeated, it lands now, or the object is found to exist.
            if attempts == _CREATE_ATTEMPTS:
                raise
        except (StorageUnavailable, WriteConflict) as error:
            if attempts > 1:  # an earlier attempt may have landed
                raise OutcomeUnknown(str(error)) from error
            raise
