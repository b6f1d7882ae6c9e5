"""The instance of a stage that tests of single sinks write for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dagster_checkpoints.sinks import SinkContext

BATCH: Any = SimpleNamespace()
"""Stands for a micro-batch whose DataFrame the sink does not ask for."""


def context(**changes: Any) -> SinkContext:
    """The context of the only instance of a stage, with changes."""
    values: dict[str, Any] = {
        "pipeline": "flights",
        "stage": "delays",
        "instance": "0",
        "index": 0,
        "parallelism": 1,
        "job_id": 1,
        "attempt": "a1",
        "history": "h1",
        "epoch": 1,
    }
    return SinkContext(**{**values, **changes})
