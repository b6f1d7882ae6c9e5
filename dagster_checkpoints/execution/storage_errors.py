"""The failures of a request to storage that the rules of a run distinguish.

The most important distinction: after :class:`StorageUnavailable`, :class:`Precondition`, :class:`AlreadyExists` or
:class:`WriteConflict` a write certainly did not land; after :class:`OutcomeUnknown` it may have landed. Only the former allow
cleaning up. The storage floor adds its own errors.
"""

from __future__ import annotations

from dagster_checkpoints.errors import DagsterCheckpointsError


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
    """Another run owns the pipeline and is alive."""


class OwnershipLost(StorageError):
    """This run does not own the pipeline any more; it must stop and must not commit anything."""
