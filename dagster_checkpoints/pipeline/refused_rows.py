"""The stages of refused rows, which a pipeline adds to the stages with a quarantine.

To the rest of the plugin such a stage is a stage: it has an asset, a task, a place in checkpoints. Two things are different: over
its only edge it gets the rows that the stage in front refuses (`StageEdge.refused`), and no barrier overtakes them there
(`execution.task_machine.config_of_task`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.pipeline.context import StageContext
from dagster_checkpoints.pipeline.edges import StageInput
from dagster_checkpoints.pipeline.quarantine import REFUSED_IN_CHECKPOINT
from dagster_checkpoints.pipeline.signatures import SourceLocation
from dagster_checkpoints.pipeline.stages import Stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class RefusedRows(Stage):
    """Commits the rows that a stage refuses.

    Args:
        of: The stage, which has a quarantine.
    """

    takes_refused_rows = True

    def __init__(self, of: Stage) -> None:
        assert of.quarantine is not None
        self._of = of
        super().__init__(
            of.quarantine.name or f"{of.name}_refused",
            uid=f"{of.uid}_refused",
            inputs={of.name: StageInput()},
            instances=of.instances,
            sink=of.quarantine.sink,
        )

    def transform(self, context: StageContext, **inputs: Any) -> DataFrame:
        """Add the column of the checkpoint, which is written into it when the rows are pre-committed."""
        (rows,) = inputs.values()
        found: DataFrame = rows.selectExpr("*", f"CAST(NULL AS BIGINT) AS {REFUSED_IN_CHECKPOINT}")
        return found

    @property
    def description(self) -> str:
        """What the stage is for."""
        assert self._of.quarantine is not None
        return f"Rows of {self._of.name} that do not meet its conditions: {', '.join(self._of.quarantine.conditions)}."

    def _location(self) -> SourceLocation:
        return self._of.location


def with_refused_rows(stages: Iterable[object]) -> list[object]:
    """The stages, and behind each stage with a quarantine the stage of the rows that it refuses, made from it.

    Args:
        stages: The stages; stages of refused rows among them, as those of another pipeline, are made again.
    """
    found: list[object] = []
    for each in (each for each in stages if not isinstance(each, RefusedRows)):
        found.append(each)
        if isinstance(each, Stage) and each.quarantine is not None:
            found.append(RefusedRows(each))
    return found
