"""The result of checking a pipeline without running it: which stages' plans can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql.types import StructType

from dagster_checkpoints.pipeline import Chain
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.state.errors import RestoreError


@dataclass
class PlanReport:
    """Which stages' plans can run.

    Attributes:
        chains: The stages that share a Spark query.
        passed: Stages with a plan that can run, in the order in which they were checked.
        failed: The error of each stage whose plan cannot run.
        unchecked: For each stage that could not be checked, the stage that has to be corrected first.
        changed: Plans that do not fit the state of the checkpoint, if the plans were compared with one.
        warnings: Warnings of the stages and the checks.
        apart: By stage that could have shared the query of the stages that it reads, why it begins one of its own.
        changes: What a restore makes of the queries of the checkpoint, in words.
        schemas: The columns of the rows of each stage, as far as they are known.
    """

    chains: tuple[Chain, ...]
    passed: dict[str, None] = field(default_factory=dict)
    failed: dict[str, StageError] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    changed: list[RestoreError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    apart: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    schemas: Mapping[str, StructType] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every plan can run."""
        return not self.failed and not self.changed

    def fail(self, stages: Sequence[str], error: StageError) -> None:
        """Record the error of one stage of a chain: earlier stages passed, later stages could not be checked."""
        at = list(stages).index(error.stage) if error.stage in stages else 0
        self.passed.update(dict.fromkeys(stages[:at]))
        self.failed[stages[at]] = error
        self.skip(stages[at + 1 :], stages[at])

    def refuse(self, error: StageError) -> None:
        """Record an error of a stage whose plan can run."""
        self.passed.pop(error.stage, None)
        self.failed[error.stage] = error

    def skip(self, stages: Sequence[str], because_of: str) -> None:
        """Record stages that could not be checked, since the columns of a stage that they read are not known."""
        first = self.unchecked.get(because_of, because_of)
        self.unchecked.update(dict.fromkeys(stages, first))
