"""Checkpoint storage, in a store of `files`.

Read in this order: :mod:`layout` (names of files), :mod:`state_encoding` (``state.json``),
:mod:`processes` (whether the owner's process is known to have ended), :mod:`acquisition` and :mod:`ownership` (one owner per
pipeline, and the commit point), :mod:`shared_state`, :mod:`state_files` and :mod:`shared_files` (content-addressed state),
:mod:`savepoints` and :mod:`savepoint_places` (self-contained state), :mod:`checkpoint_metadata`, :mod:`checkpoint_deletion`, and
:mod:`checkpoints`, the interface to all of them. The rules are steps of the execution layer, which these modules perform.
"""

from dagster_checkpoints.errors import (
    AlreadyExists,
    BucketMissing,
    CheckpointDiscarded,
    ConditionalWritesUnsupported,
    CorruptAnswer,
    CorruptHistory,
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
from dagster_checkpoints.execution.origin import UNKNOWN_ORIGIN, Origin
from dagster_checkpoints.execution.pipeline_state import (
    CheckpointPointer,
    EndedBy,
    Job,
    JobState,
    Owner,
    PipelineState,
    describe_end,
    describe_owner,
)
from dagster_checkpoints.execution.unlisted_checkpoints import PipelineStateMissing
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectInfo, ObjectStore, PutMode, UpdateVersion
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.origin import PipelineNameTaken, check_origin
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.processes import is_gone, mark_descendants, this_process, without_owner_mark
from dagster_checkpoints.storage.renewal import LeaseRenewer
from dagster_checkpoints.storage.savepoint_places import StoredSavepoint
from dagster_checkpoints.storage.savepoints import SavepointDirectory, StateFileProblem
from dagster_checkpoints.storage.shared_state import SharedStateRegistry
from dagster_checkpoints.storage.state_files import CopyTarget, StateFileLike, StoredFile
from dagster_checkpoints.storage.state_sources import FileIdentity, LocalSource, StateSource, StoredObject

__all__ = [
    "UNKNOWN_ORIGIN",
    "AlreadyExists",
    "BucketMissing",
    "CheckpointDiscarded",
    "CheckpointPointer",
    "CheckpointStorage",
    "ConditionalWritesUnsupported",
    "CopyTarget",
    "CorruptAnswer",
    "CorruptHistory",
    "CorruptPipelineState",
    "CorruptRequest",
    "CorruptStateFile",
    "CorruptStatus",
    "EndedBy",
    "FileIdentity",
    "InvalidKey",
    "InvalidRequest",
    "InvalidStorageUrl",
    "Job",
    "JobState",
    "LeaseRenewer",
    "LocalSource",
    "LocalStore",
    "MissingCheckpoint",
    "MissingSavepoint",
    "MissingStateFile",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "Origin",
    "OutcomeUnknown",
    "Owner",
    "Ownership",
    "OwnershipLost",
    "PipelineNameTaken",
    "PipelineOwned",
    "PipelineState",
    "PipelineStateMissing",
    "Precondition",
    "PutMode",
    "RequestConflict",
    "SavepointDirectory",
    "SharedStateRegistry",
    "StateFileChanged",
    "StateFileLike",
    "StateFileProblem",
    "StateSource",
    "StorageAccessDenied",
    "StorageError",
    "StorageUnavailable",
    "StoredFile",
    "StoredObject",
    "StoredSavepoint",
    "UnknownPipelineStateVersion",
    "UnknownRequest",
    "UpdateVersion",
    "WriteConflict",
    "check_origin",
    "describe_end",
    "describe_owner",
    "is_gone",
    "mark_descendants",
    "open_store",
    "this_process",
    "without_owner_mark",
]
