"""What can go wrong with storage, one class per situation a caller treats differently.

Those that the rules of a run tell apart, among them whether a write has landed, are
:mod:`dagster_checkpoints.execution.storage_errors`.
"""

from __future__ import annotations

from dagster_checkpoints.execution.storage_errors import AlreadyExists as AlreadyExists
from dagster_checkpoints.execution.storage_errors import OutcomeUnknown as OutcomeUnknown
from dagster_checkpoints.execution.storage_errors import OwnershipLost as OwnershipLost
from dagster_checkpoints.execution.storage_errors import PipelineOwned as PipelineOwned
from dagster_checkpoints.execution.storage_errors import Precondition as Precondition
from dagster_checkpoints.execution.storage_errors import StorageError as StorageError
from dagster_checkpoints.execution.storage_errors import StorageUnavailable as StorageUnavailable
from dagster_checkpoints.execution.storage_errors import WriteConflict as WriteConflict


class InvalidStorageUrl(StorageError):
    """The configured storage root is not a URL or path that storage understands."""


class InvalidKey(StorageError):
    """A key or relative path that would leave its root, or that the store reserves for itself."""


class NotFound(StorageError):
    """No object under this key."""


class StorageAccessDenied(StorageUnavailable):
    """Credentials are missing, wrong, or do not allow the operation."""


class BucketMissing(StorageUnavailable):
    """The bucket of an ``s3://`` URL does not exist."""


class ConditionalWritesUnsupported(StorageError):
    """The store ignores conditions on writes, without which two owners could both complete checkpoints."""


class MissingCheckpoint(NotFound):
    """A checkpoint was asked for whose ``_metadata`` is not there."""


class MissingSavepoint(MissingCheckpoint):
    """A savepoint was asked for whose ``_metadata`` is not there."""


class MissingStateFile(StorageError):
    """A checkpoint names a state file that storage does not have."""


class CorruptStateFile(StorageError):
    """A state file's bytes are not the ones the checkpoint was taken with."""


class CheckpointDiscarded(StorageError):
    """Files are still being uploaded for a checkpoint that was given up."""


class StateFileChanged(StorageError):
    """A local file changed while it was uploaded; files of a snapshot must never change."""


class CorruptPipelineState(StorageError):
    """``state.json`` cannot be read."""


class UnknownPipelineStateVersion(StorageError):
    """``state.json`` was written by a newer release."""


class InvalidRequest(StorageError):
    """A control request that cannot be carried out whatever the pipeline does: its id, name or arguments are wrong."""


class CorruptRequest(StorageError):
    """A file in ``requests/`` is not a request."""


class CorruptAnswer(StorageError):
    """An answer to a control request cannot be read."""


class CorruptStatus(StorageError):
    """``status.json`` cannot be read. It is for display: the pipeline does not need it."""


class UnknownRequest(StorageError):
    """No request has this id, or it was answered so long ago that it was swept."""


class RequestConflict(StorageError):
    """A request id is used again for something else than what it asked for the first time."""
