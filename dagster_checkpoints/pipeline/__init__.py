"""Floor 1, pure: the definition of a pipeline by its user, its checks, and the graph that follows from it.

Read `stages.py` and `decorators.py` (what a user writes; `edges.py`, `event_time.py` and `context.py` hold its parts), then
`graph.py` (the pipeline as a whole), then `chains.py` (which stages share a query, and the execution graph), `channels.py`
(the channels between the chains' tasks, and which tasks restart together). No module of this package may import
Spark or Dagster, read a clock, start a thread or open a file.
"""

from __future__ import annotations

from dagster_checkpoints.pipeline.chains import (
    Chain,
    ExecutionGraph,
    TaskId,
    Vertex,
    VertexEdge,
    build_chains,
    channel_reasons,
    execution_graph,
    fused_in,
    fused_sources,
    joining_obstacle,
    links,
    merging_in,
    merging_stage,
)
from dagster_checkpoints.pipeline.channels import ChannelGroup, ChannelId, channel_groups, connected_regions
from dagster_checkpoints.pipeline.checks import CheckEvaluation, CommitCheck, CommitCheckResult, commit_check
from dagster_checkpoints.pipeline.context import BroadcastState, InputAsset, ListState, OperatorStates, StageContext
from dagster_checkpoints.pipeline.decorators import FunctionStage, bounded_source, stage, unbounded_source
from dagster_checkpoints.pipeline.edges import (
    EdgePattern,
    StageInput,
    pointwise_consumers,
    pointwise_producers,
)
from dagster_checkpoints.pipeline.errors import PipelineDefinitionError, UnknownStageError
from dagster_checkpoints.pipeline.event_time import Watermark, interval_ms
from dagster_checkpoints.pipeline.graph import Pipeline, StageEdge
from dagster_checkpoints.pipeline.quarantine import REFUSED_BY, REFUSED_IN_CHECKPOINT, Condition, Quarantine, RefusedRowLimit
from dagster_checkpoints.pipeline.refused_rows import RefusedRows
from dagster_checkpoints.pipeline.signatures import SourceLocation
from dagster_checkpoints.pipeline.split_sources import DiscoveryContext, FunctionSplitSource, SplitSource, split_source
from dagster_checkpoints.pipeline.stage_rows import StageRows, UnknownRowsError, total_rows
from dagster_checkpoints.pipeline.stages import OutputMode, Stage, StageKind
from dagster_checkpoints.pipeline.watermark_reach import WatermarkReach, watermark_reach

__all__ = [
    "REFUSED_BY",
    "REFUSED_IN_CHECKPOINT",
    "BroadcastState",
    "Chain",
    "ChannelGroup",
    "ChannelId",
    "CheckEvaluation",
    "CommitCheck",
    "CommitCheckResult",
    "Condition",
    "DiscoveryContext",
    "EdgePattern",
    "ExecutionGraph",
    "FunctionSplitSource",
    "FunctionStage",
    "InputAsset",
    "ListState",
    "OperatorStates",
    "OutputMode",
    "Pipeline",
    "PipelineDefinitionError",
    "Quarantine",
    "RefusedRowLimit",
    "RefusedRows",
    "SourceLocation",
    "SplitSource",
    "Stage",
    "StageContext",
    "StageEdge",
    "StageInput",
    "StageKind",
    "StageRows",
    "TaskId",
    "UnknownRowsError",
    "UnknownStageError",
    "Vertex",
    "VertexEdge",
    "Watermark",
    "WatermarkReach",
    "bounded_source",
    "build_chains",
    "channel_groups",
    "channel_reasons",
    "commit_check",
    "connected_regions",
    "execution_graph",
    "fused_in",
    "fused_sources",
    "interval_ms",
    "joining_obstacle",
    "links",
    "merging_in",
    "merging_stage",
    "pointwise_consumers",
    "pointwise_producers",
    "split_source",
    "stage",
    "total_rows",
    "unbounded_source",
    "watermark_reach",
]
