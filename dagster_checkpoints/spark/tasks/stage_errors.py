"""Turns the errors of a task into errors of its stages, with the instance and the line in the user's code.

It must not know the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.errors import AnalysisException, ParseException

from dagster_checkpoints.spark.errors import (
    QueryStoppedError,
    SourceRefusedError,
    SourceRowsLostError,
    StageError,
    StageFailedError,
    StagePlanFailedError,
)
from dagster_checkpoints.spark.query.error_location import own_line, stage_of
from dagster_checkpoints.spark.query.query import QueryStopped
from dagster_checkpoints.spark.query.query_guard import refusing_queries
from dagster_checkpoints.spark.query.spark_advice import advice_on_failed_query, lost_rows, refused_by_source
from dagster_checkpoints.spark.tasks.task_parts import StageInstance

_MAY_APPEAR = frozenset({"PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND"})
"""Spark's names of errors about a missing path, table or schema: it may exist in another attempt."""


class StageErrors:
    """Explains the errors of a chain's stages in one task.

    Args:
        instances: The stages of the chain in this task.
    """

    def __init__(self, instances: Sequence[StageInstance]) -> None:
        self._instances = tuple(instances)

    @contextmanager
    def running(self, instance: StageInstance) -> Iterator[None]:
        """Turn errors raised in the block into errors of this stage.

        Raises:
            StageFailedError: The block raised an error that is not a StageError.
        """
        try:
            with refusing_queries(instance.call):
                yield
        except Exception as error:
            if isinstance(error, StageError):
                raise
            raise self._failed(instance, error) from error

    def explain(self, error: BaseException) -> BaseException:
        """Turn an error of the query, or of the task itself, into an error of the stage whose code raised it."""
        if isinstance(error, StageError):
            return error
        if isinstance(error, QueryStopped):
            return self._stopped()
        stages = [instance.stage for instance in self._instances]
        stage = stages[0] if lost_rows(error) or refused_by_source(error) else stage_of(error, stages)
        failed = self._failed(next((i for i in self._instances if i.stage is stage), self._instances[-1]), error)
        failed.__cause__ = error
        return failed

    def _stopped(self) -> QueryStoppedError:
        tail = self._instances[-1]
        return QueryStoppedError(
            tail.stage.name,
            tail.call.context.instance,
            f"expected its query{self._within()} to run until its input has ended or the pipeline stops it, found that it was "
            "stopped from outside, without an error: by stop() of a query in spark.streams.active, or by the end of the Spark "
            "session. Rows that it has not read yet are missing, so the job restarts from its latest checkpoint. Do not stop the "
            "pipeline's queries; stop the pipeline (suspend, drain or terminate).",
        )

    def _within(self) -> str:
        names = " -> ".join(i.stage.name for i in self._instances)
        return f" (in the query of {names})" if len(self._instances) > 1 else ""

    def _failed(self, instance: StageInstance, error: BaseException) -> StageFailedError:
        stage = instance.stage
        kind = _kind(error)
        advice = advice_on_failed_query(error)
        advice = f"{advice}\n" if advice else ""
        return kind(
            stage.name,
            instance.call.context.instance,
            f"failed{self._within()}: {advice}{type(error).__name__}: {error}\n  at {own_line(error, stage.location.file)}",
        )


def _kind(error: BaseException) -> type[StageFailedError]:
    if lost_rows(error):
        return SourceRowsLostError
    if refused_by_source(error):
        return SourceRefusedError
    return StagePlanFailedError if _is_wrong_plan(error) else StageFailedError


def _is_wrong_plan(error: BaseException) -> bool:
    return isinstance(error, AnalysisException | ParseException) and error.getCondition() not in _MAY_APPEAR
