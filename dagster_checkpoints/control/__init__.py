"""A running pipeline is controlled by request files in its storage and reports its progress in a status file.

Read in this order: :mod:`requests` (requests and answers as values, and their encoding), :mod:`request_box` (the files),
:mod:`pipeline_control` (the requester's side, in any process that reaches the storage) and :mod:`status` (what displays and
sensors read). The owner's side is :mod:`dagster_checkpoints.spark.job.request_poller`.
"""

from dagster_checkpoints.control.health import (
    DEFAULT_THRESHOLDS,
    HealthMemory,
    HealthProblem,
    HealthThresholds,
    InvalidThresholdError,
    health_of,
)
from dagster_checkpoints.control.last_sign import SILENT_INTERVALS, LastSign, last_sign
from dagster_checkpoints.control.pipeline_control import (
    ControlError,
    NoRunningPipeline,
    PipelineControl,
    RequestFailed,
    RequestHandle,
    RequestTimedOut,
)
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import (
    INVALID_REQUEST,
    NO_RUNNING_PIPELINE,
    Answer,
    AnswerStatus,
    ControlRequest,
    RequestKind,
)
from dagster_checkpoints.control.status import (
    CheckpointCountsStatus,
    CompletedCheckpointStatus,
    FailureStatus,
    InstanceStatus,
    PendingStatus,
    Phase,
    PipelineStatus,
    SilenceStatus,
    SplitsStatus,
    StageStatus,
    StopStatus,
    VertexPart,
    decode_status,
    encode_status,
    read_status,
    watermark_moment,
    write_status,
)

__all__ = [
    "DEFAULT_THRESHOLDS",
    "INVALID_REQUEST",
    "NO_RUNNING_PIPELINE",
    "SILENT_INTERVALS",
    "Answer",
    "AnswerStatus",
    "CheckpointCountsStatus",
    "CompletedCheckpointStatus",
    "ControlError",
    "ControlRequest",
    "FailureStatus",
    "HealthMemory",
    "HealthProblem",
    "HealthThresholds",
    "InstanceStatus",
    "InvalidThresholdError",
    "LastSign",
    "NoRunningPipeline",
    "PendingStatus",
    "Phase",
    "PipelineControl",
    "PipelineStatus",
    "RequestBox",
    "RequestFailed",
    "RequestHandle",
    "RequestKind",
    "RequestTimedOut",
    "SilenceStatus",
    "SplitsStatus",
    "StageStatus",
    "StopStatus",
    "VertexPart",
    "decode_status",
    "encode_status",
    "health_of",
    "last_sign",
    "read_status",
    "watermark_moment",
    "write_status",
]
