"""The base class of every error that this package raises on purpose.

Each floor defines its subclasses beside the code that raises them; catching
:class:`DagsterCheckpointsError` catches them all.
"""

from __future__ import annotations

from typing import ClassVar


class DagsterCheckpointsError(Exception):
    """An error whose text says what was expected, what was found, where, and what to do.

    Attributes:
        repeats: whether another attempt of the job would fail with the same error, as with a wrong plan or a refused path: the
            job fails without a restart.
    """

    repeats: ClassVar[bool] = False


def repeats_by_nature(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way, because the error or one of its causes repeats."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, DagsterCheckpointsError) and cause.repeats:
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


# Of storage.
#
# The most important distinction: after StorageUnavailable, Precondition, AlreadyExists or WriteConflict a write certainly did not
# land; after OutcomeUnknown it may have landed. Only the former allow cleaning up.


class StorageError(DagsterCheckpointsError):
    """Base of all storage errors."""


class AlreadyExists(StorageError):
    """A write that creates an object found another writer's object under the key."""


class Precondition(StorageError):
    """A conditional write found the object changed or deleted since its version was read."""


class WriteConflict(StorageError):
    """The store kept answering 409 to a conditional write. Nothing was written; it may be tried later."""


class StorageUnavailable(StorageError):
    """Storage cannot be reached or refuses to work. A write that raises this did not land."""


class OutcomeUnknown(StorageError):
    """A write was sent and no answer came: it may have landed, so nothing may be deleted."""


class PipelineOwned(StorageError):
    """Another run owns the pipeline and is alive.

    Args:
        message: the error's text.
        run_id: id of that run; "" if several have owned the pipeline.
    """

    def __init__(self, message: str, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


class OwnershipLost(StorageError):
    """This run does not own the pipeline any more; it must stop and must not commit anything."""


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


class CorruptHistory(StorageError):
    """A file in ``history/`` cannot be read. It is for the report: the pipeline does not need it."""


class UnknownRequest(StorageError):
    """No request has this id, or the request was answered long ago and its files have been deleted."""


class RequestConflict(StorageError):
    """A request id is used a second time, for a different request."""
