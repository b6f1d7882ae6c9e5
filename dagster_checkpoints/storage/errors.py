"""The errors of storage, one class for each situation that a caller treats differently.

The errors that the rules of a run distinguish, for example whether a write has landed, are in
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
    """A key or relative path would leave its root, or uses a name that the store reserves."""


class NotFound(StorageError):
    """No object under this key."""


class StorageAccessDenied(StorageUnavailable):
    """Credentials are missing, wrong, or do not allow the operation."""


class BucketMissing(StorageUnavailable):
    """The bucket of an ``s3://`` URL does not exist."""


class ConditionalWritesUnsupported(StorageError):
    """The store ignores conditions on writes: without them two owners could both complete checkpoints."""


class MissingCheckpoint(NotFound):
    """A requested checkpoint has no ``_metadata``."""


class MissingSavepoint(MissingCheckpoint):
    """A requested savepoint has no ``_metadata``."""


class MissingStateFile(StorageError):
    """A checkpoint names a state file that storage does not hold."""


class CorruptStateFile(StorageError):
    """A state file's bytes differ from those that the checkpoint was taken with."""


class CheckpointDiscarded(StorageError):
    """Files are still being uploaded for a checkpoint that was aborted or deleted."""


class StateFileChanged(StorageError):
    """A local file changed while it was uploaded; files of a snapshot must never change."""


class CorruptPipelineState(StorageError):
    """``state.json`` cannot be read."""


class UnknownPipelineStateVersion(StorageError):
    """``state.json`` was written by a newer release."""


class InvalidRequest(StorageError):
    """The id, name or arguments of a control request are wrong: no pipeline could carry it out."""


class CorruptRequest(StorageError):
    """A file in ``requests/`` is not a request."""


class CorruptAnswer(StorageError):
    """An answer to a control request cannot be read."""


class CorruptStatus(StorageError):
    """``status.json`` cannot be read. It is for display: the pipeline does not need it."""


class UnknownRequest(StorageError):
    """No request has this id, or the request was answered long ago and its files have been deleted."""


class RequestConflict(StorageError):
    """A request id is used a second time, for a different request."""
