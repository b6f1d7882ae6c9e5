"""Errors of a task, in the words of its stages: which one, which instance, which line of the user's.

It must not know the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.errors import AnalysisException, ParseException

from dagster_checkpoints.spark.errors import QueryStoppedError, StageError, StageFailedError, StagePlanFailedError
from dagster_checkpoints.spark.query.error_location import own_line, stage_of
from dagster_checkpoints.spark.query.query import QueryStopped
from dagster_checkpoints.spark.query.query_guard import refusing_queries
from dagster_checkpoints.spark.query.spark_advice import advice_on_failed_query
from dagster_checkpoints.spark.tasks.task_parts import StageInstance

_MAY_APPEAR = frozenset({"PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND"})
"""Spark's names of errors about what is not there yet, or not any more: it may be there in another attempt."""


class StageErrors:
    """Explains the errors of a chain's stages in one task."""

    def __init__(self, instances: Sequence[StageInstance]) -> None:
        self._instances = tuple(instances)

    @contextmanager
    def running(self, instance: StageInstance) -> Iterator[None]:
        """Errors raised within are this stage's own.

        Raises:
            StageFailedError: For any other error than a StageError.
        """
        try:
            with refusing_queries(instance.call):
                yield
        except Exception as error:
            if isinstance(error, StageError):
                raise
            raise self._failed(instance, error) from error

    def explain(self, error: BaseException) -> BaseException:
        """An error of the query, or of the task itself, as that of the stage within whose code it was raised."""
        if isinstance(error, StageError):
            return error
        if isinstance(error, QueryStopped):
            return self._stopped()
        found = stage_of(error, [instance.stage for instance in self._instances])
        failed = self._failed(next((i for i in self._instances if i.stage is found), self._instances[-1]), error)
        failed.__cause__ = error
        return failed

    def _stopped(self) -> QueryStoppedError:
        tail = self._instances[-1]
        return QueryStoppedError(
            tail.stage.name,
            tail.call.context.instance,
            f"expected its query{self._within()} to run until its input has ended or the pipeline stops it, found that it was "
            "stopped from outside, without an error: by stop() of a query in spark.streams.active, or by the end of the Spark "
            "session. Rows that it has not read yet are missing, so the job goes back to its latest checkpoint. Do not stop the "
            "pipeline's queries; stop the pipeline (suspend, drain or terminate).",
        )

    def _within(self) -> str:
        names = " -> ".join(i.stage.name for i in self._instances)
        return f" (in the query of {names})" if len(self._instances) > 1 else ""

    def _failed(self, instance: StageInstance, error: BaseException) -> StageFailedError:
        stage = instance.stage
        kind = StagePlanFailedError if _is_wrong_plan(error) else StageFailedError
        advice = advice_on_failed_query(error)
        advice = f"{advice}\n" if advice else ""
        return kind(
            stage.name,
            instance.call.context.instance,
            f"failed{self._within()}: {advice}{type(error).__name__}: {error}\n  at {own_line(error, stage.location.file)}",
        )


def _is_wrong_plan(error: BaseException) -> bool:
    return isinstance(error, AnalysisException | ParseException) and error.getCondition() not in _MAY_APPEAR
