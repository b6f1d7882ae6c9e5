"""Where checkpoints live: S3 or a directory, behind one small interface.

Read in this order: :mod:`base` (the object store), :mod:`local` and :mod:`s3` (the two kinds), :mod:`opening`
(from a URL to a store), :mod:`layout` (what lies where), :mod:`pipeline_state`, :mod:`acquisition` and
:mod:`ownership` (one owner per pipeline, and the commit point), :mod:`shared_state` and :mod:`state_files`
(content-addressed state), and :mod:`checkpoints`, the face over all of it.
"""

from dagster_checkpoints.storage.base import ObjectInfo, ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.storage.checkpoints import CheckpointStorage, StoredMetadata
from dagster_checkpoints.storage.errors import (
    AlreadyExists,
    BucketMissing,
    CheckpointDiscarded,
    ConditionalWritesUnsupported,
    CorruptPipelineState,
    CorruptStateFile,
    InvalidKey,
    InvalidStorageUrl,
    MissingCheckpoint,
    MissingStateFile,
    NotFound,
    OutcomeUnknown,
    OwnershipLost,
    PipelineOwned,
    Precondition,
    StateFileChanged,
    StorageAccessDenied,
    StorageError,
    StorageUnavailable,
    UnknownPipelineStateVersion,
    WriteConflict,
)
from dagster_checkpoints.storage.local import LocalStore
from dagster_checkpoints.storage.opening import open_store
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.pipeline_state import CheckpointPointer, JobStatus, Owner, PipelineState
from dagster_checkpoints.storage.renewal import LeaseRenewer
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import StateFileLike, StoredFile

__all__ = [
    "AlreadyExists",
    "BucketMissing",
    "CheckpointDiscarded",
    "CheckpointPointer",
    "CheckpointStorage",
    "ConditionalWritesUnsupported",
    "CorruptPipelineState",
    "CorruptStateFile",
    "InvalidKey",
    "InvalidStorageUrl",
    "JobStatus",
    "LeaseRenewer",
    "LocalStore",
    "MissingCheckpoint",
    "MissingStateFile",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "OutcomeUnknown",
    "Owner",
    "Ownership",
    "OwnershipLost",
    "PipelineOwned",
    "PipelineState",
    "Precondition",
    "PutMode",
    "SharedStateRegistry",
    "StateFileChanged",
    "StateFileLike",
    "StorageAccessDenied",
    "StorageError",
    "StorageUnavailable",
    "StoredFile",
    "StoredMetadata",
    "UnknownPipelineStateVersion",
    "UpdateVersion",
    "WriteConflict",
    "open_store",
]
