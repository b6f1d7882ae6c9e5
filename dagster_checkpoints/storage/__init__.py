"""Where checkpoints live: S3 or a directory, behind one small interface.

Read in this order: :mod:`base` (the object store), :mod:`local` and :mod:`s3` (the two kinds), :mod:`urls` and
:mod:`opening` (from a URL to a store), :mod:`layout` (what lies where), :mod:`pipeline_state`, :mod:`state_changes`,
:mod:`acquisition` and :mod:`ownership` (one owner per pipeline, and the commit point), :mod:`shared_state`,
:mod:`state_files` and :mod:`shared_files` (content-addressed state), :mod:`savepoints` and :mod:`savepoint_places`
(self-contained state), and :mod:`checkpoints`, the face over all of it. Beside them: :mod:`requests` and :mod:`request_box`
(what is asked of a running pipeline), :mod:`control` (the asker's side of it) and :mod:`status` (how it goes, for display).
"""

from dagster_checkpoints.storage.base import ObjectInfo, ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.storage.checkpoints import CheckpointStorage, StoredMetadata
from dagster_checkpoints.storage.control import (
    ControlError,
    NoRunningPipeline,
    PipelineControl,
    RequestFailed,
    RequestHandle,
    RequestTimedOut,
)
from dagster_checkpoints.storage.errors import (
    AlreadyExists,
    BucketMissing,
    CheckpointDiscarded,
    ConditionalWritesUnsupported,
    CorruptAnswer,
    CorruptPipelineState,
    CorruptRequest,
    CorruptStateFile,
    CorruptStatus,
    InvalidKey,
    InvalidRequest,
    InvalidStorageUrl,
    MissingCheckpoint,
    MissingSavepoint,
    MissingStateFile,
    NotFound,
    OutcomeUnknown,
    OwnershipLost,
    PipelineOwned,
    Precondition,
    RequestConflict,
    StateFileChanged,
    StorageAccessDenied,
    StorageError,
    StorageUnavailable,
    UnknownPipelineStateVersion,
    UnknownRequest,
    WriteConflict,
)
from dagster_checkpoints.storage.local import LocalStore
from dagster_checkpoints.storage.opening import open_store
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.pipeline_state import (
    CheckpointPointer,
    EndedBy,
    Job,
    JobStatus,
    Owner,
    PipelineState,
    describe_end,
)
from dagster_checkpoints.storage.renewal import LeaseRenewer
from dagster_checkpoints.storage.request_box import RequestBox
from dagster_checkpoints.storage.requests import (
    INVALID_REQUEST,
    NO_RUNNING_PIPELINE,
    Answer,
    AnswerStatus,
    ControlRequest,
    RequestKind,
)
from dagster_checkpoints.storage.savepoint_places import StoredSavepoint
from dagster_checkpoints.storage.savepoints import SavepointDirectory, StateFileProblem
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import StateFileLike, StoredFile
from dagster_checkpoints.storage.status import (
    CheckpointStatus,
    InstanceStatus,
    PendingStatus,
    Phase,
    PipelineStatus,
    StageStatus,
    StopStatus,
    decode_status,
    encode_status,
)

__all__ = [
    "INVALID_REQUEST",
    "NO_RUNNING_PIPELINE",
    "AlreadyExists",
    "Answer",
    "AnswerStatus",
    "BucketMissing",
    "CheckpointDiscarded",
    "CheckpointPointer",
    "CheckpointStatus",
    "CheckpointStorage",
    "ConditionalWritesUnsupported",
    "ControlError",
    "ControlRequest",
    "CorruptAnswer",
    "CorruptPipelineState",
    "CorruptRequest",
    "CorruptStateFile",
    "CorruptStatus",
    "EndedBy",
    "InstanceStatus",
    "InvalidKey",
    "InvalidRequest",
    "InvalidStorageUrl",
    "Job",
    "JobStatus",
    "LeaseRenewer",
    "LocalStore",
    "MissingCheckpoint",
    "MissingSavepoint",
    "MissingStateFile",
    "NoRunningPipeline",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "OutcomeUnknown",
    "Owner",
    "Ownership",
    "OwnershipLost",
    "PendingStatus",
    "Phase",
    "PipelineControl",
    "PipelineOwned",
    "PipelineState",
    "PipelineStatus",
    "Precondition",
    "PutMode",
    "RequestBox",
    "RequestConflict",
    "RequestFailed",
    "RequestHandle",
    "RequestKind",
    "RequestTimedOut",
    "SavepointDirectory",
    "SharedStateRegistry",
    "StageStatus",
    "StateFileChanged",
    "StateFileLike",
    "StateFileProblem",
    "StopStatus",
    "StorageAccessDenied",
    "StorageError",
    "StorageUnavailable",
    "StoredFile",
    "StoredMetadata",
    "StoredSavepoint",
    "UnknownPipelineStateVersion",
    "UnknownRequest",
    "UpdateVersion",
    "WriteConflict",
    "decode_status",
    "describe_end",
    "encode_status",
    "open_store",
]
