"""The properties of a pipeline that the rules of a restore read; `dagster_checkpoints.pipeline.Pipeline` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dagster_checkpoints.pipeline import EdgePattern, StageInput


class StageView(Protocol):
    """The properties of a stage that are read."""

    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def instances(self) -> tuple[str, ...]: ...
    @property
    def split_interval(self) -> float | None: ...
    @property
    def state_partitions(self) -> int | None: ...


class EdgeView(Protocol):
    """The properties of an edge between two stages that are read."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def input(self) -> StageInput: ...
    @property
    def pattern(self) -> EdgePattern: ...


class PipelineView(Protocol):
    """The properties of a pipeline that are read."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> Sequence[StageView]: ...
    @property
    def edges(self) -> Sequence[EdgeView]: ...
