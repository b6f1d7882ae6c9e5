"""The errors that a pipeline's run shows to its user."""

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
    """A stage's function returned a value that is not a DataFrame, or a batch where a stream was expected."""

    repeats: ClassVar[bool] = True


class StageWatermarkError(StageError):
    """A stage declares a second watermark on an input that already carries one: Spark forbids that, at run time."""

    repeats: ClassVar[bool] = True


class EventTimeError(StageError):
    """The event time of a stage's output is not a top-level TIMESTAMP column."""

    repeats: ClassVar[bool] = True


class EventTimeHeldBackError(StageError):
    """A stage waits for event time, and one of the sources that it reads declares no watermark, which holds it back."""

    repeats: ClassVar[bool] = True


class PlanRefusedError(StageError):
    """Spark refuses the stage's plan as a streaming query."""

    repeats: ClassVar[bool] = True


class StatePartitionsError(StageError):
    """A stage declares `state_partitions`, and keeps state with another key than the column by which its rows are routed."""

    repeats: ClassVar[bool] = True


class KeyTypesError(StageError):
    """The inputs of a stage with several instances are routed by keys whose equal values have several hashes, or none."""

    repeats: ClassVar[bool] = True


class StageStreamError(StageError):
    """A derived stage reads a stream that is not one of its inputs."""

    repeats: ClassVar[bool] = True


class StageSettingError(StageError):
    """A stage's function changes a setting of the job's session that decides the rows of other stages, too."""

    repeats: ClassVar[bool] = True


class StageQueryError(StageError):
    """A stage's function starts a streaming query itself; only the runtime starts queries."""

    repeats: ClassVar[bool] = True


class SourceActsOnCommitError(StageError):
    """A source deletes or acknowledges its input when Spark commits a batch, before the global checkpoint completes."""

    repeats: ClassVar[bool] = True


class NamedSourceError(StageError):
    """A source has a name of Spark's own (`readStream.name`), under which Spark would keep its offsets."""

    repeats: ClassVar[bool] = True


class SourcePathError(StageError):
    """Spark's file stream takes a path for a pattern: it would not read its files, or read them more than once."""

    repeats: ClassVar[bool] = True


class SourceOptionsError(StageError):
    """Spark refuses the options of a file stream when its query starts, at each start again."""

    repeats: ClassVar[bool] = True


class OffsetCommitError(StageError):
    """A source is to commit its offsets to a consumer group, and is not Kafka's, or names no group."""

    repeats: ClassVar[bool] = True


class EndlessSourceError(StageError):
    """A bounded source reads rows that the clock makes: they have no end."""

    repeats: ClassVar[bool] = True


class StageSinkError(StageError):
    """A stage's sink cannot be written, or does not take the stage's rows: found before a run."""

    repeats: ClassVar[bool] = True


class StageFailedError(StageError):
    """A stage raised while it ran."""


class StagePlanFailedError(StageFailedError):
    """A stage raised while it ran because Spark refuses its plan, for example a column that does not exist."""

    repeats: ClassVar[bool] = True


class SourceFileError(StageFailedError):
    """A file of a source has a column of another type than the source's schema says."""

    repeats: ClassVar[bool] = True


class LostRows(DagsterCheckpointsError):
    """Base of errors of the plugin's own sources that their stage reports as :class:`SourceRowsLostError`."""

    repeats: ClassVar[bool] = True


class SourceRowsLostError(StageFailedError):
    """A source no longer has the rows after the restored checkpoint, for example because Kafka's retention has deleted them."""

    repeats: ClassVar[bool] = True


class SourceRefusedError(StageFailedError):
    """A source of the plugin cannot read what it found: a value does not fit its column's type, or the table was changed."""

    repeats: ClassVar[bool] = True


class QueryStoppedError(StageError):
    """A stage's query was stopped by other code than the runtime: it ended without an error, before the end of its input."""


class EndlessTimersError(StageError):
    """At the end of data, event-time timers set further timers without end."""


class TimerRowsDroppedError(StageError):
    """At the end of data, timers emitted rows for an operator of the same query that had emitted its last rows."""


class SnapshotError(DagsterCheckpointsError):
    """A task's state could not be collected completely: the checkpoint is declined, the task keeps running."""


class OperatorStateError(DagsterCheckpointsError):
    """A value of `context.state` is not of the type that the stage uses the state with."""

    repeats: ClassVar[bool] = True


class StageQuarantineError(StageError):
    """A condition of a stage's quarantine cannot be evaluated over its rows, or a column has a name that refused rows need."""


class CommitCheckFailedError(DagsterCheckpointsError):
    """Rows did not pass a blocking check: the checkpoint that would commit them is declined, the task keeps running."""


class JobFailedError(DagsterCheckpointsError):
    """The job failed, and its restart strategy does not allow another attempt."""


class TraceError(DagsterCheckpointsError):
    """The run's trace cannot be written to the directory that the setting `trace` names; nothing was started."""


class SelectionError(DagsterCheckpointsError):
    """A stage that was left out of the run, or of the step, has not finished, so the selected stages cannot run."""

    repeats: ClassVar[bool] = True


class RestoredSchemaError(DagsterCheckpointsError):
    """A finished stage's output schema is not in the checkpoint, so its consumers cannot be restored."""

    repeats: ClassVar[bool] = True
