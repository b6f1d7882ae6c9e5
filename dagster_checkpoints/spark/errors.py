"""The errors that a running pipeline shows its user."""

from __future__ import annotations

from typing import ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.execution.start_point import NothingToRestoreError as NothingToRestoreError


class StageError(DagsterCheckpointsError):
    """A stage cannot be built or run; the text names the stage, the instance and the user's own line."""

    def __init__(self, stage: str, instance: str, text: str) -> None:
        super().__init__(f"Stage {stage!r} (instance {instance!r}): {text}")
        self.stage = stage
        self.instance = instance


class StageResultError(StageError):
    """A stage's function returned something that is no DataFrame, or a batch where a stream was expected."""

    repeats: ClassVar[bool] = True


class StageWatermarkError(StageError):
    """A stage declares a watermark of its own on an input that carries one: Spark forbids a second one, at run time."""

    repeats: ClassVar[bool] = True


class EventTimeError(StageError):
    """The event time of a stage's output is no top-level TIMESTAMP column."""

    repeats: ClassVar[bool] = True


class PlanRefusedError(StageError):
    """Spark refuses the stage's plan as a streaming query."""

    repeats: ClassVar[bool] = True


class StageStreamError(StageError):
    """A derived stage reads a stream that is none of its inputs."""

    repeats: ClassVar[bool] = True


class StageQueryError(StageError):
    """A stage starts a streaming query of its own."""

    repeats: ClassVar[bool] = True


class SourceActsOnCommitError(StageError):
    """A source that deletes or acknowledges its input when Spark commits a batch, before our checkpoint completes."""

    repeats: ClassVar[bool] = True


class StageFailedError(StageError):
    """A stage raised while it ran."""


class StagePlanFailedError(StageFailedError):
    """A stage raised while it ran because Spark refuses what it asks for, such as a column that is not there."""

    repeats: ClassVar[bool] = True


class QueryStoppedError(StageError):
    """A stage's query was stopped from outside: it ended without an error and without having read its input to the end."""


class EndlessTimersError(StageError):
    """At the end of data, event-time timers set timers again and again."""


class TimerRowsDroppedError(StageError):
    """At the end of data, timers emitted rows for an operator of the same query that had emitted its last rows."""


class SnapshotError(DagsterCheckpointsError):
    """A task's state could not be collected whole: the checkpoint is declined, the task runs on."""


class JobFailedError(DagsterCheckpointsError):
    """The job failed, and its restart strategy does not allow another attempt."""


class SelectionError(DagsterCheckpointsError):
    """A stage that was left out of the run has not finished, so the selected ones cannot run."""

    repeats: ClassVar[bool] = True


class RestoredSchemaError(DagsterCheckpointsError):
    """A finished stage's output schema is not in the checkpoint, so its consumers cannot be restored."""

    repeats: ClassVar[bool] = True


class StopFailedError(DagsterCheckpointsError):
    """A stop with savepoint has failed in a way after which the job has to start again from its latest checkpoint."""
