"""The rows that a test gives to the sources of a pipeline; values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.pipeline.names import suggestion

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class InvalidTestRowsError(DagsterCheckpointsError):
    """The rows of a test do not fit the pipeline."""


class SourceRows:
    """The rows of one source, or of one of its instances, in steps.

    Args:
        schema: The columns, as Spark writes them: ``"k string, ts timestamp"``.
        steps: The rows of each step: tuples in the order of the columns, dictionaries, or a batch DataFrame. Without a step there
            are no rows.

    Examples:
        >>> SourceRows("who string, at timestamp", [("a", noon)], [("a", noon + hour), ("late", noon - hour)])
    """

    def __init__(self, schema: str, *steps: Sequence[Any] | DataFrame) -> None:
        self.schema = schema
        self.steps = steps or ([],)

    def tables(self, spark: SparkSession, where: str) -> list[pa.Table]:
        """The rows of each step as Arrow's tables.

        Args:
            spark: The session that reads them.
            where: Whose rows they are, for errors.

        Raises:
            InvalidTestRowsError: Rows do not fit the columns.
        """
        found = []
        for step, rows in enumerate(self.steps):
            try:
                frame = spark.createDataFrame(rows, self.schema) if isinstance(rows, Sequence) else rows
                found.append(frame.toArrow())
            except Exception as error:
                raise InvalidTestRowsError(f"The rows of {where}, step {step}, do not fit {self.schema!r}: {error}") from error
        return found


def rows_by_instance(pipeline: Pipeline, inputs: Mapping[str, SourceRows]) -> dict[str, SourceRows]:
    """The rows by ``source[instance]``; a source's own rows are dealt out to its instances in turn.

    Raises:
        InvalidTestRowsError: A source has no rows, an instance has them twice, or a name is unknown.
    """
    sources = {stage.name: stage for stage in pipeline.stages if stage.kind.is_source}
    instances = {instance_name(source, name): source for source in sources.values() for name in source.instances}
    rows: dict[str, SourceRows] = {}
    for name, given in inputs.items():
        if name not in sources and name not in instances:
            raise InvalidTestRowsError(
                f"Expected rows of sources of pipeline {pipeline.name!r}, found {name!r}. "
                f"{suggestion(name, [*sources, *instances])}"
            )
        added = _dealt_out(sources[name], given) if name in sources else {name: given}
        twice = sorted(rows.keys() & added.keys())
        if twice:
            raise InvalidTestRowsError(
                f"Expected the rows of an instance once, found those of {', '.join(twice)} twice: those of the source "
                f"{instances[twice[0]].name!r} are dealt out to all its instances. Give rows to the source, or to each instance"
            )
        rows |= added
    missing = sorted(instances.keys() - rows.keys())
    if missing:
        raise InvalidTestRowsError(
            f"Expected rows of every source of pipeline {pipeline.name!r}, found none of {', '.join(missing)}. "
            'For a source without rows give SourceRows("its columns", [])'
        )
    return rows


def instance_name(source: Stage, instance: str) -> str:
    """An instance of a source, as tests name it."""
    return f"{source.name}[{instance}]"


def _dealt_out(source: Stage, given: SourceRows) -> dict[str, SourceRows]:
    number = source.parallelism
    if number == 1:
        return {instance_name(source, source.instances[0]): given}
    parts = [
        [step[index::number] if isinstance(step, Sequence) else step if index == 0 else [] for step in given.steps]
        for index in range(number)
    ]
    return {
        instance_name(source, name): SourceRows(given.schema, *part) for name, part in zip(source.instances, parts, strict=True)
    }
