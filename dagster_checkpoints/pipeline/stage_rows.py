"""The numbers of rows that the stages of a pipeline have emitted, as conditions and displays read them.

A number may not be known. Then it is None, never 0: a condition that waits for it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline.errors import UnknownStageError
from dagster_checkpoints.pipeline.names import suggestion

_BECAUSE = (
    "it shares a query with the stage that reads it, and either Spark evaluates its rows more than once there (a Cartesian "
    "product with a table, or repartitionByRange), or the job goes on from a checkpoint of a release that did not count them"
)


class UnknownRowsError(DagsterCheckpointsError):
    """A condition asks for the number of rows of a stage for which it is not known."""


def total_rows(counts: Iterable[int | None]) -> int | None:
    """The sum of numbers of rows; None if one of them is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


class StageRows(Mapping[str, int]):
    """By stage, the number of rows that it has emitted since the job began, over all runs.

    To ask for the rows of a stage that the pipeline does not have, or for a number that is not known, is an error also with
    `get`: a default would let a condition wait for ever.

    Args:
        counts: By stage of the pipeline, the number; None if it is not known.

    Raises:
        UnknownStageError: By each access: the pipeline has no such stage.
        UnknownRowsError: By each access: the stage's number is not known.
    """

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        self._counts = dict(counts)

    def __getitem__(self, stage: str) -> int:
        if stage not in self._counts:
            raise UnknownStageError(
                f"A condition asks for the rows of stage {stage!r}, which the pipeline does not have. "
                f"{suggestion(stage, self._counts)}"
            )
        rows = self._counts[stage]
        if rows is None:
            known = [name for name, count in self._counts.items() if count is not None]
            raise UnknownRowsError(
                f"A condition asks for the rows of stage {stage!r}, whose number is not known: {_BECAUSE}. Use the rows of "
                f"another stage ({', '.join(map(repr, known))}), or give each stage a query of its own: "
                "Pipeline(..., chaining=False), in a new job."
            )
        return rows

    def __contains__(self, stage: object) -> bool:
        return stage in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        return f"StageRows({self._counts})"
