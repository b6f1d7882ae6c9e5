"""Turns the errors of a task into errors of its stages, with the instance and the line in the user's code.

It must not know the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException

from dagster_checkpoints.pipeline import Stage
from dagster_checkpoints.spark.errors import (
    QueryStoppedError,
    SourceFileError,
    SourceRefusedError,
    SourceRowsLostError,
    StageError,
    StageFailedError,
    StagePlanFailedError,
)
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.query.error_location import located, stage_of
from dagster_checkpoints.spark.query.error_text import (
    UnreadableFile,
    advice_on_failed_query,
    lost_rows,
    query_files_error,
    refused_by_source,
    source_of_file,
    unreadable_file,
)
from dagster_checkpoints.spark.query.query import QueryStopped
from dagster_checkpoints.spark.query.stage_calls import refusing_queries
from dagster_checkpoints.spark.tasks.task_parts import StageInstance

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MAY_APPEAR = frozenset({"PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND"})
"""Spark's names of errors about a missing path, table or schema: it may exist in another attempt."""


class StageErrors:
    """Explains the errors of a chain's stages in one task.

    Args:
        instances: The stages of the chain in this task.
        outputs: The result of each stage, as far as plans are known: it says which source reads a file.
        files: The directory of the query's own files; None if there is no query.
    """

    def __init__(
        self,
        instances: Sequence[StageInstance],
        outputs: Mapping[str, DataFrame] = MappingProxyType({}),
        files: WorkPath | None = None,
    ) -> None:
        self._instances = tuple(instances)
        self._outputs = outputs
        self._files = files

    @contextmanager
    def running(self, instance: StageInstance) -> Iterator[None]:
        """Turn errors raised in the block into errors of this stage.

        Raises:
            StageFailedError: The block raised an error that is not a StageError.
        """
        try:
            with refusing_queries(instance.stage, instance.call.context.instance):
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
        try:
            of_files = query_files_error(error, self._files) if self._files is not None else None
            failed = self._explained(of_files or error)
        except Exception as unreadable:  # of Spark's errors the text is in the JVM, which may have ended by now
            failed = self._without_text(error, unreadable)
        failed.__cause__ = error
        return failed

    def _explained(self, error: BaseException) -> StageFailedError:
        unreadable = unreadable_file(error)
        if unreadable is not None:
            return self._unreadable(unreadable)
        stages = [instance.stage for instance in self._instances]
        of_source = lost_rows(error) or refused_by_source(error)
        return self._failed(self._of(stages[0] if of_source else stage_of(error, stages)), error)

    def _without_text(self, error: BaseException, unreadable: Exception) -> StageFailedError:
        tail = self._instances[-1]
        text = f"failed{self._within()} with {type(error).__name__}, whose text cannot be read ({type(unreadable).__name__})"
        return StageFailedError(tail.stage.name, tail.call.context.instance, f"{text}. Spark's Java process may have ended")

    def _of(self, stage: Stage | None) -> StageInstance:
        return next((each for each in self._instances if each.stage is stage), self._instances[-1])

    def _unreadable(self, found: UnreadableFile) -> StageFailedError:
        sources = {each.stage.name: each.stage for each in self._instances if each.stage.kind.is_source}
        frames = {name: self._outputs[name] for name in sources if name in self._outputs}
        name = source_of_file(found.file, frames) or (next(iter(sources)) if len(sources) == 1 else None)
        instance = self._of(sources[name] if name is not None else None)
        kind = SourceFileError if found.repeats else StageFailedError
        text = f"failed{self._within()} in the stage that {instance.stage.location} defines: {found.text}"
        return kind(instance.stage.name, instance.call.context.instance, text)

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
        text = located(error, stage, advice_on_failed_query(error))
        return _kind(error)(stage.name, instance.call.context.instance, f"failed{self._within()} {text}")


def _kind(error: BaseException) -> type[StageFailedError]:
    if lost_rows(error):
        return SourceRowsLostError
    if refused_by_source(error):
        return SourceRefusedError
    return StagePlanFailedError if _is_wrong_plan(error) else StageFailedError


def _is_wrong_plan(error: BaseException) -> bool:
    return isinstance(error, AnalysisException | ParseException) and error.getCondition() not in _MAY_APPEAR
