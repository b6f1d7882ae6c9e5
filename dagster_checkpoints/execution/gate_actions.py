"""The actions of an input gate: what its task has to do. A part of the input gate, as a list of types only."""

from __future__ import annotations

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AbortAlignment
from dagster_checkpoints.execution.gate_snapshots import InputsCaptured, PinDue
from dagster_checkpoints.execution.task_events import (
    AddToTable,
    BuildQuery,
    DropSnapshot,
    EvaluateOnce,
    Forward,
    HoldQuery,
    OpenTo,
    StartQuery,
    WatermarkReached,
)

GateAction = (
    BuildQuery
    | StartQuery
    | EvaluateOnce
    | OpenTo
    | AddToTable
    | Forward
    | WatermarkReached
    | HoldQuery
    | PinDue
    | InputsCaptured
    | DropSnapshot
    | AbortAlignment
    | life.EndOfDataReceived
)
