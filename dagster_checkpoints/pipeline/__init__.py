"""Floor 1, pure: the definition of a pipeline by its user, its checks, and the graph that follows from it.

Read `stages.py` and `decorators.py` (what a user writes; `edges.py`, `event_time.py` and `context.py` hold its parts), then
`graph.py` (the pipeline as a whole), then `chains.py` (which stages share a query, and the execution graph) and `channels.py`
(the channels between the chains' tasks). No module of this package may import Spark or Dagster, read a clock, start a thread or
open a file.
"""

from __future__ import annotations

from dagster_checkpoints.pipeline.chains import (
    Chain,
    ExecutionGraph,
    TaskId,
    Vertex,
    VertexEdge,
    build_chains,
    chain_obstacle,
    execution_graph,
)
from dagster_checkpoints.pipeline.channels import ChannelGroup, ChannelId, channel_groups
from dagster_checkpoints.pipeline.context import BroadcastState, ListState, OperatorStates, StageContext
from dagster_checkpoints.pipeline.decorators import FunctionStage, bounded_source, stage, unbounded_source
from dagster_checkpoints.pipeline.edges import (
    EdgePattern,
    StageInput,
    pointwise_consumers,
    pointwise_producers,
)
from dagster_checkpoints.pipeline.errors import PipelineDefinitionError
from dagster_checkpoints.pipeline.event_time import Watermark, interval_ms
from dagster_checkpoints.pipeline.graph import Pipeline, StageEdge
from dagster_checkpoints.pipeline.signatures import SourceLocation
from dagster_checkpoints.pipeline.stages import OutputMode, Stage, StageKind

__all__ = [
    "BroadcastState",
    "Chain",
    "ChannelGroup",
    "ChannelId",
    "EdgePattern",
    "ExecutionGraph",
    "FunctionStage",
    "ListState",
    "OperatorStates",
    "OutputMode",
    "Pipeline",
    "PipelineDefinitionError",
    "SourceLocation",
    "Stage",
    "StageContext",
    "StageEdge",
    "StageInput",
    "StageKind",
    "TaskId",
    "Vertex",
    "VertexEdge",
    "Watermark",
    "bounded_source",
    "build_chains",
    "chain_obstacle",
    "channel_groups",
    "execution_graph",
    "interval_ms",
    "pointwise_consumers",
    "pointwise_producers",
    "stage",
    "unbounded_source",
]
