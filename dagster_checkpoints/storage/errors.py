"""What can go wrong with storage, one class per situation a caller treats differently.

The distinction that matters most: after :class:`StorageUnavailable`, :class:`Precondition`,
:class:`AlreadyExists` or :class:`WriteConflict` a write certainly did not land; after
:class:`OutcomeUnknown` nobody knows. Only the former allow cleaning up.
"""

from __future__ import annotations

from dagster_checkpoints.errors import DagsterCheckpointsError


class StorageError(DagsterCheckpointsError):
    """Base of all storage errors."""


class InvalidStorageUrl(StorageError):
    """The configured storage root is not a URL or path that storage understands."""


class InvalidKey(StorageError):
    """A key or relative path that would leave its root, or that the store reserves for itself."""


class NotFound(StorageError):
    """No object under this key."""


class AlreadyExists(StorageError):
    """``put(mode="create")`` found an object of somebody else's under the key."""


class Precondition(StorageError):
    """``put(mode=UpdateVersion(etag))`` found the object changed, or gone, since the etag was read."""


class WriteConflict(StorageError):
    """The store kept answering 409 to a conditional write. Nothing was written; it may be tried later."""


class StorageUnavailable(StorageError):
    """Storage cannot be reached or refuses to work. A write that raises this did not land."""


class StorageAccessDenied(StorageUnavailable):
    """Credentials are missing, wrong, or do not allow the operation."""


class BucketMissing(StorageUnavailable):
    """The bucket of an ``s3://`` URL does not exist."""


class OutcomeUnknown(StorageError):
    """A write was sent and no answer came: nobody knows whether it landed, so nothing may be deleted."""


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


class PipelineOwned(StorageError):
    """Another run owns the pipeline and is alive."""


class OwnershipLost(StorageError):
    """This run does not own the pipeline any more; it must stop and must not commit anything."""


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
