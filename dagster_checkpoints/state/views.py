"""What the rules of a restore ask of a pipeline; `dagster_checkpoints.pipeline.Pipeline` answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dagster_checkpoints.pipeline import EdgePattern, StageInput


class StageView(Protocol):
    """What is asked of a stage."""

    @property
    def name(self) -> str: ...
    @property
    def instances(self) -> tuple[str, ...]: ...


class EdgeView(Protocol):
    """What is asked of an edge between two stages."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def input(self) -> StageInput: ...
    @property
    def pattern(self) -> EdgePattern: ...


class PipelineView(Protocol):
    """What is asked of a pipeline."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> Sequence[StageView]: ...
    @property
    def edges(self) -> Sequence[EdgeView]: ...
