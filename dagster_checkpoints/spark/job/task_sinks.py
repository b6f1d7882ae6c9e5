"""Makes the sinks of one attempt's tasks. It must not know what tasks do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import REFUSED_IN_CHECKPOINT, Pipeline, Stage
from dagster_checkpoints.sinks import SinkContext
from dagster_checkpoints.spark.files.work_path import WorkFolder
from dagster_checkpoints.spark.job.runtime import AttemptSettings
from dagster_checkpoints.spark.query.stage_inputs import table_dataframe
from dagster_checkpoints.spark.tasks.commit_checks import CommitChecks
from dagster_checkpoints.spark.tasks.task_sink import HeldRows, TaskSink, sink_context
from dagster_checkpoints.state.fitted_checkpoint import SettledInstance
from dagster_checkpoints.state.metadata import LastCommit
from dagster_checkpoints.storage.ownership import Ownership

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class SettledSink:
    """A sink of an instance that does not run: before tasks start, it shows exactly the rows of the restored checkpoint.

    Attributes:
        sink: The sink, not opened.
        transactions: The transactions in the restored checkpoint.
        files: The fetched files of a savepoint's transactions, by position and name.
    """

    sink: TaskSink
    transactions: tuple[str, ...] = ()
    files: Mapping[int, Mapping[str, Path]] = field(default_factory=dict)


class TaskSinks:
    """Makes sinks.

    Args:
        pipeline: The pipeline.
        spark: The session in which the tasks run.
        ownership: The run's ownership of the pipeline; None if plans are only checked.
        settings: The attempt's settings.
    """

    def __init__(self, pipeline: Pipeline, spark: SparkSession, ownership: Ownership | None, settings: AttemptSettings) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._ownership = ownership
        self._settings = settings

    def of_instance(
        self, stage: Stage, index: int, schema: StructType, folder: WorkFolder, committed: LastCommit | None = None
    ) -> TaskSink | None:
        """The sink of an instance of a stage, not opened; None if the stage has none.

        Args:
            stage: The stage.
            index: The index of the instance.
            schema: The schema of the stage's rows.
            folder: The task's directory.
            committed: What it had committed last in the restored checkpoint; None if nothing is known of that.
        """
        if stage.sink is None:
            return None
        context = self._context(stage, index, committed)
        read = partial(table_dataframe, self._spark, schema)
        checks = held = None
        if stage.checks or stage.quarantine is not None or self._settings.options.sample_rows:
            checks = CommitChecks(stage.checks, stage.instances[index], self._settings.options.sample_rows, read)
        if stage.takes_refused_rows:
            held = HeldRows(folder.work / "held", REFUSED_IN_CHECKPOINT, read)
        return TaskSink(stage.sink.new_instance(), context, self._spark, schema, folder.scratch / "sink", checks, held)

    def settled(self, instance: SettledInstance, schema: StructType, folder: WorkFolder) -> TaskSink:
        """The sink of an instance that does not run, not opened.

        Args:
            instance: The instance.
            schema: The schema of the stage's rows.
            folder: A directory of its own.
        """
        stage = self._pipeline.stage(instance.stage)
        assert stage.sink is not None
        context = replace(
            self._context(stage, 0, instance.snapshot.committed),
            instance=instance.name,
            index=instance.index,
            parallelism=instance.parallelism,
            attempt=self._settings.token_of_instance(instance.index),
        )
        return TaskSink(stage.sink.new_instance(), context, self._spark, schema, folder.scratch / "sink")

    def _context(self, stage: Stage, index: int, committed: LastCommit | None) -> SinkContext:
        attempt = self._settings.token_of_instance(index)
        return sink_context(self._pipeline, stage, index, self._ownership, self._settings.job_id, attempt, committed)
