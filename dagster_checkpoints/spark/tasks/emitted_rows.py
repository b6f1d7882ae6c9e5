"""The numbers of rows that the stages of one task have emitted since the job began; None for a number that is not known.

The last stage's rows are counted where they are written, those of the stages before it by Spark, in the query that they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_checkpoints.pipeline import total_rows
from dagster_checkpoints.spark.channels.outputs import TaskOutput
from dagster_checkpoints.state.metadata import TaskSnapshot
from dagster_checkpoints.state.row_counts import rows_in_snapshot


class EmittedRows:
    """The numbers of one task.

    Args:
        stages: The stages of the task's chain, in order; also fused sources that have ended.
        output: Counts the rows of the last stage.
        restored: The task's snapshot; None if the job was not restored.

    Attributes:
        before: The number of rows that the last stage had emitted at the restored checkpoint.
    """

    def __init__(self, stages: Sequence[str], output: TaskOutput, restored: TaskSnapshot | None) -> None:
        *self._inside, self._last = stages
        self._output = output
        self.before = (rows_in_snapshot(restored, self._last) or 0) if restored is not None else 0
        self._rows = {name: rows_in_snapshot(restored, name) if restored is not None else 0 for name in self._inside}

    def add(self, rows: Mapping[str, int | None]) -> None:
        """Add the rows that stages before the last one have emitted in a micro-batch."""
        for name, count in rows.items():
            self._rows[name] = total_rows((self._rows[name], count))

    def of(self, stage: str) -> int | None:
        """The number of rows of a stage."""
        return self.last if stage == self._last else self._rows[stage]

    @property
    def last(self) -> int:
        """The number of rows of the last stage, which is always known."""
        return self.before + self._output.rows

    def all(self) -> dict[str, int | None]:
        """The numbers of all stages."""
        return {**self._rows, self._last: self.last}
