"""The content of a checkpoint. Read `metadata` (the values), `metadata_file` (their versioned form), `recording` (the record of
a layout), `stage_names`, `stages_between` and `divided_chains` (the checkpoint as another version of the
pipeline would have it), `restore`, `chain_layout`, `inputs`, `plans` and `spark_versions` (whether it fits a pipeline and a
Spark), then `redistribution` with `key_groups` (which instance gets which state) and `rescaling` (what else changes with the
instances), and `claim` (who owns a savepoint)."""

from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.divided_chains import ChainPart, QueryOfStreams
from dagster_checkpoints.state.errors import (
    ChainLayoutChanged,
    CorruptMetadata,
    InputRowsGone,
    InputsChanged,
    InstancesChanged,
    InvalidMaxParallelism,
    MaxParallelismChanged,
    NonRestoredState,
    ParallelismTooHigh,
    PartlyFinishedUnionState,
    RestoreError,
    SinkRemoved,
    SourcesChanged,
    SparkVersionChanged,
    StateError,
    StatefulPlanChanged,
    StatePartitionsChanged,
    UnfinishedPredecessor,
    UnknownMetadataVersion,
    UnknownStage,
)
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.instance_matches import InstanceMatch
from dagster_checkpoints.state.key_groups import (
    HIGHEST_MAX_PARALLELISM,
    chosen_max_parallelism,
    default_max_parallelism,
    key_groups_of,
    owner_of,
    partition_of,
)
from dagster_checkpoints.state.keyed_state_shares import KeyedStateShare
from dagster_checkpoints.state.merged_channels import OldChannel, one_after_the_other
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelElement,
    ChannelSnapshot,
    CheckpointMetadata,
    EndOfData,
    EndOfPartition,
    EnumeratorState,
    FusedSourceSnapshot,
    InputMetadata,
    Mark,
    OperatorState,
    PlannedInput,
    PlannedOperator,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    StaticTableSnapshot,
    TaskSnapshot,
    WatermarkAt,
    WatermarkStatus,
    in_flight_files,
    task_files,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.plans import IN_STATE, check_divided_plans, check_sources, check_stateful_plans
from dagster_checkpoints.state.processor_states import ENCODED_AS_AVRO
from dagster_checkpoints.state.recording import ended_sources, recorded_chains, recorded_enumerators, recorded_stages
from dagster_checkpoints.state.redistribution import (
    redistribute_broadcasts,
    redistribute_lists,
    redistribute_operator_states,
    redistribute_unions,
)
from dagster_checkpoints.state.removed_instances import RemovedInstance
from dagster_checkpoints.state.rescaled_channels import RescaledEdge, SegmentShare
from dagster_checkpoints.state.rescaled_checkpoint import RescaledCheckpoint, rescale
from dagster_checkpoints.state.rescaling import least_watermark, rescaled_stages
from dagster_checkpoints.state.restore import RestorePlan, check_union_states, fitted, validate_restore
from dagster_checkpoints.state.row_counts import rows_in_snapshot, rows_of_finished, rows_of_stage
from dagster_checkpoints.state.spark_versions import (
    SUPPORTED_SPARK_TEXT,
    check_spark_version,
    is_supported_spark,
    rewrites_state,
)
from dagster_checkpoints.state.stage_names import with_names_of, with_uids
from dagster_checkpoints.state.stages_between import replaced_inputs, with_stages_now
from dagster_checkpoints.state.views import EdgeView, PipelineView, StageView

__all__ = [
    "ENCODED_AS_AVRO",
    "HIGHEST_MAX_PARALLELISM",
    "IN_STATE",
    "SUPPORTED_SPARK_TEXT",
    "ChainLayoutChanged",
    "ChainMetadata",
    "ChainPart",
    "ChannelElement",
    "ChannelSnapshot",
    "CheckpointMetadata",
    "ClaimMode",
    "CorruptMetadata",
    "EdgeView",
    "EndOfData",
    "EndOfPartition",
    "EnumeratorState",
    "FusedSourceSnapshot",
    "InputMetadata",
    "InputRowsGone",
    "InputsChanged",
    "InstanceMatch",
    "InstancesChanged",
    "InvalidMaxParallelism",
    "KeyedStateShare",
    "Mark",
    "MaxParallelismChanged",
    "NonRestoredState",
    "OldChannel",
    "OperatorState",
    "ParallelismTooHigh",
    "PartlyFinishedUnionState",
    "PipelineView",
    "PlannedInput",
    "PlannedOperator",
    "QueryOfStreams",
    "QuerySnapshot",
    "RemovedInstance",
    "RescaledCheckpoint",
    "RescaledEdge",
    "RestoreError",
    "RestorePlan",
    "Segment",
    "SegmentShare",
    "SinkRemoved",
    "SourcesChanged",
    "SparkVersionChanged",
    "StageInstanceSnapshot",
    "StageMetadata",
    "StageView",
    "StateError",
    "StateFile",
    "StatePartitionsChanged",
    "StatefulPlanChanged",
    "StaticTableSnapshot",
    "TaskSnapshot",
    "UnfinishedPredecessor",
    "UnknownMetadataVersion",
    "UnknownStage",
    "WatermarkAt",
    "WatermarkStatus",
    "check_divided_plans",
    "check_sources",
    "check_spark_version",
    "check_stateful_plans",
    "check_union_states",
    "chosen_max_parallelism",
    "decode",
    "default_max_parallelism",
    "encode",
    "ended_sources",
    "fitted",
    "in_flight_files",
    "is_supported_spark",
    "key_groups_of",
    "least_watermark",
    "one_after_the_other",
    "owner_of",
    "partition_of",
    "recorded_chains",
    "recorded_enumerators",
    "recorded_inputs",
    "recorded_stages",
    "redistribute_broadcasts",
    "redistribute_lists",
    "redistribute_operator_states",
    "redistribute_unions",
    "replaced_inputs",
    "rescale",
    "rescaled_stages",
    "rewrites_state",
    "rows_in_snapshot",
    "rows_of_finished",
    "rows_of_stage",
    "task_files",
    "validate_restore",
    "with_names_of",
    "with_stages_now",
    "with_uids",
]
